"""What makes a schedule legal.

The rules, enforced by `Rules` and nowhere else:

1. One live state exists at a time.  `Advance`, `Tape` and a `Reverse` without
   a tape need the live state of their step; `Reverse` without a tape uses it up.
2. Adjoint steps run n-1, n-2, ..., 0, all after the one `EndForward`, at
   which state n is live.
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
   loaded between a `Tape` and its `Reverse`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import Any, assert_never

from .actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
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
from .errors import ArgumentError, ScheduleError
from .values import number, several, shown, whole


@dataclass(slots=True)
class Transfer:
    """One accepted transfer whose `Await` is still to come."""

    step: int
    tier: int
    is_write: bool
    staged: bool  # a write that took a staging slot of its own


@dataclass(slots=True)
class Rules:
    """The state machine behind `check`: which actions are legal now.

    `apply` performs one action and raises `ScheduleError` on an illegal one,
    changing nothing.  Transfers and their fate are told by the caller: the
    answer an `Offer`, `Put`, `Get` or `Await` got is passed along.

    Parameters
    ----------
    n_steps : int or None
        Steps to reverse; None when the schedule decides (`EndForward` then
        fixes it).
    slots : float
        Fast slots, each the room of one state.
    tape_slots : float
        Slots one tape takes beyond the first tape.
    tier_slots : mapping of tier to states it can hold, if bounded
    state_is_tape : bool
        Whether the tape of a step is its input state, see rule 3.
    in_place : bool
        Whether steps overwrite the live state; matters with `state_is_tape`.
    one_tape : bool
        Whether only the latest tape exists, see rule 7.
    recovers : bool
        Whether a checkpoint that a transfer lost may still be asked for, as of
        the executor, which then computes it again: its `Get` and `Drop` are
        legal, and its `Load` and `Free` are those of the slot it would have.
        A static schedule, which ignores the answers, needs this.
    """

    n_steps: int | None
    slots: float
    tape_slots: float = 1.0
    tier_slots: dict[int, int] = field(default_factory=dict)
    _: KW_ONLY
    state_is_tape: bool = False
    in_place: bool = False
    one_tape: bool = False
    recovers: bool = False
    live: int | None = 0
    adjoint: int | None = None  # the next Reverse is of step adjoint - 1
    held: dict[int, int | None] = field(default_factory=dict)  # step -> token of a pending Get
    pins: dict[int, int] = field(default_factory=dict)  # step -> writes not awaited
    tapes: set[int] = field(default_factory=set)
    stored: dict[tuple[int, int], int | None] = field(default_factory=dict)
    tokens: dict[int, Transfer] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)  # steps that a Get was to bring and did not
    unwritten: set[tuple[int, int]] = field(default_factory=set)  # copies that tiers have lost
    next_token: int = 0
    staged: int = 0
    used: float = 0.0
    peak: float = 0.0
    tier_used: dict[int, int] = field(default_factory=dict)
    tier_peak: dict[int, int] = field(default_factory=dict)
    forward_steps: int = 0
    index: int = 0

    def _fail(self, message: str) -> None:
        raise ScheduleError(message, self.index)

    def _room(self, more: float, what: Action | str) -> None:
        if self.used + more > self.slots + 1e-9:
            if not isinstance(what, str):
                what = f"{type(what).__name__}({', '.join(map(str, astuple(what)))})"
            self._fail(
                f"{what} needs {more:g} fast slot(s), "
                f"but {self.used:g} of {self.slots:g} are taken; "
                "free one first or raise the budget"
            )

    def _take(self, more: float) -> None:
        self.used += more
        self.peak = max(self.peak, self.used)

    def _borrow(self, more: float, what: str) -> None:
        """Take and give back room within one action."""
        self._room(more, what)
        self.peak = max(self.peak, self.used + more)

    def _keep_latest(self, action: Action) -> None:
        if self.tapes:
            (step,) = self.tapes
            self._fail(
                f"{action} but the chain has only its latest tape, and that of step {step} "
                f"is wanted still; Reverse({step}) first"
            )

    def expect(self, action: Offer | Await) -> None:
        """Judge an action whose answer is not known yet; nothing changes.

        Raises
        ------
        ScheduleError
            When the action is illegal here whatever the answer.
        """
        match action:
            case Offer():
                self._may_write(action)
            case Await(token):
                self._may_await(token)
            case _:
                assert_never(action)

    def apply(self, action: Action, answer: Answer) -> None:
        """Perform `action`, which was answered by `answer`.

        Raises
        ------
        ScheduleError
            When the action is illegal here; the machine is unchanged.
        """
        perform = _PERFORMED.get(type(action))
        if perform is None:
            self._fail(f"{action!r} is no action")
        else:
            perform(self, action, answer)
            self.index += 1

    def _save(self, action: Save, _: Answer) -> None:
        step = action.step
        if self.live != step:
            self._fail(f"Save({step}) but the live state is {self.live}")
        if step in self.held:
            self._fail(f"Save({step}) but a slot already holds it")
        self._room(1, action)
        self._take(1)
        self.held[step] = None
        if self.unread:
            self.unread.discard(step)

    def _load(self, action: Load, _: Answer) -> None:
        if self.one_tape:
            self._keep_latest(action)
        step = action.step
        if step and step in self.unread and step not in self.held:
            self._room(1, action)
            self._take(1)
            self.held[step] = None
            self.unread.discard(step)
        elif step or self.held.get(step) is not None:
            self._readable(step, "Load")
        self.live = step

    def _free(self, action: Free, _: Answer) -> None:
        step = action.step
        if step in self.unread and step not in self.held:
            self.unread.discard(step)
            return
        self._readable(step, "Free")
        if self.pins.get(step):
            self._fail(f"Free({step}) but a write from that slot was not awaited")
        del self.held[step]
        self.used -= 1

    def _advance(self, action: Advance, _: Answer) -> None:
        if self.one_tape:
            self._keep_latest(action)
        start, stop = action.start, action.stop
        limit = self.n_steps if self.adjoint is None else self.adjoint
        if self.live != start:
            self._fail(f"Advance({start}, {stop}) but the live state is {self.live}")
        if stop <= start:
            self._fail(f"Advance({start}, {stop}) runs no step")
        if limit is not None and stop > limit:
            self._fail(f"Advance({start}, {stop}) goes past state {limit}")
        self.live = stop
        self.forward_steps += stop - start

    def _tape(self, action: Tape, _: Answer) -> None:
        if self.one_tape:
            self._keep_latest(action)
        step = action.step
        limit = self.n_steps if self.adjoint is None else self.adjoint
        if self.live != step:
            self._fail(f"Tape({step}) but the live state is {self.live}")
        if step in self.tapes:
            self._fail(f"Tape({step}) but that tape is already held")
        if limit is not None and step >= limit:
            self._fail(f"Tape({step}) goes past state {limit}")
        if self.tapes:
            self._room(self.tape_slots, action)
            self._take(self.tape_slots)
        self.tapes.add(step)
        self.live = step + 1
        self.forward_steps += 1

    def _reverse(self, action: Reverse, _: Answer) -> None:
        step = action.step
        if self.adjoint is None:
            self._fail(f"Reverse({step}) before EndForward")
        elif step != self.adjoint - 1:
            self._fail(f"Reverse({step}) but the next adjoint step is {self.adjoint - 1}")
        if step in self.tapes:
            if self.state_is_tape and self.in_place and self.live is not None:
                if self.live < step:
                    self._borrow(1, f"Reverse({step}), which puts live state {self.live} aside,")
                else:
                    self.live = None
            self.tapes.remove(step)
            if self.tapes:
                self.used -= self.tape_slots
        elif self.live == step:
            if self.tapes and not self.state_is_tape:
                beside = f"Reverse({step}), which makes a tape beside {len(self.tapes)} held,"
                self._borrow(self.tape_slots, beside)
            self.live = None
        else:
            self._fail(
                f"Reverse({step}) finds neither its tape nor its state (live is {self.live})"
            )
        self.adjoint = step

    def _readable(self, step: int, what: str) -> None:
        if step not in self.held:
            self._fail(f"{what}({step}) but no fast slot holds checkpoint {step}")
        if self.held[step] is not None:
            self._fail(f"{what}({step}) before Await({self.held[step]}) of its Get")

    def _may_write(self, action: Offer | Put) -> bool:
        """Raise unless the write is legal; return whether it takes a staging slot."""
        step, tier = action.step, action.tier
        staged = step not in self.held
        if staged and self.live != step:
            self._fail(f"{action} but state {step} is neither live nor held (live {self.live})")
        if not staged and self.held[step] is not None:
            self._fail(f"{action} before Await({self.held[step]}) of its Get")
        if (step, tier) in self.stored:
            self._fail(f"{action} but tier {tier} already has that checkpoint")
        if staged:
            self._room(1, action)
        return staged

    def _write(self, action: Offer | Put, answer: Answer) -> None:
        step, tier = action.step, action.tier
        staged = self._may_write(action)
        limit = self.tier_slots.get(tier)
        in_tier = self.tier_used.get(tier, 0)
        if limit is not None and in_tier >= limit and answer is not None:
            self._fail(f"{action} but tier {tier} is full: {in_tier} of {limit} states")
        if answer is None:
            if isinstance(action, Put):
                self._fail(f"{action} was not answered by a token")
            return
        self._token(answer)
        self.unwritten.discard((step, tier))
        self.stored[step, tier] = self.next_token
        self.tier_used[tier] = in_tier + 1
        self.tier_peak[tier] = max(self.tier_peak.get(tier, 0), in_tier + 1)
        if staged:
            self._take(1)
            self.staged += 1
        else:
            self.pins[step] = self.pins.get(step, 0) + 1
        self.tokens[self.next_token] = Transfer(step, tier, is_write=True, staged=staged)
        self.next_token += 1

    def _token(self, answer: Answer) -> None:
        if answer != self.next_token:
            self._fail(f"the transfer was answered by token {answer}, not {self.next_token}")

    def _read(self, action: Get, _: Answer) -> None:
        step, tier = action.step, action.tier
        if (step, tier) not in self.stored and (step, tier) not in self.unwritten:
            self._fail(f"Get({step}, {tier}) but tier {tier} has no checkpoint {step}")
        if step in self.held:
            self._fail(f"Get({step}, {tier}) but a fast slot already holds it")
        self._room(1, action)
        self._take(1)
        self.held[step] = self.next_token
        self.unread.discard(step)
        self.tokens[self.next_token] = Transfer(step, tier, is_write=False, staged=False)
        self.next_token += 1

    def _may_await(self, token: int) -> None:
        if token not in self.tokens:
            self._fail(f"Await({token}) but no such transfer is under way")

    def _await(self, action: Await, answer: Answer) -> None:
        self._may_await(action.token)
        transfer = self.tokens.pop(action.token)
        step, tier = transfer.step, transfer.tier
        if transfer.is_write:
            if transfer.staged:
                self.used -= 1
                self.staged -= 1
            else:
                self.pins[step] -= 1
                if not self.pins[step]:
                    del self.pins[step]
            if (step, tier) in self.stored:
                self.stored[step, tier] = None
        elif answer is False:
            del self.held[step]
            self.used -= 1
            if self.recovers:
                self.unread.add(step)
        else:
            self.held[step] = None
        if answer is False and (step, tier) in self.stored:
            del self.stored[step, tier]
            self.tier_used[tier] -= 1
            if self.recovers:
                self.unwritten.add((step, tier))

    def _drop(self, action: Drop, _: Answer) -> None:
        step, tier = action.step, action.tier
        if (step, tier) not in self.stored and (step, tier) not in self.unwritten:
            self._fail(f"Drop({step}, {tier}) but tier {tier} has no checkpoint {step}")
        if any((t.step, t.tier) == (step, tier) for t in self.tokens.values()):
            self._fail(f"Drop({step}, {tier}) before its transfer was awaited")
        if (step, tier) in self.unwritten:
            self.unwritten.remove((step, tier))
            return
        del self.stored[step, tier]
        self.tier_used[tier] -= 1

    def _end_forward(self, _action: EndForward, _: Answer) -> None:
        if self.adjoint is not None:
            self._fail("a second EndForward")
        if self.live is None or self.live != (self.live if self.n_steps is None else self.n_steps):
            self._fail(f"EndForward but the live state is {self.live}, not {self.n_steps}")
        self.adjoint = self.live

    def finish(self) -> None:
        """Raise `ScheduleError` unless the reversal is complete and nothing is left."""
        if self.adjoint != 0:
            self._fail(f"the schedule ended with the adjoint at {self.adjoint}, not 0")
        left = {
            "fast slots": sorted(self.held),
            "tapes": sorted(self.tapes),
            "checkpoints in a tier": sorted(self.stored),
            "transfers not awaited": sorted(self.tokens),
        }
        for what, items in left.items():
            if items:
                self._fail(f"the schedule ended and left {what}: {items}")


_PERFORMED: dict[type, Callable[[Rules, Any, Answer], None]] = {
    Advance: Rules._advance,
    Tape: Rules._tape,
    Reverse: Rules._reverse,
    Save: Rules._save,
    Load: Rules._load,
    Free: Rules._free,
    Offer: Rules._write,
    Put: Rules._write,
    Get: Rules._read,
    Await: Rules._await,
    Drop: Rules._drop,
    EndForward: Rules._end_forward,
}


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
        Most states each tier held.
    transfers : int
        Accepted transfers, both directions.
    actions : int
        Actions in all.
    """

    forward_steps: int
    peak_slots: float
    tier_peak: dict[int, int]
    transfers: int
    actions: int


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
    n_steps: int | None,
    slots: float,
    *,
    tape_slots: float = 1.0,
    state_is_tape: bool = False,
    in_place: bool = False,
    one_tape: bool = False,
    tier_slots: dict[int, int] | None = None,
    accept: Callable[[Offer], bool] | None = None,
    survive: Callable[[int], bool] | None = None,
) -> Legality:
    """Prove a schedule legal and return what it used.

    Parameters
    ----------
    schedule : generator or iterable of actions
        Consumed to its end.
    n_steps : int or None
        Steps to reverse, at least 1; None if the schedule decides.
    slots : float
        Fast slots it may take (staging and landing slots included).
    tape_slots : float
        Slots each tape beyond the first takes.
    state_is_tape, in_place, one_tape : bool
        What the chain is like, see `Chain` and rules 3 and 7.  By default tapes
        are not states, and as many as fit are held.
    tier_slots : dict, optional
        Capacity of tiers in states, where bounded.
    accept : callable, optional
        Decides each `Offer`; all are taken when absent.
    survive : callable, optional
        Decides by token whether a transfer succeeds; all do when absent.

    Raises
    ------
    ScheduleError
        Naming the first illegal action.
    ArgumentError
        If `n_steps` or `slots` is out of range.

    Examples
    --------
    >>> used = check([Tape(0), EndForward(), Reverse(0)], n_steps=1, slots=0)
    >>> used.forward_steps
    1
    """
    n_steps, slots = run_arguments(schedule, n_steps, slots)
    tape_slots = number(tape_slots, "tape_slots")
    if not tape_slots >= 0:
        raise ArgumentError(f"tape_slots={tape_slots} must not be negative")
    if not isinstance(tier_slots, dict | None):
        raise ArgumentError(f"tier_slots={shown(tier_slots)} must map tiers to states they hold")
    limits = {
        tier: whole(states, f"tier_slots[{shown(tier)}]")
        for tier, states in (tier_slots or {}).items()
    }
    rules = Rules(
        n_steps,
        slots,
        tape_slots,
        limits,
        state_is_tape=state_is_tape,
        in_place=in_place,
        one_tape=one_tape,
    )

    def answer(action: Action) -> Answer:
        match action:
            case Offer():
                limit = rules.tier_slots.get(action.tier)
                if limit is not None and rules.tier_used.get(action.tier, 0) >= limit:
                    return None
                return rules.next_token if accept is None or accept(action) else None
            case Put() | Get():
                return rules.next_token
            case Await(token):
                return survive is None or survive(token)
            case _:
                return None

    for action, send in drive(schedule):
        reply = answer(action)
        rules.apply(action, reply)
        send(reply)
    rules.finish()
    return Legality(
        rules.forward_steps, rules.peak, dict(rules.tier_peak), rules.next_token, rules.index
    )
