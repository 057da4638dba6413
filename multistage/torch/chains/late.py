"""What the sweep of a chain waits for in its tier, and how it goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ...actions import Action, Await, Put, Schedule
from ...execute.late import Wait
from ...execute.sweep import Sweep
from ...states.slots import Kept
from ..environment.states import KeptState
from .away import Away
from .links import FastMemory, Script


class LateAway:
    """The tier of one run, as `multistage.execute.late` asks for it.

    Parameters
    ----------
    script : Script
    memory : FastMemory
    away : Away
    left : callable
        Called without arguments once the run goes on without its tier.
    """

    def __init__(
        self, script: Script, memory: FastMemory, away: Away, left: Callable[[], None]
    ) -> None:
        self._script, self._memory, self._away, self._left = script, memory, away, left
        self._stowage = stowage = away.stowage
        self.seen_s, self.cancel = stowage.seen_s, stowage.cancel

    def awaited(self, sweep: Sweep, action: Wait) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait."""
        if isinstance(action, Put):
            return None  # it is queued at once
        step, is_tape, is_write = self.moved(action)
        if is_write:
            return partial(self._stowage.written, step, is_tape)
        return partial(self._stowage.read, step, is_tape)

    def stalled(self, since: float, late: str = "") -> None:
        """Nothing: the stowage counts what it waits itself."""

    def said(self, action: Wait) -> tuple[str, str]:
        """Return what an action waits for, and the name of its tier."""
        step, is_tape, is_write = self.moved(action)
        what = f"{'write' if is_write else 'read'} of {'tape' if is_tape else 'state'} {step}"
        return f"the {what}", self._stowage.name

    def moved(self, action: Wait) -> tuple[int, bool, bool]:
        """Return what an action waits for: the step, whether a tape, whether a write."""
        if isinstance(action, Await):
            return self._stowage.moved(action.token)
        return action.step, action.tape, True

    def is_behind(self) -> bool:
        """Whether a write has not ended."""
        return bool(self._stowage.writing())

    def busier(self, planned_s: float) -> float:
        """Return how much longer than planned the forward sweep has taken that took so long."""
        if not self._script.is_forward or not planned_s:
            return 1.0
        return self._stowage.computed_s() / planned_s

    @property
    def stuck(self) -> list[int]:
        """States, and tapes as ~step, whose transfers go on all the same."""
        return self._stowage.stuck()

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is in the tier or on its way."""
        self._away.clear()
        sweep.lost.clear()

    def hold(self, sweep: Sweep, saved: frozenset[int], tapes: frozenset[int]) -> None:
        """Hold these states and tapes, and nothing else."""
        found = {i: Kept(self._found(sweep, i), ()) for i in saved - sweep.held.keys()}
        for i in sweep.held.keys() - saved:
            del sweep.held[i]
        sweep.held.update(found)
        for i in sweep.tapes.keys() - tapes:
            del sweep.tapes[i]
        self._memory.leaving = set()  # nothing leaves any more

    def played(self, actions: Iterable[Action]) -> Schedule:
        """Return actions as a schedule that replaces the plan's."""
        self._left()
        return self._script.leave(tuple(actions))

    def _found(self, sweep: Sweep, i: int) -> KeptState:
        """Return state i: in a tape, or live."""
        if (state := self._memory.at_hand(i)) is not None:
            return state
        assert i == sweep.at, f"state {i} is not at hand"
        (live,) = sweep.live
        return live if isinstance(live, KeptState) else KeptState.of(live)
