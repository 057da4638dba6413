"""Threads take turns at what they share: random generators and buffers.

A stage that draws random numbers is run again from the state its generators
had, and the present state is put back; a stage that changes buffers runs again
on copies.  Another thread that draws from the generators, or runs the same
module, in between would lose its own numbers and counts.  Forward sweeps and
runs again of chains with such stages therefore exclude one another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

from ...errors import StateError

PATIENCE_S = 600.0


class Turn:
    """A re-entrant lock that is given up on where nothing moves.

    Who holds it has autograd work in its own thread, for devices too: their threads, which
    passes of all threads share, might run a stage again, and wait for the turn forever.

    Parameters
    ----------
    patience_s : float
        Seconds to wait while the thread whose turn it is completes no stage: a
        stage may wait for a thread that waits here.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._lock = threading.RLock()
        self._patience_s = patience_s
        self._moves = 0

    def moved(self) -> None:
        """Note that a stage was completed."""
        self._moves += 1

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn and hold it.

        Raises
        ------
        StateError
            If the thread that holds it makes no progress.
        """
        seen, since = self._moves, time.monotonic()
        while not self._lock.acquire(timeout=self._patience_s / 10):
            if seen != self._moves:
                seen, since = self._moves, time.monotonic()
            elif time.monotonic() - since >= self._patience_s:
                raise StateError(
                    "another thread has been inside a stage that draws random numbers or changes "
                    f"buffers for {self._patience_s:g} s, and this one must not run such a stage "
                    "meanwhile; if that stage waits for this thread, run the chain in one thread"
                )
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._moves += 1
            self._lock.release()


TURN = Turn()  # generators belong to the process
_at_work = threading.local()


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Run stages or steps to look at them: in this thread's turn, unseen by hooks on saved tensors.

    Buffers and generators are put back, which other threads must not use meanwhile.
    """
    before, _at_work.looks = is_looking(), True
    try:
        with unseen(), TURN.taken():
            yield
    finally:
        _at_work.looks = before


def is_looking() -> bool:
    """Return whether this thread is looking: users' hooks on parameters are not to see it."""
    return getattr(_at_work, "looks", False)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Run what is no part of the computation unseen by hooks on saved tensors.

    A checkpoint or a chain around would count the tensors that are saved, which are others when
    it runs again.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
