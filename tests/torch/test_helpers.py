"""Helpers of the PyTorch front ends by themselves: what each of them promises to the others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.model.stages import Stage
from multistage.states.layout import Layout
from multistage.support.waiting import Latch
from multistage.torch.sequences.costs import Cost, Steps
from multistage.torch.tensors.checksums import fingerprint
from multistage.torch.tiers.groups import Origin, TensorGroup
from multistage.torch.tiers.lane import TierLane
from multistage.torch.tiers.paging import Pager
from multistage.torch.tracing.cutting import Cut, _written_beyond

CPU = torch.device("cpu")
PAGE = 64


# ---------------------------------------------------------------------- bits


class Elsewhere(torch.Tensor):
    """A tensor whose memory is not looked at, as that of a device."""


@pytest.mark.parametrize("kind", [torch.Tensor, Elsewhere])
@pytest.mark.parametrize("bit", [0, 1, 31, 62, 63])
@pytest.mark.parametrize("place", [0, 1, 6])
def test_a_fingerprint_sees_every_bit_and_the_order_of_words(
    place: int, bit: int, kind: Any
) -> None:
    words = torch.arange(7).as_subclass(kind)
    before = fingerprint(words)
    assert fingerprint(words.flip(0)) != before == fingerprint(words.clone())
    words[place] ^= -(1 << 63) if bit == 63 else 1 << bit
    assert fingerprint(words) != before


# ----------------------------------------------------------------- sequences


def test_sums_of_gradients_are_there_while_other_steps_of_a_chunk_are_reversed() -> None:
    step = Stage("step", 1.0, 2.0, 10, 20, gradient_bytes=0, backward_overhead_bytes=5)
    each = [Cost(step, 20, parameters=(k,)) for k in range(2)]
    steps = Steps(each, 10, 0, [100, 3000])
    assert [s.backward_overhead_bytes for s in steps.chained([0, 1, 2]).stages] == [5, 5]
    assert [s.backward_overhead_bytes for s in steps.chained([0, 2]).stages] == [3005]


# ------------------------------------------------------------------- tracing


def test_a_cut_is_not_where_a_value_passes_that_is_written_to_later() -> None:
    """The stages before and after it would be joined again."""
    graph = fx.Graph()
    made = graph.call_function(torch.sin, (graph.placeholder("x"),))
    other = graph.call_function(torch.cos, (made,))
    writer = graph.call_function(torch.add, (made, other))
    value = SimpleNamespace(storage=SimpleNamespace(cdata=7), nbytes=8)
    observed: Any = SimpleNamespace(values={made: value}, made={7}, written={7: writer})
    order, cut = {other: 0, writer: 1}, Cut(other, (made,))
    assert _written_beyond(observed, cut, 0, order)
    assert _written_beyond(observed, cut, 0, {other: 0})  # behind the last place
    assert not _written_beyond(observed, cut, 1, order)


# --------------------------------------------------------------------- tiers


class Dropping(MemoryStore):
    """Notes what is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[int] = []

    def drop(self, key: int) -> None:
        self.dropped.append(key)
        super().drop(key)


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
def test_a_record_that_finds_no_room_leaves_none_of_its_pages() -> None:
    inner = Dropping()
    inner.open(Layout.up_to(PAGE))
    pager = Pager(FaultyStore(inner, refuse={2}), PAGE)
    assert pager.put([torch.ones(5 * PAGE, dtype=torch.uint8)]) is None
    assert inner.dropped == [0, 1]
    inner.close()


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
def test_a_record_that_was_not_written_leaves_the_tier() -> None:
    inner = Dropping()
    lane = TierLane(FaultyStore(inner, lose_write={1}), CPU, PAGE)
    sent = lane.write([torch.ones(3 * PAGE, dtype=torch.uint8)])
    assert not lane.wait(sent) and sent.error == "a write failed"
    assert not sent.lines, "its memory is referred to still"
    assert lane.close() and set(inner.dropped) == {0, 1, 2}


class Interrupting(MemoryStore):
    """Writes from `closing` on, and sends Ctrl-C to the main thread until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.closing, self.gate = Latch(), Latch(), Latch()
        self.closed_at_work = self._at_work = False

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        self._at_work = True
        self.began.set()
        self.closing.wait()
        # Not once: a signal just before a wait begins is noticed when the wait ends.
        while not self.gate.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)
        self._at_work = False
        return super().put(key, arrays, block=block)

    def close(self) -> None:
        self.closed_at_work |= self._at_work
        super().close()


def test_a_lane_whose_close_ctrl_c_ended_closes_the_store_only_after_its_work() -> None:
    """Python 3.11 and 3.12 take a thread for ended whose `join` Ctrl-C ended."""
    store, times = Interrupting(), iter([True])

    def interrupt(number: int, frame: object) -> None:
        if next(times, False):
            raise KeyboardInterrupt

    lane = TierLane(FaultyStore(store), CPU, PAGE)  # which takes pages, one `put` each
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        lane.write([torch.ones(PAGE, dtype=torch.uint8)])
        store.began.wait()
        with pytest.raises(KeyboardInterrupt):
            store.closing.set()
            lane.close()
        assert lane.is_alive and not lane.close(0.0)
        store.gate.set()
        assert lane.close()
    finally:
        store.gate.set()
        signal.signal(signal.SIGINT, before)
    assert not lane.is_alive and not store.closed_at_work


def test_a_lane_that_ctrl_c_ends_at_its_start_leaves_the_store_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, start = MemoryStore(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "multistage-tier":
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TierLane(store, CPU, PAGE)
    assert TierLane(store, CPU, PAGE).close()


def test_a_tensor_written_to_on_its_way_is_spoilt() -> None:
    for writes in (False, True):
        lane = TierLane(MemoryStore(), CPU, PAGE)
        held = torch.arange(32.0)
        group = TensorGroup([(held.view(4, 8), held._version)], {}, ())
        sent = lane.write(group.lines())
        assert lane.wait(sent)
        group.let_go()
        if writes:
            held.add_(1)
        back = lane.fetch(sent, group.make_room())
        group.on_its_way(back)
        assert lane.wait(back) and group.came_back()
        (found,) = group.tensors
        assert found.shape == (4, 8)
        assert (group.versions[0] < 0) == writes
        assert lane.close()


def _back(error: str = "") -> Any:
    """Return a way back that is over."""
    done = threading.Event()
    done.set()
    return SimpleNamespace(done=done, awaited=not error, error=error)


def test_bytes_that_came_to_other_memory_since_are_not_taken() -> None:
    """One group waits for what a second brings, which fails; a third brings it elsewhere."""
    known, held = dict[int, Origin](), torch.arange(8.0)
    waiting, second, third = (TensorGroup([(held, 0)], known, ()) for _ in range(3))
    for group in (waiting, second, third):
        group.let_go()
    del held
    failing: Any = SimpleNamespace(done=threading.Event(), awaited=False, error="")
    assert second.make_room()[0] is not None
    second.on_its_way(failing)
    assert waiting.make_room() == [None]
    waiting.on_its_way(_back())
    assert waiting.fillers() == [failing]
    failing.error = "a page is gone"
    failing.done.set()
    assert third.make_room()[0] is not None
    third.on_its_way(_back())
    assert third.came_back() and not waiting.came_back()
