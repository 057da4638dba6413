"""Virtual time while a schedule runs: when each action is done, and what it answers.

One computing thread performs the actions in order; each tier has a write and a read
channel (`channels`).  A clock knows how long steps take: `UniformTime` those that are
alike, `StageTime` those that differ, which it judges before it times them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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
from ..model.stages import StageCosts
from .channels import Channels
from .machine_state import ByteAccounting
from .rules import Rules
from .timeline import Timeline


class VirtualTime:
    """The time of transfers, which is the same whatever the steps are.

    Parameters
    ----------
    rules : Rules
    channels : sequence of Channels
        Of each tier.
    timeline : Timeline, optional
        Records what went on.
    state_bytes : int
        Of every state, where they are alike.

    Attributes
    ----------
    now : float
        Virtual seconds since the start.
    stall_s : float
        Seconds the computing thread waited for transfers.
    end_forward_s : float
        When the forward sweep ended.
    forward_steps, writes, reads : int
    """

    __slots__ = (
        "_channels",
        "_done",
        "_memory",
        "_rules",
        "_state_bytes",
        "_tapes",
        "_timeline",
        "end_forward_s",
        "forward_steps",
        "now",
        "reads",
        "stall_s",
        "writes",
    )

    def __init__(
        self,
        rules: Rules,
        channels: Sequence[Channels],
        timeline: Timeline | None,
        state_bytes: int = 0,
    ) -> None:
        self._rules, self._channels, self._timeline = rules, channels, timeline
        self._memory: ByteAccounting | None = rules.memory
        self._state_bytes = state_bytes
        self._done: dict[int, tuple[float, float]] = {}  # token: time, overhead to pay at its Await
        self._tapes: set[int] = set()
        self.now = self.stall_s = self.end_forward_s = 0.0
        self.forward_steps = self.writes = self.reads = 0

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
            raise ScheduleError(
                f"{action} but tier {action.tier} takes states alone; leave states-only out "
                "(tapes=True), or plan for this tier",
                self._index(),
            )
        return channel

    def _index(self) -> int | None:
        """Return the number of the action that is being timed, None in an unchecked run."""
        raise NotImplementedError

    def _write(self, channel: Channels, action: Offer | Put) -> Answer:
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
        item = ~action.step if action.tape else action.step
        self._wait_until(self._channels[action.tier].stored[item])
        if action.tape:
            self._tapes.discard(action.step)
        return True

    def _drop(self, action: Drop, _: Answer) -> Answer:
        del self._channels[action.tier].stored[~action.step if action.tape else action.step]
        return None

    def _end_forward(self, _action: EndForward, _: Answer) -> Answer:
        self.end_forward_s = self.now
        return None


class UniformTime(VirtualTime):
    """The time of steps that are alike."""

    __slots__ = ("_action_s", "_forward_s", "_reverse_s", "_taping_s", "_turn_s")

    def __init__(
        self,
        costs: Costs,
        rules: Rules,
        channels: Sequence[Channels],
        timeline: Timeline | None,
    ) -> None:
        super().__init__(rules, channels, timeline, costs.state_bytes)
        self._action_s = costs.action_s
        self._forward_s, self._taping_s = costs.forward_step_s, costs.taping_s
        self._reverse_s, self._turn_s = costs.reverse_step_s, costs.turn_s

    def perform(self, action: Action) -> Answer:
        """Let the time of an action pass; return its answer."""
        self.now += self._action_s
        perform = _UNIFORM.get(type(action))
        return None if perform is None else perform(self, action, None)

    def _index(self) -> int | None:
        return None if self._timeline is None else self._rules.index

    def _advance(self, action: Advance, _: Answer) -> Answer:
        begin, count = self.now, action.stop - action.start
        self.now = begin + count * self._forward_s
        self.forward_steps += count
        if self._timeline is not None:
            self._timeline.add(
                "compute", "forward", begin, self.now, first=action.start, count=count
            )
        return None

    def _tape(self, action: Tape, _: Answer) -> Answer:
        begin = self.now
        self.now = begin + self._taping_s
        self.forward_steps += 1
        self._tapes.add(action.step)
        if self._timeline is not None:
            self._timeline.add("compute", "forward", begin, self.now, first=action.step)
        return None

    def _reverse(self, action: Reverse, _: Answer) -> Answer:
        begin, step = self.now, action.step
        if step in self._tapes:
            self._tapes.remove(step)
            self.now = begin + self._reverse_s
        else:
            self.now = begin + self._turn_s
        if self._timeline is not None:
            self._timeline.add("compute", "reverse", begin, self.now, first=step)
        return None

    def _offer(self, action: Offer, _: Answer) -> Answer:
        channel = self._channel_of(action)
        return self._write(channel, action) if channel.has_room(self.now) else None

    def _put(self, action: Put, _: Answer) -> Answer:
        channel = self._channel_of(action)
        if not channel.has_room(self.now):
            if channel.waiting:
                self._wait_until(channel.waiting[0])
            if not channel.has_room(self.now):
                raise ArgumentError(f"{action} but tier {action.tier} is full")
        return self._write(channel, action)


class StageTime(VirtualTime):
    """The time of stages that differ, and of the loss behind them."""

    __slots__ = ("_forward", "_loss", "_reverse_each", "_spared")

    def __init__(
        self,
        costs: StageCosts,
        rules: Rules,
        channels: Sequence[Channels],
        timeline: Timeline | None,
    ) -> None:
        super().__init__(rules, channels, timeline)
        self._loss = len(costs.stages)
        self._forward = [*(stage.forward_s for stage in costs.stages), 0.0]
        self._reverse_each = [*(stage.backward_s for stage in costs.stages), 0.0]
        self._spared = [*(stage.spared_s for stage in costs.stages), 0.0]

    def perform(self, action: Action) -> Answer:
        """Judge an action, let its time pass, and return its answer.

        `Advance` is to come stage by stage.

        Raises
        ------
        ScheduleError
            If the action is illegal.
        """
        rules, timeline = self._rules, self._timeline
        answer = rules.usual_answer(action)
        rules.apply(action, answer)
        if timeline is not None and self._memory is not None:
            timeline.sample("fast", self.now, self._memory.needed_bytes)
        perform = _STAGES.get(type(action))
        return answer if perform is None else perform(self, action, answer)

    def _index(self) -> int | None:
        return self._rules.index - 1  # it was judged before it is timed

    def _advance(self, action: Advance, _: Answer) -> Answer:
        begin, step = self.now, action.start
        self.now = begin + self._forward[step]
        self.forward_steps += step < self._loss
        if self._timeline is not None:
            self._timeline.add("compute", "forward", begin, self.now, first=step)
        return None

    def _tape(self, action: Tape, _: Answer) -> Answer:
        begin, step = self.now, action.step
        self.now = begin + self._forward[step]
        if self._rules.adjoint == step + 1:
            self.now -= self._spared[step]
        self.forward_steps += step < self._loss
        self._tapes.add(step)
        if self._timeline is not None:
            self._timeline.add("compute", "forward", begin, self.now, first=step)
        return None

    def _reverse(self, action: Reverse, _: Answer) -> Answer:
        begin, step = self.now, action.step
        if step in self._tapes:
            self._tapes.remove(step)
            self.now = begin + self._reverse_each[step]
        else:  # taped and reversed at once
            turn_s = self._forward[step] - self._spared[step] + self._reverse_each[step]
            self.now = begin + turn_s
        if self._timeline is not None:
            self._timeline.add("compute", "reverse", begin, self.now, first=step)
        return None

    def _offer(self, action: Offer | Put, answer: Answer) -> Answer:
        channel = self._channel_of(action)
        return None if answer is None else self._write(channel, action)


_Perform: TypeAlias = Callable[[Any, Any, Answer], Answer]
_TRANSFERS: Mapping[type, _Perform] = {
    Await: VirtualTime._await,
    Get: VirtualTime._read,
    Evict: VirtualTime._evict,
    Drop: VirtualTime._drop,
    EndForward: VirtualTime._end_forward,
}
_UNIFORM: Mapping[type, _Perform] = {
    Advance: UniformTime._advance,
    Tape: UniformTime._tape,
    Reverse: UniformTime._reverse,
    Offer: UniformTime._offer,
    Put: UniformTime._put,
    **_TRANSFERS,
}
_STAGES: Mapping[type, _Perform] = {
    Advance: StageTime._advance,
    Tape: StageTime._tape,
    Reverse: StageTime._reverse,
    Offer: StageTime._offer,
    Put: StageTime._offer,
    **_TRANSFERS,
}
