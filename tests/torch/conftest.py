"""One thread for tensors: small ones gain nothing from more, and lose much beside other work.

And workspaces of cuBLAS that allow equal bits, told before CUDA starts, and a check
that takes its time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def patient_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients however slow the machine is: the check gives up after a second."""
    monkeypatch.setattr("multistage.torch.measurement.both_ways._SECONDS", 60.0)
