"""What a schedule of a heterogeneous chain costs, byte by byte: the judge of its planners.

Runs the operations of table 1 of Beaumont et al. 2019 (RR-9302) one after the
other and counts what is resident.  It knows nothing of how schedules are made:

* a state is resident while it is live, saved, the input of a tape that is
  held, or inside one (the tape of the stage that made it includes it);
* state 0 belongs to the caller and is resident all the time;
* the gradient of the last state is resident from the start, as the model has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from ..errors import ScheduleError
from ..stages import StageCosts
from .chain_table import Sizes


@dataclass(frozen=True, slots=True)
class ChainUse:
    """What a schedule was seen to use.

    Attributes
    ----------
    makespan_s : float
    peak_bytes : int
        With the chain's input.
    forward_steps : int
        Stages run forward, the loss not counted.
    """

    makespan_s: float
    peak_bytes: int
    forward_steps: int


def use_of(actions: Iterable[Action], costs: StageCosts) -> ChainUse:
    """Return what a schedule takes; the loss is stage `len(costs.stages)`.

    Raises
    ------
    ScheduleError
        Naming the first action that finds its input missing, or what was not
        reversed or given back at the end.

    Examples
    --------
    >>> from multistage.stages import Stage
    >>> costs = StageCosts((Stage("a", 1.0, 2.0, 10, 30),), 5)
    >>> use_of([Tape(0), Tape(1), EndForward(), Reverse(1), Reverse(0)], costs)
    ChainUse(makespan_s=3.0, peak_bytes=45, forward_steps=1)
    """
    sizes = Sizes.of(costs)
    machine = _Machine(sizes)
    for index, action in enumerate(actions):
        try:
            machine.apply(action)
        except ScheduleError as error:
            raise ScheduleError(str(error), index) from None
    if machine.adjoint != 0 or machine.saved or machine.tapes:
        raise ScheduleError(
            f"the schedule ended with the adjoint at {machine.adjoint}, "
            f"saved {sorted(machine.saved)}, tapes {sorted(machine.tapes)}"
        )
    return ChainUse(machine.seconds, machine.peak, machine.forward_steps)


class _Machine:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.n = len(sizes)
        self.live: int | None = 0
        self.adjoint = self.n  # the gradient of this state is at hand
        self.saved: set[int] = set()
        self.tapes: set[int] = set()
        self.seconds = 0.0
        self.peak = 0
        self.forward_steps = 0

    def resident(self) -> int:
        """Return the bytes held between two operations."""
        sizes, states = self.sizes, set(self.saved) | set(self.tapes) | {0}
        if self.live is not None:
            states.add(self.live)
        total = sum(int(sizes.state[i]) for i in states if i == 0 or i - 1 not in self.tapes)
        total += sum(int(sizes.tape[i]) for i in self.tapes)
        return total + int(sizes.gradient[self.adjoint])

    def _at_peak(self, more: int) -> None:
        self.peak = max(self.peak, self.resident() + more)

    def apply(self, action: Action) -> None:
        """Perform one action, or raise ScheduleError."""
        sizes = self.sizes
        match action:
            case Advance(start, stop):
                self._need_live(action, start)
                for i in range(start, stop):
                    self._at_peak(int(sizes.state[i + 1]) + int(sizes.advance[i]))
                    self.seconds += float(sizes.forward_s[i])
                    self.live = i + 1
                self.forward_steps += stop - start
            case Tape(step):
                self._need_live(action, step)
                if step in self.tapes:
                    raise ScheduleError(f"{action}, but that tape is already held")
                self._at_peak(int(sizes.tape[step]) + int(sizes.taping[step]))
                self.tapes.add(step)
                self.seconds += float(sizes.forward_s[step])
                if self.adjoint == step + 1:
                    self.seconds -= float(sizes.spared_s[step])
                self.forward_steps += step < self.n - 1
                self.live = step + 1
            case Reverse(step):
                if step not in self.tapes or step != self.adjoint - 1:
                    raise ScheduleError(
                        f"{action}, but the tapes are {sorted(self.tapes)} "
                        f"and the adjoint is at {self.adjoint}"
                    )
                if self.live == step + 1:
                    self.live = None  # what it led to is used up
                self._at_peak(int(sizes.gradient[step]) + int(sizes.reverse[step]))
                self.tapes.remove(step)
                self.adjoint = step
                self.seconds += float(sizes.reverse_s[step])
            case Save(step):
                self._need_live(action, step)
                self.saved.add(step)
            case Load(step):
                if step and step not in self.saved and step - 1 not in self.tapes:
                    raise ScheduleError(f"{action}, but it is not held")
                self.live = step
            case Free(step):
                if step not in self.saved:
                    raise ScheduleError(f"{action}, but it is not held")
                self.saved.remove(step)
            case EndForward():
                pass
            case _:
                raise ScheduleError(f"{action} has no place in a chain without a slow tier")

    def _need_live(self, action: Action, step: int) -> None:
        if self.live != step:
            raise ScheduleError(f"{action}, but the live state is {self.live}")


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


def courses(
    actions: Iterable[Action], costs: StageCosts
) -> Iterator[tuple[Action, float, float, int, int]]:
    """Yield each action, a run of stages stage by stage, with its times and its memory.

    The numbers: seconds at which it starts and stops, the bytes it takes at its
    peak and those resident after it, the chain's input included.
    """
    machine = _Machine(Sizes.of(costs))
    for whole in actions:
        pieces: Iterable[Action] = (whole,)
        if isinstance(whole, Advance):
            pieces = (Advance(i, i + 1) for i in range(whole.start, whole.stop))
        for action in pieces:
            start_s, machine.peak = machine.seconds, machine.resident()
            machine.apply(action)
            resident = machine.resident()
            yield action, start_s, machine.seconds, max(machine.peak, resident), resident
