"""The schedule of a killed run of unequal steps: what is left, from the states on disk.

Killed before the last state was reached, the steps from the newest state on are planned as
those of a chain of their own, with the tier.  Below, each interval between two of the states
is reversed by `planners.chain.pieces`, while the state that begins the next one is read, if
that has room.  A state that cannot be read is computed again by the executor, from the one
below it.

Known gap: intervals are not planned together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...actions import Action, Await, Drop, EndForward, Free, Get, Load, Put
from ...model.stages import StageCosts
from ...model.tier import Tier
from .memory import left_to_reverse, shifted
from .pieces import PersistentPlanner, chain_plan, part, plan, without_end


def resumed_actions(
    costs: StageCosts,
    room_bytes: int,
    planner: PersistentPlanner,
    rates: Tier | None,
    stored: Sequence[int],
    end: int | None,
    slots: int | None = None,
) -> Iterator[Action]:
    """Yield the actions of a run that was killed.

    Parameters
    ----------
    costs : StageCosts
        Of all steps.
    room_bytes : int
        For what is kept, at least a state.
    rates : Tier or None
        What the rest of the forward sweep is planned with.
    stored : sequence of int
        States in the tier, ascending, below `end`.
    end : int or None
        Step of the adjoint to continue with, `EndForward` then being the first action; None
        if the forward sweep is not over.
    slots : int, optional
        As for `plan`; nothing is read ahead then.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(9, Stage("a", 1.0, 2.0, 10, 10), 10)
    >>> actions = list(resumed_actions(costs, 20, "optimal", None, [4], 6))
    >>> [type(action).__name__ for action in actions[:4]], actions[1].step
    (['EndForward', 'Get', 'Await', 'Load'], 4)
    """
    left, tokens, coming = [0, *stored], 0, -1
    forward = end is None
    if not forward:
        yield EndForward()
    at = len(costs.stages) if end is None else end
    sizes = [0, *(stage.output_bytes for stage in costs.stages)]  # state 0 is the caller's
    while at:
        start = left.pop()
        room = room_bytes - sizes[start]
        if start:
            if coming < 0:
                yield Get(start)
                tokens, coming = tokens + 1, tokens
            yield Await(coming)
            coming = -1
        yield Load(start)
        if forward:
            found = chain_plan(part(costs, start, at), max(0, room), planner, rates, slots)
            first = tokens
            for action in found.actions:
                tokens += isinstance(action, Get | Put)
                if isinstance(action, Await):
                    action = Await(action.token + first)
                yield shifted(action, start)
            forward = False
        else:
            if slots is None and start and left[-1] and sizes[left[-1]] <= room:
                room -= sizes[left[-1]]
                yield Get(left[-1])
                tokens, coming = tokens + 1, tokens
            here = part(costs, start, at)
            within = plan(here, max(0, room), planner, first=start, slots=slots)
            yield from left_to_reverse(without_end(within))
        if start:
            yield Free(start)
            yield Drop(start)
        at = start
