"""From the actions of a chain to those that the executor of a `Reversal` performs.

A chain counts its loss as a stage, and a tape holds the states beside it.  An executor runs no
loss, makes a tape that is used at once within `Reverse`, and knows nothing of what is in a tape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
