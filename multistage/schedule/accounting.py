"""Bytes in fast memory while a schedule of unequal stages is judged.

What is resident is

* state 0, which belongs to the caller, all the time;
* the gradient of the state that the adjoint has reached: of the last from `EndForward` on,
  which the caller computes from the last state, whose bytes are no longer counted;
* each tape, from its `Tape` or its `Get` to its `Reverse` or its `Evict`.  The tape of
  a stage includes the state that the stage makes, not the one it starts from; at `Reverse`
  the part of both which no tape saves is gone, unless a checkpoint has it;
* each state outside of a tape while it is live, saved, landing, or the input of a held
  tape: such a tape pins its input.  Where the tape that includes the input is evicted, or
  the input itself, it is in the tier instead, and must be back for `Reverse`.  A tape
  made in the reverse sweep is the exception: it holds its input as long as it exists,
  as autograd's graph does, and cannot be written to a tier;
* the staging copy of a live state that an `Offer` or a `Put` writes, until its `Await`.

A tape that comes back includes its state again: a copy of that state which stayed
is counted beside it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, fields, is_dataclass
from typing import Protocol

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
    Tape,
)
from ..errors import ScheduleError
from ..model.stages import StageCosts
from ..support.values import shown


@dataclass(slots=True)
class Transfer:
    """One accepted transfer whose `Await` or `Evict` is still to come."""

    item: int  # a state's step, or ~step of a tape
    tier: int
    is_write: bool
    staged: bool  # a write that took a staging slot of its own


class Judged(Protocol):
    """What the accounting looks at of the machine that judges; see `Rules`."""

    recovers: bool
    live: int | None
    adjoint: int | None
    held: dict[int, int | None]
    tapes: dict[int, int | None]
    tokens: dict[int, Transfer]
    unread: set[int]
    next_token: int


@dataclass(slots=True, eq=False)
class _Buffer:
    """Bytes that stay resident as long as something refers to them."""

    nbytes: int
    users: int = 1


@dataclass(slots=True)
class ByteAccounting:
    """Bytes in fast memory while a schedule runs; `Rules` asks before each action and tells after.

    Attributes
    ----------
    limit_bytes : int or None
        State 0 included.
    resident_bytes, peak_bytes : int
        Between two actions, and the most at any moment.
    needed_bytes : int
        The most at any moment of the last action.
    """

    costs: StageCosts = field(repr=False)
    limit_bytes: int | None = None
    resident_bytes: int = 0
    peak_bytes: int = 0
    needed_bytes: int = 0
    # Who refers to what.  A live or saved state may be inside a tape; so may be the state
    # that a tape starts from, which is None while the tier alone has it.
    first: _Buffer = field(init=False, repr=False)  # the caller's state 0, which never goes
    live: _Buffer | None = None
    saved: dict[int, _Buffer] = field(default_factory=dict)
    tapes: dict[int, _Buffer] = field(default_factory=dict)
    starts: dict[int, _Buffer | None] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # held tapes made in the reverse sweep
    state: list[int] = field(init=False, repr=False)
    gradient: list[int] = field(init=False, repr=False)
    tape: list[int] = field(init=False, repr=False)
    advance: list[int] = field(init=False, repr=False)
    taping: list[int] = field(init=False, repr=False)
    reverse: list[int] = field(init=False, repr=False)
    spared: list[int] = field(init=False, repr=False)
    spared_input: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        costs, stages = self.costs, self.costs.stages
        self.state = [costs.input_bytes, *(s.output_bytes for s in stages)]
        self.gradient = [costs.input_gradient_bytes, *(s.gradient_bytes for s in stages)]
        self.tape = [s.tape_bytes for s in stages]
        self.advance = [s.forward_overhead_bytes for s in stages]
        self.taping = [s.tape_overhead_bytes for s in stages]
        self.reverse = [s.backward_overhead_bytes for s in stages]
        self.spared = [s.spared_bytes for s in stages]
        self.spared_input = costs.spared_input_bytes
        self.first = _Buffer(costs.input_bytes)
        self.live = self._share(self.first)
        self.resident_bytes = self.peak_bytes = costs.input_bytes

    def bytes_of(self, item: int) -> int:
        """Return the size of a state, or of a tape, which is `~step`."""
        return self.tape[~item] if item < 0 else self.state[item]

    def has(self, step: int, rules: Judged) -> bool:
        """Whether the state that a step starts from is at hand for its tape."""
        return (
            step == 0
            or rules.live == step
            or self.starts.get(step) is not None
            or rules.tapes.get(step - 1, -1) is None
            or rules.held.get(step, -1) is None
            or (rules.recovers and step in rules.unread)  # the executor's tape has it
        )

    def parts(self, rules: Judged) -> dict[str, int]:
        """Return the bytes of tapes and of states, and of both on their way to or from a tier.

        A state inside a tape is part of it.
        """
        tapes = dict.fromkeys(self.tapes, 0)
        moving = 0
        for transfer in rules.tokens.values():
            item = transfer.item
            if item < 0:
                moving += self.tape[~item]
                tapes.pop(~item, None)
            elif transfer.staged or self.saved.get(item) not in self.tapes.values():
                moving += self.state[item]
        kept = sum(self.tape[step] for step in tapes)
        gradient = 0 if rules.adjoint is None else self.gradient[rules.adjoint]
        states = self.resident_bytes - gradient - kept - moving
        return {"tapes": kept, "states": max(0, states), "in flight": moving}

    def needed(self, action: Action, rules: Judged) -> int:
        """Return the most bytes at any moment of an action that is legal otherwise."""
        resident = self.resident_bytes
        match action:
            case Advance(start, stop):
                return self._along(start, stop)
            case Tape(step):
                return resident + self.tape[step] + self.taping[step]
            case Reverse(step):
                beside = self.gradient[step] + self.reverse[step]
                if step + 1 not in self.saved:
                    beside -= self.spared[step]
                if step not in self.saved:
                    beside -= self.spared_input[step]
                if step in rules.tapes:
                    return resident + beside
                return resident + self.tape[step] + max(self.taping[step], beside)
            case Offer(step) | Put(step):
                staged = not action.tape and step not in rules.held
                resident += self.state[step] if staged else 0
            case Get(step):
                resident += (self.tape if action.tape else self.state)[step]
            case EndForward() if rules.live is not None:
                resident += self.gradient[rules.live]  # that of the last; or a resumed adjoint
            case Load(step) if step in rules.unread:
                resident += self.state[step]
        return resident

    def _along(self, start: int, stop: int) -> int:
        """Return the peak of a run of stages, each beside its input and its output."""
        before = left = self.resident_bytes
        if self.live is not None and self.live.users == 1:
            left -= self.live.nbytes
        peak = 0
        for i in range(start, stop):
            peak = max(peak, before + self.state[i + 1] + self.advance[i])
            before = left + self.state[i + 1]
        return peak

    def settle(self, action: Action, answer: Answer, rules: Judged, ended: Transfer | None) -> None:
        """Count what an action has changed; `ended` is the transfer that it waited for."""
        match action:
            case Advance(_, stop):
                self._go_on(self._new(self.state[stop]))
            case Tape(step):
                self.tapes[step] = made = self._new(self.tape[step])
                self.starts[step], self.live = self.live, None
                if rules.adjoint is not None:
                    self.late.add(step)
                self._go_on(self._share(made))
            case Reverse(step):
                self._reverse(step, rules)
                return  # `needed` is the peak; an input that is gone counts until the next one
            case EndForward():
                assert rules.adjoint is not None
                rules.live = None
                self._go_on(None)
                self.resident_bytes += self.gradient[rules.adjoint]
            case Save(step):
                assert self.live is not None
                self.saved[step] = self._share(self.live)
            case Load(step):
                self._load(step, rules)
            case Free(step):
                self._release(self.saved.pop(step, None))
            case Offer(step) | Put(step):
                if answer is not None and rules.tokens[rules.next_token - 1].staged:
                    self.resident_bytes += self.state[step]
            case Get(step):
                if action.tape:
                    self.tapes[step], self.starts[step] = self._new(self.tape[step]), None
                else:
                    self.saved[step] = self._new(self.state[step])
            case Await():
                assert ended is not None
                self._arrive(ended, rules)
            case Evict(step):
                if action.tape:
                    self._leave(step)
                else:
                    gone = self.saved.pop(step)
                    if self.starts.get(step) is gone and step not in self.late:
                        self.starts[step] = None
                        self._release(gone)
                    self._release(gone)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def keep(self, step: int, rules: Judged) -> None:
        """Keep a state that is at hand, wherever it is."""
        if step == 0:
            found: _Buffer | None = self.first
        elif rules.tapes.get(step - 1, -1) is None:
            found = self.tapes[step - 1]
        else:
            found = self.live if rules.live == step else self.starts.get(step)
        assert found is not None
        self.saved[step] = self._share(found)

    def give_up(self, step: int) -> None:
        """Give a tape back that is in no tier; a state in it that is kept stays."""
        self._leave(step)
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _reverse(self, step: int, rules: Judged) -> None:
        if rules.live == step + 1:
            rules.live = None  # what it led to is used up
        if rules.live is None:
            self._go_on(None)
        if step in self.tapes:
            self._leave(step)
        self.resident_bytes += self.gradient[step] - self.gradient[step + 1]

    def _load(self, step: int, rules: Judged) -> None:
        if step == 0:
            found = self.first
        elif rules.tapes.get(step - 1, -1) is None:
            found = self.tapes[step - 1]
        else:
            if step not in self.saved:  # it was lost and is computed again
                self.saved[step] = self._new(self.state[step])
            found = self.saved[step]
        self._go_on(self._share(found))

    def _arrive(self, ended: Transfer, rules: Judged) -> None:
        item = ended.item
        if ended.staged:
            self.resident_bytes -= self.state[item]
        elif ended.is_write:
            return
        elif item < 0 and ~item not in rules.tapes:  # the read has failed
            self._leave(~item)
        elif item >= 0 and item not in rules.held:
            self._release(self.saved.pop(item))

    def _go_on(self, buffer: _Buffer | None) -> None:
        self._release(self.live)
        self.live = buffer

    def _new(self, nbytes: int) -> _Buffer:
        self.resident_bytes += nbytes
        return _Buffer(nbytes)

    def _share(self, buffer: _Buffer) -> _Buffer:
        buffer.users += 1
        return buffer

    def _release(self, buffer: _Buffer | None) -> None:
        if buffer is not None:
            buffer.users -= 1
            if not buffer.users:
                self.resident_bytes -= buffer.nbytes

    def _leave(self, step: int) -> None:
        """Give a tape back; the state in it outlives it where something else holds it."""
        gone = self.tapes.pop(step)
        self._release(self.starts.pop(step))
        self.late.discard(step)
        state = step + 1
        pinned = self.starts.get(state) is gone and state in self.late
        if self.starts.get(state) is gone and not pinned:
            self.starts[state] = None
            self._release(gone)
        saved = self.saved.get(state)
        if pinned or gone in (self.live, saved):
            kept = self._new(self.state[state])
            if pinned:
                self._release(gone)
                self.starts[state] = self._share(kept)
            if self.live is gone:
                self._go_on(self._share(kept))
            if saved is gone:
                self._release(gone)
                self.saved[state] = self._share(kept)
            self._release(kept)
        self._release(gone)


def item_of(action: Offer | Put | Get | Evict | Drop) -> int:
    """Return what an action moves: a state's step, or ~step of a tape."""
    return ~action.step if action.tape else action.step


def item_said(item: int) -> str:
    """Return a state or tape as messages show it."""
    return f"tape {~item}" if item < 0 else f"checkpoint {item}"


def require_whole(action: Action, index: int | None) -> None:
    """Raise ScheduleError if an action names steps, tiers or tokens by other than ints.

    Asked only once something went wrong with it: most schedules have a million actions.
    """
    for each in fields(action) if is_dataclass(action) else ():
        value = getattr(action, each.name)
        if not hasattr(value, "__index__"):
            raise ScheduleError(f"{told(action)} but {each.name}={shown(value)} is no int", index)


def told(action: Action) -> str:
    """Return an action as messages show it: `Get(3, 0)`, `Get(3, 0, tape=True)`."""
    values = list(map(str, astuple(action)))
    if isinstance(action, Offer | Put | Get | Drop | Evict):
        values[-1:] = ["tape=True"] if action.tape else []
    return f"{type(action).__name__}({', '.join(values)})"
