"""Tables of equal stages: the same as the general program's, whatever begins and ends the chain."""

import numpy as np
import pytest

from multistage import native
from multistage.model.stages import Stage, StageCosts
from multistage.planners.chain import nested, pieces
from multistage.planners.chain.at_once import plan_at_once
from multistage.planners.chain.equal import LEAST_STAGES, inside_equal
from multistage.planners.chain.heterogeneous import plan_chain
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
STAGE = Stage("layer", 1.0, 2.0, 10, 33, 8, 3, 2, 1, spared_s=0.5)


def in_slots(input_bytes=10, input_gradient=8):
    costs = StageCosts((STAGE,) * LEAST_STAGES, input_bytes, input_gradient)
    return Sizes.of(costs).in_slots(7.3)


def same(one, other):
    """Whether the tables agree, in memories that both have."""
    a, b = (
        table.planes().transpose(1, 0, 2).reshape(-1, 48)[:, : table.slots + 1]
        for table in (one, other)
    )
    assert (np.isfinite(a) == np.isfinite(b)).all()
    fits = np.isfinite(a)
    assert fits.any() and not fits.all()
    np.testing.assert_allclose(a[fits], b[fits], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [None, False])
@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.parametrize("gradient", [8, 23])
def test_tables_are_those_of_the_general_program(gradient, tapes, kernel):
    sizes = in_slots(5, gradient)
    by_length = Table(sizes, 40, tapes=tapes, native_kernel=kernel)
    same(by_length, Table(sizes, 40, tapes=tapes, by_length=False))


def test_moves_at_a_price():
    sizes = in_slots()
    moves = np.full(len(sizes), 0.3), np.full(len(sizes), 0.2)
    by_length = Table(sizes, 40, moves=moves, work=0.7)
    same(by_length, Table(sizes, 40, moves=moves, work=0.7, by_length=False))


@pytest.mark.parametrize("name", ["tape", "state", "gradient", "forward_s", "reverse"])
def test_one_stage_that_differs_is_seen(name):
    sizes, leaf = in_slots(), np.zeros(LEAST_STAGES + 1, np.float32)
    assert inside_equal(sizes, leaf, None)
    getattr(sizes, name)[LEAST_STAGES // 2] += 1
    assert not inside_equal(sizes, leaf, None)


@core
@pytest.mark.parametrize("tapes", [True, False])
@pytest.mark.parametrize("room", [0, 10, 45, 200, 1500])
def test_more_equal_stages_than_one_table_holds_are_planned_by_length(tapes, room, monkeypatch):
    monkeypatch.setattr(pieces, "MOST_AT_ONCE", 40)
    costs = StageCosts.uniform(240, STAGE, 10)
    memory = pieces.least_in_pieces(costs) + room
    planner = "optimal" if tapes else "revolve"
    plan = pieces.plan_in_pieces(costs, memory, planner)
    assert plan.planner == "pieces" and plan.peak_bytes <= memory
    assert plan.makespan_s <= 1.01 * plan_at_once(costs, memory, planner).makespan_s


@core
def test_equal_stages_far_smaller_than_a_slot_are_planned_in_blocks(monkeypatch):
    monkeypatch.setattr(nested, "_SUMS", 240**2)  # one slot
    costs = StageCosts.uniform(240, STAGE, 10)
    memory = pieces.least_in_pieces(costs) + 1500
    assert nested._by_length(Sizes.of(costs), memory - 10, True) is None
    assert pieces.plan_in_pieces(costs, memory, "optimal").peak_bytes <= memory


@core
def test_schedules_of_equal_stages_are_as_fast_as_those_of_the_general_program():
    sizes = in_slots()
    true = Sizes.of(StageCosts((STAGE,) * LEAST_STAGES, 10, 8))
    found, general = (Table(sizes, 40, by_length=yes).curve(true) for yes in (True, False))
    np.testing.assert_allclose(found[0], general[0], rtol=1e-5)


def test_a_schedule_of_equal_stages_is_found_by_length():
    costs = StageCosts.uniform(LEAST_STAGES, STAGE, 10)
    plan = plan_chain(costs, 0.2)
    assert plan.peak_bytes <= plan.memory_bytes
    assert plan.plain_s < plan.makespan_s < 1.25 * plan.plain_s
