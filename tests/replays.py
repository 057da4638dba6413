"""A short notation for actions, so that the whole of a plan can be read at a glance.

==============  ==================================================
`2>5`           Advance(2, 5)
`T4`, `R4`      Tape(4), Reverse(4)
`S2 L2 F2`      Save(2), Load(2), Free(2)
`O2 P2 G2`      Offer(2), Put(2), Get(2)
`E2 D2`         Evict(2), Drop(2)
`a3`            Await(3): of the transfer with token 3
`P2t`, `P2@1`   of a tape; in the tier with index 1
`|`             EndForward()
==============  ==================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from multistage.actions import (
    Action,
    Advance,
    Answer,
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
    Schedule,
    Tape,
    drive,
)
from multistage.planners import Plan
from multistage.schedule.simulation import simulate

_LETTERS = {Tape: "T", Reverse: "R", Save: "S", Load: "L", Free: "F"}
_MOVES = {Offer: "O", Put: "P", Get: "G", Evict: "E", Drop: "D"}


def short(actions: Iterable[Action]) -> str:
    """Return actions in the notation of this module.

    Examples
    --------
    >>> short([Save(0), Advance(0, 2), Tape(2), Put(2, tier=1), EndForward(), Await(0)])
    'S0 0>2 T2 P2@1 | a0'
    """
    return " ".join(_one(action) for action in actions)


def _one(action: Action) -> str:
    match action:
        case Advance(start, stop):
            return f"{start}>{stop}"
        case EndForward():
            return "|"
        case Await(token):
            return f"a{token}"
        case Offer(step, tier, tape) | Put(step, tier, tape) | Get(step, tier, tape):
            return f"{_MOVES[type(action)]}{step}" + "t" * tape + f"@{tier}" * bool(tier)
        case Evict(step, tier, tape) | Drop(step, tier, tape):
            return f"{_MOVES[type(action)]}{step}" + "t" * tape + f"@{tier}" * bool(tier)
        case _:
            return f"{_LETTERS[type(action)]}{action.step}"


def actions_of(text: str) -> list[Action]:
    """Return the actions that a text in the notation of this module names.

    Examples
    --------
    >>> short(actions_of("T0 P0t@1 0>2 | a0"))
    'T0 P0t@1 0>2 | a0'
    """
    return [_read(word) for word in text.split()]


def _read(word: str) -> Action:
    if word == "|":
        return EndForward()
    if ">" in word:
        start, _, stop = word.partition(">")
        return Advance(int(start), int(stop))
    place, _, tier = word[1:].partition("@")
    step = int(place.removesuffix("t"))
    if word[0] == "a":
        return Await(step)
    for kind, letter in _MOVES.items():
        if letter == word[0]:
            return kind(step, int(tier or 0), place.endswith("t"))
    return next(kind(step) for kind, letter in _LETTERS.items() if letter == word[0])


def replay(plan: Plan) -> list[Action]:
    """Return the actions of a uniform plan in virtual time."""
    actions: list[Action] = []
    schedule = plan.schedule()
    simulate(schedule, plan.n_steps, plan.costs, plan.slots, trace=actions.append, checked=False)
    return actions


def driven(schedule: Schedule) -> list[Action]:
    """Return the actions of a schedule whose offers are taken and whose transfers succeed."""
    actions: list[Action] = []
    tokens = 0
    for action, send in drive(schedule):
        actions.append(action)
        if isinstance(action, Offer | Put | Get):
            send(tokens)
            tokens += 1
        else:
            send(True if isinstance(action, Await) else None)
    return actions


def logged(schedule: Schedule, log: list[tuple[Action, Answer]]) -> Schedule:
    """Yield the actions of a schedule; note each with its answer."""
    answer: Answer = None
    while True:
        try:
            action = schedule.send(answer)
        except StopIteration:
            return
        answer = yield action
        log.append((action, answer))
