"""Equal segments, as `torch.utils.checkpoint.checkpoint_sequential` has them."""

from __future__ import annotations

from ...actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from ...errors import ArgumentError, BudgetError
from ...model.stages import StageCosts
from ...support.units import format_bytes
from .memory import use_of


def too_small(planner: str, limit: int | None, least: int) -> BudgetError:
    """Return the error of a limit that nothing fits."""
    return BudgetError.below(
        f"memory={limit} bytes < {least} bytes ({format_bytes(least)}), the smallest limit that "
        f"planner {planner!r} works within; raise the limit",
        least,
    )


def _segments(costs: StageCosts, count: int) -> list[Action]:
    """Return the actions of `count` segments, the last taped at once with the loss."""
    loss = len(costs.stages)
    length = loss // count
    starts = [k * length for k in range(count)]
    actions: list[Action] = []
    for start in starts[:-1]:
        actions += [Save(start)] if start else []
        actions.append(Advance(start, start + length))
    last = starts[-1]
    actions += [Tape(i) for i in range(last, loss + 1)]
    actions.append(EndForward())
    actions += [Reverse(i) for i in range(loss, last - 1, -1)]
    for start in reversed(starts[:-1]):
        stop = start + length
        actions.append(Load(start))
        actions += [Free(start)] if start else []
        actions += [Tape(i) for i in range(start, stop)]
        actions += [Reverse(i) for i in range(stop - 1, start - 1, -1)]
    return actions


def _counts(stages: int) -> list[int]:
    """Return the numbers of segments to try: all of them, or of long chains each 4 % more."""
    if stages <= 1000:
        return list(range(1, stages + 1))
    counts = [1]
    while counts[-1] < stages:
        counts.append(min(stages, counts[-1] + 1 + counts[-1] // 25))
    return counts


def periodic(costs: StageCosts, limit: int | None, segments: int | None) -> list[Action]:
    """Return the fastest schedule of equal segments within a limit, or of so many segments."""
    most = len(costs.stages)
    if segments is not None and segments > most:
        raise ArgumentError(f"segments={segments} must be at most the {most} stages")
    counts = _counts(most) if segments is None else [segments]
    found = [(use_of(actions, costs), actions) for actions in (_segments(costs, k) for k in counts)]
    fitting = [(use, actions) for use, actions in found if limit is None or use.peak_bytes <= limit]
    if not fitting:
        raise too_small("periodic", limit, min(use.peak_bytes for use, _ in found))
    return min(fitting, key=lambda pair: (pair[0].makespan_s, pair[0].peak_bytes))[1]
