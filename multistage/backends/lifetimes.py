"""Whose a store is, and how it ends.

A store belongs to one run at a time: two runs in one store would overwrite
each other's checkpoints, with valid checksums.  So `open` takes the store and
`close` gives it back (`Hold`).

It belongs to one process, too.  A forked child has the memory of a store but
none of its threads: to wait for one of them would never end, and their locks
may be held forever.  So a child is refused at its first call.

What is dropped without `close` is closed by an `Ending`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, cast

from ..errors import StoreError
from ..support.interrupts import Shield

Result = TypeVar("Result")

_forks = 0  # since this module was imported, in the line of processes down to this one


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Birth(NamedTuple):
    """The process and the thread in which something was made."""

    forks: int
    thread: int

    @classmethod
    def here(cls) -> Birth:
        """Return that of the caller."""
        return cls(_forks, threading.get_ident())

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of that one."""
        return self.forks != _forks


class Hold:
    """What a run has of a store while the store is open.

    Parameters
    ----------
    name : str
        Of the store, for messages.

    Notes
    -----
    Threads may race for `take`: one gets it.  No lock is held, so that a fork
    at any moment leaves the child something it can ask.

    Examples
    --------
    >>> hold = Hold("memory")
    >>> hold.take()
    >>> hold.check()
    >>> hold.give_back()
    """

    __slots__ = ("_forks", "_holder", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._holder: dict[str, Birth] = {}
        self._forks = -1  # the holder's; -1 while the store is closed

    def take(self) -> None:
        """Take the store.

        Raises
        ------
        StoreError
            If it is taken.
        """
        birth = Birth.here()
        if self._holder.setdefault("birth", birth) is not birth:  # atomic
            if self.foreign:
                raise self._refused()
            raise StoreError(
                f"tier {self.name!r} holds the checkpoints of another run; close that one first, "
                "or give each run a store of its own"
            )
        self._forks = birth.forks

    def give_back(self) -> None:
        """Let others take it.  May be called twice."""
        self._forks = -1
        self._holder.pop("birth", None)

    def check(self) -> None:
        """Raise StoreError if the store is closed, or was opened by the parent of this process."""
        if self._forks != _forks:
            raise self._refused()

    @property
    def taken(self) -> bool:
        """Whether it is taken."""
        return bool(self._holder)

    @property
    def foreign(self) -> bool:
        """Whether it is taken by the process that this one was forked from."""
        birth = self._holder.get("birth")
        return birth is not None and birth.foreign

    def _refused(self) -> StoreError:
        if self.foreign:
            return forked(f"tier {self.name!r}")
        return StoreError(f"tier {self.name!r} is closed; open() it first")


def forked(what: str) -> StoreError:
    """Return the error of a forked child that uses what its parent opened."""
    return StoreError(
        f"{what} cannot be used in a forked child, which has none of its threads; close it there "
        "and start again, or use the 'spawn' start method"
    )


def end(close: Callable[[], object], birth: Birth) -> None:
    """Close something that was dropped; what finalizers call.

    Parameters
    ----------
    close : callable
        Waits for threads.  It must not refer to what was dropped.
    birth : Birth
        Of what was dropped.

    Notes
    -----
    A garbage collection may call this in any thread: in one of the store's own,
    which cannot wait for its own end, or in one that those wait for, such as an
    event loop's.  In all threads but the one that made it another is started
    to wait.  A forked child leaves everything to its parent.
    """
    if birth.foreign:
        return
    # At the interpreter's exit no thread can be started: there, too, it is done at once.
    if threading.get_ident() != birth.thread and threading.main_thread().is_alive():
        try:
            threading.Thread(target=close, name="multistage-closing").start()
            return
        except RuntimeError:  # there are no more threads
            pass
    close()


class Ending(Generic[Result]):
    """What ends something: when called, once its owner is gone, or at the interpreter's exit.

    In the last two cases as `end` does: not in a forked child.

    Of one that was interrupted as its owner went, the rest is done when the next one is made.

    Like `weakref.finalize`, but it counts as done after `close` has returned, and not before
    it is called: interrupted, it still holds the memory in which threads work, and can be
    called again.

    Parameters
    ----------
    owner : object
        Not kept.
    close : callable
        It must not refer to the owner.

    Examples
    --------
    >>> owner = threading.Event()
    >>> ending = Ending(owner, lambda: print("closed"))
    >>> del owner
    closed
    >>> ending.is_done
    True
    """

    __slots__ = ("_key",)

    def __init__(self, owner: object, close: Callable[[], Result]) -> None:
        with contextlib.suppress(Exception):  # it is no fault of the one that is made now
            _end_due()
        ends = weakref.ref(owner, _end_due)
        # Ctrl-C that comes while garbage is collected is raised before the first instruction of
        # the first callback, and dropped: so what is due is noted by one without instructions,
        # which is called first, being the last one made.
        notes = weakref.ref(owner, _due.append)
        self._key = id(notes)
        _endings[self._key] = close, Birth.here(), (ends, notes)

    def __call__(self) -> Result | None:
        """End it here and now, unless that is done."""
        return cast("Result | None", _end(self._key, lambda close, _: close()))

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to end any more."""
        return self._key not in _endings

    def forget(self) -> None:
        """Note that it has been ended otherwise."""
        _endings.pop(self._key, None)


# In the order of their making: what ends each, where it was made, and what notices that its
# owner is gone.
_endings: dict[int, tuple[Callable[[], object], Birth, object]] = {}
_due: deque[weakref.ref[object]] = deque()  # of those whose owners are gone


def _end_due(_owner: object = None) -> None:
    with Shield(up=True), contextlib.suppress(IndexError):
        while True:
            _end(id(_due.popleft()))


def _end(key: int, way: Callable[[Callable[[], object], Birth], object] = end) -> object:
    with Shield(up=True):
        found = _endings.get(key)
        result = None if found is None else way(*found[:2])
        _endings.pop(key, None)
    return result


def _end_all() -> None:
    # Threads stop before the folder goes that they write to, which was made before them.
    for key in reversed(list(_endings)):
        with contextlib.suppress(Exception):  # the rest is ended all the same
            _end(key)


atexit.register(_end_all)
