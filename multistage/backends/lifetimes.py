"""Whose a store is, and how it ends.

A store belongs to one run at a time: two runs in one store would overwrite
each other's checkpoints, with valid checksums.  So `open` takes the store and
`close` gives it back (`Hold`).

It belongs to one process, too.  A forked child has the memory of a store but
none of its threads: to wait for one of them would never end, and their locks
may be held forever.  So a child is refused at its first call.

What is dropped without `close` is closed by a finalizer (`end`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

from ..errors import StoreError

Arguments = ParamSpec("Arguments")

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
        return forked(f"tier {self.name!r}") if self.foreign else closed(self.name)


def forked(what: str) -> StoreError:
    """Return the error of a forked child that uses what its parent opened."""
    return StoreError(
        f"{what} cannot be used in a forked child, which has none of its threads; close it there "
        "and start again, or use the 'spawn' start method"
    )


def closed(name: str) -> StoreError:
    """Return the error of a store that is used while it is closed."""
    return StoreError(f"tier {name!r} is closed; open() it first")


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


def weakly(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Return a method that does not keep its object, and does nothing once that is gone.

    So a store that is dropped goes at once, though its threads know whom to tell.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> None:
        if (found := reference()) is not None:
            found(*arguments, **keywords)

    return call
