"""The state machine that judges schedules; what it judges by is told in `rules`.

Each function of an action performs it on a machine, or raises `ScheduleError` and changes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias, assert_never

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
from ..errors import ArgumentError
from ..model.stages import StageCosts
from ..support.units import format_bytes
from .machine_state import ByteAccounting, MachineState, Transfer, item_said, told


def save(machine: MachineState, action: Save, _: Answer) -> None:
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


def load(machine: MachineState, action: Load, _: Answer) -> None:
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


def free(machine: MachineState, action: Free, _: Answer) -> None:
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


def advance(machine: MachineState, action: Advance, _: Answer) -> None:
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


def tape(machine: MachineState, action: Tape, _: Answer) -> None:
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


def reverse(machine: MachineState, action: Reverse, _: Answer) -> None:
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


def end_forward(machine: MachineState, _action: EndForward, _: Answer) -> None:
    """Begin the reverse sweep: the live state is the last."""
    if machine.adjoint is not None:
        machine.fail("a second EndForward")
    last = machine.live if machine.n_steps is None else machine.n_steps
    if machine.live is None or machine.live != last:
        machine.fail(f"EndForward but the live state is {machine.live}, not {machine.n_steps}")
    machine.adjoint = machine.live


def may_write(machine: MachineState, action: Offer | Put) -> bool:
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


def _may_send_tape(machine: MachineState, action: Offer | Put) -> None:
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


def write(machine: MachineState, action: Offer | Put, answer: Answer) -> None:
    """Begin a write, if the tier has taken it."""
    item, tier = action.step, action.tier
    staged = may_write(machine, action)
    if action.tape:
        item = ~item
    limit = machine.tier_slots.get(tier)
    in_tier = machine.tier_used.get(tier, 0)
    more = 1 if item >= 0 and machine.memory is None else machine.room_in_tier(item)
    if limit is not None and in_tier + more > limit and answer is not None:
        machine.fail(f"{action} but tier {tier} is full: {machine.filling(in_tier, limit, more)}")
    if answer is None:
        if isinstance(action, Put):
            machine.fail(f"{action} was not answered by a token")
        return
    _require_next(machine, answer)
    machine.unwritten.discard((item, tier))
    machine.stored[item, tier] = machine.next_token
    machine.tier_used[tier] = in_tier + more
    machine.tier_peak[tier] = max(machine.tier_peak.get(tier, 0), in_tier + more)
    if staged:
        machine.take(1)
        machine.staged += 1
    else:
        machine.pins[item] = machine.pins.get(item, 0) + 1
    machine.tokens[machine.next_token] = Transfer(item, tier, is_write=True, staged=staged)
    machine.next_token += 1


def _require_next(machine: MachineState, answer: Answer) -> None:
    if answer != machine.next_token:
        machine.fail(f"the transfer was answered by token {answer}, not {machine.next_token}")


def read(machine: MachineState, action: Get, _: Answer) -> None:
    """Begin a read, into room that is taken from now on."""
    step, tier = action.step, action.tier
    item, held = (~step, machine.tapes) if action.tape else (step, machine.held)
    if (item, tier) not in machine.stored and (item, tier) not in machine.unwritten:
        machine.fail(f"{told(action)} but tier {tier} has no {item_said(item)}")
    if step in held:
        where = "it is held already" if action.tape else "a fast slot already holds it"
        machine.fail(f"{told(action)} but {where}")
    if not action.tape:
        machine.room(1, action)
        machine.take(1)
        machine.unread.discard(step)
    elif held:
        machine.room(machine.tape_slots, action)
        machine.take(machine.tape_slots)
    held[step] = machine.next_token
    machine.tokens[machine.next_token] = Transfer(item, tier, is_write=False, staged=False)
    machine.next_token += 1


def may_await(machine: MachineState, token: int) -> None:
    """Raise unless there is such a transfer."""
    if token not in machine.tokens:
        machine.fail(f"Await({token}) but no such transfer is in flight")


def await_transfer(machine: MachineState, action: Await, answer: Answer) -> None:
    """End a transfer: what it read is at hand, what it wrote may be given back."""
    may_await(machine, action.token)
    transfer = machine.tokens.pop(action.token)
    item, tier = transfer.item, transfer.tier
    if transfer.is_write:
        if transfer.staged:
            machine.used -= 1
            machine.staged -= 1
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


def token_of(machine: MachineState, action: Evict) -> int:
    """Return the token of the write that an eviction waits for.

    Raises
    ------
    ScheduleError
        When the eviction is illegal here; the machine is unchanged.
    """
    step, tier = action.step, action.tier
    item = ~step if action.tape else step
    token = machine.stored.get((item, tier))
    transfer = None if token is None else machine.tokens.get(token)
    if transfer is None:
        what = item_said(item)
        machine.fail(f"{told(action)} but no write of {what} to tier {tier} is in flight")
    if transfer.staged:
        machine.fail(f"{told(action)} but its write is not from a fast slot")
    if machine.pins[item] > 1:
        machine.fail(f"{told(action)} but another write from the same copy was not awaited")
    assert token is not None
    return token


def evict(machine: MachineState, action: Evict, answer: Answer) -> None:
    """End a write, and give back the fast copy that it wrote."""
    token = token_of(machine, action)
    step, tier = action.step, action.tier
    item = ~step if action.tape else step
    del machine.tokens[token]
    machine.unpin(item)
    machine.stored[item, tier] = None
    if action.tape:
        machine.end_tape(step)
    else:
        del machine.held[step]
        machine.used -= 1
    if answer is False:
        machine.lose(item, tier)


def drop(machine: MachineState, action: Drop, _: Answer) -> None:
    """Delete a copy from a tier."""
    item, tier = ~action.step if action.tape else action.step, action.tier
    if (item, tier) not in machine.stored and (item, tier) not in machine.unwritten:
        machine.fail(f"{told(action)} but tier {tier} has no {item_said(item)}")
    if any(t.item == item and t.tier == tier for t in machine.tokens.values()):
        machine.fail(f"{told(action)} before its transfer was awaited")
    if (item, tier) in machine.unwritten:
        machine.unwritten.remove((item, tier))
        return
    del machine.stored[item, tier]
    machine.tier_used[tier] -= machine.room_in_tier(item)


_Perform: TypeAlias = Callable[[MachineState, Any, Answer], None]


@dataclass(slots=True)
class Rules(MachineState):
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

    _performed: Mapping[type, _Perform] = field(init=False, repr=False)  # by action

    def __post_init__(self) -> None:
        self._performed = _PERFORMED if self.memory is None else _PERFORMED_IN_BYTES

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
                token_of(self, action)
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
        return token_of(self, action)

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
            self.staged -= transfer.is_write
        if not transfer.is_write and item >= 0:
            del self.held[item]
        if memory is not None:
            memory.settle(Await(0), False, self, transfer)


def _in_bytes(machine: MachineState, action: Action, answer: Answer) -> None:
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
        token = token_of(machine, action)
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
