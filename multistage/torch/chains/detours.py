"""How the sweep of a chain leaves its plan, where writes to the tier are late."""

from __future__ import annotations

from ...actions import EndForward, Evict, Put, Schedule
from ...execute.detour import Deadlines
from ...execute.sweep import Sweep
from ...states.slots import Kept
from ..environment.states import KeptState
from .away import Away
from .links import FastMemory, Script


class TakenWhenLate:
    """Takes a detour if one is faster than to wait, for a write or for all that is away.

    Parameters
    ----------
    deadlines : Deadlines
        Of the plan.
    script : Script
    memory : FastMemory
    away : Away
    """

    def __init__(
        self, deadlines: Deadlines, script: Script, memory: FastMemory, away: Away
    ) -> None:
        self._deadlines, self._script = deadlines, script
        self._memory, self._away = memory, away

    def __call__(self, sweep: Sweep, action: Put | Evict | EndForward) -> Schedule | None:
        """Return the actions to continue with in place of this one and the rest of the plan."""
        asked, script, writes = self._deadlines, self._script, self._away.stowage
        if script.has_left or isinstance(action, Put):  # here writes are queued at once
            return None
        if isinstance(action, EndForward):
            detour = asked.at_turn(writes)
        else:
            detour = asked.at_eviction(script.next - 1, action.step, action.tape, writes)
        if detour is None:
            return None
        sweep.held.update({i: Kept(self._found(sweep, i), ()) for i in detour.save})
        for step in detour.discard:
            del sweep.tapes[step]
        self._memory.leaving = set()  # nothing leaves any more
        return script.leave(detour.actions)

    def _found(self, sweep: Sweep, i: int) -> KeptState:
        """Return state i: kept, in a tape, the input of one, or live."""
        if (state := self._memory.at_hand(i)) is not None:
            return state
        tape = self._memory.tape(i)
        if tape is not None and tape.state is not None:
            return tape.state
        # The loss runs elsewhere: what is live then is the output.
        reached = min(sweep.at, len(self._deadlines.plan.costs.stages))
        assert i == reached, f"state {i} is not at hand"
        (live,) = sweep.live
        return live if isinstance(live, KeptState) else KeptState.of(live)
