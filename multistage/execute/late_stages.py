"""How the rest of a sweep of a chain goes, with its tier and without; see `late`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Protocol

from ..actions import Action, Advance, Await, EndForward, Evict, Put, Schedule, Tape
from ..errors import ScheduleError
from ..model.tier import Tier
from ..planners.chain.plan import ChainPlan
from ..planners.chain.rest import Rest, Rests, Standing
from ..schedule.rules import Rules
from ..schedule.simulation import simulate
from .sweep import Sweep

# What a question takes at first: a table of RR-9302 for so many stages, and some choices.
_PER_STAGE_S, _PER_PAIR_S = 3e-4, 5e-6
_SLOWER = 1.2  # a tier that is late takes so many times as long as planned, at least
# Of the makespan, what waiting must cost to leave a plan before it waits; of the time with
# waiting, the most that leaving may take.
_EARLY, _GAIN = 0.02, 0.95
_PATIENCE = 0.02  # of the rest, the longest that writes may take to stop, if it has room beside


class Elsewhere(Protocol):
    """What a sweep has elsewhere, and waits for."""

    def awaited(self, sweep: Sweep, action: Put | Evict | Await) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait.

        It answers whether that is so.  None if the action does not wait.
        """

    def stalled(self, since: float, late: str = "") -> None:
        """Enter what computing has waited since then, and why the tiers were left, if so."""

    def said(self, action: Put | Evict | Await) -> tuple[str, str]:
        """Return what an action waits for, and the name of its tier."""

    def moved(self, action: Put | Evict | Await) -> tuple[int, bool, bool]:
        """Return what an action waits for: the step, whether a tape, whether a write."""

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown."""

    def busier(self, planned_s: float) -> float:
        """Return how much longer than planned the forward steps have taken that took so long."""

    def cancel(self, timeout_s: float) -> object:
        """Cancel all writes; wait so many seconds for them to end."""

    @property
    def stuck(self) -> list[int]:
        """States, and tapes as ~step, whose transfers go on all the same."""

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is there or on its way."""

    def hold(self, sweep: Sweep, saved: frozenset[int], tapes: frozenset[int]) -> None:
        """Hold these states and tapes, and nothing else."""

    def played(self, actions: Iterable[Action]) -> Schedule:
        """Return actions as a schedule that replaces the plan's."""

    def is_behind(self) -> bool:
        """Whether a write has not ended, as far as is known."""


class Stages:
    """The rest of the sweeps by a plan.

    Parameters
    ----------
    plan : ChainPlan
        With a tier and a limit.
    rules : callable
        Makes the legality machine of what is performed.
    performed : callable
        Returns what is performed of some actions of a chain and its loss.
    inside : bool
        Whether a state can be taken out of a tape that includes it.

    Attributes
    ----------
    slower : float
        How many times slower than planned the tier was when it was left, else 1.
    writes : bool
        Whether that is of writes, not of reads.
    given_up : int
        Tapes and states of the plan that were in the tier then, or held and in the way.
    peak_bytes : int
        The most memory of a sweep that left its tier.
    """

    def __init__(
        self,
        plan: ChainPlan,
        rules: Callable[[], Rules],
        performed: Callable[[Iterable[Action]], Iterable[Action]],
        *,
        inside: bool,
    ) -> None:
        assert plan.tier is not None and plan.memory_bytes is not None
        self.plan, self._make_rules, self._performed = plan, rules, performed
        self._inside, self._tier = inside, plan.tier
        self._rests: Rests | None = None
        n = len(plan.costs.stages)
        self.ask_s = _PER_STAGE_S * n + _PER_PAIR_S * n * n
        self._places: dict[Action, int] = {}
        self._forward_s: list[float] = []  # of computing, before each action
        forward_s = 0.0
        for at, action in enumerate(plan.actions):
            self._places.setdefault(action, at)
            self._forward_s.append(forward_s)
            forward_s += _forward_s(plan, action)

    def begin(self, elsewhere: Elsewhere) -> None:
        """Prepare for a sweep."""
        self._elsewhere = elsewhere
        self.slower, self.given_up, self.peak_bytes = 1.0, 0, 0
        self.writes = True
        self._found: tuple[Action | None, Rest | None] = None, None
        self._asked = 1.0  # how slow the tier was when it was asked about last, at a put

    def planned_s(self, action: Put | Evict | Await, sweep: Sweep) -> float:
        """Return the seconds of one transfer as planned."""
        step, is_tape, is_write = self._elsewhere.moved(action)
        costs = self.plan.costs
        states = [costs.input_bytes, *(stage.output_bytes for stage in costs.stages)]
        nbytes = costs.stages[step].tape_bytes if is_tape else states[step]
        return self._tier.writing_s(nbytes) if is_write else self._tier.reading_s(nbytes)

    def without_s(self, action: Put | Evict | Await, sweep: Sweep) -> float:
        """Return the seconds that the rest takes in fast memory alone."""
        if self._found[0] != action:
            self._found = action, self._best(action, sweep)
        rest = self._found[1]
        return math.inf if rest is None else rest.seconds

    def waiting_s(self, action: Put | Evict | Await, sweep: Sweep) -> float:
        """Return the seconds that the rest of the plan takes, by the rates seen."""
        slower = self._slower(action, sweep)
        if slower < _SLOWER:
            return 0.0
        ends = _ends(self.plan, slower)
        return ends[-1] - ends[self._places[action] - 1]

    def slowed(self, rates: Tier) -> Tier:
        """Return the rates of a tier, in one way no faster than it was when it was left."""
        name = "write_bytes_per_s" if self.writes else "read_bytes_per_s"
        seen = max(1.0, getattr(self._tier, name) / self.slower)
        return replace(rates, **{name: min(getattr(rates, name), seen)})

    def is_early(self, action: Put, sweep: Sweep) -> bool:
        """Whether to leave now is better than where the plan will wait: it keeps more."""
        slower = self._slower(action, sweep) if self._elsewhere.is_behind() else 1.0
        if slower < _SLOWER * self._asked:
            return False
        self._asked = slower
        planned = _ends(self.plan, 1.0)
        waiting_s = self.waiting_s(action, sweep)
        lost_s = waiting_s - planned[-1] + planned[self._places[action] - 1]
        if lost_s < max(self.ask_s, _EARLY * self.plan.makespan_s):
            return False
        return self.without_s(action, sweep) < _GAIN * waiting_s

    def leave(self, action: Put | Evict | Await, sweep: Sweep) -> Schedule | None:
        """Give up what is in the tier; return RR-9302 in the memory left."""
        if self.without_s(action, sweep) == math.inf:
            return None
        slower, found = self._slower(action, sweep), self._found[1]
        wait_s = max(self.ask_s, _PATIENCE * self.without_s(action, sweep))
        self._elsewhere.cancel(wait_s)
        # What was cancelled is not there to stay for: the sweep leaves once there is room.
        while (rest := self._best(action, sweep) if self._elsewhere.stuck else found) is None:
            self._elsewhere.cancel(wait_s)
        before = self.plan.actions[: self._places[action]]
        made = {each.step for each in before if isinstance(each, Tape)}
        self.given_up = 0 if EndForward() in before else len(made - rest.tapes)
        self.slower = max(_SLOWER, slower)
        self.writes = self._elsewhere.moved(action)[2]
        self._elsewhere.abandon(sweep)
        self._elsewhere.hold(sweep, rest.saved, rest.tapes)
        return self._elsewhere.played(self._performed(rest.actions))

    def _slower(self, action: Put | Evict | Await, sweep: Sweep) -> float:
        """Return how many times slower than planned the tier is now, and the machine is not."""
        _, _, is_write = self._elsewhere.moved(action)
        rate = self._tier.write_bytes_per_s if is_write else self._tier.read_bytes_per_s
        busier = max(1.0, self._elsewhere.busier(self._forward_s[self._places[action]]))
        return max(1.0, self._elsewhere.seen_s(writes=is_write) * rate / busier)

    def _best(self, action: Put | Evict | Await, sweep: Sweep) -> Rest | None:
        """Return the fastest way to go on without the tier that is legal, None if none is."""
        stuck = self._elsewhere.stuck
        here = self._so_far(action)
        held = {step for step, kept in sweep.held.items() if kept is not None}
        here.leave(held & here.held.keys(), sweep.tapes.keys() & here.tapes.keys())
        assert here.memory is not None
        if self._rests is None:
            assert self.plan.memory_bytes is not None
            self._rests = Rests(self.plan.costs, self.plan.memory_bytes, inside=self._inside)
        room = sum(here.memory.bytes_of(item) for item in stuck)
        for rest in self._rests.fastest(Standing.of(here), room):
            tried = deepcopy(here, {id(here.memory.costs): here.memory.costs})
            try:
                tried.leave(rest.saved, rest.tapes, stuck)
                for each in self._performed(rest.actions):
                    tried.apply(each, None)
                tried.finish()
            except ScheduleError:
                continue
            assert tried.memory is not None
            self.peak_bytes = tried.memory.peak_bytes
            return rest
        return None

    def _so_far(self, action: Action) -> Rules:
        """Return the legality machine before an action, as if no transfer had failed."""
        rules = self._make_rules()
        for each in self._performed(self.plan.actions):
            if each == action:
                break
            rules.apply(each, rules.usual_answer(each))
        return rules


def _forward_s(plan: ChainPlan, action: Action) -> float:
    """Return the seconds that an action runs stages forward."""
    stages = plan.costs.stages
    if isinstance(action, Advance):
        return sum(stage.forward_s for stage in stages[action.start : action.stop])
    if isinstance(action, Tape) and action.step < len(stages):
        return stages[action.step].forward_s
    return 0.0


def _ends(plan: ChainPlan, slower: float) -> list[float]:
    """Return when each action of a plan ends, on a tier so many times slower."""
    assert plan.tier is not None
    ends: list[float] = []

    def timed(action: Action, answer: object, now: float) -> None:
        planned = plan.actions[len(ends)]
        if not isinstance(action, Advance) or action.stop == getattr(planned, "stop", None):
            ends.append(now)

    tiers = (plan.tier.slower(min(slower, 1e6)),)
    simulate(plan.actions, None, plan.costs, tiers=tiers, checked=False, timed=timed)
    return ends
