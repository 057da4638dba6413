"""What a sweep does about a tier that is late: it waits a little, then goes on without it.

What is elsewhere may be lost at any time, and what does not arrive in time is lost.  A
sweep waits for transfers in `Await`, `Evict` and `Put`.  Before it does, `Late` asks whether
to go on without the tiers is faster than to go on waiting, by the rates seen; it may wait
a bounded time to find that out, a share of what going on without them takes.  If so, all
transfers are cancelled, all that is in the tiers is given up, and the rest of the sweep is
a schedule of fast memory alone, from what is held there: see `planners.single.rest` and
`planners.chain.rest`.

So a tier costs at most that share, and what was computed for it in vain.  A store that
cannot tell whether a transfer has ended, as one on which ranks agree, is waited for.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from ..actions import Await, Evict, Put, Schedule
from ..model.tier import Tier
from ..planners.single.rest import Rest
from .late_stages import Elsewhere, Stages
from .sweep import Sweep
from .transfers import Transfers

# Of what going on without the tiers takes: a wait that is worth a question, the longest for
# one transfer whose end is not in sight, and all that the forward sweep waits.
_WORTH, _LONGEST, _FORWARD = 0.01, 0.07, 0.15
_PATIENCE = 0.02  # the longest that writes may take to stop, if the rest has room beside them
_LEAST_S = 1e-3  # of one wait between two questions
_GAIN = 0.97  # of the time with waiting, the most that going on without the tiers may take


Wait: TypeAlias = Put | Evict | Await


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
        self.why, self._waits, self._waited_s = "", elsewhere, 0.0
        self.course.begin(elsewhere)

    def __call__(self, sweep: Sweep, action: Wait) -> Schedule | None:
        """Wait for what an action waits for.

        Returns
        -------
        generator of actions or None
            What to do in place of the action and all after it; None to perform it.
        """
        done = self._waits.awaited(sweep, action)
        if done is None or done(0.0):
            course = self.course
            if not isinstance(action, Put) or not isinstance(course, Stages):
                return None
            is_early = course.is_early(action, sweep)
            return self._left(sweep, action, sweep.clock()) if is_early else None
        sweep.flush()
        began, clock = sweep.clock(), sweep.clock
        planned_s, without_s = self.course.planned_s(action, sweep), -1.0
        wait_s = _LEAST_S
        while not done(wait_s):
            waited_s = clock() - began
            if waited_s < self.course.ask_s:
                continue
            if without_s < 0:
                without_s = self.course.without_s(action, sweep)
            if without_s == math.inf:
                break  # the action waits: nothing else can be done
            wait_s = max(_LEAST_S, _WORTH * without_s)
            late_s = waited_s - planned_s
            if late_s < _WORTH * without_s or not self._is_worth(sweep, action, late_s, without_s):
                continue
            return self._left(sweep, action, began)
        self._waited_s += max(0.0, clock() - began - planned_s)
        self._waits.stalled(began)
        return None

    def _is_worth(self, sweep: Sweep, action: Wait, late_s: float, without_s: float) -> bool:
        """Whether to go on without the tiers is faster."""
        if late_s > _LONGEST * without_s:
            return True
        if sweep.is_forward and self._waited_s + late_s > _FORWARD * without_s:
            return True
        return without_s < _GAIN * self.course.waiting_s(action, sweep)

    def _left(self, sweep: Sweep, action: Wait, since: float) -> Schedule | None:
        """Return what is left to do without the tiers, None to wait: then that cannot be."""
        what, where = self._waits.said(action)
        waited_s = sweep.clock() - since
        waited = f", after {waited_s:.3g} s of waiting for it," if waited_s >= _LEAST_S else ""
        told = (
            f"tier {where!r} was late: from {what} on{waited} the sweep went on without the tier, "
            "and more was computed again"
        )
        schedule = self.course.leave(action, sweep)
        self.why = "" if schedule is None else told
        self._waits.stalled(since, self.why)
        return schedule


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

    def begin(self, transfers: Elsewhere) -> None:
        """Prepare for a sweep."""
        assert isinstance(transfers, Transfers)
        self._transfers = transfers

    def planned_s(self, action: Wait, sweep: Sweep) -> float:
        """Return the seconds of one transfer as planned."""
        tier, is_write = self._transfers.tier_of(action)
        costs = self._tiers[tier]
        return costs.write_s if is_write else costs.read_s

    def without_s(self, action: Wait, sweep: Sweep) -> float:
        """Return the seconds that the rest takes in fast memory alone."""
        n = self._n_steps
        if n is None and sweep.is_forward:
            n = max(1, sweep.at)
        rest = self._rest(sweep, n or sweep.end)
        step_s, back_s = self._transfers.step_s()
        left = rest.n_steps if rest.end is None else rest.end
        return rest.forward_steps() * step_s + left * (back_s or 2 * step_s)

    def waiting_s(self, action: Wait, sweep: Sweep) -> float:
        """Return the seconds that it takes to read all that is stored, in the reverse sweep."""
        if sweep.is_forward:
            return 0.0
        read_s, count = self._transfers.to_read(sweep)
        return read_s * count

    def leave(self, action: Wait, sweep: Sweep) -> Schedule | None:
        """Give up what is in the tiers; return Revolve from what is held."""
        n = self._n_steps
        if n is None and sweep.is_forward:
            return None
        if not self._rest(sweep, n or sweep.end).fits:
            return None
        sweep.flush()
        wait_s = max(_LEAST_S, _PATIENCE * self.without_s(action, sweep))
        stuck = self._transfers.cancel(wait_s)
        # What was cancelled is not there to stay for: the sweep leaves once there is room.
        while not self._rest(sweep, n or sweep.end, stuck).fits:
            stuck = self._transfers.cancel(wait_s)
        self._transfers.abandon(sweep)
        return self._rest(sweep, n or sweep.end, stuck).schedule()

    def _rest(self, sweep: Sweep, n_steps: int, stuck: int = 0) -> Rest:
        held = sorted(step for step, kept in sweep.held.items() if kept is not None)
        return Rest(
            n_steps,
            self._slots - stuck,
            at=sweep.at,
            end=None if sweep.is_forward else sweep.end,
            held=held,
            tapes=sorted(sweep.tapes),
            tape_slots=sweep.tape_slots,
            state_is_tape=self._state_is_tape,
        )
