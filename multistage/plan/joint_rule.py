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
changing one stage at a time, and waiting is chosen where it is faster.  Of 312
plans on tiers 1.5, 3 and 10 times slower than planned, the slowest took 2.0 % more
than the optimum without the tier; memory holds at any speed.

Writes not begun are cancelled, and the one under way where it can be; else what it reads
stays held.  Known gaps: nothing is written after the
deadline, though a tier 1.5 times slower still helps (plan again between iterations,
from what was measured); a tier whose reads alone are late only waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .. import native
from ..actions import (
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
from ..errors import ArgumentError, BudgetError
from ..layout import Array
from ..rates import TierRates
from ..values import number
from .chain_memory import use_of
from .chain_table import Sizes, Table
from .heterogeneous import ChainPlan, plan_chain
from .joint_actions import actions_of_laid
from .joint_core import APART, KEEPS_TAPE, RESERVE_AT, STARTS, STATE_AWAY, TAPE_AWAY, Core
from .joint_twin import Twin

_SLOTS, _MORE = 400, 1.13
_SHARES = 5  # of what was evicted, as candidates for reading back
_PASSES = 2  # over the stages, improving


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
        To run instead of the rest of the plan, the eviction included.  Its `Drop` of what
        is not evicted cancels the write; without `cancels`, one that has begun ends first.
    makespan_s, waiting_s : float
        Predicted for the whole run, with the detour and without.
    """

    save: tuple[int, ...]
    discard: tuple[int, ...]
    actions: tuple[Action, ...] = field(repr=False)
    makespan_s: float
    waiting_s: float


@dataclass(slots=True)
class _Held:
    """What a schedule holds at one of its actions."""

    saved: set[int] = field(default_factory=set)
    tapes: set[int] = field(default_factory=set)
    away: list[tuple[bool, int]] = field(default_factory=list)
    written: list[tuple[bool, int]] = field(default_factory=list)  # and not yet evicted
    transfers: int = 0
    stage: int = 0

    def has(self, i: int) -> bool:
        """Whether state i is in memory: live, kept, inside a tape, or as the input of one."""
        pinned = i in self.tapes and not {(True, i - 1), (False, i)} & set(self.away)
        return i in (0, self.stage) or i in self.saved or i - 1 in self.tapes or pinned

    def after(self, actions: Iterable[Action]) -> _Held:
        for action in actions:
            match action:
                case Advance(_, stop):
                    self.stage = stop
                case Tape(step):
                    self.tapes.add(step)
                    self.stage = step + 1
                case Save(step):
                    self.saved.add(step)
                case Free(step):
                    self.saved.remove(step)
                case Evict(step, _, tape):
                    (self.tapes if tape else self.saved).remove(step)
                    self.away.append((tape, step))
                    self.written.remove((tape, step))
                case Put(step, _, tape):
                    self.written.append((tape, step))
                    self.transfers += 1
        return self


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
        self.unit = max(1, self.limit) / _SLOTS
        self.table = Table(true.in_slots(self.unit, "nearest"), int(_MORE * _SLOTS))
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
            what is being written stays held.

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
        # Where no transfer has ended, waiting is out of the question.
        factor = min(slower, 1e6)
        rates = replace(
            self.rates,
            write_bytes_per_s=max(1e-3, self.rates.write_bytes_per_s / factor),
            read_bytes_per_s=max(1e-3, self.rates.read_bytes_per_s / factor),
            latency_s=self.rates.latency_s * factor,
            capacity_bytes=None,
        )
        held = _Held().after(actions[:at])
        kind = Core if native.available() else Twin
        core = kind(self.true, self.table, self.unit, self.limit, rates)
        waiting_s = math.inf
        if slower < math.inf:
            waiting_s = use_of(actions, plan.costs, (rates,)).makespan_s
        best: Detour | None = None
        writing = held.written[0] if held.written else None
        choices = [_Choice(self, core, held, writing)]
        if cancels:
            choices.append(_Choice(self, core, held, None))
        for fates in itertools.chain.from_iterable(choice.best() for choice in choices):
            whole = actions_of_laid(core.lay_out(fates), self.table)
            detour = _joined(whole, held, waiting_s)
            if detour is None or not _legal(plan, at, detour):
                continue
            seconds = _seconds(self.true, rates, actions[:at], detour.actions)
            if seconds < (waiting_s if best is None else best.makespan_s):
                best = replace(detour, makespan_s=seconds)
        return best


class _Choice:
    """The plans that go on from what is held, and the best of them."""

    def __init__(
        self, rule: DeadlineRule, core: Core | Twin, held: _Held, writing: tuple[bool, int] | None
    ) -> None:
        self.core, self.held, self.writing = core, held, writing
        self.n = len(rule.true)
        self.made = _fates(rule.plan.actions, self.n)
        self.alone = rule.alone
        self.away = set(held.away)

    def best(self) -> Iterator[Array]:
        """Yield the best plans found for some numbers of things read back."""
        counts = sorted({len(self.away) * k // _SHARES for k in range(_SHARES + 1)})
        for count in counts:
            best, fates = math.inf, None
            for tried in self._candidates(set(self.held.away[:count])):
                seconds = self.core.judge(tried)
                if seconds < best:
                    best, fates = seconds, tried
            if fates is not None:
                yield fates
                yield self._improved(best, fates)

    def _improved(self, best: float, fates: Array) -> Array:
        for _ in range(_PASSES):
            before = best
            for stage in range(self.n):
                for fate in self._others(stage, int(fates[stage])):
                    tried = fates.copy()
                    tried[stage] = fate | (tried[stage] & (3 << RESERVE_AT))
                    seconds = self.core.judge(tried)
                    if seconds < best:
                        best, fates = seconds, tried
            if best == before:
                break
        return fates

    def _candidates(self, read: set[tuple[bool, int]]) -> Iterator[Array]:
        stop, alone = self.held.stage, self.alone
        tapes = sorted(self.held.tapes)
        kept = [set(tapes[first:]) for first in range(len(tapes) + 1)]
        kept += [set(tapes[:last]) for last in range(1, len(tapes))]
        ends = [np.zeros(self.n - stop, np.uint8)]
        ends[0][:1] = STARTS
        if alone is not None:
            kept.insert(0, {i for i in tapes if alone[i] & KEEPS_TAPE})
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
            elif (i in keep or self.writing == (True, i)) and self._usable(i, read):
                fates[i] = KEEPS_TAPE | STARTS
            elif self.held.has(i) and (
                (self.alone is not None and self.alone[i] & STARTS)
                or (own_starts and made & STARTS and not made & KEEPS_TAPE)
                or self.writing == (False, i)
            ):
                fates[i] = STARTS
            if (False, i) in read:
                fates[i] |= STATE_AWAY | STARTS
        fates[0] |= STARTS
        return fates

    def _usable(self, i: int, read: set[tuple[bool, int]]) -> bool:
        """Whether tape i is held and its input is, or comes back."""
        return i in self.held.tapes and (self.held.has(i) or (True, i - 1) in read)

    def _others(self, i: int, fate: int) -> Iterator[int]:
        """Yield other fates of a stage: of one that has run, what is still possible."""
        fate &= (1 << RESERVE_AT) - 1
        options = [STARTS, 0, KEEPS_TAPE | STARTS]
        if i < self.held.stage:
            if self.writing in ((True, i), (False, i)):
                return
            options = [0] if i else []
            if self.held.has(i):
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


def _joined(whole: Sequence[Action], held: _Held, waiting_s: float) -> Detour | None:
    """Return the detour that goes on from what is held as a whole plan has it there."""
    at, rest = _cut(whole, held.stage)
    wanted = _Held().after(whole[:at])
    if not wanted.tapes <= held.tapes | {i for tape, i in held.away if tape}:
        return None
    away = set(held.away)
    save = sorted(i for i in wanted.saved - held.saved if (False, i) not in away)
    if not all(held.has(i) for i in save):
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
    return Detour(tuple(save), tuple(discard), tuple(actions), math.inf, waiting_s)


def _seconds(
    true: Sizes, rates: TierRates, before: Iterable[Action], after: Iterable[Action]
) -> float:
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
                took = rates.write_s(size) if writes else rates.read_s(size)
                busy[channel] = max(now, busy[channel]) + took
                ends.append(busy[channel])
                if writes:
                    written[tape, step] = busy[channel]
            case Evict(step, _, tape):
                now = max(now, written[tape, step])
            case Await(token):
                now = max(now, ends[token])
    return now


def _legal(plan: ChainPlan, at: int, detour: Detour) -> bool:
    """Whether every action of a detour finds its input."""
    held = _Held().after(plan.actions[:at])
    tapes = held.tapes - set(detour.discard)
    away = set(held.away)
    pinned = {
        i for i in tapes if i - 1 not in held.tapes and not {(True, i - 1), (False, i)} & away
    }
    saved, live = held.saved | set(detour.save), held.stage
    tier = set(held.away) | set(held.written)
    for action in detour.actions:
        match action:
            case Advance(start, stop):
                legal, live = live == start, stop
            case Tape(step):
                legal = live == step and step not in tapes
                if step - 1 not in tapes:
                    pinned.add(step)
                tapes.add(step)
                live = step + 1
            case Reverse(step):
                inside = step in saved or step in pinned or step - 1 in tapes
                legal = step in tapes and (step == 0 or inside)
                tapes.discard(step)
                pinned.discard(step)
            case Load(step):
                legal, live = step == 0 or step in saved or step - 1 in tapes, step
            case Save(step):
                legal = live == step
                saved.add(step)
            case Free(step):
                legal = step in saved
                saved.discard(step)
            case Get(step, _, tape):
                legal = (tape, step) in tier
                (tapes if tape else saved).add(step)
            case _:
                legal = True
        if not legal:
            return False
    return not saved and not tapes


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
