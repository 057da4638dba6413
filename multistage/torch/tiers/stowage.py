"""What one run of a chain has in its slow tier.

A `Berth` is the tier itself: it lives as long as the chain, is opened by the first run
that sends something there, and stays open between iterations, as opening costs more
than a transfer.  A `Stowage` is what one run has in it.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...backends.base import Store
from ...backends.lifetimes import Birth, end
from ...errors import CheckpointWarning, MultistageError
from ...support.interrupts import Shield
from .paging import PAGE_BYTES
from .parcels import Parcel
from .porter import Porter, Trip

# How long a run waits for a tier that it is done with, which may have stopped forever.
PATIENCE_S = 5.0
_LAST = 4  # transfers, whose rate is that of now


class Berth:
    """A slow tier for the tapes and states of a chain.

    Parameters
    ----------
    store : Store
        Opened by the first run that needs it.
    device : torch.device
        Of the tensors.
    page_bytes : int

    Notes
    -----
    Several runs share it, as of two forward passes before one backward pass.
    """

    def __init__(self, store: Store, device: torch.device, page_bytes: int = PAGE_BYTES) -> None:
        self.store, self.device, self.page_bytes = store, device, page_bytes
        self.runs = 0  # that have something in it
        self.busier = 1.0  # how much longer the last sweep took than its thread computed
        self._porter: Porter | None = None
        self._lock = threading.RLock()  # a collection of garbage may close it meanwhile
        self._birth = Birth.here()

    def porter(self) -> Porter:
        """Return what carries rows there; opens the store if it is not open.

        Raises
        ------
        StoreError
            If the store cannot be used, is another run's, or this is a forked child.
        """
        with self._lock:
            porter = self._porter
            if porter is None or not porter.is_open:
                if porter is not None and not self._birth.foreign:
                    porter.close()
                with Shield(up=True):  # one that is open is known to be
                    porter = self._porter = Porter(self.store, self.device, self.page_bytes)
            return porter

    @property
    def opened(self) -> Porter | None:
        """The porter, if the store is open."""
        return self._porter if self._porter is not None and self._porter.is_open else None

    @property
    def is_closing(self) -> bool:
        """Whether the store is still at work for a porter that is closed."""
        porter = self._porter
        return porter is not None and not porter.is_open and porter.is_alive

    def close(self) -> None:
        """Stop the thread and close the store: what lies there is lost.  May be called twice."""
        with self._lock:
            if self._porter is not None:
                self._porter.close()
            self._porter = None

    def leave(self) -> None:
        """Close it, but wait for the store no longer than some seconds."""
        with self._lock:
            if self._porter is not None and not self.is_closing and self._porter.close(PATIENCE_S):
                self._porter = None


@dataclass(eq=False, slots=True)
class _Stowed:
    """A parcel in the tier, or on its way."""

    parcel: Parcel
    trip: Trip
    landed: bool = False
    lost: bool = False


class Stowage:
    """The tapes and states that one run has sent to its tier.

    Parameters
    ----------
    berth : Berth
    names : sequence of str
        Of the stages, for warnings.

    Attributes
    ----------
    stall_s : float
        Seconds that computing waited for transfers.
    """

    def __init__(self, berth: Berth, names: Sequence[str]) -> None:
        self._berth, self._names = berth, names
        self._porter = berth.porter()
        self._stowed: dict[tuple[int, bool], _Stowed] = {}
        self._tokens: list[tuple[int, bool]] = []  # of all transfers
        self._writes: set[int] = set()  # tokens
        self._told = False
        self.stall_s = 0.0
        self._begin()
        berth.runs += 1
        weakref.finalize(self, _leave, self._stowed, self._porter, berth, Birth.here())

    def _begin(self) -> None:
        """Note when a forward sweep begins."""
        self._began_s, self._stalled_s = time.perf_counter(), self.stall_s
        self._begun_s = time.thread_time()

    def turn(self) -> None:
        """Note how busy the machine was with other work: the forward sweep is over."""
        thread_s = time.thread_time() - self._begun_s
        # Where torch computes in other threads, or on a device, this thread's time says nothing.
        alone = self._berth.device.type == "cpu" and torch.get_num_threads() == 1
        busier = self.computed_s() / thread_s if alone and thread_s > 0 else 1.0
        self._berth.busier = max(1.0, busier)

    def put(self, step: int, tape: bool, parcel: Parcel) -> int:
        """Queue the way of a parcel to the tier; return its token.

        Raises
        ------
        MultistageError
            If some of its tensors cannot travel.
        """
        if parcel.stuck:
            raise CannotTravel(
                f"stage {self._name(step, tape)} saves a tensor that cannot travel to a tier "
                f"({parcel.stuck[0]}); train this chain without tiers=, or within a larger limit"
            )
        token = len(self._tokens)
        self._writes.add(token)
        self._stowed[step, tape] = _Stowed(parcel, self._porter.send(parcel.lines()))
        self._tokens.append((step, tape))
        return token

    def evict(self, step: int, tape: bool) -> bool:
        """Wait until a parcel has left, and release it; False if it is lost."""
        stowed = self._stowed[step, tape]
        written = self._waited(stowed.trip)
        stowed.parcel.let_go()
        if not written:
            self._lose(step, tape, stowed)
        return written

    def written(self, step: int, tape: bool, timeout_s: float) -> bool:
        """Wait for a parcel to have left, no longer than so many seconds."""
        trip = self._stowed[step, tape].trip
        began = time.perf_counter()
        # A waiting thread then notices that the tier was closed, or that its thread is gone.
        done = trip.done.wait(timeout_s) or not self._porter.is_alive
        self.stall_s += time.perf_counter() - began
        return done

    def read(self, step: int, tape: bool, timeout_s: float) -> bool:
        """Wait for a parcel to have come back or to be lost, no longer than so many seconds."""
        stowed = self._stowed[step, tape]
        if stowed.lost:
            return True
        began = time.perf_counter()
        trips = [stowed.trip, *stowed.parcel.fillers()]
        done = all(
            trip.done.wait(max(0.0, began + timeout_s - time.perf_counter())) for trip in trips
        )
        self.stall_s += time.perf_counter() - began
        return done or not self._porter.is_alive

    def moved(self, token: int) -> tuple[int, bool, bool]:
        """Return what a transfer moves: the step, whether a tape, and whether to the tier."""
        return *self._tokens[token], token in self._writes

    @property
    def name(self) -> str:
        """The name of the tier."""
        return self._berth.store.name

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown.

        The one in flight counts if it has taken longer than the others did.
        """
        trips = [each.trip for each in self._stowed.values() if each.trip.is_write == writes]
        done = sorted(
            (trip for trip in trips if trip.done.is_set() and not trip.row.error),
            key=lambda trip: trip.ended_s,
        )
        last = done[-_LAST:]
        nbytes = sum(trip.row.nbytes for trip in last)
        seen_s = sum(trip.seconds for trip in last) / nbytes if nbytes else 0.0
        under_way = [t for t in trips if t.begun and not t.done.is_set() and t.row.nbytes]
        if under_way:
            before_s = done[-1].ended_s if done else 0.0
            since_s = max(under_way[0].queued_s, before_s)
            took_s = (time.perf_counter() - since_s) / under_way[0].row.nbytes
            seen_s = max(seen_s, took_s)
        return seen_s

    def computed_s(self) -> float:
        """Return the seconds since this sweep began that were no waiting."""
        waited_s = self.stall_s - self._stalled_s
        return time.perf_counter() - self._began_s - waited_s

    def writing(self) -> list[Trip]:
        """Return the writes that have not ended."""
        trips = (each.trip for each in self._stowed.values())
        return [trip for trip in trips if trip.is_write and not trip.done.is_set()]

    def cancel(self, timeout_s: float) -> bool:
        """Cancel all transfers; return whether those in flight have ended within a time."""
        under_way = [each.trip for each in self._stowed.values() if not each.trip.done.is_set()]
        for trip in reversed(under_way):
            self._porter.cancel(trip)
        began = time.perf_counter()
        ended = all(
            trip.done.wait(max(0.0, began + timeout_s - time.perf_counter())) for trip in under_way
        )
        self.stall_s += time.perf_counter() - began
        return ended

    def stuck(self) -> list[int]:
        """Return the states, and the tapes as ~step, whose cancelled transfers have not ended."""
        return [
            ~step if tape else step
            for (step, tape), each in self._stowed.items()
            if each.trip.cancelled and not each.trip.done.is_set()
        ]

    def get(self, step: int, tape: bool) -> None:
        """Make room for a parcel and queue its way back."""
        self._tokens.append((step, tape))
        stowed = self._stowed[step, tape]
        if not stowed.lost:
            stowed.trip = self._porter.fetch(stowed.trip.row, stowed.parcel.make_room())
            stowed.parcel.on_its_way(stowed.trip)

    def left(self, token: int) -> bool | None:
        """Wait until a transfer has left; False if it is lost, None if it is on its way back.

        A tape stays in fast memory; a state is held elsewhere, if at all.
        """
        if token not in self._writes:
            return None
        step, tape = self._tokens[token]
        if not tape:
            return self.evict(step, tape)
        stowed = self._stowed[step, tape]
        written = self._waited(stowed.trip)
        if not written:
            self._lose(step, tape, stowed)
        return written

    def arrived(self, token: int) -> tuple[int, bool, Parcel | None]:
        """Wait for a transfer; return what came back, None in the parcel's place if it is lost."""
        step, tape = self._tokens[token]
        stowed = self._stowed[step, tape]
        if not stowed.lost:
            for trip in (stowed.trip, *stowed.parcel.fillers()):
                self._waited(trip)
            if not stowed.parcel.came_back():
                self._lose(step, tape, stowed)
        stowed.landed = True
        return step, tape, None if stowed.lost else stowed.parcel

    def _waited(self, trip: Trip) -> bool:
        began = time.perf_counter()
        done = self._porter.wait(trip)
        self.stall_s += time.perf_counter() - began
        return done

    def drop(self, step: int, tape: bool) -> None:
        """Free the tier's copy; of a write that is not done, cancel it."""
        stowed = self._stowed.pop((step, tape), None)
        if stowed is not None:
            _end(stowed.trip, self._porter)

    def clear(self) -> None:
        """Free all of it: the run starts over."""
        for step, tape in [*self._stowed]:
            self.drop(step, tape)
        self._tokens.clear()
        self._writes.clear()
        self._begin()

    def _name(self, step: int, tape: bool) -> str:
        number = step if tape else step - 1
        return self._names[number] if 0 <= number < len(self._names) else str(step)

    def _lose(self, step: int, tape: bool, stowed: _Stowed) -> None:
        stowed.lost = True
        if self._told:
            return
        self._told = True
        what = "tape" if tape else "output"
        warnings.warn(
            f"tier {self._berth.store.name!r}: the {what} of stage {self._name(step, tape)} is "
            f"lost ({stowed.trip.row.error}); it is computed again, and so is what else is lost "
            "in this iteration",
            CheckpointWarning,
            stacklevel=6,
        )


class CannotTravel(MultistageError):
    """A tape holds what no tier can: the chain is planned without one."""


def _end(trip: Trip, porter: Porter) -> None:
    if not trip.done.is_set():
        porter.cancel(trip)
    porter.drop(trip.row)


def _leave(
    stowed: dict[tuple[int, bool], _Stowed], porter: Porter, berth: Berth, birth: Birth
) -> None:
    """Free what a run has left in its tier; close the tier after one that was broken off."""
    berth.runs -= 1
    finished = all(each.landed or each.lost for each in stowed.values())
    for each in stowed.values():
        _end(each.trip, porter)
    if not finished and not berth.runs and berth.opened is porter:
        end(berth.leave, birth)
