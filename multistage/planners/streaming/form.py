"""Forms of the streaming schedule: candidates that can be laid over any length, and what they take.

A candidate is timed by the C core or by simulating it, long ones by shorter ones of the
same shape.  The kernel decides and times what `sweep` and `simulate` do, up to rounding: a
few nanoseconds a step instead of some twenty microseconds.  Its Python twin is the
simulation itself.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ... import native
from ...model.costs import Costs
from ...schedule.simulation import Simulation, simulate
from ..bound import lower_bound
from ..predict import SIMULATED_STEPS, extended, predict
from .reserve import Reservation
from .sweep import Sweep

# A backlog grows over so many times the spacing; more states are not worth a try.
_DENSE = 6.0
# However positions are rounded, none falls right before the tail.
_WHOLE = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Form:
    """A candidate that can be laid over any length.

    Attributes
    ----------
    spacing : float
    tail : int or None
        Length of the tail; None for the ring.
    shift : int or None
        Where the tail starts: this many steps after the position nearest to
        its nominal start, or exactly there (None).
    reserve : bool
        Whether slots are given up late for the next read.
    depth : int
    end_spacing : float or None
        Spacing among the states that the ring keeps to the end, where it differs.
    online : bool
        A ring that does not know where the sequence ends.
    backlog : int
        States stored before the tail beyond those written by then: they wait in slots.
    """

    spacing: float
    tail: int | None
    shift: int | None = None
    reserve: bool = True
    depth: int = 4
    end_spacing: float | None = None
    online: bool = False
    backlog: int = 0

    def sweep(self, costs: Costs, slots: int, n_steps: int, reservation: Reservation) -> Sweep:
        """Lay the form over `n_steps` steps."""
        tier, spacing = costs.tier, self.spacing
        assert tier is not None
        sweep = Sweep(
            slots,
            spacing,
            None,
            self.depth,
            tier.queue_depth,
            drain_steps=math.ceil(tier.queue_depth * tier.write_s / max(costs.turn_s, 1e-12)),
            reservation=reservation if self.reserve else None,
        )
        if self.online:
            return sweep
        if self.tail is None:
            last = self.end_spacing or spacing
            kept = int(min(n_steps, slots * last / max(last - 1, slots / n_steps)))
            return replace(
                sweep,
                drain_steps=min(sweep.drain_steps, n_steps),
                keep_from=max(0, n_steps - 1 - kept - math.ceil(2 * last + spacing)),
                end_start=None if self.end_spacing is None else max(0, n_steps - 1 - kept),
                end_spacing=last,
            )
        start = n_steps - self.tail
        if self.shift is not None:
            start = int(round(start / spacing) * spacing) + self.shift
        start = min(max(start, 0), n_steps - 1)
        dense = min(start, math.ceil(_DENSE * spacing)) if self.backlog else 0
        closer = dense / (dense / spacing + self.backlog) if self.backlog else spacing
        return replace(
            sweep,
            tail_start=start,
            end_start=start - dense if self.backlog else None,
            end_spacing=max(1.0, closer * _WHOLE),
            backlog=self.backlog,
        )

    def ends(self, slots: int) -> int:
        """Return how many steps at the ends are not periodic."""
        if self.tail is None:
            return 4 * slots
        return self.tail + (math.ceil((_DENSE + 2) * self.spacing) if self.backlog else 0)


_MASK_STEPS = 64  # positions moved by hand lie below
_FARTHEST = 2.0**53  # steps, beyond any end: the kernel counts them in integers


def timed(sweep: Sweep, costs: Costs, n_steps: int, *, online: bool = False) -> Simulation:
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
        return simulate(schedule, None, costs, sweep.slots)
    return simulate(sweep.schedule(n_steps), n_steps, costs, sweep.slots)


def _by_kernel(sweep: Sweep, costs: Costs, n_steps: int, online: bool) -> Simulation | None:
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
    return Simulation(makespan_s, int(forward_steps), stall_s, int(writes), int(reads), peak)


# Without the C core no more steps are judged than can be simulated.
SIMULATED = 16_384
# Rings of more slots, or of more than so many times the spacing, are timed by
# shorter ones, and wider spacings by narrower ones.
_LONG_RING, _PERIODS, _WIDE = 2048, 32, 256.0


def prediction(
    form: Form, costs: Costs, slots: int, n_steps: int, reservation: Reservation
) -> Simulation:
    """Return what a form takes over `n_steps` steps."""
    run = partial(run_form, form, costs, slots, reservation)
    found = predict(run, n_steps, period=form.spacing, head=form.ends(slots))
    return _at_least(found, costs, slots, n_steps)


def _at_least(found: Simulation, costs: Costs, slots: int, n_steps: int) -> Simulation:
    """Return a prediction that rests on shorter runs, not below what is possible."""
    least_s = lower_bound(costs, slots, n_steps)
    return replace(
        found,
        makespan_s=max(found.makespan_s, least_s),
        forward_steps=max(found.forward_steps, n_steps),
    )


def ring_prediction(form: Form, costs: Costs, slots: int, n_steps: int) -> Simulation:
    """Return what a ring takes over `n_steps` steps, though the tier be full before the end."""
    tier, reservation = costs.tier, Reservation(costs)
    assert tier is not None
    room = n_steps if tier.capacity_states is None else tier.capacity_states * form.spacing
    if room >= n_steps:
        return prediction(form, costs, slots, n_steps, reservation)

    capacity = tier.capacity_states or 0

    def run(states: int) -> Simulation:
        # Fewer states before the tier is full; what follows them is the same.
        left = replace(costs, tiers=(replace(tier, capacity_states=states), *costs.tiers[1:]))
        steps = n_steps - round((capacity - states) * form.spacing)
        return timed_form(form, left, slots, reservation, steps)

    few = max(64, math.ceil(4 * slots / form.spacing) + 12)
    if capacity <= 2 * few:
        return run(capacity)
    found = extended(run(few), run(2 * few), capacity / few - 2)
    return _at_least(found, costs, slots, n_steps)


def run_form(
    form: Form, costs: Costs, slots: int, reservation: Reservation, n_steps: int
) -> Simulation:
    """Return what a form takes, a long ring's by those of shorter ones.

    A ring of many slots looks like one of fewer slots and steps: what it
    takes grows with both together, but for its ends and the rounding of
    positions, which stay as they are.  So two smaller ones of the same shape
    are extended; wide spacings shrink along, and the transfers with them.
    """
    if form.tail is not None or n_steps <= (SIMULATED if native.available() else SIMULATED_STEPS):
        return timed_form(form, costs, slots, reservation, n_steps)
    slots = min(slots, 2 * n_steps + 64)  # more make no difference
    if _WIDE * (1 + 1e-9) < form.spacing <= 4 * slots:
        share = _WIDE / form.spacing

        def shrunk(part: float) -> Simulation:
            end = form.end_spacing and form.end_spacing * part
            smaller = replace(form, spacing=form.spacing * part, end_spacing=end)
            fewer, steps = max(1, round(slots * part)), max(2, round(n_steps * part))
            faster = _faster(costs, part)
            return run_form(smaller, faster, fewer, Reservation(faster), steps)

    elif slots > max(_LONG_RING, _PERIODS * form.spacing):
        share = max(_LONG_RING, _PERIODS * form.spacing) / slots

        def shrunk(part: float) -> Simulation:
            fewer, steps = int(slots * part), max(2, round(n_steps * part))
            return run_form(form, costs, fewer, reservation, steps)

    else:
        return timed_form(form, costs, slots, reservation, n_steps)
    repeats = 2 * (1 - share) / share
    found = extended(shrunk(share / 2), shrunk(share), repeats)
    # Whole steps make the shorter rings a fraction of a step too long or too
    # short, and extending them makes a thousand steps of it.
    half, whole = (max(2, round(n_steps * part)) for part in (share / 2, share))
    right = n_steps / (whole + repeats * (whole - half))
    return replace(
        found,
        makespan_s=found.makespan_s * right,
        forward_steps=round(found.forward_steps * right),
        stall_s=found.stall_s * right,
        peak_slots=min(slots, math.ceil(found.peak_slots / share)),
    )


def timed_form(
    form: Form, costs: Costs, slots: int, reservation: Reservation, n_steps: int
) -> Simulation:
    """Return what a form takes, timed over all steps."""
    sweep = form.sweep(costs, slots, n_steps, reservation)
    return timed(sweep, costs, n_steps, online=form.online)


def _faster(costs: Costs, share: float) -> Costs:
    """Return costs whose first tier moves a state in a share of the time."""
    tier, *others = costs.tiers
    tier = replace(
        tier,
        write_s=tier.write_s * share,
        read_s=tier.read_s * share,
        write_overhead_s=tier.write_overhead_s * share,
        read_overhead_s=tier.read_overhead_s * share,
    )
    return replace(costs, tiers=(tier, *others))
