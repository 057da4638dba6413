"""`offload`: saved tensors travel, and the gradient is the same."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_streams import pinned
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import multistage.torch as mst
from multistage.backends import MemoryStore
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import FaultyStore
from multistage.errors import ArgumentError, MultistageError, StoreError
from multistage.torch.offload import SavedTensors
from multistage.torch.tensors.meter import Meter
from multistage.torch.tiers.lane import TierLane, Transfer
from multistage.torch.tiers.pinned import PinnedCascade


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.relu_(self.norm(self.conv(x))))
        return x + y.transpose(2, 3).transpose(2, 3) * torch.sigmoid(x)


def our_threads() -> list[threading.Thread]:
    """Return the package's threads, those left out that close a store and end by themselves."""
    for thread in threading.enumerate():
        if thread.name == "multistage-closing":
            thread.join(30)
    return [t for t in threading.enumerate() if t.name.startswith("multistage")]


def a_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def trained(model: nn.Module, x: Tensor, context: Any) -> list[Any]:
    torch.manual_seed(1)
    with context:
        y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize(
    "tiers",
    [
        "memory:",
        "memory:?capacity=4MiB",
        "pinned:",
        ["pinned:6MiB", "memory:"],
        ["pinned:8MiB", "file:{}"],
        "file:{}",
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
def test_gradients_are_the_same_bits(tiers: Any, tmp_path: Path) -> None:
    one = [tiers] if isinstance(tiers, str) else tiers
    names = [tier.format(tmp_path) for tier in one]
    x = torch.randn(8, 8, 40, 40, requires_grad=True)
    model = a_model()
    found = []
    for offloaded in (False, True):
        net, given = copy.deepcopy((model, x))
        context = mst.offload(names, min_bytes=2000) if offloaded else torch.enable_grad()
        found.append(trained(net, given, context))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    del net, context, found
    gc.collect()
    assert not our_threads()
    assert list(tmp_path.iterdir()) == []


def test_large_tensors_move_and_the_others_stay() -> None:
    weight = torch.randn(600, 600, requires_grad=True)
    x = torch.randn(600, 600, requires_grad=True)

    def forward() -> Tensor:
        y = torch.exp(x @ weight.t())  # x; exp saves its result
        z = torch.sin(y) + torch.cos(y)  # y again, twice
        return z[:, :2].tanh().sum() + (y.mean(0, keepdim=True).expand(600, 600) * y).sum()

    with mst.offload("memory:", min_bytes="1 MiB") as stats:
        loss = forward()
    assert (stats.moved, stats.shared) == (
        1,
        3,
    )  # y; parameters and inputs that require gradients stay
    assert stats.moved_bytes == 600 * 600 * 4
    loss.backward()
    assert x.grad is not None and weight.grad is not None


def test_tensors_held_elsewhere_stay() -> None:
    x = torch.randn(600, 600)
    weight = torch.randn(600, 600, requires_grad=True)
    with mst.offload("memory:", min_bytes=1000, stays=[x]) as stats:
        (x.t() @ weight).sum()
    assert stats.moved == 0


def test_memory_is_released() -> None:
    x = torch.randn(1 << 18, requires_grad=True)  # 1 MiB
    peaks = {}
    for offloaded in (False, True):
        with Meter(x.device) as meter:
            meter.ignore([x])
            y = x
            if offloaded:
                with mst.offload("file:/dev/shm") as stats:
                    for _ in range(40):
                        y = torch.sin(y)
                assert stats.moved == 39  # x itself stays
            else:
                for _ in range(40):
                    y = torch.sin(y)
            y.sum().backward()
        peaks[offloaded] = meter.peak_bytes
        del y
    assert peaks[False] >= 39 << 20
    assert peaks[True] <= 16 << 20


def test_a_second_backward_and_nothing_left() -> None:
    x = torch.randn(1 << 16, requires_grad=True)
    with mst.offload("memory:", min_bytes=1000):
        loss = torch.sin(torch.sin(torch.sin(x))).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    with mst.offload("memory:", min_bytes=1000):
        loss = torch.sin(torch.sin(x)).sum()
    del loss
    gc.collect()
    assert not our_threads()


@pytest.mark.parametrize("size", [1 << 18, 100])
def test_saved_tensors_that_are_written_to(size: int) -> None:
    x = torch.randn(size, requires_grad=True)
    with mst.offload("memory:"):
        y = torch.exp(x)
        z = torch.sin(y)
        y.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_a_lost_tensor_is_an_error() -> None:
    x = torch.randn(1 << 18, requires_grad=True)
    store = FaultyStore(MemoryStore(), lose_read=lambda number: number == 1)
    with mst.offload(store):
        y = torch.sin(torch.sin(torch.sin(x)))
    with pytest.raises(MultistageError, match="lost, and nothing can compute it again"):
        y.sum().backward()


def test_memory_that_nothing_was_asked_to_fill_is_not_read(monkeypatch: Any) -> None:
    """Such as in a forked child, though the error that says so holds it."""

    def fetch(*arguments: object) -> Transfer:
        raise StoreError("cannot be used")

    x = torch.randn(1 << 10, requires_grad=True)
    with mst.offload("memory:", min_bytes=0, ahead=0):
        loss = x.exp().sin().sin().sin().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    with monkeypatch.context() as patch:
        patch.setattr(TierLane, "fetch", fetch)
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be used") as failed:
                torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert failed.tb is not None


def test_memory_that_was_resized_since_it_was_saved() -> None:
    x = torch.randn(200, device="cpu", requires_grad=True)
    buffer, kept, weights = torch.empty(0, device="cpu"), [], []
    with mst.offload("memory:", min_bytes=0, device="cpu") as stats:
        for n in (100, 200):
            weights.append(torch.rand(n, out=buffer, device="cpu").tolist())
            kept.append((x[:n] * buffer).sum())
            kept[-1].backward(retain_graph=True)
        buffer.untyped_storage().resize_(400)
        kept.append((x[:100] * buffer[:100]).sum())
        shrunk = torch.rand(200, device="cpu")
        kept.append((x * shrunk).sum())
        shrunk.untyped_storage().resize_(0)
        del buffer, shrunk
        for _ in range(20):
            x.sin()
    assert stats.moved == 0
    x.grad = None
    kept[2].backward()
    assert x.grad is not None and x.grad[:100].tolist() == weights[1][:100]


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
def test_a_write_that_fails_keeps_the_tensor() -> None:
    x = torch.randn(1 << 18, requires_grad=True)
    store = FaultyStore(MemoryStore(), lose_write=lambda number: number % 2 == 0)
    with mst.offload(store):
        y = torch.sin(torch.sin(torch.sin(torch.sin(x))))
    (found,) = torch.autograd.grad(y.sum(), x)
    (known,) = torch.autograd.grad(torch.sin(torch.sin(torch.sin(torch.sin(x)))).sum(), x)
    assert torch.equal(found, known)


class Collecting(Ram):
    """Collects garbage in the thread that writes, once it is told to; some writes wait for that."""

    def __init__(self, waits_from: int) -> None:
        super().__init__()
        self.now = threading.Event()
        self.collected_on = ""
        self._writes, self._waits_from = 0, waits_from

    def write(self, slot: int, offset: int, data: Any) -> None:
        self._writes += 1
        if self._writes > self._waits_from:
            assert self.now.wait(60)
        if self.now.is_set() and not self.collected_on:
            self.collected_on = threading.current_thread().name
            gc.collect()
        super().write(slot, offset, data)


class Closing(PinnedCascade):
    """Tells when it has been closed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.closed = threading.Event()

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_a_graph_that_dies_in_a_thread_of_the_store() -> None:
    """Which cannot wait for its own end; the store is free again all the same."""
    below = Collecting(9)  # 48 pages and 40 slots: the sweep needs 8 writes, and 3 make room ahead
    store = Closing(pinned(40 << 20), StreamedStore("below", lambda: below))
    x = torch.randn(1 << 20, device="cpu", requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with mst.offload(store, min_bytes=1000, device="cpu"):
            y = x
            for _ in range(13):
                y = torch.sin(y)
        cycle = [y]
        cycle.append(cycle)
        del y, cycle
        below.now.set()
        assert store.closed.wait(60), "it holds tensors of the other graph"
        with mst.offload(store, min_bytes=1000, device="cpu"):
            z = torch.sin(torch.sin(x))
    finally:
        gc.enable()
    assert below.collected_on == "multistage-writer"
    z.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.cos(torch.sin(x)) * torch.cos(x))


def test_a_restored_tensor_that_was_overwritten_is_read_again() -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            held.append(x)
            return gradient * x.mul_(2)

    held: list[Tensor] = []
    x = torch.randn(10, requires_grad=True)
    with mst.offload("memory:", min_bytes=0):
        loss = Overwrites.apply(x.exp()).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def held_in_a_variable(x: Tensor, y: Tensor) -> None:
    x.data.mul_(2)


def held_by_numpy(x: Tensor, y: Tensor) -> None:
    y.numpy()[:] = 3


def held_by_a_storage(x: Tensor, y: Tensor) -> None:
    torch.empty(0, device="cpu").set_(y.untyped_storage()).mul_(2)


@pytest.mark.parametrize("late", [False, True], ids=["in the context", "after it"])
@pytest.mark.parametrize("write", [held_in_a_variable, held_by_numpy, held_by_a_storage])
def test_a_write_that_no_version_counter_sees_reaches_the_backward(write: Any, late: bool) -> None:
    """As in plain autograd, which reads the memory as it is by then."""

    def gradient(context: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(100, device="cpu", requires_grad=True)
        y = torch.randn(100, device="cpu")
        taken = y.untyped_storage()
        with context:
            h = x.exp()
            z = h.sin() * y
            for _ in range(10):
                z = z.sin()
            if not late:
                write(h, y)
        if late:
            write(h, y)
        del h, y, taken
        z.sum().backward()
        assert x.grad is not None
        return x.grad

    with_tiers = gradient(mst.offload("memory:", min_bytes=0, device="cpu"))
    assert torch.equal(with_tiers, gradient(torch.enable_grad()))


def test_memory_that_others_may_write_to_stays() -> None:
    def product(array: Any, x: Tensor) -> Tensor:
        return x * torch.from_numpy(array)

    array = np.ones(50, np.float32)
    shared = torch.ones(50, device="cpu").share_memory_()
    x = torch.randn(50, device="cpu", requires_grad=True)
    with mst.offload("memory:", min_bytes=0, device="cpu") as stats:
        z = product(array, x) + x * shared.detach()
    array[:] = 2
    z.sum().backward()
    assert stats.moved == 0
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 3.0))


def test_versions_of_tensors_that_stay_are_checked() -> None:
    """A backward that writes to what it got is found out by the next, whatever the view."""

    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(x, y)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, y = ctx.saved_tensors
            return gradient * y.mul_(2)[: len(x)], None

    x = torch.randn(10, requires_grad=True)
    with mst.offload("memory:", min_bytes=0) as stats:
        y = torch.randn(10)
        loss = Overwrites.apply(x * 1, y.view(2, 5).view(10)).sum()
    assert stats.moved == 1
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_small_result_does_not_keep_its_own_graph() -> None:
    x = torch.randn(10, requires_grad=True)
    with mst.offload("memory:"):
        y = x.exp()  # saves its result, which stays
    storage = StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert storage.expired()
    assert not our_threads()


def test_the_table_of_storages_does_not_grow() -> None:
    x = torch.randn(10, requires_grad=True)
    keep: list[Tensor] = []
    with mst.offload("memory:", min_bytes=0) as stats:
        for _ in range(300):
            x.exp().sin().sum().backward()
            keep.append(x.exp().sin().sum())
        (saved,) = [o for o in gc.get_objects() if type(o) is SavedTensors]
        assert len(saved._memories) < len(keep) + 10  # those of graphs that are there
        assert len(saved._order) < 2 * len(keep) + 20
        assert len(saved._recent) + len(saved._held) + len(saved._writing) < 30
    assert stats.moved >= 300


def test_a_body_that_raises_leaves_a_graph_that_works() -> None:
    x = torch.randn(1 << 10, requires_grad=True)
    with pytest.raises(KeyError), mst.offload("memory:", min_bytes=0):
        loss = x.exp().sin().sum()
        raise KeyError
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, x.exp().cos() * x.exp())


def test_backwards_on_several_threads() -> None:
    """Which share what one context saved."""
    torch.manual_seed(0)
    x = torch.randn(8, 400)
    for tier in ("memory:", "pinned:"):
        leaves = [row.clone().requires_grad_() for row in x]
        with mst.offload(tier, min_bytes=0):
            common = torch.randn(400)
            losses = [(leaf.exp().sin() * common * leaf).sum() for leaf in leaves]
        ready = threading.Barrier(8)

        def back(loss: Tensor, ready: threading.Barrier = ready) -> None:
            ready.wait()
            loss.backward()

        threads = [threading.Thread(target=back, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for leaf in leaves:
            plain = leaf.detach().requires_grad_()
            (plain.exp().sin() * common * plain).sum().backward()
            assert leaf.grad is not None and plain.grad is not None
            assert torch.equal(leaf.grad, plain.grad)


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="needs a tier"), mst.offload([]):
        pass
    with pytest.raises(ArgumentError, match="ahead=-1"), mst.offload("memory:", ahead=-1):
        pass
    with pytest.raises(ArgumentError, match="'much'"), mst.offload("memory:", min_bytes="much"):
        pass
