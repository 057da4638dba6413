"""The first sweep of steps whose costs are not known: its own first steps are timed.

No step is run to be measured alone, since an operator may count its runs, or change more than
arrays.  The first steps keep their states, so that the plan that is made then finds at hand what
it would have kept or written of them; it goes on where they ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import perf_counter
from typing import Generic, TypeVar

from ..actions import Action, Advance, Answer, Await, Free, Load, Offer, Put, Save, Schedule
from ..execute.metered import shared_bytes
from ..measurement.driver import settled
from ..model.chain import Chain
from ..model.costs import NOT_KEPT
from ..states.sharing import own_bytes
from .arguments import one_tape

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

GUESSED_STEP_S = 1e-3  # until one was timed
_MOST_STEPS = 64
_ENOUGH_S = 5e-3  # timed, from the third step on
_LEAST_STEPS = 3  # the first ones compile and touch memory
_FEW = 6  # times, of which the least says more than their median


class FirstSteps(Generic[State, Adjoint]):
    """A chain whose steps are timed until it is told to `stop`.

    Where steps make tapes, every other pair of them is run keeping its tape, which is
    weighed beside the one before.

    Parameters
    ----------
    chain : Chain
    agree : callable, optional
        Turns a time into that of all ranks whose steps communicate.

    Attributes
    ----------
    in_place, state_is_tape, one_tape : bool
        As the chain has them.
    tape_bytes : int
        0 if none was weighed, `NOT_KEPT` where only the latest exists.
    spent_s : float
        Seconds of the steps from the third on.
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint],
        agree: Callable[[float], float] | None = None,
    ) -> None:
        self._chain, self._agree = chain, agree
        self.in_place, self.state_is_tape = chain.in_place, chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))
        self.tape, self.reverse = chain.tape, chain.reverse
        self.tape_bytes = NOT_KEPT if one_tape(chain) else 0
        self._tapes = not chain.state_is_tape and not self.one_tape
        self.spent_s = 0.0
        self._plain_s: list[float] = []
        self._taped_s: list[float] = []
        self._tape: object = None
        self._timed = True

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps start..stop-1; return the state after them."""
        if not self._timed:
            return self._chain.advance(state, start, stop)
        done = len(self._plain_s) + len(self._taped_s)
        began = perf_counter()
        tape: object = None
        taping = self._tapes and done % 4 < 2
        if taping:
            after, tape = self._chain.tape(state, start)
        else:
            after = self._chain.advance(state, start, stop)
        took = perf_counter() - began
        if taping:
            self._weigh(tape, after)
        times = self._taped_s if taping else self._plain_s
        times.append(took if self._agree is None else self._agree(took))
        if done >= _LEAST_STEPS - 1:
            self.spent_s += times[-1]
        return after

    def _weigh(self, tape: object, after: State) -> None:
        """Note the bytes of a tape that the one before it does not hold."""
        beside, self._tape = self._tape, tape
        if self.in_place:  # what is of the state is copied for each tape
            self.tape_bytes = own_bytes(tape, (after, beside)) + shared_bytes(tape, after)
        else:
            self.tape_bytes = own_bytes(tape, beside)

    @property
    def typical_s(self) -> tuple[float, float]:
        """The typical seconds of a step, and of one that keeps its tape."""
        taped, plain = self._taped_s or self._plain_s, self._plain_s or self._taped_s
        return _typical(plain), _typical(taped)

    def stop(self, chain: Chain[State, Adjoint]) -> None:
        """Time no more; run this chain, which does the same."""
        self._timed, self._tape, self._chain = False, None, chain


def _typical(samples: list[float]) -> float:
    if not samples:
        return GUESSED_STEP_S
    return max(1e-9, settled(samples) if len(samples) >= _FEW else min(samples))


def first_sweep(
    first: FirstSteps[State, Adjoint],
    slots: int,
    n_steps: int | None,
    is_last: Callable[[int], bool] | None,
    make: Callable[[int, Callable[[int], bool] | None], Schedule],
) -> Schedule:
    """Time the first steps, then follow the schedule that is made for the costs they show.

    Parameters
    ----------
    first : FirstSteps
        The chain that is run.
    slots : int
    n_steps, is_last
        As for an executor; one of them is None.
    make : callable
        `make(reached, is_last)` returns the schedule of the whole sweep, of which so many steps
        were run.
    """
    reached, ended, held = 0, False, set[int]()
    yield Save(0)
    held.add(0)
    for step in range(_steps_to_time(slots, n_steps)):
        yield Advance(step, step + 1)
        reached = step + 1
        if is_last is not None and is_last(reached):
            ended = True
            break
        if len(held) < slots:
            yield Save(reached)
            held.add(reached)
        if first.spent_s > _ENOUGH_S:
            break

    def known(i: int) -> bool:
        assert is_last is not None
        return (ended and i == reached) if i <= reached else is_last(i)

    schedule = make(reached, None if is_last is None else known)
    yield from _followed(schedule, reached, held, slots)


def _steps_to_time(slots: int, n_steps: int | None) -> int:
    """Return how many at most: few beyond those whose states are kept, never the last."""
    if n_steps is None:
        return min(_MOST_STEPS, max(slots - 1, 1))
    few = min(_LEAST_STEPS, max(1, n_steps // 4))
    return min(_MOST_STEPS, max(slots - 1, few), n_steps - 1)


def _followed(schedule: Schedule, reached: int, spare: set[int], slots: int) -> Schedule:
    """Follow a schedule from its beginning, its first steps having been run already.

    Parameters
    ----------
    schedule : generator of actions
    reached : int
        The live state.
    spare : set of int
        States in slots: what the schedule does not keep of them is given back.
    """
    live, at, taken = reached, 0, 0  # at: the live state as the schedule has it
    kept: set[int] = set()
    answer: Answer = None
    while True:
        try:
            action: Action = schedule.send(answer)
        except StopIteration:
            return
        answer = None
        match action:
            case Advance(_, stop) if stop <= reached:
                at = stop
                continue
            case Save(step) if step in spare:
                spare.remove(step)
                kept.add(step)
                taken += 1
                continue
            case Free(step):
                kept.discard(step)
                taken -= 1
                answer = yield action
                continue
            case Await():
                answer = yield action
                continue
            case Offer(step) | Put(step) if step in kept:  # from its slot
                answer = yield action
                continue
            case Advance(_, stop) if live == reached or reached in spare | kept:
                if live != reached:
                    yield Load(reached)
                live, action = stop, Advance(reached, stop)
            case _:
                live = yield from _stand(at, live, spare | kept)
        more = isinstance(action, Save | Offer | Put)
        # The live state itself needs no spare copy; of the others the last are needed last.
        for step in sorted(spare, key=lambda step: (step != at, -step)):
            if more and step != at and len(spare) + taken < slots:
                break
            yield Free(step)
            spare.remove(step)
        answer = yield action
        if not more:
            break
        taken += 1 if answer is not None or isinstance(action, Save) else 0
        if isinstance(action, Save):
            kept.add(action.step)
    yield from _rest(schedule, answer)


def _stand(at: int, live: int, held: set[int]) -> Generator[Action, Answer, int]:
    """Make state `at` the live one; return it."""
    nearest = max((step for step in held if step <= at), default=0)
    if not nearest <= live <= at:
        yield Load(nearest)
        live = nearest
    if live < at:
        yield Advance(live, at)
    return at


def _rest(schedule: Schedule, answer: Answer) -> Schedule:
    """Pass on what is left of a schedule that is to be sent this answer."""
    while True:
        try:
            action = schedule.send(answer)
        except StopIteration:
            return
        answer = yield action
