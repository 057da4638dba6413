"""One forward and backward of a chain of stages, by a plan.

The graph is the one plain autograd builds: every stage runs once in the
forward sweep with gradients on, so parameters, hooks, DistributedDataParallel
and `torch.autograd.grad` see what they always see, and gradients are
accumulated in the same order.  Only what the graph *saves* differs.  A stage
whose tape the plan does not keep runs under saved-tensor hooks that keep a
number in place of each tensor.  When the backward pass asks for the first of
them, the plan's actions are performed up to that stage: states are run forward
again without a tape, and the stage itself once more with the tensors it saves
caught in order.

Tiers.  Under a plan that sends something to a slow tier, every stage runs under
such hooks, and a tape that the plan keeps is held here: in fast memory, or in
the tier from its `Evict` to its `Get`.  What does not come back is computed
again from the nearest state at hand.

Order.  The engine runs nodes by the order of their making, the latest first,
so all nodes of a stage run before any of the one below.  A stage is done with
when one below it asks.  Should a finished stage be asked again (a second
backward with `retain_graph`, or devices whose threads interleave), the sweep
starts over from state 0: slower, and right.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ...actions import (
    Action,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Offer,
    Put,
    Reverse,
    Schedule,
)
from ...errors import MultistageError
from ...execute.late import Late, Stages
from ...execute.sweep import Sweep, Wait
from ...states.slots import Kept, Slots
from ..environment.states import KeptState, refuse_shared, tensors_in
from ..measurement.checking import Check
from ..measurement.joining import Calls
from ..measurement.saved import Caught
from ..measurement.traits import Traits as Traits
from ..measurement.watching import Metered
from ..tiers.lane import ChainTier
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
        """Return the states that fast memory releases, alone or inside of a tape."""
        return {a.step + a.tape for a in self._planned if isinstance(a, Evict)}

    def _left(self) -> Schedule:
        while self.next < len(self.actions):
            action = self.actions[self.next]
            self.next += 1
            if isinstance(action, EndForward):
                self.is_forward = False
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

    The live state is in a box, a list of one: a stage takes it out, and nothing holds it while
    the stage runs.  In the forward sweep it is what the stages return, with its graph; when
    they run again it is a `KeptState`.  A tape is a `HeldTape`, or None where a graph has it.
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
            return HeldTape.staying(caught, state)
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
        """Return a state as it is kept, by reference."""
        (live,) = state
        if isinstance(live, KeptState):
            return Kept(live, ())
        kept = KeptState.of(live)
        return Kept(kept if self._stages.is_closed else kept.summed(), ())

    def adopt(self, arrays: Sequence[object], step: int) -> Kept:
        """Not called: see `Holdings.wait`."""
        raise AssertionError("a chain's tier brings states back by itself")

    def load(self, kept: Kept, live: object) -> Box:
        """Return a box with a state."""
        return [kept.state]

    def used_up(self, live: object) -> None:
        """Return what is live in place of a state that no stage starts from any more."""
        return

    def check(self, live: object, where: int | str) -> None:
        """Nothing: states may be of any kind."""


class Run:
    """One forward pass under a plan; lives as long as the graph it made.

    Parameters
    ----------
    stages, traits : sequences of equal length
    actions : sequence of Action
        Of a plan.
    tier : ChainTier, optional
        The tier of a plan that sends something there.
    course : Stages, optional
        What to ask when transfers are late; of the plan that the actions are of.
    left : callable, optional
        Called without arguments where the run goes on without its tier.
    metered : Metered, optional
        Meters this iteration.
    check : {"error", "warn", "off"}
        What to do where a run again saves other numbers than the first.
    is_known : bool
        Whether a run like this one was within the sizes planned for.
    """

    def __init__(
        self,
        stages: Calls,
        traits: Sequence[Traits],
        actions: Sequence[Action],
        tier: ChainTier | None = None,
        *,
        course: Stages | None = None,
        left: Callable[[], None] = lambda: None,
        metered: Metered | None = None,
        check: Check = "off",
        is_known: bool = False,
    ) -> None:
        self._stages = StageRunner(stages, traits, check=check, is_known=is_known)
        self._script = Script(actions)
        self._course, self._left, self._metered = course, left, metered
        self._tier = tier
        self._streams = any(isinstance(action, Put) for action in actions)
        self._lock = threading.RLock()

    def forward(self, state: object) -> object:
        """Run all stages; return the last state.

        Raises
        ------
        StateError
            If a stage changes what it did not change when it was profiled.
        OnceMore
            If a stage saves or returns more bytes than planned for; all that the stages did is
            undone, except for writes to the input.
        """
        with self._unless_it_fails(), self._stages.turn(), self._stages.sweep(state):
            first = KeptState.of(state)
            staying = storages_of_all(tensors_in(state))
            if self._stages.traits[0].changes_input:
                refuse_shared(tensors_in(state))
                first = first.cloned()
            else:
                first.summed()
            tier = self._tier if self._streams else None
            self._holdings = holdings = Holdings(self._stages, first, staying, tier)
            links = Links(self._stages, self._script, holdings, streams=self._streams)
            self._sweep = Sweep(
                self._play(),
                links,
                links,
                holdings,
                Kept(first, ()),
                [state],
                late=self._late(),
            )
            holdings.held, holdings.tapes = self._sweep.held, self._sweep.tapes
            del state, first
            # Not for longer: the graph refers to us, and we would to it.
            links.unpack = self._tensor
            try:
                with contextlib.nullcontext() if self._metered is None else self._metered.on():
                    self._sweep.forward()
            finally:
                links.unpack = None
            holdings.turn()
            live = self._sweep.take_live()
            assert isinstance(live, list)
            last = live.pop()
            self._stages.returned(len(self._stages), tensors_in(last))
            holdings.handed_out(tensors_in(last))
            if self._metered is not None:
                self._metered.returned(tensors_in(last))
            return last

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Leave the tier if anything goes wrong: no thread and no file is left, once it answers."""
        try:
            yield
        except BaseException:
            if self._tier is not None and self._streams:
                self._tier.leave()
            raise

    def _late(self) -> Callable[[Sweep, Wait | Offer], Schedule | None] | None:
        """Return what is asked where transfers are late."""
        if self._course is None or not self._streams:
            return None
        late: Late = Late(self._course)
        late.begin(self._holdings)
        # Not us: we have the sweep.
        script, holdings, left = self._script, self._holdings, self._left

        def asked(sweep: Sweep, action: Wait | Offer) -> Schedule | None:
            actions = late(sweep, action)
            if actions is None:
                return None
            holdings.leaving = set()  # nothing leaves any more
            left()
            return script.leave(tuple(actions))

        return asked

    def _play(self) -> Schedule:
        """Return the actions of the plan, from the first one on."""
        self._holdings.leaving = self._script.leaving()
        return self._script.play()

    def _restart(self) -> Schedule:
        """Release what is away; return the actions of the plan."""
        self._holdings.clear()
        self._holdings.known = {}
        self._sweep.late = self._late()
        return self._play()

    # ---------------------------------------------------------------- backward

    def _tensor(self, i: int, number: int) -> Tensor:
        """Return the tensor that stage i saved as its `number`-th."""
        # A Function's backward may enable gradients for itself, as many do that run forward again.
        if torch.is_grad_enabled() and torch._C._autograd._get_current_graph_task_keep_graph():
            raise MultistageError(
                "double backward (create_graph=True) through a chain with recomputed stages is "
                "not supported; give it memory enough to keep every tape"
            )
        with self._lock:
            # Most are at hand, and nothing is to be done for them.
            tensor, sweep = None, self._sweep
            if i == sweep.begun and not self._streams and sweep.given is not None:
                tensor = sweep.given.take(number)
            if tensor is None:
                with self._unless_it_fails():
                    tensor = self._wanted(i, number)
            self._stages.hand(tensor)
            return tensor

    def _wanted(self, i: int, number: int) -> Tensor:
        """Return a tensor that stage i saved, of a tape that is to be made if need be."""
        sweep = self._sweep
        if i != sweep.begun or sweep.given is None:
            with self._again():
                tape = sweep.reverse_until(i, self._restart)
                if tape is None:
                    tape = sweep.given = self._holdings.tape_again(i, None)
                assert isinstance(tape, HeldTape)
                tape = sweep.given = self._holdings.whole_tape(i, tape)
                tape.begin()
        tape = sweep.given
        if tape.is_input(number) and (state := self._holdings.at_hand(i)) is not None:
            state.verify()
        tensor: Tensor | None = tape.take(number)
        if tensor is None:
            with self._again():
                tape = sweep.given = self._holdings.tape_again(i, tape)
            tensor = tape.take(number)
            assert tensor is not None
        return tensor

    def _again(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the settings of the forward sweep, metered if this iteration is."""
        return self._stages.as_at_first() if self._metered is None else self._meter_again()

    @contextlib.contextmanager
    def _meter_again(self) -> Iterator[None]:
        assert self._metered is not None
        with self._stages.as_at_first(), self._metered.on(again=True):
            yield
