"""The state machine that judges schedules; what it judges by is told in `rules`.

Each function of an action performs it on a machine, or raises `ScheduleError` and changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NoReturn, Self, TypeAlias, assert_never

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
from .accounting import ByteAccounting, Transfer, item_of, item_said, told


def save(machine: Rules, action: Save, _: Answer) -> None:
    """Keep the live state in a fast slot."""
    step = action.step
    if machine.live != step:
        machine.fail(f"Save({step}) but the live state is {machine.live}")
    if step in machine.held:
        machine.fail(f"Save({step}) but a slot already holds it")
    machine.room(1, action)
    machine.take(1)
    machine.held[step] = None
    if machine.unread:
        machine.unread.discard(step)


def load(machine: Rules, action: Load, _: Answer) -> None:
    """Make a kept state the live one."""
    if machine.one_tape:
        machine.keep_latest(action)
    step = action.step
    if step and step in machine.unread and step not in machine.held:
        machine.room(1, action)
        machine.take(1)
        machine.held[step] = None
        machine.unread.discard(step)
    elif (step or machine.held.get(step) is not None) and (
        machine.memory is None or machine.tapes.get(step - 1, -1) is not None
    ):
        machine.readable(step, "Load")
    machine.live = step


def free(machine: Rules, action: Free, _: Answer) -> None:
    """Give the slot of a state back."""
    step = action.step
    if step in machine.unread and step not in machine.held:
        machine.unread.discard(step)
        return
    machine.readable(step, "Free")
    if machine.pins.get(step):
        machine.fail(f"Free({step}) but a write from that slot was not awaited")
    del machine.held[step]
    machine.used -= 1


def advance(machine: Rules, action: Advance, _: Answer) -> None:
    """Run steps from the live state, keeping nothing."""
    if machine.one_tape:
        machine.keep_latest(action)
    start, stop = action.start, action.stop
    limit = machine.n_steps if machine.adjoint is None else machine.adjoint
    if machine.live != start:
        machine.fail(f"Advance({start}, {stop}) but the live state is {machine.live}")
    if stop <= start:
        machine.fail(f"Advance({start}, {stop}) runs no step")
    if limit is not None and stop > limit:
        machine.fail(f"Advance({start}, {stop}) goes past state {limit}")
    machine.live = stop
    machine.forward_steps += stop - start


def tape(machine: Rules, action: Tape, _: Answer) -> None:
    """Run a step from the live state, keeping its tape."""
    if machine.one_tape:
        machine.keep_latest(action)
    step = action.step
    limit = machine.n_steps if machine.adjoint is None else machine.adjoint
    if machine.live != step:
        machine.fail(f"Tape({step}) but the live state is {machine.live}")
    if step in machine.tapes:
        machine.fail(f"Tape({step}) but that tape is already held")
    if limit is not None and step >= limit:
        machine.fail(f"Tape({step}) goes past state {limit}")
    if machine.tapes:
        machine.room(machine.tape_slots, action)
        machine.take(machine.tape_slots)
    machine.tapes[step] = None
    machine.live = step + 1
    machine.forward_steps += 1


def reverse(machine: Rules, action: Reverse, _: Answer) -> None:
    """Run an adjoint step from its tape, or from its state, which is used up."""
    step = action.step
    if machine.adjoint is None:
        machine.fail(f"Reverse({step}) before EndForward")
    elif step != machine.adjoint - 1:
        machine.fail(f"Reverse({step}) but the next adjoint step is {machine.adjoint - 1}")
    if step in machine.tapes:
        if machine.tapes[step] is not None:
            machine.fail(f"Reverse({step}) before Await({machine.tapes[step]}) of its tape's Get")
        if machine.pins and ~step in machine.pins:
            machine.fail(f"Reverse({step}) but a write of its tape was not awaited")
        if machine.state_is_tape and machine.in_place and machine.live is not None:
            if machine.live < step:
                machine.borrow(1, f"Reverse({step}), which puts live state {machine.live} aside,")
            else:
                machine.live = None
        del machine.tapes[step]
        if machine.tapes:
            machine.used -= machine.tape_slots
    elif machine.live == step:
        if machine.tapes and not machine.state_is_tape:
            beside = f"Reverse({step}), which makes a tape beside {len(machine.tapes)} held,"
            machine.borrow(machine.tape_slots, beside)
        machine.live = None
    else:
        machine.fail(
            f"Reverse({step}) finds neither its tape nor its state (live is {machine.live})"
        )
    machine.adjoint = step


def end_forward(machine: Rules, _action: EndForward, _: Answer) -> None:
    """Begin the reverse sweep: the live state is the last."""
    if machine.adjoint is not None:
        machine.fail("a second EndForward")
    last = machine.live if machine.n_steps is None else machine.n_steps
    if machine.live is None or machine.live != last:
        machine.fail(f"EndForward but the live state is {machine.live}, not {machine.n_steps}")
    machine.adjoint = machine.live


def may_write(machine: Rules, action: Offer | Put) -> bool:
    """Raise unless the write is legal; return whether it takes a staging slot."""
    step, tier = action.step, action.tier
    if action.tape:
        _may_send_tape(machine, action)
        return False
    staged = step not in machine.held
    if staged and machine.live != step:
        machine.fail(f"{action} but state {step} is neither live nor held (live {machine.live})")
    if not staged and machine.held[step] is not None:
        machine.fail(f"{action} before Await({machine.held[step]}) of its Get")
    if (step, tier) in machine.stored:
        machine.fail(f"{action} but tier {tier} already has that checkpoint")
    if staged:
        machine.room(1, action)
    return staged


def _may_send_tape(machine: Rules, action: Offer | Put) -> None:
    step, tier = action.step, action.tier
    if machine.one_tape:
        machine.fail(f"{action} but the chain has only its latest tape, which cannot travel")
    if step not in machine.tapes:
        machine.fail(f"{action} but tape {step} is not held")
    if machine.tapes[step] is not None:
        machine.fail(f"{action} before Await({machine.tapes[step]}) of its Get")
    if machine.memory is not None and step in machine.memory.late:
        machine.fail(
            f"{action} but tape {step} was made in the reverse sweep, where no tape is written"
        )
    if (~step, tier) in machine.stored:
        machine.fail(f"{action} but tier {tier} already has that tape")


def write(machine: Rules, action: Offer | Put, answer: Answer) -> None:
    """Begin a write, if the tier has taken it."""
    item, tier = item_of(action), action.tier
    staged = may_write(machine, action)
    limit = machine.tier_slots.get(tier)
    in_tier = machine.tier_used.get(tier, 0)
    more = 1 if item >= 0 and machine.memory is None else machine.room_in_tier(item)
    if limit is not None and in_tier + more > limit and answer is not None:
        machine.fail(f"{action} but tier {tier} is full: {machine.filling(in_tier, limit, more)}")
    if answer is None:
        if isinstance(action, Put):
            machine.fail(f"{action} was not answered by a token")
        return
    if answer != machine.next_token:
        machine.fail(f"the transfer was answered by token {answer}, not {machine.next_token}")
    machine.unwritten.discard((item, tier))
    machine.stored[item, tier] = machine.next_token
    machine.tier_used[tier] = in_tier + more
    machine.tier_peak[tier] = max(machine.tier_peak.get(tier, 0), in_tier + more)
    if staged:
        machine.take(1)
    else:
        machine.pins[item] = machine.pins.get(item, 0) + 1
    machine.tokens[machine.next_token] = Transfer(item, tier, is_write=True, staged=staged)
    machine.next_token += 1


def read(machine: Rules, action: Get, _: Answer) -> None:
    """Begin a read, into room that is taken from now on."""
    step, item, tier = action.step, item_of(action), action.tier
    held = machine.tapes if action.tape else machine.held
    if (item, tier) not in machine.stored and (item, tier) not in machine.unwritten:
        machine.fail(f"{told(action)} but tier {tier} has no {item_said(item)}")
    if step in held:
        where = "it is held already" if action.tape else "a fast slot already holds it"
        machine.fail(f"{told(action)} but {where}")
    if not action.tape or held:  # the first tape is working memory
        room = machine.tape_slots if action.tape else 1
        machine.room(room, action)
        machine.take(room)
    if not action.tape:
        machine.unread.discard(step)
    held[step] = machine.next_token
    machine.tokens[machine.next_token] = Transfer(item, tier, is_write=False, staged=False)
    machine.next_token += 1


def may_await(machine: Rules, token: int) -> None:
    """Raise unless there is such a transfer."""
    if token not in machine.tokens:
        machine.fail(f"Await({token}) but no such transfer is in flight")


def await_transfer(machine: Rules, action: Await, answer: Answer) -> None:
    """End a transfer: what it read is at hand, what it wrote may be given back."""
    may_await(machine, action.token)
    transfer = machine.tokens.pop(action.token)
    item, tier = transfer.item, transfer.tier
    if transfer.is_write:
        if transfer.staged:
            machine.used -= 1
        else:
            machine.unpin(item)
        if (item, tier) in machine.stored:
            machine.stored[item, tier] = None
    elif item < 0:
        if answer is False and not machine.recovers:
            machine.end_tape(~item)
        else:
            machine.tapes[~item] = None
    elif answer is False:
        del machine.held[item]
        machine.used -= 1
        if machine.recovers:
            machine.unread.add(item)
    else:
        machine.held[item] = None
    if answer is False:
        machine.lose(item, tier)


def evict(machine: Rules, action: Evict, answer: Answer) -> None:
    """End a write, and give back the fast copy that it wrote."""
    step, item, tier = action.step, item_of(action), action.tier
    del machine.tokens[machine.token_of(action)]
    machine.unpin(item)
    machine.stored[item, tier] = None
    if action.tape:
        machine.end_tape(step)
    else:
        del machine.held[step]
        machine.used -= 1
    if answer is False:
        machine.lose(item, tier)


def drop(machine: Rules, action: Drop, _: Answer) -> None:
    """Delete a copy from a tier."""
    item, tier = item_of(action), action.tier
    if (item, tier) not in machine.stored and (item, tier) not in machine.unwritten:
        machine.fail(f"{told(action)} but tier {tier} has no {item_said(item)}")
    if any(t.item == item and t.tier == tier for t in machine.tokens.values()):
        machine.fail(f"{told(action)} before its transfer was awaited")
    if (item, tier) in machine.unwritten:
        machine.unwritten.remove((item, tier))
        return
    del machine.stored[item, tier]
    machine.tier_used[tier] -= machine.room_in_tier(item)


_Perform: TypeAlias = Callable[[Any, Any, Answer], None]


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
    used: float = 0.0
    peak: float = 0.0
    tier_used: dict[int, float] = field(default_factory=dict)
    tier_peak: dict[int, float] = field(default_factory=dict)
    forward_steps: int = 0
    index: int = 0
    _performed: Mapping[type, _Perform] = field(init=False, repr=False)  # by action

    def __post_init__(self) -> None:
        self._performed = _PERFORMED if self.memory is None else _PERFORMED_IN_BYTES

    @classmethod
    def in_bytes(
        cls,
        costs: StageCosts,
        memory_bytes: int | None = None,
        tier_bytes: Mapping[int, int] | None = None,
        *,
        recovers: bool = False,
    ) -> Self:
        """Return a machine that counts bytes, for the stages of `costs`.

        Parameters
        ----------
        costs : StageCosts
        memory_bytes : int, optional
            State 0 included; None for no limit.
        tier_bytes : mapping, optional
            What tiers can hold, where bounded.
        recovers : bool
            As for `Rules`.
        """
        memory = ByteAccounting(costs, memory_bytes)
        if memory_bytes is not None and memory.resident_bytes > memory_bytes:
            raise ArgumentError(
                f"memory_bytes={memory_bytes} < {memory.resident_bytes} bytes of the chain's "
                "input; raise the limit"
            )
        limits = dict(tier_bytes or {})
        n_steps = len(costs.stages)
        return cls(n_steps, math.inf, 0.0, limits, recovers=recovers, memory=memory)

    def expect(self, action: Offer | Await | Evict) -> None:
        """Judge an action whose answer is not known yet; nothing changes.

        Raises
        ------
        ScheduleError
            When the action is illegal here whatever the answer.
        """
        match action:
            case Offer():
                may_write(self, action)
            case Await(token):
                may_await(self, token)
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
        perform = self._performed.get(type(action))
        if perform is None:
            self.fail(f"{action!r} is no action")
        else:
            perform(self, action, answer)
            self.index += 1

    def token_of(self, action: Evict) -> int:
        """Return the token of the write that an eviction waits for.

        Raises
        ------
        ScheduleError
            When the eviction is illegal here; the machine is unchanged.
        """
        item = item_of(action)
        token = self.stored.get((item, action.tier))
        transfer = None if token is None else self.tokens.get(token)
        if token is None or transfer is None:
            what = f"{item_said(item)} to tier {action.tier}"
            self.fail(f"{told(action)} but no write of {what} is in flight")
        if transfer.staged:
            self.fail(f"{told(action)} but its write is not from a fast slot")
        if self.pins[item] > 1:
            self.fail(f"{told(action)} but another write from the same copy was not awaited")
        return token

    def finish(self) -> None:
        """Raise `ScheduleError` unless the reversal is complete and nothing is left."""
        if self.adjoint != 0:
            self.fail(f"the schedule ended with the adjoint at {self.adjoint}, not 0")
        left = {
            "fast slots": sorted(self.held),
            "tapes": sorted(self.tapes),
            "checkpoints in a tier": sorted(where for where in self.stored if where[0] >= 0),
            "tapes in a tier": sorted((~item, tier) for item, tier in self.stored if item < 0),
            "transfers not awaited": sorted(self.tokens),
        }
        for what, items in left.items():
            if items:
                self.fail(f"the schedule ended and left {what}: {items}")

    def usual_answer(self, action: Action) -> Answer:
        """Return what a tier answers that takes what it is offered and loses nothing.

        Raises
        ------
        ScheduleError
            For an `Offer` that is illegal here.
        """
        match action:
            case Offer():
                self.expect(action)
                return self.next_token if self.tier_has_room(action) else None
            case Put() | Get():
                return self.next_token
            case Await() | Evict():
                return True
            case _:
                return None

    def leave(self, held: Set[int], tapes: Set[int], stuck: Iterable[int] = ()) -> None:
        """Go on without the tiers: what is there or on its way is given up.

        Parameters
        ----------
        held, tapes : set of int
            The states and tapes that are in fast memory from now on.  Others are given up;
            where bytes are counted, states at hand may be among them that were not kept.
        stuck : iterable of int
            States whose writes go on: they take their room to the end.

        Raises
        ------
        ScheduleError
            If such a state or tape is not at hand.
        """
        memory = self.memory
        for transfer in self.tokens.values():
            self._give_up(transfer)
        for where in (self.tokens, self.stored, self.unwritten, self.unread, self.tier_used):
            where.clear()
        for step in sorted(held - self.held.keys()):
            if memory is None or not memory.has(step, self):
                self.fail(f"state {step} is kept without the tiers, but it is not at hand")
            memory.keep(step, self)
            self.held[step] = None
        for step in sorted(tapes - self.tapes.keys()):
            self.fail(f"tape {step} is kept without the tiers, but it is not at hand")
        for step in sorted(self.tapes.keys() - tapes):
            self.end_tape(step)
            if memory is not None:
                memory.give_up(step)
        for step in sorted(self.held.keys() - held):
            free(self, Free(step), None)
            if memory is not None:
                memory.settle(Free(step), None, self, None)
        for step in stuck:
            self.slots -= 1
            if memory is not None and memory.limit_bytes is not None:
                memory.limit_bytes -= memory.bytes_of(step)

    def _give_up(self, transfer: Transfer) -> None:
        """Forget a transfer, and what it was to bring."""
        item, memory = transfer.item, self.memory
        if transfer.is_write and not transfer.staged:
            self.unpin(item)
            return
        if not transfer.is_write and item < 0:
            self.end_tape(~item)
        else:
            self.used -= 1
        if not transfer.is_write and item >= 0:
            del self.held[item]
        if memory is not None:
            memory.settle(Await(0), False, self, transfer)

    # ------------------------------------------------- what the rules are written in

    def fail(self, message: str) -> NoReturn:
        """Raise ScheduleError about the next action."""
        raise ScheduleError(message, self.index)

    # -------------------------------------------------------------- fast memory

    def room(self, more: float, what: Action | str) -> None:
        """Require so many slots more, for an action or what a message is to say of it."""
        if self.used + more > self.slots + 1e-9:
            if not isinstance(what, str):
                what = told(what)
            self.fail(
                f"{what} needs {more:g} fast slot(s), "
                f"but {self.used:g} of {self.slots:g} are taken; "
                "free one first or raise the budget"
            )

    def take(self, more: float) -> None:
        """Take slots."""
        self.used += more
        self.peak = max(self.peak, self.used)

    def borrow(self, more: float, what: str) -> None:
        """Take and give back room within one action."""
        self.room(more, what)
        self.peak = max(self.peak, self.used + more)

    def keep_latest(self, action: Action) -> None:
        """Require that no tape is held, where only the latest exists."""
        if self.tapes:
            step = next(iter(self.tapes))
            self.fail(
                f"{action} but the chain has only its latest tape, and that of step {step} "
                f"is still needed; Reverse({step}) first"
            )

    def readable(self, step: int, what: str) -> None:
        """Require that a slot holds a state, and that it has landed."""
        if step not in self.held:
            where = "no fast slot" if self.memory is None else "nothing in fast memory"
            self.fail(f"{what}({step}) but {where} holds checkpoint {step}")
        if self.held[step] is not None:
            self.fail(f"{what}({step}) before Await({self.held[step]}) of its Get")

    def unpin(self, item: int) -> None:
        """Count one write from a fast copy less."""
        self.pins[item] -= 1
        if not self.pins[item]:
            del self.pins[item]

    def end_tape(self, step: int) -> None:
        """Give a tape back."""
        del self.tapes[step]
        if self.tapes:
            self.used -= self.tape_slots

    # -------------------------------------------------------------------- tiers

    def tier_has_room(self, action: Offer | Put) -> bool:
        """Whether the action's tier has room for what it would write, known limits given."""
        limit = self.tier_slots.get(action.tier)
        if limit is None:
            return True
        more = self.room_in_tier(item_of(action))
        return self.tier_used.get(action.tier, 0) + more <= limit

    def room_in_tier(self, item: int) -> float:
        """Return what a state or tape takes of a tier: slots, or bytes."""
        if self.memory is not None:
            return self.memory.bytes_of(item)
        return self.tape_slots if item < 0 else 1

    def filling(self, used: float, limit: float, more: float) -> str:
        """Return what a tier holds, for messages."""
        if self.memory is None:
            return f"{used:g} of {limit:g} states"
        return f"{used:g} of {limit:g} bytes, and {more:g} more do not fit"

    def lose(self, item: int, tier: int) -> None:
        """Take a copy that a transfer has lost out of its tier."""
        if (item, tier) in self.stored:
            del self.stored[item, tier]
            self.tier_used[tier] -= self.room_in_tier(item)
            if self.recovers:
                self.unwritten.add((item, tier))


def _in_bytes(machine: Rules, action: Action, answer: Answer) -> None:
    """Perform an action where bytes are counted."""
    perform, memory = _PERFORMED[type(action)], machine.memory
    assert memory is not None
    try:
        needed = memory.needed(action, machine)
    except IndexError:  # a stage that there is not, which the rules refuse
        needed = 0
    short = memory.limit_bytes is not None and needed > memory.limit_bytes
    apart = action.step if isinstance(action, Reverse) else 0
    if memory.has(apart, machine):
        apart = 0
    if short or apart:
        perform(deepcopy(machine), action, answer)  # what else is wrong with it comes first
    if apart:
        machine.fail(f"{told(action)} but state {apart}, which it starts from, is not held")
    if short:
        machine.fail(
            f"{told(action)} needs {needed} bytes ({format_bytes(needed)}), "
            f"but the limit is {memory.limit_bytes}; free more before it or raise the limit"
        )
    token = action.token if isinstance(action, Await) else -1
    if isinstance(action, Evict):
        token = machine.token_of(action)
    ended = machine.tokens.get(token)
    perform(machine, action, answer)
    memory.needed_bytes = needed
    memory.peak_bytes = max(memory.peak_bytes, needed)
    memory.settle(action, answer, machine, ended)


_PERFORMED: Mapping[type, _Perform] = {
    Advance: advance,
    Tape: tape,
    Reverse: reverse,
    Save: save,
    Load: load,
    Free: free,
    Offer: write,
    Put: write,
    Get: read,
    Await: await_transfer,
    Evict: evict,
    Drop: drop,
    EndForward: end_forward,
}
_PERFORMED_IN_BYTES: Mapping[type, _Perform] = dict.fromkeys(_PERFORMED, _in_bytes)
