"""The actions of a schedule, and how one is driven.

A *schedule* is a lazy generator of actions.  The code that runs it (`check`, the
simulator, the executor) performs one action at a time and sends its answer
back into the generator:

==================  ==========================================================
action              answer
==================  ==========================================================
`Offer`             the transfer's token (int), or None when the tier refused
`Put`, `Get`        the transfer's token
`Await`, `Evict`    True, or False when the transfer failed: the checkpoint is
                    gone from that tier (and, for a `Get`, so is its slot)
all others          None
==================  ==========================================================

Transfers move a state or, where `tape` says so, a tape.

Tokens count the accepted transfers of a run from 0.  Because a schedule
decides from answers alone, it acts alike under the real clock and under the
simulator's virtual one.

`rules` defines which schedules are legal.

Examples
--------
Two steps with one slot: step 0 runs again before its adjoint.

>>> from multistage.schedule.rules import check
>>> schedule = [Save(0), Advance(0, 1), Tape(1), EndForward(), Reverse(1)]
>>> check([*schedule, Load(0), Tape(0), Reverse(0), Free(0)], n_steps=2, slots=1).forward_steps
3
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias

# Schedules make millions of actions, so these set their slots through the
# descriptors: the `__init__` that dataclass generates for a frozen value looks
# `object.__setattr__` up for each field and takes twice as long.


@dataclass(frozen=True, slots=True)
class Advance:
    """`Advance(3, 7)`: run steps 3, 4, 5, 6 from live state 3; state 7 is live."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tape:
    """`Tape(3)`: run step 3 keeping its tape; state 4 is live."""

    step: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """`Reverse(3)`: adjoint of step 3, from tape 3 if one is held, else from live state 3."""

    step: int


@dataclass(frozen=True, slots=True)
class Save:
    """`Save(3)`: keep live state 3 in a fast slot."""

    step: int


@dataclass(frozen=True, slots=True)
class Load:
    """`Load(3)`: make checkpoint 3, held in a fast slot, the live state; it stays held."""

    step: int


@dataclass(frozen=True, slots=True)
class Free:
    """`Free(3)`: give the fast slot of checkpoint 3 back."""

    step: int


@dataclass(frozen=True, slots=True)
class Offer:
    """`Offer(3)`: write state 3, live or held in a slot, to the tier if it has room.

    Answered by a token, or by None when as many transfers wait as the tier
    allows; never blocks.
    """

    step: int
    tier: int = 0
    tape: bool = False


@dataclass(frozen=True, slots=True)
class Put:
    """`Put(3)`: write state 3, live or held in a slot, to the tier, waiting for room."""

    step: int
    tier: int = 0
    tape: bool = False


@dataclass(frozen=True, slots=True)
class Get:
    """`Get(3)`: queue a read of checkpoint 3 from the tier into a fast slot."""

    step: int
    tier: int = 0
    tape: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """`Await(12)`: wait until transfer 12 is done."""

    token: int


@dataclass(frozen=True, slots=True)
class Evict:
    """`Evict(3)`: wait until checkpoint 3 is written to the tier, then give its fast copy back.

    It is the `Await` of that write, which needs no other, and the `Free` of the slot
    or, for a tape, its end in fast memory.
    """

    step: int
    tier: int = 0
    tape: bool = False


@dataclass(frozen=True, slots=True)
class Drop:
    """`Drop(3)`: free the tier's copy of checkpoint 3."""

    step: int
    tier: int = 0
    tape: bool = False


@dataclass(frozen=True, slots=True)
class EndForward:
    """The forward sweep is over: state n is live."""


def _set_directly(kind: type) -> None:
    first, *others = (getattr(kind, field.name).__set__ for field in fields(kind))

    def of_one(self: object, step: int) -> None:
        first(self, step)

    def of_two(self: object, start: int, stop: int) -> None:
        first(self, start)
        others[0](self, stop)

    def of_a_copy(self: object, step: int, tier: int = 0, tape: bool = False) -> None:
        first(self, step)
        others[0](self, tier)
        others[1](self, tape)

    def of_a_token(self: object, token: int) -> None:
        first(self, token)

    made = of_a_token if kind is Await else (of_one, of_two, of_a_copy)[len(others)]
    setattr(kind, "__init__", made)  # noqa: B010


for _kind in (Advance, Tape, Reverse, Save, Load, Free, Offer, Put, Get, Await, Evict, Drop):
    _set_directly(_kind)

Action: TypeAlias = (
    Advance
    | Tape
    | Reverse
    | Save
    | Load
    | Free
    | Offer
    | Put
    | Get
    | Await
    | Evict
    | Drop
    | EndForward
)
Answer: TypeAlias = int | bool | None
Schedule: TypeAlias = Generator[Action, Answer, None]


def drive(
    schedule: Schedule | Iterable[Action],
) -> Iterator[tuple[Action, Callable[[Answer], None]]]:
    """Yield each action with the function that takes its answer.

    Plain iterables of actions are static schedules: their answers are ignored.

    Examples
    --------
    >>> [action for action, answer in drive([Advance(0, 2), EndForward()])]
    [Advance(start=0, stop=2), EndForward()]
    """
    if not isinstance(schedule, Generator):
        for action in schedule:
            yield action, _ignore
        return
    reply: Answer = None

    def send(answer: Answer) -> None:
        nonlocal reply
        reply = answer

    try:
        action = next(schedule)
        while True:
            reply = None
            yield action, send
            action = schedule.send(reply)
    except StopIteration:
        return


def waited(transfer: Put | Get) -> Generator[Action, Answer, bool]:
    """Yield a transfer and the wait for it; return whether it arrived."""
    token = yield transfer
    assert token is not None
    return (yield Await(int(token))) is not False


def _ignore(_answer: Answer) -> None:
    return
