"""Run any schedule in virtual time.

One computing thread performs the actions in order; each tier has a write and
a read channel, first in, first out.  A transfer starts at the latest of: it
was issued, the channel is free, the write it reads back is done.  Only
`Await` and `Put` make the computing thread wait.  The simulator answers an
`Offer` as the executor does, from its own clock, so an opportunistic
schedule decides alike in both.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from .actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
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
from .costs import Costs, Tier
from .errors import ArgumentError
from .rules import Rules, run_arguments
from .timeline import Timeline
from .values import number, shown, whole


@dataclass(frozen=True, slots=True)
class Jitter:
    """A distribution of transfer times, as factors of the mean cost.

    Attributes
    ----------
    sigma : float
        Standard deviation of the logarithm; the factor's mean is 1.
    spike_probability, spike_factor : float
        That share of transfers takes that many times longer.

    Examples
    --------
    >>> Jitter.parse("spikes:0.05,10")
    Jitter(sigma=0.0, spike_probability=0.05, spike_factor=10.0)
    """

    sigma: float = 0.0
    spike_probability: float = 0.0
    spike_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("sigma", "spike_probability", "spike_factor"):
            object.__setattr__(self, name, number(getattr(self, name), name))
        if not (
            0 <= self.sigma < 10
            and 0 <= self.spike_probability <= 1
            and 0 < self.spike_factor < math.inf
        ):
            raise ArgumentError(
                f"sigma={self.sigma} must lie in [0, 10), spike_probability="
                f"{self.spike_probability} in [0, 1], spike_factor={self.spike_factor} above 0"
            )

    @classmethod
    def parse(cls, text: str) -> Jitter:
        """Return the jitter written as `lognormal:SIGMA` or `spikes:PROBABILITY,FACTOR`."""
        kind, _, numbers = str(text).partition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if kind == "lognormal" and len(values) == 1:
            return cls(sigma=values[0])
        if kind == "spikes" and len(values) == 2:
            return cls(spike_probability=values[0], spike_factor=values[1])
        raise ArgumentError(
            f"jitter {shown(text)} must be 'lognormal:SIGMA' or 'spikes:PROBABILITY,FACTOR'"
        )

    def sampler(self, seed: int) -> Callable[[], float]:
        """Return a function that draws factors, the same ones for the same seed."""
        source = random.Random(seed)

        def draw() -> float:
            factor = source.lognormvariate(-(self.sigma**2) / 2, self.sigma) if self.sigma else 1.0
            if self.spike_probability and source.random() < self.spike_probability:
                factor *= self.spike_factor
            return factor

        return draw


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
    """

    makespan_s: float
    forward_steps: int
    stall_s: float
    writes: int
    reads: int
    peak_slots: float
    timeline: Timeline = field(repr=False, compare=False)


class _Channels:
    """The write and read channel of one tier, and what waits for them."""

    __slots__ = ("capacity", "factor", "read_free", "stored", "tier", "waiting", "write_free")

    def __init__(self, tier: Tier, factor: Callable[[Literal["w", "r"]], float]) -> None:
        self.tier = tier
        self.factor = factor
        self.write_free = 0.0
        self.read_free = 0.0
        self.waiting: deque[float] = deque()
        self.stored: dict[int, float] = {}
        self.capacity = math.inf if tier.capacity_states is None else tier.capacity_states

    def has_room(self, now: float) -> bool:
        waiting = self.waiting
        while waiting and waiting[0] <= now:
            waiting.popleft()
        return len(waiting) < self.tier.queue_depth and len(self.stored) < self.capacity

    def write(self, step: int, now: float) -> tuple[float, float]:
        start = max(now, self.write_free)
        self.write_free = stop = start + self.tier.write_s * self.factor("w")
        self.waiting.append(stop)
        self.stored[step] = stop
        return start, stop

    def read(self, step: int, now: float) -> tuple[float, float]:
        start = max(now, self.read_free, self.stored[step])
        self.read_free = stop = start + self.tier.read_s * self.factor("r")
        return start, stop


def simulate(
    schedule: Schedule | Iterable[Action],
    n_steps: int | None,
    costs: Costs,
    slots: float,
    *,
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
    costs : Costs
        Its tiers are addressed by the actions' tier index.
    slots : float
        Fast slots the schedule may take.
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

    Raises
    ------
    ScheduleError
        In a checked run, at the first illegal action.

    Examples
    --------
    >>> costs = Costs(1.0, 2.0)
    >>> simulate([Tape(0), EndForward(), Reverse(0)], 1, costs, slots=0).makespan_s
    3.0
    """
    n_steps, slots = run_arguments(schedule, n_steps, slots)
    if not isinstance(costs, Costs):
        raise ArgumentError(f"costs={shown(costs)} must be multistage.Costs")
    if not isinstance(jitter, Jitter | None):
        raise ArgumentError(f"jitter={shown(jitter)} must be a Jitter, or None for none")
    factor = _factors(jitter, whole(seed, "seed"))
    channels = [_Channels(tier, factor) for tier in costs.tiers]
    rules = Rules(
        n_steps,
        slots,
        costs.tape_slots,
        {
            k: tier.capacity_states
            for k, tier in enumerate(costs.tiers)
            if tier.capacity_states is not None
        },
        state_is_tape=costs.state_is_tape,
        one_tape=costs.one_tape,
    )
    timeline = Timeline()
    done: dict[int, tuple[float, float]] = {}  # token -> (time, overhead to pay at its Await)
    tapes: set[int] = set()
    now = stall_s = 0.0
    forward_steps = writes = reads = tokens = 0
    action_s = costs.action_s
    forward_s, taping_s = costs.forward_step_s, costs.taping_s
    reverse_s, turn_s = costs.reverse_step_s, costs.turn_s

    for action, send in drive(schedule):
        kind = type(action)
        answer: Answer = None
        now += action_s
        begin = now
        if kind is Advance:
            assert isinstance(action, Advance)
            now += (action.stop - action.start) * forward_s
            forward_steps += action.stop - action.start
            if checked:
                count = action.stop - action.start
                timeline.add("compute", "forward", begin, now, first=action.start, count=count)
        elif kind is Reverse:
            assert isinstance(action, Reverse)
            if action.step in tapes:
                tapes.remove(action.step)
                now += reverse_s
            else:
                now += turn_s
            if checked:
                timeline.add("compute", "reverse", begin, now, first=action.step)
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
                    f"{action} names tier {action.tier} but the costs have {len(channels)}"
                )
            channel = channels[action.tier]
            room = channel.has_room(now)
            if not room and isinstance(action, Put):
                now = max(now, channel.waiting[0]) if channel.waiting else now
                stall_s += now - begin
                if checked and now > begin:
                    timeline.add("compute", "stall", begin, now)
                room = channel.has_room(now)
                if not room:
                    raise ArgumentError(f"{action} but tier {action.tier} is full")
            if room:
                now += channel.tier.write_overhead_s
                span = channel.write(action.step, now)
                done[tokens] = (span[1], 0.0)
                answer = tokens
                tokens += 1
                writes += 1
                if checked:
                    nbytes = costs.state_bytes
                    timeline.add("write", "write", *span, first=action.step, nbytes=nbytes)
        elif isinstance(action, Get):
            channel = channels[action.tier]
            span = channel.read(action.step, now)
            done[tokens] = (span[1], channel.tier.read_overhead_s)
            answer = tokens
            tokens += 1
            reads += 1
            if checked:
                nbytes = costs.state_bytes
                timeline.add("read", "read", *span, first=action.step, nbytes=nbytes)
        elif isinstance(action, Tape):
            now += taping_s
            forward_steps += 1
            tapes.add(action.step)
            if checked:
                timeline.add("compute", "forward", begin, now, first=action.step)
        elif isinstance(action, Drop):
            del channels[action.tier].stored[action.step]
        elif isinstance(action, EndForward):
            timeline.end_forward_s = now
        if checked:
            rules.apply(action, answer)
            if kind in _MOVES_MEMORY:
                timeline.sample("fast", now, rules.used * costs.state_bytes)
                for k, tier in enumerate(costs.tiers):
                    held = rules.tier_used.get(k, 0) * costs.state_bytes
                    timeline.sample(tier.name, now, held)
        if trace is not None:
            trace(action)
        if timed is not None:
            timed(action, answer, now)
        send(answer)
    if checked:
        rules.finish()
    timeline.end_s = max(timeline.end_s, now)
    return Simulation(now, forward_steps, stall_s, writes, reads, rules.peak, timeline)


_MOVES_MEMORY = frozenset({Save, Free, Offer, Put, Get, Await, Drop, Tape, Load, Reverse})


def _factors(jitter: Jitter | None, seed: int) -> Callable[[Literal["w", "r"]], float]:
    if jitter is None:
        return lambda _direction: 1.0
    # One stream per direction: reads of one schedule must not shift the
    # writes of another, or comparisons under one seed would be unfair.
    samplers = {"w": jitter.sampler(2 * seed), "r": jitter.sampler(2 * seed + 1)}
    return lambda direction: samplers[direction]()
