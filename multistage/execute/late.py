"""How a sweep of unequal steps leaves its plan, where writes to the tier are late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..actions import Action, EndForward, Evict, Put, Schedule
from ..backends.paged import PagedStore
from ..errors import ScheduleError
from ..model.tier import Tier
from ..planners.chain.heterogeneous import ChainPlan
from ..planners.chain.joint_rule import Detour
from ..planners.chain.performing import begun, diverted
from ..schedule.rules import Rules
from .detour import Deadlines
from .ledger import Ledger
from .sweep import Sweep
from .transfers import Transfers

_NAP_S, _LONG_S = 1e-3, 1.0


class PagedWrites:
    """The writes of one sweep to a store of things of any size, for `Deadlines`.

    Parameters
    ----------
    store : PagedStore
    transfers : Transfers
    ledger : Ledger
    """

    def __init__(self, store: PagedStore, transfers: Transfers, ledger: Ledger) -> None:
        self._store, self._transfers, self._ledger = store, transfers, ledger
        self._put_s: dict[int, float] = {}

    def put(self, step: int) -> None:
        """Note when a state is put."""
        self._put_s[step] = self._ledger.clock()

    def written(self, step: int, tape: bool, timeout_s: float) -> bool:
        """Wait for the write of a state, no longer than so many seconds."""
        before = self._ledger.clock()
        done = self._store.ended(step, timeout_s)
        self._ledger.stalled(before)
        return done

    def has_room(self, lengths: Sequence[int], timeout_s: float) -> bool:
        """Wait until arrays of so many bytes can be put at once, no longer than some seconds."""
        if not self._store.waits_for(lengths):
            return True
        oldest = self._oldest()
        if oldest is not None:
            self.written(oldest, False, timeout_s)
        elif timeout_s:
            time.sleep(_NAP_S)  # for a write of several small states, which no key tells of
        return not self._store.waits_for(lengths)

    def _oldest(self) -> int | None:
        """Return the first state whose write has not ended."""
        steps = self._transfers.writing()
        return next((step for step in steps if not self._store.ended(step, 0.0)), None)

    def slower(self, tier: Tier) -> float:
        """Return the seconds that pages took over those planned, at least 1.

        The one in flight counts from when it was put, or the one before it ended, but not
        as faster than planned.
        """
        took_s, planned_s = self._took(tier)
        return max(1.0, took_s / planned_s) if planned_s else 1.0

    def seen_s(self) -> float:
        """Return the seconds that writes have taken so far."""
        return self._took(None)[0]

    def _took(self, tier: Tier | None) -> tuple[float, float]:
        """Return the seconds of writing so far, and those that a tier would have taken."""
        ledger = self._ledger
        ledger.drain()
        timeline = ledger.timeline
        took_s, moved = timeline.totals_s["write"], timeline.bytes["write"]
        planned_s = tier.writing_s(moved) if moved and tier else 0.0
        oldest = self._oldest()
        if oldest is not None or self._store.waits():
            expected_s = tier.writing_s(self._store.page_bytes) if tier else 0.0
            put_s = self._put_s.get(-1 if oldest is None else oldest, ledger.begin_s)
            took_s += max(expected_s, ledger.clock() - max(put_s, ledger.wrote_s))
            planned_s += expected_s
        return took_s, planned_s

    def computed_s(self) -> float:
        """Return the seconds since the sweep began that were no waiting."""
        return self._ledger.clock() - self._ledger.begin_s - self._ledger.counts.stall_s

    def cancel(self, timeout_s: float) -> bool:
        """Cancel all writes; return whether the page in flight has ended within a time."""
        ledger, steps = self._ledger, self._transfers.writing()
        for step in reversed(steps):
            self._store.cancel(step)
        before = ledger.clock()
        ends_s = before + timeout_s
        ended = all(self._store.ended(step, max(0.0, ends_s - ledger.clock())) for step in steps)
        # A store may not be able to tell what has ended: then this waits.
        for step in steps if ended else ():
            self._store.wait_written(step)
        ledger.stalled(before)
        return ended

    def under_way_bytes(self) -> int:
        """Return the bytes of the page in flight, 0 if there is none."""
        return 0 if self._oldest() is None else self._store.page_bytes

    def resume(self) -> bool:
        """Answer False once all writes have ended: what was given up is not queued again."""
        for step in self._transfers.writing():
            while not self.written(step, False, _LONG_S):
                pass
        return False


class TakenWhenLate:
    """Takes a detour from a plan if one is faster than to wait for writes.

    Parameters
    ----------
    plan : ChainPlan
        With a tier and a limit; its schedule is performed as `performed` has it.
    store : PagedStore
        The tier.
    rules : callable
        Makes the legality machine of the plan's schedule.
    deadlines : callable
        Makes what decides; for tests.

    Attributes
    ----------
    detour : Detour or None
        The one taken in the last sweep.
    slower : float
        How many times slower than planned the tier was then.
    left_at : int
        The state that was live then.
    peak_bytes : int
        The most memory of a sweep that took it.
    """

    def __init__(
        self,
        plan: ChainPlan,
        store: PagedStore,
        rules: Callable[[], Rules],
        deadlines: Callable[..., Deadlines] = Deadlines,
    ) -> None:
        self.plan, self._store, self._make_rules = plan, store, rules
        self._deadlines = deadlines(plan, accepts=self._accepts)
        turn = plan.actions.index(EndForward())
        self._places: dict[Action, int] = {}
        for at, action in enumerate(plan.actions[: turn + 1]):
            self._places.setdefault(action, at)
        self._n_steps = len(plan.costs.stages)

    def begin(self, transfers: Transfers, ledger: Ledger) -> None:
        """Prepare for a forward sweep."""
        self._deadlines.begin()
        self.detour: Detour | None = None
        self.slower, self.left_at, self.peak_bytes = 1.0, -1, 0
        self._transfers = transfers
        self._writes = PagedWrites(self._store, transfers, ledger)

    def told(self) -> str:
        """Return what a report says of the detour."""
        return (
            f"the tier's writes took {self.slower:.3g} times as long as planned: from state "
            f"{self.left_at} on nothing was written, and more was computed again"
        )

    def __call__(
        self, sweep: Sweep, action: Put | Evict | EndForward
    ) -> tuple[Schedule, Rules] | None:
        """Return what to perform in place of an action and the rest of the plan, None if nothing.

        The tapes that it discards are given up.  With it comes the machine that has judged
        what was performed so far.
        """
        if self.detour is not None:
            return None
        self._at = at = self._places[action]
        if isinstance(action, EndForward):
            detour = self._deadlines.at_turn(self._writes)
        elif isinstance(action, Evict):
            detour = self._deadlines.at_eviction(at, action.step, False, self._writes)
        else:
            detour = self._at_put(sweep, action)
        if detour is None:
            return None
        rules = self._so_far(at)
        actions = self._performed(at, detour, rules.live)
        assert actions is not None
        rules.divert((), detour.discard)
        self.detour, self.slower, self.left_at = detour, self._deadlines.slower, sweep.at
        self.peak_bytes = self._peak_with(at, detour) or 0
        for step in detour.discard:
            tape = sweep.tapes.pop(step)
            if sweep.tapes:
                sweep.used -= sweep.tape_slots
            sweep.release(tape)
        return _playing(actions), rules

    def _at_put(self, sweep: Sweep, action: Put) -> Detour | None:
        kept = sweep.held.get(action.step)
        if kept is None:
            return None
        arrays: Sequence[Any] = kept.arrays  # of NumPy or of torch
        room = partial(self._writes.has_room, [array.nbytes for array in arrays])
        detour = self._deadlines.at_wait(self._at, room, self._writes)
        if detour is None:
            detour = self._deadlines.at_put(self._at, self._writes)
        self._writes.put(action.step)
        return detour

    def _performed(self, at: int, detour: Detour, live: int | None) -> list[Action] | None:
        assert live is not None  # in a forward sweep there is always one
        _, beside = begun(self.plan.actions, at, self._n_steps)
        return diverted(self.plan.actions[:at], detour, self._n_steps, beside, live)

    def _so_far(self, at: int) -> Rules:
        """Return the legality machine after what is performed before an action of the plan."""
        rules, stored = self._make_rules(), self._transfers.stored[0]
        for action in begun(self.plan.actions, at, self._n_steps)[0]:
            answer = rules.usual_answer(action)
            if isinstance(action, Evict) and self._places[action] < self._at:
                answer = action.step in stored
            rules.apply(action, answer)
        return rules

    def _accepts(self, at: int, detour: Detour, memory_bytes: int) -> bool:
        """Whether the executor can take a detour there within a limit."""
        return self._peak_with(at, detour, memory_bytes) is not None

    def _peak_with(self, at: int, detour: Detour, memory_bytes: int | None = None) -> int | None:
        """Return the most memory of a sweep that takes a detour there, None if it cannot."""
        rules = self._so_far(at)
        actions = self._performed(at, detour, rules.live)
        if actions is None:
            return None
        assert rules.memory is not None
        rules.memory.limit_bytes = memory_bytes
        try:
            rules.divert((), detour.discard)
            for action in actions:
                rules.apply(action, rules.usual_answer(action))
            rules.finish()
        except ScheduleError:
            return None
        return rules.memory.peak_bytes


def _playing(actions: list[Action]) -> Schedule:
    for action in actions:
        _ = yield action  # answers are not looked at
