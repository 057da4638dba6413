"""The stages of a chain as the operators and the slots of a sweep.

The live state is in a box, a list of one: a stage takes it out, and nothing holds it while
the stage runs.  In the forward sweep it is what the stages return, with its graph; when
they run again it is a `KeptState`.  A tape is a `HeldTape`, or None where a graph has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from ...actions import (
    Action,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Reverse,
    Schedule,
    Tape,
)
from ...errors import ScheduleError
from ...states.slots import Kept, Slots
from ..environment.states import KeptState
from ..measurement.saved import Caught
from .holdings import HeldTape, Holdings
from .stages import Box, StageRunner, storages_of_all

Adjoint = TypeVar("Adjoint")


class Script:
    """The actions of a plan or of what replaces it, and how far they have been performed.

    Attributes
    ----------
    actions : sequence of Action
    next : int
        The place of the next one.
    is_forward : bool
        Whether it is in the forward sweep.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._planned = self.actions = actions
        self.next = 0
        self.is_forward = True

    def play(self) -> Schedule:
        """Return the actions of the plan."""
        self.is_forward = True
        return self.leave(self._planned)

    def leave(self, actions: Sequence[Action]) -> Schedule:
        """Return other actions, in place of the rest of the plan."""
        self.actions, self.next = actions, 0
        return self._left()

    def leaving(self) -> set[int]:
        """Return the states that fast memory releases, alone or inside of a tape.

        Raises
        ------
        ScheduleError
            If a copy of such a state is freed that a tape starts from: that tape leaves its
            input to what evicts it.
        """
        found = {a.step + a.tape for a in self._planned if isinstance(a, Evict)}
        tapes: set[int] = set()  # held
        inputs: set[int] = set()  # of tapes that are held; they are too
        for at, action in enumerate(self._planned):
            match action:
                case Tape(step):
                    tapes.add(step)
                    inputs.add(step)
                case Evict(step, _, tape):
                    inputs.discard(step + tape)
                    if tape:
                        tapes.discard(step)
                        inputs.discard(step)
                case Free(step) if step in found & inputs and step - 1 not in tapes:
                    raise ScheduleError(
                        f"Free({step}) takes the input of tape {step}, which is held, and another "
                        f"copy of state {step} is evicted; Evict({step}) both or neither",
                        at,
                    )
                case EndForward():
                    break
        return found

    def _left(self) -> Schedule:
        while self.next < len(self.actions):
            action = self.actions[self.next]
            self.next += 1
            if isinstance(action, EndForward):
                self.is_forward = False
            elif self.is_forward and isinstance(action, Load):
                raise ScheduleError(
                    f"Load({action.step}) in the forward sweep of autograd, whose graph leads from "
                    "each stage to the next; load states after EndForward only",
                    self.next - 1,
                )
            yield action

    def reverses_next(self, i: int) -> bool:
        """Whether nothing runs before the adjoint of stage i: its output is not wanted."""
        if self.actions[self.next - 1] == Reverse(i):
            return True
        for at in range(self.next, len(self.actions)):
            if not isinstance(self.actions[at], Get | Await | Free | Drop):
                return self.actions[at] == Reverse(i)
        return False


class Links(Slots[Box, object]):
    """The stages of a chain as the operators of a sweep, and its slots.

    States and tapes are kept by reference; a write to them is detected.

    Parameters
    ----------
    stages : StageRunner
    script : Script
    holdings : Holdings
    streams : bool
        Whether tapes may leave fast memory; no graph holds one then.

    Attributes
    ----------
    unpack : callable or None
        In the forward sweep of autograd: `unpack(i, number)` is to return the tensor that
        stage i saved as its `number`-th.
    """

    in_place = state_is_tape = one_tape = shared = False

    def __init__(
        self, stages: StageRunner, script: Script, holdings: Holdings, *, streams: bool
    ) -> None:
        self._stages, self._script, self._holdings = stages, script, holdings
        self._streams = streams
        self.unpack: Callable[[int, int], Tensor] | None = None

    def advance(self, live: Box, start: int, stop: int) -> Box:
        """Run stages without a tape."""
        for i in range(start, stop):
            if self.unpack is None:
                live = [self._stages.advance(i, live)]
            else:
                live = [self._stages.first(i, live, self.unpack)[0]]
        return live

    def tape(self, live: Box, i: int) -> tuple[Box, HeldTape | None]:
        """Run stage i, keeping its tape."""
        if self.unpack is not None:
            return self._tape_first(live, i, self.unpack)
        in_part = self._stages.traits[i].remade is not None
        if self._script.is_forward and not (self._streams or in_part):
            return [self._stages.advance(i, live)], None  # its graph has the tape
        state = live.pop()
        assert isinstance(state, KeptState)
        caught, output = self._stages.catch(i, state, alone=self._script.reverses_next(i))
        return [output], self._tape_of(i, caught, state, output)

    def _tape_first(
        self, live: Box, i: int, unpack: Callable[[int, int], Tensor]
    ) -> tuple[Box, HeldTape | None]:
        """Run stage i in the forward sweep; its tape is held here if it may leave."""
        if not self._streams and self._stages.traits[i].remade is None:
            return [self._stages.first(i, live)[0]], None
        state = self._holdings.at_hand(i) or KeptState.of(live[0])
        output, caught = self._stages.first(i, live, unpack, holds=True)
        kept = KeptState.of(output) if self._streams else None
        return [output], self._tape_of(i, caught, state, kept)

    def _tape_of(
        self, i: int, caught: Caught, state: KeptState, output: KeptState | None
    ) -> HeldTape:
        """Return a tape; one of the forward sweep may leave fast memory."""
        if not self._streams or not self._script.is_forward:
            return HeldTape(caught, state)
        holdings = self._holdings
        leaves = i in holdings.leaving
        elsewhere = leaves and holdings.at_hand(i) is not None
        tape = HeldTape(caught, None if elsewhere else state)
        last = i + 1 == len(self._stages)  # its output is the caller's
        if last and output is not None:
            holdings.staying |= storages_of_all(output.tensors())
        inputs = storages_of_all(state.tensors()) - holdings.staying
        stays = holdings.staying | self._stages.storages(i)
        if not leaves:
            stays |= inputs
            inputs = set()
        tape.packed(holdings.known, stays, inputs, None if last else output)
        return tape

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        """Not called: autograd asks for the tapes."""
        raise AssertionError("autograd computes the adjoints of stages")

    # ------------------------------------------------------------------- slots

    def keep(self, state: Box, where: int | str) -> Kept:
        (live,) = state
        return Kept(live if isinstance(live, KeptState) else KeptState.of(live).summed(), ())

    def adopt(self, arrays: Sequence[object], step: int) -> Kept:
        raise AssertionError("a chain's tier brings states back by itself")

    def load(self, kept: Kept, live: object) -> Box:
        return [kept.state]

    def used_up(self, live: object) -> None:
        """Return what is live in place of a state that no stage starts from any more."""
        return

    def check(self, live: object, where: int | str) -> None:
        """Nothing: states may be of any kind."""
