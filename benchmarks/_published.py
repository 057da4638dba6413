"""The planners as their papers have them: `interval` of ours may take longer intervals."""

from __future__ import annotations

import math
from dataclasses import replace

from multistage import PLANNERS, Costs
from multistage.planners import Plan
from multistage.planners.single.binomial import nu
from multistage.planners.streaming.interval import shortest_interval


def printed_factor(interval: int, slots: int) -> float:
    """Return the recompute factor R(I, s) as the paper draws it, without the forward sweep."""
    return (nu(interval, slots) + 1) / interval


def corrected_factor(interval: int, slots: int) -> float:
    """Return forward steps run / n in the steady state, the forward sweep included."""
    return 1 + nu(interval, slots) / interval


def paper_interval(costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Return the plan of the paper, I = ceil(rho), or Revolve's where it does not apply."""
    assert n_steps is not None
    made = shortest_interval(costs, slots, n_steps)
    longest = min(n_steps - 1, max(1, math.ceil(costs.rho - 1e-9)))
    if made is None or int(made.parameters["interval"]) > longest:
        return replace(PLANNERS["revolve"](costs, slots, n_steps), planner="interval")
    return made


PUBLISHED = {**PLANNERS, "interval": paper_interval}
