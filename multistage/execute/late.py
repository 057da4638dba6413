"""What a sweep does about a tier that is late: it waits a little, then goes on without it.

What is elsewhere may be lost at any time, and what does not arrive in time is lost.  A
sweep waits for transfers in `Await`, `Evict` and `Put`.  Before it does, `Late` asks whether
to go on without the tiers is faster than to go on waiting, by the rates seen; it may wait
a bounded time to find that out, a share of what going on without them takes.  If so, all
transfers are cancelled, all that is in the tiers is given up, and the rest of the sweep is
a schedule of fast memory alone, from what is held there: see `planners.single.rest` and
`planners.chain.rest`.

A sweep whose offers are refused does not wait, and would keep nothing of what it passes: it
goes on without the tiers as well once a write has been in flight for that share.

So a tier costs at most that share, and what was computed for it in vain.  A write that does
not stop when it is cancelled takes its room to the end.  A store that cannot tell whether a
transfer has ended, as one on which ranks agree, is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..actions import Action, Advance, EndForward, Offer, Put, Tape
from ..errors import ScheduleError, StoreError
from ..model.tier import Tier
from ..planners import Plan
from ..planners.chain.rest import Rest as ChainRest
from ..planners.chain.rest import Rests
from ..planners.single.rest import Rest
from ..schedule.rules import Rules
from ..schedule.simulation import simulate
from .sweep import Elsewhere, Moved, Sweep, Wait
from .transfers import Transfers

RestT = TypeVar("RestT")

# Of what going on without the tiers takes: a wait that is worth a question, the longest for
# one transfer whose end is not in sight, and all that the forward sweep waits.
_WORTH, _LONGEST, _FORWARD = 0.01, 0.07, 0.15
_PATIENCE = 0.02  # the longest that writes may take to stop, if the rest has room beside them
_LEAST_S = 1e-3  # of one wait between two questions
_STUCK_S = 120.0  # the longest that writes may take to stop, if there is no room beside them
# Of the time with waiting, the most that going on without the tiers may take; and that leaving
# a plan before it waits may take.
_GAIN, _EARLY_GAIN = 0.97, 0.95
_EARLY = 0.02  # of the makespan, what waiting must cost to leave a plan before it waits
_SLOWER = 1.2  # a tier that is late takes so many times as long as planned, at least
# What a question takes at first: a table of RR-9302 for so many stages, and some choices.
_PER_STAGE_S, _PER_PAIR_S = 3e-4, 5e-6


class Late:
    """Decides for one sweep after the other whether to wait.

    Parameters
    ----------
    course : EqualSteps or Stages

    Attributes
    ----------
    why : str
        What a report says of the last sweep, if it went on without its tiers; else empty.
    """

    def __init__(self, course: EqualSteps | Stages) -> None:
        self.course = course
        self.why = ""

    def begin(self, elsewhere: Elsewhere) -> None:
        """Prepare for a sweep."""
        self.why, self._elsewhere = "", elsewhere
        self._waited_s = self._asked_s = 0.0  # in all, and until the last question
        self._without_s = 0.0  # when an offer was refused last
        self.course.begin(elsewhere)

    def __call__(self, sweep: Sweep, action: Wait | Offer) -> Iterable[Action] | None:
        """Wait for what an action waits for; an `Offer`, which was refused, does not wait.

        Returns
        -------
        iterable of actions or None
            What to do in place of the action and all after it; None to go on.
        """
        if isinstance(action, Offer):
            return self._refused(sweep, action)
        done, course = self._elsewhere.awaited(sweep, action), self.course
        if done is None or done(0.0):
            if isinstance(action, Put) and course.is_early(action, sweep):
                return self._left(sweep, action, sweep.clock())
            return None
        sweep.flush()
        began, clock = sweep.clock(), sweep.clock
        planned_s, without_s = course.planned_s(self._elsewhere.moved(action)), -1.0
        wait_s = _LEAST_S
        while not done(wait_s):
            late_s = clock() - began - planned_s
            unasked_s = self._waited_s + late_s - self._asked_s  # short waits add up
            if unasked_s < course.ask_s:
                continue
            if without_s < 0:
                without_s = course.without_s(action, sweep)
            if without_s == math.inf:
                break  # the action waits: nothing else can be done
            wait_s = max(_LEAST_S, _WORTH * without_s)
            if unasked_s < wait_s:
                continue
            if self._is_worth(sweep, action, late_s, without_s):
                return self._left(sweep, action, began)
            self._asked_s = self._waited_s + late_s
        self._waited_s += max(0.0, clock() - began - planned_s)
        sweep.stalled(began)
        return None

    def slowed(self, tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
        """Return tiers, that which was left no faster than what was waited for."""
        tier, name = self._moved.tier, "write_s" if self._moved.is_write else "read_s"
        slower = replace(tiers[tier], **{name: max(getattr(tiers[tier], name), self._took_s)})
        return (*tiers[:tier], slower, *tiers[tier + 1 :])

    def _refused(self, sweep: Sweep, action: Offer) -> Iterable[Action] | None:
        """Return what is left to do without the tiers, if writes have been late for long.

        A forward sweep that never waits would keep nothing of what it passes.
        """
        behind_s = self._elsewhere.behind_s()
        if behind_s <= _LONGEST * self._without_s:
            return None
        self._without_s = self.course.without_s(action, sweep)
        late_s = behind_s - self.course.planned_s(self._elsewhere.moved(action))
        if late_s <= _LONGEST * self._without_s:
            return None
        actions = self._left(sweep, action, sweep.clock())
        if actions is None:
            self._without_s = math.inf  # never ask again
        return actions

    def _is_worth(self, sweep: Sweep, action: Wait, late_s: float, without_s: float) -> bool:
        """Whether to go on without the tiers is faster."""
        if late_s > _LONGEST * without_s:
            return True
        if sweep.is_forward and self._waited_s + late_s > _FORWARD * without_s:
            return True
        return without_s < _GAIN * self.course.waiting_s(action, sweep)

    def _left(self, sweep: Sweep, action: Wait | Offer, since: float) -> Iterable[Action] | None:
        """Return what is left to do without the tiers, None to wait: then that cannot be."""
        moved, waited_s = self._elsewhere.moved(action), sweep.clock() - since
        took_s = max(waited_s, self._elsewhere.behind_s() if moved.is_write else 0.0)
        waited = f", after {waited_s:.3g} s of waiting for it," if waited_s >= _LEAST_S else ""
        told = (
            f"tier {moved.name!r} was late: from the {moved} on{waited} the sweep went on without "
            "the tier, and more was computed again"
        )
        actions = self.course.leave(action, sweep)
        if actions is not None:
            self.why = sweep.counts.late = told
            self._moved, self._took_s = moved, took_s
        sweep.stalled(since)
        return actions


class EqualSteps:
    """The rest of a sweep of equal steps: Revolve in the slots left.

    Parameters
    ----------
    n_steps : int or None
        None if that shows only at the end: then a forward sweep waits.
    slots : int
        Of the budget.
    tiers : tuple of Tier
        What transfers take by the plan.
    state_is_tape : bool
    """

    def __init__(
        self, n_steps: int | None, slots: int, tiers: tuple[Tier, ...], state_is_tape: bool
    ) -> None:
        self._n_steps, self._slots, self._tiers = n_steps, slots, tiers
        self._state_is_tape = state_is_tape
        self.ask_s = 0.0

    def begin(self, elsewhere: Elsewhere) -> None:
        """Prepare for a sweep."""
        assert isinstance(elsewhere, Transfers)
        self._transfers = elsewhere

    def planned_s(self, moved: Moved) -> float:
        """Return the seconds of one transfer as planned."""
        tier = self._tiers[moved.tier]
        return tier.write_s if moved.is_write else tier.read_s

    def without_s(self, action: Wait | Offer, sweep: Sweep) -> float:
        """Return the seconds that the rest takes in fast memory alone."""
        rest, counts = self._rest(sweep), sweep.counts
        step_s = counts.forward_s / max(1, counts.forward_steps)
        back_s = counts.reverse_s / max(1, counts.reverse_steps)
        left = rest.n_steps if rest.end is None else rest.end
        return rest.forward_steps() * step_s + left * (back_s or 2 * step_s)

    def waiting_s(self, action: Wait, sweep: Sweep) -> float:
        """Return the seconds that it takes to read all that is stored, in the reverse sweep."""
        return 0.0 if sweep.is_forward else self._transfers.reading_s(sweep)

    def is_early(self, action: Put, sweep: Sweep) -> bool:
        """Answer False: Revolve gains nothing by states that are given up before a wait."""
        return False

    def leave(self, action: Wait | Offer, sweep: Sweep) -> Iterable[Action] | None:
        """Give up what is in the tiers; return Revolve from what is held."""
        if (self._n_steps is None and sweep.is_forward) or not self._rest(sweep).fits:
            return None
        sweep.flush()
        wait_s = max(_LEAST_S, _PATIENCE * self.without_s(action, sweep))
        rest = _beside_stuck(self._transfers, sweep, wait_s, partial(self._fitting, sweep))
        self._transfers.abandon(sweep)
        return rest.schedule()

    def _fitting(self, sweep: Sweep) -> Rest | None:
        rest = self._rest(sweep)
        return rest if rest.fits else None

    def _rest(self, sweep: Sweep) -> Rest:
        n_steps = self._n_steps or (max(1, sweep.at) if sweep.is_forward else sweep.end)
        held = sorted(step for step, kept in sweep.held.items() if kept is not None)
        return Rest(
            n_steps,
            self._slots - len(self._transfers.stuck()),
            at=sweep.at,
            end=None if sweep.is_forward else sweep.end,
            held=held,
            tapes=sorted(sweep.tapes),
            tape_slots=sweep.tape_slots,
            state_is_tape=self._state_is_tape,
        )


class Stages:
    """The rest of the sweeps by a plan.

    Parameters
    ----------
    plan : Plan
        With a tier and a limit.
    inside : bool
        Whether a state can be taken out of a tape that includes it.
    tapes : bool
        Whether tapes may be kept; False: only right before their adjoint.

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

    def __init__(self, plan: Plan, *, inside: bool, tapes: bool = True) -> None:
        assert plan.tier is not None and plan.memory_bytes is not None
        self.plan, self._tier = plan, plan.tier
        self._make_rests = partial(Rests, inside=inside, tapes=tapes)
        self._rests: Rests | None = None
        n = len(plan.stage_costs.stages)
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
        self._found: tuple[Action | None, ChainRest | None] = None, None
        self._asked = 1.0  # how slow the tier was when it was asked about last, at a put

    def planned_s(self, moved: Moved) -> float:
        """Return the seconds of one transfer as planned."""
        costs, step = self.plan.stage_costs, moved.step
        if moved.is_tape:
            nbytes = costs.stages[step].tape_bytes
        else:
            nbytes = costs.stages[step - 1].output_bytes if step else costs.input_bytes
        return self._tier.writing_s(nbytes) if moved.is_write else self._tier.reading_s(nbytes)

    def without_s(self, action: Wait | Offer, sweep: Sweep) -> float:
        """Return the seconds that the rest takes in fast memory alone."""
        if self._found[0] != action:
            self._found = action, self._best(action, sweep)
        rest = self._found[1]
        return math.inf if rest is None else rest.seconds

    def waiting_s(self, action: Wait, sweep: Sweep) -> float:
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
        slower = self._slower(action, sweep) if self._elsewhere.behind_s() else 1.0
        if slower < _SLOWER * self._asked:
            return False
        self._asked = slower
        planned = _ends(self.plan, 1.0)
        waiting_s = self.waiting_s(action, sweep)
        lost_s = waiting_s - planned[-1] + planned[self._places[action] - 1]
        if lost_s < max(self.ask_s, _EARLY * self.plan.makespan_s):
            return False
        return self.without_s(action, sweep) < _EARLY_GAIN * waiting_s

    def leave(self, action: Wait | Offer, sweep: Sweep) -> Iterable[Action] | None:
        """Give up what is in the tier; return RR-9302 in the memory left."""
        if self.without_s(action, sweep) == math.inf:
            return None
        elsewhere, slower, found = self._elsewhere, self._slower(action, sweep), self._found[1]
        wait_s = max(self.ask_s, _PATIENCE * self.without_s(action, sweep))

        def best() -> ChainRest | None:
            return self._best(action, sweep) if elsewhere.stuck() else found

        rest = _beside_stuck(elsewhere, sweep, wait_s, best)
        before = self.plan.actions[: self._places[action]]
        made = {each.step for each in before if isinstance(each, Tape)}
        self.given_up = 0 if EndForward() in before else len(made - rest.tapes)
        self.slower = max(_SLOWER, slower)
        self.writes = elsewhere.moved(action).is_write
        elsewhere.abandon(sweep)
        sweep.hold(rest.saved, rest.tapes)
        return rest.actions

    def _slower(self, action: Wait | Offer, sweep: Sweep) -> float:
        """Return how many times slower than planned the tier is now, and the machine is not."""
        writes = self._elsewhere.moved(action).is_write
        rate = self._tier.write_bytes_per_s if writes else self._tier.read_bytes_per_s
        planned_s, busier = self._forward_s[self._places[action]], 1.0
        if planned_s:
            busier = max(1.0, sweep.counts.forward_s / planned_s)
        return max(1.0, self._elsewhere.seen_s(writes=writes) * rate / busier)

    def _best(self, action: Wait | Offer, sweep: Sweep) -> ChainRest | None:
        """Return the fastest way to go on without the tier that is legal, None if none is."""
        stuck = self._elsewhere.stuck()
        here = self._so_far(action)
        held = {step for step, kept in sweep.held.items() if kept is not None}
        here.leave(held & here.held.keys(), sweep.tapes.keys() & here.tapes.keys())
        assert here.memory is not None
        if self._rests is None:
            assert self.plan.memory_bytes is not None
            self._rests = self._make_rests(self.plan.stage_costs, self.plan.memory_bytes)
        room = sum(here.memory.bytes_of(item) for item in stuck)
        for rest in self._rests.fastest(here, room):
            tried = deepcopy(here, {id(here.memory.costs): here.memory.costs})
            try:
                tried.leave(rest.saved, rest.tapes, stuck)
                for each in rest.actions:
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
        rules = Rules.in_bytes(self.plan.stage_costs, self.plan.memory_bytes)
        for each in self.plan.actions:
            if each == action:
                break
            rules.apply(each, rules.usual_answer(each))
        return rules


def _beside_stuck(
    elsewhere: Elsewhere, sweep: Sweep, wait_s: float, rest: Callable[[], RestT | None]
) -> RestT:
    """Cancel all transfers; return a rest that has room beside the writes that go on all the same.

    What was cancelled is not there to stay for: the sweep leaves once there is room.

    Raises
    ------
    StoreError
        If there is none, and the writes do not end.
    """
    began = sweep.clock()
    elsewhere.cancel(wait_s)
    while (found := rest()) is None:
        waited_s = sweep.clock() - began
        if waited_s > _STUCK_S:
            raise StoreError(
                f"{len(elsewhere.stuck())} writes were cancelled and have not ended for "
                f"{waited_s:.0f} s, and beside them there is no memory to go on without the tier; "
                "raise memory=, or use another tier"
            )
        elsewhere.cancel(wait_s)
    return found


def _forward_s(plan: Plan, action: Action) -> float:
    """Return the seconds that an action runs stages forward."""
    stages = plan.stage_costs.stages
    if isinstance(action, Advance):
        return sum(stage.forward_s for stage in stages[action.start : action.stop])
    if isinstance(action, Tape):
        return stages[action.step].forward_s
    return 0.0


def _ends(plan: Plan, slower: float) -> list[float]:
    """Return when each action of a plan ends, on a tier so many times slower."""
    assert plan.tier is not None
    ends: list[float] = []

    def timed(action: Action, answer: object, now: float) -> None:
        planned = plan.actions[len(ends)]
        if not isinstance(action, Advance) or action.stop == getattr(planned, "stop", None):
            ends.append(now)

    tiers = (plan.tier.slower(min(slower, 1e6)),)
    simulate(plan.actions, None, plan.stage_costs, tiers=tiers, checked=False, timed=timed)
    return ends
