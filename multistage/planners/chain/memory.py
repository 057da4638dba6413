"""What a schedule of a heterogeneous chain takes, and the schedules that need no search.

Those of a solved program, those that keep every tape, and equal segments, as
`torch.utils.checkpoint.checkpoint_sequential` has them.  The judge is the simulator, with
the accounting in bytes: it knows nothing of how schedules are made.

`performed` makes of a chain's actions those that the executor of a `Reversal` performs.  A
chain counts its loss as a stage, and a tape holds the states beside it.  An executor runs no
loss, makes a tape that is used at once within `Reverse`, and knows nothing of what is in a
tape.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache

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


def performed(actions: Iterable[Action], n_steps: int) -> Iterator[Action]:
    """Yield the actions of a chain of `n_steps` steps and a loss as an executor performs them.

    The loss, step `n_steps`, is left out.  A tape that is used at once is not made
    before: `Reverse` does both.  A state that the chain takes from within a tape is saved
    beside it.
    """
    left = [action for action in actions if not is_loss(action, n_steps)]
    return _from(left, 0, _within(left), set())


def _from(
    left: Sequence[Action], start: int, within: dict[int, set[int]], beside: set[int]
) -> Iterator[Action]:
    """Yield what is performed from a place on; `beside` are the states held beside tapes."""
    saved: set[int] = set()  # by the plan itself, and not in `beside`
    for action in left[:start]:
        _follow(action, saved)
    saved -= beside
    k = start
    while k < len(left):
        action, after = left[k], left[k + 1] if k + 1 < len(left) else None
        k += 1
        match action:
            case Tape(step) if after == Reverse(step) and step + 1 not in within:
                continue
            case Save(step) | Free(step) if step in beside:
                continue
            case Reverse(step) if step + 1 in beside:
                beside.remove(step + 1)
                yield Free(step + 1)
        _follow(action, saved)
        yield action
        if isinstance(action, Tape) and (k - 1) in within.get(action.step + 1, ()):
            beside.add(action.step + 1)
            if action.step + 1 not in saved:  # else it stays where it is
                yield Save(action.step + 1)
            saved.discard(action.step + 1)


def is_loss(action: Action, n_steps: int) -> bool:
    """Whether an action is of the loss, which an executor does not run."""
    return isinstance(action, Tape | Reverse) and action.step == n_steps


def _within(actions: Sequence[Action]) -> dict[int, set[int]]:
    """Return by state the places of the tapes from within which it is loaded."""
    made: dict[int, int] = {}
    saved: set[int] = set()
    found: dict[int, set[int]] = {}
    for k, action in enumerate(actions):
        match action:
            case Tape(step):
                made[step] = k
            case Reverse(step):
                made.pop(step, None)
            case Load(step) if step and step not in saved and step - 1 in made:
                found.setdefault(step, set()).add(made[step - 1])
        _follow(action, saved)
    return found


def _follow(action: Action, saved: set[int]) -> None:
    """Note what an action does to the set of saved states."""
    match action:
        case Save(step) | Get(step, _, False):
            saved.add(step)
        case Free(step) | Evict(step, _, False):
            saved.discard(step)


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
    """Return what a schedule takes, without a timeline; the loss is stage `len(costs.stages)`.

    Raises
    ------
    ScheduleError
        Naming the first illegal action, or what was not reversed or given back at the end.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts((Stage("a", 1.0, 2.0, 10, 30),), 5)
    >>> use = use_of([Tape(0), Tape(1), EndForward(), Reverse(1), Reverse(0)], costs)
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
    on that tape holds it.

    Parameters
    ----------
    held : iterable of int
        States that are saved already.
    inside : container of int
        States that need not be saved.
    ended : bool
        Whether the forward sweep has ended before; if not, it does with the first adjoint.
    """
    # What is to do after the right part of a pair: reverse a stage, or load a
    # state for the left part.
    after: list[tuple[str, int]] = []
    saved = set(held)
    for s, t, k in trace:
        if k != s and s != t:
            if s not in saved and s not in inside:
                saved.add(s)
                yield Save(s)
            yield Advance(s, k)
            after.append(("load", s))
            continue
        if s in saved:
            saved.remove(s)
            yield Free(s)
        yield Tape(s)
        if s != t:
            after.append(("reverse", s))
            continue
        if not ended:
            ended = True
            yield EndForward()
        yield Reverse(s)
        while after:
            what, i = after.pop()
            if what == "load":
                yield Load(i)
                break
            yield Reverse(i)


def store_all(costs: StageCosts) -> list[Action]:
    """Return the schedule that keeps every tape."""
    loss = len(costs.stages)
    forward: list[Action] = [Tape(i) for i in range(loss + 1)]
    return [*forward, EndForward(), *(Reverse(i) for i in range(loss, -1, -1))]


@lru_cache(maxsize=64)
def plain_use(costs: StageCosts) -> Simulation:
    """Return what the schedule that keeps every tape takes."""
    return use_of(store_all(costs), costs)


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
