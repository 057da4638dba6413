"""What a schedule of a heterogeneous chain takes, and the schedule of a solved program.

The judge is the simulator, with the accounting in bytes: it knows nothing of how
schedules are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from ...actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...schedule.simulation import Simulation, simulate


def use_of(actions: Iterable[Action], costs: StageCosts, tiers: Sequence[Tier] = ()) -> Simulation:
    """Return what a schedule takes, without a timeline; the loss is stage `len(costs.stages)`.

    Raises
    ------
    ScheduleError
        Naming the first illegal action, or what was not reversed or given back at the end.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts((Stage("a", 1.0, 2.0, 10, 30),), 5)
    >>> use = use_of([Tape(0), Tape(1), EndForward(), Reverse(1), Reverse(0)], costs)
    >>> use.makespan_s, use.peak_bytes, use.forward_steps
    (3.0, 45, 1)
    """
    return simulate(actions, None, costs, tiers=tiers, checked=False)


def actions_of(trace: Iterable[tuple[int, int, int]], n: int) -> Iterator[Action]:
    """Yield the actions of a trace over n stages, the loss being stage n - 1.

    A saved state is freed when the tape that starts from it is made: from then
    on that tape holds it.
    """
    # What is to do after the right part of a pair: reverse a stage, or load a
    # state for the left part.
    after: list[tuple[str, int]] = []
    saved: set[int] = set()
    ended = False
    for s, t, k in trace:
        if k != s and s != t:
            if s not in saved and s != 0:
                saved.add(s)
                yield Save(s)
            yield Advance(s, k)
            after.append(("load", s))
            continue
        if s in saved:
            saved.remove(s)
            yield Free(s)
        yield Tape(s)
        if s != t:
            after.append(("reverse", s))
            continue
        if not ended:
            ended = True
            yield EndForward()
        yield Reverse(s)
        while after:
            what, i = after.pop()
            if what == "load":
                yield Load(i)
                break
            yield Reverse(i)


def store_all(costs: StageCosts) -> list[Action]:
    """Return the schedule that keeps every tape."""
    loss = len(costs.stages)
    forward: list[Action] = [Tape(i) for i in range(loss + 1)]
    return [*forward, EndForward(), *(Reverse(i) for i in range(loss, -1, -1))]


@lru_cache(maxsize=64)
def plain_use(costs: StageCosts) -> Simulation:
    """Return what the schedule that keeps every tape takes."""
    return use_of(store_all(costs), costs)
