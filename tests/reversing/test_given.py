"""Plans, planners and costs that a user gives: judged, or refused if they contradict the chain."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from replays import actions_of

from multistage import (
    PLANNERS,
    Budget,
    Costs,
    Plan,
    Reversal,
    Stage,
    StageCosts,
    Tier,
    plan,
    plan_chain,
)
from multistage.actions import Action, Advance, Free, Reverse, Save
from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, BudgetError, CheckpointWarning, ScheduleError
from multistage.execute import executor as execute
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import NOT_KEPT
from multistage.planners.predict import sealing
from multistage.planners.single.revolve import revolve_schedule

N = 6
COSTS = Costs(1.0, 2.0, tiers=(Tier("memory", 1.0, 1.0),))
TAPED = Costs(1.0, 2.0, tape_step_s=1.0)


def in_place(seen: list[int] | None = None) -> InPlaceChain[Any, Any]:
    def forward(x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            if seen is not None:
                seen.append(i)
            x[:] = np.sin(x) * 1.5 + 0.1 * i

    return InPlaceChain(forward, lambda x, a, i: a * np.cos(x) * 1.5)


def taped() -> FunctionChain[Any, Any]:
    return FunctionChain(
        lambda x, i: np.sin(x), lambda tape, a, i: a * tape, lambda x, i: (np.sin(x), np.cos(x))
    )


def start() -> Any:
    return np.linspace(0.1, 1, 50)


def made_of(
    make: Callable[[], Any], costs: Costs = COSTS, slots: int = 2, n_steps: int = N
) -> Plan:
    """Return a plan as a user's planner makes it."""
    return Plan(
        planner="mine",
        costs=costs,
        n_steps=n_steps,
        memory_bytes=slots * costs.state_bytes,
        make=make,
        makespan_s=1.0,
        forward_steps=n_steps,
        peak_bytes=slots * costs.state_bytes,
    )


def a_chain() -> Plan:
    stage = Stage("a", 1.0, 2.0, 400, 400)
    return plan_chain(StageCosts.uniform(N, stage, 400))


def gradient(planner: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"memory": "2 slots", "tiers": "memory:", "costs": COSTS, **options}
    with Reversal(in_place(), n_steps=N, planner=planner, **settings) as run:
        run.forward(start())
        return run.reverse(np.ones(50))


# Checkpoints on the tier; the slot under the first is freed when its write is awaited.
LEGAL = actions_of(
    "S0 P0 0>3 a0 F0 S3 P3 3>5 a1 F3 T5 | R5 G3 a2 L3 3>4 R4 L3 R3 F3 D3 G0 a3 L0 0>2 R2 L0 0>1 R1 "
    "L0 R0 F0 D0"
)
# The same, freed before.
EARLY: list[Action] = [action for action in LEGAL if action != Free(0)]
EARLY.insert(2, Free(0))
EARLY.insert(-1, Free(0))


def of(actions: list[Action]) -> Callable[..., Plan]:
    return lambda *_: made_of(lambda: iter(actions))


def test_a_planner_of_your_own_is_run() -> None:
    assert (gradient(of(LEGAL)) == gradient("revolve")).all()


@pytest.mark.parametrize(
    "given",
    [
        of(EARLY),
        of(EARLY)(),
        replace(plan(COSTS, "2 slots", N), make=of(EARLY)().make),
        replace(PLANNERS["streaming"](COSTS, 2, N), make=of(EARLY)().make),
    ],
    ids=["planner", "plan", "replaced make", "replaced make of a planner"],
)
def test_a_slot_freed_under_a_write_is_refused_before_it_is_freed(given: Any) -> None:
    with pytest.raises(ScheduleError, match=r"action 2: Free\(0\) but a write .* not awaited"):
        gradient(given)


def test_a_plan_that_says_fewer_slots_than_it_takes_is_refused() -> None:
    greedy = replace(PLANNERS["revolve"](COSTS, 5, N), memory_bytes=2 * COSTS.state_bytes)
    with pytest.raises(ScheduleError, match=r"Save\(\d\) needs 1 fast slot"):
        gradient(greedy)
    with pytest.raises(BudgetError, match="the plan takes 5 fast slots, the budget holds 2"):
        gradient(lambda *_: PLANNERS["revolve"](COSTS, 5, N))


def test_a_planner_put_into_the_dict_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "revolve", of(EARLY))
    with pytest.raises(ScheduleError, match="not awaited"):
        gradient("revolve")


def test_schedules_of_our_planners_are_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: Any) -> None:
        raise AssertionError("judged")

    expected = gradient("revolve")
    monkeypatch.setattr(execute, "each_judged", judge)
    for name in ("auto", "streaming", "revolve", "interval", "online"):
        assert (gradient(name) == expected).all()
    assert (gradient(plan(COSTS, "2 slots", N)) == expected).all()
    assert (gradient(PLANNERS["revolve"]) == expected).all()
    with pytest.raises(AssertionError, match="judged"):
        gradient(of(LEGAL))
    with pytest.raises(AssertionError, match="judged"):
        gradient("revolve", checked=True)


def test_changed_plans_are_not_sealed() -> None:
    made = plan(COSTS, "2 slots", N)
    for same in (copy.copy(made), copy.deepcopy(made), replace(made, note="mine", why="")):
        assert same.sealed
    assert all(each.sealed for each in (made, *made.candidates))
    for other in (
        replace(made, memory_bytes=COSTS.state_bytes),
        replace(made, n_steps=N + 1),
        replace(made, costs=TAPED),
        replace(made, make=partial(revolve_schedule, 2, N)),
        replace(made, actions=(Reverse(0),)),
        made_of(made.make, slots=made.slots),
    ):
        assert not other.sealed
    assert sealing(of(LEGAL))().sealed


@pytest.mark.parametrize("fault", ["refuse", "lose_write", "lose_read"])
@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1}])
def test_a_judged_schedule_survives_lost_checkpoints(fault: str, lost: set[int]) -> None:
    """A static schedule asks for what is lost as if it were there: that is no fault of its own."""
    expected = gradient("revolve")
    store = FaultyStore(MemoryStore(buffer_bytes=0), **{fault: lost.__contains__})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        assert (gradient(of(LEGAL), tiers=store) == expected).all()


@pytest.mark.parametrize(
    ("given", "error", "rule"),
    [
        (lambda *_: None, ArgumentError, "returned NoneType; it must return a Plan"),
        (lambda *_: a_chain(), ArgumentError, "returned a plan of stages"),
        (a_chain(), ArgumentError, "takes a plan of uniform steps"),
        (lambda *_: made_of(list, n_steps=5), ArgumentError, "is for 5 steps, not n_steps=6"),
        (lambda *_: made_of(list, slots=3), BudgetError, "takes 3 fast slots, the budget holds 2"),
        (
            lambda *_: made_of(list, costs=TAPED),
            ArgumentError,
            "in the plan's costs steps make tapes, here a state is its own tape",
        ),
        (lambda *_: made_of(lambda: iter(["Save(0)"])), ScheduleError, "'Save.0.' is no action"),
    ],
)
def test_results_of_a_planner_are_checked(given: Any, error: Any, rule: str) -> None:
    with pytest.raises(error, match=rule):
        gradient(given)


@pytest.mark.parametrize(
    ("chain", "costs", "rule"),
    [
        (taped, COSTS, r"a state is its own tape \(tape_step_s=None\), but this chain makes"),
        (in_place, TAPED, r"steps make tapes \(tape_step_s=1\), but this chain's state is"),
        (in_place, replace(COSTS, state_bytes=8, tape_bytes=4), "tape_bytes=4 .*leave tape_bytes"),
    ],
)
def test_costs_of_another_kind_of_chain_are_refused(chain: Any, costs: Costs, rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule):
        Reversal(chain(), n_steps=N, costs=costs)
    made = plan(costs, "9 slots", N)
    with pytest.raises(ArgumentError, match=rule):
        Reversal(chain(), planner=made)


def test_a_plan_for_smaller_tapes_is_refused() -> None:
    made = plan(TAPED, "9 slots", N)
    costs = replace(TAPED, state_bytes=8, tape_bytes=20)
    with (
        Reversal(taped(), planner=made, costs=costs) as run,
        pytest.raises(ArgumentError, match=r"for tapes of 1 states, here one has 2\.5"),
    ):
        run.forward(start())


def test_a_plan_that_keeps_states_only_serves_a_chain_with_one_tape() -> None:
    chain = taped()
    chain.one_tape = True
    gradients = []
    for made in (
        PLANNERS["revolve"](TAPED, 2, N),
        PLANNERS["revolve"](replace(TAPED, tape_bytes=NOT_KEPT), 2, N),
    ):
        with Reversal(chain, planner=made, costs=TAPED) as run:
            assert run.costs.one_tape
            run.forward(start())
            gradients.append(run.reverse(np.ones(50)))
    assert np.array_equal(*gradients)


class Opaque:
    """A tape that no tree of arrays is made of."""

    def __init__(self, array: Any) -> None:
        self.array = array


TAPES: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "tuple": lambda array: (1, array[: len(array) // 2], array[len(array) // 2 :]),
    "object": Opaque,
    "closure": lambda array: lambda: array,
    "memoryview": memoryview,
}


def heavy(kind: str, size: int = 1000, grows_from: int = 99) -> FunctionChain[Any, float]:
    """Return a chain whose tapes have `size` numbers, twenty times its state, ten of it later."""
    table = np.zeros(100_000)  # all tapes refer to it: held anyway

    def tape(x: Any, i: int) -> tuple[Any, Any]:
        made = np.full(size * (10 if i >= grows_from else 1), x[0])
        return np.sin(x), (table, TAPES[kind](made))

    return FunctionChain(lambda x, i: np.sin(x), lambda tape, a, i: a + i, tape)


def costs_of(tape_bytes: int) -> Costs:
    return Costs(1.0, 2.0, tape_step_s=1.0, state_bytes=400, tape_bytes=tape_bytes)


@pytest.mark.parametrize("kind", TAPES)
@pytest.mark.parametrize("planner", ["store-all", "periodic", "recursive", "mixed"])
def test_costs_for_smaller_tapes_are_stopped_at_the_budget(planner: str, kind: str) -> None:
    run = Reversal(heavy(kind), n_steps=30, planner=planner, memory="40 slots", costs=costs_of(0))
    with run, pytest.raises(BudgetError, match=r"takes 53\.\d+ fast slots of the 40 in"):
        run.forward(start())
        run.reverse(1.0)
    assert run.report().counts.forward_steps < 32
    with Reversal(
        heavy(kind), n_steps=30, planner=planner, memory="900 slots", costs=costs_of(8000)
    ) as run:
        run.forward(start())
        assert run.reverse(1.0) == 1 + sum(range(30))


def test_growing_tapes_stop_at_the_budget_and_are_planned_again() -> None:
    """Costs are those of the first steps; what shows later is held to the budget, too."""
    n, options = 80, {"planner": "store-all", "memory": "100 slots"}
    chain = heavy("array", 50, grows_from=63)  # no first step that is weighed
    with Reversal(chain, n_steps=n, **options) as run:
        with pytest.raises(BudgetError, match=r"Tape.*fast slots of the 100 in the budget"):
            run.forward(start())
        assert run.costs.tape_slots > 8
        with pytest.raises(BudgetError, match="store-all needs"):
            run.forward(start())
    with Reversal(chain, n_steps=n, **options | {"memory": "800 slots"}) as run:
        run.forward(start())
        assert run.reverse(1.0) == 1 + sum(range(n))
        assert run.report().counts.peak_slots > 100  # as tapes are, not as the first ones were
        assert run.prepare(start()).costs.tape_slots > 8


def test_a_refused_sweep_leaves_no_tape_alive() -> None:
    """The error and the frame that raised it referred to each other: a resumed run had both."""
    made: list[weakref.ref[Any]] = []

    def tape_step(x: Any, i: int) -> Any:
        tape = np.full(40, x[0])
        made.append(weakref.ref(tape))
        return x * 1.01, tape

    chain = FunctionChain(lambda x, i: x * 1.01, lambda t, a, i: a * t[0], tape_step)
    costs = Costs(1.0, 1.0, 1.0, state_bytes=64, tape_bytes=1)
    gc.disable()
    try:
        with Reversal(
            chain, n_steps=5, costs=costs, planner="store-all", memory=Budget(bytes=300)
        ) as run:
            with pytest.raises(BudgetError, match="a tape being"):
                run.forward(np.ones(3))
            assert made
            assert all(tape() is None for tape in made)
    finally:
        gc.enable()


def test_the_executor_stops_a_schedule_beyond_the_budget() -> None:
    executor: execute.Executor[Any, Any] = execute.Executor(in_place(), (), slots=1)
    with pytest.raises(BudgetError, match=r"Save\(step=1\) takes 2 fast slots of the 1"):
        executor.forward([Save(0), Advance(0, 1), Save(1)], start())
