"""`MPIReversal` with steps of unequal cost and size: one plan, whatever the ranks' sizes are."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from fake_mpi import MPI, Comm, World, run_ranks, succeed

from multistage import native
from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, BudgetError
from multistage.interop.mpi import MPIReversal
from multistage.interop.ranks import Agreed, Ranks, tightest
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.pieces import chain_plan, least_beside
from multistage.reversing import unequal

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


@pytest.fixture(autouse=True)
def fake_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    yield


class Part:
    """One rank's part of a computation whose mesh changes; every step exchanges a number."""

    def __init__(self, seed: int, rank: int, comm: Comm | None, n: int = 30) -> None:
        draw = random.Random(f"{seed} {rank}")
        self.n, self.comm = n, comm
        self.sizes = [draw.randint(1, 60) for _ in range(n + 1)]
        self.seconds = [draw.uniform(1, 9) for _ in range(n)]
        self.ran: list[int] = []

    def _together(self, value: float) -> float:
        return value if self.comm is None else sum(self.comm.allgather(value))

    def start(self) -> Any:
        return np.sin(np.arange(self.sizes[0]) + 1.0)

    def step(self, u: Any, i: int) -> Any:
        self.ran.append(i)
        mean = self._together(float(u.sum()))
        return np.cos(np.resize(u, self.sizes[i + 1]) + 0.1 * mean)

    def adjoint_step(self, u: Any, adjoint: Any, i: int) -> Any:
        mean = self._together(float(adjoint.sum()) + float(u.sum()))
        return np.sin(np.resize(adjoint, self.sizes[i]) * u + mean)

    def costs(self, more: int = 0) -> StageCosts:
        """Return the costs; sizes are `more` bytes smaller than they are."""
        stages = [
            Stage(f"{i}", s, 2 * s, 8 * size - more, 8 * size - more, 0)
            for i, (s, size) in enumerate(zip(self.seconds, self.sizes[1:], strict=True))
        ]
        return StageCosts(tuple(stages), 8 * self.sizes[0])

    def store_all(self) -> bytes:
        states = [self.start()]
        for i in range(self.n):
            states.append(self.step(states[-1], i))
        adjoint = np.ones_like(states[-1])
        for i in reversed(range(self.n)):
            adjoint = self.adjoint_step(states[i], adjoint, i)
        return bytes(adjoint.tobytes())


@core
@pytest.mark.parametrize("seed", range(8))
def test_ranks_whose_sizes_differ_follow_one_plan(seed: int, tmp_path: Path) -> None:
    """Budgets differ too; each stays within its own, and bits are those of keeping everything."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 3])
    tiers = draw.choice([None, "memory:", f"file:{tmp_path}", "memory:?capacity=64KiB"])
    in_bytes = [1500, 2500] if tiers is None else []  # tiers have buffers of more
    budgets = [draw.choice(["2 slots", "4 slots", *in_bytes]) for _ in range(size)]
    checked = draw.random() < 0.5

    def work(comm: Comm) -> Any:
        part = Part(seed, comm.rank, comm)
        expected = part.store_all()
        with MPIReversal(
            part.step,
            part.adjoint_step,
            comm=comm,
            memory=budgets[comm.rank],
            tiers=tiers,
            costs=part.costs(),
            checked=checked,
            on_error="raise",
        ) as run:
            plans, made = [], []
            for _ in range(2):
                part.ran.clear()
                last = run.forward(part.start())
                made.append(bytes(run.reverse(np.ones_like(last)).tobytes()))
                assert run.plan is not None
                plans.append(run.plan.actions)
            assert run.costs == part.costs()
            assert len(part.ran) == run.report().counts.forward_steps
            assert run.report().counts.writes == run.plan.writes
        assert made == [expected, expected]
        return plans

    found = succeed(run_ranks(size, work))
    assert all(plans == [found[0][0]] * 2 for plans in found)


@core
@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("fault", ["refuse", "lose_write", "lose_read"])
@pytest.mark.parametrize("tapes", [False, True], ids=["states", "tapes"])
def test_what_one_rank_loses_all_ranks_run_again(
    fault: str, tapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Tier.of_rates(1e12, 1e12, tapes=False)
    monkeypatch.setattr(unequal, "measured_rates", lambda *_: fast)

    def work(comm: Comm) -> Any:
        part = Part(3, comm.rank, comm)
        expected = part.store_all()
        faults: dict[str, Any] = {fault: lambda k: k % 3 == 0} if comm.rank == 1 else {}
        more: dict[str, Any] = {"tape_step": lambda u, i: (part.step(u, i), u)} if tapes else {}
        run = MPIReversal(
            part.step,
            part.adjoint_step,
            comm=comm,
            memory="2 slots",
            tiers=FaultyStore(MemoryStore(buffer_bytes=0), **faults),
            costs=part.costs(),
            on_error="raise",
            **more,
        )
        with run:
            for _ in range(2):
                last = run.forward(part.start())
                assert run.reverse(np.ones_like(last)).tobytes() == expected
            counts = run.report().counts
        return counts.lost, counts.recovered_steps, len(part.ran)

    found = succeed(run_ranks(3, work))
    assert found[0] == found[1] == found[2]
    assert fault == "refuse" or min(found[0][:2]) > 0  # a refused one is put again, and waits


@core
@pytest.mark.parametrize("where", ["state", "tape"])
def test_a_larger_state_on_one_rank_ends_the_sweep_on_all(where: str) -> None:
    def work(comm: Comm) -> Any:
        part = Part(1, comm.rank, comm)

        def tape_step(u: Any, i: int) -> Any:
            after = part.step(u, i)
            return after, u if comm.rank == 0 or i < 20 else np.append(u, 0.0)[: len(u)].copy()

        costs = part.costs(8 if where == "state" and comm.rank == 1 else 0)
        more = {} if where == "state" else {"tape_step": tape_step}
        run = MPIReversal(
            part.step, part.adjoint_step, comm=comm, memory="4 slots", costs=costs, **more
        )
        with run:
            last = run.forward(part.start())
            run.reverse(np.ones_like(last))

    world = World(3)
    found = run_ranks(3, work, world)
    assert not world.aborted
    for error in found:
        assert type(error) is BudgetError
        assert str(error).startswith("rank 1") and f"{where} " in str(error)


@core
def test_a_durable_run_takes_equal_steps(tmp_path: Path) -> None:
    def refused(comm: Comm) -> None:
        part = Part(0, comm.rank, comm, 3)
        with pytest.raises(ArgumentError, match="does not go with durable= on several ranks"):
            MPIReversal(
                part.step,
                part.adjoint_step,
                costs=part.costs(),
                comm=comm,
                on_error="raise",
                durable=tmp_path,
            )

    succeed(run_ranks(2, refused))


def test_a_plan_for_all_ranks_fits_each_of_them() -> None:
    """Replayed with each rank's own costs it takes no more than that rank's part of the limit."""
    for seed in range(40):
        draw = random.Random(seed)
        given = []
        for rank in range(3):
            costs = Part(seed, rank, None, 12).costs()
            room = draw.randint(1, 5) * costs.largest_state_bytes
            given.append((costs, room, Tier.of_rates(draw.uniform(50, 400), 200.0, tapes=False)))
        costs, room, tier = tightest(given, [room for _, room, _ in given])
        plan = chain_plan(costs, room, "optimal", tier)
        for own, own_room, own_tier in given:
            use = use_of(plan.actions, own, (own_tier,))
            assert use.peak_bytes * room <= plan.peak_bytes * own_room
            assert use.makespan_s <= plan.makespan_s * (1 + 1e-9)


def peak_limit_and_error(seed: int, comm: Comm) -> tuple[int, int, str]:
    """Plan a chain some of whose tapes are large on one rank alone; return bytes, and why not."""
    draw = random.Random(f"{seed} {comm.rank}")
    costs = Part(seed, comm.rank, None, 20).costs()
    stages = tuple(
        replace(stage, tape_bytes=stage.output_bytes * (21 if draw.random() < 0.1 else 1))
        for stage in costs.stages
    )
    costs = replace(costs, stages=stages)
    room = draw.choice([1, 2, 4, 8]) * costs.largest_state_bytes
    limit = least_beside(costs, "optimal") + room
    agreed = Agreed(Ranks(cast(Any, comm)), tiered=False)
    try:
        plan = agreed.stages(lambda: (costs, room, None), "optimal")
    except BudgetError as error:
        return 0, limit, str(error)
    return use_of(plan.actions, costs).peak_bytes, limit, ""


@core
def test_no_rank_keeps_more_than_its_memory_where_largest_steps_differ() -> None:
    """A step that is large on one rank alone would make room for more states on all."""
    refused = 0
    for seed in range(30):
        found = succeed(run_ranks(2, partial(peak_limit_and_error, seed)))
        assert all(peak <= limit for peak, limit, _ in found), found
        assert len({error for _, _, error in found}) == 1
        refused += "no plan was found that fits every rank" in found[0][2]
    assert 0 < refused < 10
