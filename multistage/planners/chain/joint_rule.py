"""What to do when a tier is slower than a plan has it: the deadline rule.

A plan evicts a thing when memory is short, and waits for its write.  A slow
tier makes all of them wait, and a plan that waits may take longer than one
that never used the tier.  The rule: the first eviction of the forward sweep
that would wait is the deadline, at the latest the end of the sweep.  From there
on nothing more is written.  What is held then, every tape made and not yet
evicted, is a superset of what most plans would hold; so the rest is planned
anew, at the speed measured:

* what has been evicted is read back or made again, the oldest first to be read;
* tapes that are held stay, or are discarded, their stages made again later;
* the stages to come follow the optimum without the tier, or RR-9302 in the room left.

Some hundreds of such plans are judged in virtual time, the best are improved by
changing one stage at a time, or two, and waiting is chosen where it is faster.  On tiers
1.5, 3 and 10 times slower than planned the slowest run took 2.1 % more than the optimum
without the tier; memory holds at any speed.

Writes not begun are cancelled, and the one under way where it can be; else what it reads
takes room until the end.  Every detour is judged by the legality machine, within the
plan's limit.  Known gaps: nothing is written after the deadline, though a tier 1.5 times
slower still helps (plan again between iterations, from what was measured); a tier whose
reads alone are late only waits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ... import native
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
    Save,
    Tape,
)
from ...errors import ArgumentError, BudgetError, ScheduleError
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...schedule.machine import Rules
from ...states.layout import Array
from ...support.values import number
from .heterogeneous import ChainPlan, plan_chain
from .joint_actions import actions_of_laid
from .joint_core import APART, KEEPS_TAPE, RESERVE_AT, STARTS, STATE_AWAY, TAPE_AWAY, Core
from .joint_twin import Twin
from .memory import use_of
from .sizes import Sizes
from .table import Table

_SLOTS, _MORE = 400, 1.13
_LONG, _FEWER = 100, 150  # stages, and the slots of longer chains: tables grow as squares
_SHARES = 5  # of what was evicted, as candidates for reading back
_IMPROVED = 1  # of the candidates of each share
_MOST_KEPT = 24  # choices of tapes to keep, of each kind


@dataclass(frozen=True, slots=True)
class Detour:
    """How to go on from an eviction that would wait.

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
class _Held:
    """What a schedule holds at one of its actions; things are (tape, step)."""

    saved: set[int]
    tapes: set[int]
    away: list[tuple[bool, int]]  # the first that left is the first
    written: list[tuple[bool, int]]  # and not yet evicted
    transfers: int
    stage: int
    at_hand: frozenset[int]  # states in memory: live, kept, inside a tape, or the input of one

    @classmethod
    def by(cls, actions: Sequence[Action], costs: StageCosts) -> _Held:
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
        tape, i = thing
        return int(true.tape[i] if tape else true.state[i])


def replayed(actions: Iterable[Action], costs: StageCosts) -> Rules:
    """Return the legality machine, in bytes and without a limit, after some actions."""
    rules = Rules.in_bytes(costs)
    for action in actions:
        rules.apply(action, rules.usual_answer(action))
    return rules


def judged(rules: Rules, detour: Detour, memory_bytes: int) -> Rules:
    """Let a detour go on from what a machine has performed, to its end.

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


def rates_when(tier: Tier, slower: float) -> Tier:
    """Return a tier so many times slower; one that moves nothing, if infinitely so."""
    return replace(tier.slower(min(slower, 1e6)), capacity_bytes=None)


class DeadlineRule:
    """The rule for one plan; made once, asked while it runs.

    Parameters
    ----------
    plan : ChainPlan
        With a tier and a limit.

    Raises
    ------
    ArgumentError
        For a plan without a tier.

    Notes
    -----
    Takes as long as one table of RR-9302 and a plan without the tier.
    """

    def __init__(self, plan: ChainPlan) -> None:
        if plan.tier is None or plan.memory_bytes is None:
            raise ArgumentError("the deadline rule goes with a plan that has a tier and a limit")
        self.plan, self.rates = plan, plan.tier
        self.true = true = Sizes.of(plan.costs)
        self.limit = plan.memory_bytes - plan.costs.input_bytes
        slots = _SLOTS if len(true) <= _LONG else _FEWER
        self.unit = max(1, self.limit) / slots
        self.table = Table(true.in_slots(self.unit), int(_MORE * slots))
        try:
            alone = plan_chain(plan.costs, plan.memory_bytes)
        except BudgetError:
            self.alone = None
        else:
            self.alone = _fates(alone.actions, len(true))

    def at_deadline(
        self, at: int, slower: float = math.inf, *, cancels: bool = True
    ) -> Detour | None:
        """Return how to go on from `plan.actions[at]`, None to wait.

        Parameters
        ----------
        at : int
            An `Evict` of the forward sweep whose write is not done, or its `EndForward`
            where writes are late.
        slower : float
            Seconds that transfers took over those planned; infinite if none has ended:
            then nothing is read back either.
        cancels : bool
            Whether a write under way can be cancelled, as between two pages; if not,
            what is being written takes its room to the end.

        Raises
        ------
        ArgumentError
            If `at` is neither, or `slower` is below 1.
        """
        plan, actions = self.plan, self.plan.actions
        if not 0 <= at < len(actions) or not isinstance(actions[at], Evict | EndForward):
            raise ArgumentError(f"at={at} must be the index of an Evict or EndForward of the plan")
        if slower != math.inf and number(slower, "slower", "times as long") < 1:
            raise ArgumentError(f"slower={slower} must be at least 1")
        if EndForward() in actions[:at]:
            return None
        rates = rates_when(self.rates, slower)
        held = _Held.by(actions[:at], plan.costs)
        limit = self.limit
        if not cancels and held.written:
            limit -= held.bytes_of(held.written[0], self.true)
        kind = Core if native.available() else Twin
        core = kind(self.true, self.table, self.unit, limit, rates)
        waiting_s = math.inf
        if slower < math.inf:
            waiting_s = use_of(actions, plan.costs, (rates,)).makespan_s
        found: list[Detour] = []
        for fates in _Choice(self, core, held).best():
            whole = actions_of_laid(core.lay_out(fates), self.table)
            detour = _joined(whole, held, plan.costs)
            if detour is None:
                continue
            seconds = _seconds(self.true, rates, actions[:at], detour.actions)
            if seconds < waiting_s:
                found.append(replace(detour, makespan_s=seconds, waiting_s=waiting_s))
        spare = plan.memory_bytes - (self.limit - limit)  # type: ignore[operator]
        for detour in sorted(found, key=lambda each: each.makespan_s):
            with contextlib.suppress(ScheduleError):
                judged(replayed(actions[:at], plan.costs), detour, spare)
                return detour
        return None


class _Choice:
    """The plans that go on from what is held, and the best of them."""

    def __init__(self, rule: DeadlineRule, core: Core | Twin, held: _Held) -> None:
        self.core, self.held = core, held
        self.n = len(rule.true)
        self.made = _fates(rule.plan.actions, self.n)
        self.alone = rule.alone
        self.away = set(held.away)

    def best(self) -> Iterator[Array]:
        """Yield the best plans found for some numbers of things read back."""
        counts = sorted({len(self.away) * k // _SHARES for k in range(_SHARES + 1)})
        for count in counts:
            judged = [
                (self.core.judge(tried), number, tried)
                for number, tried in enumerate(self._candidates(set(self.held.away[:count])))
            ]
            judged.sort(key=lambda each: each[:2])
            for seconds, _, fates in judged[:_IMPROVED]:
                if seconds < math.inf:
                    yield fates
                    yield self._improved(seconds, fates)

    def _improved(self, best: float, fates: Array) -> Array:
        """Return what changes of one stage, or of two that are near, make of a plan."""
        for apart in (0, 1, 2, 0):
            for stage in range(self.n - apart):
                for changes in self._changes(fates, stage, apart):
                    tried = fates.copy()
                    for i, fate in changes:
                        tried[i] = fate | (tried[i] & (3 << RESERVE_AT))
                    seconds = self.core.judge(tried)
                    if seconds < best:
                        best, fates = seconds, tried
        return fates

    def _changes(self, fates: Array, i: int, apart: int) -> Iterator[tuple[tuple[int, int], ...]]:
        mine = [(i, fate) for fate in self._others(i, int(fates[i]))]
        if not apart:
            return zip(mine)
        other = i + apart
        theirs = [(other, fate) for fate in self._others(other, int(fates[other]))]
        return itertools.product(mine, theirs)

    def _candidates(self, read: set[tuple[bool, int]]) -> Iterator[Array]:
        stop, alone = self.held.stage, self.alone
        tapes = sorted(self.held.tapes)
        stride = 1 + len(tapes) // _MOST_KEPT
        kept = [set(tapes[first:]) for first in range(0, len(tapes) + 1, stride)]
        kept += [set(tapes[:last]) for last in range(1, len(tapes), stride)]
        ends = [np.zeros(self.n - stop, np.uint8)]
        ends[0][:1] = STARTS
        if alone is not None:
            kept.append({i for i in tapes if alone[i] & KEEPS_TAPE})
            ends.append(alone[stop:])
        for keep, own_starts, end in itertools.product(kept, (False, True), ends):
            fates = np.concatenate((self._start(read, keep, own_starts), end))
            for reserve in range(3):
                yield fates | np.uint8(reserve << RESERVE_AT)

    def _start(self, read: set[tuple[bool, int]], keep: set[int], own_starts: bool) -> Array:
        """Return the fates of the stages that have run."""
        fates = np.zeros(self.held.stage, np.uint8)
        for i in range(self.held.stage):
            made = int(self.made[i])
            if (True, i) in read:
                fates[i] = KEEPS_TAPE | STARTS | TAPE_AWAY | (made & APART)
            elif i in keep and self._usable(i, read):
                fates[i] = KEEPS_TAPE | STARTS
            elif i in self.held.at_hand and (
                (self.alone is not None and self.alone[i] & STARTS)
                or (own_starts and made & STARTS and not made & KEEPS_TAPE)
            ):
                fates[i] = STARTS
            if (False, i) in read:
                fates[i] |= STATE_AWAY | STARTS
        fates[0] |= STARTS
        return fates

    def _usable(self, i: int, read: set[tuple[bool, int]]) -> bool:
        """Whether tape i is held and its input is, or comes back."""
        return i in self.held.tapes and (i in self.held.at_hand or (True, i - 1) in read)

    def _others(self, i: int, fate: int) -> Iterator[int]:
        """Yield other fates of a stage: of one that has run, what is still possible."""
        fate &= (1 << RESERVE_AT) - 1
        options = [STARTS, 0, KEEPS_TAPE | STARTS]
        if i < self.held.stage:
            options = [0] if i else []
            if i in self.held.at_hand:
                options.append(STARTS)
            if (False, i) in self.away:
                options.append(STARTS | STATE_AWAY)
            if i in self.held.tapes:
                options.append(KEEPS_TAPE | STARTS)
            if (True, i) in self.away:
                options.append(KEEPS_TAPE | STARTS | TAPE_AWAY)
        yield from (option for option in options if option != fate)


def _fates(actions: Sequence[Action], n: int) -> Array:
    """Return the fates that the forward sweep of a schedule gives its stages."""
    fates = np.zeros(n, np.uint8)
    saved: set[int] = set()
    for action in actions:
        match action:
            case EndForward():
                break
            case Advance(start, _):
                fates[start] |= STARTS
            case Tape(step):
                fates[step] |= KEEPS_TAPE | STARTS
            case Save(step):
                fates[step] |= STARTS
                saved.add(step)
            case Put(step, _, tape):
                fates[step] |= TAPE_AWAY if tape else STATE_AWAY
    for step in saved:
        if step and fates[step - 1] & KEEPS_TAPE and fates[step - 1] & TAPE_AWAY:
            fates[step] |= APART
    return fates


def _joined(whole: Sequence[Action], held: _Held, costs: StageCosts) -> Detour | None:
    """Return the detour that goes on from what is held as a whole plan has it there."""
    at, rest = _cut(whole, held.stage)
    wanted = _Held.by(whole[:at], costs)
    if not wanted.tapes <= held.tapes | {i for tape, i in held.away if tape}:
        return None
    away = set(held.away)
    save = sorted(i for i in wanted.saved - held.saved if (False, i) not in away)
    if not held.at_hand.issuperset(save):
        return None
    moved = {(a.tape, a.step) for a in whole if isinstance(a, Evict)}
    back = [thing for thing in held.away if thing not in moved and _in(wanted, thing)]
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


def _seconds(true: Sizes, rates: Tier, before: Iterable[Action], after: Iterable[Action]) -> float:
    """Return the makespan of a schedule that took a detour."""
    now, adjoint = 0.0, len(true)
    busy, ends, written = [0.0, 0.0], [], {}
    for action in itertools.chain(before, after):
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
                now = max(now, written[tape, step])
            case Await(token):
                now = max(now, ends[token])
    return now


def _in(held: _Held, thing: tuple[bool, int]) -> bool:
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
