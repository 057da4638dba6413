"""Predict a long schedule from short ones: simulate, then extend along the period."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..schedule.simulation import Simulation

# Steps that are simulated in full: some 20 000 actions, a tenth of a second.
SIMULATED_STEPS = 4096


# Among so many numbers of periods one is found that is nearly whole.
_PHASES = 1024


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
    run: Callable[[int], Prediction], n_steps: int, *, period: float, head: int = 0
) -> Prediction:
    """Return the figures of a schedule of `n_steps` steps.

    Up to `SIMULATED_STEPS` steps, or a dozen periods beyond `head`, the
    schedule itself is run.  A longer one is in its steady state: its
    figures grow by the same amount with every whole number of periods, so two
    shorter runs are extended.

    Parameters
    ----------
    run : callable
        Returns the figures of a number of steps, each a run in virtual time.
    period : float
        Steps after which the schedule repeats, in the mean.
    head : int
        Steps at the ends that are not periodic.
    """
    enough = max(SIMULATED_STEPS, head + int(12 * period))
    if n_steps <= enough:
        return run(n_steps)
    # A span that holds nearly a whole number of periods, so that both short
    # runs end in the same phase as the long one.
    most = max(4, int(enough / (3 * period)))
    tried = range(max(1, most // 2, most - _PHASES), most + 1)
    periods = min(tried, key=lambda k: (_phase(k * period), -k))
    span = max(1, round(periods * period))
    repeats = -(-(n_steps - enough) // span)
    long_steps = n_steps - repeats * span
    return extended(run(long_steps - span), run(long_steps), repeats)


def extended(short: Prediction, long: Prediction, repeats: float) -> Prediction:
    """Return what so many more of the differences between two runs come to."""

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


def simulated(run: Simulation) -> Prediction:
    """Return the figures of one simulation."""
    return Prediction(
        run.makespan_s, run.forward_steps, run.peak_slots, run.writes, run.reads, run.stall_s
    )
