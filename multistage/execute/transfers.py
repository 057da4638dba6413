"""What actions do with the stores of an executor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from ..actions import Action, Answer, Await, Drop, Evict, Get, Offer, Put, Schedule
from ..backends.base import CheckpointLost, Store
from ..errors import CheckpointWarning
from ..states.slots import Kept, StateLayout
from ..support.interrupts import Shield
from ..support.step_sets import StepSet
from .accounts import illegal
from .ledger import Ledger
from .recovery import nearest
from .sweep import Sweep

State = TypeVar("State")
ArrayT = TypeVar("ArrayT")
PackingT = TypeVar("PackingT")
_NAP_S, _PATIENCE_S = 1e-3, 5.0
TransferT = TypeVar("TransferT")


@dataclass(slots=True, eq=False)
class _Pending:
    step: int
    tier: int
    is_write: bool
    staged: Kept | None = None  # keeps the arrays of a state that no slot holds
    took: bool = False  # whether a staging slot is counted for it
    failed: bool = False


class Transfers:
    """What one sweep has in its stores, and on the way.

    Parameters
    ----------
    stores : sequence of Store
        Opened; addressed by the actions' tier index.
    layout : StateLayout
    ledger : Ledger
    advance : callable
        `advance(state, start, stop)`, to compute what is lost again.

    Attributes
    ----------
    shield : Shield
        Under which a transfer is queued: Ctrl-C waits, since a transfer half queued
        would be waited for in vain.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        layout: StateLayout[State, ArrayT, PackingT],
        ledger: Ledger,
        advance: Callable[[State, int, int], State],
    ) -> None:
        self.shield = Shield()
        self.stored = [StepSet() for _ in stores]
        self._stores, self._ledger = tuple(stores), ledger
        self._layout: StateLayout[Any, Any, Any] = layout
        self._advance: Callable[[Any, int, int], Any] = advance
        self._tokens: dict[int, _Pending] = {}
        self._next_token = 0
        self._packings: dict[tuple[int, int], Any] = {}
        self._stuck: list[_Pending] = []  # writes that were cancelled, and have not ended

    # ----------------------------------------------------------------- actions

    def write(self, sweep: Sweep, action: Offer | Put) -> Answer:
        """Queue a write of a live or held state."""
        self._require(action)
        return self._shielded(self._write, sweep, action)

    def read(self, sweep: Sweep, action: Get) -> Answer:
        """Queue a read into a slot."""
        self._require(action)
        return self._shielded(self._read, sweep, action)

    def drop(self, sweep: Sweep, action: Drop) -> Answer:
        """Free a store's copy."""
        self._require(action)
        return self._shielded(self._drop, sweep, action)

    def wait(self, sweep: Sweep, action: Await) -> Answer:
        """Wait for a transfer; whether it succeeded."""
        if action.token not in self._tokens:
            raise illegal(action, "no such transfer is in flight")
        return self._settled(sweep, self._tokens.pop(action.token))

    def evict(self, sweep: Sweep, action: Evict) -> Answer:
        """Wait for the write of a held checkpoint, then give its slot back."""
        self._require(action)
        step = action.step
        token = next((t for t, each in self._tokens.items() if _is_write_of(each, action)), None)
        if token is None or sweep.held.get(step) is None:
            raise illegal(action, "no slot holds it, or no write of it is in flight")
        written = self._settled(sweep, self._tokens.pop(token))
        kept = sweep.held.pop(step)
        assert kept is not None
        sweep.release(kept)
        sweep.used -= 1
        return written

    # -------------------------------------------------------------- what is late

    def awaited(self, sweep: Sweep, action: Put | Evict | Await) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait.

        It answers whether that is so.  None if the action does not wait.
        """
        if isinstance(action, Put):
            return self._room(sweep, action)
        transfer = self._transfer(action)
        if transfer is None or transfer.failed:
            return None
        store = self._stores[transfer.tier]
        return partial(store.ended if transfer.is_write else store.arrived, transfer.step)

    def _room(self, sweep: Sweep, action: Put) -> Callable[[float], bool] | None:
        """Return what waits until a state can be put."""
        store, kept = self._stores[action.tier], sweep.held.get(action.step)
        arrays: Sequence[Any] = () if kept is None else kept.arrays  # of NumPy or of torch
        waits = partial(store.waits, [array.nbytes for array in arrays])
        if not waits():
            return None

        def has_room(timeout_s: float) -> bool:
            writes = [t for t in self._tokens.values() if t.is_write and t.tier == action.tier]
            oldest = next((t.step for t in writes if not store.ended(t.step, 0.0)), None)
            if oldest is not None:
                store.ended(oldest, timeout_s)
            elif timeout_s:
                time.sleep(min(timeout_s, _NAP_S))  # for small states, which no key tells of
            return not waits()

        return has_room

    def _transfer(self, action: Evict | Await) -> _Pending | None:
        if isinstance(action, Await):
            return self._tokens.get(action.token)
        return next((each for each in self._tokens.values() if _is_write_of(each, action)), None)

    def tier_of(self, action: Put | Evict | Await) -> tuple[int, bool]:
        """Return the tier that an action waits for, and whether for a write."""
        if isinstance(action, Put | Evict):
            return action.tier, True
        transfer = self._tokens[action.token]
        return transfer.tier, transfer.is_write

    def said(self, action: Put | Evict | Await) -> tuple[str, str]:
        """Return what an action waits for, and the name of its tier."""
        tier, is_write = self.tier_of(action)
        step = self._tokens[action.token].step if isinstance(action, Await) else action.step
        return f"the {'write' if is_write else 'read'} of state {step}", self._stores[tier].name

    def moved(self, action: Put | Evict | Await) -> tuple[int, bool, bool]:
        """Return what an action waits for: the step, whether a tape, whether a write."""
        step = self._tokens[action.token].step if isinstance(action, Await) else action.step
        return step, False, self.tier_of(action)[1]

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown."""
        self._ledger.drain()
        return self._ledger.seen_s["write" if writes else "read"]

    def is_behind(self) -> bool:
        """Whether a write has not ended, as far as its store can tell."""
        writes = (each for each in self._tokens.values() if each.is_write and not each.failed)
        return any(not self._stores[each.tier].ended(each.step, 0.0) for each in writes)

    def played(self, actions: Iterable[Action]) -> Schedule:
        """Return actions as a schedule."""
        yield from actions  # answers are not looked at

    def busier(self, planned_s: float) -> float:
        """Return how much longer than planned the forward steps have taken that took so long."""
        return self._ledger.counts.forward_s / planned_s if planned_s else 1.0

    def step_s(self) -> tuple[float, float]:
        """Return the seconds of a forward and of a reverse step so far."""
        counts = self._ledger.counts
        return (
            counts.forward_s / max(1, counts.forward_steps),
            counts.reverse_s / max(1, counts.reverse_steps),
        )

    def to_read(self, sweep: Sweep) -> tuple[float, int]:
        """Return the seconds that the read of a state takes now, and how many are to be read."""
        reads = sum(not each.is_write for each in self._tokens.values())
        stored = {step for steps in self.stored for step in steps.descending(sweep.end)}
        return (
            self.seen_s(writes=False) * self._layout.nbytes,
            reads + len(stored - sweep.held.keys()),
        )

    def stalled(self, since: float, late: str = "") -> None:
        """Enter what computing has waited since then, and why the tiers were left, if they were."""
        self._ledger.stalled(since)
        self._ledger.counts.late = late

    def cancel(self, timeout_s: float) -> int:
        """Cancel all writes; return how many have not ended within some seconds.

        Their arrays may be read until they have: they take their room until then.
        """
        clock, writes = self._ledger.clock, []
        for each in self._tokens.values():
            if each.is_write and not each.failed:
                writes.append(each)
                self._stores[each.tier].cancel(each.step)
        ends_s = clock() + timeout_s
        self._stuck = [
            each
            for each in writes
            if not self._stores[each.tier].ended(each.step, max(0.0, ends_s - clock()))
        ]
        return len(self._stuck)

    @property
    def stuck(self) -> list[int]:
        """States whose writes had not ended when they were cancelled."""
        return [each.step for each in self._stuck]

    def hold(self, sweep: Sweep, saved: frozenset[int], tapes: frozenset[int]) -> None:
        """Hold these states and tapes, which are held, and nothing else."""
        for step in sweep.held.keys() - saved:
            kept = sweep.held.pop(step)
            if kept is not None:
                sweep.release(kept)
            sweep.used -= 1
        for step in sweep.tapes.keys() - tapes:
            sweep.release(sweep.tapes.pop(step))
            if sweep.tapes:
                sweep.used -= sweep.tape_slots

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is in the tiers or on its way, once writes were cancelled."""
        for transfer in self._tokens.values():
            stuck = transfer in self._stuck
            if transfer.is_write:
                if not transfer.failed and not stuck:
                    self._stores[transfer.tier].wait_written(transfer.step)
                if transfer.staged is not None and not stuck:
                    sweep.release(transfer.staged)
                sweep.used -= transfer.took
            else:
                del sweep.held[transfer.step]
                sweep.used -= 1
        self._tokens.clear()
        self._packings.clear()
        sweep.lost.clear()
        for tier, steps in enumerate(self.stored):
            for step in steps:
                self._stores[tier].drop(step)
            self.stored[tier] = StepSet()

    # -------------------------------------------------------------- in this sweep

    def _require(self, action: Offer | Put | Get | Drop | Evict) -> None:
        if action.tier >= len(self._stores):
            raise illegal(action, f"there are {len(self._stores)} tiers")
        if action.tape:
            raise illegal(action, "tapes stay in fast memory here")

    def _shielded(
        self, perform: Callable[[Sweep, TransferT], Answer], sweep: Sweep, on: TransferT
    ) -> Answer:
        shield = self.shield
        shield.up = True
        try:
            return perform(sweep, on)
        finally:
            shield.up = False
            shield.let_go()

    def _write(self, sweep: Sweep, action: Offer | Put) -> Answer:
        ledger, counts = self._ledger, self._ledger.counts
        step, tier, store = action.step, action.tier, self._stores[action.tier]
        kept, staged = sweep.held.get(step), None
        if kept is None:
            if step != sweep.at:
                raise illegal(action, f"state {step} is neither held nor live")
            kept = staged = sweep.keep(sweep.live, step)
        flat, packing = self._layout.pack(kept.arrays)
        is_put = isinstance(action, Put)
        before = ledger.clock()
        accepted = store.put(step, flat, block=is_put)
        if is_put:
            ledger.stalled(before)
        if not accepted:
            if staged is not None:
                sweep.release(staged)
            counts.refused += 1
            if not is_put:
                return None
            _warn(f"tier {store.name!r} has no room for checkpoint {step}")
            if staged is not None:
                sweep.used += 1  # as the schedule believes, until its Await
            took = staged is not None
            return self._token(_Pending(step, tier, is_write=True, failed=True, took=took))
        counts.writes += 1
        self.stored[tier].add(step)
        if packing is not None:
            self._packings[step, tier] = packing
        if staged is not None:
            self._take(sweep)
        took = staged is not None
        return self._token(_Pending(step, tier, is_write=True, staged=staged, took=took))

    def _read(self, sweep: Sweep, action: Get) -> Answer:
        self._stores[action.tier].prefetch(action.step)
        sweep.held[action.step] = None
        self._take(sweep)
        self._ledger.counts.reads += 1
        return self._token(_Pending(action.step, action.tier, is_write=False))

    def _drop(self, sweep: Sweep, action: Drop) -> Answer:
        self._forget(action.step, action.tier)
        return None

    def _take(self, sweep: Sweep) -> None:
        """Count one slot more."""
        sweep.used += 1
        counts = self._ledger.counts
        counts.peak_slots = max(counts.peak_slots, sweep.used)

    def _token(self, transfer: _Pending) -> int:
        token, self._next_token = self._next_token, self._next_token + 1
        self._tokens[token] = transfer
        return token

    def _settled(self, sweep: Sweep, transfer: _Pending) -> bool:
        """Wait until a transfer is done; whether it succeeded."""
        step, tier, store = transfer.step, transfer.tier, self._stores[transfer.tier]
        before = self._ledger.clock()
        if transfer.is_write:
            written = not transfer.failed and store.wait_written(step)
            self._ledger.stalled(before)
            if transfer.staged is not None:
                sweep.release(transfer.staged)
            if transfer.took:
                sweep.used -= 1
            if not written and not transfer.failed:
                self._lose(step, tier, "could not be written")
            return written
        arrays = self.fetched(step, tier)
        self._ledger.stalled(before)
        if arrays is None:
            del sweep.held[step]
            sweep.lost.add(step)
            sweep.used -= 1
            return False
        sweep.held[step] = sweep.slots.adopt(arrays, step)
        return True

    # -------------------------------------------------------------- what is lost

    def fetched(self, step: int, tier: int) -> list[object] | None:
        """Return the arrays of a checkpoint, or None if it is lost."""
        try:
            arrays = self._stores[tier].get(step)
        except CheckpointLost as error:
            self._lose(step, tier, str(error))
            return None
        return self._layout.unpack(arrays, self._packings.get((step, tier)))

    def find(self, sweep: Sweep, step: int) -> Kept:
        """Return state `step`, which no slot holds: state 0, or a lost checkpoint made again."""
        if step == 0:
            return sweep.origin  # never put into a slot: a Free would give it away
        start, kept = nearest(sweep, step, self.stored, self.fetched)
        if start < step:
            live = self._advance(sweep.slots.load(kept, sweep.live), start, step)
            self._ledger.counts.recovered_steps += step - start
            kept = sweep.keep(live, step)
        if step not in sweep.held:
            self._take(sweep)
        sweep.held[step] = kept
        return kept

    def find_tape(self, sweep: Sweep, step: int) -> NoReturn:
        """Tapes do not travel here, and none is lost."""
        raise AssertionError(f"tape {step} was lost")

    def _lose(self, step: int, tier: int, reason: str) -> None:
        self._ledger.counts.lost += 1
        self._forget(step, tier)
        _warn(f"checkpoint {step} of tier {self._stores[tier].name!r} is lost: {reason}")

    def _forget(self, step: int, tier: int) -> None:
        if step in self.stored[tier]:
            self.stored[tier].discard(step)
            self._stores[tier].drop(step)
        self._packings.pop((step, tier), None)

    def settle(self) -> None:
        """End a sweep: wait for its writes, whose arrays may only then be given back.

        A write that does not end is left to its store after some seconds: it may go on
        reading arrays that are used again, as what it writes is not read.
        Reads are left to the stores, whose memory they go to.  `get` may need
        other processes, and after an error those are elsewhere.
        """
        self.cancel(_PATIENCE_S)
        for transfer in self._tokens.values():
            if transfer.is_write and not transfer.failed and transfer not in self._stuck:
                self._stores[transfer.tier].wait_written(transfer.step)
        for tier, steps in enumerate(self.stored):
            for step in steps:
                self._stores[tier].drop(step)


def _is_write_of(transfer: _Pending, action: Evict) -> bool:
    where = transfer.step, transfer.tier
    return transfer.is_write and where == (action.step, action.tier)


def _warn(what: str) -> None:
    warnings.warn(f"{what}; the steps after it will be computed again", CheckpointWarning, 3)
