"""What a schedule of a heterogeneous chain takes, and the schedules that need no search.

Those of a solved program, those that keep every tape, and equal segments, as
`torch.utils.checkpoint.checkpoint_sequential` has them.  The judge is the simulator, with
the accounting in bytes: it knows nothing of how schedules are made.

The solved programs count the loss as one more stage, of no size; schedules do not: it is the
caller's, at `EndForward`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from ...actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from ...errors import ArgumentError, BudgetError
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...schedule.simulation import Simulation, simulate
from ...support.units import format_bytes
from ..single.segments import taped_segment
from .sizes import way_of


def left_to_reverse(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield actions; a tape that is used at once is left to its `Reverse` to make."""
    made: Tape | None = None
    for action in actions:
        if made is not None and action != Reverse(made.step):
            yield made
        made = action if isinstance(action, Tape) else None
        if made is None:
            yield action
    if made is not None:
        yield made


def shifted(action: Action, by: int) -> Action:
    """Return an action on steps and states `by` further on."""
    match action:
        case Advance(start, stop):
            return Advance(start + by, stop + by)
        case Await() | EndForward():
            return action
        case Offer() | Put() | Get() | Evict() | Drop():
            return type(action)(action.step + by, action.tier, action.tape)
        case _:
            return type(action)(action.step + by)


def use_of(actions: Iterable[Action], costs: StageCosts, tiers: Sequence[Tier] = ()) -> Simulation:
    """Return what a schedule takes, without a timeline.

    Raises
    ------
    ScheduleError
        Naming the first illegal action, or what was not reversed or given back at the end.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts((Stage("a", 1.0, 2.0, 10, 30),), 5)
    >>> use = use_of([Tape(0), EndForward(), Reverse(0)], costs)
    >>> use.makespan_s, use.peak_bytes, use.forward_steps
    (3.0, 45, 1)
    """
    return simulate(actions, None, costs, tiers=tiers, checked=False)


def actions_of(
    trace: Iterable[tuple[int, int, int]],
    *,
    held: Iterable[int] = (),
    inside: Container[int] = (0,),
    ended: bool = False,
) -> Iterator[Action]:
    """Yield the actions of a trace.

    A saved state is freed when the tape that starts from it is made: from then
    on that tape holds it.  A tape that is used at once is left to its `Reverse`.

    Parameters
    ----------
    held : iterable of int
        States that are saved already.
    inside : container of int
        States that need not be saved.
    ended : bool
        Whether the forward sweep has ended before; if not, the first stage to be reversed is
        the loss, and it ends there.
    """
    # What is to do after the right part of a pair: reverse a stage, or load a
    # state for the left part.
    after: list[tuple[str, int]] = []
    saved = set(held)
    for s, t, k in trace:
        if way_of(s, t, k) is None:
            if s not in saved and s not in inside:
                saved.add(s)
                yield Save(s)
            yield Advance(s, k)
            after.append(("load", s))
            continue
        if s in saved:
            saved.remove(s)
            yield Free(s)
        if s != t:
            yield Tape(s)
            after.append(("reverse", s))
            continue
        yield Reverse(s) if ended else EndForward()
        ended = True
        while after:
            what, i = after.pop()
            if what == "load":
                yield Load(i)
                break
            yield Reverse(i)


def ways_of(trace: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return by which ways a trace keeps the tapes of all stages but the loss; 0 is the whole."""
    ways = [way for s, t, k in sorted(trace) if (way := way_of(s, t, k)) is not None]
    return ways[:-1]


def too_small(planner: str, limit: int | None, least: int) -> BudgetError:
    """Return the error of a limit that nothing fits."""
    return BudgetError.below(
        f"memory={limit} bytes < {least} bytes ({format_bytes(least)}), the smallest limit that "
        f"planner {planner!r} works within; raise the limit",
        least,
    )


def _segments(costs: StageCosts, count: int) -> list[Action]:
    """Return the actions of `count` segments, the last taped in the forward sweep."""
    stages = len(costs.stages)
    length = stages // count
    starts = [k * length for k in range(count)]
    actions: list[Action] = []
    for start in starts[:-1]:
        actions += [Save(start)] if start else []
        actions.append(Advance(start, start + length))
    last = starts[-1]
    actions += map(Tape, range(last, stages))
    actions.append(EndForward())
    actions += map(Reverse, reversed(range(last, stages)))
    for start in reversed(starts[:-1]):
        stop = start + length
        actions.append(Load(start))
        actions += [Free(start)] if start else []
        actions += taped_segment(start, stop)
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
