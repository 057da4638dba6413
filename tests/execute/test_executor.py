"""The executor: the adjoint is that of store-all bit for bit, whatever fails."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from chains import CHAINS, TAPED, raw, store_all
from replays import actions_of, logged

from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from multistage.backends import MemoryStore, Store
from multistage.backends.testing import FaultyStore
from multistage.errors import (
    BudgetError,
    CheckpointWarning,
    MultistageError,
    ScheduleError,
    StateError,
)
from multistage.execute.executor import Executor
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, Plan
from multistage.schedule.rules import Rules, check
from multistage.schedule.simulation import simulate
from multistage.states.layout import Layout

N = 31
SYNCHRONOUS = ("h-revolve", "disk-revolve", "periodic-disk", "stumm-walther")
STREAMED = ("streaming", "interval", "online", *SYNCHRONOUS)
TIERED = (*STREAMED, "periodic", "recursive", "mixed")
answer = cache(store_all)


def planned(
    planner: str, chain: str = "nested", *, tier: bool = True, n: int = N, slots: int = 6
) -> Plan:
    """Return a plan in few slots, or in as many as it takes."""
    transfers = (0.5, 0.5) if planner in SYNCHRONOUS else (2.5, 2.0)  # so that states travel
    costs = Costs(
        1.0,
        2.0,
        tape_step_s=1.2 if chain in TAPED else None,
        tape_bytes={"tape": 20, "in-place-tape": 5}.get(chain, 0),
        state_bytes=10,
        tiers=(Tier("file", *transfers),) if tier else (),
    )
    for enough in (slots, 15, 3 * n):
        try:
            return PLANNERS[planner](costs, enough, n)
        except BudgetError:
            continue
    raise AssertionError(planner)


def run_once(executor: Executor[Any, int], plan: Plan, chain: str, n: int = N) -> None:
    """Run one sweep and compare it with store-all."""
    last, adjoint = answer(chain, n)
    state = CHAINS[chain][1]()
    assert raw(executor.forward(plan.schedule(), state)) == last
    assert executor.reverse(1) == adjoint
    assert all(array.flags.writeable for array in Layout.of(state).arrays(state))


@contextmanager
def opened(store: Store, chain: str = "nested", state: Any = None) -> Iterator[Store]:
    store.open(Layout.of(CHAINS[chain][1]() if state is None else state))
    try:
        yield store
    finally:
        store.close()


def judged(plan: Plan, n: int | None = N) -> Callable[[], Rules]:
    costs = plan.costs
    return partial(Rules, n, plan.slots, costs.tape_slots, state_is_tape=costs.state_is_tape)


# ------------------------------------------------------------- equal to store-all


def test_states_do_travel() -> None:
    for planner in TIERED:
        with opened(MemoryStore()) as tier:
            executor = Executor(CHAINS["nested"][0](), (tier,))
            run_once(executor, planned(planner), "nested")
            assert (executor.counts.writes > 0) == (planner in STREAMED)


# ----------------------------------------------------------------- stores that fail


def _faulty_sweep(plan: Plan, chain: str = "nested", **faults: Any) -> FaultyStore:
    """Run two sweeps on a store that fails; everything must be exact and judged legal."""
    with opened(FaultyStore(MemoryStore(buffer_bytes=0, queue_depth=8), **faults), chain) as store:
        executor = Executor(
            CHAINS[chain][0](), (store,), tape_slots=plan.costs.tape_slots, rules=judged(plan)
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", CheckpointWarning)
            run_once(executor, plan, chain)
        lost = executor.counts.lost
        assert len(seen) >= lost
        assert all(issubclass(warning.category, CheckpointWarning) for warning in seen)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            run_once(executor, plan, chain)
        assert isinstance(store, FaultyStore)
        return store


@pytest.mark.parametrize("chain", ["nested", "in-place-tape", "blocks-in-place"])
@pytest.mark.parametrize("planner", STREAMED)
def test_everything_fails(planner: str, chain: str) -> None:
    plan = planned(planner, chain, slots=4)
    for third in (2, 3, 5):
        _faulty_sweep(
            plan,
            chain,
            refuse=lambda k, third=third: k % third == 0,
            lose_write=lambda k, third=third: k % third == 1,
            lose_read=lambda k: k % 2 == 1,
        )
    assert _faulty_sweep(plan, chain, refuse=lambda k: True).writes == 0
    _faulty_sweep(plan, chain, lose_write=lambda k: True)
    _faulty_sweep(plan, chain, lose_read=lambda k: True)


def test_a_lost_checkpoint_is_warned_of_and_counted() -> None:
    plan = planned("interval")
    with opened(FaultyStore(MemoryStore(buffer_bytes=0), lose_read={0})) as store:
        executor = Executor(CHAINS["nested"][0](), (store,))
        with pytest.warns(CheckpointWarning, match=r"checkpoint \d+ of tier 'memory' is lost"):
            run_once(executor, plan, "nested")
        assert executor.counts.lost == 1
        assert executor.counts.forward_steps + executor.counts.recovered_steps > plan.forward_steps


def test_a_lost_write_is_known_when_it_is_awaited() -> None:
    plan = planned("streaming")
    with opened(FaultyStore(MemoryStore(buffer_bytes=0), lose_write={0})) as store:
        executor = Executor(CHAINS["nested"][0](), (store,), rules=judged(plan))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run_once(executor, plan, "nested")
        assert "could not be written" in str(seen[0].message)
        assert executor.counts.lost == len(seen)


def test_a_static_schedule_survives_the_loss_of_all() -> None:
    """Schedules that look at no answer: what is lost is made again at its Load."""
    made = actions_of("P0 a0 0>1 P1 a1 1>3 P3 a2 T3 | R3 G1 a3 L1 1>2 R2 L1 R1 F1 D1 L0 R0 D0")
    made.insert(-1, Drop(3))
    for fault in ("lose_write", "lose_read", "refuse"):
        with opened(FaultyStore(MemoryStore(), **{fault: lambda k: True})) as store:
            executor = Executor(CHAINS["nested"][0](), (store,))
            for _ in range(2):
                start = CHAINS["nested"][1]()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CheckpointWarning)
                    last = executor.forward(iter(made), start)
                    assert (raw(last), executor.reverse(1)) == answer("nested", 4)


def test_an_error_before_the_first_step_gives_the_stores_back() -> None:
    def broken() -> Rules:
        raise ValueError("no rules")

    start = CHAINS["nested"][1]()
    with opened(MemoryStore()) as store:
        failing = Executor(CHAINS["nested"][0](), (store,), rules=broken)
        with pytest.raises(ValueError, match="no rules"):
            failing.forward([Advance(0, 1), EndForward()], start)
        other = Executor(CHAINS["nested"][0](), (store,))
        other.forward([Advance(0, 1), EndForward()], start)
        assert failing.counts.forward_steps == 0


@pytest.mark.parametrize("chain", ["nested", "in-place", "in-place-tape", "blocks-in-place"])
@pytest.mark.parametrize("fault", ["lose_write", "lose_read", "refuse"])
def test_a_lost_slot_can_be_freed(fault: str, chain: str) -> None:
    """A Free of what a Get read in vain: of state 0, which needs no slot, and of one not loaded."""
    made = actions_of("P0 a0 0>1 P1 a1 1>2 T2 | R2 G1 a2 F1 G0 a3 L0 0>1 R1 L0 R0 F0 D1 D0")
    check(iter(made), 3, 3)
    with opened(FaultyStore(MemoryStore(), **{fault: lambda k: True}), chain) as store:
        executor = Executor(CHAINS[chain][0](), (store,))
        for _ in range(2):
            start = CHAINS[chain][1]()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                last = raw(executor.forward(iter(made), start))
                assert (last, executor.reverse(1)) == answer(chain, 3)
        with pytest.raises(ScheduleError, match="no slot holds it"):
            executor.forward([Free(0)], CHAINS[chain][1]())


@pytest.mark.parametrize("chain", ["nested", "in-place", "in-place-tape", "blocks", "fortran"])
@pytest.mark.parametrize("nearest", ["held", "stored", "none"])
def test_a_lost_state_is_made_from_the_nearest(nearest: str, chain: str) -> None:
    made: list[Action] = [Advance(0, 2)]
    made += {"held": [Save(2)], "stored": [Put(2), Await(0)], "none": []}[nearest]
    token = int(nearest == "stored")
    made += [Advance(2, 3), Put(3), Await(token), Advance(3, 4), EndForward()]
    made += [Get(3), Await(token + 1), Load(3), Reverse(3), Free(3)]
    made += actions_of("L0 0>2 R2 L0 0>1 R1 L0 R0 D3")
    made += {"held": [Free(2)], "stored": [Drop(2)], "none": []}[nearest]
    check(iter(made), 4, 2)
    with opened(FaultyStore(MemoryStore(), lose_read={0}), chain) as store:
        executor = Executor(CHAINS[chain][0](), (store,))
        with pytest.warns(CheckpointWarning, match="checkpoint 3"):
            last = raw(executor.forward(iter(made), CHAINS[chain][1]()))
            assert (last, executor.reverse(1)) == answer(chain, 4)
        assert executor.counts.recovered_steps == (3 if nearest == "none" else 1)


@pytest.mark.parametrize("chain", ["nested", "in-place"])
def test_a_lost_state_is_not_made_from_a_later_one(chain: str) -> None:
    made = actions_of("0>3 P3 a0 3>4 S4 4>5 | L4 R4 G3 a1 L3 R3 F3 F4 L0 0>2 R2 L0 0>1 R1 L0 R0 D3")
    check(iter(made), 5, 3)
    with opened(FaultyStore(MemoryStore(), lose_read={0}), chain) as store:
        executor = Executor(CHAINS[chain][0](), (store,))
        with pytest.warns(CheckpointWarning, match="checkpoint 3"):
            last = raw(executor.forward(iter(made), CHAINS[chain][1]()))
            assert (last, executor.reverse(1)) == answer(chain, 5)
        assert executor.counts.recovered_steps == 3


# --------------------------------------------------------- the simulator's order


@pytest.mark.parametrize("tier", [True, False])
@pytest.mark.parametrize("planner", ["store-all", "revolve", "interval", "periodic", "recursive"])
def test_the_order_is_the_simulators(planner: str, tier: bool) -> None:
    plan = planned(planner, tier=tier)
    performed: list[Any] = []
    simulated: list[Any] = []
    simulate(logged(plan.schedule(), simulated), N, plan.costs, plan.slots)
    with opened(MemoryStore()) as store:
        executor = Executor(CHAINS["nested"][0](), (store,))
        assert raw(executor.forward(logged(plan.schedule(), performed), CHAINS["nested"][1]()))
        executor.reverse(1)
    assert [action for action, _ in performed] == [action for action, _ in simulated]
    assert len(performed) > N
    assert executor.counts.forward_steps == plan.forward_steps


# ------------------------------------------------------------------ operators


class Boom(Exception):
    """Raised by an operator."""


def test_a_step_that_overwrites_its_input() -> None:
    def step(x: Any, i: int) -> Any:
        x += 1
        return x

    executor = Executor(FunctionChain(step, lambda x, a, i: a), ())
    start = np.zeros(3)
    with pytest.raises(StateError, match=r"an operator wrote to a state.*InPlaceChain"):
        executor.forward(planned("revolve").schedule(), start)
    assert start.tolist() == [0, 0, 0]
    assert start.flags.writeable


def test_slots_are_released_even_if_closing_fails() -> None:
    def schedule() -> Schedule:
        try:
            yield Advance(0, 3)
        finally:
            raise RuntimeError("close")

    def step(x: Any, i: int) -> Any:
        raise Boom("bang")

    start = np.zeros(3)
    with pytest.raises(RuntimeError, match="close"):
        Executor(FunctionChain(step, lambda x, a, i: a), ()).forward(schedule(), start)
    assert start.flags.writeable


def test_other_value_errors_are_left_alone() -> None:
    def step(x: Any, i: int) -> Any:
        raise ValueError("no convergence")

    executor = Executor(FunctionChain(step, lambda x, a, i: a), ())
    with pytest.raises(ValueError, match="no convergence") as caught:
        executor.forward(planned("revolve").schedule(), np.zeros(3))
    assert not isinstance(caught.value, MultistageError)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda x: np.append(x, 0.0), r"from \(3,\) float64 to \(4,\) float64"),
        (lambda x: x.astype(np.float32), r"to \(3,\) float32"),
        (lambda x: (x,), "changed its structure"),
        (lambda x: x.tolist(), "changed its structure"),
        (lambda x: np.ma.masked_array(x), "plain numpy.ndarray"),
    ],
)
@pytest.mark.parametrize("planner", ["store-all", "revolve", "streaming"])
def test_a_state_that_changes_its_layout(planner: str, after: Any, message: str) -> None:
    chain = FunctionChain(lambda x, i: after(x) if i == N - 1 else x + 1, lambda x, a, i: a)
    store = MemoryStore()
    store.open(Layout.of(np.zeros(3)))
    executor = Executor(chain, (store,))
    for _ in range(2):
        with pytest.raises(StateError, match=message):
            executor.forward(planned(planner).schedule(), np.zeros(3))
    store.close()


@pytest.mark.parametrize("planner", ["store-all", "revolve", "streaming"])
@pytest.mark.parametrize("tapes", [False, True])
def test_the_step_that_changed_the_layout_is_named(planner: str, tapes: bool) -> None:
    """Seen where the state is kept: revolve said "state 14" of one that step 4 returned."""

    def step(x: Any, i: int) -> Any:
        return {"a": np.append(x["a"], 0.0) if i == 4 else x["a"] + 1}

    taping = {"tape_step": lambda x, i: (step(x, i), x)} if tapes else {}
    executor = Executor(FunctionChain(step, lambda x, a, i: a, **taping), (store := MemoryStore(),))
    start = {"a": np.zeros(3)}
    store.open(Layout.of(start))
    with pytest.raises(StateError, match=r"step 4 returned a state unlike the first: state 5 .*4,"):
        executor.forward(planned(planner).schedule(), start)
    assert start["a"].flags.writeable
    store.close()


def test_a_layout_that_differs_only_once_is_reported_as_first_seen() -> None:
    """Steps that do not repeat themselves: what is found when they run again is another thing."""
    calls: list[int] = []

    def step(x: Any, i: int) -> Any:
        calls.append(i)
        return np.append(x, 0.0) if calls.count(i) == 1 and i == 2 else x + 1

    executor = Executor(FunctionChain(step, lambda x, a, i: a), ())
    with pytest.raises(StateError, match=r"^state \d+ changed leaf"):
        executor.forward(planned("revolve").schedule(), np.zeros(3))


# ------------------------------------------------------------------- schedules

_END: list[Action] = [Reverse(2), Load(0), Advance(0, 1), Reverse(1), Load(0), Reverse(0)]
ILLEGAL: dict[str, list[Action]] = {
    "no EndForward": [Advance(0, 3)],
    "empty": [],
    "wrong start": [Advance(1, 3), EndForward()],
    "unfinished": [Advance(0, 2), Tape(2), EndForward(), Reverse(2)],
    "reverse out of order": [Advance(0, 2), Tape(2), EndForward(), Reverse(1)],
    "reverse of nothing": [Advance(0, 3), EndForward(), Reverse(2)],
    "save of another": [Save(1)],
    "tape of another": [Tape(1)],
    "free of nothing": [Free(2)],
    "await of nothing": [Await(0)],
    "offer of another": [Offer(1)],
    "put of another": [Put(1)],
    "second EndForward": [Advance(0, 2), Tape(2), EndForward(), EndForward()],
    "adjoint before the end": [Tape(0), Reverse(0)],
}
ILLEGAL_TOO: dict[str, list[Action]] = {
    "load of nothing": [Advance(0, 2), Load(1)],
    "get of nothing": [Get(1)],
    "drop of nothing": [Drop(1)],
    "too far": [Advance(0, 4), EndForward()],
    "too early": [Advance(0, 2), EndForward()],
    "too many slots": [Save(0), Advance(0, 1), Save(1), Advance(1, 2), Save(2)],
    "slot left": [Save(0), Advance(0, 2), Tape(2), EndForward(), *_END],
    "write left": [Put(0), Advance(0, 2), Tape(2), EndForward(), *_END],
}


SINES = FunctionChain(lambda x, i: np.cos(x) + i, lambda x, a, i: -np.sin(x) * a)


def _perform(actions: list[Action], rules: Callable[[], Rules] | None) -> None:
    store = MemoryStore()
    start = np.zeros(3)
    store.open(Layout.of(start))
    try:
        executor: Executor[Any, Any] = Executor(SINES, (store,), rules=rules)
        executor.forward(actions, start)
        executor.reverse(start)
    finally:
        store.close()
        assert start.flags.writeable


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_schedules_are_seen(name: str) -> None:
    with pytest.raises(ScheduleError):
        _perform(ILLEGAL[name], None)


@pytest.mark.parametrize("name", ILLEGAL | ILLEGAL_TOO)
def test_illegal_schedules_are_judged(name: str) -> None:
    with pytest.raises(ScheduleError):
        _perform((ILLEGAL | ILLEGAL_TOO)[name], partial(Rules, 3, 2))


@pytest.mark.parametrize(
    "chain", ["nested", "tape", "in-place", "in-place-tape", "blocks-tape", "blocks-in-place"]
)
def test_a_tape_leaves_the_live_state_alone(chain: str) -> None:
    """Only a Reverse without a tape uses the live state up."""
    made = [Advance(0, 1), Tape(1), EndForward(), Load(0), Reverse(1), Reverse(0)]
    check(iter(made), 2, 0)
    executor = Executor(CHAINS[chain][0](), ())
    for _ in range(2):
        last = raw(executor.forward(iter(made), CHAINS[chain][1]()))
        assert (last, executor.reverse(1)) == answer(chain, 2)


def test_a_used_tape_is_released() -> None:
    made: list[Any] = []
    given_back = []

    def step(x: Any, i: int) -> Any:
        made.append(np.cos(x) + i)
        return made[-1]

    def schedule() -> Schedule:
        yield from (Tape(0), Tape(1), Tape(2), EndForward())
        for i in (2, 1, 0):
            yield Reverse(i)
            given_back.append([array.flags.writeable for array in made[:2]])

    executor: Executor[Any, Any] = Executor(FunctionChain(step, lambda x, a, i: a), ())
    executor.forward(schedule(), np.zeros(3))
    executor.reverse(np.ones(3))
    assert given_back == [[False, True], [True, True], [True, True]]


# --------------------------------------------------------------------- memory


def test_in_place_chains_reuse_their_slots() -> None:
    plan = planned("revolve", n=200)
    forward = InPlaceChain(lambda x, i, j: x.__iadd__(j - i), lambda x, a, i: a)
    executor: Executor[Any, Any] = Executor(forward, ())
    state = np.zeros(50_000)
    for _ in range(2):
        executor.forward(plan.schedule(), state)
        tracemalloc.start()
        executor.reverse(0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        state[...] = 0
    assert peak < state.nbytes  # the second sweep allocates no slot


@pytest.mark.parametrize("planner", ["revolve", "streaming"])
def test_memory_does_not_grow_with_the_steps(planner: str) -> None:
    n, slots = 4_000, 20
    state = np.zeros(1 << 16, np.uint8)
    plan = planned(planner, n=n, slots=slots)
    with opened(MemoryStore(), state=state) as store:
        chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x.copy(), lambda x, a, i: a)
        executor = Executor(chain, (store,))
        tracemalloc.start()
        executor.forward(plan.schedule(), state)
        executor.reverse(state)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # Slots, the timeline (bounded) and the index of what is in the tier.
    assert peak < (slots + 4) * state.nbytes + 500 * executor.counts.writes + (8 << 20)
    assert peak < n * state.nbytes / 10


@pytest.mark.parametrize("chain", ["nested", "in-place"])
def test_ctrl_c_between_keeping_state_0_and_the_run(
    chain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State 0 is given back, and the next sweep may begin with another."""
    plan = planned("revolve", chain, tier=False)
    executor = Executor(CHAINS[chain][0](), ())
    state = CHAINS[chain][1]()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("multistage.execute.executor.Sweep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.forward(plan.schedule(), state)
    executor.abort()
    assert all(array.flags.writeable for array in Layout.of(state).arrays(state))
    run_once(executor, plan, chain)


def test_what_a_schedule_does_meanwhile_takes_no_time_of_the_sweep() -> None:
    """A plan made in a sweep, after seconds of measuring, would be taken for slow steps."""
    now = 0.0

    def step(x: Any, i: int) -> Any:
        nonlocal now
        now += 1.0
        return np.sin(x)

    def schedule() -> Schedule:
        nonlocal now
        for action in PLANNERS["revolve"](Costs(1.0, 2.0), 3, 5).schedule():
            yield action
            if action == Advance(1, 2):
                with executor.paused():
                    now += 100.0

    chain: FunctionChain[Any, Any] = FunctionChain(step, lambda x, a, i: np.cos(x) * a)
    executor = Executor(chain, (), clock=lambda: now)
    executor.forward(schedule(), np.ones(3))
    assert executor.counts.elapsed_s == executor.counts.forward_s == 5.0
    executor.reverse(np.ones(3))
    assert executor.counts.elapsed_s == executor.counts.forward_steps == now - 100.0
    spans = [span for span in executor.timeline.lanes["compute"] if span.kind == "forward"]
    assert executor.timeline.end_forward_s == 5.0
    assert spans[-1].stop_s == executor.counts.forward_steps
