"""The processes that make one durable run: one alone, or the ranks of an MPI program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..errors import MultistageError

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
