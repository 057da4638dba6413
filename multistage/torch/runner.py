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
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
from ..detour import Deadlines
from ..errors import MultistageError
from .held import AwayState, HeldTape
from .parcels import Origins, Parcel
from .running import Stages, storages_of_all
from .saved import Caught
from .states import KeptState, refuse_shared, tensors_in
from .stowage import Berth, Stowage
from .traits import Traits as Traits


class Run:
    """One forward pass under a plan; lives as long as the graph it made.

    Parameters
    ----------
    stages, traits : sequences of equal length
    actions : sequence of Action
        Of a plan; its last stage is the loss.
    berth : Berth, optional
        The tier of a plan that sends something there.
    watchful : bool
        Whether every stage is watched for draws of random numbers; see `Stages`.
    deadlines : Deadlines, optional
        What to ask when writes are late; of the plan that the actions are of.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[Any], Any]],
        traits: Sequence[Traits],
        actions: Sequence[Action],
        berth: Berth | None = None,
        *,
        watchful: bool = True,
        deadlines: Deadlines | None = None,
    ) -> None:
        self._stages = Stages(stages, traits, watchful=watchful)
        self._planned = self._actions = actions
        self._deadlines = deadlines
        self._berth = berth
        self._stowage: Stowage | None = None
        self._streams = any(isinstance(action, Put) for action in actions)
        self._leaving = _states_that_leave(actions) if self._streams else set()
        self._origins = Origins()
        self._staying: set[int] = set()  # storages of the chain's input and output
        self._saved: dict[int, KeptState] = {}
        self._tapes: dict[int, HeldTape] = {}
        self._away: dict[int, AwayState] = {}
        self._away_tapes: dict[int, HeldTape] = {}
        self._live: Any = None  # in the forward sweep with its graph, later a KeptState
        self._first = True  # whether it is the forward sweep
        self._next = 0  # place in the actions
        self._at = len(stages)  # the lowest stage whose adjoint has begun
        self._lock = threading.RLock()

    def forward(self, state: Any) -> Any:
        """Run all stages; return the last state.

        Raises
        ------
        StateError
            If a stage changes what it did not change when it was profiled.
        OnceMore
            If a stage saves or returns more bytes than planned for, or draws random numbers
            unforeseen; all that the stages did is undone, except for writes to the input.
        """
        with self._unless_it_fails(), self._stages.turn(), self._stages.sweep(state):
            if self._streams:
                assert self._berth is not None
                names = [trait.name for trait in self._stages.traits]
                self._stowage = Stowage(self._berth, names)
            first = KeptState.of(state)
            self._staying = storages_of_all(tensors_in(state))
            if self._stages.traits[0].changes_input:
                refuse_shared(tensors_in(state))
                first = first.cloned()
            self._saved[0] = first
            self._live = state
            del state
            self._sweep()
            self._stages.returned(len(self._stages), tensors_in(self._live))
            self._first = False
            last, self._live = self._live, None
            return last

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Close the tier if anything goes wrong: no thread and no file is left."""
        try:
            yield
        except BaseException:
            if self._berth is not None and self._streams:
                self._berth.close()
            raise

    def _sweep(self) -> None:
        """Perform the actions of the forward sweep."""
        if self._deadlines is not None:
            self._deadlines.begin()
        for action in self._actions_left():
            if not isinstance(action, EndForward):
                self._perform(action)
            elif not self._left_plan(None):
                break

    def _left_plan(self, late: Evict | None) -> bool:
        """Take a detour if one is faster than to wait, for a write or for all that is away."""
        asked = self._deadlines
        if asked is None or self._actions is not self._planned or not self._is_forward:
            return False
        at, writes = self._next - 1, self._transfers
        if late is None:
            detour = asked.at_turn(writes)
        else:
            detour = asked.at_eviction(at, late.step, late.tape, writes)
        if detour is None:
            return False
        self._saved |= {step: self._found(step, at) for step in detour.save}
        for step in detour.discard:
            del self._tapes[step]
        self._leaving = set()  # nothing leaves any more
        self._actions, self._next = detour.actions, 0
        return True

    def _found(self, i: int, at: int) -> KeptState:
        """Return state i: kept, in a tape, the input of one, or live before action `at`."""
        if (state := self._at_hand(i)) is not None:
            return state
        if i in self._tapes and (state := self._tapes[i].state) is not None:
            return state
        ran = next(a for a in reversed(self._actions[:at]) if isinstance(a, Advance | Tape))
        reached = ran.stop if isinstance(ran, Advance) else ran.step + 1
        assert i == min(reached, len(self._stages))  # the loss runs elsewhere
        return self._live_state()

    def _actions_left(self) -> Iterator[Action]:
        """Yield the actions from where the last one left off."""
        while self._next < len(self._actions):
            action = self._actions[self._next]
            self._next += 1
            yield action

    # ----------------------------------------------------------------- actions

    def _perform(self, action: Action) -> None:
        """Perform one action of either sweep, but `EndForward` and `Reverse`."""
        match action:
            case Advance(start, stop):
                for i in range(start, stop):
                    self._advance(i)
            case Tape(step):
                if step < len(self._stages):
                    self._tape(step)
            case Save(step):
                self._saved[step] = self._live_state()
            case Load(step):
                self._live = self._state(step)
            case Free(step):
                self._saved.pop(step, None)
            case Put(step, tape=tape):
                self._transfers.put(step, tape, self._parcel(step, tape))
            case Evict(step, tape=tape):
                if not self._left_plan(action):
                    self._evict(step, tape)
            case Get(step, tape=tape):
                self._transfers.get(step, tape)
            case Await(token):
                self._await(token)
            case Drop(step, tape=tape):
                self._transfers.drop(step, tape)
                (self._away_tapes if tape else self._away).pop(step, None)
            case _:
                raise AssertionError(f"{action} has no place in a plan of a chain")

    @property
    def _transfers(self) -> Stowage:
        assert self._stowage is not None
        return self._stowage

    def _live_state(self) -> KeptState:
        return KeptState.of(self._live) if self._first else self._live

    def _advance(self, i: int) -> None:
        """Run stage i from the live state, without a tape."""
        if self._first:
            self._live = self._stages.hooked(i, self._given(), None, partial(self._tensor, i))
        else:
            self._live = self._stages.advance(i, self._given())

    def _given(self) -> list[Any]:
        """Return the live state in a box: whoever takes it out holds it alone."""
        box, self._live = [self._live], None
        return box

    def _tape(self, i: int) -> None:
        """Run stage i from the live state, keeping its tape."""
        if self._first and self._streams:
            self._tape_first(i)
        elif self._first:
            self._live = self._stages.first(i, self._given())  # its graph holds it
        elif self._at == len(self._stages) and not self._streams:
            self._advance(i)  # its graph has the tape
        else:
            state, self._live = self._live, None
            alone = self._is_reversed_next(i)
            caught, output = self._stages.catch(i, state, alone=alone)
            self._hold(i, caught, state, output)
            self._live = output

    def _is_reversed_next(self, i: int) -> bool:
        """Whether nothing runs before the adjoint of stage i: its output is not wanted."""
        for action in self._actions[self._next :]:
            if not isinstance(action, Get | Await | Free | Drop):
                return action == Reverse(i)
        return False

    def _tape_first(self, i: int) -> None:
        """Run stage i in the forward sweep, with its tape held here and not by its graph."""
        state = self._at_hand(i) or self._live_state()
        caught = Caught()
        self._live = self._stages.hooked(i, self._given(), caught, partial(self._tensor, i))
        self._hold(i, caught, state, KeptState.of(self._live))

    def _hold(self, i: int, caught: Caught, state: KeptState, output: KeptState | None) -> None:
        """Hold a tape; one of the forward sweep may leave fast memory."""
        if not self._streams or not self._is_forward:
            self._tapes[i] = HeldTape(caught, state)
            return
        leaves = i in self._leaving
        elsewhere = leaves and self._at_hand(i) is not None
        tape = self._tapes[i] = HeldTape(caught, None if elsewhere else state)
        last = i + 1 == len(self._stages)  # its output is the caller's
        if last and output is not None:
            self._staying |= storages_of_all(output.tensors())
        inputs = storages_of_all(state.tensors()) - self._staying
        stays = self._staying | self._stages.storages(i)
        if not leaves:
            stays |= inputs
            inputs = set()
        tape.packed(self._origins, stays, inputs, None if last else output)

    @property
    def _is_forward(self) -> bool:
        """Whether it is a forward sweep, the first or another."""
        return self._at == len(self._stages)

    # --------------------------------------------------------------- transfers

    def _parcel(self, step: int, tape: bool) -> Parcel:
        if tape:
            return self._tapes[step].parcel
        state = self._saved[step]
        away = AwayState(state.emptied(), Parcel(state.tensors(), self._origins, self._staying))
        self._away[step] = away
        return away.parcel

    def _evict(self, step: int, tape: bool) -> None:
        if tape:
            held = self._away_tapes[step] = self._tapes.pop(step)
            held.leave()
        else:
            self._saved.pop(step).verify()
        self._transfers.evict(step, tape)

    def _await(self, token: int) -> None:
        found = self._transfers.arrived(token)
        if found is None:
            return
        step, tape, parcel = found
        if parcel is None:
            return  # it is computed again when it is wanted
        if tape:
            held = self._tapes[step] = self._away_tapes.pop(step)
            held.returned()
        else:
            self._saved[step] = self._away.pop(step).back()

    # ------------------------------------------------------------- recovering

    def _at_hand(self, i: int) -> KeptState | None:
        """Return state i if it is in fast memory."""
        if i in self._saved:
            return self._saved[i]
        before = self._tapes.get(i - 1)
        return None if before is None else before.output

    def _state(self, i: int) -> KeptState:
        """Return state i; compute it from the nearest one at hand if it is lost."""
        start = i
        while (state := self._at_hand(start)) is None:
            start -= 1
        for j in range(start, i):
            state = self._stages.advance(j, [state])
        return state

    def _recover(self, i: int) -> None:
        """Make the tape of stage i again, which is lost or used up."""
        tape = self._tapes.get(i)
        state = None if tape is None else tape.state
        if state is None:
            state = self._state(i)
        caught, _ = self._stages.catch(i, state, alone=True)
        self._tapes[i] = HeldTape(caught, state)

    # ---------------------------------------------------------------- backward

    def _tensor(self, i: int, number: int) -> Tensor:
        """Return the tensor that stage i saved as its `number`-th."""
        if torch.is_grad_enabled():
            raise MultistageError(
                "double backward (create_graph=True) through a chain with recomputed stages is "
                "not supported; give it memory enough to keep every tape"
            )
        with self._lock:
            # Most are at hand, and nothing is to be done for them.
            tensor = None
            if i == self._at and not self._streams and (tape := self._tapes.get(i)) is not None:
                tensor = tape.at_hand(number)
            if tensor is None:
                tensor = self._wanted(i, number)
            self._stages.hand(tensor)
            return tensor

    def _wanted(self, i: int, number: int) -> Tensor:
        """Return a tensor that stage i saved, of a tape that is to be made if need be."""
        with self._unless_it_fails():
            if i != self._at or i not in self._tapes:
                with self._stages.as_at_first():
                    self._begin(i)
            return self._take(i, number)

    def _begin(self, i: int) -> None:
        """Have the tape of stage i at hand, and be done with those above."""
        if i >= self._at:
            self._start_over()
        for j in [j for j in self._tapes if j > i]:
            del self._tapes[j]  # nothing above is asked for any more
        self._drive(i)
        if i not in self._tapes:
            self._recover(i)
        self._tapes[i].begin()
        self._at = i

    def _take(self, i: int, number: int) -> Tensor:
        tape = self._tapes[i]
        if tape.is_input(number) and (state := self._at_hand(i)) is not None:
            state.verify()
        try:
            tensor = tape.take(number)
        except RuntimeError as error:
            # Autograd's own check, which hooks bypass.
            raise RuntimeError(
                f"a tensor that stage {self._stages.traits[i].name} saved for its gradient has "
                "been modified by an inplace operation; plain training fails here too"
            ) from error
        if tensor is None:
            with self._stages.as_at_first():
                self._recover(i)
            tensor = self._tapes[i].take(number)
            assert tensor is not None
        return tensor

    def _drive(self, i: int) -> None:
        """Perform the plan's actions until the adjoint of stage i may begin."""
        self._at = -1  # should an action fail, the next request starts over
        for action in self._actions_left():
            if isinstance(action, Reverse):
                self._live = None
                if action.step == i:
                    return
                self._tapes.pop(action.step, None)
            else:
                self._perform(action)
        raise AssertionError(f"the plan ended without stage {i}")

    def _start_over(self) -> None:
        """Stand where the forward sweep ended, by running forward again."""
        self._tapes.clear()
        self._away.clear()
        self._away_tapes.clear()
        if self._stowage is not None:
            self._stowage.clear()
        self._saved = {0: self._saved[0]}
        self._origins = Origins()
        self._live = self._saved[0]
        self._actions, self._next = self._planned, 0
        self._leaving = _states_that_leave(self._planned) if self._streams else set()
        self._at = len(self._stages)
        try:
            self._sweep()
        except BaseException:
            self._at = -1  # the next request starts over again
            raise
        self._live = None


def _states_that_leave(actions: Sequence[Action]) -> set[int]:
    """Return the states that fast memory lets go of, alone or inside of a tape."""
    return {a.step + a.tape for a in actions if isinstance(a, Evict)}
