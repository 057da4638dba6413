"""Forward sweeps whose steps the caller runs: each state is pushed to `Executor.push`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar, cast

from ..actions import Action, Advance, Answer, EndForward, Schedule, Tape
from ..errors import ScheduleError
from ..model.chain import Chain

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Pause(NamedTuple):
    """In place of a step that the caller has not run yet."""

    step: int


class Pushed(Generic[State, Adjoint]):
    """A chain whose steps its caller runs, in the forward sweep; and its schedule, held back.

    Attributes
    ----------
    at, state
        What the caller has come to.
    """

    in_place, state_is_tape, one_tape = False, True, False

    def __init__(self, chain: Chain[State, Adjoint], state: State) -> None:
        self.tape, self.reverse = chain.tape, chain.reverse
        self.at, self.state = 0, state

    def take(self, state: State) -> None:
        """Note the state that the caller has come to."""
        self.at, self.state = self.at + 1, state

    def advance(self, state: State, start: int, stop: int) -> State:
        """Return the state that the caller has come to."""
        if stop != self.at:  # it went back before the forward sweep was over
            raise ScheduleError(f"step {start} is to run again, but its caller is at {self.at}")
        return self.state

    def paused(self, schedule: Schedule) -> Schedule:
        """Follow a schedule; in its forward sweep, step by step, with a pause before a new one."""
        answer: Answer = None
        ended = False
        while not ended:
            try:
                action = schedule.send(answer)
            except StopIteration:
                return
            for each in _by_step(action):
                match each:
                    case Advance(step) | Tape(step) if step == self.at:
                        yield cast(Action, Pause(step))
                answer = yield each
            ended = isinstance(action, EndForward)
        yield from schedule


def _by_step(action: Action) -> Iterable[Action]:
    """Return an action, of several steps as one action for each."""
    if isinstance(action, Advance):
        return (Advance(i, i + 1) for i in range(action.start, action.stop))
    return (action,)
