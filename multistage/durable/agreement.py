"""Where several ranks of one durable run continue: at the least that all of them have.

Each rank's folder holds what that rank had reached when it was killed, so the
ranks differ: one has a state, the last state or an adjoint that another has
not.  All of them resume

========================  =====================================================
forward sweep             from the newest state that every rank has, unless
                          every rank has the last state
reverse sweep             from the furthest adjoint that every rank has, with
                          the states that every rank has
again from state 0         if a rank had not begun, since no rank takes a step
                          before all have
========================  =====================================================

so a rank that is further goes back.  That there is such an adjoint is seen to
while they run: adjoints are written at the same steps everywhere, and an older
one, with the states it needs, is kept until every rank has a newer (`Pace`).

Folders of different runs, or of a run of which a rank has made progress and
another has no folder, are refused on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import MultistageError, StoreError

T = TypeVar("T")


class Peers(Protocol):
    """What is asked of the ranks; `multistage.interop.ranks.Ranks` is that of MPI."""

    rank: int
    size: int

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Do local work on every rank; return all results, or raise on all what one raised."""
        ...

    def everywhere(self, error: MultistageError) -> MultistageError:
        """Note that every rank raises this error now; return it."""
        ...

    def most_of(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, one by one."""
        ...


class Alone:
    """One process.

    Examples
    --------
    >>> Alone().gather(lambda: 3), Alone().most_of([1.0, 2.0])
    ([3], [1.0, 2.0])
    """

    rank = 0
    size = 1

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Return the result of this process alone."""
        return [work()]

    def everywhere(self, error: MultistageError) -> MultistageError:
        """Return the error as it is."""
        return error

    def most_of(self, values: Sequence[float]) -> list[float]:
        """Return the values as they are."""
        return list(values)


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank's folder holds.

    Attributes
    ----------
    run : bytes or None
        Number of the run; None if it has not begun.
    length : int or None
        Number of steps, if the last state is there.
    adjoints : tuple of int
        Steps of the adjoints that are intact.
    progress : bool
        Whether anything was reached: a state, the last one or an adjoint.
    """

    run: bytes | None = None
    length: int | None = None
    adjoints: tuple[int, ...] = ()
    progress: bool = False


def agree(found: Sequence[Found]) -> Found:
    """Return what all ranks have: where they continue, the same on every rank.

    Without a `run` all start again, without a `length` they continue the forward sweep, else
    with the adjoint, if there is one.

    Raises
    ------
    StoreError
        If they cannot continue together, with the reason.

    Examples
    --------
    >>> ahead = Found(b"r", length=9, adjoints=(2, 5), progress=True)
    >>> behind = Found(b"r", length=9, adjoints=(5, 7), progress=True)
    >>> agree([ahead, behind]).adjoints
    (5,)
    >>> agree([ahead, Found(b"r", progress=True)]).length is None
    True
    """
    missing = [rank for rank, one in enumerate(found) if one.run is None]
    reached = [rank for rank, one in enumerate(found) if one.progress]
    if missing:
        if reached:
            raise StoreError(
                f"rank {missing[0]} has no folder of the run that rank {reached[0]} is in "
                "the middle of; bring it back, or remove the run with `multistage clean --force`"
            )
        return Found()
    run = found[0].run
    for rank, one in enumerate(found):
        if one.run != run:
            raise StoreError(
                f"rank {rank} has the folder of another run than rank 0; "
                "bring the right one back, or remove them with `multistage clean --force`"
            )
    lengths = {one.length for one in found}
    if None in lengths:
        return Found(run)
    if len(lengths) > 1:
        raise StoreError(
            f"until= found ends at different steps: {sorted(map(str, lengths))}; it must "
            "answer alike on every rank; remove the run with `multistage clean --force`"
        )
    common = set.intersection(*(set(one.adjoints) for one in found))
    return Found(run, found[0].length, tuple(sorted(common)[:1]))


class Pace:
    """At which steps ranks write adjoints, or states: agreed in one small reduction at each.

    The clocks of ranks differ, so none decides by its own.  At an agreed step
    each rank says whether it is time, whether its disk is still at the one
    before, which adjoint is safe on its disk, and how many steps to the next
    time; the largest of each counts.

    Attributes
    ----------
    step : int
        The next agreed step.
    """

    def __init__(self, step: int, every_s: float, now: float) -> None:
        self.step = step
        self._every_s, self._written_s = every_s, now
        self._at_step, self._at_s = step + 1, now
        self._spacing = 1.0

    def says(self, step: int, now: float, *, busy: bool, safe: int) -> list[float]:
        """Return what this rank says at `step`."""
        left_s = self._written_s + self._every_s - now
        rate = (self._at_step - step) / max(now - self._at_s, 1e-9)
        self._at_step, self._at_s = step, now
        # The first steps say little about the rate: not too far at once.
        spacing = min(max(1.0, left_s * rate), 2 * self._spacing)
        return [float(busy), float(safe), float(left_s <= 0), spacing]

    def agreed(self, step: int, now: float, said: Sequence[float]) -> tuple[bool, int]:
        """Return whether to write the adjoint of `step`, and which one is safe on all ranks."""
        busy, safe, due, self._spacing = said
        write = bool(due) and not busy
        if write:
            self._written_s = now
        self.step = step - math.ceil(self._spacing)
        return write, int(safe)
