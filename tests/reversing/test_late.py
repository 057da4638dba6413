"""Steps that differ, with a tier slower than planned: detours give the bits of store-all."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
from chains import raw
from late_writes import noting, said_late, tier_for
from unequal_chains import Case

from multistage import Reversal, native
from multistage.backends import MemoryStore, Store
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning
from multistage.execute.detour import Deadlines
from multistage.execute.late import PagedWrites, TakenWhenLate
from multistage.reversing import unequal

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="the rule's twin is slow")

KINDS = ("functional", "tape", "in-place", "in-place-tape")


@pytest.fixture
def taken() -> Iterator[list[TakenWhenLate]]:
    with noting() as found:
        yield found


def swept(run: Reversal[Any, int], case: Case) -> tuple[bytes, int]:
    last = raw(run.forward(case.start()))
    return last, run.reverse(1)


def late_sweep(
    case: Case, rng: random.Random, store: Store, *, memory: str = "2 slots", sweeps: int = 1
) -> Any:
    """Return the report on sweeps that are said to be late at random places."""
    late_at, refuses = (
        partial(_by_chance, rng, odds) for odds in (rng.choice([0.2, 1.0]), rng.choice([0.0, 0.5]))
    )
    answer = case.store_all()
    with (
        mock.patch.object(unequal, "measured_rates", tier_for(case, rng.choice([0.3, 1.0]))),
        said_late(late_at, lambda: rng.choice([1.5, 3.0, 10.0, 1e6]), refuses),
        Reversal(case.chain(), costs=case.costs, memory=memory, tiers=store, checked=True) as run,
    ):
        for _ in range(sweeps):
            assert swept(run, case) == answer
        return run.report()


def _by_chance(rng: random.Random, odds: float) -> bool:
    return rng.random() < odds


@pytest.mark.parametrize("kind", KINDS)
def test_detours_give_the_bits_of_store_all(kind: str, taken: list[TakenWhenLate]) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        case = Case(seed, kind, rng.choice([8, 12, 16]))
        store, count = MemoryStore(buffer_bytes=0), len(taken)
        report = late_sweep(case, rng, store, memory=f"{rng.choice([1, 2, 3])} slots")
        assert ("times as long as planned" in str(report)) == (len(taken) > count)
    assert taken


def test_the_next_sweep_is_planned_for_the_tier_as_it_was(taken: list[TakenWhenLate]) -> None:
    case = Case(3, "functional", 16)
    answer = case.store_all()
    with (
        mock.patch.object(unequal, "measured_rates", tier_for(case, 0.3)),
        said_late(lambda: True, lambda: 10.0),
        Reversal(case.chain(), costs=case.costs, memory="2 slots", tiers=MemoryStore()) as run,
    ):
        assert swept(run, case) == answer
        assert len(taken) == 1 and run.chain_plan is not None and run.chain_plan.tier is not None
        before = run.chain_plan.tier.write_bytes_per_s
        assert "writes took 10 times as long as planned: from state " in str(run.report())
        assert swept(run, case) == answer
        assert run.chain_plan.tier.write_bytes_per_s == pytest.approx(before / 10)


@pytest.mark.parametrize("fault", ["refuse", "lose_write", "lose_read"])
def test_a_detour_from_a_tier_that_loses_states(fault: str, taken: list[TakenWhenLate]) -> None:
    for seed in range(3):
        case = Case(seed, "functional", 14)
        struck: Any = {fault: lambda number: number % 3 == 1}
        store = FaultyStore(MemoryStore(buffer_bytes=0), **struck)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            late_sweep(case, random.Random(seed), store)
    assert taken


class Untold(MemoryStore):
    """Cannot tell which writes have ended, and makes those that are cancelled."""

    def __init__(self) -> None:
        super().__init__(buffer_bytes=0)
        self.awaited: set[int] = set()

    def ended(self, key: int, timeout_s: float) -> bool:
        return True

    def cancel(self, key: int) -> None:
        return

    def wait_written(self, key: int) -> bool:
        self.awaited.add(key)
        return super().wait_written(key)


def test_a_store_that_cannot_tell_is_waited_for(taken: list[TakenWhenLate]) -> None:
    """Else arrays that it still reads would be beyond the limit."""
    case, store = Case(3, "functional", 16), Untold()
    awaited = []
    cancel = PagedWrites.cancel

    def cancelled(writes: PagedWrites, timeout_s: float) -> bool:
        answer = cancel(writes, timeout_s)
        awaited.append((store.stats.writes, len(store.awaited)))
        return answer

    late_once = iter([False] * 6 + [True] * 1000)  # with some writes on their way
    with (
        mock.patch.object(PagedWrites, "cancel", cancelled),
        mock.patch.object(unequal, "measured_rates", tier_for(case, 0.3)),
        said_late(lambda: next(late_once), lambda: 10.0),
        Reversal(case.chain(), costs=case.costs, memory="2 slots", tiers=store) as run,
    ):
        assert swept(run, case) == case.store_all()
    assert taken and awaited and all(writes == ended > 0 for writes, ended in awaited), awaited


def test_a_detour_holds_no_more_memory_than_the_plan_may(taken: list[TakenWhenLate]) -> None:
    for seed in range(4):
        case = Case(seed, "functional", 16)
        late_sweep(case, random.Random(seed), MemoryStore(buffer_bytes=0), memory="3 slots")
    for each in taken:
        assert 0 < each.peak_bytes <= each.plan.memory_bytes


def test_a_detour_that_is_judged_but_not_taken_is_not_reported() -> None:
    case = Case(3, "functional", 16)
    with (
        mock.patch.object(unequal, "measured_rates", tier_for(case, 0.3)),
        mock.patch.object(Deadlines, "_left", lambda *_: None),
    ):
        peaks = []
        for slower in (1.0, 10.0):
            run: Any = Reversal(
                case.chain(), costs=case.costs, memory="2 slots", tiers=MemoryStore()
            )
            with said_late(lambda: True, partial(float, slower)), run:
                assert swept(run, case) == case.store_all()
                peaks.append(run.report().peak_fast_bytes)
    assert peaks[0] == peaks[1]
