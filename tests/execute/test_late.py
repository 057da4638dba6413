"""Tiers that are late: a sweep goes on without them, to the bits of store-all."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import optree
import pytest
from chains import CHAINS, TAPED, raw, store_all
from leaving import StoppingStore, by_chance, said_late, tier_for
from replays import actions_of
from unequal_chains import Case

from benchmarks import late_tier
from multistage import Costs, Reversal, StageCosts, native, plan
from multistage.actions import Await, Evict
from multistage.backends import MemoryStore, Store
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning, ScheduleError, StoreError
from multistage.execute.executor import Executor
from multistage.execute.late import EqualSteps, Late, Stages
from multistage.execute.transfers import Transfers
from multistage.model.tier import Tier
from multistage.reversing import unequal
from multistage.states.layout import Layout

KINDS = ("functional", "tape", "in-place", "in-place-tape", "one-tape")
STREAMED = Costs(1e-3, 2e-3, tiers=(Tier("slow", write_s=3e-3, read_s=3e-3),))
# Plans of unequal steps are made by a table, whose twin is slow.
by_table = pytest.mark.skipif(native.LIBRARY is None, reason="the table's twin is slow")


def swept(run: Reversal[Any, int], start: Any) -> tuple[bytes, int]:
    last = raw(run.forward(start))
    return last, run.reverse(1)


def equal(name: str, n: int, store: Store, **given: Any) -> Reversal[Any, int]:
    """Return the reversal of equal steps, planned for a tier three times slower than a step."""
    chain, start = CHAINS[name]
    nbytes = sum(leaf.nbytes for leaf in optree.tree_leaves(start()))
    costs = replace(STREAMED, state_bytes=nbytes)
    if name in TAPED:
        costs = replace(costs, tape_step_s=1e-3, tape_bytes=nbytes)
    given = {"planner": "streaming", "memory": "5 slots", "checked": True} | given
    return Reversal(chain(), costs=costs, n_steps=n, tiers=store, **given)


@pytest.mark.parametrize("name", ["large", "in-place", "in-place-tape", "tape"])
@pytest.mark.parametrize(("stops", "after"), [("read", 0), ("read", 5), ("write", 0), ("write", 4)])
def test_transfers_that_never_end_cost_nothing_but_time(name: str, stops: str, after: int) -> None:
    store, n = StoppingStore(stops, after), 60
    with equal(name, n, store) as run:
        assert swept(run, CHAINS[name][1]()) == store_all(name, n)
        assert not store.gate.is_set()
        report, late = run.report(), run.report().counts.late
        assert late or after  # later ones may not come: a busy machine writes less
        assert not late or late.startswith("tier 'stopping' was late: from the ")
        assert ("Tier 'stopping' was late" in str(report)) == bool(late)
        assert report.counts.peak_slots <= 5


def test_a_plan_for_more_tiers_than_there_are_is_refused() -> None:
    tiers = Tier("small", 1e-4, 1e-4, capacity_states=2), Tier("large", 3e-4, 3e-4)
    made = plan(replace(STREAMED, tiers=tiers), "2 slots", 30, "h-revolve")
    run: Any = Reversal(CHAINS["large"][0](), planner=made, tiers="memory:")
    with run, pytest.raises(ScheduleError, match="but there are 1 tiers"):
        run.forward(CHAINS["large"][1]())


@pytest.mark.parametrize("planner", ["disk-revolve", "h-revolve", "stumm-walther"])
@pytest.mark.parametrize("stops", ["read", "write"])
def test_a_schedule_that_looks_at_no_answers_is_not_made_up_for_bit_by_bit(
    planner: str, stops: str
) -> None:
    """Else each state that was lost would be computed again from the nearest one: quadratic."""
    name, n = "large", 80
    store = StoppingStore(stops, 0)
    with equal(name, n, store, planner=planner) as run:
        assert swept(run, CHAINS[name][1]()) == store_all(name, n)
        counts = run.report().counts
        assert counts.late and not counts.lost and not counts.recovered_steps
        assert counts.forward_steps < 6 * n


@pytest.mark.long(but=("nested", "tape", "in-place", "in-place-tape", "blocks"))
@pytest.mark.parametrize("name", sorted(CHAINS))
def test_a_sweep_goes_on_from_anywhere(name: str) -> None:
    taken = 0
    for seed in range(6):
        rng = random.Random(seed)
        n, odds = rng.choice([9, 33, 70]), rng.choice([0.05, 0.5])
        planner = rng.choice(["streaming", "disk-revolve", "h-revolve"])
        run = equal(name, n, MemoryStore(buffer_bytes=0), planner=planner)
        with said_late(by_chance(rng, odds)) as found, run:
            for _ in range(2):
                assert swept(run, CHAINS[name][1]()) == store_all(name, n)
        taken += len(found)
    assert taken


def test_a_sweep_of_unknown_length_waits_until_its_end_is_known() -> None:
    chain, start = CHAINS["large"]
    costs = replace(STREAMED, state_bytes=sum(a.nbytes for a in optree.tree_leaves(start())))
    store = MemoryStore(buffer_bytes=0)
    run: Any = Reversal(chain(), costs=costs, memory="5 slots", tiers=store, checked=True)
    with said_late(lambda _: True) as found, run:
        last = run.forward(start(), until=lambda state, i: i == 70)
        assert not found
        assert (raw(last), run.reverse(1)) == store_all("large", 70)
    assert len(found) == 1


def test_a_store_that_cannot_tell_is_waited_for() -> None:
    """As one on which ranks agree: a clock of one must not decide for all."""

    class Untold(MemoryStore):
        def ended(self, key: int, timeout_s: float) -> bool:
            return True

        def arrived(self, key: int, timeout_s: float) -> bool:
            return True

    with (
        equal("large", 60, Untold(buffer_bytes=0)) as run,
        mock.patch.object(Late, "_left", side_effect=AssertionError),
    ):
        assert swept(run, CHAINS["large"][1]()) == store_all("large", 60)


def test_a_sweep_without_room_beside_its_writes_leaves_once_they_end() -> None:
    """They were cancelled: to stay would lose what they had."""
    store, cancelled, cancel = StoppingStore("write", 0), 0, Transfers.cancel

    def released(transfers: Transfers, timeout_s: float) -> int:
        nonlocal cancelled
        cancelled += 1
        stuck = cancel(transfers, timeout_s)
        store.gate.set()
        return stuck

    with (
        said_late(lambda action: isinstance(action, Await) and not cancelled) as found,
        mock.patch.object(Transfers, "cancel", released),
        equal("large", 60, store, memory="2 slots") as run,
    ):
        assert swept(run, CHAINS["large"][1]()) == store_all("large", 60)
        assert found and cancelled
        assert run.report().counts.lost == 0


def test_a_sweep_that_has_no_way_without_its_tier_waits() -> None:
    def not_yet(timeout_s: float) -> bool:
        assert math.isfinite(timeout_s)  # none that a lock takes
        return False

    with (
        equal("large", 60, MemoryStore(buffer_bytes=0)) as run,
        mock.patch.object(Transfers, "awaited", lambda *_: not_yet),
        mock.patch.object(EqualSteps, "without_s", lambda *_: math.inf),
    ):
        assert swept(run, CHAINS["large"][1]()) == store_all("large", 60)


@pytest.mark.parametrize("stops", ["read", "write"])
def test_a_wait_for_a_late_tier_can_be_interrupted(stops: str) -> None:
    store = StoppingStore(stops, 2)
    with equal("large", 60, store) as run:
        with (
            mock.patch.object(Late, "_refused", return_value=None),
            mock.patch.object(Late, "_is_worth", side_effect=KeyboardInterrupt),
            mock.patch("multistage.execute.transfers._PATIENCE_S", 0.01),
            pytest.raises(KeyboardInterrupt),
        ):
            swept(run, CHAINS["large"][1]())
        assert store.gate.is_set()
        assert swept(run, CHAINS["large"][1]()) == store_all("large", 60)


def test_a_lost_state_is_not_looked_for_in_a_tier_that_hangs() -> None:
    class Hanging(FaultyStore):
        def arrived(self, key: int, timeout_s: float) -> bool:
            return key == 3

        def get(self, key: int) -> Any:
            assert key == 3, "waited for ever"
            return super().get(key)

    made = actions_of("0>2 P2 a0 2>3 P3 a1 3>4 | G3 a2 L3 R3 F3 L0 0>2 R2 L0 0>1 R1 L0 R0 D3 D2")
    chain, start = CHAINS["large"]
    store = Hanging(MemoryStore(), lose_read={0})
    store.open(Layout.of(start()))
    executor = Executor(chain(), (store,))
    with pytest.warns(CheckpointWarning, match="checkpoint 3"):
        last = raw(executor.forward(made, start()))
        assert (last, executor.reverse(1)) == store_all("large", 4)
    assert executor.counts.recovered_steps == 3
    store.close()


# ----------------------------------------------------------------------- in virtual time


@pytest.mark.long(but="equal")
@pytest.mark.parametrize("kind", ["equal", pytest.param("unequal", marks=by_table)])
def test_a_late_tier_costs_little_beside_none(kind: str) -> None:
    problem = late_tier.Problem(kind)
    cases = late_tier.cases((*late_tier.SLOWER, math.inf))
    rows = [late_tier.compared(problem, case, waits=False) for case in cases]
    over = [row["seconds"] / row["no_tier_s"] for row in rows]
    assert sum(over) / len(over) <= 1.05 and max(over) <= 1.25
    # Of what a sweep without a tier takes; what is waited is part of that.
    assert max(row["waited_s"] / row["no_tier_s"] for row in rows) <= 0.25
    assert max(row["steps"] / row["no_tier_steps"] for row in rows) <= 1.3
    assert {bool(row["late"]) for row in rows} == {False, True}


@pytest.mark.parametrize("slower", [50.0, math.inf])
@pytest.mark.parametrize("place", late_tier.PLACES)
def test_writes_that_go_on_take_no_more_than_their_slots(slower: float, place: float) -> None:
    """Offers are refused then, and a sweep that never waits would keep nothing."""
    case = late_tier.Case(slower, True, place)
    row = late_tier.compared(late_tier.Problem("equal", gives_up=False), case, waits=False)
    assert row["late"] and row["steps"] <= 1.2 * row["no_tier_steps"]


@pytest.mark.long(but="equal")
@pytest.mark.parametrize("kind", ["equal", pytest.param("unequal", marks=by_table)])
def test_a_tier_that_was_left_is_used_again(kind: str) -> None:
    """Plans that leave it out do so for 1, 2, 4, ... sweeps; others see its rates."""
    problem, late = late_tier.Problem(kind), late_tier.Case(math.inf, True, 0.0)
    alone = problem.swept(late, tier=False)
    swept = list(problem.sweeps([late] * 8 + [replace(late, slower=1.0)] * 8))
    assert {each.gradient for each in swept} == {alone.gradient}
    assert max(each.seconds for each in swept) <= 1.25 * alone.seconds
    assert any(not each.writes for each in swept)
    assert swept[0].late and not swept[-1].late and swept[-1].steps == problem.n


@by_table
def test_unequal_steps_go_on_beside_writes_that_do_not_stop() -> None:
    problem, case = late_tier.Problem("unequal", gives_up=False), late_tier.Case(50.0, True, 0.0)
    stuck: list[list[int]] = []
    best = Stages._best

    def noted(course: Stages, *given: Any) -> Any:
        found = best(course, *given)
        stuck.append(course._elsewhere.stuck())
        assert found is None or course.peak_bytes <= (course.plan.memory_bytes or 0)
        return found

    with mock.patch.object(Stages, "_best", noted):
        row = late_tier.compared(problem, case, waits=False)
    assert stuck[-1] and row["late"] and row["seconds"] <= 1.15 * row["no_tier_s"]


@by_table
def test_writes_that_never_stop_and_leave_no_room_are_an_error() -> None:
    problem = late_tier.Problem("unequal", gives_up=False)
    with (
        mock.patch("multistage.execute.late._STUCK_S", 5.0),
        pytest.raises(StoreError, match=r"for \d+ s, .*no memory to go on without the tier; raise"),
    ):
        problem.swept(late_tier.Case(math.inf, True, 0.5))


# ------------------------------------------------------------------------ unequal steps


def unequal_run(case: Case, store: Store, memory: str, *, fast: bool = False) -> Reversal[Any, int]:
    costs = case.costs
    if fast:  # so that little is waited for
        stages = [
            replace(s, forward_s=1e-5 * s.forward_s, backward_s=1e-5 * s.backward_s)
            for s in costs.stages
        ]
        costs = StageCosts(tuple(stages), costs.input_bytes)
    return Reversal(case.chain(), costs=costs, memory=memory, tiers=store, checked=True)


@pytest.mark.long(but=("functional", "in-place-tape", "one-tape"))
@by_table
@pytest.mark.parametrize("kind", KINDS)
def test_unequal_steps_go_on_from_anywhere(kind: str) -> None:
    taken: list[Late] = []
    for seed in range(8):
        rng = random.Random(seed)
        case, odds = Case(seed, kind, rng.choice([8, 12, 16])), rng.choice([0.05, 0.3, 1.0])
        store, memory = MemoryStore(buffer_bytes=0), f"{rng.choice([1, 2, 3])} slots"
        with (
            mock.patch.object(unequal, "measured_rates", tier_for(case, rng.choice([0.3, 1.0]))),
            said_late(by_chance(rng, odds)) as found,
            unequal_run(case, store, memory) as run,
        ):
            for _ in range(2):
                assert swept(run, case.start()) == case.store_all()
                assert ("went on without" in str(run.report())) == bool(run.report().counts.late)
        taken += found
    assert taken
    for late in taken:
        course = late.course
        assert isinstance(course, Stages)
        assert course.plan.memory_bytes is not None
        assert course.peak_bytes <= course.plan.memory_bytes


@by_table
@pytest.mark.parametrize(
    ("stops", "after"), [("read", 0), ("read", 20), ("write", 0), ("write", 9)]
)
def test_transfers_of_unequal_steps_that_never_end(stops: str, after: int) -> None:
    case, store = Case(3, "functional", 16), StoppingStore(stops, after)
    fast = mock.patch.object(
        unequal, "measured_rates", lambda *_: Tier.of_rates(1e9, 1e9, tapes=False)
    )
    with fast, unequal_run(case, store, "2 slots", fast=True) as run:
        assert swept(run, case.start()) == case.store_all()
        assert not store.gate.is_set()
        assert after or "was late" in str(run.report())


@by_table
def test_the_next_sweep_is_planned_for_the_tier_as_it_was() -> None:
    case = Case(3, "functional", 16)
    with (
        mock.patch.object(unequal, "measured_rates", tier_for(case, 0.3)),
        mock.patch.object(Stages, "_slower", lambda *_: 10.0),
        said_late(lambda action: isinstance(action, Evict)) as found,
        unequal_run(case, MemoryStore(), "2 slots") as run,
    ):
        assert swept(run, case.start()) == case.store_all()
        assert found
        before = run.plan.tier.write_bytes_per_s
        assert swept(run, case.start()) == case.store_all()
        assert run.plan.tier.write_bytes_per_s == pytest.approx(before / 10)


@by_table
@pytest.mark.parametrize("fault", ["refuse", "lose_write", "lose_read"])
def test_a_tier_that_is_late_and_loses_states(fault: str) -> None:
    taken = 0
    for seed in range(4):
        rng, case = random.Random(seed), Case(seed, "functional", 14)
        struck: Any = {fault: lambda number: number % 3 == 1}
        store = FaultyStore(MemoryStore(buffer_bytes=0), **struck)
        with (
            mock.patch.object(unequal, "measured_rates", tier_for(case, 0.3)),
            said_late(by_chance(rng, 0.2)) as found,
            warnings.catch_warnings(),
            unequal_run(case, store, "2 slots") as run,
        ):
            warnings.simplefilter("ignore", CheckpointWarning)
            assert swept(run, case.start()) == case.store_all()
        taken += len(found)
    assert taken
