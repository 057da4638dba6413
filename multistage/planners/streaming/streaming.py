"""Streaming, the default: store whenever the channel is free, keep the end fast.

After Kukreja, Hueckelheim & Gorman 2018 (arXiv:1806.01117), with the forward
sweep counted and five changes, each better everywhere it was tried:

positions
    states floor(k g) instead of every I-th: the write channel never idles.
    g = max(1, rho, (T_R + T_A) / (T_A + T_B)); the last term is the rate at
    which intervals can be read back while others are reversed.
backlog
    where rho > s, states lie closer before the tail than the channel writes:
    idle slots hold them, and the channel, idle no more, catches up while the
    tail runs forward.
end kept fast
    the last states are needed first and are not worth a transfer: the ring
    where rho <= s, a Revolve tail where rho > s (see `sweep`).
reservation
    where an interval needs every slot, one is given up for the next read when
    it costs least; or the interval's first state leaves its slot to the upper
    part and is read again for the lower one (see `reserve`).
thrift
    where what a transfer costs the computing thread exceeds the recomputation
    it saves, states are stored less often.

Candidates of these forms, plain Revolve among them, are run in virtual time
and the fastest is taken; so the plan is never slower than Revolve.  The C core
decides and times what `sweep` and `simulate` do, up to rounding, in a few
nanoseconds a step instead of some microseconds; its Python twin is the
simulation itself.  Not
optimal: within 1 % of the exact optimum on average for n = 8..12; the gap to
the lower bound is printed with every plan.  A faster tier tries every spacing
that a slower one does, so that it makes no plan slower, but for some tenths of
a per cent (3 % up to 24 steps, where single positions are moved).  Cost per step in the steady
state, for whole g: T_A (1 + nu(g, s) / g) + T_B, whatever n.  Long sequences
are planned on a shorter one of the same steady state, and rings of many slots
on shorter rings (within 1 % of the whole simulation).  Known gap: nothing is
written during the reverse sweep.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from ... import native
from ...model.costs import Costs
from ...schedule.simulation import Simulation, simulate
from ..base import Plan
from ..bound import lower_bound
from ..predict import SIMULATED_STEPS, Draft, extended, planner, predict
from ..single.binomial import beta, nu
from ..single.revolve import plain_revolve
from .interval import interval
from .reserve import Reservation
from .sweep import DEPTH, Sweep

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
            tier.queue_depth,
            drain_steps=math.ceil(tier.queue_depth * tier.write_s / max(costs.turn_s, 1e-12)),
            reservation=reservation,
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
        depth=DEPTH,
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


# Lengths up to this are searched harder: every tail start, single positions moved.
_SHORT = 24
# Forms this close to the best, in the share of the makespan, count as good as it.
_AS_GOOD = 0.01
# Of the candidates judged best, this many are predicted in full.
_PREDICTED = 6
# Candidates are judged on this many steps, more where both ends want more, but
# without the C core on no more than can be simulated.
_JUDGED_STEPS = 512
_NEAR = 4 * _JUDGED_STEPS
# Spacings tried whatever the tier: a faster one has all that a slower one has.
SPACINGS = tuple(sorted({*map(float, range(1, 9)), *(2 ** (k / 4) for k in range(12, 73))}))
# Up to so many times the steady spacing.
_SLOWER = 4.0
# More tails than about twice as many are thinned out.
_TAILS = 6
_BACKLOG = 64


def streaming_spacing(costs: Costs) -> float:
    """Return g, the steady spacing of stored states that both channels keep up with.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> streaming_spacing(Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),)))
    4.0
    """
    tier = costs.tier
    assert tier is not None
    step_s, turn_s = costs.forward_step_s, costs.turn_s
    return max(1.0, tier.write_s / step_s, (tier.read_s + step_s) / (step_s + turn_s))


@planner("streaming")
def streaming(costs: Costs, slots: int, n_steps: int) -> Draft | Plan:
    """Return the streaming plan, or Revolve's where streaming cannot pay.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> plan = streaming(costs, slots=20, n_steps=10_000)
    >>> round(plan.makespan_s / plan.n_steps, 2), round(plan.recompute_factor, 2)
    (3.75, 1.75)
    """
    fallback = plain_revolve(costs, slots, n_steps, "Streaming cannot pay here")
    tier = costs.tier
    # Where every state fits the slots, nothing can be spared.
    if tier is None or n_steps <= max(2, slots + 1) or tier.capacity_states == 0:
        return fallback
    reservation = Reservation(costs)
    least = 1.0 if tier.capacity_states is None else n_steps / tier.capacity_states
    judge = _Judge(costs, slots, n_steps, least, reservation)
    forms = dict.fromkeys(_forms(costs, slots, judge.steps(ring=False), least))
    judged_forms = [(judge.seconds(form), form) for form in forms]
    # Where states lie far apart, one step to the side is worth a look for few of them.
    far = (
        sorted(judged_forms, key=lambda pair: pair[0])[:_PREDICTED]
        if judge.steps(ring=False) > _NEAR
        else []
    )
    for _, form in far:
        if form.tail is not None and form.shift is None:
            moved = (replace(form, shift=shift) for shift in (0, 1))
            judged_forms += [(judge.seconds(other), other) for other in moved]
    if not judged_forms:
        return fallback
    best, predicted = _best(judged_forms, costs, slots, n_steps, reservation)
    sweep = best.sweep(costs, slots, n_steps, reservation)
    if n_steps <= _SHORT:
        sweep = _polish(sweep, costs, n_steps, predicted.makespan_s)
        predicted = timed(sweep, costs, n_steps)
    paper = interval(costs, slots, n_steps)
    if min(predicted.makespan_s, paper.makespan_s) >= fallback.use.makespan_s:
        return fallback
    if paper.makespan_s < predicted.makespan_s:
        return replace(paper, note=f"The paper's rule. {paper.note}")
    return Draft(
        partial(sweep.schedule, n_steps),
        predicted,
        note=_note(best),
        parameters={"spacing": best.spacing, "tail": -1 if best.tail is None else best.tail},
    )


def _best(
    judged: list[tuple[float, Form]],
    costs: Costs,
    slots: int,
    n_steps: int,
    reservation: Reservation,
) -> tuple[Form, Simulation]:
    """Return the form to use and its prediction: those judged best, predicted in full."""
    tier = costs.tier
    assert tier is not None
    judged = sorted(judged, key=lambda pair: pair[0])
    share = _AS_GOOD if tier.write_overhead_s + tier.read_overhead_s else 0.0
    near = [form for seconds, form in judged if seconds <= judged[0][0] * (1 + share)]
    # The judgement of a part may err by more than the forms differ.
    plain = [form for _, form in judged if not form.backlog]
    waiting = [form for _, form in judged if form.backlog]
    shortlist = dict.fromkeys(plain[:_PREDICTED] + waiting[:_PREDICTED])
    if share:
        shortlist[max(near, key=lambda form: form.spacing)] = None
    predictions = {form: prediction(form, costs, slots, n_steps, reservation) for form in shortlist}
    best = min(predictions, key=lambda form: predictions[form].makespan_s)
    if share:
        # Measured overheads are never exact, and where they weigh, spacings
        # differ little: of forms as good as the best, the one with the fewest
        # transfers, unless the paper's rule would be better than that.
        enough_s = predictions[best].makespan_s * (1 + share)
        enough_s = min(enough_s, interval(costs, slots, n_steps).makespan_s)
        as_good = [form for form in predictions if predictions[form].makespan_s <= enough_s]
        best = max(as_good, key=lambda form: form.spacing, default=best)
    return best, predictions[best]


@dataclass(frozen=True, slots=True)
class _Judge:
    """Times forms on a part of the steps.

    The two ends, where slots are plenty, would flatter a short run; what a
    long one costs is in the difference of two.
    """

    costs: Costs
    slots: int
    n_steps: int
    least: float
    reservation: Reservation

    def steps(self, *, ring: bool) -> int:
        """Return on how many steps forms are judged: enough for both ends and a steady middle."""
        spacing = max(self.least, streaming_spacing(self.costs))
        ends = 4 * (self.slots if ring else min(self.slots, math.ceil(spacing) + 2))
        enough = max(_JUDGED_STEPS, int(8 * spacing) + ends)
        if native.LIBRARY is None:
            enough = min(enough, SIMULATED)
        return min(self.n_steps, enough)

    def seconds(self, form: Form) -> float:
        """Return the form's makespan on a part of the steps, extended to all of them."""
        part = self.steps(ring=form.tail is None)
        if form.backlog:  # both parts need the whole of it
            part = min(self.n_steps, 2 * form.ends(self.slots) + part)
        if part == self.n_steps:
            return self._taken(form, self.costs, part)
        tier, *others = self.costs.tiers
        costs = replace(self.costs, tiers=(replace(tier, capacity_states=None), *others))
        whole = self._taken(form, costs, part)
        span = max(1, round(max(1, round(part / 3 / form.spacing)) * form.spacing))
        if span >= part:
            return whole * self.n_steps / part
        less = self._taken(form, costs, part - span)
        # More steps take no less, however the ends of a short run fall.
        return whole + (self.n_steps - part) * max(0.0, whole - less) / span

    def _taken(self, form: Form, costs: Costs, n_steps: int) -> float:
        return run_form(form, costs, self.slots, self.reservation, n_steps).makespan_s


def _note(form: Form) -> str:
    every = f"A state is written every {form.spacing:.4g} steps"
    if form.tail is None:
        return f"{every}; the fast slots are a ring that keeps the last states."
    return f"{every}; the last {form.tail} steps are reversed from fast slots."


def _forms(costs: Costs, slots: int, n_steps: int, least: float) -> Iterator[Form]:
    """Yield the candidates worth a simulation."""
    rho = max(1.0, least, costs.rho)
    steady = max(least, streaming_spacing(costs))
    spacings = {rho, steady, *(rho * f for f in (1.15, 1.35, 1.7, 2.0, 3.0))}
    if steady > rho:
        spacings |= {steady * f for f in (0.8, 0.9, 0.95)}
    # Among the states kept to the end a read hides behind turns alone.
    end = max(rho, costs.tiers[0].read_s / max(costs.turn_s, 1e-12))
    spacings |= set(_thrifty(costs, slots, steady))
    if native.available():
        # Those that slower tiers would try: a faster one never makes a plan slower.
        spacings.update(g for g in SPACINGS if rho < g <= _SLOWER * steady)
    for spacing in sorted(spacings):
        if spacing >= n_steps:
            continue
        if spacing == 1.0:  # every state is stored: no ring is needed, and fewer actions
            yield Form(spacing, 1)
        if rho <= slots:
            yield Form(spacing, None)
            if end > spacing:
                yield Form(spacing, None, end_spacing=end)
        if rho > slots - 2:
            if costs.rho > slots - 2 and spacing <= 2 * steady:
                for tail, backlog in product(_tails(spacing, slots, n_steps), _backlogs(slots)):
                    yield Form(spacing, tail, backlog=backlog)
            for tail in _tails(spacing, slots, n_steps):
                for shift in (None, 0, 1) if n_steps <= _NEAR else (None,):
                    yield Form(spacing, tail, shift)


def _thrifty(costs: Costs, slots: int, steady: float) -> list[float]:
    """Return the spacings that cost least when transfers burden the computing thread."""
    tier = costs.tier
    assert tier is not None
    overhead = (tier.write_overhead_s + tier.read_overhead_s) / costs.forward_step_s
    if overhead <= 0:
        return []
    wider = [steady * 1.25**k for k in range(40)] + [float(math.ceil(steady) + k) for k in range(4)]

    def per_step(spacing: float) -> float:
        low, part = math.floor(spacing), spacing - math.floor(spacing)
        recomputed = (1 - part) * nu(low, slots) + part * nu(low + 1, slots)
        return (recomputed + overhead) / spacing

    return sorted(wider, key=per_step)[:4]


def _tails(spacing: float, slots: int, n_steps: int) -> list[int]:
    """Return lengths of the tail: Revolve's complete lengths, and fractions of the spacing."""
    if n_steps <= _SHORT:
        return list(range(1, n_steps))
    per_step = 1 + nu(math.ceil(spacing), slots) / spacing
    most = int(per_step) + 2
    # The best is near the last ones; where there are many, only some of the others.
    few = {most // k for k in range(1, _TAILS)} | set(range(max(1, most - _TAILS), most + 1))
    tails = {beta(slots, r) for r in (range(1, most + 1) if most <= 2 * _TAILS else few) if r}
    tails |= {int(spacing * f) for f in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)}
    if n_steps <= _NEAR:
        tails |= {int(tail + spacing * k) for tail in tuple(tails) for k in (-1, 1)}
    return sorted(tail for tail in tails if 0 < tail < n_steps)


def _backlogs(slots: int) -> tuple[int, ...]:
    """Return how many states may wait for the tier before a tail: some slots stay free."""
    most = min(_BACKLOG, slots - 2)
    return tuple(sorted({k for k in (1, 2, 3, 4, 6, most // 2, most) if 0 < k < slots}))


def _polish(sweep: Sweep, costs: Costs, n_steps: int, best_s: float) -> Sweep:
    """Move single positions of a short plan as long as that helps."""
    improved = True
    while improved:
        improved = False
        # Not state 0: leaning on the caller's copy of it would be a slot uncounted.
        for i in range(1, n_steps - 1):
            for other in (
                replace(sweep, extra=sweep.extra ^ {i}),
                replace(sweep, skip=sweep.skip ^ {i}),
            ):
                seconds = timed(other, costs, n_steps).makespan_s
                if seconds < best_s * (1 - 1e-12):
                    sweep, best_s, improved = other, seconds, True
    return sweep
