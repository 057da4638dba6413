"""The chain planners against exhaustive search, the Python twin and the byte-exact judge."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chain_exact import exact_chain_makespan

from multistage import native
from multistage.actions import Advance, EndForward, Free, Load, Reverse, Tape
from multistage.errors import ArgumentError, BudgetError, ScheduleError
from multistage.model.stages import Stage, StageCosts, Way
from multistage.planners import Plan
from multistage.planners.chain.heterogeneous import memory_curve, plan_chain, smallest_memory
from multistage.planners.chain.memory import actions_of, use_of
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table, judge, smallest
from multistage.planners.synchronous.hierarchy import Level, solve

needs_native = pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")


def random_chain(seed: int, length: int, largest: int = 6) -> StageCosts:
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output = draw.randint(0, largest)
        forward_s = float(draw.randint(0, 5))
        stages.append(
            Stage(
                f"s{k}",
                forward_s=forward_s,
                spared_s=draw.choice([0.0, forward_s / 2]),
                backward_s=float(draw.randint(0, 3)),
                output_bytes=output,
                tape_bytes=output + draw.randint(0, largest),
                gradient_bytes=draw.choice([output, draw.randint(0, largest)]),
                forward_overhead_bytes=draw.choice([0, draw.randint(0, largest)]),
                tape_overhead_bytes=draw.choice([0, draw.randint(0, largest)]),
                backward_overhead_bytes=draw.choice([0, draw.randint(0, largest)]),
                spared_bytes=draw.choice([0, draw.randint(0, output)]),
                saves_input=draw.random() < 0.5,
            )
        )
    return StageCosts(tuple(stages), draw.randint(0, 4), draw.randint(0, 4))


def big_chain(seed: int, length: int) -> StageCosts:
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output = int(draw.lognormvariate(15, 0.7))
        forward_s = draw.lognormvariate(-6, 0.7)
        stages.append(
            Stage(
                f"s{k}",
                forward_s=forward_s,
                spared_s=forward_s * max(0.0, draw.uniform(-0.3, 0.3)),
                backward_s=draw.lognormvariate(-5.5, 0.7),
                output_bytes=output,
                tape_bytes=int(output * draw.uniform(1, 4)),
                forward_overhead_bytes=int(output * draw.uniform(0, 0.5)),
                backward_overhead_bytes=int(output * draw.uniform(0, 0.5)),
                spared_bytes=draw.choice([0, output]),
                saves_input=draw.random() < 0.5,
            )
        )
    return StageCosts(tuple(stages), 1 << 20)


# --------------------------------------------------------------- optimality


@pytest.mark.long(but="[0-3]")
@pytest.mark.parametrize("seed", range(30))
def test_theorem_1_is_the_persistent_optimum_in_whole_slots(seed: int) -> None:
    """Every memory from the smallest to plenty, against all valid persistent sequences."""
    costs = random_chain(seed, length=1 + seed % 5, largest=4)
    sizes = Sizes.of(costs)
    plain = plan_chain(costs).plain_bytes
    table = Table(sizes, plain, native_kernel=None)
    least = smallest_memory(costs)
    for memory in range(plain + 1):
        exact = exact_chain_makespan(costs, memory)
        ours = table.least_seconds(memory - costs.input_bytes) if memory >= costs.input_bytes else 9
        if memory < costs.input_bytes:
            assert math.isinf(exact)
        else:
            assert ours == pytest.approx(exact, rel=1e-5)
        assert math.isfinite(exact) == (memory >= least)


@pytest.mark.long(but="[0-2]-*")
@pytest.mark.parametrize("twelve_orders", [False, True])  # of magnitude, between the costs
@pytest.mark.parametrize("seed", range(20))
def test_plans_with_true_sizes_are_optimal_and_within_the_limit(
    seed: int, twelve_orders: bool
) -> None:
    draw, costs = random.Random(seed), random_chain(seed + 500, length=2 + seed % 4, largest=5)

    def scaled(stage: Stage) -> Stage:
        run_s, back_s = (10.0 ** draw.uniform(-9, 3) for _ in range(2))
        return replace(stage, forward_s=run_s, backward_s=back_s, spared_s=0.0)

    if twelve_orders:
        costs = replace(costs, stages=tuple(map(scaled, costs.stages)))
    for memory in range(smallest_memory(costs), plan_chain(costs).plain_bytes + 1):
        plan = plan_chain(costs, memory)
        assert plan.peak_bytes <= memory
        assert plan.makespan_s == pytest.approx(exact_chain_makespan(costs, memory))


def counterexample(n: int, tape_2: int) -> StageCosts:
    """Figure 2: k = n - 1; states of size 2 but the first; peaks 6 in the middle, 7 at the end."""
    length = n + 2
    stages = []
    for j in range(1, length + 1):
        output = 1 if j == 1 else 2
        before = {1: 0, 2: 1}.get(j, 2)
        peak = 7 if j == length else 6 if j > 2 else 0
        over = max(0, peak - before - output)
        stages.append(
            Stage(
                f"F{j}",
                forward_s={1: n - 1.0, 2: 2.0}.get(j, 0.0),
                backward_s=0.0,
                output_bytes=output,
                tape_bytes=tape_2 if j == 2 else output + over,
                gradient_bytes=0,
                forward_overhead_bytes=over,
            )
        )
    return StageCosts(tuple(stages))


@pytest.mark.parametrize("n", [4, 5])
def test_no_persistent_schedule_of_figure_2_is_optimal(n: int) -> None:
    """3n + 1 against 2n + 2.

    The paper counts n + 1 runs of F2 for the persistent schedule, as if its tape
    could never be kept, and two for the other, as if it were: each holds, but
    of different tapes.
    """
    large = counterexample(n, tape_2=5)
    assert exact_chain_makespan(large, 8) == 3 * n + 1
    assert plan_chain(large, 8).makespan_s == 3 * n + 1
    assert exact_chain_makespan(large, 8, persistent=False, pinned=False) == 2 * n + 4
    small = counterexample(n, tape_2=2)
    assert exact_chain_makespan(small, 8) == 3 * n - 1
    assert plan_chain(small, 8).makespan_s == 3 * n - 1
    assert exact_chain_makespan(small, 8, persistent=False, pinned=False) == 2 * n + 2


@given(st.integers(0, 10**6), st.integers(1, 12), st.booleans())
@settings(max_examples=60, deadline=None)
def test_judges_agree(seed: int, length: int, tapes: bool) -> None:
    """The recursion's peak, its C kernel's and the simulator's are the same to the byte."""
    costs = random_chain(seed, length, largest=50)
    true = Sizes.of(costs)
    slots = 40
    sizes = true.in_slots(max(1.0, float(true.tape.sum()) / slots))
    table = Table(sizes, slots, tapes=tapes)
    seconds, peaks = table.curve(true)
    for memory in range(slots + 1):
        trace = table.trace(memory)
        assert (trace is None) == math.isinf(seconds[memory])
        if trace is None:
            continue
        use = use_of(actions_of(trace), costs)
        assert judge(true, trace) == (seconds[memory], peaks[memory])
        assert use.peak_bytes == peaks[memory] + costs.input_bytes
        assert use.makespan_s == pytest.approx(seconds[memory])


def with_ways(costs: StageCosts, rng: random.Random) -> StageCosts:
    """Return a chain of which some tapes may be kept in part."""

    def stage(s: Stage) -> Stage:
        kept = [rng.randint(s.output_bytes, s.tape_bytes) for _ in range(rng.randint(0, 2))]
        over = [(s.tape_bytes - k) + rng.randint(0, 3) for k in kept]
        ways = [
            Way(k, s.tape_overhead_bytes + o, s.backward_overhead_bytes + o, rng.randint(0, 4) / 8)
            for k, o in zip(kept, over, strict=True)
        ]
        return replace(s, ways=tuple(ways))

    return replace(costs, stages=tuple(stage(s) for s in costs.stages))


@needs_native
@pytest.mark.parametrize("seed", range(25))
def test_the_best_of_all_ways_to_keep_tapes_is_found(seed: int, tmp_path: Path) -> None:
    rng, slots = random.Random(seed), 40
    costs = with_ways(random_chain(seed, rng.randint(1, 5), largest=8), rng)
    sizes = Sizes.of(costs).with_ways(costs)
    table, twin = Table(sizes, slots), Table(sizes, slots, native_kernel=False)
    each = [range(len(stage.ways) + 1) for stage in costs.stages]
    others = [Table(Sizes.of(costs.by(ways)), slots) for ways in itertools.product(*each)]
    for known, same in zip(table.curve(sizes), twin.curve(sizes), strict=True):
        assert known == pytest.approx(same)
    for memory in range(slots + 1):
        least = min(other.least_seconds(memory) for other in others)
        assert table.least_seconds(memory) == pytest.approx(least)
        assert table.trace(memory) == twin.trace(memory)
        if least == math.inf:
            continue
        plan = plan_chain(costs, memory + costs.input_bytes)  # slots of a byte
        assert plan.makespan_s == pytest.approx(least)
        assert plan.stage_costs.whole == costs.whole
        ways = [stage.way for stage in plan.stage_costs.stages]
        assert [" in part" in fate for fate in plan.fates()] == [
            bool(way) and number in plan.kept for number, way in enumerate(ways)
        ]
        assert not (any(ways) and plan.keeps_all)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


# ---------------------------------------------------------------- the kernels


@needs_native
@pytest.mark.parametrize(("length", "slots"), [(1, 20), (15, 50), (16, 31), (17, 64), (50, 120)])
@pytest.mark.parametrize("tapes", [True, False])
def test_kernels_and_twin_make_the_same_table(length: int, slots: int, tapes: bool) -> None:
    costs = big_chain(length, length)
    true = Sizes.of(costs)
    sizes = true.in_slots(float(true.tape.sum()) * 0.4 / slots)
    twin = Table(sizes, slots, tapes=tapes, native_kernel=False)
    kernels = [
        Table(sizes, slots, tapes=tapes, threads=threads, instructions=instructions)
        for instructions in ("baseline", "avx2", "avx512")
        for threads in (1, 3)
    ]
    for s in range(length + 1):
        for t in range(s, length + 1):
            for kernel in kernels:
                assert np.array_equal(kernel.values(s, t), twin.values(s, t)), (s, t)
    for memory in (0, slots // 3, slots // 2, slots):
        traces = [kernel.trace(memory) for kernel in (twin, *kernels)]
        assert all(trace == traces[0] for trace in traces)
    for kernel in kernels[:1]:
        for ours, known in zip(kernel.curve(true), twin.curve(true), strict=True):
            assert np.array_equal(ours, known)


@needs_native
@pytest.mark.parametrize("tapes", [True, False])
def test_the_smallest_memory_of_both_kernels(tapes: bool) -> None:
    for seed in range(20):
        true = Sizes.of(big_chain(seed, 3 + seed))
        ours = smallest(true, tapes=tapes)
        assert ours == smallest(true, tapes=tapes, native_kernel=False)
        assert judge(true, ours[1])[1] == ours[0]


# ---------------------------------------------------------------- the planner


@given(st.integers(0, 10**6), st.integers(2, 14))
@settings(max_examples=25, deadline=None)
def test_more_memory_is_never_slower(seed: int, length: int) -> None:
    costs = big_chain(seed, length)
    least, plain = smallest_memory(costs), plan_chain(costs).plain_bytes
    draw = random.Random(seed)
    limits = sorted({least, plain, *(draw.randint(least, plain) for _ in range(8))})
    plans = [plan_chain(costs, limit, resolution=60) for limit in limits]
    for limit, plan in zip(limits, plans, strict=True):
        assert plan.peak_bytes <= limit
    seconds = [plan.makespan_s for plan in plans]
    for before, after in itertools.pairwise(seconds):
        assert after <= before * (1 + 1e-12)  # equal choices are summed in another order
    assert seconds[-1] == plans[-1].plain_s


@pytest.mark.parametrize("planner", ["optimal", "revolve", "periodic", "store-all"])
def test_planners_and_their_smallest_limits(planner) -> None:
    costs = big_chain(11, 24)
    optimal = plan_chain(costs, 0.6)
    free = plan_chain(costs, None, planner)
    assert free.makespan_s >= free.plain_s
    with pytest.raises(BudgetError, match="smallest limit") as refused:
        plan_chain(costs, 1000, planner)
    least = refused.value.least_bytes
    assert least is not None
    assert plan_chain(costs, least, planner).peak_bytes == least
    with pytest.raises(BudgetError, match=f"< {least} bytes"):
        plan_chain(costs, least - 1, planner)
    if planner != "store-all":
        assert plan_chain(costs, 0.6, planner).makespan_s >= optimal.makespan_s


@needs_native
def test_huge_sizes_and_costs_of_many_magnitudes() -> None:
    draw = random.Random(1)
    stages = []
    for k in range(40):
        size = draw.randint(1 << 56, 1 << 60)
        stages.append(Stage(f"s{k}", 10.0 ** draw.uniform(-9, 3), 1.0, size // 2, size))
    costs = StageCosts(tuple(stages), 1 << 59)
    plain = plan_chain(costs)
    assert plain.plain_bytes > 1 << 63
    plan = plan_chain(costs, 0.3)
    assert plan.peak_bytes <= 0.3 * plain.plain_bytes
    assert plan.makespan_s < 2 * plan.plain_s
    assert smallest_memory(costs) <= plan.peak_bytes


@needs_native
@pytest.mark.parametrize(
    ("kernel", "solved"),
    [
        ("ms_chain_solve", lambda: Table(Sizes.of(big_chain(1, 200)).in_slots(1 << 22), 500)),
        ("ms_hierarchy_row", lambda: solve((Level(3), Level(None, 5.0, 5.0)), 500_000, 1.0)),
    ],
)
def test_a_solver_is_interrupted(
    kernel: str, solved: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes through between calls of a kernel, each a part of the work."""
    library, calls = native.library(), []

    def interrupted(*given: object) -> object:
        calls.append(kernel)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return getattr(library, kernel)(*given)

    class Counting:
        def __getattr__(self, name: str) -> object:
            return interrupted if name == kernel else getattr(library, name)

    monkeypatch.setattr(native, "library", Counting)
    with pytest.raises(KeyboardInterrupt):
        solved()
    assert len(calls) == 2


def test_the_curve() -> None:
    costs = big_chain(5, 30)
    curve = memory_curve(costs, resolution=100)
    memories, seconds = zip(*curve, strict=True)
    assert memories[0] == smallest_memory(costs)
    assert list(memories) == sorted(set(memories))
    assert list(seconds) == sorted(set(seconds), reverse=True)
    assert seconds[-1] == plan_chain(costs).plain_s
    assert len(curve) > 20
    assert len(memory_curve(costs, "revolve", resolution=100)) > 3


def test_bad_input() -> None:
    costs = big_chain(1, 3)
    for memory, message in ((0.0, "fraction"), (1.5, "fraction"), ("much", "much"), (-1, "-1")):
        with pytest.raises(ArgumentError, match=message):
            plan_chain(costs, memory)
    with pytest.raises(ArgumentError, match="'best' is not known"):
        plan_chain(costs, None, "best")
    with pytest.raises(ArgumentError, match="segments"):
        plan_chain(costs, None, "periodic", segments=4)
    with pytest.raises(ArgumentError, match="segments"):
        plan_chain(costs, None, "optimal", segments=2)
    with pytest.raises(ArgumentError, match="resolution=3"):
        plan_chain(costs, 0.5, resolution=3)
    with pytest.raises(ArgumentError, match="at most 10 stages"):
        exact_chain_makespan(big_chain(1, 11), 5)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Tape(1)], "live state is 0"),
        ([Tape(0), EndForward(), Reverse(1)], "next adjoint step is 0"),
        ([Tape(0), Reverse(0)], "before EndForward"),
        ([Load(1)], "nothing in fast memory holds"),
        ([Free(1)], "nothing in fast memory holds"),
        ([Tape(0), Load(0), Tape(0)], "already held"),
        ([Advance(0, 1)], "ended with the adjoint"),
        ([Tape(0), Tape(1)], r"Tape\(1\) goes past state 1"),
    ],
)
def test_illegal_schedules_are_refused(actions, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        use_of(actions, StageCosts.uniform(1, Stage("layer", 1.0, 2.0, 10, 30), 10))
