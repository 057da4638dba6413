"""The state machine that judges schedules; what it judges by is told in `rules`."""

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
from .machine_state import ByteAccounting, MachineState, Transfer, told
from .step_rules import advance, end_forward, free, load, reverse, save, tape
from .transfer_rules import await_transfer, drop, evict, may_await, may_write, read, token_of, write

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
