"""Chains in blocks, and memory above the least in slots of its own, against exact optima."""

import math
import random
from functools import cache, partial

import numpy as np
import pytest

from multistage import native
from multistage.model.stages import Stage, StageCosts
from multistage.planners.chain import nested, pieces
from multistage.planners.chain.at_once import plan_at_once
from multistage.planners.chain.memory import actions_of, use_of
from multistage.planners.chain.nested import Nested
from multistage.planners.chain.sizes import Sizes, need_to_pass, need_to_tape
from multistage.planners.chain.table import Table, judge, smallest

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def chain(count, seed, huge=()):
    """Return random stages; the tapes of some are a thousand times those of others."""
    draw = random.Random(seed)
    stages = []
    for i in range(count):
        output, forward_s = draw.randint(1, 9), draw.lognormvariate(0, 1)
        tape = output + draw.randint(0, 12) + (10_000 if i in huge else 0)
        over = [draw.choice([0, 0, 3]) for _ in range(3)]
        gradient, spared_s = draw.choice([output, 0]), draw.choice([0.0, 0.2 * forward_s])
        seconds = forward_s, 2 * forward_s
        stages.append(Stage(f"{i}", *seconds, output, tape, gradient, *over, spared_s=spared_s))
    return StageCosts(tuple(stages), 5, 3)


def exact_s(costs, memory, *, tapes=True):
    """Return the least seconds of a persistent schedule, by theorem 1 over bytes."""
    sizes = Sizes.of(costs)
    ends = np.concatenate(([0.0], np.cumsum(sizes.forward_s)))
    tape_need = cache(partial(need_to_tape, sizes))
    pass_need = cache(partial(need_to_pass, sizes))

    @cache
    def least(s, t, room):
        turn_s = float(sizes.forward_s[s] + sizes.reverse_s[s])
        if s == t:
            return turn_s - float(sizes.spared_s[s]) if room >= tape_need(s, s) else math.inf
        best, tape = math.inf, int(sizes.tape[s])
        if tapes and room >= max(tape_need(s, t), tape):
            best = turn_s + least(s + 1, t, room - tape)
        if room >= pass_need(s, t):
            for k in range(s + 1, t + 1):
                if (rest := room - int(sizes.state[k])) >= 0:
                    run_s = float(ends[k] - ends[s])
                    best = min(best, run_s + least(k, t, rest) + least(s, k - 1, room))
        return best

    return least(0, len(sizes) - 1, memory - costs.input_bytes)


@pytest.fixture
def few(monkeypatch):
    """Chains are divided into 8 blocks, and blocks of more than 4 stages again."""
    monkeypatch.setattr(nested, "_STAGES", 4)
    monkeypatch.setattr(nested, "_BLOCKS_WITHIN", 3)
    return partial(Nested, blocks=8)


@core
@pytest.mark.parametrize("tapes", [True, False], ids=["tapes", "states"])
@pytest.mark.parametrize("seed", range(12))
def test_plans_in_blocks_fit_and_are_near_the_optimum(few, seed, tapes):
    costs = chain(25, seed, huge=(8,) if seed % 3 == 0 else ())
    true = Sizes.of(costs)
    least = pieces.least_in_pieces(costs)
    for memory in (least, least + 4, least + 20, least + 60):
        room = memory - costs.input_bytes
        trace = few(true, room, tapes=tapes).trace(room)
        seconds, peak = judge(true, trace)
        use = use_of(actions_of(trace), costs)
        assert use.peak_bytes == peak + costs.input_bytes <= memory
        assert use.makespan_s == pytest.approx(seconds)
        best = exact_s(costs, memory, tapes=tapes)
        assert best * (1 - 1e-12) <= seconds <= 1.5 * best


@core
def test_blocks_of_one_stage_are_planned_as_one_table():
    for seed in range(6):
        costs = chain(30, seed, huge=(10,))
        for room in (0, 7, 30, 90):
            memory = pieces.least_in_pieces(costs) + room - costs.input_bytes
            seconds, _ = judge(Sizes.of(costs), Nested(Sizes.of(costs), memory).trace(memory))
            assert seconds <= 1.02 * exact_s(costs, memory + costs.input_bytes)


@core
@pytest.mark.parametrize("room", [0, 3, 12, 40])
def test_states_beside_one_huge_tape_are_counted_to_the_byte(room):
    """Slots of a 32nd of the memory hold many states each."""
    costs = chain(22, 1, huge=(7,))
    least, _ = smallest(Sizes.of(costs))
    memory = least + costs.input_bytes + room
    plan = plan_at_once(costs, memory, resolution=32)
    assert plan.peak_bytes <= memory
    assert plan.makespan_s <= 1.02 * exact_s(costs, memory)


@core
def test_long_chains_with_a_huge_tape_are_planned_as_at_once(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_AT_ONCE", 40)
    costs = chain(120, 3, huge=(11, 80))
    for room in (0, 5, 25, 80):
        memory = pieces.least_in_pieces(costs) + room
        plan = pieces.plan_in_pieces(costs, memory, "optimal")
        assert plan.makespan_s <= 1.03 * plan_at_once(costs, memory).makespan_s


@core
def test_kernel_and_twin_agree_where_bytes_are_held_back():
    for seed in range(4):
        sizes = Sizes.of(chain(9, seed, huge=(4,))).beside(10_000).in_slots(2.0)
        kernel, twin = Table(sizes, 30), Table(sizes, 30, native_kernel=False)
        for s in range(10):
            for t in range(s, 10):
                assert np.array_equal(kernel.values(s, t), twin.values(s, t)), (s, t)
        for memory in range(31):
            assert kernel.trace(memory) == twin.trace(memory)
