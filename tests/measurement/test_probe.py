"""Measuring: every field is there, and nothing of the user's is touched."""

from __future__ import annotations

import math
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from chains import CHAINS, raw

from multistage.backends import CascadeStore, FileStore, MemoryStore
from multistage.backends.files import available_engines
from multistage.backends.testing import FaultyStore
from multistage.backends.urls import open_store
from multistage.errors import StateError, StoreError
from multistage.measurement import chain as chain_of_steps
from multistage.measurement.chain import measure
from multistage.measurement.store import probe_store, probe_tier
from multistage.model.blocks import Blocks
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.states.in_place import InPlace
from multistage.states.layout import Layout


class Clock:
    """Stands in for the module `time`; each reading takes a microsecond."""

    now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def _check(costs: Costs, state: Any) -> None:
    assert costs.state_bytes == Layout.of(state).nbytes
    for value in (costs.forward_step_s, costs.reverse_step_s, costs.action_s):
        assert 0 < value < 1
    for tier in costs.tiers:
        assert 0 < tier.write_s < 1
        assert 0 < tier.read_s < 1
        assert 0 <= tier.write_overhead_s < 1
        assert 0 <= tier.read_overhead_s < 1
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("tiered", [False, True])
def test_chains(name: str, tiered: bool) -> None:
    make, start = CHAINS[name]
    state = start()
    before = raw(state)
    store = MemoryStore() if tiered else None
    chain = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        costs = measure(chain, state, 20, store, seconds=0.02)
    _check(costs, state)
    assert raw(state) == before
    assert all(array.flags.writeable for array in Layout.of(state).arrays(state))
    assert len(costs.tiers) == tiered
    assert costs.state_is_tape == chain.state_is_tape


def test_the_adjoint_is_left_alone_unless_given() -> None:
    calls = []

    def adjoint_step(x: Any, a: Any, i: int) -> Any:
        calls.append(i)
        a += x
        return a

    steps = []

    def step(x: Any, i: int) -> Any:
        steps.append(i)
        return np.sin(x)

    chain = FunctionChain(step, adjoint_step)
    costs = measure(chain, np.zeros(10), 7, seconds=0.01)
    assert not calls
    assert costs.reverse_step_s == 2 * costs.forward_step_s
    assert set(steps) <= set(range(7))
    adjoint = np.ones(10)
    measure(chain, np.ones(10), 7, adjoint=adjoint, seconds=0.01)
    assert calls
    assert adjoint.tolist() == [1.0] * 10


def test_the_bytes_of_a_tape_are_those_one_more_tape_adds() -> None:
    table, constant = np.zeros(1000), np.zeros(1000)
    constant.flags.writeable = False

    def in_place(tape: Any) -> InPlaceChain[Any, Any]:
        return InPlaceChain(lambda x, i, j: x.__iadd__(1), lambda x, a, i: a, tape)

    def functional(tape: Any) -> FunctionChain[Any, Any]:
        return FunctionChain(lambda x, i: x + 1, lambda x, a, i: a, tape)

    for chain, expected in (
        (in_place(lambda x, i: {"some": x[:3].copy(), "all": x}), 24 + 80),
        (in_place(lambda x, i: (x.astype(np.float32), i, "note", table)), 40),
        (in_place(lambda x, i: table[i:]), 8 * 999),  # a copy: `table` might be written to
        (in_place(lambda x, i: constant[i:]), 0),
        (functional(lambda x, i: (x + 1, x.sum(keepdims=True))), 8),
        (functional(lambda x, i: (x + 1, (x * 2)[:1])), 80),  # the view keeps all of it
        (functional(lambda x, i: (x + 1, [x, x, x[1:]])), 80),
        (Blocks(in_place(lambda x, i: x[:2].copy()), 5), 5 * 16),
        (Blocks(functional(None), 5), 0),
    ):
        for n_steps in (1, 20):
            costs = measure(chain, np.zeros(10), n_steps, seconds=0.01)
            assert costs.state_is_tape == chain.state_is_tape
            if n_steps > 1:
                assert costs.tape_bytes == expected
                assert costs.tape_slots == (expected or costs.state_bytes) / costs.state_bytes
            else:
                assert costs.tape_bytes >= expected


def test_a_tape_is_released_before_the_next_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_of_steps, "time", Clock())  # many are timed, however long they take
    alive: list[int] = []  # at each call: the tapes made before
    made: list[weakref.ref[Any]] = []

    def tape_step(x: Any, i: int) -> Any:
        alive.append(sum(tape() is not None for tape in made))
        tape = np.cos(x)
        made.append(weakref.ref(tape))
        return np.sin(x), tape

    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: np.sin(x), np.multiply, tape_step)
    measure(chain, np.zeros(10), 20, seconds=0.01)
    assert len(alive) > 20
    # What two of them share counts once: the last two calls are for that.
    assert set(alive[:-1]) == {0} and alive[-1] == 1


def test_the_copy_of_a_large_state_is_not_part_of_its_step(monkeypatch: Any) -> None:
    clock = Clock()
    load = InPlace.load

    def slowly(slots: InPlace, kept: Any, live: Any) -> Any:
        clock.now_s += 0.02
        return load(slots, kept, live)

    def step(x: Any, i: int, j: int) -> None:
        clock.now_s += 1e-4

    monkeypatch.setattr(InPlace, "load", slowly)
    monkeypatch.setattr(chain_of_steps, "time", clock)
    chain: InPlaceChain[Any, Any] = InPlaceChain(step, lambda x, a, i: a)
    costs = measure(chain, np.zeros(4), 1, seconds=0.1)
    assert clock.now_s > 0.02
    assert costs.forward_step_s == pytest.approx(1e-4, rel=0.05)


def test_one_step_only() -> None:
    steps = []
    chain: FunctionChain[Any, Any] = FunctionChain(
        lambda x, i: steps.append(i) or x + 1, lambda x, a, i: a
    )
    _check(measure(chain, np.zeros(3), 1, MemoryStore(), seconds=0.01), np.zeros(3))
    assert set(steps) == {0}


def test_stores_are_closed_again(tmp_path: Path) -> None:
    for store in (
        *(FileStore(tmp_path, engine) for engine in available_engines()),
        MemoryStore(1 << 20),
    ):
        tier = probe_store(store, Layout.of(np.zeros(1000)), seconds=0.02)
        assert tier.name == store.name
        assert tier.queue_depth == store.queue_depth
        assert (tier.capacity_states is not None) == (store.name == "memory")
        assert list(tmp_path.iterdir()) == []


def test_a_store_that_fails_can_be_measured() -> None:
    for faults in ({"lose_read": lambda k: k % 2 == 0}, {"lose_write": lambda k: k % 3 == 0}):
        store = FaultyStore(MemoryStore(), **faults)
        tier = probe_store(store, Layout.of(np.zeros(1000)), seconds=0.02)
        assert tier.write_s > 0


@pytest.mark.parametrize(("at_once", "times"), [(1, 8), (4, 2), (8, 1), (64, 1)])
def test_rates_are_those_of_a_share(at_once: int, times: int, monkeypatch: Any) -> None:
    """Of what is measured alone; ranks that measure at once have divided it already."""
    monkeypatch.setattr("multistage.measurement.store._write", lambda *_: (2.0, 0.5, 4))
    monkeypatch.setattr("multistage.measurement.store._read", lambda *_: (3.0, 0.25))
    for name in ("memory:?share=8", "memory:?share=8 + memory:1GiB?share=8"):
        store = open_store(name)
        tier = probe_store(store, Layout.of(np.zeros(1000)), at_once=at_once)
        assert (tier.write_s, tier.read_s) == (2.0 * times, 3.0 * times)
        assert (tier.write_overhead_s, tier.read_overhead_s) == (0.5, 0.25)


def test_a_store_that_answers_slowly_is_not_measured_for_long(monkeypatch: Any) -> None:
    """States are small here, and thousands of them fit into what a store buffers."""
    clock = mock.Mock(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("multistage.measurement.store.time", clock)

    class Slow(MemoryStore):
        def wait_written(self, key: int) -> bool:
            clock.now += 0.1
            return super().wait_written(key)

        def get(self, key: int) -> list[Any]:
            clock.now += 0.2
            return super().get(key)

    tier = probe_store(Slow(), Layout.of(np.zeros(10)), seconds=1.0)
    assert (tier.write_s, tier.read_s) == (pytest.approx(0.1), pytest.approx(0.2))
    assert clock.now < 3.0


def test_paths(tmp_path: Path) -> None:
    rows = probe_tier(tmp_path, (1000, 100_000), seconds=0.02)
    assert [(row.engine, row.state_bytes) for row in rows] == [
        (engine, size) for engine in available_engines() for size in (1000, 100_000)
    ]
    for row in rows:
        assert min(row.write_bytes_per_s, row.read_bytes_per_s, row.latency_s) > 0
        assert min(row.put_s, row.get_s) >= 0
    assert list(tmp_path.iterdir()) == []


def test_chains_and_tiers_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    with pytest.raises(StateError):
        measure(chain, 3.0, 5)
    with pytest.raises(StoreError, match="create it"):
        measure(chain, np.zeros(3), 5, FileStore(tmp_path / "missing"), seconds=0.01)
    with pytest.raises(StoreError, match="create it"):
        probe_tier(tmp_path / "missing")


@pytest.mark.long(but="True")
@pytest.mark.parametrize("taped", [False, True])
def test_only_agreed_times_decide_which_steps_run(taped: bool) -> None:
    """Of ranks whose steps communicate each sees another time; all must run the same steps."""
    ran = []
    for work in (1, 3000):  # seconds of its own
        calls: list[str] = []

        def step(x: Any, i: int, work: int = work, calls: list[str] = calls) -> Any:
            calls.append("step")
            return np.sin(np.resize(x, work))[:1]

        def adjoint_step(x: Any, a: Any, i: int, calls: list[str] = calls) -> Any:
            calls.append("adjoint")
            return a

        def tape_step(x: Any, i: int, calls: list[str] = calls) -> Any:
            calls.append("tape")
            return x, x

        agreed = iter([1e-5, 2e-3, 8e-3] * 1000)
        chain: FunctionChain[Any, Any] = FunctionChain(
            step, adjoint_step, tape_step if taped else None
        )
        measure(
            chain,
            np.zeros(1),
            200,
            adjoint=np.zeros(1),
            seconds=0.1,
            agree=lambda seconds, agreed=agreed: next(agreed),
        )
        ran.append(calls)
    assert ran[0] == ran[1]


def test_a_cascade_costs_what_one_of_its_levels_does(monkeypatch: Any) -> None:
    layout = Layout.of(np.zeros(512))
    store = CascadeStore(MemoryStore(64 * 4096, buffer_bytes=0), MemoryStore(buffer_bytes=0))
    found = {
        store.levels[0]: Tier("upper", 1.0, 2.0, 0.1, 0.2, capacity_states=64),
        store.levels[1]: Tier("lower", 10.0, 20.0, 0.5, 0.6),
    }
    whole = probe_store

    def told(level: Any, *args: Any, **options: Any) -> Tier:
        return found[level] if level in found else whole(level, *args, **options)

    monkeypatch.setattr("multistage.measurement.store.probe_store", told)
    for sweep_s, write_s, read_s in (
        (math.inf, 10.0, 20.0),  # as long as can be: most states lie below
        (64 * 15.0, 10.0, 15.0),
        (64 * 5.0, 5.0, 5.0),  # one for 5 s, and the upper level is full at the end
        (64 * 0.5, 1.0, 2.0),
    ):
        tier = whole(store, layout, sweep_s=sweep_s)
        assert (tier.write_s, tier.read_s) == (write_s, read_s)
        assert (tier.write_overhead_s, tier.read_overhead_s) == (0.1, 0.6)
        assert (tier.name, tier.capacity_states) == ("memory>memory", None)


def test_a_cascade_is_measured_level_by_level(tmp_path: Path) -> None:
    store = CascadeStore(MemoryStore(1 << 20), FileStore(tmp_path, capacity_bytes=4 << 20))
    costs = measure(
        FunctionChain(lambda x, i: x + 1, lambda x, a, i: a), np.zeros(512), 100, store,
        seconds=0.05,
    )  # fmt: skip
    assert costs.tier.capacity_states == 5 << 20 >> 12
    assert costs.tier.write_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_state_whose_leaves_are_replaced_below_a_tuple_is_left_as_it_was() -> None:
    def forward(state: Any, start: int, stop: int) -> None:
        for _ in range(start, stop):
            state[0]["t"] = state[0]["t"] + 0.1  # a NumPy scalar now

    state = ({"t": np.array(1.0)}, np.ones(3))
    measure(InPlaceChain(forward, lambda x, a, i: a), state, 5, seconds=0.02)
    assert float(state[0]["t"]) == 1.0
