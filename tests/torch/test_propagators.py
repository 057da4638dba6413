"""Segments of a propagator that brings its own gradient: many time steps as one.

`docs/howto/propagators.md` runs deepwave, where it is installed; this one is like it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import multistage.torch as mst
from multistage import open_store

N, STEPS, SEGMENT = 40, 200, 20


def lap(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[1:-1, 1:-1] = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
    return out


class Propagator(torch.autograd.Function):
    """u[i+1] = 2 u[i] - u[i-1] + v² lap(u[i]) + source; keeps a field of every step, unseen."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, amplitudes: Tensor, now: Tensor, before: Tensor) -> Any:
        now, before, recorded = now.clone(), before.clone(), []
        ctx.v, ctx.kept = v.clone(), torch.empty(0)
        if v.requires_grad:
            ctx.kept = torch.empty(len(amplitudes), *v.shape, dtype=v.dtype)
        for i, amplitude in enumerate(amplitudes):
            push = lap(now)
            if v.requires_grad:
                ctx.kept[i] = push
            now, before = 2 * now - before + v * v * push, now
            now[3, N // 2] += amplitude
            recorded.append(now[-4].clone())
        return now, before, torch.stack(recorded)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        p, q, residual = given[0].clone(), given[1].clone(), given[2]
        gradient = torch.zeros_like(ctx.v)
        for i in reversed(range(len(residual))):
            p[-4] += residual[i]
            gradient += 2 * ctx.v * p * ctx.kept[i]
            p, q = q + 2 * p + lap(ctx.v * ctx.v * p), -p
        return gradient, None, p, q


class Segment(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = torch.nn.Parameter(torch.full((N, N), 0.4, dtype=torch.float64))

    def forward(self, state: Any, amplitudes: Tensor) -> Any:
        now, before, recorded = Propagator.apply(self.v, amplitudes, *state)  # type: ignore[no-untyped-call]
        return (now, before), recorded


def loop(cell: Segment, pieces: Any) -> tuple[Tensor, Tensor]:
    """Return what receivers record and the gradient of a misfit, by plain autograd."""
    state, found = start(), []
    for piece in pieces:
        state, recorded = cell(state, piece)
        found.append(recorded)
    return gradient_of(cell, torch.cat(found))


def start() -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(N, N, dtype=torch.float64)
    return zeros, zeros.clone()


def gradient_of(cell: Segment, recorded: Tensor) -> tuple[Tensor, Tensor]:
    recorded.square().sum().backward()
    assert cell.v.grad is not None
    found, cell.v.grad = cell.v.grad, None
    return recorded.detach(), found


def test_segments_of_a_propagator_take_a_quarter_of_its_own_storage(tmp_path: Path) -> None:
    cell = Segment()
    t = torch.arange(STEPS, dtype=torch.float64) / 12 - 2.5
    source = (1 - 2 * t**2) * torch.exp(-(t**2))
    pieces = source.split(SEGMENT)
    plain = loop(cell, pieces)
    whole = loop(cell, [source])
    own = STEPS * 8 * N * N  # that of one call

    tier = open_store(f"file:{tmp_path}?buffers=64KiB")
    for _ in range(2):
        out = mst.unroll(cell, start(), pieces, memory="900 KiB", tiers=tier, planner="stream")
        assert out.plan is not None and out.plan.plan is not None
        assert out.plan.keep_bytes > own > out.plan.memory_bytes >= out.plan.peak_bytes
        recorded, gradient = gradient_of(cell, torch.cat([*out.outputs]))  # type: ignore[misc]
        assert torch.equal(recorded, plain[0]) and torch.equal(gradient, plain[1])
        assert 0 < tier.stats.bytes_written <= 0.25 * own
        assert out.plan.plan.writes == tier.stats.writes
        del out  # whose graph holds the tier
    # The sums over time of one call and of its segments round otherwise.
    assert torch.equal(recorded, whole[0])
    assert torch.linalg.norm(gradient - whole[1]) <= 1e-13 * torch.linalg.norm(whole[1])
