"""How many steps a forward sweep has, and the question whether a state is its last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..execute.executor import Executor

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Stopped(Exception):
    """Carries a StopIteration of `until` out of a schedule, which would end by it."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


class SweepLength:
    """The number of steps of a forward sweep.

    Attributes
    ----------
    steps : int
        0 while it is unknown.
    """

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0

    def begin(
        self,
        n_steps: int | None,
        until: Callable[[State, int], bool] | None,
        executor: Executor[State, Adjoint],
    ) -> Callable[[int], bool] | None:
        """Return a function that says whether state i is the last, for `until`."""
        self.steps = n_steps or 0
        if until is None:
            return None

        def is_last(i: int) -> bool:
            try:
                found = until(executor.live, i)
            except StopIteration as error:
                raise Stopped(error) from None
            if found:
                self.steps = i
            return bool(found)

        return is_last
