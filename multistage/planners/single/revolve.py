"""Revolve: the optimum for uniform steps and one memory level.

Griewank & Walther, ACM TOMS 26 (2000) 19-45, doi:10.1145/347837.347846.
Optimal in forward steps for every n and number of slots; n + nu(n, s) steps
counting taped ones.  The recompute factor grows with n without bound.
"""

from __future__ import annotations

from functools import partial

from ...actions import Advance, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...errors import ArgumentError
from ...model.costs import Costs
from ..bound import lower_bound
from ..uniform import UniformPlan, require_steps
from .binomial import forward_and_reverse, nu, reverse_actions

# An advance, a load and a reverse per step, and a save and a free for most.
ACTIONS_PER_STEP = 4.5


def revolve_seconds(costs: Costs, slots: int, n_steps: int) -> float:
    """Return Revolve's makespan: the first taped step belongs to the forward sweep."""
    forward_s = nu(n_steps, slots) * costs.forward_step_s
    driver_s = ACTIONS_PER_STEP * n_steps * costs.action_s
    turns_s = costs.reverse_step_s + (n_steps - 1) * costs.turn_s
    return forward_s + costs.taping_s + turns_s + driver_s


def revolve_schedule(slots: int, n_steps: int) -> Schedule:
    """Return Revolve's schedule as a fresh generator in O(slots) memory."""
    return forward_and_reverse(reverse_actions(0, n_steps, slots))


def revolve(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
    """Return the plan that uses the fast slots alone, optimally.

    Examples
    --------
    >>> plan = revolve(Costs(1.0, 2.0), slots=10, n_steps=1000)
    >>> plan.forward_steps, plan.makespan_s
    (3637, 5637.0)
    """
    n = require_steps(n_steps, "revolve")
    return UniformPlan(
        planner="revolve",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=partial(revolve_schedule, slots, n),
        makespan_s=revolve_seconds(costs, slots, n),
        lower_bound_s=lower_bound(costs, slots, n),
        forward_steps=nu(n, slots) + 1,
        peak_slots=min(slots, n - 1),
        note="Revolve keeps everything in fast slots and recomputes the rest, optimally.",
    )


def pyrevolve_schedule(slots: int, n_steps: int) -> Schedule:
    """Yield the schedule made by pyrevolve's own C++ core, action by action."""
    from pyrevolve import crevolve

    core, kinds = crevolve.CRevolve(min(slots, n_steps), n_steps, None), crevolve.Action
    saved: list[int] = []
    ended = False
    while (kind := core.revolve()) != kinds.terminate:
        live = core.capo
        if kind == kinds.advance:
            yield Advance(core.oldcapo, live)
        elif kind == kinds.takeshot:
            while saved and saved[-1] > live:
                yield Free(saved.pop())
            saved.append(live)
            yield Save(live)
        elif kind == kinds.restore:
            while saved[-1] > live:
                yield Free(saved.pop())
            yield Load(live)
        elif kind in (kinds.firstrun, kinds.youturn):
            if not ended:
                ended = True
                yield Tape(live)
                yield EndForward()
            yield Reverse(live)
        else:
            raise ArgumentError(f"pyrevolve's core answered {kind}; this version is not supported")
    while saved:
        yield Free(saved.pop())


def pyrevolve(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
    """Return the plan whose schedule comes from pyrevolve's core.

    Raises
    ------
    ArgumentError
        If pyrevolve is not installed.
    """
    n = require_steps(n_steps, "pyrevolve")
    try:
        import pyrevolve  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            "planner 'pyrevolve' needs that package; "
            "pip install 'multistage-checkpointing[pyrevolve]'"
        ) from error
    ours = revolve(costs, slots, n)
    return UniformPlan(
        planner="pyrevolve",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=partial(pyrevolve_schedule, slots, n),
        makespan_s=ours.makespan_s,
        lower_bound_s=ours.lower_bound_s,
        forward_steps=ours.forward_steps,
        peak_slots=ours.peak_slots,
        note="Revolve as pyrevolve's own core schedules it.",
    )
