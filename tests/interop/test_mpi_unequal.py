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
from mpi_part import Part, swept

from multistage import native
from multistage.actions import Action, Load
from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, BudgetError
from multistage.interop.mpi import MPIReversal
from multistage.interop.ranks import Agreed, Ranks, tightest
from multistage.model.stages import StageCosts
from multistage.model.tier import Tier
from multistage.planners import Plan
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.pieces import chain_plan, least_beside, least_in_pieces
from multistage.planners.chain.pieces import plan as reversed_by
from multistage.reversing import unequal
from multistage.reversing.arguments import Unequals

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


@pytest.fixture(autouse=True)
def fake_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    yield


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
@pytest.mark.parametrize("n", [24, pytest.param(400, marks=pytest.mark.long)])
def test_parts_of_very_different_size_stream_within_the_memory_of_each_rank(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is in bytes of rank 0, whose states are the smallest; 400 are more than a table."""
    fast = Tier.of_rates(1e7, 1e7, tapes=False)
    monkeypatch.setattr(unequal, "measured_rates", lambda *_: fast)

    def work(comm: Comm) -> Any:
        part = Part(5, comm.rank, comm, n, most=60 if comm.rank == 0 else 3000)
        expected = part.store_all()
        run = MPIReversal(
            part.step,
            part.adjoint_step,
            comm=comm,
            memory="3 slots",
            tiers=f"file:{tmp_path}?buffers=0",
            costs=part.costs(),
            on_error="raise",
        )
        with run:
            assert [swept(run, part), swept(run, part)] == [expected, expected]
            plan, counts = run.plan, run.report().counts
            assert plan is not None and plan.writes == counts.writes > 0
            held = run.report().timeline.memory["fast"]
        own = part.costs()
        limit = least_beside(own, "optimal") + 3 * own.largest_state_bytes
        assert use_of(plan.actions, own, (fast,)).peak_bytes <= limit
        assert max(nbytes for _, nbytes in held) <= limit
        return plan.actions

    found = succeed(run_ranks(2, work))
    assert found[0] == found[1]


@core
@pytest.mark.parametrize("seed", range(8))
def test_a_survey_of_ranks_keeps_the_same_states_within_each_budget(seed: int) -> None:
    """No step runs before it; what it has seen is what the next sweeps are planned with."""
    draw = random.Random(seed)
    size, until = draw.choice([1, 2, 3]), seed % 4 == 3
    budgets = [draw.choice(["2 slots", "5 slots", 1000, 2500]) for _ in range(size)]
    tier = draw.choice([None, "memory:"]) if all(type(one) is str for one in budgets) else None

    def work(comm: Comm) -> Any:
        part = Part(seed, comm.rank, comm)
        expected, memory = part.store_all(), budgets[comm.rank]
        run = MPIReversal(
            part.step,
            part.adjoint_step,
            None if until else part.n,
            comm=comm,
            memory=memory,
            tiers=tier,
            planner="survey",
            on_error="raise",
        )
        ran, plans = [], []
        with run:
            for number in range(3):
                part.ran.clear()
                ended = (lambda _, i: i == part.n) if until else None
                last = run.forward(part.start(), ended)
                assert number or part.ran == list(range(part.n))
                assert run.reverse(np.ones_like(last)).tobytes() == expected
                ran.append(part.ran.copy())
                assert run.plan is not None
                plans.append(run.plan)
            costs = run.costs
        assert [plan.planner == "survey" for plan in plans] == [True, until, until]
        own = part.costs()
        room = memory if type(memory) is int else int(memory[0]) * own.largest_state_bytes
        assert plans[0].peak_bytes <= room + least_in_pieces(own)
        if not until:
            assert isinstance(costs, StageCosts)
            assert [s.output_bytes for s in costs.stages] == [s.output_bytes for s in own.stages]
        return ran

    found = succeed(run_ranks(size, work))
    assert all(ran == found[0] for ran in found)


@core
def test_a_survey_of_ranks_keeps_states_of_no_bytes_in_no_memory() -> None:
    def work(comm: Comm) -> Any:
        def step(u: Any, i: int) -> Any:
            return np.zeros(0)

        def adjoint_step(u: Any, adjoint: Any, i: int) -> Any:
            return adjoint * (i + 2)

        with MPIReversal(
            step, adjoint_step, 5, comm=comm, memory=0, planner="survey", on_error="raise"
        ) as run:
            run.forward(np.zeros(0))
            return float(run.reverse(np.ones(1))[0])

    assert succeed(run_ranks(2, work)) == [720.0] * 2


@core
def test_what_a_survey_of_ranks_cannot_do_is_refused_on_all() -> None:
    """A state that grows on one rank is measured again; one beyond its budget is named."""

    def work(comm: Comm) -> Any:
        part = Part(4, comm.rank, comm)

        def made(memory: str | int) -> MPIReversal[Any, Any]:
            return MPIReversal(
                part.step, part.adjoint_step, part.n, comm=comm, memory=memory, planner="survey"
            )

        said = []
        with made("3 slots") as run:
            with pytest.raises(ArgumentError, match="shows in a first sweep"):
                run.prepare(part.start())
            assert swept(run, part) == part.store_all()
            assert run.prepare(part.start()).planner != "survey"
            if comm.rank == 1:
                part.sizes[9] += 1
            with pytest.raises(BudgetError, match="rank 1: state 9 takes") as error:
                swept(run, part)
            said.append(str(error.value))
            assert swept(run, part) == part.store_all()
        with (
            made(1000 if comm.rank else 8 * part.sizes[0]) as run,
            pytest.raises(BudgetError, match=r"rank 0.*: budget of \d+ bytes < \d+ bytes of state"),
        ):
            run.forward(part.start())
        return said

    world = World(2)
    found = succeed(run_ranks(2, work, world))
    assert not world.aborted and found[0] == found[1]


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


class BrokenOff(Exception):
    """What ends all ranks, where a real program is killed."""


def durable(comm: Comm, seed: int, folder: Path, broken: tuple[str, int], **options: Any) -> Any:
    """Run or resume steps that differ, or break off; return what is right, and the steps run."""
    part = Part(seed, comm.rank, comm, 24)
    expected, ran = part.store_all(), list[int]()

    def step(u: Any, i: int) -> Any:
        if run._durable.store._writer is not None:  # every state is on the disk before the next
            run._durable.store.flush()
        if ("step", i) == broken:
            raise BrokenOff
        ran.append(i)
        return part.step(u, i)

    def adjoint_step(u: Any, adjoint: Any, i: int) -> Any:
        if ("adjoint_step", i) == broken:
            raise BrokenOff
        return part.adjoint_step(u, adjoint, i)

    options |= {"durable": folder, "durable_every_s": 0, "on_error": "raise"}
    run: Any
    with MPIReversal(step, adjoint_step, costs=part.costs(), comm=comm, **options) as run:
        last = run.forward(part.start())
        return run.reverse(np.ones_like(last)).tobytes() == expected, ran


@core
@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("seed", range(6))
def test_durable_steps_that_differ_resume_on_all_ranks(seed: int, tmp_path: Path) -> None:
    """Broken off in both sweeps; in between one rank loses what it had, or some of it."""
    draw, folder = random.Random(seed), tmp_path / "run"
    size = draw.choice([2, 3])
    memory = [draw.choice(["1 slot", "3 slots", "9 slots"]) for _ in range(size)]
    checked, left = draw.random() < 0.5, 0

    def work(comm: Comm, broken: tuple[str, int]) -> Any:
        memories = {"memory": memory[comm.rank], "checked": checked}
        return durable(comm, seed, folder, broken, **memories)

    points = [("step", draw.randrange(24)) for _ in range(2)]
    points += [("adjoint_step", draw.randrange(24)) for _ in range(3)]
    for broken in points:
        for each in run_ranks(size, partial(work, broken=broken)):
            assert isinstance(each, BrokenOff) or each[0], each  # it had come further before
        if not folder.exists():
            continue
        lost = list((folder / f"rank-{draw.randrange(size):04d}").glob("[as][dt]*-*"))
        for path in draw.sample(lost, draw.choice([0, 0, len(lost) // 2, len(lost)])):
            path.unlink()
        left += len(lost)
    found = succeed(run_ranks(size, partial(work, broken=("", 0))))
    assert all(right for right, _ in found) and all(ran == found[0][1] for _, ran in found)
    assert left and not folder.exists()


@core
def test_ranks_write_the_same_of_the_states_that_they_pass(tmp_path: Path) -> None:
    """Whatever their clocks say; else they would have none in common."""

    def work(comm: Comm, broken: tuple[str, int]) -> Any:
        return durable(comm, 5, tmp_path / "run", broken, memory="99 slots")

    for each in run_ranks(2, partial(work, broken=("step", 15))):
        assert isinstance(each, BrokenOff), each
    for right, ran in succeed(run_ranks(2, partial(work, broken=("", 0)))):
        assert right and ran == list(range(15, 24))


def test_a_plan_for_all_ranks_fits_each_of_them() -> None:
    """Replayed with each rank's own costs it takes no more than that rank's part of the limit."""
    for seed in range(40):
        draw = random.Random(seed)
        given = []
        for rank in range(3):
            costs = Part(seed, rank, None, 12).costs()
            spared = [draw.choice([0, stage.output_bytes]) for stage in costs.stages]
            stages = zip(costs.stages, spared, strict=True)
            costs = replace(costs, stages=tuple(replace(s, spared_bytes=n) for s, n in stages))
            room = draw.randint(1, 5) * costs.largest_state_bytes
            given.append((costs, room, Tier.of_rates(draw.uniform(50, 400), 200.0, tapes=False)))
        costs, room, tier = tightest(given, [room for _, room, _ in given])
        plan = chain_plan(costs, room, "optimal", tier)
        for own, own_room, own_tier in given:
            use = use_of(plan.actions, own, (own_tier,))
            assert use.peak_bytes * room <= plan.peak_bytes * own_room
            assert use.makespan_s <= plan.makespan_s * (1 + 1e-9)


def planned_together(seed: int, comm: Comm) -> tuple[Any, float]:
    """Return a plan, within this rank's memory, some of whose tapes are large on one rank alone."""
    costs, draw = uneven(seed, comm, 20)
    room = draw.choice([1, 2, 4, 8]) * costs.largest_state_bytes

    def made(given: Unequals, slots: int | None) -> Plan:
        return chain_plan(given[0], given[1], "optimal", None, slots)

    agreed = Agreed(Ranks(cast(Any, comm)), tiered=False)
    plan = agreed.fitting(lambda: ((costs, room, None), room), made)
    assert use_of(plan.actions, costs).peak_bytes <= least_in_pieces(costs) + room
    return plan.actions, (plan.memory_bytes or 0) / room


def uneven(seed: int, comm: Comm, n: int) -> tuple[StageCosts, random.Random]:
    """Return costs with tapes that are large on one rank alone."""
    draw = random.Random(f"{seed} {comm.rank}")
    costs = Part(seed, comm.rank, None, n).costs()
    stages = tuple(
        replace(stage, tape_bytes=stage.output_bytes * (21 if draw.random() < 0.1 else 1))
        for stage in costs.stages
    )
    return replace(costs, stages=stages), draw


@core
def test_no_rank_keeps_more_than_its_memory_where_largest_steps_differ() -> None:
    """A step that is large on one rank alone would make room for more states on all."""
    slow = 0
    for seed in range(30):
        (one, room), (other, _) = succeed(run_ranks(2, partial(planned_together, seed)))
        assert one == other
        slow += not room
    assert 0 < slow < 10  # where nothing else fits, Revolve runs


def rest_of_survey(seed: int, comm: Comm) -> list[Any]:
    """Return the actions of the rest of a survey, which fit what this rank has left."""
    costs, draw = uneven(seed, comm, 25)
    room, left = 4 * costs.largest_state_bytes, draw.choice([0, 1, 2]) * 100
    agreed = Agreed(Ranks(cast(Any, comm)), tiered=False)

    def made(given: Unequals, slots: int | None) -> tuple[Action, ...]:
        return tuple(reversed_by(given[0], given[1], "optimal", slots=slots))

    actions = list(agreed.fitting(lambda: ((costs, room, None), left), made))
    assert use_of(actions, costs).peak_bytes <= left + least_in_pieces(costs)
    return actions


@core
def test_the_rest_of_a_survey_fits_every_rank() -> None:
    slow = 0
    for seed in range(30):
        one, other = succeed(run_ranks(2, partial(rest_of_survey, seed)))
        assert one == other
        slow += sum(isinstance(action, Load) for action in one) >= 23
    assert slow  # where nothing else fits, each step is run to from the start
