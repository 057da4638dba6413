"""The joint planner's kernels and their plain twins: the same plans and the same numbers."""

import itertools
import random

import numpy as np
import pytest
from oracles.joint_twin import Twin
from test_joint import random_chain, random_tier, with_fixed_times

from multistage import native
from multistage.planners.chain.joint import GRID, extremes, programs
from multistage.planners.chain.joint_core import Core, Program
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


@pytest.mark.long(but="[0-3]")
@pytest.mark.parametrize("seed", range(12))
def test_twins_find_judge_and_improve_alike(seed):
    rng = random.Random(seed)
    costs, rates = random_chain(rng, rng.randint(2, 9), seed % 3), random_tier(rng)
    if seed % 2:
        rates = with_fixed_times(random.Random(seed), rates)
    true = Sizes.of(costs)
    limit = int(true.tape.sum()) // 2
    unit = limit / 60
    table = Table(true.in_slots(unit), 69)
    core, twin = (kind(true, table, unit, limit, rates) for kind in (Core, Twin))
    plans = list(extremes(true))
    for program in programs(true, limit, unit, (1, 2), GRID[:3]):
        found, again = (kind.program(program, (1.02, 0.9)) for kind in (core, twin))
        assert np.array_equal(found, again)
        plans += found
    for fates in plans:
        seconds = core.judge(fates)
        assert twin.judge(fates) == seconds
        if seconds == np.inf:
            continue
        assert core.lay_out(fates) == twin.lay_out(fates)
        better, best = core.improve(fates, seconds, 40, 3)
        assert twin.improve(fates, seconds, 40, 3)[1] == best <= seconds
        assert np.array_equal(twin.improve(fates, seconds, 40, 3)[0], better)
    for first, rest in itertools.permutations(plans[:4], 2):
        for below in (np.inf, 1.2 * float(true.forward_s.sum() + true.reverse_s.sum())):
            crossed, again = (kind.cross(first, rest, below) for kind in (core, twin))
            assert [seconds for seconds, _ in crossed] == [seconds for seconds, _ in again]
            assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(crossed, again, strict=True))
            assert all(core.judge(fates) == seconds < below for seconds, fates in crossed)


def test_twins_agree_on_ends_left_out_of_long_chains():
    rng = random.Random(7)
    costs, rates = random_chain(rng, 122, 1), random_tier(rng)
    true = Sizes.of(costs)
    limit = int(true.tape.sum()) // 3
    unit = limit / 14
    table = Table(true.in_slots(unit), 16)
    core, twin = (kind(true, table, unit, limit, rates) for kind in (Core, Twin))
    program = Program(0.1, 0.5, 0.0, 1.0, reserve=1, steps=3, stride=1)
    found, again = (kind.program(program, (1.02,)) for kind in (core, twin))
    assert len(found) == 1 and np.array_equal(found, again)
    assert core.judge(found[0]) == twin.judge(again[0])
