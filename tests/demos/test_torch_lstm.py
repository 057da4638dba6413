"""The PyTorch demo ends with a lower loss and the gradient of plain autograd."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from multistage.cli import main


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more gain nothing for small tensors
    yield
    torch.set_num_threads(before)


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--n-steps", "200", "--width", "32", "--batch", "8", "--memory", "700 KiB"]
    assert main(["demo", "torch-lstm", *options, "--updates", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["losses"][-1] < result["losses"][0]
    assert result["gradients_equal"] and result["planner"] == "recompute"
    assert main(["demo", "torch-lstm", *options, "--updates", "1", "--tiers", "memory:"]) == 0
    text = capsys.readouterr().out
    assert "to the last bit." in text and "Predicted" in text


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "torch-lstm", "--updates", "0"]) != 0
    assert "at least 1" in capsys.readouterr().err
