"""Steps that differ, on a tier that turns slow after it was measured: the deadline rule at work.

The tier is host memory that moves its bytes at a given rate, the same on any machine.  What is
timed is one sweep, the first on the slow tier: the next is planned for the tier as it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks._common import interleaved
from multistage import Reversal, StageCosts
from multistage.backends.medium import Ram
from multistage.backends.paged import PagedStore
from multistage.backends.streamed import StreamedStore
from multistage.execute.late import TakenWhenLate
from multistage.reversing.unequal import largest_state
from multistage.states.layout import Array

SLOWER = 10.0
_RHO = 0.3  # seconds to write all states, over those of plain training
_SHARE = 0.15  # of the bytes of all states, as budget
_NAP_S = 1e-3


class Paced(Ram):
    """Host memory that moves so many bytes in a second."""

    rate = np.inf

    def write(self, slot: int, offset: int, data: Array) -> None:
        began = time.perf_counter()
        super().write(slot, offset, data)
        while (left := began + len(data) / Paced.rate - time.perf_counter()) > 0:
            time.sleep(min(left, _NAP_S))

    def read(self, slot: int, data: Array) -> None:
        began = time.perf_counter()
        super().read(slot, data)
        while (left := began + len(data) / Paced.rate - time.perf_counter()) > 0:
            time.sleep(min(left, _NAP_S))


def late_rows(
    step: Callable[[Array, int], Array],
    adjoint_step: Callable[[Array, Array, int], Array],
    start: Array,
    last: Array,
    costs: StageCosts,
    answer: bytes,
    repeats: int,
) -> dict[str, list[float]]:
    """Return the seconds of sweeps without a tier, waiting for it, and with detours.

    Parameters
    ----------
    start, last
        State 0, and the adjoint of the last state.
    answer : bytes
        Of the gradient.
    """
    total = sum(stage.output_bytes for stage in costs.stages)
    plain_s = sum(stage.forward_s + stage.backward_s for stage in costs.stages)
    planned = total / (_RHO * plain_s)

    def swept(tier: bool, waits: bool, rate: float) -> float:
        Paced.rate = planned
        store = StreamedStore("paced", Paced, buffer_bytes=0)
        buffers = PagedStore(store, largest_state(costs)).buffer_bytes()
        run: Reversal[Any, Any] = Reversal(
            step,
            adjoint_step,
            costs=costs,
            memory=int(_SHARE * total) + buffers * tier,
            tiers=store if tier else None,
            progress=False,
        )
        stays = mock.patch.object(TakenWhenLate, "__call__", lambda *_: None)
        with run, stays if waits else contextlib.nullcontext():
            run.prepare(start)
            assert run.chain_plan is not None and bool(run.chain_plan.writes) == tier
            Paced.rate = rate
            began = time.perf_counter()
            run.forward(start)
            gradient = run.reverse(last)
            seconds = time.perf_counter() - began
            assert gradient.tobytes() == answer, "another gradient than with everything stored"
            return seconds

    samples = interleaved(
        {
            "no tier": partial(swept, False, False, planned),
            "as planned": partial(swept, True, False, planned),
            "detour": partial(swept, True, False, planned / SLOWER),
        },
        repeats,
    )
    return {**samples, "waits": [swept(True, True, planned / SLOWER)]}
