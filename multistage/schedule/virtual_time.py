"""Virtual time while a schedule runs: when each action is done, and what it answers.

One computing thread performs the actions in order; each tier has a write and a read
channel (`Channels`).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Evict,
    Get,
    Offer,
    Put,
    Reverse,
    Tape,
)
from ..errors import ArgumentError, ScheduleError
from ..model.costs import Costs
from ..model.stages import Stage, StageCosts
from ..model.tier import Tier
from ..support.values import number, shown
from .accounting import ByteAccounting, item_of
from .rules import Rules
from .timeline import Timeline


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


class Channels:
    """The write and read channel of one tier, and what waits for them.

    States are known by their step, tapes by ~step.
    """

    def __init__(
        self,
        tier: Tier,
        factor: Callable[[Literal["w", "r"]], float],
        tape_slots: float = 1.0,
        *,
        by_bytes: bool = False,
    ) -> None:
        self.tier = tier
        self.factor = factor
        self.tape_slots = tape_slots
        self.write_free = 0.0
        self.read_free = 0.0
        self.waiting: deque[float] = deque()
        self.stored: dict[int, float] = {}
        self.one_channel = tier.shared
        self.capacity = self.depth = math.inf
        self.write_s = self.read_s = 0.0
        self.write_overhead_s, self.read_overhead_s = tier.write_overhead_s, tier.read_overhead_s
        if not by_bytes:
            self.depth = tier.queue_depth
            self.write_s, self.read_s = tier.write_s, tier.read_s
            if tier.capacity_states is not None:
                self.capacity = tier.capacity_states

    def other(
        self, action: Offer | Put | Get, memory: ByteAccounting | None
    ) -> tuple[int, int, float, float]:
        """Return what travels, if not the state of a uniform step.

        As its item, its bytes, and the seconds in which it is written and read.
        """
        item = item_of(action)
        if memory is None:
            return item, 0, self.write_s * self.tape_slots, self.read_s * self.tape_slots
        nbytes = memory.bytes_of(item)
        return item, nbytes, self.tier.writing_s(nbytes), self.tier.reading_s(nbytes)

    def has_room(self, now: float) -> bool:
        """Return whether a write that begins now is accepted."""
        waiting = self.waiting
        while waiting and waiting[0] <= now:
            waiting.popleft()
        return len(waiting) < self.depth and len(self.stored) < self.capacity

    def write(self, item: int, now: float, seconds: float) -> tuple[float, float]:
        """Queue a write; return when it starts and when it stops."""
        start = max(now, self.write_free)
        self.write_free = stop = start + seconds * self.factor("w")
        if self.one_channel:
            self.read_free = stop
        self.waiting.append(stop)
        self.stored[item] = stop
        return start, stop

    def read(self, item: int, now: float, seconds: float) -> tuple[float, float]:
        """Queue a read; return when it starts and when it stops."""
        start = max(now, self.read_free, self.stored[item])
        self.read_free = stop = start + seconds * self.factor("r")
        if self.one_channel:
            self.write_free = stop
        return start, stop


def factors(jitter: Jitter | None, seed: int) -> Callable[[Literal["w", "r"]], float]:
    """Return the function that draws the factor of the next write, or of the next read.

    Raises
    ------
    ArgumentError
        If `jitter` is neither a Jitter nor None.
    """
    if not isinstance(jitter, Jitter | None):
        raise ArgumentError(f"jitter={shown(jitter)} must be a Jitter, or None for none")
    if jitter is None:
        return lambda _direction: 1.0
    # One stream per direction: reads of one schedule must not shift the
    # writes of another, or comparisons under one seed would be unfair.
    samplers = {"w": jitter.sampler(2 * seed), "r": jitter.sampler(2 * seed + 1)}
    return lambda direction: samplers[direction]()


class VirtualTime:
    """A clock: lets the time of one action after the other pass, if it is legal.

    Parameters
    ----------
    costs : Costs or StageCosts
        How long steps take.
    rules : Rules
    channels : sequence of Channels
        Of each tier.
    timeline : Timeline, optional
        Records what went on.  Without it actions of uniform steps are not judged.

    Attributes
    ----------
    judges : bool
    now : float
        Virtual seconds since the start.
    stall_s : float
        Seconds the computing thread waited for transfers.
    end_forward_s : float
        When the forward sweep ended.
    forward_steps, writes, reads : int
    """

    def __init__(
        self,
        costs: Costs | StageCosts,
        rules: Rules,
        channels: Sequence[Channels],
        timeline: Timeline | None,
    ) -> None:
        self._rules, self._channels, self._timeline = rules, channels, timeline
        self._memory: ByteAccounting | None = rules.memory
        self.judges = timeline is not None or self._memory is not None
        self._alike: _Seconds | None = None
        self._each: Sequence[_Seconds] = ()
        self._action_s, self._state_bytes = 0.0, 0
        if isinstance(costs, Costs):
            self._alike = _Seconds.of_steps(costs)
            self._action_s, self._state_bytes = costs.action_s, costs.state_bytes
        else:
            self._each = [*map(_Seconds.of_stage, costs.stages)]
        self._done: dict[int, tuple[float, float]] = {}  # token: time, overhead to pay at its Await
        self._tapes: set[int] = set()
        self.now = self.stall_s = self.end_forward_s = 0.0
        self.forward_steps = self.writes = self.reads = 0

    def perform(self, action: Action) -> Answer:
        """Let the time of an action pass; return its answer.

        Where stages differ, `Advance` is to come stage by stage.

        Raises
        ------
        ScheduleError
            If the action is illegal, and it judges.
        """
        answer, rules = None, self._rules
        if self._memory is None and isinstance(action, Offer | Put):
            # Whether the tier takes it is a question of time.
            self.now += self._action_s
            answer = self._write(action, None)
            if self.judges:
                rules.apply(action, answer)
            return answer
        if self.judges:
            answer = rules.usual_answer(action)
            rules.apply(action, answer)  # first: an illegal one has no time
        self.now += self._action_s
        if self._memory is not None and self._timeline is not None:
            self._timeline.sample("fast", self.now, self._memory.needed_bytes)
        perform = _PERFORMED.get(type(action))
        return answer if perform is None else perform(self, action, answer)

    # ------------------------------------------------------------------------ steps

    def _advance(self, action: Advance, _: Answer) -> Answer:
        begin, start = self.now, action.start
        count = action.stop - start
        self.now = begin + count * (self._alike or self._each[start]).forward
        self.forward_steps += count
        if self._timeline is not None:
            self._timeline.add("compute", "forward", begin, self.now, first=start, count=count)
        return None

    def _tape(self, action: Tape, _: Answer) -> Answer:
        begin, step = self.now, action.step
        seconds = self._alike or self._each[step]
        at_once = self._rules.adjoint == step + 1
        self.now = begin + (seconds.taping_at_once if at_once else seconds.taping)
        self.forward_steps += 1
        self._tapes.add(step)
        if self._timeline is not None:
            self._timeline.add("compute", "forward", begin, self.now, first=step)
        return None

    def _reverse(self, action: Reverse, _: Answer) -> Answer:
        begin, step = self.now, action.step
        seconds = self._alike or self._each[step]
        if step in self._tapes:
            self._tapes.remove(step)
            self.now = begin + seconds.reverse
        else:
            self.now = begin + seconds.turn
            self.forward_steps += self._alike is None  # where steps are alike, it is not counted
        if self._timeline is not None:
            self._timeline.add("compute", "reverse", begin, self.now, first=step)
        return None

    def _end_forward(self, _action: EndForward, _: Answer) -> Answer:
        self.end_forward_s = self.now
        return None

    # -------------------------------------------------------------------- transfers

    def _wait_until(self, at: float) -> None:
        if at > self.now:
            begin, self.now = self.now, at
            self.stall_s += at - begin
            if self._timeline is not None:
                self._timeline.add("compute", "stall", begin, at)

    def _await(self, action: Await, _: Answer) -> Answer:
        at, overhead_s = self._done.pop(action.token)
        self._wait_until(at)
        self.now += overhead_s
        return True

    def _channel_of(self, action: Offer | Put) -> Channels:
        """Return the channels of the tier that is to be written to.  Raises if it cannot be."""
        if not 0 <= action.tier < len(self._channels):
            raise ArgumentError(
                f"{action} names tier {action.tier}, but there are {len(self._channels)}"
            )
        channel = self._channels[action.tier]
        if action.tape and not channel.tier.tapes:
            index = None if self._timeline is None else self._rules.index
            if self._memory is not None:
                index = self._rules.index - 1  # it was judged before it is timed
            raise ScheduleError(
                f"{action} but tier {action.tier} takes states alone; leave states-only out "
                "(tapes=True), or plan for this tier",
                index,
            )
        return channel

    def _takes(self, channel: Channels, action: Offer | Put) -> bool:
        """Whether a tier takes a state of a uniform step, once a `Put` has waited for room."""
        if channel.has_room(self.now):
            return True
        if isinstance(action, Offer):
            return False
        if channel.waiting:
            self._wait_until(channel.waiting[0])
        if not channel.has_room(self.now):
            raise ArgumentError(f"{action} but tier {action.tier} is full")
        return True

    def _write(self, action: Offer | Put, answer: Answer) -> Answer:
        channel = self._channel_of(action)
        if self._memory is None:
            answer = self._takes(channel, action)
        if answer is None or answer is False:
            return None
        self.now += channel.write_overhead_s
        item, nbytes, write_s = action.step, self._state_bytes, channel.write_s
        if action.tape or self._memory is not None:
            item, nbytes, write_s, _ = channel.other(action, self._memory)
        span = channel.write(item, self.now, write_s)
        self.writes += 1
        if self._timeline is not None:
            self._timeline.add("write", "write", *span, first=action.step, nbytes=nbytes)
        return self._begun(span[1], 0.0)

    def _read(self, action: Get, _: Answer) -> Answer:
        channel = self._channels[action.tier]
        item, nbytes, read_s = action.step, self._state_bytes, channel.read_s
        if action.tape or self._memory is not None:
            item, nbytes, _write_s, read_s = channel.other(action, self._memory)
        span = channel.read(item, self.now, read_s)
        self.reads += 1
        if action.tape:
            self._tapes.add(action.step)
        if self._timeline is not None:
            self._timeline.add("read", "read", *span, first=action.step, nbytes=nbytes)
        return self._begun(span[1], channel.read_overhead_s)

    def _begun(self, done_s: float, overhead_s: float) -> int:
        """Return the token of a transfer that has begun."""
        token = self.writes + self.reads - 1
        self._done[token] = done_s, overhead_s
        return token

    def _evict(self, action: Evict, _: Answer) -> Answer:
        self._wait_until(self._channels[action.tier].stored[item_of(action)])
        if action.tape:
            self._tapes.discard(action.step)
        return True

    def _drop(self, action: Drop, _: Answer) -> Answer:
        del self._channels[action.tier].stored[item_of(action)]
        return None


class _Seconds(NamedTuple):
    """What one step takes, in seconds."""

    forward: float
    taping: float
    taping_at_once: float  # in the reverse sweep, right before the adjoint
    reverse: float
    turn: float  # taped and reversed at once

    @classmethod
    def of_steps(cls, costs: Costs) -> _Seconds:
        taping_s = costs.taping_s
        return cls(costs.forward_step_s, taping_s, taping_s, costs.reverse_step_s, costs.turn_s)

    @classmethod
    def of_stage(cls, stage: Stage) -> _Seconds:
        at_once_s = stage.forward_s - stage.spared_s
        turn_s = at_once_s + stage.backward_s
        return cls(stage.forward_s, stage.forward_s, at_once_s, stage.backward_s, turn_s)


_PERFORMED: Mapping[type, Callable[[Any, Any, Answer], Answer]] = {
    Advance: VirtualTime._advance,
    Tape: VirtualTime._tape,
    Reverse: VirtualTime._reverse,
    Offer: VirtualTime._write,
    Put: VirtualTime._write,
    Await: VirtualTime._await,
    Get: VirtualTime._read,
    Evict: VirtualTime._evict,
    Drop: VirtualTime._drop,
    EndForward: VirtualTime._end_forward,
}
