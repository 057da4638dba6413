"""Forward sweeps whose steps the caller runs: each state is pushed, the rest is as ever."""

from __future__ import annotations

import numpy as np
import pytest

from multistage.actions import Advance, EndForward, Load, Save
from multistage.backends.base import Store
from multistage.backends.memory import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, MultistageError, ScheduleError, StateError
from multistage.execute.executor import Executor
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS
from multistage.reversing.arguments import Arguments
from multistage.reversing.sweeps import Sweeps
from multistage.states.layout import Array, Layout

SLOTS = 25
START = np.linspace(0.1, 1, 50)
COSTS = Costs(1e-3, 2e-3, state_bytes=START.nbytes, tiers=(Tier("memory", 1e-3, 1e-3),))


def step(x: Array, i: int) -> Array:
    return np.sin(x) * 1.1 + 0.01 * i


def adjoint_step(x: Array, adjoint: Array, i: int) -> Array:
    return np.cos(x) * 1.1 * adjoint


def states(n: int) -> list[Array]:
    found = [START]
    for i in range(n):
        found.append(step(found[-1], i))
    return found


def gradient(n: int) -> Array:
    adjoint = np.ones_like(START)
    for i, x in reversed(list(enumerate(states(n)[:-1]))):
        adjoint = adjoint_step(x, adjoint, i)
    return adjoint


def sweeps(
    n: int | None, store: Store | None = None, planner: str = "auto", slots: int = SLOTS
) -> Sweeps[Array, Array]:
    made = Arguments.of(
        step, adjoint_step, n, memory=f"{slots} slots", tiers=store, costs=COSTS, planner=planner
    )
    return Sweeps(made, progress=False)


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_planner(name: str, tiered: bool) -> None:
    ran: list[int] = []

    def counted(x: Array, i: int) -> Array:
        ran.append(i)
        return step(x, i)

    costs = COSTS if tiered else COSTS.without_tiers()
    for n in (1, 2, 7, 24):
        store = MemoryStore()
        store.open(Layout.of(START))
        executor = Executor(
            FunctionChain(counted, adjoint_step), (store,) if tiered else (), slots=SLOTS
        )
        plan = PLANNERS[name](costs, SLOTS, n)
        for _ in range(2):
            pulled = executor.forward(plan.schedule(), START)
            np.testing.assert_array_equal(pulled, states(n)[-1])
            np.testing.assert_array_equal(executor.reverse(np.ones_like(START)), gradient(n))
            counts = executor.counts
            ran.clear()
            executor.begin(plan.schedule(), START)
            ended = [executor.push(x) for x in states(n)[1:]]
            assert ended == [False] * (n - 1) + [True]
            assert ran == []
            np.testing.assert_array_equal(executor.reverse(np.ones_like(START)), gradient(n))
            assert len(ran) == executor.counts.forward_steps - n
            assert executor.counts.forward_steps == counts.forward_steps
            assert executor.counts.peak_slots == counts.peak_slots
        store.close()


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("known", [True, False])
def test_sweeps_of_a_reversal(n: int, known: bool) -> None:
    store, length = MemoryStore(), 0
    run = sweeps(n if known else None, store)
    until = None if known else lambda x, i: i == length
    for _ in range(2):
        run.begin(START, until)
        for i, x in enumerate(states(n)[1:], 1):
            length = n if i == n else 0
            run.push(x)
        np.testing.assert_array_equal(run.reverse(np.ones_like(START)), gradient(n))
        assert run.length == run.report().counts.reverse_steps == n
        np.testing.assert_array_equal(run.forward(START, until), states(n)[-1])
        np.testing.assert_array_equal(run.reverse(np.ones_like(START)), gradient(n))
    run.end(keep=False)


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("name", ["online", "streaming"])
@pytest.mark.parametrize("fault", ["lose_read", "lose_write", "refuse"])
def test_what_the_tier_does_not_keep_is_run_again(name: str, fault: str) -> None:
    made = FaultyStore(MemoryStore(), **{fault: range(0, 40, 2)})  # type: ignore[arg-type]
    run = sweeps(24, made, planner=name, slots=5)
    run.begin(START)
    for x in states(24)[1:]:
        run.push(x)
    np.testing.assert_array_equal(run.reverse(np.ones_like(START)), gradient(24))
    counts = run.report().counts
    assert counts.refused > 1 if fault == "refuse" else counts.lost > 1
    run.end(keep=False)


def test_the_time_between_two_states_is_that_of_a_step() -> None:
    now = 0.0
    executor = Executor(FunctionChain(step, adjoint_step), (), clock=lambda: now)
    executor.begin(PLANNERS["revolve"](COSTS, SLOTS, 5).schedule(), START)
    for x in states(5)[1:]:
        now += 2.0
        executor.push(x)
    assert executor.counts.forward_s == executor.counts.elapsed_s == 10.0


def test_refused() -> None:
    schedule = PLANNERS["revolve"](COSTS, SLOTS, 3).schedule
    in_place = InPlaceChain(lambda x, i: None, adjoint_step)
    taping = FunctionChain(step, adjoint_step, lambda x, i: (step(x, i), x))
    for chain in (in_place, taping):
        with pytest.raises(ArgumentError, match="pushed to functional chains"):
            Executor(chain, ()).begin(schedule(), START)
    executor = Executor(FunctionChain(step, adjoint_step), ())
    with pytest.raises(MultistageError, match="needs a forward"):
        executor.push(START)
    executor.forward(schedule(), START)
    with pytest.raises(MultistageError, match="needs a begin"):
        executor.push(START)
    back = [Save(0), Advance(0, 2), Load(0), Advance(0, 1), EndForward()]
    executor.begin(back, START)
    executor.push(states(1)[1])
    with pytest.raises(ScheduleError, match="step 0 is to run again, but its caller is at 2"):
        executor.push(states(2)[2])
    executor.begin(schedule(), START)
    with pytest.raises(StateError, match="state 1 changed leaf"):
        executor.push(START[1:])
    with pytest.raises(MultistageError, match="needs a forward"):
        executor.push(START)
    executor.begin(schedule(), START)
    for x in states(3)[1:]:
        executor.push(x)
    with pytest.raises(MultistageError, match="needs a begin"):
        executor.push(START)
    np.testing.assert_array_equal(executor.reverse(np.ones_like(START)), gradient(3))


def test_an_error_ends_the_sweep_and_is_reported() -> None:
    run = sweeps(5)
    run.begin(START)
    run.push(states(1)[1])
    with pytest.raises(StateError):
        run.push(START[1:])
    assert "1 of 5 steps run forward" in run.report().ended
    run.begin(START)
    for x in states(5)[1:]:
        run.push(x)
    np.testing.assert_array_equal(run.reverse(np.ones_like(START)), gradient(5))
