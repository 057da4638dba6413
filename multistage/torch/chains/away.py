"""Tapes and states of a chain that are in its tier, or lost.

What does not come back is computed again from the nearest state at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ...actions import Answer, Await, Drop, Evict, Get, Offer, Put
from ...execute.sweep import Moved, Sweep, Wait
from ...states.slots import Kept
from ..environment.states import KeptState
from ..tiers.parcels import Parcel
from ..tiers.stowage import Stowage
from .links import AwayState, FastMemory, HeldTape
from .stages import StageRunner


class Away:
    """What a sweep has elsewhere.

    Parameters
    ----------
    stages : StageRunner
    memory : FastMemory
    stowage : Stowage or None
        None for a plan that sends nothing away.
    """

    def __init__(self, stages: StageRunner, memory: FastMemory, stowage: Stowage | None) -> None:
        self._stages, self._memory, self._stowage = stages, memory, stowage
        self._states: dict[int, AwayState] = {}
        self._tapes: dict[int, HeldTape] = {}
        self._staged: dict[int, KeptState] = {}  # held for their writes alone, by token

    @property
    def stowage(self) -> Stowage:
        """What the tier has."""
        assert self._stowage is not None
        return self._stowage

    def clear(self) -> None:
        """Release all of it."""
        self._states.clear()
        self._tapes.clear()
        self._staged.clear()
        if self._stowage is not None:
            self._stowage.clear()

    # ----------------------------------------------------------------- actions

    def write(self, sweep: Sweep, action: Offer | Put) -> Answer:
        """Queue the way of a state or tape to the tier."""
        step, memory = action.step, self._memory
        if action.tape:
            held = memory.tape(step)
            assert held is not None
            self.stowage.put(step, True, held.parcel)
            return None
        kept = memory.at_hand(step)
        state = sweep.slots.keep(sweep.live, step).state if kept is None else kept
        assert isinstance(state, KeptState)
        parcel = Parcel(state.tensors(), memory.origins, memory.staying)
        self._states[step] = AwayState(state.emptied(), parcel)
        token = self.stowage.put(step, False, parcel)
        if kept is None:
            self._staged[token] = state
        return None

    def evict(self, sweep: Sweep, action: Evict) -> Answer:
        """Wait until a state or tape has left, and release it."""
        step = action.step
        if action.tape:
            tape = sweep.tapes.pop(step).state
            assert isinstance(tape, HeldTape)
            self._tapes[step] = tape
            tape.leave()
        else:
            kept = sweep.held.pop(step)
            assert kept is not None and isinstance(kept.state, KeptState)
            kept.state.verify()
        return self.stowage.evict(step, action.tape)

    def read(self, sweep: Sweep, action: Get) -> Answer:
        """Queue the way back."""
        self.stowage.get(action.step, action.tape)
        return None

    def wait(self, sweep: Sweep, action: Await) -> Answer:
        """Wait for what is on its way to the tier or back."""
        written = self.stowage.left(action.token)
        if written is not None:
            state = self._staged.pop(action.token, None)
            if state is not None:
                state.verify()
            return written
        step, is_tape, parcel = self.stowage.arrived(action.token)
        if parcel is None:  # it is computed again when it is needed
            sweep.lost.add(~step if is_tape else step)
            return False
        if is_tape:
            tape = self._tapes.pop(step)
            tape.returned()
            sweep.tapes[step] = Kept(tape, ())
        else:
            sweep.held[step] = Kept(self._states.pop(step).back(), ())
        return True

    def drop(self, sweep: Sweep, action: Drop) -> Answer:
        """Free the tier's copy."""
        self.stowage.drop(action.step, action.tape)
        (self._tapes if action.tape else self._states).pop(action.step, None)
        return None

    # -------------------------------------------------------------- what is lost

    def find(self, sweep: Sweep, step: int) -> Kept:
        """Return a state inside of a tape, the live one, or one computed again."""
        state = self._memory.at_hand(step)
        if state is None and step == sweep.at:
            (live,) = sweep.live
            state = live if isinstance(live, KeptState) else KeptState.of(live)
        return Kept(self.state(step) if state is None else state, ())

    def find_tape(self, sweep: Sweep, step: int) -> HeldTape:
        """Return a tape made again."""
        return self.tape_again(step, None)

    def state(self, i: int) -> KeptState:
        """Return state i; compute it from the nearest one at hand if it is lost."""
        start = i
        while (state := self._memory.at_hand(start)) is None:
            start -= 1
        for j in range(start, i):
            state = self._stages.advance(j, [state])
        return state

    def tape_again(self, i: int, tape: HeldTape | None) -> HeldTape:
        """Make the tape of stage i again, which is lost or used up."""
        state = None if tape is None else tape.state
        if state is None:
            state = self.state(i)
        caught, _ = self._stages.catch(i, state, alone=True)
        return HeldTape(caught, state)

    def awaited(self, sweep: Sweep, action: Wait) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait."""
        if isinstance(action, Put):
            return None  # it is queued at once
        moved = self.moved(action)
        wait = self.stowage.written if moved.is_write else self.stowage.read
        return partial(wait, moved.step, moved.is_tape)

    def moved(self, action: Wait | Offer) -> Moved:
        """Return what an action waits for, or offers."""
        if isinstance(action, Await):
            return Moved(*self.stowage.moved(action.token), 0, self.stowage.name)
        return Moved(action.step, action.tape, True, 0, self.stowage.name)

    def behind_s(self) -> float:
        """Return the seconds since the oldest write was queued that has not ended, else 0."""
        writing = self.stowage.writing()
        return time.perf_counter() - min(trip.queued_s for trip in writing) if writing else 0.0

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown."""
        return self.stowage.seen_s(writes=writes)

    def cancel(self, timeout_s: float) -> None:
        """Cancel all transfers; wait so many seconds for those in flight to end."""
        self.stowage.cancel(timeout_s)

    def stuck(self) -> list[int]:
        """Return states, and tapes as ~step, whose cancelled transfers have not ended."""
        return self.stowage.stuck()

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is in the tier or on its way."""
        self.clear()
        sweep.lost.clear()
