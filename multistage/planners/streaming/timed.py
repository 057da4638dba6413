"""What a streaming schedule takes in virtual time, by the C core or by simulating it.

The kernel decides and times what `sweep` and `simulate` do, up to rounding: a
few nanoseconds a step instead of some twenty microseconds.  Its Python twin is
the simulation itself.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ... import native
from ...model.costs import Costs
from ...schedule.simulation import simulate
from ..predict import Prediction, simulated
from .sweep import Sweep

_MASK_STEPS = 64  # positions moved by hand lie below
_FARTHEST = 2.0**53  # steps, beyond any end: the kernel counts them in integers


def timed(sweep: Sweep, costs: Costs, n_steps: int, *, online: bool = False) -> Prediction:
    """Return what `sweep` takes over `n_steps` steps.

    Parameters
    ----------
    sweep : Sweep
    costs : Costs
        Its first tier is the one written to.
    n_steps : int
    online : bool
        The schedule does not know `n_steps` (ring only).
    """
    moved = max((*sweep.extra, *sweep.skip), default=0)
    if native.available() and moved < _MASK_STEPS:
        found = _by_kernel(sweep, costs, n_steps, online)
        if found is not None:
            return found
    if online:
        schedule = sweep.schedule(None, lambda i: i == n_steps)
        return simulated(simulate(schedule, None, costs, sweep.slots))
    return simulated(simulate(sweep.schedule(n_steps), n_steps, costs, sweep.slots))


def _by_kernel(sweep: Sweep, costs: Costs, n_steps: int, online: bool) -> Prediction | None:
    tier = costs.tier
    assert tier is not None
    slots = min(sweep.slots, 2 * n_steps + _MASK_STEPS)  # more make no difference
    call = native.SweepCall(
        n=n_steps,
        online=online,
        slots=slots,
        tail_start=-1 if sweep.tail_start is None else sweep.tail_start,
        depth=sweep.depth,
        queue_depth=tier.queue_depth,
        drain_steps=sweep.drain_steps,
        keep_from=sweep.keep_from,
        end_start=n_steps if sweep.end_start is None else sweep.end_start,
        capacity=-1 if tier.capacity_states is None else tier.capacity_states,
        reserve=sweep.reservation is not None,
        backlog=sweep.backlog,
        extra=sum(1 << step for step in sweep.extra),
        skip=sum(1 << step for step in sweep.skip),
        spacing=min(sweep.spacing, _FARTHEST),
        end_spacing=min(sweep.end_spacing, _FARTHEST),
        forward=costs.forward_step_s,
        taping=costs.taping_s,
        reverse=costs.reverse_step_s,
        turn=costs.turn_s,
        action=costs.action_s,
        write=tier.write_s,
        read=tier.read_s,
        write_overhead=tier.write_overhead_s,
        read_overhead=tier.read_overhead_s,
    )
    kept = 2 * min(n_steps, sweep.slots) if sweep.tail_start is None else 0
    closest = sweep.spacing
    if sweep.end_start is not None:
        closest = min(closest, sweep.end_spacing)
    offered = n_steps / max(1.0, closest)
    if tier.capacity_states is not None:
        offered = min(offered, tier.capacity_states)
    room = int(offered + kept) + sweep.backlog + _MASK_STEPS
    library = native.library()
    work = np.empty(int(library.ms_sweep_len(room, slots)))
    out = np.empty(6)
    tables = None if sweep.reservation is None else sweep.reservation.kernel_tables().ctypes.data
    status = library.ms_sweep(ctypes.byref(call), room, work.ctypes.data, tables, out.ctypes.data)
    assert status == 0, f"{sweep} over {n_steps} steps ended with {status}"
    makespan_s, stall_s, forward_steps, writes, reads, peak = out.tolist()
    return Prediction(makespan_s, int(forward_steps), peak, int(writes), int(reads), stall_s)
