"""Two processes: gradients equal those of plain training under DDP and FSDP2."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import multistage.torch as mst

pytestmark = pytest.mark.filterwarnings("ignore")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(8))
    )


def _worker(rank: int, port: int, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
        results, plans = [], []
        for limited in (False, True):
            model: nn.Module = _model()
            if limited:
                model = mst.Sequential(model, x, memory=0.6)  # type: ignore[arg-type]
                assert not model.plan.keeps_all  # type: ignore[union-attr]
                plans.append(repr(model.plan.actions))  # type: ignore[union-attr]
            wrapped = nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                wrapped(x).square().sum().backward()
            results.append([p.grad for p in model.parameters()] + list(model.buffers()))
        torch.save((results, plans), f"{out}/{rank}.pt")
        torch.distributed.barrier()  # gloo aborts when one leaves while others talk
    finally:
        torch.distributed.destroy_process_group()


def _sharded_worker(rank: int, port: int, out: str, whole: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
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
                model = mst.Sequential(model, memory=0.6)  # type: ignore[arg-type]
            if whole:
                fully_shard(model, mesh=mesh)
            for step in range(2):
                torch.manual_seed(step)
                model(x).square().sum().backward()
            results.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
        assert not model.plan.keeps_all  # type: ignore[union-attr]
        plans.append(repr(model.plan.actions))  # type: ignore[union-attr]
        torch.save((results, plans), f"{out}/{rank}.pt")
        torch.distributed.barrier()  # gloo aborts when one leaves while others talk
    finally:
        torch.distributed.destroy_process_group()


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
            self.seen = out.plan.planner  # type: ignore[union-attr]
            return out.outputs
        ys = []
        for x_t in x:
            state = self.cell(x_t, state)
            ys.append(state[0])
        return torch.stack(ys)


def _sequence_worker(rank: int, port: int, out: str, kind: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
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
            results.append([g.full_tensor() if kind == "fsdp" else g for g in grads])  # type: ignore[union-attr]
        assert model.seen == "recompute"
        torch.save((results, []), f"{out}/{rank}.pt")
        torch.distributed.barrier()  # gloo aborts when one leaves while others talk
    finally:
        torch.distributed.destroy_process_group()


def _spawned(worker: Callable[..., None], folder: Path, *more: Any) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(folder), *more), nprocs=2)  # type: ignore[no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "blocks and chain"])
def test_fully_sharded(tmp_path: Path, whole: bool) -> None:
    found = _spawned(_sharded_worker, tmp_path, whole)
    for (plain, ours), _ in found:
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert found[0][1] == found[1][1]


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path) -> None:
    found = _spawned(_worker, tmp_path)
    for (plain, ours), _ in found:
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    for a, b in zip(found[0][0][1], found[1][0][1], strict=True):
        assert a.shape != (16, 16) or torch.equal(a, b)  # gradients are those of both ranks
    assert found[0][1] == found[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_sequences(tmp_path: Path, kind: str) -> None:
    for (plain, ours), _ in _spawned(_sequence_worker, tmp_path, kind):
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
