"""The interpreter's switch interval, short while any run has stores at work.

A store's thread asks for the interpreter lock a few times per transfer, and
each time waits for this interval while the chain runs short Python steps:
5 ms by default, more than a transfer takes.

The interval belongs to the whole process, and runs overlap in threads.  Each
that set it back to what it had found would leave another's value behind.  So
the users are counted here: the first one shortens the interval, the last one
restores it.
"""

from __future__ import annotations

import os
import sys
import threading

_SHORT_S = 5e-4

_lock = threading.Lock()
_users: set[int] = set()
_before_s = _ours_s = 0.0


def shorten(user: object) -> None:
    """Shorten the switch interval until `restore(user)`.  A second call is a no-op."""
    global _before_s, _ours_s
    with _lock:
        if not _users:
            _before_s = sys.getswitchinterval()
            _users.add(id(user))  # before the change: interrupted here, `restore` undoes it
            _ours_s = min(_before_s, _SHORT_S)
            sys.setswitchinterval(_ours_s)
        _users.add(id(user))


def restore(user: object) -> None:
    """End one use; the last one restores the interval.  A no-op for others."""
    with _lock:
        if id(user) in _users:
            if len(_users) == 1:
                _put_back()
            _users.discard(id(user))


def _put_back() -> None:
    # Unless other code has changed it meanwhile: its value stays then.
    if abs(sys.getswitchinterval() - _ours_s) < 1e-6:
        sys.setswitchinterval(_before_s)


def _begin_anew() -> None:
    """In a forked child, which has none of the other threads and perhaps their lock."""
    global _lock
    _lock = threading.Lock()
    if _users:
        _put_back()
        _users.clear()


os.register_at_fork(after_in_child=_begin_anew)
