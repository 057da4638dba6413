"""Which sweep is in progress in which store.

`Store.open` keeps a second run out of a store.  This keeps a second sweep out of
one that its user opened himself, whatever class it is of.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

from ..backends.base import Store
from ..errors import StoreError

# By the store's identity: a sweep keeps its stores alive, and its entry is gone when it is.
_sweeps: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
# Re-entrant: a garbage collection may end another sweep while it is held.
_lock = threading.RLock()


def _begin_anew() -> None:
    """Renew the lock in a forked child, where no thread may be left to release it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


def occupy(stores: Sequence[Store], sweep: object) -> None:
    """Take stores for a sweep; they are free again when it has left them, or is gone.

    Raises
    ------
    StoreError
        If another sweep is in progress in one of them; none is taken then.
    """
    with _lock:
        for store in stores:
            other = _sweeps.get(id(store))
            if other is not None and other is not sweep:
                raise StoreError(
                    f"tier {store.name!r} holds the checkpoints of another sweep; end that one "
                    "first with reverse() or abort(), or give each executor stores of its own"
                )
        for store in stores:
            _sweeps[id(store)] = sweep


def leave(stores: Sequence[Store], sweep: object) -> None:
    """Give the stores back that a sweep has taken."""
    with _lock:
        for store in stores:
            if _sweeps.get(id(store)) is sweep:
                del _sweeps[id(store)]
