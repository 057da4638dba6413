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

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
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
from .channels import Channels, factors
from .channels import Jitter as Jitter
from .rules import Rules, byte_rules, run_arguments
from .timeline import Timeline


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated run did.

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
        Empty in an unchecked run.
    peak_bytes : int
        Most bytes in fast memory: of a chain of stages that differ with state 0, of uniform
        steps those of the fast slots.
    """

    makespan_s: float
    forward_steps: int
    stall_s: float
    writes: int
    reads: int
    peak_slots: float
    timeline: Timeline = field(repr=False, compare=False)
    peak_bytes: int = 0


class _Stages:
    """What stages that differ take, and the rules they run by."""

    __slots__ = ("costs", "forward_s", "loss", "reverse_s", "rules", "spared_s", "timeline")

    def __init__(self, costs: StageCosts, rules: Rules, timeline: Timeline | None) -> None:
        self.costs, self.rules, self.timeline = costs, rules, timeline
        self.loss = len(costs.stages)
        self.forward_s = [*(stage.forward_s for stage in costs.stages), 0.0]
        self.reverse_s = [*(stage.backward_s for stage in costs.stages), 0.0]
        self.spared_s = [*(stage.spared_s for stage in costs.stages), 0.0]

    def pieces(
        self, driven: Iterable[tuple[Action, Callable[[Answer], None]]]
    ) -> Iterator[tuple[Action, Callable[[Answer], None]]]:
        """Yield the actions, a run of stages stage by stage."""
        for action, send in driven:
            if type(action) is Advance and action.stop - action.start > 1:
                index = self.rules.index
                for i in range(action.start, action.stop):
                    self.rules.index = index  # they are one action
                    yield Advance(i, i + 1), send
            else:
                yield action, send

    def judge(self, action: Action, now: float) -> Answer:
        """Let the rules perform an action; return its answer."""
        rules = self.rules
        answer = rules.usual_answer(action)
        rules.apply(action, answer)
        if self.timeline is not None and rules.memory is not None:
            self.timeline.sample("fast", now, rules.memory.needed_bytes)
        return answer

    def turn_s(self, step: int) -> float:
        """Return the seconds of a stage that is taped and reversed at once."""
        return self.forward_s[step] - self.spared_s[step] + self.reverse_s[step]

    def taped_s(self, step: int, now: float) -> float:
        """Return when a stage is taped that begins now."""
        now += self.forward_s[step]
        return now - self.spared_s[step] if self.rules.adjoint == step + 1 else now


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
        Of stages that differ: those and the loss (also if None), or those alone.
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
        At the first illegal action, in a checked run or of stages that differ; for a tape sent
        to a tier that takes states alone.
    ArgumentError
        For arguments out of range.

    Examples
    --------
    >>> costs = Costs(1.0, 2.0)
    >>> simulate([Tape(0), EndForward(), Reverse(0)], 1, costs, slots=0).makespan_s
    3.0

    A chain of two stages and the loss; the first tape goes to a tier and comes back:

    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(2, Stage("a", 1.0, 2.0, output_bytes=10, tape_bytes=30), 5)
    >>> there = [Tape(0), Put(0, tape=True), Tape(1), Evict(0, tape=True), Tape(2), EndForward()]
    >>> back = [Reverse(2), Get(0, tape=True), Await(1), Reverse(1), Reverse(0)]
    >>> back += [Drop(0, tape=True)]
    >>> run = simulate([*there, *back], None, costs, tiers=[Tier.of_rates(15.0, 30.0)])
    >>> run.makespan_s, run.stall_s, run.peak_bytes
    (8.0, 2.0, 85)
    """
    n_steps, slots = run_arguments(schedule, n_steps, slots)
    if not isinstance(jitter, Jitter | None):
        raise ArgumentError(f"jitter={shown(jitter)} must be a Jitter, or None for none")
    factor = factors(jitter, whole(seed, "seed"))
    timeline = Timeline()
    stages: _Stages | None = None
    if isinstance(costs, StageCosts):
        rates = _rates(tiers, slots)
        rooms = {k: tier.capacity_bytes for k, tier in enumerate(rates)}
        capacities = {k: room for k, room in rooms.items() if room is not None}
        rules = byte_rules(costs, n_steps, memory_bytes, capacities)
        stages = _Stages(costs, rules, timeline if checked else None)
        channels = [Channels(tier, factor, by_bytes=True) for tier in rates]
        action_s = forward_s = taping_s = reverse_s = turn_s = 0.0
        state_bytes = 0
        named = [(k, tier.name, 1.0) for k, tier in enumerate(rates)]
    else:
        rules = _uniform_rules(costs, n_steps, slots, tiers, memory_bytes)
        channels = [Channels(tier, factor, costs.tape_slots) for tier in costs.tiers]
        action_s, state_bytes = costs.action_s, costs.state_bytes
        forward_s, taping_s = costs.forward_step_s, costs.taping_s
        reverse_s, turn_s = costs.reverse_step_s, costs.turn_s
        named = [(k, tier.name, float(state_bytes)) for k, tier in enumerate(costs.tiers)]
    memory = rules.memory
    done: dict[int, tuple[float, float]] = {}  # token -> (time, overhead to pay at its Await)
    tapes: set[int] = set()
    now = stall_s = 0.0
    forward_steps = writes = reads = tokens = 0
    driven = drive(schedule) if stages is None else stages.pieces(drive(schedule))

    for action, send in driven:
        kind = type(action)
        answer: Answer = None
        now += action_s
        begin = now
        if stages is not None:
            answer = stages.judge(action, now)
        if kind is Advance:
            assert isinstance(action, Advance)
            count = action.stop - action.start
            if stages is None:
                now += count * forward_s
                forward_steps += count
            else:
                now += stages.forward_s[action.start]
                forward_steps += action.start < stages.loss
            if checked:
                timeline.add("compute", "forward", begin, now, first=action.start, count=count)
        elif kind is Reverse:
            assert isinstance(action, Reverse)
            step = action.step
            if step in tapes:
                tapes.remove(step)
                now += reverse_s if stages is None else stages.reverse_s[step]
            else:
                now += turn_s if stages is None else stages.turn_s(step)
            if checked:
                timeline.add("compute", "reverse", begin, now, first=step)
        elif isinstance(action, Await):
            at, overhead_s = done.pop(action.token)
            if at > now:
                stall_s += at - now
                now = at
                if checked:
                    timeline.add("compute", "stall", begin, now, count=1)
            now += overhead_s
            answer = True
        elif isinstance(action, Offer | Put):
            if action.tier >= len(channels):
                raise ArgumentError(
                    f"{action} names tier {action.tier}, but there are {len(channels)}"
                )
            channel = channels[action.tier]
            if action.tape and not channel.tier.tapes:
                # Stages are judged before they are timed: the count is one ahead.
                index = rules.index - 1 if stages else rules.index if checked else None
                raise ScheduleError(
                    f"{action} but tier {action.tier} takes states alone; leave states-only out "
                    "(tapes=True), or plan for this tier",
                    index,
                )
            room = channel.has_room(now) if stages is None else answer is not None
            if not room and isinstance(action, Put):
                now = max(now, channel.waiting[0]) if channel.waiting else now
                stall_s += now - begin
                if checked and now > begin:
                    timeline.add("compute", "stall", begin, now)
                room = channel.has_room(now)
                if not room:
                    raise ArgumentError(f"{action} but tier {action.tier} is full")
            if room:
                now += channel.write_overhead_s
                item, nbytes, write_s = action.step, state_bytes, channel.write_s
                if action.tape or memory is not None:
                    item, nbytes, write_s, _ = channel.other(action, memory)
                span = channel.write(item, now, write_s)
                done[tokens] = (span[1], 0.0)
                answer = tokens
                tokens += 1
                writes += 1
                if checked:
                    timeline.add("write", "write", *span, first=action.step, nbytes=nbytes)
        elif isinstance(action, Get):
            channel = channels[action.tier]
            item, nbytes, read_s = action.step, state_bytes, channel.read_s
            if action.tape or memory is not None:
                item, nbytes, _, read_s = channel.other(action, memory)
            span = channel.read(item, now, read_s)
            done[tokens] = (span[1], channel.read_overhead_s)
            answer = tokens
            tokens += 1
            reads += 1
            if action.tape:
                tapes.add(action.step)
            if checked:
                timeline.add("read", "read", *span, first=action.step, nbytes=nbytes)
        elif isinstance(action, Tape):
            now = now + taping_s if stages is None else stages.taped_s(action.step, now)
            forward_steps += stages is None or action.step < stages.loss
            tapes.add(action.step)
            if checked:
                timeline.add("compute", "forward", begin, now, first=action.step)
        elif isinstance(action, Evict):
            at = channels[action.tier].stored[~action.step if action.tape else action.step]
            if at > now:
                stall_s += at - now
                now = at
                if checked:
                    timeline.add("compute", "stall", begin, now, count=1)
            if action.tape:
                tapes.discard(action.step)
            answer = True
        elif isinstance(action, Drop):
            del channels[action.tier].stored[~action.step if action.tape else action.step]
        elif isinstance(action, EndForward):
            timeline.end_forward_s = now
        if checked:
            if stages is None:
                rules.apply(action, answer)
            if kind in _MOVES_MEMORY or stages is not None:
                held = rules.used * state_bytes if memory is None else memory.resident_bytes
                timeline.sample("fast", now, held)
                if memory is not None:
                    for part, nbytes in memory.parts(rules).items():
                        timeline.sample(f"fast/{part}", now, nbytes)
                for k, name, unit in named:
                    timeline.sample(name, now, rules.tier_used.get(k, 0) * unit)
        if trace is not None:
            trace(action)
        if timed is not None:
            timed(action, answer, now)
        send(answer)
    if checked or stages is not None:
        rules.finish()
    timeline.end_s = max(timeline.end_s, now)
    peak_bytes = round(rules.peak * state_bytes) if memory is None else memory.peak_bytes
    peak = rules.peak if stages is None else 0.0
    return Simulation(now, forward_steps, stall_s, writes, reads, peak, timeline, peak_bytes)


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
