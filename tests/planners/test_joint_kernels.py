"""The kernels of the joint planner, one by one: what they find, replayed by the tests' judge.

The digests were recorded when a plain twin of every kernel in Python found the same, to the
last bit.  A kernel that is to search differently has others.
"""

import itertools
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
from chain_judge import Judge
from test_joint import random_chain, random_tier, with_fixed_times

from multistage import native
from multistage.planners.chain.heterogeneous import smallest_memory
from multistage.planners.chain.joint import GRID, extremes, programs
from multistage.planners.chain.joint_core import Core, Program, actions_of_laid
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


# Seed; how many plans the programs find, and their digest; of the plans improved; crossed.
FOUND = """\
0 9-f69abf18 1-43444028 0-00000000
1 9-54167650 9-c8d0a255 96-f610c57f
2 9-36fe5720 1-7e2230a0 0-00000000
3 9-b4b05435 7-b8b3a6dd 133-326b38a0
4 9-f5e4bda2 6-7eee650c 114-ec96975f
5 9-acc5abfd 1-2e79eb1e 0-00000000
6 9-6f1859f1 9-37490995 213-6ec1186e
7 9-213420bb 3-cc944f09 0-00000000
"""


def digest(plans):
    """Return a checksum of plans and their makespans, each a number of seconds and fates."""
    said = [f"{seconds:.9g} {fates.tobytes().hex()}" for seconds, fates in plans]
    return f"{len(said)}-{zlib.crc32('/'.join(said).encode()):08x}"


@pytest.mark.parametrize(
    ("seed", "found", "improved", "crossed"), [line.split() for line in FOUND.splitlines()]
)
def test_the_kernels_find_what_they_found(seed, found, improved, crossed):
    seed = int(seed)
    rng = random.Random(seed)
    costs, rates = random_chain(rng, 6 + 2 * seed, seed % 3), random_tier(rng)
    if seed % 2:
        rates = with_fixed_times(random.Random(seed), rates)
        # Times that are no whole seconds: plans a little slower are kept on the way.
        stages = (
            replace(each, forward_s=0.5 + rng.random(), backward_s=1 + rng.random())
            for each in costs.stages
        )
        costs = replace(costs, stages=tuple(stages))
    true = Sizes.of(costs)
    limit = int(1.5 * smallest_memory(costs))
    unit = limit / 60
    core = Core(true, table := Table(true.in_slots(unit), 69), unit, limit, rates)
    fates = list(extremes(true))
    for program in programs(true, limit, unit, (1, 2), GRID[:3]):
        fates += core.program(program, (1.02, 0.9))
    plans = [(core.judge(each), each) for each in fates]
    better = [core.improve(each, s, 200, 3)[::-1] for s, each in plans if s < np.inf]
    both = [
        pair
        for first, rest in itertools.permutations(better[:4], 2)
        for below in (np.inf, first[0])
        for pair in core.cross(first[1], rest[1], below)
    ]
    for seconds, each in (*plans, *better, *both):
        assert core.judge(each) == seconds
        if seconds < np.inf:
            laid = core.lay_out(each)
            judge = Judge(costs, rates).run(actions_of_laid(laid, table, inside=rates.tapes))
            assert judge.now == pytest.approx(laid.seconds, rel=1e-12)
            assert judge.waited == pytest.approx(laid.waited_s, abs=1e-9)
            assert judge.peak <= limit + costs.input_bytes
    assert (digest(plans), digest(better), digest(both)) == (found, improved, crossed)


def test_ends_left_out_of_long_chains():
    rng = random.Random(7)
    costs, rates = random_chain(rng, 122, 1), random_tier(rng)
    true = Sizes.of(costs)
    limit = int(true.tape.sum()) // 3
    unit = limit / 14
    core = Core(true, Table(true.in_slots(unit), 16), unit, limit, rates)
    program = Program(0.1, 0.5, 0.0, 1.0, reserve=1, steps=3, stride=1)
    plans = [(core.judge(each), each) for each in core.program(program, (1.02,))]
    assert digest(plans) == "1-a086ed84"
