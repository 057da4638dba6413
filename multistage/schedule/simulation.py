"""Run any schedule in virtual time.

One computing thread performs the actions in order; each tier has a write and
a read channel, first in, first out.  A transfer starts at the latest of: it
was issued, the channel is free, the write it reads back is done.  Only
`Await`, `Evict` and `Put` make the computing thread wait.  The simulator answers an
`Offer` as the executor does, from its own clock, so an opportunistic
schedule decides alike in both.

Steps are alike and memory is counted in slots, or stages differ (`StageCosts`) and
memory is counted in bytes: then also a transfer takes the time of its bytes, and a
tier takes what its capacity allows, however much is waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
    drive,
)
from ..errors import ArgumentError, ScheduleError
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..support.values import several, shown, whole
from .accounting import require_whole, told
from .rules import Rules, byte_rules, run_arguments
from .timeline import Timeline
from .virtual_time import Channels, VirtualTime, factors
from .virtual_time import Jitter as Jitter

_Driven: TypeAlias = Iterable[tuple[Action, Callable[[Answer], None]]]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a run in virtual time takes, simulated or calculated.

    Attributes
    ----------
    makespan_s : float
        Virtual seconds from the start to the last adjoint step.
    forward_steps : int
        Steps run by `Advance` and `Tape`.
    stall_s : float
        Seconds the computing thread waited for transfers.
    writes, reads : int
    peak_slots : float
        Most fast slots taken; 0 in an unchecked run.
    timeline : Timeline
        Empty in an unchecked run, and where it was calculated.
    peak_bytes : int
        Most bytes in fast memory: of a chain of stages that differ with state 0, of uniform
        steps those of the fast slots.
    """

    makespan_s: float
    forward_steps: int
    stall_s: float = 0.0
    writes: int = 0
    reads: int = 0
    peak_slots: float = 0.0
    timeline: Timeline = field(default_factory=Timeline, repr=False, compare=False)
    peak_bytes: int = 0


def simulate(
    schedule: Schedule | Iterable[Action],
    n_steps: int | None,
    costs: Costs | StageCosts,
    slots: float = math.inf,
    *,
    tiers: Sequence[Tier] = (),
    memory_bytes: int | None = None,
    jitter: Jitter | None = None,
    seed: int = 0,
    checked: bool = True,
    trace: Callable[[Action], None] | None = None,
    timed: Callable[[Action, Answer, float], None] | None = None,
) -> Simulation:
    """Run a schedule in virtual time.

    Parameters
    ----------
    schedule : generator or iterable of actions
        Consumed to its end.
    n_steps : int or None
        None if the schedule decides, or costs of stages that differ.
    costs : Costs or StageCosts
        Its tiers are addressed by the actions' tier index.
    slots : float
        Fast slots the schedule may take; not of stages that differ.
    tiers : sequence of Tier
        Those of a chain whose stages differ; as they are, not as they were planned.
    memory_bytes : int, optional
        Fast memory of such a chain, state 0 included; no limit if None.
    jitter : Jitter, optional
        Scatters the transfer times around the costs.
    seed : int
        Of the jitter; the k-th write and the k-th read of a seed always get
        the same factor, whatever the schedule.
    checked : bool
        Judge legality and record a timeline; planners that compare many
        candidates turn it off.
    trace : callable, optional
        Called with every action.
    timed : callable, optional
        Called with every action, its answer and the virtual second it is done.
        Of stages that differ, a run of them comes stage by stage.

    Raises
    ------
    ScheduleError
        At the first illegal action, in a checked run or of stages that differ, else at one
        that names a copy, tape or transfer that is not there; for a tape sent to a tier that
        takes states alone.
    ArgumentError
        For arguments out of range.

    Examples
    --------
    >>> from multistage.actions import Await, Drop, EndForward, Evict, Get, Put, Reverse, Tape
    >>> costs = Costs(1.0, 2.0)
    >>> simulate([Tape(0), EndForward(), Reverse(0)], 1, costs, slots=0).makespan_s
    3.0

    A chain of two stages; the first tape goes to a tier and comes back:

    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(2, Stage("a", 1.0, 2.0, output_bytes=10, tape_bytes=30), 5)
    >>> there = [Tape(0), Put(0, tape=True), Tape(1), Evict(0, tape=True), EndForward()]
    >>> back = [Get(0, tape=True), Await(1), Reverse(1), Reverse(0)]
    >>> back += [Drop(0, tape=True)]
    >>> run = simulate([*there, *back], None, costs, tiers=[Tier.of_rates(15.0, 30.0)])
    >>> run.makespan_s, run.stall_s, run.peak_bytes
    (8.0, 2.0, 85)
    """
    n_steps, slots = run_arguments(schedule, n_steps, slots)
    factor = factors(jitter, whole(seed, "seed"))
    timeline = Timeline()
    driven: _Driven = drive(schedule)
    if isinstance(costs, StageCosts):
        rates = _rates(tiers, slots)
        rules = _stage_rules(costs, n_steps, rates, memory_bytes)
        channels = [Channels(tier, factor, by_bytes=True) for tier in rates]
        driven = _stage_by_stage(driven, rules)
        state_bytes = 0
    else:
        rules = _uniform_rules(costs, n_steps, slots, tiers, memory_bytes)
        channels = [Channels(tier, factor, costs.tape_slots) for tier in costs.tiers]
        rates, state_bytes = costs.tiers, costs.state_bytes
    clock = VirtualTime(costs, rules, channels, timeline if checked else None)
    for action, send in driven:
        try:
            answer = clock.perform(action)
        except (TypeError, KeyError, IndexError) as error:
            _refuse(action, rules.index if clock.judges else None, error)
            raise
        if checked and (rules.memory is not None or type(action) in _MOVES_MEMORY):
            _sample(timeline, rules, state_bytes, rates, clock.now)
        if trace is not None:
            trace(action)
        if timed is not None:
            timed(action, answer, clock.now)
        send(answer)
    if clock.judges:
        rules.finish()
    timeline.end_forward_s = clock.end_forward_s
    timeline.end_s = max(timeline.end_s, clock.now)
    return Simulation(
        clock.now,
        clock.forward_steps,
        clock.stall_s,
        clock.writes,
        clock.reads,
        rules.peak if rules.memory is None else 0.0,
        timeline,
        round(rules.peak * state_bytes) if rules.memory is None else rules.memory.peak_bytes,
    )


def _refuse(action: Action, index: int | None, error: Exception) -> None:
    """Raise ScheduleError for an action that cannot be timed; `index` is None if none is judged."""
    require_whole(action, index)
    if index is None:
        raise ScheduleError(
            f"{told(action)} but the copy or transfer that it names is not there; simulate it with "
            "checked=True to learn which rule it breaks"
        ) from error


def _sample(
    timeline: Timeline, rules: Rules, state_bytes: int, tiers: Sequence[Tier], now: float
) -> None:
    """Record what fast memory and each tier hold from now on."""
    memory, unit = rules.memory, state_bytes if rules.memory is None else 1
    timeline.sample("fast", now, rules.used * unit if memory is None else memory.resident_bytes)
    for part, nbytes in () if memory is None else memory.parts(rules).items():
        timeline.sample(f"fast/{part}", now, nbytes)
    for k, tier in enumerate(tiers):
        timeline.sample(tier.name, now, rules.tier_used.get(k, 0) * unit)


def _stage_by_stage(
    driven: _Driven, rules: Rules
) -> Iterator[tuple[Action, Callable[[Answer], None]]]:
    """Yield the actions, a run of stages stage by stage."""
    for action, send in driven:
        if type(action) is not Advance:
            yield action, send
            continue
        index = rules.index
        try:
            run = range(action.start, action.stop)
        except TypeError:
            require_whole(action, index)
            raise
        if len(run) < 2:
            yield action, send
            continue
        for i in run:
            rules.index = index  # they are one action
            yield Advance(i, i + 1), send


def _stage_rules(
    costs: StageCosts, n_steps: int | None, tiers: Sequence[Tier], memory_bytes: int | None
) -> Rules:
    rooms = {k: tier.capacity_bytes for k, tier in enumerate(tiers)}
    capacities = {k: room for k, room in rooms.items() if room is not None}
    return byte_rules(costs, n_steps, memory_bytes, capacities)


def _uniform_rules(
    costs: Costs,
    n_steps: int | None,
    slots: float,
    tiers: Sequence[Tier],
    memory_bytes: int | None,
) -> Rules:
    if not isinstance(costs, Costs):
        raise ArgumentError(f"costs={shown(costs)} must be multistage.Costs or StageCosts")
    if tiers or memory_bytes is not None:
        raise ArgumentError(
            "tiers and memory_bytes go with StageCosts; uniform steps have slots, and the tiers "
            "of their costs"
        )
    capacities = {k: tier.capacity_states for k, tier in enumerate(costs.tiers)}
    return Rules(
        n_steps,
        slots,
        costs.tape_slots,
        {k: room for k, room in capacities.items() if room is not None},
        state_is_tape=costs.state_is_tape,
        one_tape=costs.one_tape,
    )


def _rates(tiers: Sequence[Tier], slots: float) -> tuple[Tier, ...]:
    if slots != math.inf:
        raise ArgumentError(f"slots={slots:g} go with uniform steps; give memory_bytes")
    if isinstance(tiers, str | Tier) or not several(tiers):
        tiers = (tiers,)  # type: ignore[assignment]
    return tuple(Tier.parse(tier).in_bytes() for tier in tiers)


_MOVES_MEMORY = frozenset({Save, Free, Offer, Put, Get, Await, Evict, Drop, Tape, Load, Reverse})
