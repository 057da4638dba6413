"""Two processes: gradients equal those of plain training under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import multistage.torch as mst
from multistage.errors import ArgumentError

Found = tuple[list[Any], list[str]]  # gradients and buffers, plain and ours; plans

pytestmark = pytest.mark.filterwarnings("ignore")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(8))
    )


def _data_parallel(rank: int) -> Found:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    results, plans = [], []
    for limited in (False, True):
        model: nn.Module = _model()
        if limited:
            model = mst.Sequential(model, x, memory=0.6)
            assert not model.plan.keeps_all
            plans.append(repr(model.plan.actions))
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            wrapped(x).square().sum().backward()
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
    return results, plans


def _sharded(rank: int, whole: bool) -> Found:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(rank))
    results, plans = [], []
    for limited in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 16))
                for _ in range(6)
            )
        )
        for block in model.children():
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        if limited:
            model = mst.Sequential(model, memory=0.6)
        if whole:
            fully_shard(model, mesh=mesh)
        for step in range(2):
            torch.manual_seed(step)
            model(x).square().sum().backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])
    assert not model.plan.keeps_all
    plans.append(repr(model.plan.actions))
    return results, plans


class _OverTime(nn.Module):
    """A cell over a sequence; by hand, or by `unroll`."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(16, 16)
        self.unrolled = unrolled
        self.seen: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(4, 16), x.new_zeros(4, 16)
        if self.unrolled:
            out = mst.unroll(self.cell, state, x, memory="40 KiB", chunk=4)
            self.seen = out.plan.planner
            return out.outputs
        ys = []
        for x_t in x:
            state = self.cell(x_t, state)
            ys.append(state[0])
        return torch.stack(ys)


def _sequences(rank: int, kind: str) -> Found:
    x = torch.randn(40, 4, 16, generator=torch.Generator().manual_seed(rank))
    results = []
    for unrolled in (False, True):
        model = _OverTime(unrolled)
        if kind == "ddp":
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (2,))
            wrapped = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for _ in range(2):
            wrapped(x).square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        results.append([g.full_tensor() if kind == "fsdp" else g for g in grads])
    assert model.seen == "recompute"
    return results, []


def _compiled(rank: int, kind: str) -> Found:
    """Train what `compile` returns, as the module that is wrapped."""
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(rank))
    results = []
    for limited in (False, True):
        model: Any = _model()
        if limited:
            model = mst.compile(model, memory=0.7)
        if kind == "ddp":
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        for _ in range(3):
            wrapped(x).square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        grads = [g.full_tensor() if kind == "fsdp" else g for g in grads]
        results.append([*grads, *model.buffers()])
    assert not model.plan.keeps_all
    return results, []


JOBS: dict[str, Callable[[int], Found]] = {
    "ddp": _data_parallel,
    "blocks": partial(_sharded, whole=False),
    "blocks and chain": partial(_sharded, whole=True),
    "sequences, ddp": partial(_sequences, kind="ddp"),
    "sequences, fsdp": partial(_sequences, kind="fsdp"),
    "compiled, ddp": partial(_compiled, kind="ddp"),
    "compiled, fsdp": partial(_compiled, kind="fsdp"),
}


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    # By a file: another process may take a port that was free a moment ago.
    where = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    try:
        found = {name: job(rank) for name, job in JOBS.items()}
        torch.save(found, f"{folder}/{rank}.pt")
        torch.distributed.barrier()  # gloo aborts when one leaves while others talk
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """Return what each of two processes found in every job: to start them takes the longest."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.long
@pytest.mark.parametrize("job", JOBS)
def test_gradients_are_those_of_plain_training(job: str, ranks: list[dict[str, Found]]) -> None:
    found = [each[job] for each in ranks]
    for (plain, ours), _ in found:
        assert plain and all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert found[0][1] == found[1][1]
    if job == "ddp":  # gradients are those of both ranks, buffers each rank's own
        pairs = zip(found[0][0][1], found[1][0][1], strict=True)
        of_both = [(a, b) for a, b in pairs if a.shape == (16, 16)]
        assert of_both and all(torch.equal(a, b) for a, b in of_both)


def test_a_compiled_model_sharded_inside_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = _model()
        fully_shard(model[2])
        with pytest.raises(ArgumentError, match="fully_shard what compile returns alone"):
            mst.compile(model, memory=0.7)
    finally:
        torch.distributed.destroy_process_group()


def test_a_cell_that_is_data_parallel_itself_is_refused() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        cell = nn.parallel.DistributedDataParallel(nn.GRUCell(4, 4))
        with pytest.raises(ArgumentError, match="put the module that calls unroll into"):
            mst.unroll(
                lambda h, x: (cell(x, h),) * 2, torch.zeros(2, 4), torch.ones(9, 2, 4), memory=0.5
            )
    finally:
        torch.distributed.destroy_process_group()
