"""One thread for tensors: small ones gain nothing from more, and lose much beside other work.

And workspaces of cuBLAS that allow equal bits, told before CUDA starts, a check
that takes its time, and costs whose bytes are measured and whose seconds are not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
def seeded() -> None:
    """Draw the same numbers whichever tests ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def patient_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare gradients however slow the machine is: the check gives up after a second."""
    monkeypatch.setattr("multistage.torch.measurement.checking._SECONDS", 60.0)


class Ticks:
    """Stands in for the module `time`: each reading is some time after the last."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s, self._now_s = tick_s, 0.0

    def perf_counter(self) -> float:
        self._now_s += self._tick_s
        return self._now_s


@pytest.fixture(autouse=True)
def steady_seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure all bytes, and plan by fixed seconds: on a busy machine plans would be others.

    Tests marked `real_clock` measure seconds too.
    """
    if request.node.get_closest_marker("real_clock") is not None:
        return
    _steady_stages(monkeypatch)
    _steady_steps(monkeypatch)
    _steady_tiers(monkeypatch)


def _steady_stages(patch: pytest.MonkeyPatch) -> None:
    """Let every stage of a chain take the same seconds."""
    from multistage.torch.measurement import measure

    overhead_s = measure.StageRun.overhead_s

    def time(run: measure.StageRun, found: measure.Times, seconds: float) -> None:
        while found.rounds < 2:
            run._round()
            found.add(1e-4, 0.0, 2e-4)

    def overhead(run: measure.StageRun) -> float:
        overhead_s(run)
        return 1e-5

    patch.setattr(measure.StageRun, "time", time)
    patch.setattr(measure.StageRun, "overhead_s", overhead)
    patch.setattr(measure, "engine_s", lambda: 0.0)


def _steady_steps(patch: pytest.MonkeyPatch) -> None:
    """Let every step of a sequence take the same seconds."""
    from multistage.torch.sequences import costs, planning, remembered, running, search

    measured = costs.measured

    def steady(given: Any, *rest: Any, **options: Any) -> Any:
        found = measured(given, *rest, **options)
        forward_s, backward_s, overhead_s = 1e-4, 2e-4, 2e-5
        if given.facts.equal:
            n, overhead_s = found.chunk, 0.0
            forward_s, backward_s = 1e-4 * n + 2e-5, 2e-4 * n + 3e-5
        stage = replace(found.stage, forward_s=forward_s, backward_s=backward_s)
        return replace(found, stage=stage, overhead_s=overhead_s)

    patch.setattr(costs, "measured", steady)
    patch.setattr(planning, "measured", steady)
    patch.setattr(costs, "time", Ticks(0.15))  # chunks of up to 64 steps are measured
    patch.setattr(search, "action_seconds", lambda: 1e-6)
    known = remembered.Remembered()
    for module in (planning, running, search):
        patch.setattr(module, "KNOWN", known)


def _steady_tiers(patch: pytest.MonkeyPatch) -> None:
    """Let every tier of a sequence write and read a state in the seconds of two steps."""
    from multistage.measurement.store import probe_store
    from multistage.reversing import streamed
    from multistage.torch.sequences import costs, planning, search

    tier_of, measured_rates = costs.tier_of, search.measured_rates

    def probed(*given: Any, **options: Any) -> Any:
        return probe_store(*given, **{**options, "seconds": 0.01})

    def tier(*given: Any) -> Any:
        found = tier_of(*given)
        return replace(
            found, write_s=2e-4, read_s=2e-4, write_overhead_s=1e-5, read_overhead_s=1e-5
        )

    def rates(store: Any, nbytes: int) -> Any:
        rate = nbytes / 16 / 2e-4
        return replace(measured_rates(store, nbytes), write_bytes_per_s=rate, read_bytes_per_s=rate)

    for module in (costs, streamed):
        patch.setattr(module, "probe_store", probed)
    patch.setattr(planning, "tier_of", tier)
    patch.setattr(search, "measured_rates", rates)
