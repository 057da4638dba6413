"""Reversal of steps that differ: bits of store-all, within the budget, or a clear error."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import kept, raw
from unequal_chains import KINDS, Case

from multistage import Budget, Costs, FunctionChain, InPlaceChain, Reversal, StageCosts
from multistage.backends import FileStore, MemoryStore, Store
from multistage.backends.testing import FaultyStore
from multistage.errors import (
    ArgumentError,
    BudgetError,
    CheckpointWarning,
    ScheduleError,
    StateError,
    StoreError,
)
from multistage.execute.metered import Metered, of_chain
from multistage.model.stages import Stage
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import smallest_memory
from multistage.planners.chain.pieces import MOST_AT_ONCE
from multistage.reversing import streamed, unequal, uniform
from multistage.reversing.unequal import Unequal
from multistage.states.layout import Layout


@pytest.fixture(autouse=True)
def _measured_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform, "_PROBE_S", 0.01)
    monkeypatch.setattr(streamed, "_PROBE_S", 0.01)


def swept(run: Reversal[Any, int], case: Case) -> tuple[bytes, int]:
    try:
        last = raw(run.forward(case.start()))
    except BudgetError as error:  # a tape was larger than the one measured first
        assert "call forward() again" in str(error)
        last = raw(run.forward(case.start()))
    return last, run.reverse(1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_slots_hold_together_is_no_more_than_the_plan_says(kind: str) -> None:
    """State 0, and what a tape shares with a state, is held once."""
    for seed in range(6):
        case = Case(seed, kind, 11)
        for memory in ("1 slots", "4 slots", "12 slots"):
            with Reversal(case.chain(), costs=case.costs, memory=memory) as run:
                assert swept(run, case) == case.store_all()
                held = max(nbytes for _, nbytes in run.report().timeline.memory["fast"])
                assert run.plan is not None and 0 < held <= run.plan.peak_bytes


def test_steps_in_place_that_differ_are_not_prepared_before_a_sweep() -> None:
    case = Case(4, "in-place", 12)
    with Reversal(case.chain(), n_steps=12, memory="2 slots") as run:
        with pytest.raises(ArgumentError, match=r"steps differ, .* costs=StageCosts"):
            run.prepare(case.start())
        assert swept(run, case) == case.store_all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 12])
def test_costs_given_all_budgets_give_the_bits_of_store_all(kind: str, n: int) -> None:
    for seed in range(2):
        case = Case(seed, kind, n)
        answer, costs = case.store_all(), case.costs
        largest = costs.largest_state_bytes
        whole = sum(stage.tape_bytes for stage in costs.stages)
        budgets = {largest, 2 * largest, 3 * largest + 17, whole // 2 + largest, whole + largest}
        for budget in (*sorted(budgets), "2 slots"):
            with Reversal(case.chain(), memory=budget, costs=costs) as run:
                for _ in range(2):
                    assert swept(run, case) == answer
                assert run.plan is not None
                assert "makespan" in str(run.report())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 13])
def test_without_costs_the_first_sweep_measures(kind: str, n: int) -> None:
    for seed in range(2):
        case = Case(seed, kind, n)
        answer = case.store_all()
        largest = max(case.sizes) + 200  # uniform states are counted as records
        for budget in (largest, 3 * largest, 100 * largest, "3 slots"):
            with Reversal(case.chain(), n_steps=n, memory=budget) as run:
                for _ in range(3):
                    assert swept(run, case) == answer
                assert str(run.report())


@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_that_is_asked_for_calls_each_step_once(kind: str) -> None:
    case, ran = Case(3, kind, 13), list[int]()
    answer, plain = case.store_all(), case.step

    def step(state: Any, i: int) -> Any:
        ran.append(i)
        return plain(state, i)

    case.step = step  # type: ignore[method-assign]
    with Reversal(case.chain(), n_steps=13, memory="3 slots", planner="survey") as run:
        last = raw(run.forward(case.start()))
        assert ran == list(range(13))
        assert (last, run.reverse(1)) == answer
        assert isinstance(run.costs, StageCosts)
        assert swept(run, case) == answer


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_number_of_steps(kind: str) -> None:
    for seed in range(4):
        case = Case(seed, kind, 11)
        with Reversal(case.chain(), memory="3 slots") as run:
            for _ in range(2):
                last = raw(run.forward(case.start(), until=lambda state, i: i == 11))
                assert (last, run.reverse(1)) == case.store_all()


# ------------------------------------------------------------------------- memory


def _large(seed: int, n: int, in_place: bool) -> tuple[Any, StageCosts, Any]:
    """Return a chain of large states and its costs, whose steps need no memory besides."""
    counts = np.random.default_rng(seed).integers(2_000, 20_000, n + 1)
    sizes = [8 * int(count) for count in counts]

    def step(state: Any, i: int) -> Any:
        return {"u": np.full(counts[i + 1], state["u"][0] / 2 + i)}

    def forward(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            value = state["u"][0] / 2 + i
            state["u"] = np.full(counts[i + 1], value)

    def adjoint_step(state: Any, adjoint: float, i: int) -> float:
        return float(adjoint + state["u"][-1])

    chain = InPlaceChain(forward, adjoint_step) if in_place else FunctionChain(step, adjoint_step)
    stages = [Stage("", 1.0 + i % 5, 1.0, size, size, 0) for i, size in enumerate(sizes[1:])]
    return chain, StageCosts(tuple(stages), sizes[0]), lambda: {"u": np.ones(counts[0])}


@pytest.mark.long(but=("*-given", "*-measured", "True-streamed"))
@pytest.mark.parametrize("what", ["given", "measured", "streamed"])
@pytest.mark.parametrize("in_place", [False, True])
def test_no_more_memory_than_budget_and_largest_step(
    in_place: bool, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rest of a sweep on a late tier is planned by a table, which is no state.
    monkeypatch.setattr("multistage.execute.late.Late.__call__", lambda *_: None)
    known = what != "measured"
    # Of the sweep's own objects; all pages may be waiting to be written.
    slack = 150_000 if what == "streamed" else 100_000
    n = 24
    for seed in range(1 if what == "streamed" else 2):
        chain, costs, start = _large(seed, n, in_place)
        for slots in (1, 5):
            room = slots * costs.largest_state_bytes
            limit = smallest_memory(of_chain(costs, chain)) + room + slack
            given = costs if known else None
            tier, budget = None, room + 200
            if what == "streamed":
                tier = FileStore(tmp_path, "direct", buffer_bytes=0)
                budget += (buffers := tier.buffer_bytes(Layout.up_to(costs.largest_state_bytes)))
                limit += buffers
            with Reversal(chain, n_steps=n, memory=budget, costs=given, tiers=tier) as run:
                for sweep in range(2):
                    if not known and not sweep:
                        run.forward(start())  # this one measures, and plans as it goes
                        run.reverse(0.0)
                    run.prepare(start())
                    tracemalloc.start()
                    run.forward(start())
                    run.reverse(0.0)
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    assert peak <= limit, (seed, slots, sweep, peak, limit)
                    if slots == 5 and tier is None:
                        assert peak > limit / 2  # the budget is used


def test_a_larger_state_that_only_a_tape_refers_to_is_noticed() -> None:
    def step(u: Any, i: int) -> Any:
        return np.full(100_000 if i in (5, 6) else 100, u[0] / 2 + i)

    def taped(u: Any, i: int) -> Any:
        return step(u, i), (u,)

    with Reversal(step, lambda t, a, i: a, 20, tape_step=taped, memory="20 slots") as run:
        run.forward(np.ones(100))  # planned to hold all tapes, until states 6 and 7 show
        run.reverse(0.0)
        assert isinstance(run.costs, StageCosts)
        assert run.costs.stages[5].output_bytes == 800_000


@pytest.mark.parametrize("kind", KINDS)
def test_checked_judges_the_actions_of_a_plan_byte_by_byte(kind: str) -> None:
    case = Case(4, kind, 12)
    tier = MemoryStore(buffer_bytes=0)
    with Reversal(
        case.chain(), costs=case.costs, memory="1 slots", tiers=tier, checked=True
    ) as run:
        assert swept(run, case) == case.store_all()
        steps = run._sweeps.steps
        assert isinstance(steps, Unequal)
        plan = steps.plan
        steps.plan = replace(plan, memory_bytes=plan.peak_bytes - 1)
        steps.stale = False  # whatever the tier's rates were
        with pytest.raises(ScheduleError, match="but the limit is"):
            swept(run, case)


@pytest.mark.parametrize("kind", ["functional", "tape", "in-place-tape"])
def test_checked_counts_the_last_gradient_from_the_reverse_sweep_on(kind: str) -> None:
    for seed in range(4):
        case = Case(seed, kind, 7)
        stages = [replace(s, gradient_bytes=s.output_bytes) for s in case.costs.stages]
        costs = replace(case.costs, stages=tuple(stages))
        tier = MemoryStore(buffer_bytes=0)
        with Reversal(case.chain(), costs=costs, memory="1 slots", tiers=tier, checked=True) as run:
            assert swept(run, case) == case.store_all()


# --------------------------------------------------------------------- what is refused


def test_costs_that_do_not_fit_are_refused_before_any_step_runs() -> None:
    case = Case(0, "functional", 6)
    costs, calls = case.costs, 0

    def step(state: Any, i: int) -> Any:
        nonlocal calls
        calls += 1
        return case.step(state, i)

    chain = FunctionChain(step, lambda x, a, i: a)
    taped = replace(costs, stages=(*costs.stages[:-1], replace(costs.stages[-1], tape_bytes=10**6)))
    budget: Any
    for bad, n, budget, words in (
        (costs, 7, "3 slots", "6 stages, but there are n_steps=7"),
        (costs, 6, max(case.sizes) - 1, "needed for one state"),
        (costs, 6, 0, "needed for one state"),
        (taped, 6, "3 slots", "state is its own tape"),
    ):
        with pytest.raises((ArgumentError, BudgetError), match=words):
            Reversal(chain, n_steps=n, memory=budget, costs=bad)
    for more, words in (
        ({"planner": "revolve"}, "plans uniform steps"),
        ({"states": object()}, "states="),
    ):
        with pytest.raises(ArgumentError, match=words):
            Reversal(chain, costs=costs, **more)
    for more, words in (
        ({"costs": costs}, "leave costs= out"),
        ({"costs": Costs(1.0, 2.0)}, "leave costs= out"),
        ({"durable": "somewhere"}, "planner='survey' does not go with durable="),
        ({"states": object()}, "planner='survey' does not go with states="),
    ):
        with pytest.raises(ArgumentError, match=words):
            Reversal(chain, n_steps=6, planner="survey", **more)
    small = replace(costs, input_bytes=costs.input_bytes - 1)
    with (
        pytest.raises(BudgetError, match=f"state 0 takes {costs.input_bytes} bytes"),
        Reversal(chain, costs=small, memory="3 slots") as run,
    ):
        run.forward(case.start())
    assert calls == 0
    for number in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ArgumentError, match="forward_s"):
            replace(costs.stages[0], forward_s=number)


@pytest.mark.parametrize("kind", ["functional", "in-place", "tape"])
def test_a_state_or_tape_larger_than_its_costs_ends_the_sweep(kind: str) -> None:
    case = Case(1, kind, 8)
    costs = case.costs
    for k in (0, 3, 7):
        stage = costs.stages[k]
        less = replace(stage, output_bytes=stage.output_bytes - 1)
        if kind != "tape":
            less = replace(less, tape_bytes=less.output_bytes)
        stages = (*costs.stages[:k], less, *costs.stages[k + 1 :])
        with Reversal(case.chain(), costs=replace(costs, stages=stages), memory="9 slots") as run:
            with pytest.raises(BudgetError, match=f"state {k + 1} takes .* of step {k};"):
                run.forward(case.start())
            with pytest.raises(ArgumentError, match="needs a forward"):
                run.reverse(1)
    if kind == "tape":
        less = replace(costs.stages[5], tape_bytes=costs.stages[5].output_bytes)
        stages = (*costs.stages[:5], less, *costs.stages[6:])
        small = replace(costs, stages=stages)
        with (
            Reversal(case.chain(), costs=small, memory="99 slots") as run,
            pytest.raises(BudgetError, match="the tape of step 5"),
        ):
            run.forward(case.start())


@pytest.mark.parametrize("in_place", [False, True])
def test_sizes_that_change_between_sweeps_are_measured_again(in_place: bool) -> None:
    scale = 1

    def step(state: Any, i: int) -> Any:
        return {"u": np.full(scale * (3 + i * 7 % 11), state["u"].sum() / 50 + i)}

    def forward(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            state["u"] = step(state, i)["u"]

    def adjoint_step(state: Any, adjoint: float, i: int) -> float:
        return adjoint * 0.5 + state["u"].sum()

    def start() -> Any:
        return {"u": np.ones(5)}

    n = 15
    chain = InPlaceChain(forward, adjoint_step) if in_place else FunctionChain(step, adjoint_step)
    with Reversal(chain, n_steps=n, memory=Budget(slots=4)) as run:
        for scale in (1, 1, 30, 30, 2):
            plain = FunctionChain(step, adjoint_step)
            assert (raw(run.forward(start())), run.reverse(0.0)) == kept(plain, start(), 0.0, n)
            assert isinstance(run.costs, StageCosts)
            sizes = [stage.output_bytes for stage in run.costs.stages]
            assert sizes == [8 * scale * (3 + i * 7 % 11) for i in range(n)]


@pytest.mark.parametrize("grown", range(1, 9))
def test_an_in_place_state_0_is_restored_wherever_a_state_has_grown(grown: int) -> None:
    n, grows = 9, False

    def forward(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            state["u"] += i
            size = (5, 7)[i % 2] * (3 if grows and i + 1 == grown else 1)
            state["u"] = np.sin(np.resize(state["u"], size))

    def adjoint_step(state: Any, adjoint: float, i: int) -> float:
        return adjoint * 0.5 + float(state["u"].sum())

    def start() -> Any:
        return {"u": np.linspace(0, 1, 5)}

    chain = InPlaceChain(forward, adjoint_step)
    with Reversal(chain, n_steps=n, memory="1 slots") as run:
        for grows in (False, False, True):  # noqa: B007
            wanted = kept(chain, start(), 0.0, n)
            assert (raw(run.forward(start())), run.reverse(0.0)) == wanted


@pytest.mark.parametrize("budget", ["1 slots", "2 slots", "50 slots"])
@pytest.mark.parametrize("kind", ["repeated", "turned", "tuple"])
def test_in_place_arrays_whose_shape_a_step_sets_are_refused(kind: str, budget: str) -> None:
    def one(state: Any, i: int) -> None:
        for array in state if kind == "tuple" else [state]:
            array += i
        if i == 4 and kind == "repeated":
            state.resize(5, refcheck=False)  # a kept state of one number would fill it
        elif i == 4:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # setting a shape is deprecated
                (state[0] if kind == "tuple" else state).shape = (1, 4)

    def forward(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            one(state, i)

    def start() -> Any:
        if kind == "tuple":
            return np.arange(4.0), np.ones(3)
        return np.ones(1) if kind == "repeated" else np.arange(4.0)

    chain = InPlaceChain(forward, lambda state, adjoint, i: adjoint)
    with Reversal(chain, n_steps=9, memory=budget) as run, pytest.raises(StateError):
        run.forward(start())
        run.reverse(0.0)


def test_state_0_is_not_restored_into_an_array_of_the_operators() -> None:
    own = np.arange(5.0)

    def forward(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            state["u"], state["v"] = own, np.ones(3 + i)

    chain = InPlaceChain(forward, lambda state, adjoint, i: adjoint)
    with Reversal(chain, n_steps=5, memory="2 slots") as run:
        with pytest.raises(StateError, match="something else refers to"):
            run.forward({"u": np.zeros(5), "v": np.ones(2)})
        assert own.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("budget", ["1 slots", "2 slots", "50 slots"])
def test_a_missing_state_is_named_by_its_number(budget: str) -> None:
    def step(u: Any, i: int) -> Any:
        return None if i == 5 else np.ones(3 + i % 2)

    with (
        Reversal(step, lambda u, a, i: a, 11, memory=budget) as run,
        pytest.raises(StateError, match="state 6: leaf of the state is NoneType"),
    ):
        run.forward(np.ones(3))


def test_a_state_that_shows_its_size_in_the_reverse_sweep_only_is_measured_next() -> None:
    n = 40

    def step(u: Any, i: int) -> Any:
        return np.full(9 if i + 1 == 29 else 3, u.sum() / 9 + i)

    chain = FunctionChain(step, lambda u, a, i: a * 0.5 + float(u.sum()))
    wanted = kept(chain, np.ones(3), 0.0, n)[1]
    with Reversal(chain, n_steps=n, memory="3 slots") as run:
        run.forward(np.ones(3))
        with pytest.raises(StateError, match="again, which measures"):
            run.reverse(0.0)
        for _ in range(2):
            run.forward(np.ones(3))
            assert run.reverse(0.0) == wanted


def test_a_step_that_does_another_thing_when_it_is_run_again_is_an_error() -> None:
    calls = 0

    def step(x: Any, i: int) -> Any:
        nonlocal calls
        calls += 1
        return np.zeros(3 + i if calls <= 9 else 2)

    stages = tuple(Stage("", 1.0, 1.0, 8 * 20, 8 * 20, 0) for _ in range(9))
    run = Reversal(step, lambda x, a, i: a, costs=StageCosts(stages, 160), memory="1 slots")
    with run:
        run.forward(np.zeros(2))
        with pytest.raises(StateError, match=r"state \d+ differs .* must do the same each time"):
            run.reverse(1.0)


def test_times_given_are_corrected_and_sizes_stay() -> None:
    case = Case(1, "functional", 12)
    stages = [replace(one, forward_s=3600.0, backward_s=3600.0) for one in case.costs.stages]
    given = replace(case.costs, stages=tuple(replace(one, spared_s=0.0) for one in stages))
    with Reversal(case.chain(), costs=given, memory="3 slots") as run:
        assert swept(run, case) == case.store_all()
        assert run.report().plan.makespan_s > 3600
        assert swept(run, case) == case.store_all()
        assert run.report().plan.makespan_s < 3600
        assert isinstance(run.costs, StageCosts)
        sizes = [(one.output_bytes, one.tape_bytes) for one in run.costs.stages]
        assert sizes == [(one.output_bytes, one.tape_bytes) for one in given.stages]


def test_given_uniform_costs_or_a_planner_keep_steps_uniform() -> None:
    case = Case(2, "functional", 9)
    for more in ({"costs": Costs(1.0, 2.0, state_bytes=100)}, {"planner": "revolve"}):
        with (
            Reversal(case.chain(), n_steps=9, memory="3 slots", **more) as run,
            pytest.raises(StateError, match="unlike the first"),
        ):
            run.forward(case.start())


# ---------------------------------------------------------------------------- tiers


TIERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(buffer_bytes=0),
    "file": lambda folder: FileStore(folder, "direct", buffer_bytes=48 << 10),
}


@pytest.mark.long(but=("file-functional", "file-in-place-tape", "memory-one-tape"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TIERS)
def test_states_of_unequal_size_travel(name: str, kind: str, tmp_path: Path) -> None:
    for seed in range(2):
        case = Case(seed, kind, 14)
        for known in (True, False):
            costs = case.costs if known else None
            run = Reversal(
                case.chain(), n_steps=14, memory="1 slots", costs=costs, tiers=TIERS[name](tmp_path)
            )
            with run:
                for sweep in range(2):
                    assert swept(run, case) == case.store_all()
                    if known:  # by the times that were given, then by those of the first sweep
                        assert run.report().counts.writes > 0 or sweep
                        assert run.report().counts.lost == 0
                if not seed:
                    run.report().save(tmp_path / "report.html")
                    assert run.report().peak_fast_bytes <= run.plan.peak_bytes


@pytest.mark.parametrize("kind", ["functional", "in-place-tape", "one-tape"])
def test_states_travel_where_steps_are_too_many_for_one_table(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Tier.of_rates(30.0, 60.0, tapes=False)  # of some states of 90 bytes in steps of 10 s
    monkeypatch.setattr(unequal, "measured_rates", lambda *_: rates)
    case = Case(4, kind, MOST_AT_ONCE + 30, scale=3)
    store = MemoryStore(buffer_bytes=0)
    run = Reversal(case.chain(), costs=case.costs, memory="3 slots", tiers=store, checked=True)
    with run:
        assert swept(run, case) == case.store_all()
        plan = run.report().plan
        without = plan.candidate("no tier")
        assert plan.writes and plan.makespan_s < 0.9 * without.makespan_s
        assert run.report().counts.writes == plan.writes
        assert run.report().counts.lost == 0


@pytest.mark.parametrize("share", [1, 8])
def test_a_share_of_a_bandwidth_that_others_leave_idle(
    share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Tier.of_rates(30.0, 60.0, tapes=False)
    monkeypatch.setattr(unequal, "measured_rates", lambda *_: rates)
    case = Case(4, "functional", 20, scale=3)
    tier = f"memory:?buffers=0&share={share}"
    with Reversal(case.chain(), costs=case.costs, memory="3 slots", tiers=tier) as run:
        planned = []
        for _ in range(2):
            assert swept(run, case) == case.store_all()
            planned.append(run.report().plan.tier)
        assert planned[0] == rates
        assert (planned[1] == rates) == (share > 1)


@pytest.mark.long(but="functional-*")
@pytest.mark.parametrize("fault", ["refuse", "lose_write", "lose_read"])
@pytest.mark.parametrize("kind", ["functional", "in-place-tape", "one-tape"])
def test_a_fault_at_any_transfer_costs_time_only(
    kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Transfers are numbered again where a plan is: one plan, whatever the machine is busy with.
    fast = Tier.of_rates(1e12, 1e12, tapes=False)
    monkeypatch.setattr(unequal, "measured_rates", lambda *_: fast)
    monkeypatch.setattr(unequal, "seen_rates", lambda rates, timeline: rates)
    case = Case(5, kind, 12)
    answer, costs, noticed = case.store_all(), case.costs, 0
    numbers: list[Any] = [0, 1, 3, None]
    on = [False]
    for number in numbers:

        def hit(k: int, number: int | None = number) -> bool:
            return on[0] and (k == number or (number is None and k % 2 == 0))

        on[0] = False  # while the tier is measured
        store = FaultyStore(MemoryStore(buffer_bytes=0), **{fault: hit})
        with (
            Reversal(case.chain(), memory="1 slots", costs=costs, tiers=store) as run,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", CheckpointWarning)
            run.prepare(case.start())
            on[0] = True
            met = 0
            for _ in range(2):
                assert swept(run, case) == answer
                counts = run.report().counts
                met += counts.lost + counts.refused
            noticed += bool(met)
    assert noticed == len(numbers)


def test_tiers_that_cannot_hold_a_state() -> None:
    case = Case(3, "functional", 9)
    small = MemoryStore(64, buffer_bytes=0)
    with (
        Reversal(case.chain(), costs=case.costs, memory="2 slots", tiers=small) as run,
        pytest.raises(StoreError, match="capacity"),
    ):
        run.forward(case.start())


# ----------------------------------------------------------- equal sizes, unequal times


@pytest.mark.parametrize("spread", [1, 20])
@pytest.mark.parametrize("in_place", [False, True])
def test_steps_of_unequal_times_are_planned_by_what_the_first_sweep_shows(
    in_place: bool, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, n = [0.0], 30
    costs = [float(spread) if 12 <= i < 18 else 1.0 for i in range(n)]
    for module in (uniform, unequal):
        monkeypatch.setattr(module, "Metered", partial(Metered, clock=lambda: now[0]))
    monkeypatch.setattr(uniform, "LEAST_TIMED_S", 0.0)

    def step(u: Any, i: int) -> Any:
        now[0] += costs[i]
        return np.sin(u + i)

    def forward(u: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            u[...] = step(u, i)

    def adjoint_step(u: Any, a: Any, i: int) -> Any:
        now[0] += 2 * costs[i]
        return a * np.cos(u + i)

    states = [np.linspace(0, 1, 9)]
    for i in range(n):
        states.append(np.sin(states[-1] + i))
    wanted = np.ones(9)
    for i in reversed(range(n)):
        wanted = adjoint_step(states[i], wanted, i)
    chain = InPlaceChain(forward, adjoint_step) if in_place else FunctionChain(step, adjoint_step)
    took = []
    with Reversal(chain, n_steps=n, memory="3 slots") as run:
        for sweep in range(3):
            if sweep == 0:
                run.prepare(np.linspace(0, 1, 9))
            began = now[0]
            last = run.forward(np.linspace(0, 1, 9))
            assert last.tobytes() == states[-1].tobytes()
            assert run.reverse(np.ones(9)).tobytes() == wanted.tobytes()
            took.append(now[0] - began)
            assert str(run.report())
            assert (isinstance(run.costs, StageCosts)) == (spread > 1)
    if spread > 1:
        assert max(took[1:]) < took[0] / 1.1
    else:
        assert took[0] == pytest.approx(took[2])
