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
from ...schedule.simulation import Simulation
from ..predict import ACTIONS_PER_STEP, Counts, Draft, planner
from .binomial import forward_and_reverse, nu, reverse_actions


def revolve_takes(costs: Costs, slots: int, n_steps: int) -> Simulation:
    """Return what Revolve takes: the first taped step belongs to the forward sweep."""
    counts = Counts(nu(n_steps, slots) + 1, peak_slots=min(slots, n_steps - 1))
    return counts.take(costs, n_steps, ACTIONS_PER_STEP * n_steps)


def revolve_schedule(slots: int, n_steps: int) -> Schedule:
    """Return Revolve's schedule as a fresh generator in O(slots) memory."""
    return forward_and_reverse(reverse_actions(0, n_steps, slots))


@planner("revolve")
def revolve(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan that uses the fast slots alone, optimally.

    Examples
    --------
    >>> plan = revolve(Costs(1.0, 2.0), slots=10, n_steps=1000)
    >>> plan.forward_steps, plan.makespan_s
    (3637, 5637.0)
    """
    note = "Revolve keeps everything in fast slots and recomputes the rest, optimally."
    return plain_revolve(costs, slots, n_steps, "")._replace(note=note)


def plain_revolve(costs: Costs, slots: int, n_steps: int, why: str) -> Draft:
    """Return Revolve's draft, for a planner that finds nothing to add to it."""
    make, use = partial(revolve_schedule, slots, n_steps), revolve_takes(costs, slots, n_steps)
    return Draft(make, use, f"{why}: plain Revolve from the fast slots.")


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


@planner("pyrevolve")
def pyrevolve(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan whose schedule comes from pyrevolve's core.

    Raises
    ------
    ArgumentError
        If pyrevolve is not installed.
    """
    try:
        import pyrevolve  # noqa: F401
    except ImportError as error:
        raise ArgumentError(
            "planner 'pyrevolve' needs that package; "
            "pip install 'multistage-checkpointing[pyrevolve]'"
        ) from error
    make = partial(pyrevolve_schedule, slots, n_steps)
    note = "Revolve as pyrevolve's own core schedules it."
    return Draft(make, revolve_takes(costs, slots, n_steps), note)
