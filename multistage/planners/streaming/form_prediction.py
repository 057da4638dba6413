"""What a form of the streaming schedule takes, long ones by shorter ones of the same shape."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ... import native
from ...model.costs import Costs
from ..bound import lower_bound
from ..predict import SIMULATED_STEPS, Prediction, extended, predict
from .form import Form
from .reserve import Reservation
from .timed import timed

# Without the C core no more steps are judged than can be simulated.
SIMULATED = 16_384
# Rings of more slots, or of more than so many times the spacing, are timed by
# shorter ones, and wider spacings by narrower ones.
_LONG_RING, _PERIODS, _WIDE = 2048, 32, 256.0


def prediction(
    form: Form, costs: Costs, slots: int, n_steps: int, reservation: Reservation
) -> Prediction:
    """Return what a form takes over `n_steps` steps."""
    run = partial(run_form, form, costs, slots, reservation)
    found = predict(run, n_steps, period=form.spacing, head=form.ends(slots))
    return _at_least(found, costs, slots, n_steps)


def _at_least(found: Prediction, costs: Costs, slots: int, n_steps: int) -> Prediction:
    """Return a prediction that rests on shorter runs, not below what is possible."""
    least_s = lower_bound(costs, slots, n_steps)
    return replace(
        found,
        makespan_s=max(found.makespan_s, least_s),
        forward_steps=max(found.forward_steps, n_steps),
    )


def ring_prediction(form: Form, costs: Costs, slots: int, n_steps: int) -> Prediction:
    """Return what a ring takes over `n_steps` steps, though the tier be full before the end."""
    tier, reservation = costs.tier, Reservation(costs)
    assert tier is not None
    room = n_steps if tier.capacity_states is None else tier.capacity_states * form.spacing
    if room >= n_steps:
        return prediction(form, costs, slots, n_steps, reservation)

    capacity = tier.capacity_states or 0

    def run(states: int) -> Prediction:
        # Fewer states before the tier is full; what follows them is the same.
        left = replace(costs, tiers=(replace(tier, capacity_states=states), *costs.tiers[1:]))
        steps = n_steps - round((capacity - states) * form.spacing)
        return timed(form.sweep(left, slots, steps, reservation), left, steps, online=form.online)

    few = max(64, math.ceil(4 * slots / form.spacing) + 12)
    if capacity <= 2 * few:
        return run(capacity)
    found = extended(run(few), run(2 * few), capacity / few - 2)
    return _at_least(found, costs, slots, n_steps)


def run_form(
    form: Form, costs: Costs, slots: int, reservation: Reservation, n_steps: int
) -> Prediction:
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

        def shrunk(part: float) -> Prediction:
            end = form.end_spacing and form.end_spacing * part
            smaller = replace(form, spacing=form.spacing * part, end_spacing=end)
            fewer, steps = max(1, round(slots * part)), max(2, round(n_steps * part))
            faster = _faster(costs, part)
            return run_form(smaller, faster, fewer, Reservation(faster), steps)

    elif slots > max(_LONG_RING, _PERIODS * form.spacing):
        share = max(_LONG_RING, _PERIODS * form.spacing) / slots

        def shrunk(part: float) -> Prediction:
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
) -> Prediction:
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
