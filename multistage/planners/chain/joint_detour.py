"""Detours: how a run continues where the tier is slower than its plan expects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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
    Put,
    Reverse,
    Tape,
)
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...schedule.machine import Rules
from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Detour:
    """How to continue from an eviction that would wait.

    Attributes
    ----------
    save : tuple of int
        States inside held tapes to keep, as `Save` does, before anything is discarded.
    discard : tuple of int
        Held tapes to give up without writing them.
    actions : tuple of Action
        To run instead of the rest of the plan, the eviction included, once all writes under
        way are cancelled; it drops what the tier has of them.
    makespan_s, waiting_s : float
        Predicted for the whole run, with the detour and without.
    """

    save: tuple[int, ...]
    discard: tuple[int, ...]
    actions: tuple[Action, ...] = field(repr=False)
    makespan_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class Held:
    """What a schedule holds at one of its actions; things are (tape, step)."""

    saved: set[int]
    tapes: set[int]
    away: list[tuple[bool, int]]  # the first that left is the first
    written: list[tuple[bool, int]]  # and not yet evicted
    transfers: int
    stage: int
    at_hand: frozenset[int]  # states in memory: live, kept, inside a tape, or the input of one

    @classmethod
    def by(cls, actions: Sequence[Action], costs: StageCosts) -> Held:
        """Return what the first actions of a legal schedule lead to."""
        rules = replayed(actions, costs)
        away = [(a.tape, a.step) for a in actions if isinstance(a, Evict)]
        written = [(t.item < 0, max(t.item, ~t.item)) for t in rules.tokens.values()]
        assert rules.memory is not None and rules.live is not None
        states = range(len(costs.stages) + 1)
        return cls(
            saved=set(rules.held),
            tapes=set(rules.tapes),
            away=away,
            written=written,
            transfers=rules.next_token,
            stage=rules.live,
            at_hand=frozenset([i for i in states if rules.memory.has(i, rules)]),
        )

    def bytes_of(self, thing: tuple[bool, int], true: Sizes) -> int:
        """Return the size of a state or of a tape."""
        tape, i = thing
        return int(true.tape[i] if tape else true.state[i])


def replayed(actions: Iterable[Action], costs: StageCosts) -> Rules:
    """Return the legality machine, in bytes and without a limit, after some actions."""
    rules = Rules.in_bytes(costs)
    for action in actions:
        rules.apply(action, rules.usual_answer(action))
    return rules


def judged(rules: Rules, detour: Detour, memory_bytes: int) -> Rules:
    """Let a detour continue from what a machine has performed, to its end.

    Raises
    ------
    ScheduleError
        Naming the first illegal action, one beyond the limit, or what is left at the end.
    """
    assert rules.memory is not None
    rules.divert(detour.save, detour.discard)
    rules.memory.limit_bytes = memory_bytes
    for action in detour.actions:
        rules.apply(action, rules.usual_answer(action))
    rules.finish()
    return rules


def joined(whole: Sequence[Action], held: Held, costs: StageCosts) -> Detour | None:
    """Return the detour that continues from what is held as a whole plan has it there."""
    at, rest = _cut(whole, held.stage)
    wanted = Held.by(whole[:at], costs)
    if not wanted.tapes <= held.tapes | {i for tape, i in held.away if tape}:
        return None
    away = set(held.away)
    save = sorted(i for i in wanted.saved - held.saved if (False, i) not in away)
    if not held.at_hand.issuperset(save):
        return None
    moved = {(a.tape, a.step) for a in whole if isinstance(a, Evict)}
    back = [thing for thing in held.away if thing not in moved and _is_held(wanted, thing)]
    used = {(a.tape, a.step) for a in rest if isinstance(a, Get)} | set(back)
    actions: list[Action] = [Free(i) for i in sorted(held.saved - wanted.saved)]
    unused = [thing for thing in held.away if thing not in used]
    actions += [Drop(i, tape=tape) for tape, i in (*unused, *held.written)]
    # What the plan never evicts has its room: it is read back at once.
    actions += [Get(i, tape=tape) for tape, i in reversed(back)]
    token_of = {thing: held.transfers + k for k, thing in enumerate(reversed(back))}
    shift = held.transfers + len(back) - wanted.transfers
    for action in rest:
        for thing in [thing for thing in token_of if _uses(action, thing)]:
            actions += [Await(token_of.pop(thing)), Drop(thing[1], tape=thing[0])]
        if isinstance(action, Await):
            action = Await(action.token + shift)
        if isinstance(action, Evict):
            if (action.tape, action.step) in away:
                continue
            return None  # nothing more is written
        actions.append(action)
    discard = sorted(held.tapes - wanted.tapes)
    return Detour(tuple(save), tuple(discard), tuple(actions), math.inf, math.inf)


def seconds_with(
    true: Sizes, rates: Tier, before: Iterable[Action], after: Iterable[Action]
) -> float:
    """Return the makespan of a schedule that took a detour."""
    return [now for now, _ in _timed(true, rates, itertools.chain(before, after))][-1]


def first_to_wait(true: Sizes, rates: Tier, actions: Sequence[Action]) -> int:
    """Return the index of the first eviction that waits for its write, else of the turn."""
    timed = _timed(true, rates, actions)
    for at, (action, (_, waited)) in enumerate(zip(actions, timed, strict=True)):
        if isinstance(action, EndForward) or (isinstance(action, Evict) and waited):
            return at
    raise AssertionError("a schedule without EndForward")


def _timed(true: Sizes, rates: Tier, actions: Iterable[Action]) -> Iterator[tuple[float, bool]]:
    """Yield when each action has been performed, and whether it waited for a transfer."""
    now, adjoint = 0.0, len(true)
    busy, ends, written = [0.0, 0.0], [], {}
    for action in actions:
        ready = 0.0
        match action:
            case Advance(start, stop):
                now += float(true.forward_s[start:stop].sum())
            case Tape(step):
                now += float(true.forward_s[step])
                if adjoint == step + 1:
                    now -= float(true.spared_s[step])
            case Reverse(step):
                now, adjoint = now + float(true.reverse_s[step]), step
            case Put(step, _, tape) | Get(step, _, tape):
                writes = isinstance(action, Put)
                size = float(true.tape[step] if tape else true.state[step])
                channel = 0 if writes or rates.shared else 1
                took = rates.writing_s(size) if writes else rates.reading_s(size)
                busy[channel] = max(now, busy[channel]) + took
                ends.append(busy[channel])
                if writes:
                    written[tape, step] = busy[channel]
            case Evict(step, _, tape):
                ready = written[tape, step]
            case Await(token):
                ready = ends[token]
        waited, now = ready > now, max(now, ready)
        yield now, waited


def _is_held(held: Held, thing: tuple[bool, int]) -> bool:
    return thing[1] in (held.tapes if thing[0] else held.saved)


def _uses(action: Action, thing: tuple[bool, int]) -> bool:
    """Whether an action of the reverse sweep needs a state or a tape, or the state inside it."""
    tape, i = thing
    match action:
        case Reverse(step):
            return step in ((i, i + 1) if tape else (i,))
        case Load(step):
            return step == i + tape
        case Free(step):
            return not tape and step == i
        case _:
            return False


def _cut(whole: Sequence[Action], stage: int) -> tuple[int, list[Action]]:
    """Return how many actions come before a stage runs first, and those from it on."""
    for at, action in enumerate(whole):
        if isinstance(action, EndForward):
            return at, list(whole[at:])
        if isinstance(action, Tape) and action.step == stage:
            return at, list(whole[at:])
        if isinstance(action, Advance) and action.start <= stage < action.stop:
            return at, [Advance(stage, action.stop), *whole[at + 1 :]]
    raise AssertionError(f"stage {stage} is never run")
