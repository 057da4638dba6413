"""Copies beside kernels on a CUDA device, with streams kept busy and freed memory overwritten."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.backends import CheckpointLost, FileStore, Store
from multistage.errors import StateError
from multistage.states.layout import Layout
from multistage.torch.tensors.streams import CudaStreams, Event, Lane
from multistage.torch.tiers.lane import TierLane
from multistage.torch.tiers.pinned import PinnedCascade, PinnedStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
CYCLES = 4_000_000  # some milliseconds
BYTES = 100_000


class BusyStreams(CudaStreams):
    """Lanes that are kept busy before copies, at random; waits can be left out."""

    def __init__(
        self, slow: Sequence[str], chance: float, seed: int, ignored: tuple[str, str] | None
    ) -> None:
        self._slow, self._chance, self._ignored = slow, chance, ignored
        self._random = random.Random(seed)
        self._marks: dict[int, str] = {}
        self._marked: list[Event] = []  # so that no other has their identity
        super().__init__(DEVICE)

    def sleep(self, lane: Lane) -> None:
        if lane in self._slow and self._random.random() < self._chance:
            with torch.cuda.stream(self._stream(lane)):
                torch.cuda._sleep(CYCLES)

    def record(self, lane: Lane) -> Event:
        event = super().record(lane)
        self._marks[id(event)] = lane
        self._marked.append(event)
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        if (lane, self._marks[id(event)]) != self._ignored:
            super().wait(lane, event)

    def host(self, nbytes: int) -> Tensor:
        return super().host(nbytes).fill_(255)  # not what another test left there

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        self.sleep(lane)
        super().copy(lane, target, source)


def _content(key: int) -> Tensor:
    """Return a state that the device makes, when it comes to it."""
    return torch.arange(BYTES, device=DEVICE).add_(key * 37).remainder_(251).to(torch.uint8)


def _overwrite_what_is_free() -> None:
    """Take the memory of states that were let go, and write to it."""
    taken = [torch.empty(BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
    for tensor in taken:
        tensor.fill_(255)


def _wrong(
    count: int,
    slow: Sequence[str],
    seed: int,
    *,
    below: Store | None = None,
    capacity: int | None = None,
    chance: float = 0.3,
    ignored: tuple[str, str] | None = None,
) -> int:
    """Return how many states come back wrong, of `count` that went out."""
    streams = BusyStreams(slow, chance, seed, ignored)
    pinned = PinnedStore(capacity, DEVICE, lambda _: streams)
    store: Any = pinned if below is None else PinnedCascade(pinned, below)
    store.open(Layout.of((np.broadcast_to(np.uint8(0), (BYTES,)),)))
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    ways = random.Random(seed)
    try:
        for first in (1000 * seed, 1000 * seed + 500):  # the second time in used memory
            for key in range(count):
                streams.sleep("compute")
                state = _content(first + key)
                assert store.put(key, [state], block=True)
                if ways.random() < 0.5:
                    store.wait_written(key)
                elif ways.random() < 0.1:  # dropped on its way out
                    store.drop(key)
                    del state
                    _overwrite_what_is_free()
                    state = _content(first + key)
                    assert store.put(key, [state], block=True)
                del state
                _overwrite_what_is_free()
            for key in reversed(range(count)):
                streams.sleep("compute")
                for ahead in range(key, max(-1, key - ways.randrange(4)), -1):
                    store.prefetch(ahead)
                if ways.random() < 0.1:  # not wanted after all
                    store.drop(key)
                    _overwrite_what_is_free()
                    continue
                (found,) = store.get(key)
                wrong += (found != _content(first + key)).any()
                store.drop(key)
                del found
                _overwrite_what_is_free()
        return int(wrong)
    finally:
        store.close()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("slow", [(), ("compute",), ("out",), ("in",), ("compute", "out", "in")])
def test_states_come_back_as_they_went(slow: tuple[str, ...], seed: int) -> None:
    assert _wrong(24, slow, seed) == 0


@pytest.mark.parametrize("slow", [("out",), ("in",), ("compute", "out", "in")])
def test_with_a_file_below(slow: tuple[str, ...], tmp_path: Path) -> None:
    assert _wrong(24, slow, 0, below=FileStore(tmp_path), capacity=8 * BYTES) == 0


class Forgetful(PinnedStore):
    """Refers to no source of a copy."""

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        accepted = super().put(key, arrays, block=block)
        if accepted:
            self._states[key].sources = []
        return accepted


@pytest.mark.parametrize(
    ("ignored", "slow"),
    [
        (("out", "compute"), ("compute",)),
        (("in", "out"), ("out",)),
        (("compute", "in"), ("in",)),
        (("in", "compute"), ("compute",)),
    ],
)
def test_a_missing_wait_shows(ignored: tuple[str, str], slow: tuple[str, ...]) -> None:
    assert any(_wrong(24, slow, seed, chance=1.0, ignored=ignored) for seed in range(20))


def test_memory_released_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PinnedStore", Forgetful)
    assert any(_wrong(24, ("out",), seed, chance=1.0) for seed in range(20))


class Losing(PinnedStore):
    """Has lost the state of a key."""

    lost = -1

    def get(self, key: int) -> list[Tensor]:
        if key == self.lost:
            raise CheckpointLost("lost")
        return super().get(key)


@pytest.mark.parametrize("lost", [-1, 1])
def test_memory_that_a_record_came_back_to_unawaited_is_the_next_users_alone(lost: int) -> None:
    """The lane's copies ran after the record had ended, into memory that others had by then."""
    store = Losing(None, DEVICE, lambda _: BusyStreams(("in",), 1.0, 0, None))
    store.lost = lost
    lane = TierLane(store.as_store(), DEVICE, BYTES // 2 // 64 * 64)
    try:
        sent = lane.write([_content(0)])
        assert lane.wait(sent)
        target = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE)
        back = lane.fetch(sent, [target])
        assert back.done.wait(60) and bool(back.error) == (lost > 0)
        del target
        taken = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE).fill_(7)
        torch.cuda.synchronize()
        assert bool((taken == 7).all())
    finally:
        lane.close()


def test_the_timeline_has_the_copies_themselves() -> None:
    """Not when the host asked for them or noticed: each is behind a sleep, and short itself."""
    streams = BusyStreams(("out", "in"), 1.0, 0, None)
    near = 1e-3 + streams._unsure_s
    store = PinnedStore(None, DEVICE, lambda _: streams)
    store.open(Layout.of((np.broadcast_to(np.uint8(0), (BYTES,)),)))
    try:
        for _ in range(2):  # in fresh memory, then in used
            before = time.perf_counter()
            for key in range(5):
                assert store.put(key, [_content(key)])
            for key in reversed(range(5)):
                store.prefetch(key)
            for key in reversed(range(5)):
                store.get(key)
                store.drop(key)
            torch.cuda.synchronize()
            after = time.perf_counter()
            records = list(store.transfers)
            store.transfers.clear()
        assert sorted((r.kind, r.key) for r in records) == sorted(
            (kind, key) for kind in ("read", "write") for key in range(5)
        )
        written = {r.key: r for r in records if r.kind == "write"}
        for kind in ("write", "read"):
            lane = [r for r in records if r.kind == kind]
            for r in lane:
                assert before - near <= r.start_s <= r.stop_s <= after + near
                assert r.start_s >= written[r.key].stop_s - 1e-3 or kind == "write"
            assert all(a.stop_s <= b.start_s + 1e-3 for a, b in itertools.pairwise(lane))
    finally:
        store.close()


# ------------------------------------------------------------------ offload


class Layers(nn.Module):
    """Saves tensors of every kind: views, transposed, expanded, small, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(300, 500)
        self.outer = nn.Linear(500, 300)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x)).t()
        z = y[:-1, 3:].sin() * y[1:, :-3]
        return x + self.outer(nn.functional.pad(z.t(), (0, 1, 0, 3)).exp().tanh())


@pytest.fixture
def busy() -> Iterator[Callable[[], None]]:
    """Keep the compute stream busy now and then, and what is free overwritten."""
    ways = random.Random(5)

    def work() -> None:
        if ways.random() < 0.3:
            torch.cuda._sleep(CYCLES)
        for nbytes in (1 << 20, 300 * 777 * 4, 500 * 777 * 4):
            torch.empty(nbytes, dtype=torch.uint8, device=DEVICE).fill_(255)

    return work


@pytest.mark.parametrize("tiers", [["pinned:"], ["pinned:12MiB", "file:{}"]])
def test_offloaded_tensors(tiers: list[str], tmp_path: Path, busy: Callable[[], None]) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layers() for _ in range(6)).to(DEVICE)
    x = torch.randn(777, 300, device=DEVICE, requires_grad=True)
    gradients = []
    for offloaded in (False, True):
        for parameter in [x, *layers.parameters()]:
            parameter.grad = None
        names = [tier.format(tmp_path) for tier in tiers]
        with mst.offload(names, min_bytes=1000) if offloaded else torch.enable_grad():
            y: Tensor = x
            for layer in layers:
                y = layer(y)
                busy()
        y.register_hook(lambda _: busy())
        y.square().mean().backward()
        gradients.append([x.grad, *(p.grad for p in layers.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert a is not None and torch.equal(a, b)


def test_offload_gives_memory_of_the_device_back() -> None:
    x = torch.randn(1 << 20, device=DEVICE, requires_grad=True)
    peaks = []
    for offloaded in (False, True):
        # Autograd's thread of the device holds its last task until it is given another.
        torch.ones((), device=DEVICE, requires_grad=True).clone().backward()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with mst.offload("pinned:") if offloaded else torch.enable_grad():
            y = x
            for _ in range(20):
                y = torch.sin(y)
        y.sum().backward()
        x.grad = None
        del y
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] >= 20 * x.nbytes
    assert peaks[1] <= 12 * x.nbytes


def test_offload_on_two_streams() -> None:
    """What one stream saved is fetched for another: each waits for what it reads."""
    main, side = torch.cuda.current_stream(DEVICE), torch.cuda.Stream(DEVICE)
    gradients = []
    for offloaded in (False, *[True] * 4):
        x = torch.arange(400_000.0, device=DEVICE).div(4e5).requires_grad_()
        kept = []
        with mst.offload("pinned:", min_bytes=1000) if offloaded else torch.enable_grad():
            a = b = z = x * 1.5
            side.wait_stream(main)
            z.record_stream(side)
            for _ in range(4):
                a = torch.sin(a) * z
                kept.append(a)
                with torch.cuda.stream(side):
                    b = torch.cos(b) * z
                    kept.append(b)
            main.wait_stream(side)
            y = a * b
        torch.cuda.synchronize()
        y.sum().backward()
        torch.cuda.synchronize()
        gradients.append(x.grad)
    for gradient in gradients[1:]:
        assert gradient is not None and torch.equal(gradient, gradients[0])


class Fork(nn.Module):
    """Computes half of what it returns on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(60, 60), nn.Linear(60, 60)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.cuda.current_stream(DEVICE)
        side = _sides.setdefault("side", torch.cuda.Stream(DEVICE))
        side.wait_stream(main)
        x.record_stream(side)
        with torch.cuda.stream(side):
            b = torch.tanh(self.other(x))
        a = torch.tanh(self.one(x))
        main.wait_stream(side)
        b.record_stream(main)
        return x + a * b


_sides: dict[str, Any] = {}


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_stages_with_a_stream_of_their_own() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Fork() for _ in range(8))).to(DEVICE)
    x = torch.randn(500, 60, device=DEVICE)
    ours = mst.Sequential(plain, x, memory=0.5)
    assert not ours.plan.keeps_all
    results = []
    for model in (plain, ours, ours, ours):
        model(x).square().mean().backward()
        torch.cuda.synchronize()
        results.append([p.grad for p in plain.parameters()])
        for parameter in plain.parameters():
            parameter.grad = None
    for found in results[1:]:
        for a, b in zip(results[0], found, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


# ------------------------------------------------------- where, and by whom


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(40, 40)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = nn.functional.dropout(torch.tanh(self.inner(h) + x), 0.1)
        return h, h.square().mean()


def _trained(cell: nn.Module, x: Any, h: Tensor, **options: Any) -> list[Tensor | None]:
    torch.manual_seed(3)
    if options:
        out = mst.unroll(cell, h, x, **options)
        assert out.plan.planner in ("recompute", "stream")
        loss, last = out.loss, out.state
    else:
        last, loss = cell(h, x[0])
        for x_t in x[1:]:
            last, one = cell(last, x_t)
            loss = loss + one
    loss.backward()
    found = [loss.detach(), last.detach(), *(p.grad for p in cell.parameters())]
    for parameter in cell.parameters():
        parameter.grad = None
    return found


def test_on_a_stream_of_the_user(tmp_path: Path) -> None:
    cell = Cell().to(DEVICE)
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        x, h = torch.randn(60, 32, 40, device=DEVICE), torch.zeros(32, 40, device=DEVICE)
        plain = _trained(cell, x, h)
        tiers = ["pinned:64KiB", f"file:{tmp_path}"]
        ours = _trained(cell, x, h, memory="1 MiB", tiers=tiers, planner="stream", chunk=1)
    side.synchronize()
    for a, b in zip(plain, ours, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


class Move(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.to(DEVICE), 0.5)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_stage_that_moves_to_the_device_and_draws_there(autocast: bool) -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(50, 50), Move()]
    stages += [nn.Sequential(nn.Linear(50, 50), nn.Tanh()).to(DEVICE) for _ in range(8)]
    plain, x = nn.Sequential(*stages), torch.randn(64, 50)
    ours = mst.Sequential(plain, x, memory=0.8)
    assert not ours.plan.keeps_all
    results = []
    for model in (plain, ours):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().mean().backward()
        results.append([y.detach(), *(p.grad for p in plain.parameters())])
        for parameter in plain.parameters():
            parameter.grad = None
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_dropout_that_cudnn_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    cell = nn.LSTM(8, 8, num_layers=2, dropout=0.5).to(DEVICE)
    x, zeros = torch.randn(64, 4, 8, device=DEVICE), torch.zeros(2, 4, 8, device=DEVICE)
    with pytest.raises(StateError, match="cuDNN draws the dropout"):
        mst.unroll(cell, (zeros, zeros), x, memory=0.5, chunk=4)
    cell.eval()
    # Its workspace takes more than all states.
    assert mst.unroll(cell, (zeros, zeros), x, memory="1 GiB", chunk=4).plan is not None


@pytest.mark.timeout(1000)
def test_compute_sanitizer_finds_nothing() -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH")
    only = "come_back_as_they_went or offloaded_tensors"
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "900"]
    command += ["-p", "no:benchmark"]  # which warns of the other plugin
    done = subprocess.run(
        [*command, "-n", "0", __file__, "-k", only],
        # Else what is released still belongs to the process, and is not missed.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
