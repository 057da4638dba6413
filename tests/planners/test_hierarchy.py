"""Planners that wait for every transfer: optimal, legal, true, and no worse than the peers."""

from __future__ import annotations

import contextlib
import heapq
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import native
from multistage.actions import Advance, Drop, Get, Put, drive
from multistage.errors import ArgumentError, ScheduleError
from multistage.model.budget import Budget
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, RANKED, Plan, plan
from multistage.planners.single.binomial import (
    TRAJECTORIES,
    Trajectory,
    accesses,
    first_advance,
    nu,
)
from multistage.planners.synchronous.hierarchy import Hierarchy, Level, Rows, solve
from multistage.planners.synchronous.mixed import solve_mixed, worth_trying
from multistage.planners.synchronous.periodic_disk import asymptotic_period, best_period
from multistage.planners.synchronous.stumm_walther import stumm_walther_schedule
from multistage.schedule.rules import check
from multistage.schedule.simulation import simulate

SYNCHRONOUS = ("h-revolve", "disk-revolve", "periodic-disk", "stumm-walther")
needs_native = pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")


def tier(
    write_s: float, read_s: float, capacity: int | None = None, name: str = "slow", **more: float
) -> Tier:
    return Tier(name, write_s, read_s, capacity_states=capacity, **more)


def turns_s(costs: Costs, n: int) -> float:
    """Seconds of every schedule: one taped step and its adjoint, then turns."""
    return costs.taping_s + costs.reverse_step_s + (n - 1) * costs.turn_s


# ------------------------------------------------------------------ the optimum


def best_of_all(n: int, step_s: float, levels: tuple[Level, ...]) -> float:
    """Search every synchronous schedule: least seconds beyond the turns.

    A node says which state is live, how many adjoint steps are left and what
    each level holds.  Nothing of the dynamic program's structure is assumed.
    """
    start = (0, n, tuple(frozenset() for _ in levels))
    best: dict[Any, float] = {start: 0.0}
    heap: list[tuple[float, int, Any]] = [(0.0, 0, start)]
    made = 0
    while heap:
        seconds, _, node = heapq.heappop(heap)
        if seconds > best[node]:
            continue
        live, left, held = node
        if left == 0:
            return seconds
        after: list[tuple[float, Any]] = []
        if live is not None and live < left - 1:
            after.append((step_s, (live + 1, left, held)))
        if live == left - 1:
            kept = tuple(frozenset(i for i in states if i < left - 1) for states in held)
            after.append((0.0, (None, left - 1, kept)))
        for k, level in enumerate(levels):
            states = held[k]
            after += [(level.read_s, (i, left, held)) for i in states if i != live]
            if live is None or live in states or level.capacity == 0:
                continue
            full = level.capacity is not None and len(states) >= level.capacity
            for gone in states if full else (None,):
                now = (states - {gone}) | {live}
                after.append((level.write_s, (live, left, (*held[:k], now, *held[k + 1 :]))))
        for more_s, following in after:
            if seconds + more_s < best.get(following, np.inf):
                best[following] = seconds + more_s
                made += 1
                heapq.heappush(heap, (seconds + more_s, made, following))
    raise AssertionError("every reversal has a schedule")


def some_levels(least: int, most: int, *, free: bool) -> st.SearchStrategy[tuple[Level, ...]]:
    """Levels, each as slow as the one before it or slower."""
    more = st.tuples(st.integers(0, 3), st.integers(0, 3))
    slow = st.tuples(st.sampled_from([0, 1, 2, 3, None]), more)
    fast = st.tuples(st.integers(1, 3), st.just((0, 0)) if free else more)

    def levels(drawn: tuple[Any, list[Any]]) -> tuple[Level, ...]:
        first, others = drawn
        found = [Level(first[0], *map(float, first[1]))]
        for capacity, (write, read) in others:
            below = found[-1]
            found.append(Level(capacity, below.write_s + write, below.read_s + read))
        return tuple(found)

    return st.tuples(fast, st.lists(slow, min_size=least - 1, max_size=most - 1)).map(levels)


@pytest.mark.parametrize(("count", "most"), [(1, 7), (2, 7), (3, 6)])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_synchronous_schedule_is_cheaper(count: int, most: int, data: st.DataObject) -> None:
    levels = data.draw(some_levels(count, count, free=data.draw(st.booleans())))
    n = data.draw(st.integers(1, most))
    step_s = data.draw(st.sampled_from([1.0, 2.0, 3.0]))
    assert solve(levels, n, step_s).seconds == best_of_all(n, step_s, levels)


def test_the_plans_reach_that_optimum() -> None:
    for write_s, read_s, capacity in product((0.5, 3.0), (0.0, 2.0), (1, 2, None)):
        tiers = (tier(write_s, read_s, capacity), tier(5.0, 1.0, 1, "slower"))
        for slots, n in product((1, 2), (4, 6)):
            costs = Costs(1.0, 2.0, 1.5, tiers=tiers)
            levels = [Level(slots), *(Level(t.capacity_states, t.write_s, t.read_s) for t in tiers)]
            for name, used in (("h-revolve", levels), ("disk-revolve", levels[:2])):
                optimum = turns_s(costs, n) + best_of_all(n, 1.0, tuple(used))
                assert PLANNERS[name](costs, slots, n).makespan_s == pytest.approx(optimum)


def test_the_order_of_levels_matters_to_the_programme_alone() -> None:
    """A costly level below a free one: not optimal, and said so; tiers are put in order."""
    levels = (Level(1, 0.0, 1.0), Level(1, 0.0, 0.0))
    assert solve(levels, 5, 1.0).seconds == 8.0
    assert best_of_all(5, 1.0, levels) == 7.0
    near, far = tier(0.5, 0.5, 1, "near"), tier(4.0, 3.0, 2, "far")
    for n in (4, 7, 30, 200):
        plans = [
            PLANNERS["h-revolve"](Costs(1.0, 2.0, tiers=tiers), 1, n)
            for tiers in ((near, far), (far, near))
        ]
        assert plans[0].makespan_s == plans[1].makespan_s
        assert plans[0].parameters == plans[1].parameters
        for made in plans:
            run = simulate(made.schedule(), n, made.costs, 1)
            assert run.makespan_s == pytest.approx(made.makespan_s)


def cheapest_mix(n: int, slots: int, tape: int) -> int:
    """Search every schedule whose slots hold states or tapes: least steps that are not taped."""
    best: dict[Any, int] = {(0, n, frozenset(), frozenset()): 0}
    heap: list[tuple[int, int, Any]] = [(0, 0, next(iter(best)))]
    made = 0
    while heap:
        steps, _, node = heapq.heappop(heap)
        if steps > best[node]:
            continue
        live, left, states, tapes = node
        if left == 0:
            return steps
        after: list[tuple[int, Any]] = []
        room = slots - len(states) - tape * len(tapes)
        if live is not None and live < left - 1:
            after.append((1, (live + 1, left, states, tapes)))
            if live not in tapes and room >= tape:
                after.append((0, (live + 1, left, states, tapes | {live})))
        if live is not None and live < left and live not in states and room >= 1:
            after.append((0, (live, left, states | {live}, tapes)))
        if live == left - 1 or left - 1 in tapes:
            after.append((0, (None, left - 1, states, tapes - {left - 1})))
        after += [(0, (i, left, states, tapes)) for i in states if i != live and i < left]
        after += [(0, (live, left, states - {i}, tapes)) for i in states]
        for more, following in after:
            if steps + more < best.get(following, 1 << 30):
                best[following] = steps + more
                made += 1
                heapq.heappush(heap, (steps + more, made, following))
    raise AssertionError("every reversal has a schedule")


@pytest.mark.parametrize("tape", [1, 2, 3])
def test_no_mix_of_states_and_tapes_is_cheaper(tape: int) -> None:
    for n, slots in product(range(1, 8), range(1, 5)):
        table = solve_mixed(n, slots, tape)
        assert table.rows[-1][n] == cheapest_mix(n, slots, tape), (n, slots)


def test_the_period_is_the_best() -> None:
    for slots, n, both in product((1, 2, 4), (1, 2, 17, 60), (0.0, 0.5, 7.0, 40.0)):
        for capacity in (None, 0, 1, 3):
            every = [
                (count * (p + both + nu(p, slots)) + nu(n - count * p, slots), p, count)
                for p in range(1, n)
                for count in range(1, (n - 1) // p + 1)
                if capacity is None or count <= capacity
            ]
            least = min([nu(n, slots), *(entry[0] for entry in every)])
            period, count = best_period(slots, n, both, capacity)
            assert capacity is None or count <= capacity
            cost = count * (period + both + nu(period, slots)) + nu(n - count * period, slots)
            assert cost == pytest.approx(least), (slots, n, both, capacity)


def test_the_best_period_of_a_long_sequence_is_near_the_papers() -> None:
    for slots, both in ((3, 10.0), (5, 100.0), (50, 2.0)):
        asymptotic = asymptotic_period(slots, both)
        period, count = best_period(slots, 10**9, both, None)
        per_step = (both + nu(asymptotic, slots)) / asymptotic
        assert (both + nu(period, slots)) / period == pytest.approx(per_step, rel=1e-6)
        assert 0 < 10**9 - period * count < 10**7


# -------------------------------------------------------------- legal and true


def synchronous_costs() -> st.SearchStrategy[Costs]:
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0, 8.0])
    overhead = st.sampled_from([0.0, 0.0, 0.25])
    tiers = st.builds(
        Tier,
        st.sampled_from(["host", "file"]),
        write_s=seconds,
        read_s=seconds,
        write_overhead_s=overhead,
        read_overhead_s=overhead,
        capacity_states=st.sampled_from([None, None, 0, 1, 2, 7]),
        queue_depth=st.sampled_from([1, 2]),
    )
    return st.builds(
        Costs,
        st.just(1.0),
        st.sampled_from([1.0, 2.0]),
        tape_step_s=st.sampled_from([None, 1.0, 1.5]),
        state_bytes=st.just(10),
        tape_bytes=st.sampled_from([0, 5, 10, 25]),
        tiers=st.lists(tiers, max_size=3).map(tuple),
        action_s=st.sampled_from([0.0, 0.0, 0.0, 0.01]),
    )


def judged(made: Plan, **more: Any) -> None:
    limits = {
        k: t.capacity_states
        for k, t in enumerate(made.costs.tiers)
        if t.capacity_states is not None
    }
    check(
        made.schedule(),
        made.n_steps,
        made.slots,
        tape_slots=made.costs.tape_slots,
        tier_slots=limits,
        **more,
    )


def test_tapes_of_many_states_are_planned_without_a_table_of_all_slots() -> None:
    """Each slot is a row: a table that would take too long is not begun."""
    costs = Costs(1.0, 2.0, tape_step_s=1.0, state_bytes=4, tape_bytes=36_000)
    assert plan(costs, Budget(slots=49_147), 94).makespan_s < 94 * 4


@pytest.mark.parametrize("name", [*SYNCHRONOUS, "mixed"])
@settings(max_examples=100, deadline=None)
@given(costs=synchronous_costs(), slots=st.integers(1, 9), n=st.integers(1, 90))
def test_plans_are_legal_and_true(name: str, costs: Costs, slots: int, n: int) -> None:
    made = PLANNERS[name](costs, slots, n)
    judged(made)
    run = simulate(made.schedule(), n, costs, slots)
    if "plain Revolve" not in made.note:  # whose own count of actions is an estimate
        assert run.makespan_s == pytest.approx(made.makespan_s, rel=1e-12)
        assert run.stall_s == pytest.approx(made.stall_s, abs=1e-9)
        assert run.peak_slots == pytest.approx(made.peak_slots)
    assert run.forward_steps == made.forward_steps
    assert (run.writes, run.reads) == (made.writes, made.reads)
    assert made.lower_bound_s <= made.makespan_s * (1 + 1e-9)
    if not costs.action_s:
        assert made.makespan_s <= PLANNERS["revolve"](costs, slots, n).makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@settings(max_examples=100, deadline=None)
@given(
    costs=synchronous_costs(),
    slots=st.integers(1, 5),
    n=st.integers(1, 60),
    fates=st.lists(st.booleans(), max_size=40),
    rest=st.booleans(),
)
def test_lost_checkpoints_leave_a_legal_schedule(
    name: str, costs: Costs, slots: int, n: int, fates: list[bool], rest: bool
) -> None:
    made = PLANNERS[name](costs, slots, n)
    judged(made, survive=lambda token: fates[token] if token < len(fates) else rest)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_when_every_checkpoint_is_lost_revolve_remains(name: str) -> None:
    n, slots = 400, 4
    made = PLANNERS[name](Costs(1.0, 2.0, tiers=(tier(2.0, 2.0, 30),)), slots, n)
    assert made.writes > 1
    used = check(made.schedule(), n, slots, survive=lambda token: token < made.writes)
    # The sweep that wrote in vain, and Revolve from state 0 for what is left.
    assert used.forward_steps <= made.forward_steps + 2 * n + nu(n, slots)


def test_capacities_are_kept_by_all_tiers_at_once() -> None:
    tiers = (tier(1.0, 1.0, 3, "host"), tier(2.0, 2.0, 5, "file"), tier(9.0, 9.0, 2, "net"))
    made = PLANNERS["h-revolve"](Costs(1.0, 2.0, tiers=tiers), 2, 500)
    used = check(made.schedule(), 500, 2, tier_slots={0: 3, 1: 5, 2: 2})
    assert used.tier_peak == {0: 3, 1: 5, 2: 2}
    assert used.peak_slots == 2


# ---------------------------------------------------------------- the dynamic program


def walked_s(hierarchy: Hierarchy, step_s: float) -> float:
    """Return what the actions cost beyond the turns, checking each against what is held."""
    held: list[set[int]] = [set() for _ in hierarchy.levels]
    total = 0.0
    for action, send in drive(hierarchy.schedule()):
        match action:
            case Put(step, tier):
                level = hierarchy.levels[tier + 1]
                held[tier + 1].add(step)
                assert level.capacity is None or len(held[tier + 1]) <= level.capacity
                total += level.write_s
                send(0)
            case Get(step, tier):
                assert step in held[tier + 1]
                total += hierarchy.levels[tier + 1].read_s
                send(0)
            case Drop(step, tier):
                held[tier + 1].remove(step)
            case Advance(start, stop):
                total += (stop - start) * step_s
    assert not any(held)
    return total


@settings(max_examples=150, deadline=None)
@given(
    levels=st.one_of(some_levels(1, 3, free=True), some_levels(1, 3, free=False)),
    n=st.integers(1, 40),
)
def test_the_walk_costs_as_much_as_the_table_predicts(levels: tuple[Level, ...], n: int) -> None:
    hierarchy = solve(levels, n, 2.0)
    assert walked_s(hierarchy, 2.0) == hierarchy.seconds


@needs_native
@settings(max_examples=60, deadline=None)
@given(levels=some_levels(1, 3, free=False), n=st.integers(1, 300))
def test_the_kernel_is_its_twin(levels: tuple[Level, ...], n: int) -> None:
    ours, plain = (solve(levels, n, 2.0, native_kernel=use) for use in (True, False))
    assert ours.seconds == plain.seconds
    for a, b in zip(ours.tables, plain.tables, strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert a.slots == b.slots
        assert all(map(np.array_equal, a.rows, b.rows))
        assert all(map(np.array_equal, a.depths or (), b.depths or ()))


@needs_native
@pytest.mark.parametrize("isa", [1, 2, 3])
def test_every_instruction_set_gives_the_same_rows(
    isa: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa > native.library().ms_chain_isa():
        pytest.skip("this machine lacks the instructions")
    levels = (Level(3), Level(9, 5.3, 4.1))
    expected = solve(levels, 1500, 1.1)
    library = native.library()

    class Limited:
        def __getattr__(self, name: str) -> object:
            return (lambda: isa) if name == "ms_chain_isa" else getattr(library, name)

    monkeypatch.setattr(native, "library", Limited)
    found = solve(levels, 1500, 1.1)
    assert all(map(np.array_equal, expected.tables[1].rows, found.tables[1].rows))
    assert len(found.tables[1].rows) == 9


@needs_native
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_rough_costs_are_those_of_the_twin(seed: int) -> None:
    """Operands that ascend in leaps: the choice jumps from block to block, both ways."""
    draw, n = np.random.default_rng(seed), 1500

    def rough(scale: float) -> Any:
        leaps = np.floor(draw.exponential(scale, n + 1) * (draw.random(n + 1) < 0.1))
        return np.concatenate(([0.0, 0.0], np.cumsum(leaps)[2:]))

    rows = Rows(np.cumsum(rough(2.0)) / n + 1, rough(400.0), 5.0)
    rows.ahead[...] = np.floor(rows.ahead)
    right = np.ascontiguousarray(rough(30.0)[::-1])
    found = []
    for use in (True, False):
        row, over = rows.blank(), rows.blank()
        rows.fill(2, right, row, over, native_kernel=use)
        found.append((row, over))
    assert all(map(np.array_equal, *found))
    assert (np.diff(found[0][0]) >= 0).all()
    assert (found[0][0] < rows.below).any()


@needs_native
def test_mixed_kernel_is_its_twin() -> None:
    for tape, slots in product((1, 2, 3), (1, 2, 5, 40)):
        ours, plain = (solve_mixed(150, slots, tape, native_kernel=use) for use in (True, False))
        assert all(map(np.array_equal, ours.rows, plain.rows))


def test_enough_slots_are_as_good_as_no_bound() -> None:
    free = solve((Level(3), Level(None, 2.0, 2.0)), 400, 1.0)
    table = free.tables[1]
    assert table.depths is not None
    needed = table.slots
    assert 1 < needed < 400
    for capacity, equal in ((needed, True), (needed + 5, True), (needed // 2, False)):
        bounded = solve((Level(3), Level(capacity, 2.0, 2.0)), 400, 1.0)
        assert (bounded.seconds == free.seconds) == equal
        assert walked_s(bounded, 1.0) == bounded.seconds
    # One slot less than needed: every row is made.
    assert solve((Level(3), Level(needed - 1, 2.0, 2.0)), 400, 1.0).tables[1].slots == needed - 1


@pytest.mark.parametrize("trajectory", TRAJECTORIES)
def test_every_trajectory_is_optimal_and_counted(
    trajectory: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, slots in product((2, 3, 10, 57, 200), (1, 2, 3, 8)):
        slots = min(slots, n - 1)
        counted = [array.tolist() for array in accesses(n, slots, trajectory)]
        schedule = stumm_walther_schedule((False,) * slots, trajectory, slots, n)
        used = check(schedule, n, slots)
        assert used.forward_steps == nu(n, slots) + 1
        assert 1 <= first_advance(n, slots, trajectory) < n
        with monkeypatch.context() as patch:
            patch.setattr(native, "LIBRARY", None)
            assert [array.tolist() for array in accesses(n, slots, trajectory)] == counted


@pytest.mark.parametrize("write_s", [0.5, 3.0])
@pytest.mark.parametrize(("slots", "room"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_no_other_split_of_positions_is_cheaper(slots: int, room: int, write_s: float) -> None:
    costs = Costs(1.0, 2.0, tiers=(tier(write_s, 2 * write_s, room),))
    for n in (3, 6, 11):
        every = []
        for total in range(1, min(slots + room, n - 1) + 1):
            for in_tier, trajectory in product(product((False, True), repeat=total), TRAJECTORIES):
                made = partial(stumm_walther_schedule, in_tier, trajectory, slots, n)
                with contextlib.suppress(ScheduleError):
                    check(made(), n, slots, tier_slots={0: room})
                    every.append(simulate(made(), n, costs, slots, checked=False).makespan_s)
        least_s = PLANNERS["stumm-walther"](costs, slots, n).makespan_s
        assert least_s == pytest.approx(min(every)), (n, len(every))


# ------------------------------------------------------------------------- auto


def test_auto_finds_mixed_storage_and_predicts_right() -> None:
    chosen = set()
    for n, slots, tape_step_s, tape_bytes in product(
        (5, 40, 150), (2, 10, 60), (None, 1.0, 3.0), (10, 25)
    ):
        costs = Costs(1.0, 2.0, tape_step_s, state_bytes=10, tape_bytes=tape_bytes)
        best = plan(costs, f"{slots} slots", n)
        chosen.add(best.planner)
        runs = {
            p.planner: simulate(p.schedule(), n, costs, slots).makespan_s for p in best.candidates
        }
        assert runs[best.planner] == min(runs.values())
        assert ("mixed" in runs) == worth_trying(costs, slots, n)
        for candidate in best.candidates:
            assert runs[candidate.planner] == pytest.approx(candidate.makespan_s)
    assert "mixed" in chosen
    assert chosen <= {*RANKED, "mixed"}


# --------------------------------------------------------------------------- limits


def test_problems_that_take_too_long_are_refused() -> None:
    disk = tier(5.0, 5.0)
    for n in (5_000_000, 10**12):
        with pytest.raises(ArgumentError, match=rf"n_steps={n} .*without bound.*'periodic-disk'"):
            PLANNERS["disk-revolve"](Costs(1.0, 2.0, tiers=(disk,)), 10, n)
    few = tier(5.0, 5.0, 400)
    with pytest.raises(ArgumentError, match=r"n_steps=150000 .*'periodic-disk'"):
        PLANNERS["h-revolve"](Costs(1.0, 2.0, tiers=(few,)), 2, 150_000)
    for n in (100_000, 10**12):
        with pytest.raises(ArgumentError, match=rf"n_steps={n} .*50000 slots.*'revolve'"):
            PLANNERS["mixed"](Costs(1.0, 2.0, 1.5), 50_000, n)
    with pytest.raises(ArgumentError, match=r"n_steps=1000000000 .*'periodic-disk'"):
        PLANNERS["stumm-walther"](Costs(1.0, 2.0, tiers=(disk,)), 10, 10**9)
    made = PLANNERS["periodic-disk"](Costs(1.0, 2.0, tiers=(disk,)), 10, 10**9)
    next(made.schedule())


def test_levels_that_make_no_sense() -> None:
    for levels in ((), (Level(0),), (Level(0), Level(3, 1.0, 1.0))):
        with pytest.raises(ArgumentError, match="first level"):
            solve(levels, 10, 1.0)
    for bad in (Level(3, -1.0), Level(3, 1.0, float("inf")), Level(-2), Level(1, float("nan"))):
        with pytest.raises(ArgumentError, match="level 1"):
            solve((Level(3), bad), 10, 1.0)


@pytest.mark.parametrize("name", [*SYNCHRONOUS, "mixed"])
def test_bad_steps_and_missing_tiers(name: str) -> None:
    with pytest.raises(ArgumentError, match="must know n_steps"):
        PLANNERS[name](Costs(1.0, 2.0), 3, None)
    with pytest.raises(ArgumentError, match="at least 1"):
        PLANNERS[name](Costs(1.0, 2.0), 3, 0)
    made = PLANNERS[name](Costs(1.0, 2.0), 3, 40)
    assert made.planner == name
    assert "plain Revolve" in made.note
    assert made.makespan_s == PLANNERS["revolve"](made.costs, 3, 40).makespan_s
