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
and the fastest is taken; so the plan is never slower than Revolve.  Not
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

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from ... import native
from ...model.costs import Costs
from ...schedule.simulation import Simulation
from ..base import Plan, require_steps
from ..single.binomial import beta, nu
from ..single.revolve import plain_revolve
from .form import SIMULATED, Form, prediction, run_form, timed
from .interval import interval
from .reserve import Reservation
from .sweep import Sweep

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


def streaming(costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Return the streaming plan, or Revolve's where streaming cannot pay.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> plan = streaming(costs, slots=20, n_steps=10_000)
    >>> round(plan.makespan_s / plan.n_steps, 2), round(plan.recompute_factor, 2)
    (3.75, 1.75)
    """
    n = require_steps(n_steps, "streaming")
    fallback = plain_revolve("streaming", costs, slots, n, "Streaming cannot pay here")
    tier = costs.tier
    # Where every state fits the slots, nothing can be spared.
    if tier is None or n <= max(2, slots + 1) or tier.capacity_states == 0:
        return fallback
    reservation = Reservation(costs)
    least = 1.0 if tier.capacity_states is None else n / tier.capacity_states
    judge = _Judge(costs, slots, n, least, reservation)
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
    best, predicted = _best(judged_forms, costs, slots, n, reservation)
    sweep = best.sweep(costs, slots, n, reservation)
    if n <= _SHORT:
        sweep = _polish(sweep, costs, n, predicted.makespan_s)
        predicted = timed(sweep, costs, n)
    paper = interval(costs, slots, n)
    if min(predicted.makespan_s, paper.makespan_s) >= fallback.makespan_s:
        return fallback
    if paper.makespan_s < predicted.makespan_s:
        return replace(paper, planner="streaming", note=f"The paper's rule. {paper.note}")
    return Plan.predicted(
        "streaming",
        costs,
        slots,
        n,
        partial(sweep.schedule, n),
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
            deep = slots - math.ceil(spacing)  # leaves the slots an interval needs
            for depth in {4, max(1, deep)} if steady > rho else {4}:
                yield Form(spacing, None, depth=depth)
                if rho > slots - 2:
                    yield Form(spacing, None, depth=1)
                    yield Form(spacing, None, depth=depth, reserve=False)
                if end > spacing:
                    yield Form(spacing, None, depth=depth, end_spacing=end)
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
