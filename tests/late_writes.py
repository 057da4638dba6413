"""Writes of unequal steps that are late, without a clock: what a run is told of them is made up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from unequal_chains import Case

from multistage.execute import late
from multistage.execute.detour import Deadlines
from multistage.execute.late import PagedWrites, TakenWhenLate
from multistage.model.tier import Tier


def tier_for(case: Case, rho: float) -> Callable[[object], Tier]:
    """Return what measures a tier: all states take `rho` times as long as plain training."""
    rate = sum(case.sizes) / (rho * 3 * sum(case.seconds))
    return lambda _: Tier.of_rates(rate, rate, tapes=False)


@contextlib.contextmanager
def said_late(
    late_at: Callable[[], bool],
    slower: Callable[[], float],
    refuses: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Say of writes that they are late, how much slower than planned, and that they continue.

    Of one that is not said to be late the run waits for the end, as it does without a rule.
    """
    cancel = PagedWrites.cancel

    def is_written(writes: PagedWrites, step: int, tape: bool, timeout_s: float) -> bool:
        return bool(timeout_s) or not late_at()

    def has_room(writes: PagedWrites, arrays: object, timeout_s: float) -> bool:
        return bool(timeout_s) or not late_at()

    def cancels(writes: PagedWrites, timeout_s: float) -> bool:
        refused = refuses()
        return cancel(writes, 0.0 if refused else timeout_s) and not refused

    asking = partial(Deadlines, ask_s=0.0, wait_s=1e-3, cancel_s=60.0)
    with (
        mock.patch.object(PagedWrites, "written", is_written),
        mock.patch.object(PagedWrites, "has_room", has_room),
        mock.patch.object(PagedWrites, "slower", lambda *_: slower()),
        mock.patch.object(PagedWrites, "seen_s", lambda _: math.inf),
        mock.patch.object(PagedWrites, "computed_s", lambda _: 0.0),
        mock.patch.object(PagedWrites, "cancel", cancels),
        mock.patch.object(late, "Deadlines", asking),
    ):
        yield


@contextlib.contextmanager
def noting() -> Iterator[list[TakenWhenLate]]:
    """Give what has left its plan, in the order in which it did."""
    found: list[TakenWhenLate] = []
    asked = TakenWhenLate.__call__

    def noted(each: TakenWhenLate, *given: Any) -> Any:
        answer = asked(each, *given)
        if answer is not None:
            found.append(each)
        return answer

    with mock.patch.object(TakenWhenLate, "__call__", noted):
        yield found
