"""What makes a schedule legal.

The rules, enforced by `Rules` and nowhere else:

1. One live state exists at a time.  `Advance`, `Tape` and a `Reverse` without
   a tape need the live state of their step; `Reverse` without a tape uses it up.
2. Adjoint steps run n-1, n-2, ..., 0, all after the one `EndForward`, at
   which state n is live.  The loss is the caller's, and so are the bytes of that state.
3. A fast slot is taken by `Save` and `Get`, and by an accepted `Offer` or
   `Put` of a state that no slot holds (a staging slot, given back by its
   `Await`).  `Free` gives a saved or read slot back.
   Each tape beyond the first takes a slot too: one tape is working memory, as
   the live state is.  A `Reverse` without a tape makes one first, so it needs
   a slot for it while other tapes are held; where a state is its own tape, the
   live state itself serves and needs none.  Where such a state is overwritten
   in place, a held tape is reversed through the live arrays: a live state
   before that step is put aside meanwhile, in a slot.
4. A slot under a write is pinned and a slot under a read is unreadable until
   the transfer's `Await`.  Legality is judged by tokens, never by times: a
   schedule that is legal only because a transfer happens to be fast is illegal.
5. State 0 belongs to the caller: `Load(0)` works at any time, slot or not.
   Planners save it like any other and use this only when it was lost.
6. At the end nothing is left: no slot, no tape, no copy in a tier, no token.
7. Where only the latest tape exists (`one_tape`), no step runs and no state is
   loaded between a `Tape` and its `Reverse`, and no tape travels.
8. Tapes travel as states do, where the action says so.  A tape under a write is
   pinned and a tape under a read does not serve its `Reverse`; it takes its room from
   its `Get` on.  `Evict` is the `Await` of a write from the fast copy, and gives that
   copy back.

Room is counted in one of two ways.  In slots, as above: steps are alike, and a tape
serves by itself.  In bytes (`accounting`): stages differ, a tape includes the state that
its stage makes, so `Load` finds it there, and a held tape pins the state it starts from,
so `Reverse` needs both.  (Operators whose tapes cannot be looked into need a `Save` too: it
takes no bytes besides.)  A tape made after `EndForward` stays in fast memory, as does the
state it starts from, until its `Reverse`: neither its `Put` nor an `Evict` gives room back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..actions import Action, Answer, Await, Evict, Get, Offer, Put, Schedule, drive
from ..errors import ArgumentError
from ..model.stages import StageCosts
from ..support.values import number, several, shown, whole
from .accounting import require_whole
from .machine import Rules as Rules

_ANSWERED = frozenset({Offer, Put, Get, Await, Evict})


@dataclass(frozen=True, slots=True)
class Legality:
    """What a legal schedule was seen to use.

    Attributes
    ----------
    forward_steps : int
        Steps run by `Advance` and `Tape`.
    peak_slots : float
        Most fast slots taken at any moment.
    tier_peak : dict
        Most states each tier held, or bytes where bytes were counted.
    transfers : int
        Accepted transfers, both directions.
    actions : int
        Actions in all.
    peak_bytes : int or None
        Most bytes in fast memory, where bytes were counted.
    """

    forward_steps: int
    peak_slots: float
    tier_peak: dict[int, float]
    transfers: int
    actions: int
    peak_bytes: int | None = None


def run_arguments(
    schedule: Schedule | Iterable[Action], n_steps: int | None, slots: float
) -> tuple[int | None, float]:
    """Return the number of steps and of slots, in numbers of Python's.

    Raises
    ------
    ArgumentError
        If one of the three is out of range.
    """
    if not several(schedule):
        raise ArgumentError(f"schedule={shown(schedule)} must be an iterable of actions")
    if n_steps is not None:
        n_steps = whole(n_steps, "n_steps", 1)
    slots = number(slots, "slots")
    if not slots >= 0:
        raise ArgumentError(f"slots={slots} must not be negative")
    return n_steps, slots


def check(
    schedule: Schedule | Iterable[Action],
    n_steps: int | None = None,
    slots: float = math.inf,
    *,
    tape_slots: float = 1.0,
    state_is_tape: bool = False,
    in_place: bool = False,
    one_tape: bool = False,
    tier_slots: dict[int, int] | None = None,
    costs: StageCosts | None = None,
    memory_bytes: int | None = None,
    tier_bytes: dict[int, int] | None = None,
    accept: Callable[[Offer], bool] | None = None,
    survive: Callable[[int], bool] | None = None,
) -> Legality:
    """Prove a schedule legal and return what it used.

    Fast memory is counted in slots or, where `costs` are those of the stages of a
    chain, in bytes.

    Parameters
    ----------
    schedule : generator or iterable of actions
        Consumed to its end.
    n_steps : int or None
        Steps to reverse, at least 1; None if the schedule decides, or `costs` do.
    slots : float
        Fast slots it may take (staging and landing slots included).
    tape_slots : float
        Slots each tape beyond the first takes.
    state_is_tape, in_place, one_tape : bool
        What the chain is like, see `Chain` and rules 3 and 7.  By default tapes
        are not states, and as many as fit are held.
    tier_slots : dict, optional
        Capacity of tiers in states, where bounded.
    costs : StageCosts, optional
        Of the chain; goes with none of `slots`, `tape_slots`, the chain's kind and
        `tier_slots`.
    memory_bytes : int, optional
        Fast memory where bytes are counted, state 0 included; no limit if None.
    tier_bytes : dict, optional
        Capacity of tiers in bytes, where bounded and bytes are counted.
    accept : callable, optional
        Decides each `Offer`; all are taken when absent.
    survive : callable, optional
        Decides by token whether a transfer succeeds; all do when absent.

    Raises
    ------
    ScheduleError
        Naming the first illegal action.
    ArgumentError
        If `n_steps`, `slots` or another number is out of range.

    Examples
    --------
    >>> from multistage.actions import Drop, EndForward, Evict, Reverse, Tape
    >>> used = check([Tape(0), EndForward(), Reverse(0)], n_steps=1, slots=0)
    >>> used.forward_steps
    1

    A chain of two stages; the first tape goes to the tier and comes back:

    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(2, Stage("a", 1.0, 2.0, output_bytes=10, tape_bytes=30), 5)
    >>> there = [Tape(0), Put(0, tape=True), Tape(1), Evict(0, tape=True), EndForward()]
    >>> back = [Get(0, tape=True), Await(1), Reverse(1), Reverse(0)]
    >>> back += [Drop(0, tape=True)]
    >>> check([*there, *back], costs=costs, memory_bytes=85).peak_bytes
    85
    """
    n_steps, slots = run_arguments(schedule, n_steps, slots)
    tape_slots = number(tape_slots, "tape_slots")
    if not tape_slots >= 0:
        raise ArgumentError(f"tape_slots={tape_slots} must not be negative")
    limits = _capacities("tier_slots", tier_slots, "states")
    if costs is None:
        if memory_bytes is not None or tier_bytes is not None:
            raise ArgumentError("memory_bytes and tier_bytes need costs, the StageCosts of a chain")
        rules = Rules(
            n_steps,
            slots,
            tape_slots,
            limits,
            state_is_tape=state_is_tape,
            in_place=in_place,
            one_tape=one_tape,
        )
    else:
        if limits or slots != math.inf or state_is_tape or in_place or one_tape:
            raise ArgumentError(
                "with costs of stages bytes are counted, by memory_bytes and tier_bytes; leave out "
                "slots, tier_slots and the kind of the chain"
            )
        rules = byte_rules(costs, n_steps, memory_bytes, tier_bytes)
    return _checked(schedule, rules, accept, survive)


def byte_rules(
    costs: StageCosts,
    n_steps: int | None,
    memory_bytes: int | None,
    tier_bytes: dict[int, int] | None,
) -> Rules:
    """Return a machine that counts bytes, its arguments looked at.  Raises ArgumentError."""
    if not isinstance(costs, StageCosts):
        raise ArgumentError(
            f"costs={shown(costs)} must be multistage.StageCosts; uniform steps are judged in slots"
        )
    if memory_bytes is not None:
        memory_bytes = whole(memory_bytes, "memory_bytes")
    limits = _capacities("tier_bytes", tier_bytes, "bytes")
    stages = len(costs.stages)
    if n_steps not in (None, stages):
        raise ArgumentError(f"n_steps={n_steps} but the costs have {stages} stages")
    return Rules.in_bytes(costs, memory_bytes, limits)


def _capacities(name: str, given: dict[int, int] | None, unit: str) -> dict[int, int]:
    if not isinstance(given, dict | None):
        raise ArgumentError(f"{name}={shown(given)} must map tiers to {unit} they hold")
    return {tier: whole(room, f"{name}[{shown(tier)}]") for tier, room in (given or {}).items()}


def each_judged(schedule: Schedule, rules: Rules) -> Schedule:
    """Pass a schedule on, every action judged before it is performed.

    Raises
    ------
    ScheduleError
        In place of the first illegal action.
    """
    answer: Answer = None
    try:
        while True:
            try:
                action = schedule.send(answer)
            except StopIteration:
                return
            kind = type(action)
            if kind is Offer or kind is Await or kind is Evict:
                assert isinstance(action, Offer | Await | Evict)
                rules.expect(action)
                answer = yield action
                rules.apply(action, answer)
            else:
                # Tokens are counted here as there: that of a Put or Get is known.
                rules.apply(action, rules.next_token if kind is Put or kind is Get else None)
                answer = yield action
    finally:
        schedule.close()


def _checked(
    schedule: Schedule | Iterable[Action],
    rules: Rules,
    accept: Callable[[Offer], bool] | None,
    survive: Callable[[int], bool] | None,
) -> Legality:
    def answer(action: Action) -> Answer:
        match action:
            case Offer():
                token = rules.usual_answer(action)
                return None if token is None or (accept and not accept(action)) else token
            case Put() | Get():
                return rules.next_token
            case Await(token):
                return survive is None or survive(token)
            case Evict():
                return survive is None or survive(rules.token_of(action))
            case _:
                return None

    for action, send in drive(schedule):
        try:
            reply = answer(action) if type(action) in _ANSWERED else None
            rules.apply(action, reply)
        except TypeError:
            require_whole(action, rules.index)
            raise
        send(reply)
    rules.finish()
    return Legality(
        rules.forward_steps,
        rules.peak,
        dict(rules.tier_peak),
        rules.next_token,
        rules.index,
        None if rules.memory is None else rules.memory.peak_bytes,
    )
