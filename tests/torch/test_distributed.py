"""Two processes: gradients equal those of plain training under DistributedDataParallel."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

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
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for (plain, ours), _ in found:
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    for a, b in zip(found[0][0][1], found[1][0][1], strict=True):
        assert a.shape != (16, 16) or torch.equal(a, b)  # gradients are those of both ranks
    assert found[0][1] == found[1][1]
