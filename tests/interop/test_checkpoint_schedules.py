"""Schedules of checkpoint_schedules on our executor, and our plans as schedules of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chains import CHAINS, raw, store_all

from multistage.actions import Advance, EndForward, Free, Load, Reverse, Save, Tape
from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import (
    ArgumentError,
    BudgetError,
    CheckpointWarning,
    ScheduleError,
    ScheduleUsedError,
)
from multistage.interop.checkpoint_schedules import actions_of, as_planner, as_schedule
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, plan
from multistage.reversal import Reversal
from multistage.schedule.rules import check
from multistage.schedule.simulation import simulate

their = pytest.importorskip("checkpoint_schedules")
from validity import Judge  # noqa: E402

Storage = their.StorageType

pytestmark = pytest.mark.filterwarnings("ignore:Numba not available")  # theirs is slow without it

# Slots for the snapshots, one more for transfers where there is a disk.
THEIRS: dict[str, tuple[Callable[[int], Any], int]] = {
    "Revolve": (lambda n: their.Revolve(n, 3), 3),
    "Multistage in RAM": (lambda n: their.MultistageCheckpointSchedule(n, 4, 0), 4),
    "Multistage": (lambda n: their.MultistageCheckpointSchedule(n, 2, 3), 3),
    "Multistage on disk": (
        lambda n: their.MultistageCheckpointSchedule(n, 0, 3, trajectory="revolve"),
        1,
    ),
    "HRevolve": (lambda n: their.HRevolve(n, 2, 5, wd=1, rd=1), 3),
    "DiskRevolve": (lambda n: their.DiskRevolve(n, 2, wd=1, rd=1), 3),
    "PeriodicDiskRevolve": (lambda n: their.PeriodicDiskRevolve(n, 2, wd=1, rd=1), 3),
    "Mixed in RAM": (lambda n: their.MixedCheckpointSchedule(n, 4, storage=Storage.RAM), 5),
    "Mixed on disk": (lambda n: their.MixedCheckpointSchedule(n, 4, storage=Storage.DISK), 1),
    "TwoLevel": (lambda n: their.TwoLevelCheckpointSchedule(5, 2), 1),
    "TwoLevel in RAM": (
        lambda n: their.TwoLevelCheckpointSchedule(4, 2, binomial_storage=Storage.RAM),
        4,
    ),
    "SingleMemory": (lambda n: their.SingleMemoryStorageSchedule(), 40),
    "SingleDisk": (lambda n: their.SingleDiskStorageSchedule(), 1),
    "SingleDisk moved": (lambda n: their.SingleDiskStorageSchedule(move_data=True), 1),
}
# Those of them that can be made for a single step.
ONE_STEP = {
    "Revolve",
    "Multistage in RAM",
    "DiskRevolve",
    "PeriodicDiskRevolve",
    *(name for name in THEIRS if name.startswith(("Single", "TwoLevel"))),
}
MORE = 2  # slots, to prefetch with


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("n", [1, 2, 7, 33])
def test_theirs_are_legal(name: str, n: int) -> None:
    make, slots = THEIRS[name]
    if n == 1 and name not in ONE_STEP:
        return
    used = check(actions_of(make(n), n), n, slots)
    assert used.forward_steps >= n


@pytest.mark.long(but=("0-*-Multistage", "*-nested-*"))
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("more", [0, MORE])
def test_theirs_run_exactly(name: str, kind: str, more: int) -> None:
    make, slots = THEIRS[name]
    make_chain, start = CHAINS[kind]
    chain, n = make_chain(), 33
    costs = Costs(
        1.0, 2.0, tape_step_s=None if chain.state_is_tape else 1.0, tiers=(Tier("disk", 1.0, 1.0),)
    )
    last, adjoint = store_all(kind, n)
    # Theirs know no size of a tape; those of blocks take half as much again as a state.
    room = (slots + more) * (2 if kind == "blocks-tape" else 1)
    with Reversal(
        chain,
        n_steps=n,
        memory=f"{room} slots",
        tiers="memory:",
        planner=as_planner(lambda: make(n)),
        costs=costs,
        checked=True,
    ) as run:
        for _ in range(2):
            assert raw(run.forward(start())) == last
            assert run.reverse(1) == adjoint


def test_prefetching_hides_their_reads() -> None:
    n, costs = 60, Costs(1.0, 2.0, tiers=(Tier("disk", 3.0, 3.0),))
    planner = as_planner(lambda: their.HRevolve(n, 2, 10, wd=3, rd=3))
    waiting = simulate(actions_of(their.HRevolve(n, 2, 10, wd=3, rd=3), n), n, costs, 3)
    assert waiting.stall_s > 0
    for slots in (3, 6):
        made = planner(costs, slots, n)
        assert made.makespan_s < waiting.makespan_s
        assert made.stall_s < 0.5 * waiting.stall_s


def test_lost_checkpoints_of_theirs_are_computed_again() -> None:
    (make_chain, start), n = CHAINS["nested"], 33
    costs = Costs(1.0, 2.0, tiers=(Tier("disk", 1.0, 1.0),))
    for fault in ("lose_write", "lose_read", "refuse"):
        store = FaultyStore(MemoryStore(), **{fault: lambda number: number % 2 == 0})
        with (
            Reversal(
                make_chain(),
                n_steps=n,
                memory="5 slots",
                tiers=store,
                planner=as_planner(lambda: their.DiskRevolve(n, 2, wd=0.1, rd=0.1)),
                costs=costs,
            ) as run,
            pytest.warns(CheckpointWarning),
        ):
            run.forward(start())
            assert run.reverse(1) == store_all("nested", n)[1]


class Broken(their.CheckpointSchedule):  # type: ignore[misc, name-defined]
    """Any list of actions as a schedule."""

    def __init__(self, n: int, actions: list[Any]) -> None:
        super().__init__(n)
        self._actions = actions

    def _iterator(self) -> Iterator[Any]:
        yield from self._actions

    def uses_storage_type(self, storage_type: Any) -> bool:
        return True


BEGIN = [
    their.Forward(0, 2, True, False, Storage.RAM),
    their.Forward(2, 3, False, True, Storage.WORK),
    their.EndForward(),
    their.Reverse(3, 2, True),
]
BROKEN: dict[str, tuple[list[Any], str]] = {
    "gap": ([their.Forward(1, 3, True, False, Storage.RAM)], r"Forward\(1, 3.*live state is 0"),
    "no state": ([*BEGIN, their.Reverse(2, 1, True)], r"Reverse\(2, 1, True\)"),
    "not stored": (
        [*BEGIN, their.Copy(1, Storage.RAM, Storage.WORK)],
        r"Copy\(1, StorageType.RAM.*no fast slot holds",
    ),
    "not on disk": (
        [*BEGIN, their.Copy(0, Storage.DISK, Storage.WORK)],
        r"Copy\(0, StorageType.DISK.*has no checkpoint 0",
    ),
    "from nowhere": ([*BEGIN, their.Copy(0, Storage.WORK, Storage.RAM)], "neither RAM nor disk"),
    "stops": (BEGIN, "before an EndReverse"),
    "ends early": ([*BEGIN, their.EndReverse()], r"EndReverse\(\).*adjoint at 2"),
    "unknown": ([*BEGIN, "sleep"], "'sleep' is no action"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_illegal_schedule_is_rejected_before_a_step_runs(name: str) -> None:
    actions, message = BROKEN[name]
    ran = []

    def step(x: Any, i: int) -> Any:
        ran.append(i)
        return x

    with (
        Reversal(
            step,
            lambda x, a, i: a,
            3,
            memory="9 slots",
            tiers="memory:",
            planner=as_planner(lambda: Broken(3, actions)),
            costs=Costs(1.0, 1.0, tiers=(Tier(),)),
        ) as run,
        pytest.raises(ScheduleError, match=message),
    ):
        run.forward(np.zeros(3))
    assert not ran


def test_bad_input() -> None:
    costs = Costs(1.0, 1.0)
    with pytest.raises(ArgumentError, match="function that makes a schedule"):
        as_planner(their.Revolve(5, 2))
    with pytest.raises(ScheduleError, match="for 5 steps, not 6"):
        as_planner(lambda: their.Revolve(5, 2))(costs, 9, 6)
    with pytest.raises(ArgumentError, match="list is no CheckpointSchedule"):
        as_planner(list)(costs, 9, 6)
    with pytest.raises(ScheduleError, match="no tier; give tiers="):
        as_planner(lambda: their.DiskRevolve(30, 2, wd=0.1, rd=0.1))(costs, 9, 30)
    with pytest.raises(ScheduleError, match=r"Revolve at Forward.*raise the budget"):
        as_planner(lambda: their.Revolve(30, 5))(costs, 4, 30)
    tight = Costs(1.0, 1.0, tiers=(Tier(capacity_states=1),))
    with pytest.raises(ScheduleError, match="full: 1 of 1"):
        as_planner(lambda: their.MultistageCheckpointSchedule(30, 0, 4))(tight, 9, 30)
    with pytest.raises(ScheduleError, match="before an EndReverse"):
        as_planner(lambda: their.NoneCheckpointSchedule())(costs, 9, 6)


# ------------------------------------------------------------------ ours to theirs


COSTS = {
    "alone": Costs(1.0, 2.0),
    "taped": Costs(1.0, 2.0, tape_step_s=1.1),
    "large tapes": Costs(1.0, 2.0, tape_step_s=1.1, state_bytes=8, tape_bytes=24),
    "tier": Costs(1.0, 2.0, tiers=(Tier("slow", 3.0, 3.0),)),
    "slow tier": Costs(1.0, 2.0, tiers=(Tier("slow", 40.0, 30.0),)),
    "small tier": Costs(1.0, 2.0, tiers=(Tier("slow", 2.0, 2.0, capacity_states=3),)),
    "taped tier": Costs(1.0, 2.0, tape_step_s=1.1, tiers=(Tier("slow", 3.0, 3.0),)),
    "two tiers": Costs(
        1.0, 2.0, tiers=(Tier("fast", 0.5, 0.5, capacity_states=4), Tier("slow", 3.0, 3.0))
    ),
}
SHAPES = [(1, 1), (2, 1), (4, 1), (10, 3), (17, 17), (33, 5), (70, 6)]


@pytest.mark.long(but=("True-tier-*", "False-taped tier-*", "*-two tiers-*"))
@pytest.mark.parametrize("name", sorted(set(PLANNERS) - {"pyrevolve"}))
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("replayable", [False, True])
def test_ours_run_by_the_letter(name: str, kind: str, replayable: bool) -> None:
    costs = COSTS[kind]
    for n, slots in SHAPES:
        try:
            made = PLANNERS[name](costs, slots, n)
        except BudgetError:
            assert name in ("periodic", "recursive", "store-all")
            continue
        schedule = as_schedule(made, replayable=replayable)
        free = 1 + costs.state_is_tape
        judge = Judge(schedule, n, costs.tape_slots, free).run()
        assert judge.peak_slots <= made.slots + 1e-9
        # Of tapes on their way through RAM too, some need none of the plan's slots.
        assert judge.peak_entries <= made.slots + replayable * free
        # Their turn runs the step before its adjoint; ours counts it in the turn.
        assert judge.steps <= made.forward_steps + n
        assert schedule.max_n == n
        if not isinstance(schedule, their.SingleMemoryStorageSchedule):
            assert schedule.uses_storage_type(Storage.DISK) in (False, bool(made.writes))
            assert not schedule.uses_storage_type(Storage.WORK)


def test_a_plan_that_only_tapes_is_their_own_class() -> None:
    made = plan(Costs(1.0, 2.0), "40 slots", n_steps=40)
    assert made.planner == "store-all"
    schedule = as_schedule(made)
    assert isinstance(schedule, their.SingleMemoryStorageSchedule)
    assert Judge(schedule, 40).run().peak_slots == 39


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (
            [Save(0), Tape(0), Advance(1, 3), EndForward(), Load(0), Advance(0, 2), Reverse(2)],
            "both the state and the tape of step 0",
        ),
        (
            [
                *(Tape(0), Save(1), Tape(1), Advance(2, 3), EndForward()),
                *(Load(1), Free(1), Advance(1, 2), Reverse(2)),
            ],
            "both the state and the tape of step 1",
        ),
        (
            [
                *(Save(0), Advance(0, 2), Save(2), Load(0), Advance(0, 1), Load(2)),
                *(Advance(2, 3), EndForward(), Load(2), Reverse(2)),
            ],
            "state 2 is stored, and no step run from it",
        ),
    ],
)
def test_plans_their_actions_cannot_express_are_refused(actions: list[Any], message: str) -> None:
    made = replace(PLANNERS["revolve"](Costs(1.0, 2.0), 9, 3), make=lambda: _sent(actions))
    with pytest.raises(ScheduleError, match=message):
        as_schedule(made)


def _sent(actions: list[Any]) -> Any:
    yield from actions


def test_a_used_schedule_raises_an_error() -> None:
    schedule = as_schedule(plan(COSTS["tier"], "5 slots", n_steps=40))
    assert isinstance(list(schedule)[-1], their.EndReverse)
    assert schedule.is_exhausted
    with pytest.raises(StopIteration):  # as any iterator ends
        next(schedule)
    for again in (next, iter, list):
        with pytest.raises(ScheduleUsedError, match=r"make another with as_schedule\(plan\)"):
            again(schedule)


def test_the_maker_is_called_once_for_all_sweeps() -> None:
    (make_chain, start), n, calls = CHAINS["nested"], 33, []

    def make() -> Any:
        calls.append(n)
        return their.HRevolve(n, 2, 5, wd=1, rd=1)

    costs = Costs(1.0, 2.0, tiers=(Tier("disk", 1.0, 1.0),))
    with Reversal(
        make_chain(),
        n_steps=n,
        memory="5 slots",
        tiers="memory:",
        planner=as_planner(make),
        costs=costs,
    ) as run:
        for _ in range(3):
            run.forward(start())
            assert run.reverse(1) == store_all("nested", n)[1]
        assert len(calls) == 1
