"""What `Reversal.report` returns: on complete sweeps, and on those that were stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..backends.base import Store, StoreStats
from ..errors import ArgumentError
from ..execute.executor import Counts, Executor
from ..planners import UniformPlan
from ..report import Report, TierUse

Drawn = UniformPlan | Callable[[], UniformPlan] | None


def plan_of(drawn: Drawn) -> UniformPlan:
    """Return a plan, made now if it was not made before."""
    found = drawn if isinstance(drawn, UniformPlan) or drawn is None else drawn()
    assert found is not None
    return found


class Reports:
    """Remembers what the last sweeps did; makes the report when it is asked for.

    Parameters
    ----------
    stores : sequence of Store
        The slow tiers.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = tuple(stores)
        self._before: list[StoreStats] = []  # what the stores had counted before the sweep
        self._report: Report | None = None
        self._made: Callable[[], Report] | None = None
        self._stopped = ""  # what stopped the last sweep before its first step, and where

    def begin(self) -> None:
        """Note what the stores have counted until now: a sweep begins."""
        self._before = [replace(store.stats) for store in self._stores]

    def complete(self, drawn: Drawn, executor: Executor[object, object]) -> None:
        """Remember complete sweeps; `drawn` is their plan, or makes it."""
        self._stopped = ""
        self._remember(drawn, executor, "")

    def stopped_before_a_step(self, error: BaseException, where: str) -> None:
        """Remember sweeps that an error ended before there was anything to report."""
        self._report = self._made = None
        self._stopped = f"{_how(error)} {where}"

    def stopped(
        self,
        error: BaseException,
        where: str,
        n_steps: int | None,
        drawn: Callable[[int], Drawn],
        executor: Executor[object, object],
    ) -> None:
        """Remember how far sweeps came that an error has ended.

        Parameters
        ----------
        n_steps : int or None
            None if it is not known yet.
        drawn : callable
            The plan of so many steps, or a function that makes it.
        """
        counts, self._stopped = executor.counts, ""
        of = "" if n_steps is None else f" of {n_steps}"
        steps = counts.forward_steps
        if n_steps is not None:
            steps = min(steps, n_steps)
        ended = (
            f"{_how(error)} {where}: {steps}{of} steps run forward, {counts.reverse_steps} reversed"
        )
        self._remember(drawn(n_steps or max(1, steps)), executor, ended)

    def _remember(self, drawn: Drawn, executor: Executor[object, object], ended: str) -> None:
        timeline, counts = executor.timeline, executor.counts
        uses = tuple(map(TierUse.of, self._stores, self._before))

        def made() -> Report:
            return Report.of(plan_of(drawn), timeline, counts, uses, ended)

        self._report, self._made = None, made

    def report(self) -> Report:
        """Return the report on the last sweeps.

        Raises
        ------
        ArgumentError
            If there is nothing to report.
        """
        if self._made is not None:
            self._report, self._made = self._made(), None
        if self._stopped:
            raise ArgumentError(f"report() has no step to report: the run was {self._stopped}")
        if self._report is None:
            raise ArgumentError("report() needs a complete sweep: forward(), then reverse()")
        return self._report


def has_begun(executor: Executor[object, object], before: Counts | None) -> bool:
    """Whether an executor has run a part of a sweep since its counts were `before`."""
    return executor.counts is not before and bool(executor.counts.elapsed_s)


def _how(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"stopped by {type(error).__name__}"
