"""The stages of a chain as the operators and the slots of a sweep, and their tapes.

The live state is in a box, a list of one: a stage takes it out, and nothing holds it while
the stage runs.  In the forward sweep it is what the stages return, with its graph; when
they run again it is a `KeptState`.  A tape is a `HeldTape`, or None where a graph has it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
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
from ...states.slots import Kept
from ..environment.states import EmptyState, KeptState
from ..measurement.saved import Caught, written_to
from ..tensors.geometry import Geometry, is_plain
from ..tiers.parcels import Origin, Origins, Parcel, Watch
from .stages import Box, StageRunner, storages_of_all


class HeldTape:
    """What a stage saved for its gradient.

    Parameters
    ----------
    caught : Caught
    state : KeptState or None
        That it was made from, which it holds on to.

    Attributes
    ----------
    output : KeptState or None
        The state that the stage made, if the tape holds it.
    """

    __slots__ = ("_given", "_inputs", "_parcel", "_parts", "_spare", "_stage", "_tensors",
                 "_versions", "output", "state")  # fmt: skip

    def __init__(self, caught: Caught, state: KeptState | None) -> None:
        self._tensors, self._versions, self._parts = caught.tape, caught.versions, caught.parts
        self._stage = caught.stage
        self._given: list[weakref.ref[Tensor] | None] = [None] * len(caught.tape)
        self._inputs: dict[int, tuple[Origin, Geometry, Watch]] = {}
        self._parcel: Parcel | None = None
        self._spare: EmptyState | None = None
        self.state = state
        self.output: KeptState | None = None

    def packed(
        self,
        origins: Origins,
        stays: Container[int],
        inputs: Container[int],
        output: KeptState | None,
    ) -> None:
        """Sort what the stage saved, so that the tape can leave fast memory.

        Parameters
        ----------
        origins : Origins
        stays, inputs : container of int
            Storages, by address: held elsewhere; of the state before, which is away at
            times and is not part of this tape.
        output : KeptState or None
            The state that the stage made, unless it is held elsewhere.
        """
        for number, tensor in enumerate(self._tensors):
            if tensor is not None and is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in inputs:
                    origin = origins.of(storage)
                    watch = Watch(tensor, origin, self._versions[number])
                    self._inputs[number] = origin, Geometry.of(tensor), watch
                    self._tensors[number] = None
        self.output = output
        others = [] if output is None else output.tensors()
        self._parcel = Parcel([*self._tensors, *others], origins, stays)
        self._tensors = self._parcel.tensors

    @property
    def parcel(self) -> Parcel:
        """What of it travels."""
        assert self._parcel is not None
        return self._parcel

    def leave(self) -> None:
        """Release the states beside it; what was written to since it was saved is spoilt."""
        for number, version in enumerate(self._versions):
            tensor = self._tensors[number]
            if tensor is not None and tensor._version != version:
                self._versions[number] = -1
        self._spare = None if self.output is None else self.output.emptied()
        self.output = self.state = None

    def returned(self) -> None:
        """Take what came back."""
        count, now = len(self._versions), self.parcel.versions
        for number, version in enumerate(self._versions):
            if version >= 0:
                self._versions[number] = now.get(number, version)
        if self._spare is not None:
            of_output = {number - count: version for number, version in now.items()}
            self.output = self._spare.filled(self._tensors[count:], of_output)
            self._spare = None

    def begin(self) -> None:
        """Release the output: the adjoint of the stage begins, and those above are done."""
        self.output = None
        del self._tensors[len(self._versions) :]

    def is_input(self, number: int) -> bool:
        """Whether the `number`-th tensor lies in the state before, which is not held on to."""
        return number in self._inputs

    def take(self, number: int) -> Tensor | None:
        """Return the tensor saved as the `number`-th and hold it no more; None if it is gone.

        Raises
        ------
        RuntimeError
            If it was written to since it was saved.
        """
        while self._parts and number < self._parts[-1]:
            # The stages above are done with: what nothing has asked for goes.
            part = self._parts.pop()
            self._tensors[part:] = [None] * (len(self._tensors) - part)
        if number in self._inputs:
            origin, geometry, watch = self._inputs[number]
            # Where the state before is lost, another parcel may be bringing these bytes.
            memory = origin.bytes() if origin.is_there else None
            if memory is None:
                return None
            if watch.changed or origin.written:
                raise written_to(self._stage)
            return watch.joined(origin.tensor(geometry, memory))
        tensor = self._tensors[number]
        if tensor is None:
            # Asked for twice, as a custom Function may: nothing else may hold it any more.
            reference = self._given[number]
            tensor = None if reference is None else reference()
            if tensor is None:
                return None
        if tensor._version != self._versions[number]:
            raise written_to(self._stage)
        # From here on it lives as long as the node that asked wants it.
        self._tensors[number], self._given[number] = None, weakref.ref(tensor)
        return tensor


@dataclass(slots=True)
class AwayState:
    """A state in the tier."""

    empty: EmptyState
    parcel: Parcel

    def back(self) -> KeptState:
        """Return the state, whose parcel has come back."""
        return self.empty.filled(self.parcel.tensors, self.parcel.versions)


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
        for at in range(self.next, len(self.actions)):
            if not isinstance(self.actions[at], Get | Await | Free | Drop):
                return self.actions[at] == Reverse(i)
        return False


class FastMemory:
    """What a sweep holds; under a plan with a tier, some of it may leave.

    Attributes
    ----------
    held, tapes : dict
        Those of the sweep.
    origin : KeptState
        State 0.
    origins : Origins
        Of what travels.
    staying : set of int
        Storages of the chain's input and output.
    leaving : set of int
        States that fast memory releases, alone or inside of a tape.
    """

    def __init__(self, origin: KeptState, staying: set[int]) -> None:
        self.held: dict[int, Kept | None] = {}
        self.tapes: dict[int, Kept] = {}
        self.origin, self.staying = origin, staying
        self.origins = Origins()
        self.leaving: set[int] = set()

    def at_hand(self, i: int) -> KeptState | None:
        """Return state i if it is in fast memory."""
        if i == 0:
            return self.origin
        kept = self.held.get(i)
        if kept is not None:
            assert isinstance(kept.state, KeptState)
            return kept.state
        tape = self.tape(i - 1)
        return None if tape is None else tape.output

    def tape(self, i: int) -> HeldTape | None:
        """Return the tape of stage i if it is held here."""
        kept = self.tapes.get(i)
        if kept is None:
            return None
        assert kept.state is None or isinstance(kept.state, HeldTape)
        return kept.state


class StageSlots:
    """Keeps states and tapes by reference; a write to them is detected."""

    shared = False

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

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        return Kept(tape, ())

    def adopt_adjoint(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint

    def apart(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint

    def release(self, kept: Kept) -> None:
        return

    def trim(self) -> None:
        return

    def release_all(self) -> None:
        return


class Links:
    """The stages of a chain as operators.

    Parameters
    ----------
    stages : StageRunner
    script : Script
    memory : FastMemory
    streams : bool
        Whether tapes may leave fast memory; no graph holds one then.

    Attributes
    ----------
    unpack : callable or None
        In the forward sweep of autograd: `unpack(i, number)` is to return the tensor that
        stage i saved as its `number`-th.
    """

    in_place = state_is_tape = one_tape = False

    def __init__(
        self, stages: StageRunner, script: Script, memory: FastMemory, *, streams: bool
    ) -> None:
        self._stages, self._script, self._memory = stages, script, memory
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
        """Run stage i, keeping its tape; the last one, the loss, runs elsewhere."""
        if i == len(self._stages):
            return [live.pop()], None
        if self.unpack is not None:
            return self._tape_first(live, i, self.unpack)
        if self._script.is_forward and not self._streams:
            return [self._stages.advance(i, live)], None  # its graph has the tape
        state = live.pop()
        assert isinstance(state, KeptState)
        caught, output = self._stages.catch(i, state, alone=self._script.reverses_next(i))
        return [output], self._tape_of(i, caught, state, output)

    def _tape_first(
        self, live: Box, i: int, unpack: Callable[[int, int], Tensor]
    ) -> tuple[Box, HeldTape | None]:
        """Run stage i in the forward sweep; its tape is held here if it may leave."""
        if not self._streams:
            return [self._stages.first(i, live)[0]], None
        state = self._memory.at_hand(i) or KeptState.of(live[0])
        output, caught = self._stages.first(i, live, unpack, holds=True)
        return [output], self._tape_of(i, caught, state, KeptState.of(output))

    def _tape_of(
        self, i: int, caught: Caught, state: KeptState, output: KeptState | None
    ) -> HeldTape:
        """Return a tape; one of the forward sweep may leave fast memory."""
        if not self._streams or not self._script.is_forward:
            return HeldTape(caught, state)
        memory = self._memory
        leaves = i in memory.leaving
        elsewhere = leaves and memory.at_hand(i) is not None
        tape = HeldTape(caught, None if elsewhere else state)
        last = i + 1 == len(self._stages)  # its output is the caller's
        if last and output is not None:
            memory.staying |= storages_of_all(output.tensors())
        inputs = storages_of_all(state.tensors()) - memory.staying
        stays = memory.staying | self._stages.storages(i)
        if not leaves:
            stays |= inputs
            inputs = set()
        tape.packed(memory.origins, stays, inputs, None if last else output)
        return tape

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        """Not called: autograd asks for the tapes."""
        raise AssertionError("autograd computes the adjoints of stages")
