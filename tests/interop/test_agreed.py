"""Ranks decide alike, whatever each of them sees; ranks are threads here."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_mpi import MPI, Comm, World, run_ranks, succeed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi_wave import Wave, store_all, whole
from replays import logged

from multistage.backends import MemoryStore, StripedStore
from multistage.backends.base import CheckpointLost, StoreStats
from multistage.backends.testing import FaultyStore
from multistage.execute.executor import Executor
from multistage.interop.ranks import AgreedStore, Ranks
from multistage.model.chain import FunctionChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS
from multistage.planners.streaming.online import online_schedule
from multistage.states.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
LAYOUT = Layout.of(np.zeros(1))
STATE = [np.zeros(1)]


@pytest.fixture(autouse=True)
def fake_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    interval = sys.getswitchinterval()
    yield
    assert sys.getswitchinterval() == interval


class Local:
    """A store in virtual time whose answers are told beforehand."""

    name, queue_depth = "local", 2

    def __init__(
        self, rooms: list[bool], waits: list[float], written: list[bool], read: list[bool]
    ) -> None:
        self.stats, self.transfers = StoreStats(), deque()
        self._rooms, self._waits = iter(rooms), iter(waits)
        self._written, self._read = iter(written), iter(read)
        self.now = 0.0
        self.held: set[int] = set()

    def clock(self) -> float:
        self.now += 1e-6
        return self.now

    def open(self, layout: Layout) -> None:
        self.held.clear()

    def put(self, key: int, arrays: Any, *, block: bool = False) -> bool:
        if not block:
            taken = next(self._rooms, True)
        else:
            wait = next(self._waits, 0.0)
            self.now += abs(wait)
            taken = wait >= 0  # a tier that is full makes nobody wait forever
        if taken:
            self.held.add(key)
        return taken

    def wait_written(self, key: int) -> bool:
        assert key in self.held
        if not next(self._written, True):
            self.held.remove(key)
            return False
        return True

    def prefetch(self, key: int) -> None:
        assert key in self.held

    def get(self, key: int) -> Any:
        if key in self.held and next(self._read, True):
            return STATE
        raise CheckpointLost(f"checkpoint {key} is gone")

    def drop(self, key: int) -> None:
        self.held.discard(key)

    def close(self) -> None:
        self.held.clear()


bools = st.lists(st.booleans(), max_size=40)
LOCALS = st.builds(
    Local, bools, st.lists(st.floats(-1.0, 10.0), max_size=40), written=bools, read=bools
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(LOCALS, min_size=1, max_size=3),
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=50), min_size=1, max_size=2),
)
def test_every_rank_answers_alike(locals_: list[Local], sweeps: list[list[int]]) -> None:
    def work(comm: Comm) -> Any:
        local, ranks = locals_[comm.rank], Ranks(comm)
        store = AgreedStore(local, ranks, clock=local.clock)  # type: ignore[arg-type]
        store.open(LAYOUT)
        answers: list[Any] = []
        for gaps in sweeps:
            taken = []
            for key in np.cumsum(gaps).tolist():
                local.now += 1.0 + comm.rank  # ranks compute at different speeds
                answers.append(store.put(key, STATE))
                if answers[-1]:
                    taken.append(key)
            answers += [store.wait_written(key) for key in taken]
            for key in reversed(taken):
                store.prefetch(key)
                there = key in local.held
                try:
                    store.get(key)
                    assert there
                    answers.append(True)
                except CheckpointLost:
                    answers.append(False)
                    assert key not in local.held
                store.drop(key)
            assert not local.held
        store.settle()
        store.close()
        return answers

    found = succeed(run_ranks(len(locals_), work))
    assert all(one == found[0] for one in found)


def paced(steps: int, write_s: Any, *, spacing: int = 1) -> tuple[list[int], float]:
    """Run offers in virtual time, a step a second; return the keys taken and seconds waited.

    `write_s(step)` is what a write begun at that step takes.
    """
    taken: list[int] = []
    stalled = 0.0

    class Channel(Local):
        done: deque[float]

        def put(self, key: int, arrays: Any, *, block: bool = False) -> bool:
            while self.done and self.done[0] <= self.now:
                self.done.popleft()
            if len(self.done) >= 2:
                if not block:
                    return False
                self.now = self.done.popleft()
            free = max(self.done[-1] if self.done else 0.0, self.now)
            self.done.append(free + write_s(key))
            return True

    def work(comm: Comm) -> None:
        nonlocal stalled
        channel = Channel([], [], [], [])
        channel.done = deque()
        store = AgreedStore(channel, Ranks(comm), clock=lambda: channel.now)  # type: ignore[arg-type]
        store.open(LAYOUT)
        at = 0
        for key in range(steps):
            if key >= at and store.put(key, STATE):
                taken.append(key)
                at = key + spacing
            channel.now += 1.0
        store.settle()
        stalled = store.stalled_s

    succeed(run_ranks(1, work))
    return taken, stalled


def test_no_state_is_refused_if_the_tier_keeps_up() -> None:
    taken, stalled = paced(1000, lambda key: 3.9, spacing=4)
    assert taken == list(range(0, 1000, 4))
    assert stalled == 0


def test_a_tier_slower_than_planned_is_offered_less() -> None:
    taken, stalled = paced(4000, lambda key: 16.0, spacing=2)
    late = [key for key in taken if key >= 2000]
    assert 14 <= 2000 / len(late) <= 20  # of 16 that fit
    assert stalled < 0.15 * 4000  # taking every second state would wait 28000


def test_a_tier_that_recovers_is_offered_more() -> None:
    taken, _ = paced(8000, lambda key: 40.0 if key < 2000 else 2.0, spacing=4)
    assert 30 <= 1000 / len([key for key in taken if 1000 <= key < 2000]) <= 60
    assert [key for key in taken if key >= 7900] == list(range(taken[-25], 8000, 4))


def test_the_slowest_rank_sets_the_pace() -> None:
    def work(comm: Comm) -> list[int]:
        waits = [50.0] * 100 if comm.rank == 1 else []
        local = Local([False] * 100 if comm.rank == 1 else [], waits, [], [])
        store = AgreedStore(local, Ranks(comm), clock=local.clock)  # type: ignore[arg-type]
        store.open(LAYOUT)
        taken = []
        for key in range(200):
            local.now += 10.0
            if store.put(key, STATE):
                taken.append(key)
        store.settle()
        return taken

    found = succeed(run_ranks(3, work))
    assert found[0] == found[1] == found[2]
    # Two blocks as offered; then a state in six steps, as one write takes.
    assert found[0][:8] == list(range(8))
    assert {b - a for a, b in zip(found[0][9:15], found[0][10:16], strict=True)} <= {5, 6, 7}


def test_no_state_is_accepted_after_a_rank_is_full() -> None:
    def work(comm: Comm) -> list[Any]:
        full = comm.rank == 1
        local = Local([False] * 9999 if full else [], [-1.0] * 9999 if full else [], [], [])
        store = AgreedStore(local, Ranks(comm), clock=local.clock)  # type: ignore[arg-type]
        store.open(LAYOUT)
        # So many that one asked for at long intervals would be taken again.
        answers: list[Any] = [store.put(key, STATE) for key in range(3000)]
        answers.append(store.put(3000, STATE, block=True))
        for key in (0, 3000):
            assert store.wait_written(key)
            store.prefetch(key)
            with pytest.raises(CheckpointLost, match=r"rank 1|no room"):
                store.get(key)
        answers += [store.put(key, STATE) for key in range(30)]  # a new sweep tries again
        return answers

    found = succeed(run_ranks(3, work))
    assert found[0] == found[1] == found[2]
    assert found[0] == [True] * 9 + [False] * 2991 + [True] * 10 + [False] * 21


def test_what_was_lost_and_is_put_again_is_there() -> None:
    def work(comm: Comm) -> None:
        local = Local([], [], [comm.rank != 1], [])
        store = AgreedStore(local, Ranks(comm), clock=local.clock)  # type: ignore[arg-type]
        store.open(LAYOUT)
        assert store.put(7, STATE) and store.wait_written(7)
        with pytest.raises(CheckpointLost):
            store.get(7)
        store.drop(7)
        for _ in range(2):
            assert store.put(7, STATE) and store.wait_written(7)
            assert store.get(7) is STATE
            store.drop(7)
        store.settle()

    succeed(run_ranks(3, work))


def test_ranks_communicate_only_at_offers_and_reads() -> None:
    """One reduction per block of writes and one per read."""
    world = World(2)

    def work(comm: Comm) -> int:
        local = Local([], [], [], [])
        store = AgreedStore(local, Ranks(comm), clock=local.clock)  # type: ignore[arg-type]
        store.open(LAYOUT)
        comm.allgather(None)
        begun = world.collectives
        comm.allgather(None)
        for key in range(400):
            store.put(key, STATE)
            store.wait_written(key)
        store.settle()
        comm.allgather(None)
        return world.collectives - begun

    assert max(succeed(run_ranks(2, work, world))) <= 99 + 2


def test_reads_of_a_tier_of_two_paths_are_told_before_it_is_put_to_again() -> None:
    def work(comm: Comm) -> list[str]:
        paths = MemoryStore(buffer_bytes=0), MemoryStore(buffer_bytes=0)
        store = AgreedStore(StripedStore(*paths), Ranks(comm))
        store.open(LAYOUT)
        assert store.put(0, STATE) and store.wait_written(0)
        store.get(0)
        told = [record.kind for record in store.transfers]
        store.close()
        return told

    assert succeed(run_ranks(1, work)) == [["write", "read"]]


# ------------------------------------------------------------------ whole runs

N = 40
COSTS = Costs(1.0, 2.0, state_bytes=10, tiers=(Tier("memory", 2.5, 2.5),))


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["streaming", "interval", "online"]),
    st.integers(2, 6),
    st.lists(
        st.tuples(*[st.sets(st.integers(0, 25), max_size=6) | st.just(range(99))] * 3),
        min_size=2,
        max_size=3,
    ),
)
def test_faults_on_any_rank_leave_gradient_and_actions(
    planner: str, slots: int, faults: list[Any]
) -> None:
    def work(comm: Comm) -> Any:
        refuse, lose_write, lose_read = faults[comm.rank]
        store = AgreedStore(
            FaultyStore(
                MemoryStore(buffer_bytes=0),
                refuse=refuse,
                lose_write=lose_write,
                lose_read=lose_read,
            ),
            Ranks(comm),
        )
        wave = Wave(comm)
        chain: FunctionChain[Any, Any] = FunctionChain(wave.step, wave.adjoint_step)
        store.open(Layout.of(wave.start))
        try:
            executor: Executor[Any, Any] = Executor(chain, (store,))
            log: list[Any] = []
            for _ in range(2):
                if planner == "online":
                    schedule = online_schedule(COSTS, slots, lambda i: i == N)
                else:
                    schedule = PLANNERS[planner](COSTS, slots, N).schedule()
                executor.forward(logged(schedule, log), wave.start)
                adjoint = executor.reverse(wave.seed)
                log.append(executor.counts.recovered_steps)
        finally:
            store.close()
        return adjoint, log, wave.steps

    found = succeed(run_ranks(len(faults), work))
    assert all(log == found[0][1] and steps == found[0][2] for _, log, steps in found)
    expected = store_all(N)
    assert whole([adjoint for adjoint, _, _ in found]).tobytes() == expected.tobytes()


# ----------------------------------------------------------------------- errors


def test_a_rank_alone_gives_up_no_write() -> None:
    def work(comm: Comm) -> None:
        store = AgreedStore(MemoryStore(buffer_bytes=0), Ranks(comm))
        store.open(LAYOUT)
        assert store.put(0, [np.ones(1)], block=True)
        store.cancel(0)
        assert store.ended(0, 0.0)
        assert not store.waits()
        assert store.wait_written(0)
        assert store.get(0)[0].tolist() == [1.0]
        store.close()

    succeed(run_ranks(1, work))
