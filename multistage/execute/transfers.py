"""What actions do with the stores of an executor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from ..actions import Answer, Await, Drop, Evict, Get, Offer, Put
from ..backends.base import CheckpointLost, Store
from ..errors import CheckpointWarning
from ..states.slots import Kept, StateLayout
from ..support.interrupts import Shield
from ..support.step_sets import StepSet
from .ledger import Ledger
from .sweep import Moved, Sweep, Wait, illegal

State = TypeVar("State")
ArrayT = TypeVar("ArrayT")
PackingT = TypeVar("PackingT")

_NAP_S, _PATIENCE_S = 1e-3, 5.0


class _Pending(NamedTuple):
    step: int
    tier: int
    is_write: bool
    staged: Kept | None  # keeps the arrays of a state that no slot holds
    failed: bool  # refused, though put
    began_s: float  # by the clock
    nbytes: int


_pending = tuple.__new__  # what _Pending(...) does, without the call around it


class Transfers:
    """What one sweep has in its stores, and on the way.

    Parameters
    ----------
    stores : sequence of Store
        Opened; addressed by the actions' tier index.
    layout : StateLayout
    ledger : Ledger

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
    ) -> None:
        self.shield = Shield()
        self.stored = [StepSet() for _ in stores]
        self._stores, self._ledger = tuple(stores), ledger
        self._layout: StateLayout[Any, Any, Any] = layout
        self._tokens: dict[int, _Pending] = {}
        self._next_token = 0
        self._packings: dict[tuple[int, int], Any] = {}
        self._stuck: dict[int, _Pending] = {}  # writes that were cancelled, and have not ended

    def write(self, sweep: Sweep, action: Offer | Put) -> Answer:
        """Queue a write of a live or held state."""
        store, step, tier, ledger = self._store(action), action.step, action.tier, self._ledger
        kept, staged, shield = sweep.held.get(step), None, self.shield
        if kept is None and step != sweep.at:
            raise illegal(action, f"state {step} is neither held nor live")
        shield.up = True
        try:
            if kept is None:
                kept = staged = sweep.slots.keep(sweep.live, step)
            flat, packing = self._layout.at(step).pack(kept.arrays)
            nbytes = 0
            for array in flat:
                nbytes += array.nbytes
            block, before = type(action) is Put, ledger.clock()
            accepted = store.put(step, flat, block=block)
            if block:
                ledger.stalled(before)
            if accepted:
                self.stored[tier].add(step)
                if packing is not None:
                    self._packings[step, tier] = packing
                sweep.counts.writes += 1
            else:
                sweep.counts.refused += 1
                if not block:
                    if staged is not None:
                        sweep.slots.release(staged)
                    return None
                _warn(f"tier {store.name!r} has no room for checkpoint {step}")
            if staged is not None:  # refused, too, as the schedule believes until its Await
                _occupy(sweep)
            token = self._next_token
            self._next_token = token + 1
            write = step, tier, True, staged, not accepted, before, nbytes
            self._tokens[token] = _pending(_Pending, write)
            return token
        finally:
            shield.up = False
            if shield.pending:
                shield.let_go()

    def read(self, sweep: Sweep, action: Get) -> Answer:
        """Queue a read into a slot."""
        store, step, shield = self._store(action), action.step, self.shield
        shield.up = True
        try:
            store.prefetch(step)
            sweep.held[step] = None
            _occupy(sweep)
            sweep.counts.reads += 1
            token = self._next_token
            self._next_token = token + 1
            read = step, action.tier, False, None, False, 0.0, 0
            self._tokens[token] = _pending(_Pending, read)
            return token
        finally:
            shield.up = False
            if shield.pending:
                shield.let_go()

    def drop(self, sweep: Sweep, action: Drop) -> Answer:
        """Free a store's copy."""
        self._store(action)
        shield = self.shield
        shield.up = True
        try:
            self._forget(action.step, action.tier)
        finally:
            shield.up = False
            if shield.pending:
                shield.let_go()
        return None

    def wait(self, sweep: Sweep, action: Await) -> Answer:
        """Wait for a transfer; whether it succeeded."""
        transfer = self._tokens.pop(action.token, None)
        if transfer is None:
            raise illegal(action, "no such transfer is in flight")
        step, tier, ledger = transfer.step, transfer.tier, self._ledger
        before = ledger.clock()
        if transfer.is_write:
            written = transfer.failed or self._stores[tier].wait_written(step)
            ledger.stalled(before)
            if transfer.staged is not None:
                sweep.slots.release(transfer.staged)
                sweep.used -= 1
            if not written:
                self._lose(step, tier, "could not be written")
            return written and not transfer.failed
        arrays = self._fetched(step, tier)
        ledger.stalled(before)
        if arrays is None:
            del sweep.held[step]
            sweep.lost.add(step)
            sweep.used -= 1
            return False
        sweep.held[step] = sweep.slots.adopt(arrays, step)
        return True

    def evict(self, sweep: Sweep, action: Evict) -> Answer:
        """Wait for the write of a held checkpoint, then give its slot back."""
        self._store(action)
        step, token = action.step, self._token_of(action)
        if token is None or sweep.held.get(step) is None:
            raise illegal(action, "no slot holds it, or no write of it is in flight")
        written = self.wait(sweep, Await(token))
        kept = sweep.held.pop(step)
        assert kept is not None
        sweep.slots.release(kept)
        sweep.used -= 1
        return written

    def _store(self, action: Offer | Put | Get | Drop | Evict) -> Store:
        if action.tape or action.tier >= len(self._stores):
            why = f"there are {len(self._stores)} tiers"
            raise illegal(action, "tapes stay in fast memory here" if action.tape else why)
        return self._stores[action.tier]

    def _token_of(self, action: Evict | Await) -> int | None:
        """Return the token of what an action waits for, None if nothing is in flight for it."""
        if isinstance(action, Await):
            return action.token if action.token in self._tokens else None
        wanted = action.step, action.tier, True
        return next((token for token, each in self._tokens.items() if each[:3] == wanted), None)

    def find(self, sweep: Sweep, step: int) -> Kept:
        """Return state `step`, which no slot holds: state 0, or a lost checkpoint made again."""
        if step == 0:
            return sweep.origin  # never put into a slot: a Free would give it away
        start, kept = self._nearest(sweep, step)
        if start < step:
            live = sweep.chain.advance(sweep.slots.load(kept, sweep.live), start, step)
            sweep.counts.recovered_steps += step - start
            kept = sweep.slots.keep(live, step)
        if step not in sweep.held:
            _occupy(sweep)
        sweep.held[step] = kept
        return kept

    def _nearest(self, sweep: Sweep, step: int) -> tuple[int, Kept]:
        """Return the nearest state up to `step` that can be had, and its index.

        States that are being read are left alone: their schedule waits for them itself.
        """
        best, kept = 0, sweep.origin
        for start, other in sweep.held.items():
            if other is not None and best < start < step:
                best, kept = start, other
        for tier, steps in enumerate(self.stored):
            for start in steps.descending(step):
                if start <= best:
                    break
                if start in sweep.held and sweep.held[start] is None:
                    continue
                # What does not come in the time that the steps take is computed again.
                step_s = sweep.counts.forward_s / max(1, sweep.counts.forward_steps)  # 0 if resumed
                if not self._stores[tier].arrived(start, max((step - best) * step_s, _NAP_S)):
                    break
                arrays = self._fetched(start, tier)
                if arrays is not None:
                    best, kept = start, sweep.slots.adopt(arrays, start)
                    break
        return best, kept

    def find_tape(self, sweep: Sweep, step: int) -> NoReturn:
        """Tapes do not travel here, and none is lost."""
        raise AssertionError(f"tape {step} was lost")

    def _fetched(self, step: int, tier: int) -> list[object] | None:
        """Return the arrays of a checkpoint, or None if it is lost."""
        try:
            arrays = self._stores[tier].get(step)
        except CheckpointLost as error:
            self._lose(step, tier, str(error))
            return None
        return self._layout.at(step).unpack(arrays, self._packings.get((step, tier)))

    def _lose(self, step: int, tier: int, reason: str) -> None:
        self._ledger.counts.lost += 1
        self._forget(step, tier)
        _warn(f"checkpoint {step} of tier {self._stores[tier].name!r} is lost: {reason}")

    def _forget(self, step: int, tier: int) -> None:
        self.stored[tier].discard(step)
        self._stores[tier].drop(step)
        self._packings.pop((step, tier), None)

    def awaited(self, sweep: Sweep, action: Wait) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait.

        It answers whether that is so.  None if the action does not wait.
        """
        if isinstance(action, Put):
            return self._room(self._store(action), action.tier)
        token = self._token_of(action)
        if token is None or (transfer := self._tokens[token]).failed:
            return None
        store = self._stores[transfer.tier]
        return partial(store.ended if transfer.is_write else store.arrived, transfer.step)

    def _room(self, store: Store, tier: int) -> Callable[[float], bool] | None:
        """Return what waits until a state can be put."""
        if not store.waits():
            return None

        def has_room(timeout_s: float) -> bool:
            writes = [t for t in self._tokens.values() if t.is_write and t.tier == tier]
            oldest = next((t.step for t in writes if not store.ended(t.step, 0.0)), None)
            if oldest is not None:
                store.ended(oldest, timeout_s)
            elif timeout_s:
                time.sleep(min(timeout_s, _NAP_S))  # for small states, which no key tells of
            return not store.waits()

        return has_room

    def moved(self, action: Wait | Offer) -> Moved:
        """Return what an action waits for, or offers."""
        if isinstance(action, Await):
            transfer = self._tokens[action.token]
            step, tier, is_write = transfer.step, transfer.tier, transfer.is_write
        else:
            step, tier, is_write = action.step, action.tier, True
        return Moved(step, False, is_write, tier, self._stores[tier].name)

    def behind_s(self) -> float:
        """Return the seconds since the oldest write was queued that has not ended, else 0."""
        oldest = self._oldest()
        return 0.0 if oldest is None else self._ledger.clock() - oldest.began_s

    def _oldest(self) -> _Pending | None:
        """Return the oldest write that has not ended, as far as its store can tell."""
        for each in self._tokens.values():
            writes = each.is_write and not each.failed
            if writes and not self._stores[each.tier].ended(each.step, 0.0):
                return each
        return None

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown.

        The write in flight counts if it has taken longer than the others did.
        """
        ledger = self._ledger
        ledger.drain()
        oldest = self._oldest() if writes else None
        if oldest is None or not oldest.nbytes:
            return ledger.seen_s["write" if writes else "read"]
        took_s = ledger.clock() - max(oldest.began_s, ledger.written_s)
        return max(ledger.seen_s["write"], took_s / oldest.nbytes)

    def reading_s(self, sweep: Sweep) -> float:
        """Return the seconds that it takes to read all states that are to be read."""
        reads = sum(not each.is_write for each in self._tokens.values())
        stored = {step for steps in self.stored for step in steps.descending(sweep.end)}
        count = reads + len(stored - sweep.held.keys())
        return self.seen_s(writes=False) * self._layout.nbytes * count

    def cancel(self, timeout_s: float) -> None:
        """Cancel all writes; wait so many seconds for them to end.

        Their arrays may be read until they have: they take their room until then.
        """
        clock = self._ledger.clock
        writes = {k: e for k, e in self._tokens.items() if e.is_write and not e.failed}
        for each in writes.values():
            self._stores[each.tier].cancel(each.step)
        ends_s = clock() + timeout_s
        self._stuck = {
            token: each
            for token, each in writes.items()
            if not self._stores[each.tier].ended(each.step, max(0.0, ends_s - clock()))
        }

    def stuck(self) -> list[int]:
        """Return the states whose writes had not ended when they were cancelled."""
        return [each.step for each in self._stuck.values()]

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is in the tiers or on its way, once writes were cancelled."""
        for token, transfer in self._tokens.items():
            if transfer.is_write:
                if token not in self._stuck:
                    if not transfer.failed:
                        self._stores[transfer.tier].wait_written(transfer.step)
                    if transfer.staged is not None:
                        sweep.slots.release(transfer.staged)
                sweep.used -= transfer.staged is not None
            else:
                del sweep.held[transfer.step]
                sweep.used -= 1
        self._tokens.clear()
        self._packings.clear()
        sweep.lost.clear()
        self._drop_all()

    def settle(self) -> None:
        """End a sweep: wait for its writes, whose arrays may only then be given back.

        A write that does not end is left to its store after some seconds: it may go on
        reading arrays that are used again, as what it writes is not read.
        Reads are left to the stores, whose memory they go to.  `get` may need
        other processes, and after an error those are elsewhere.
        """
        self.cancel(_PATIENCE_S)
        for token, transfer in self._tokens.items():
            if transfer.is_write and not transfer.failed and token not in self._stuck:
                self._stores[transfer.tier].wait_written(transfer.step)
        self._drop_all()

    def _drop_all(self) -> None:
        for tier, steps in enumerate(self.stored):
            for step in steps:
                self._stores[tier].drop(step)
            self.stored[tier] = StepSet()


def _occupy(sweep: Sweep) -> None:
    sweep.used = used = sweep.used + 1
    sweep.counts.peak_slots = max(sweep.counts.peak_slots, used)


def _warn(what: str) -> None:
    warnings.warn(f"{what}; the steps after it will be computed again", CheckpointWarning, 3)
