"""Chains with one tape, the latest: it is never overwritten before its use."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from multistage import PLANNERS, Budget, Reversal
from multistage.actions import Action, Advance, EndForward, Load, Reverse, Tape
from multistage.errors import BudgetError, ScheduleError
from multistage.execute.executor import Executor
from multistage.model.chain import InPlaceChain
from multistage.model.costs import NOT_KEPT, Costs


class OneTape(InPlaceChain[Any, float]):
    """Every step, also one that tapes nothing, leaves its input in the only tape there is."""

    one_tape = True

    def __init__(self) -> None:
        self.latest = np.zeros(3)
        super().__init__(self._run, self._adjoint, self._taped)

    def _run(self, state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            self.latest[:] = state
            state[:] = 1.5 * np.sin(state) + 0.1 * i

    def _taped(self, state: Any, i: int) -> None:
        self._run(state, i, i + 1)

    def _adjoint(self, tape: None, adjoint: float, i: int) -> float:
        return float(adjoint * np.cos(self.latest).prod() + i)


def by_hand(n: int) -> float:
    chain, tapes = OneTape(), []
    state = np.linspace(0.1, 1, 3)
    for i in range(n):
        tapes.append(state.copy())
        chain.advance(state, i, i + 1)
    adjoint = 1.0
    for i in reversed(range(n)):
        chain.latest[:] = tapes[i]
        adjoint = chain.reverse(None, adjoint, i)
    return adjoint


COSTS = Costs(1.0, 2.0, tape_step_s=1.0, state_bytes=24, tape_bytes=NOT_KEPT)


@pytest.mark.parametrize("planner", ["auto", *PLANNERS])
def test_every_planner_is_exact(planner: str) -> None:
    if planner == "pyrevolve":
        pytest.importorskip("pyrevolve")
    ran = 0
    for n in (1, 2, 3, 4, 7, 21):
        for slots in (1, 2, 5, 30):
            run = Reversal(
                OneTape(), n_steps=n, planner=planner, memory=Budget(slots=slots), costs=COSTS
            )
            with run:
                try:
                    run.forward(np.linspace(0.1, 1, 3))
                except BudgetError:
                    assert planner in ("store-all", "periodic", "recursive")
                    continue
                assert run.reverse(1.0) == by_hand(n), (n, slots)
                ran += 1
    assert ran >= (20 if planner not in ("store-all", "periodic", "recursive") else 4)


SECOND: dict[str, list[Action]] = {
    "tape": [Tape(0), Tape(1), EndForward(), Reverse(1), Reverse(0)],
    "advance": [Tape(0), Advance(1, 2), EndForward()],
    "load": [Advance(0, 1), Tape(1), EndForward(), Load(0), Reverse(1)],
}


@pytest.mark.parametrize("what", SECOND)
def test_the_executor_refuses_to_overwrite_the_tape(what: str) -> None:
    executor: Executor[Any, float] = Executor(OneTape(), (), tape_slots=0.0)
    with pytest.raises(ScheduleError, match=r"only its latest tape .*is still needed"):
        executor.forward(SECOND[what], np.linspace(0.1, 1, 3))
        executor.reverse(1.0)


@pytest.mark.parametrize("planner", ["periodic", "recursive", "store-all"])
def test_planners_of_tapes_say_that_only_one_exists(planner: str) -> None:
    """It was "periodic needs about 929887697 fast slots"."""
    costs = Costs(1.0, 1.0, 1.0, tape_bytes=NOT_KEPT)
    with pytest.raises(BudgetError, match="of these operators only one exists"):
        PLANNERS[planner](costs, 1, 50)


def test_a_plan_for_many_tapes_is_refused() -> None:
    many = partial(PLANNERS["store-all"], Costs(1.0, 2.0, 1.0), 9, 3)()
    with (
        Reversal(OneTape(), planner=many, costs=COSTS) as run,
        pytest.raises(Exception, match=r"one_tape|NOT_KEPT|latest tape"),
    ):
        run.forward(np.linspace(0.1, 1, 3))
