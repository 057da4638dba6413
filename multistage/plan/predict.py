"""Predict a long schedule from short ones: simulate, then extend along the period."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..actions import Schedule
from ..costs import Costs
from ..simulate import Simulation, simulate

# Steps that are simulated in full: some 20 000 actions, a tenth of a second.
SIMULATED_STEPS = 4096


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures of a plan that come from running its schedule in virtual time."""

    makespan_s: float
    forward_steps: int
    peak_slots: float
    writes: int
    reads: int
    stall_s: float


def predict(
    make: Callable[[int], Schedule],
    costs: Costs,
    slots: int,
    n_steps: int,
    *,
    period: float,
    head: int = 0,
) -> Prediction:
    """Return the figures of `make(n_steps)`.

    Up to `SIMULATED_STEPS` steps, or a dozen periods beyond `head`, the
    schedule itself is simulated.  A longer one is in its steady state: its
    figures grow by the same amount with every whole number of periods, so two
    shorter simulations are extended.

    Parameters
    ----------
    make : callable
        Returns a fresh schedule for a number of steps.
    period : float
        Steps after which the schedule repeats, in the mean.
    head : int
        Steps at the ends that are not periodic.
    """
    enough = max(SIMULATED_STEPS, head + int(12 * period))
    if n_steps <= enough:
        return _of(simulate(make(n_steps), n_steps, costs, slots))
    # A span that holds nearly a whole number of periods, so that both short
    # runs end in the same phase as the long one.
    most = max(4, int(enough / (3 * period)))
    periods = min(range(max(1, most // 2), most + 1), key=lambda k: (_phase(k * period), -k))
    span = max(1, round(periods * period))
    repeats = -(-(n_steps - enough) // span)
    long_steps = n_steps - repeats * span
    long = simulate(make(long_steps), long_steps, costs, slots)
    short_steps = long_steps - span
    short = simulate(make(short_steps), short_steps, costs, slots, checked=False)

    def grown(name: str) -> float:
        a, b = getattr(long, name), getattr(short, name)
        return float(a + repeats * (a - b))

    return Prediction(
        grown("makespan_s"),
        int(grown("forward_steps")),
        long.peak_slots,
        int(grown("writes")),
        int(grown("reads")),
        max(0.0, grown("stall_s")),
    )


def _phase(length: float) -> float:
    return round(abs(length - round(length)), 6)


def _of(run: Simulation) -> Prediction:
    return Prediction(
        run.makespan_s, run.forward_steps, run.peak_slots, run.writes, run.reads, run.stall_s
    )
