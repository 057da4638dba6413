"""The state machine that judges schedules; what it judges by is told in `rules`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import KW_ONLY, astuple, dataclass, field
from typing import Any, NoReturn, Self, assert_never

from ..actions import (
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
    Tape,
)
from ..errors import ArgumentError, ScheduleError
from ..model.stages import StageCosts
from ..support.units import format_bytes
from .accounting import ByteAccounting


@dataclass(slots=True)
class Transfer:
    """One accepted transfer whose `Await` or `Evict` is still to come."""

    item: int  # a state's step, or ~step of a tape
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
        In a machine that counts bytes: to bytes.
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
        A static schedule, which ignores the answers, needs this.  A tape that is
        lost on its way back keeps its room, and its `Reverse` is legal.
    memory : ByteAccounting, optional
        Counts bytes in the place of slots, see `in_bytes`.
    """

    n_steps: int | None
    slots: float
    tape_slots: float = 1.0
    tier_slots: Mapping[int, float] = field(default_factory=dict)
    _: KW_ONLY
    state_is_tape: bool = False
    in_place: bool = False
    one_tape: bool = False
    recovers: bool = False
    memory: ByteAccounting | None = None
    live: int | None = 0
    adjoint: int | None = None  # the next Reverse is of step adjoint - 1
    held: dict[int, int | None] = field(default_factory=dict)  # step -> token of a pending Get
    tapes: dict[int, int | None] = field(default_factory=dict)  # the same
    # From here on a state is known by its step, a tape by ~step.
    pins: dict[int, int] = field(default_factory=dict)  # item -> writes not awaited
    stored: dict[tuple[int, int], int | None] = field(default_factory=dict)
    tokens: dict[int, Transfer] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)  # steps that a Get was to bring and did not
    unwritten: set[tuple[int, int]] = field(default_factory=set)  # copies that tiers have lost
    next_token: int = 0
    staged: int = 0
    used: float = 0.0
    peak: float = 0.0
    tier_used: dict[int, float] = field(default_factory=dict)
    tier_peak: dict[int, float] = field(default_factory=dict)
    forward_steps: int = 0
    index: int = 0
    performed: dict[type, Callable[[Rules, Any, Answer], None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.performed = _PERFORMED if self.memory is None else _PERFORMED_IN_BYTES

    @classmethod
    def in_bytes(
        cls,
        costs: StageCosts,
        n_steps: int | None = None,
        memory_bytes: int | None = None,
        tier_bytes: Mapping[int, int] | None = None,
        *,
        recovers: bool = False,
    ) -> Self:
        """Return a machine that counts bytes, for the stages of `costs` and the loss.

        Parameters
        ----------
        costs : StageCosts
        n_steps : int, optional
            Steps to reverse: all stages, with the loss (if None) or without.
        memory_bytes : int, optional
            State 0 included; None for no limit.
        tier_bytes : mapping, optional
            What tiers can hold, where bounded.
        recovers : bool
            As for `Rules`.
        """
        stages = len(costs.stages)
        n_steps = stages + 1 if n_steps is None else n_steps
        if n_steps not in (stages, stages + 1):
            raise ArgumentError(
                f"n_steps={n_steps} but the costs have {stages} stages and the loss, which may be "
                "left out"
            )
        memory = ByteAccounting(costs, memory_bytes)
        memory.begin(n_steps)
        if memory_bytes is not None and memory.resident_bytes > memory_bytes:
            raise ArgumentError(
                f"memory_bytes={memory_bytes} < {memory.resident_bytes} bytes of the chain's input "
                "and of the last gradient; raise the limit"
            )
        limits = dict(tier_bytes or {})
        return cls(n_steps, math.inf, 0.0, limits, recovers=recovers, memory=memory)

    def _fail(self, message: str) -> NoReturn:
        raise ScheduleError(message, self.index)

    def _room(self, more: float, what: Action | str) -> None:
        if self.used + more > self.slots + 1e-9:
            if not isinstance(what, str):
                what = _told(what)
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
            step = next(iter(self.tapes))
            self._fail(
                f"{action} but the chain has only its latest tape, and that of step {step} "
                f"is wanted still; Reverse({step}) first"
            )

    def expect(self, action: Offer | Await | Evict) -> None:
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
            case Evict():
                self.token_of(action)
            case _:
                assert_never(action)

    def apply(self, action: Action, answer: Answer) -> None:
        """Perform `action`, which was answered by `answer`.

        Raises
        ------
        ScheduleError
            When the action is illegal here; the machine is unchanged.
        """
        perform = self.performed.get(type(action))
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
        elif (step or self.held.get(step) is not None) and (
            self.memory is None or self.tapes.get(step - 1, -1) is not None
        ):
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
        self.tapes[step] = None
        self.live = step + 1
        self.forward_steps += 1

    def _reverse(self, action: Reverse, _: Answer) -> None:
        step = action.step
        if self.adjoint is None:
            self._fail(f"Reverse({step}) before EndForward")
        elif step != self.adjoint - 1:
            self._fail(f"Reverse({step}) but the next adjoint step is {self.adjoint - 1}")
        if step in self.tapes:
            if self.tapes[step] is not None:
                self._fail(f"Reverse({step}) before Await({self.tapes[step]}) of its tape's Get")
            if self.pins and ~step in self.pins:
                self._fail(f"Reverse({step}) but a write of its tape was not awaited")
            if self.state_is_tape and self.in_place and self.live is not None:
                if self.live < step:
                    self._borrow(1, f"Reverse({step}), which puts live state {self.live} aside,")
                else:
                    self.live = None
            del self.tapes[step]
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
            where = "no fast slot" if self.memory is None else "nothing in fast memory"
            self._fail(f"{what}({step}) but {where} holds checkpoint {step}")
        if self.held[step] is not None:
            self._fail(f"{what}({step}) before Await({self.held[step]}) of its Get")

    def _may_write(self, action: Offer | Put) -> bool:
        """Raise unless the write is legal; return whether it takes a staging slot."""
        step, tier = action.step, action.tier
        if action.tape:
            self._may_send_tape(action)
            return False
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

    def _may_send_tape(self, action: Offer | Put) -> None:
        step, tier = action.step, action.tier
        if self.one_tape:
            self._fail(f"{action} but the chain has only its latest tape, which cannot travel")
        if step not in self.tapes:
            self._fail(f"{action} but tape {step} is not held")
        if self.tapes[step] is not None:
            self._fail(f"{action} before Await({self.tapes[step]}) of its Get")
        if self.memory is not None and step in self.memory.late:
            self._fail(
                f"{action} but tape {step} was made in the reverse sweep, where no tape is written"
            )
        if (~step, tier) in self.stored:
            self._fail(f"{action} but tier {tier} already has that tape")

    def _write(self, action: Offer | Put, answer: Answer) -> None:
        item, tier = action.step, action.tier
        staged = self._may_write(action)
        if action.tape:
            item = ~item
        limit = self.tier_slots.get(tier)
        in_tier = self.tier_used.get(tier, 0)
        more = 1 if item >= 0 and self.memory is None else self._room_in_tier(item)
        if limit is not None and in_tier + more > limit and answer is not None:
            self._fail(f"{action} but tier {tier} is full: {self._filling(in_tier, limit, more)}")
        if answer is None:
            if isinstance(action, Put):
                self._fail(f"{action} was not answered by a token")
            return
        self._token(answer)
        self.unwritten.discard((item, tier))
        self.stored[item, tier] = self.next_token
        self.tier_used[tier] = in_tier + more
        self.tier_peak[tier] = max(self.tier_peak.get(tier, 0), in_tier + more)
        if staged:
            self._take(1)
            self.staged += 1
        else:
            self.pins[item] = self.pins.get(item, 0) + 1
        self.tokens[self.next_token] = Transfer(item, tier, is_write=True, staged=staged)
        self.next_token += 1

    def tier_has_room(self, action: Offer | Put) -> bool:
        """Whether the action's tier has room for what it would write, known limits given."""
        limit = self.tier_slots.get(action.tier)
        if limit is None:
            return True
        more = self._room_in_tier(~action.step if action.tape else action.step)
        return self.tier_used.get(action.tier, 0) + more <= limit

    def _room_in_tier(self, item: int) -> float:
        """Return what a state or tape takes of a tier: slots, or bytes."""
        if self.memory is not None:
            return self.memory.bytes_of(item)
        return self.tape_slots if item < 0 else 1

    def _filling(self, used: float, limit: float, more: float) -> str:
        if self.memory is None:
            return f"{used:g} of {limit:g} states"
        return f"{used:g} of {limit:g} bytes, and {more:g} more do not fit"

    def _token(self, answer: Answer) -> None:
        if answer != self.next_token:
            self._fail(f"the transfer was answered by token {answer}, not {self.next_token}")

    def _read(self, action: Get, _: Answer) -> None:
        step, tier = action.step, action.tier
        item, held = (~step, self.tapes) if action.tape else (step, self.held)
        if (item, tier) not in self.stored and (item, tier) not in self.unwritten:
            self._fail(f"{_told(action)} but tier {tier} has no {_item(item)}")
        if step in held:
            where = "it is held already" if action.tape else "a fast slot already holds it"
            self._fail(f"{_told(action)} but {where}")
        if not action.tape:
            self._room(1, action)
            self._take(1)
            self.unread.discard(step)
        elif held:
            self._room(self.tape_slots, action)
            self._take(self.tape_slots)
        held[step] = self.next_token
        self.tokens[self.next_token] = Transfer(item, tier, is_write=False, staged=False)
        self.next_token += 1

    def _may_await(self, token: int) -> None:
        if token not in self.tokens:
            self._fail(f"Await({token}) but no such transfer is under way")

    def _await(self, action: Await, answer: Answer) -> None:
        self._may_await(action.token)
        transfer = self.tokens.pop(action.token)
        item, tier = transfer.item, transfer.tier
        if transfer.is_write:
            if transfer.staged:
                self.used -= 1
                self.staged -= 1
            else:
                self._unpin(item)
            if (item, tier) in self.stored:
                self.stored[item, tier] = None
        elif item < 0:
            if answer is False and not self.recovers:
                self._end_tape(~item)
            else:
                self.tapes[~item] = None
        elif answer is False:
            del self.held[item]
            self.used -= 1
            if self.recovers:
                self.unread.add(item)
        else:
            self.held[item] = None
        if answer is False:
            self._lose(item, tier)

    def _unpin(self, item: int) -> None:
        self.pins[item] -= 1
        if not self.pins[item]:
            del self.pins[item]

    def _end_tape(self, step: int) -> None:
        del self.tapes[step]
        if self.tapes:
            self.used -= self.tape_slots

    def _lose(self, item: int, tier: int) -> None:
        """Take a copy that a transfer has lost out of its tier."""
        if (item, tier) in self.stored:
            del self.stored[item, tier]
            self.tier_used[tier] -= self._room_in_tier(item)
            if self.recovers:
                self.unwritten.add((item, tier))

    def token_of(self, action: Evict) -> int:
        """Return the token of the write that an eviction waits for.

        Raises
        ------
        ScheduleError
            When the eviction is illegal here; the machine is unchanged.
        """
        step, tier = action.step, action.tier
        item = ~step if action.tape else step
        token = self.stored.get((item, tier))
        transfer = None if token is None else self.tokens.get(token)
        if transfer is None:
            self._fail(f"{_told(action)} but no write of {_item(item)} to tier {tier} is under way")
        if transfer.staged:
            self._fail(f"{_told(action)} but its write is not from a fast slot")
        if self.pins[item] > 1:
            self._fail(f"{_told(action)} but another write from the same copy was not awaited")
        assert token is not None
        return token

    def _evict(self, action: Evict, answer: Answer) -> None:
        token = self.token_of(action)
        step, tier = action.step, action.tier
        item = ~step if action.tape else step
        del self.tokens[token]
        self._unpin(item)
        self.stored[item, tier] = None
        if action.tape:
            self._end_tape(step)
        else:
            del self.held[step]
            self.used -= 1
        if answer is False:
            self._lose(item, tier)

    def _drop(self, action: Drop, _: Answer) -> None:
        item, tier = ~action.step if action.tape else action.step, action.tier
        if (item, tier) not in self.stored and (item, tier) not in self.unwritten:
            self._fail(f"{_told(action)} but tier {tier} has no {_item(item)}")
        if any(t.item == item and t.tier == tier for t in self.tokens.values()):
            self._fail(f"{_told(action)} before its transfer was awaited")
        if (item, tier) in self.unwritten:
            self.unwritten.remove((item, tier))
            return
        del self.stored[item, tier]
        self.tier_used[tier] -= self._room_in_tier(item)

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
            "checkpoints in a tier": sorted(where for where in self.stored if where[0] >= 0),
            "tapes in a tier": sorted((~item, tier) for item, tier in self.stored if item < 0),
            "transfers not awaited": sorted(self.tokens),
        }
        for what, items in left.items():
            if items:
                self._fail(f"the schedule ended and left {what}: {items}")

    def usual_answer(self, action: Action) -> Answer:
        """Return what a tier answers that takes what it is offered and loses nothing."""
        match action:
            case Offer():
                return self.next_token if self.tier_has_room(action) else None
            case Put() | Get():
                return self.next_token
            case Await() | Evict():
                return True
            case _:
                return None

    def divert(self, save: Iterable[int], discard: Iterable[int]) -> None:
        """Leave a plan for a detour of `planners.chain.joint_rule`; in a machine that counts bytes.

        Writes under way are cancelled, their copies in the tier to be dropped; states at
        hand are kept, as by `Save`; tapes are given up, with the state inside if it is not
        kept.

        Raises
        ------
        ScheduleError
            If such a state or tape is not at hand; the machine is unchanged.
        """
        memory = self.memory
        assert memory is not None
        for step in save:
            if step in self.held or not memory.has(step, self):
                self._fail(f"a detour keeps state {step}, which is not at hand or is kept already")
        for step in discard:
            if self.tapes.get(step, -1) is not None:
                self._fail(f"a detour gives up tape {step}, which is not held")
        for token, transfer in list(self.tokens.items()):
            if transfer.is_write and not transfer.staged:
                del self.tokens[token]
                self._unpin(transfer.item)
                self.stored[transfer.item, transfer.tier] = None
        for step in save:
            memory.keep(step, self)
            self.held[step] = None
        for step in discard:
            self._end_tape(step)
            memory.give_up(step)

    def _in_bytes(self, action: Action, answer: Answer) -> None:
        """Perform an action where bytes are counted."""
        perform, memory = _PERFORMED[type(action)], self.memory
        assert memory is not None
        try:
            needed = memory.needed(action, self)
        except IndexError:  # a stage that there is not, which the rules refuse
            needed = 0
        short = memory.limit_bytes is not None and needed > memory.limit_bytes
        apart = action.step if isinstance(action, Reverse) else 0
        if memory.has(apart, self):
            apart = 0
        if short or apart:
            perform(deepcopy(self), action, answer)  # what else is wrong with it comes first
        if apart:
            self._fail(f"{_told(action)} but state {apart}, which it starts from, is not held")
        if short:
            self._fail(
                f"{_told(action)} needs {needed} bytes ({format_bytes(needed)}), "
                f"but the limit is {memory.limit_bytes}; free more before it or raise the limit"
            )
        token = action.token if isinstance(action, Await) else -1
        if isinstance(action, Evict):
            token = self.token_of(action)
        ended = self.tokens.get(token)
        perform(self, action, answer)
        memory.needed_bytes = needed
        memory.peak_bytes = max(memory.peak_bytes, needed)
        memory.settle(action, answer, self, ended)


def _item(item: int) -> str:
    return f"tape {~item}" if item < 0 else f"checkpoint {item}"


def _told(action: Action) -> str:
    """Return an action as messages show it: `Get(3, 0)`, `Get(3, 0, tape=True)`."""
    values = list(map(str, astuple(action)))
    if isinstance(action, Offer | Put | Get | Drop | Evict):
        values[-1:] = ["tape=True"] if action.tape else []
    return f"{type(action).__name__}({', '.join(values)})"


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
    Evict: Rules._evict,
    Drop: Rules._drop,
    EndForward: Rules._end_forward,
}
_PERFORMED_IN_BYTES: dict[type, Callable[[Rules, Any, Answer], None]] = dict.fromkeys(
    _PERFORMED, Rules._in_bytes
)
