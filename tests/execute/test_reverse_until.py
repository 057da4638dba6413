"""`Executor.reverse_until`: adjoints that are asked for, instead of computed by the sweep."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optree
import pytest
from chains import CHAINS, TAPED, raw, store_all
from replays import logged

from multistage.actions import Action, Advance, EndForward, Reverse, Save
from multistage.backends import MemoryStore, Store
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning, MultistageError, ScheduleError
from multistage.execute.executor import Executor
from multistage.model.chain import FunctionChain
from multistage.model.costs import Costs, Tier
from multistage.planners import PLANNERS, Plan
from multistage.schedule.rules import Rules
from multistage.states.layout import Layout

N = 17


def planned(planner: str, chain: str) -> Plan:
    costs = Costs(
        1.0,
        2.0,
        tape_step_s=1.2 if chain in TAPED else None,
        tape_bytes={"tape": 20, "in-place-tape": 5}.get(chain, 0),
        state_bytes=10,
        tiers=(Tier("memory", 2.5, 2.0),),
    )
    return PLANNERS[planner](costs, {"periodic": 15, "store-all": 3 * N}.get(planner, 4), N)


@contextmanager
def swept(chain: str, plan: Plan, **faults: Any) -> Iterator[Executor[Any, Any]]:
    """Open a tier; yield an executor that judges every action."""
    store: Store = FaultyStore(MemoryStore(), **faults)
    costs = plan.costs
    store.open(Layout.of(CHAINS[chain][1]()))
    try:
        yield Executor(
            CHAINS[chain][0](),
            (store,),
            tape_slots=costs.tape_slots,
            rules=lambda: Rules(N, plan.slots, costs.tape_slots, state_is_tape=costs.state_is_tape),
        )
    finally:
        store.close()


def pushed(executor: Executor[Any, Any], plan: Plan, chain: str, log: list[Any]) -> Any:
    executor.forward(logged(plan.schedule(), log), CHAINS[chain][1]())
    return executor.reverse(1)


def pulled(executor: Executor[Any, Any], plan: Plan, chain: str, log: list[Any]) -> Any:
    executor.forward(logged(plan.schedule(), log), CHAINS[chain][1]())
    operators, adjoint = CHAINS[chain][0](), 1
    for i in reversed(range(N)):
        adjoint = operators.reverse(executor.reverse_until(i), adjoint, i)
    return executor.reverse(adjoint)


@pytest.mark.parametrize("chain", [c for c in CHAINS if "workspace" not in c and "blocks" not in c])
@pytest.mark.parametrize("planner", ["streaming", "revolve", "periodic", "store-all"])
def test_pull_and_push_do_the_same(planner: str, chain: str) -> None:
    plan = planned(planner, chain)
    one: list[Any] = []
    other: list[Any] = []
    with swept(chain, plan) as executor:
        for _ in range(2):
            one.clear(), other.clear()
            expected = pushed(executor, plan, chain, one)
            peak = executor.counts.peak_slots
            assert pulled(executor, plan, chain, other) == expected == store_all(chain, N)[1]
            assert executor.counts.peak_slots == peak
    if planner != "streaming":  # which decides from what a tier has taken
        assert one == other


@pytest.mark.parametrize("chain", ["nested", "tape", "in-place", "in-place-tape"])
@pytest.mark.parametrize("planner", ["streaming", "revolve", "store-all"])
def test_steps_are_asked_for_in_any_descending_order(planner: str, chain: str) -> None:
    plan, make, start = planned(planner, chain), *CHAINS[chain]
    operators, state = make(), start()
    expected = []  # of each step, the adjoint of 1
    for i in range(N):
        if operators.state_is_tape:
            tape = optree.tree_map(np.copy, state)
            state = operators.advance(state, i, i + 1)
        else:
            state, tape = operators.tape(state, i)
            tape = optree.tree_map(np.copy, tape)
        expected.append(operators.reverse(tape, 1, i))
    source = random.Random(f"{planner} {chain}")
    with swept(chain, plan) as executor:
        for count in (0, 1, 2, 5, 12):
            executor.forward(plan.schedule(), start())
            for i in sorted(source.sample(range(N), count), reverse=True):
                for _ in range(source.choice([1, 1, 3])):
                    tape = executor.reverse_until(i)
                assert operators.reverse(tape, 1, i) == expected[i]
            below = [source.randrange(i)] if count and i else []
            for i in below:
                executor.reverse_until(i)
            if not count:
                assert executor.reverse(1) == store_all(chain, N)[1]
            executor.abort()


def test_a_step_already_reversed_is_refused_without_effect() -> None:
    plan = planned("streaming", "nested")
    operators = CHAINS["nested"][0]()
    with swept("nested", plan) as executor:
        executor.forward(plan.schedule(), CHAINS["nested"][1]())
        adjoint = 1
        for wrong in (N, -1):
            with pytest.raises(MultistageError, match=f"steps 0 to {N - 1} are left"):
                executor.reverse_until(wrong)
        for i in reversed(range(N)):
            adjoint = operators.reverse(executor.reverse_until(i), adjoint, i)
            if i + 1 < N:
                with pytest.raises(MultistageError, match="descending order"):
                    executor.reverse_until(i + 1)
        assert executor.reverse(adjoint) == store_all("nested", N)[1]


def test_lost_checkpoints_are_computed_again_for_those_who_ask() -> None:
    plan = planned("interval", "nested")
    with swept("nested", plan, lose_read=lambda k: k % 2 == 0) as executor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            assert pulled(executor, plan, "nested", []) == store_all("nested", N)[1]
        assert executor.counts.lost
        assert executor.counts.reverse_steps == N


class InTheState:
    """In place; the adjoint is computed in the arrays of the state."""

    in_place = state_is_tape = True
    tape: Any = None

    def advance(self, x: Any, start: int, stop: int) -> Any:
        for i in range(start, stop):
            x[:] = np.sin(x) + 0.1 * i
        return x

    def reverse(self, x: Any, adjoint: Any, i: int) -> Any:
        np.cos(x, out=x)
        x *= adjoint
        return x


class InTheTape:
    """Has one array for all tapes; the adjoint is computed in it."""

    in_place = state_is_tape = False

    def __init__(self) -> None:
        self._array = np.zeros(3)

    def advance(self, x: Any, start: int, stop: int) -> Any:
        for i in range(start, stop):
            x = np.sin(x) + 0.1 * i
        return x

    def tape(self, x: Any, i: int) -> tuple[Any, Any]:
        np.cos(x, out=self._array)
        return np.sin(x) + 0.1 * i, self._array

    def reverse(self, tape: Any, adjoint: Any, i: int) -> Any:
        tape *= adjoint
        return tape


@pytest.mark.parametrize("make", [InTheState, InTheTape])
def test_an_adjoint_in_the_arrays_of_a_tape_stays_as_it_is(make: Any) -> None:
    plan, start = PLANNERS["revolve"](Costs(1.0, 2.0), 4, N), np.linspace(0, 1, 3)
    expected, x = np.ones(3), start
    for i in range(N):
        x, expected = np.sin(x) + 0.1 * i, np.cos(x) * expected
    chain = make()
    for until in (0, 5):
        executor: Executor[Any, Any] = Executor(chain, ())
        executor.forward(plan.schedule(), start.copy())
        one = executor.reverse(np.ones(3)).copy()
        executor.forward(plan.schedule(), start.copy())
        adjoint = np.ones(3)
        for i in reversed(range(until, N)):
            adjoint = chain.reverse(executor.reverse_until(i), adjoint, i)
        assert raw(executor.reverse(adjoint)) == raw(one)
        np.testing.assert_allclose(one, expected, rtol=1e-9)


def test_an_error_ends_the_sweep() -> None:
    left = [N + 5]

    def step(x: Any, i: int) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return np.sin(x) + i

    chain: FunctionChain[Any, Any] = FunctionChain(step, lambda x, a, i: a * np.cos(x))
    plan, state = PLANNERS["revolve"](Costs(1.0, 2.0), 3, N), np.linspace(0, 1, 4)
    executor = Executor(chain, ())
    executor.forward(plan.schedule(), state)
    with pytest.raises(KeyboardInterrupt):
        for i in reversed(range(N)):
            executor.reverse_until(i)
    for call in (lambda: executor.reverse_until(0), lambda: executor.reverse(state)):
        with pytest.raises(MultistageError, match="needs a forward"):
            call()
    assert state.flags.writeable
    executor.forward(plan.schedule(), state)
    one = executor.reverse(np.ones(4))
    executor.forward(plan.schedule(), state)
    adjoint = np.ones(4)
    for i in reversed(range(N)):
        adjoint = chain.reverse(executor.reverse_until(i), adjoint, i)
    assert raw(executor.reverse(adjoint)) == raw(one)


ILLEGAL: dict[str, tuple[list[Action], str]] = {
    "the schedule ends": ([Advance(0, 2), EndForward()], r"ended without Reverse\(1\)"),
    "nothing to start from": ([Advance(0, 2), EndForward(), Reverse(1)], "neither its tape"),
    "nothing for a step left out": (
        [Advance(0, 1), Save(1), Advance(1, 3), EndForward(), Reverse(2), Reverse(1)],
        "neither its tape",
    ),
    "another step": ([Advance(0, 2), EndForward(), Reverse(0)], "next adjoint step is 1"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_schedules_are_refused(name: str) -> None:
    actions, message = ILLEGAL[name]
    executor: Executor[Any, Any] = Executor(CHAINS["nested"][0](), ())
    executor.forward(actions, CHAINS["nested"][1]())
    with pytest.raises(ScheduleError, match=message):
        executor.reverse_until(1)
    with pytest.raises(MultistageError, match="needs a forward"):
        executor.reverse_until(0)
