"""Plans of the front ends as pages, and bars over their sweeps."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

import multistage.torch as mst
from multistage.errors import ArgumentError
from multistage.support import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def unrolled(**options: object) -> tuple[mst.Unrolled, torch.Tensor]:
    torch.manual_seed(0)
    cell = torch.nn.LSTMCell(4, 8)
    x = torch.randn(60, 3, 4)
    state = torch.zeros(3, 8), torch.zeros(3, 8)
    out = mst.unroll(cell, state, x, memory="24 KiB", chunk=2, outputs="sum", **options)
    out.outputs.sum().backward()
    assert cell.weight_hh.grad is not None
    return out, cell.weight_hh.grad


def test_the_plan_of_a_sequence(tmp_path: Path) -> None:
    out, _ = unrolled(planner="recompute")
    assert out.plan is not None
    out.plan.save(tmp_path / "u.html")
    text = (tmp_path / "u.html").read_text()
    assert "recompute, chunks of 2: 60 steps within 24.00 KiB" in text
    assert "The schedule of chunks" in text and text.count("<svg") == 3
    html = out.plan._repr_html_()
    assert html.count("<svg") == 1 and "recompute" in html and len(html) < 100_000
    with pytest.raises(ArgumentError, match=r"ends in \.json; use \.html here"):
        out.plan.save(tmp_path / "u.json")


def test_the_plan_of_a_chain(tmp_path: Path) -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)]
    model = mst.Sequential(layers, torch.randn(64, 32), memory=0.95)
    assert model.plan is not None
    model.plan.save(tmp_path / "c.html")
    assert "0 Sequential" in (tmp_path / "c.html").read_text()
    assert "<svg" in model.plan._repr_html_()


def test_bars_over_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted = unrolled(planner="recompute", progress=False)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name in ("_DELAY_S", "_EVERY_S", "_PIECE_S"):
        monkeypatch.setattr(progress, name, 0.0)
    _, found = unrolled(planner="recompute", progress=True)
    assert "forward:" in screen.getvalue() and "reverse:" in screen.getvalue()
    assert screen.getvalue().endswith("\r")
    assert torch.equal(found, wanted)
