"""Tables of some runs of a long chain, beside tables of all."""

import random

import numpy as np
import pytest

from multistage import native
from multistage.model.stages import Stage, StageCosts
from multistage.planners.chain.at_once import plan_at_once
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.nested import plan_nested
from multistage.planners.chain.pieces import least_in_pieces
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table, judge

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def chain(count, seed, tapes=True, gradients=True):
    rng, stages = random.Random(seed), []
    for i in range(count):
        seconds, output = rng.lognormvariate(0, 0.5), rng.randint(1, 9)
        tape = output + (rng.randint(0, 12) if tapes else 0)
        sizes = output, tape, output if gradients and rng.random() < 0.5 else 0
        stages.append(Stage(f"{i}", seconds, seconds * rng.uniform(1, 3), *sizes))
    return StageCosts(tuple(stages), 5)


@pytest.mark.parametrize("tapes", [True, False])
def test_a_table_of_all_runs_has_the_bits_of_one_by_pairs(tapes):
    sizes = Sizes.of(chain(90, 1))
    whole, runs = Table(sizes, 60, tapes=tapes), Table(sizes, 60, tapes=tapes, short=10)
    for s in range(len(sizes)):
        for t in range(s, len(sizes)):
            assert np.array_equal(whole.values(s, t), runs.values(s, t))
    assert [whole.trace(m) for m in range(61)] == [runs.trace(m) for m in range(61)]


@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_schedules_of_some_runs_fit_and_take_what_the_table_says(seed, tapes):
    sizes = Sizes.of(chain(150, seed, tapes))
    whole, runs = (Table(sizes, 90, tapes=tapes, **kind) for kind in ({}, {"short": 1}))
    assert runs.nbytes < 0.8 * whole.nbytes
    n = len(sizes)
    assert np.array_equal(*(np.isfinite(x.values(0, n - 1)) for x in (whole, runs)))
    for memory in range(91):
        trace = runs.trace(memory)
        assert (trace is None) == (whole.trace(memory) is None)
        if trace is not None:
            seconds, peak = judge(sizes, trace)
            assert peak <= memory
            assert whole.least_seconds(memory) <= seconds * (1 + 1e-5)
            assert seconds <= runs.least_seconds(memory) * (1 + 1e-5)


@pytest.mark.long(but=("0-*",))
@pytest.mark.parametrize("room", [0, 4, 60])
@pytest.mark.parametrize("kind", ["tapes", "states", "even"])
@pytest.mark.parametrize("seed", range(4))
def test_long_chains_are_planned_within_3_percent_of_one_table(seed, kind, room):
    if kind == "even":
        rng = random.Random(seed)
        times = [rng.lognormvariate(0, 0.5) for _ in range(360)]
        stages = [Stage(f"{i}", s, 2 * s, 4, 10, rng.choice([0, 4])) for i, s in enumerate(times)]
        costs = StageCosts(tuple(stages), 4)
    else:
        costs = chain(360, seed, kind == "tapes")
    limit = least_in_pieces(costs) + room
    tapes = kind == "tapes"
    actions = plan_nested(Sizes.of(costs), limit - costs.input_bytes, tapes=tapes)
    found = use_of(actions, costs)
    assert found.peak_bytes <= limit
    best = plan_at_once(costs, limit, "optimal" if tapes else "revolve", resolution=200)
    assert found.makespan_s <= 1.03 * best.makespan_s
