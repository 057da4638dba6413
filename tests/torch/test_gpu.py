"""Chains on a CUDA device: bit for bit as plain training, within the limit by its allocator."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import BudgetError
from multistage.torch.tensors.meter import Meter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
# On a device that is not there (tests/pretend) less shows the same.
REAL = torch.version.cuda is not None


class Block(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Conv2d(width, width, 3, 1, 1),
        )
        self.short = nn.Conv2d(width, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.short(x))


def _chain(blocks: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1),
        *(Block(32, 2 if k == blocks // 2 else 1) for k in range(blocks)),
        nn.Flatten(2),
    ).to(DEVICE)


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def _alone(*kept: Any) -> int:
    """Release all that earlier work has left; return the bytes of modules and tensors kept.

    Where libraries hold no workspaces these are counted, not read from the allocator: what
    is freed late would else be missing from a peak that is measured from there.
    """
    # Autograd's thread of the device holds its last task until it is given another.
    torch.ones((), device=DEVICE, requires_grad=True).clone().backward()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    if REAL:
        return torch.cuda.memory_allocated()
    tensors = [t for t in kept if isinstance(t, Tensor)]
    for module in (each for each in kept if isinstance(each, nn.Module)):
        tensors += [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in module.parameters() if p.grad is not None]
    return sum(-(-t.nbytes // 512) * 512 for t in tensors)  # as the allocator rounds


def _trained(model: nn.Module, x: Tensor, *, autocast: bool) -> list[Tensor]:
    results = []
    for step in range(2):
        torch.manual_seed(step)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().mean().backward()
        results += [y.detach(), torch.rand(3, device=DEVICE)]
    return [*results, *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("share", [0.4, 0.7])
def test_training_is_plain_training(
    share: float, autocast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "multistage")
    x = torch.randn(16 if REAL else 2, 3, 32, 32, device=DEVICE)
    plain = _chain()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        ours = mst.Sequential(copy.deepcopy(plain), x, memory=share)
    assert not ours.plan.keeps_all
    assert "were not metered" not in caplog.text  # which hid a hang on real devices
    for a, b in zip(
        _trained(plain, x, autocast=autocast), _trained(ours, x, autocast=autocast), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("planner", ["optimal", "revolve"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_the_limit_holds_by_the_allocator(share: float, planner: Any) -> None:
    x = torch.randn(*(64, 3, 64, 64) if REAL else (2, 3, 32, 32), device=DEVICE)
    model = _chain()
    whole = mst.Sequential(model, x, memory=1.0).plan
    with pytest.raises(BudgetError) as refused:
        mst.Sequential(model, x, memory=1, planner=planner, costs=whole.costs)
    least = int(str(refused.value).split("< ")[1].split(" bytes")[0])
    memory = int(least + share * (whole.plain_bytes - least))
    ours = mst.Sequential(model, x, memory=memory, planner=planner, costs=whole.costs)
    ours(x).square().mean().backward()
    before = _alone(ours, x)
    ours(x).square().mean().backward()
    peak = torch.cuda.max_memory_allocated() - before + x.nbytes
    assert peak <= memory
    assert peak >= 0.7 * ours.plan.peak_bytes


@pytest.mark.skipif(not REAL, reason="the compiler asks the driver about the device")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("share", [1.1, 1.5])
def test_compiled_models_are_within_the_limit_by_the_allocator(
    share: float, autocast: bool
) -> None:
    x = torch.randn(64, 3, 32, 32, device=DEVICE)
    plain = _chain()
    with (
        pytest.raises(BudgetError) as refused,
        torch.autocast(DEVICE, torch.bfloat16, enabled=autocast),
    ):
        mst.compile(copy.deepcopy(plain), memory=1)(x)
    assert refused.value.least_bytes is not None
    ours = mst.compile(copy.deepcopy(plain), memory=int(share * refused.value.least_bytes))
    for a, b in zip(
        _trained(plain, x, autocast=autocast), _trained(ours, x, autocast=autocast), strict=True
    ):
        assert torch.equal(a, b)
    adjoint = torch.ones_like(plain(x))
    before = _alone(ours, x)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        y = ours(x)
    y.backward(adjoint.to(y.dtype))
    assert ours.plan is not None and not ours.plan.keeps_all
    beside = x.nbytes + adjoint.nbytes
    assert torch.cuda.max_memory_allocated() - before <= ours.plan.memory_bytes + beside


@pytest.mark.skipif(not REAL, reason="a tier is measured with random numbers of the device")
def test_stages_without_parameters_use_a_tier_of_the_device_of_their_input() -> None:
    x = torch.randn(1 << 22, device=DEVICE, requires_grad=True)
    stages = [nn.Sequential(nn.Softmax(0), nn.Tanh(), nn.Softmax(0)) for _ in range(8)]
    ours = mst.Sequential(stages, x, memory=0.5, tiers=["pinned:256MiB"])
    (adjoint,) = torch.autograd.grad(ours(x).sum(), x)
    (plain,) = torch.autograd.grad(nn.Sequential(*stages)(x).sum(), x)
    assert torch.equal(adjoint, plain)


def test_no_limit_means_the_device() -> None:
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    ours = mst.Sequential(_chain(), x)
    assert ours.plan.keeps_all
    assert ours.plan.memory_bytes <= torch.cuda.get_device_properties(0).total_memory


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = nn.functional.dropout(torch.tanh(self.inner(h) + self.outer(x)), 0.1)
        return h, (h * x).mean()


@pytest.mark.parametrize(
    "options",
    [
        {"memory": 0.3},
        {"memory": "8 MiB", "tiers": ["pinned:64MiB"], "planner": "stream", "chunk": 2},
        {"memory": "8 MiB", "tiers": ["pinned:2MiB", "file:{}"], "planner": "stream", "chunk": 1},
        {"memory": "16 MiB", "tiers": ["file:{}"], "planner": "stream", "chunk": 1},
    ],
    ids=["memory", "pinned", "pinned and file", "file"],
)
def test_sequences(options: dict[str, Any], tmp_path: Any) -> None:
    torch.manual_seed(0)
    tiers = [tier.format(tmp_path) for tier in options.get("tiers", ())]
    cell = Cell().to(DEVICE)
    x = torch.randn(300, 256, 64, device=DEVICE, requires_grad=True)
    h = torch.randn(256, 64, device=DEVICE, requires_grad=True)
    results = []
    for by in ("hand", "unroll"):
        model, state, xs = copy.deepcopy((cell, h, x))
        torch.manual_seed(1)
        if by == "hand":
            last, loss = model(state, xs[0])
            for x_t in xs[1:]:
                last, one = model(last, x_t)
                loss = loss + one
        else:
            out = mst.unroll(model, state, xs, **{**options, "tiers": tiers})
            assert out.plan.planner in ("recompute", "stream")
            last, loss = out.state, out.loss
        (loss + last.square().mean()).backward()
        results.append([loss, last, state.grad, xs.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tiers", [[], ["pinned:64MiB"], ["pinned:1MiB", "file:{}"]])
@pytest.mark.parametrize("mebibytes", [2, 4])
def test_states_on_their_way_are_within_the_limit(
    tiers: list[str], mebibytes: int, tmp_path: Any
) -> None:
    cell, h = Cell().to(DEVICE), torch.zeros(256, 64, device=DEVICE)
    x = torch.ones(256, 64, device=DEVICE)
    options: dict[str, Any] = {
        "memory": mebibytes << 20,
        "tiers": [tier.format(tmp_path) for tier in tiers],
        "planner": "stream" if tiers else "recompute",
    }
    peaks = []
    for _ in range(2):
        before = _alone(cell, h, x)
        out = mst.unroll(cell, h, lambda t: x, n_steps=200 if REAL else 80, chunk=1, **options)
        forward = torch.cuda.max_memory_allocated() - before
        out.loss.backward()
        plan = out.plan
        del out
        peaks.append((forward, torch.cuda.max_memory_allocated() - before))
    parameters = sum(p.nbytes for p in cell.parameters())  # whose gradients are added up besides
    # Preparing takes memory in the first iteration, too.
    assert peaks[1][1] <= plan.peak_bytes + 2 * parameters, (peaks, plan.plan.planner)
    assert peaks[1][1] >= 0.7 * plan.peak_bytes, (peaks, plan.plan.planner)


def test_memory_of_a_sequence_is_flat() -> None:
    cell, h = Cell().to(DEVICE), torch.zeros(256, 64, device=DEVICE)
    limit = (8 if REAL else 3) << 20
    peaks = []
    for steps in (1000, 4000) if REAL else (200, 500):
        x = torch.ones(256, 64, device=DEVICE)
        for _ in range(2):
            before = _alone(cell, h, x)
            out = mst.unroll(cell, h, lambda t, x=x: x, n_steps=steps, memory=limit, chunk=2)
            out.loss.backward()
            del out
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert max(peaks) <= limit + (1 << 20)  # however many steps


def test_a_peak_is_the_same_each_time() -> None:
    """Autograd's thread gave its last gradients back too late for what was measured next."""
    weight = torch.ones(256, 1024, device=DEVICE, requires_grad=True)
    x = torch.ones(1, 256, device=DEVICE)
    _alone(weight, x)
    peaks = set()
    for _ in range(100):
        torch.autograd.grad((x @ weight).sum() + (x @ weight).sum(), weight)
        with Meter(weight.device) as meter:
            torch.autograd.grad((x @ weight).sum() + (x @ weight).sum(), weight)
            peaks.add(meter.peak_bytes)
    assert len(peaks) == 1, peaks
