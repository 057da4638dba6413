"""Stores that fail, transfers that come early or late, and interrupts."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from multistage.backends import FileStore, MemoryStore
from multistage.backends.base import CheckpointLost
from multistage.execute import loop
from multistage.torch.tiers import porter as porters
from multistage.torch.tiers.parcels import Origin


class Faults:
    """Lets a store refuse, fail to write or lose some pages, as told."""

    def fail(self, what: str, when: Callable[[int], bool]) -> Any:
        self._what, self._when = what, when
        return self

    def put(self, key: int, arrays: Any, *, block: bool = False) -> bool:
        if self._what == "full" and self._when(key):
            return False
        if self._what == "break" and self._when(key):
            raise OSError("the cable is out")
        return super().put(key, arrays, block=block)  # type: ignore[misc, no-any-return]

    def wait_written(self, key: int) -> bool:
        written = super().wait_written(key)  # type: ignore[misc]
        return written and not (self._what == "write" and self._when(key))

    def get(self, key: int) -> list[Any]:
        if self._what == "read" and self._when(key):
            raise CheckpointLost("bad checksum")
        return super().get(key)  # type: ignore[misc, no-any-return]


class Flaky(Faults, MemoryStore):
    def __init__(self, what: str, when: Callable[[int], bool]) -> None:
        super().__init__(buffer_bytes=0)
        self.fail(what, when)


class FlakyFile(Faults, FileStore):
    pass


class Pace:
    """Has transfers done at once, only when they are waited for, or some so and some so."""

    def __init__(self, rng: random.Random, way: str) -> None:
        self._rng, self._way = rng, way
        self._places: dict[porters.Trip, int] = {}
        self._wanted = 0  # up to this one they may go
        self._moved = threading.Condition()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        queue, wait, carry = porters.Porter._queue, porters.Porter.wait, porters._Work._carry

        def queued(porter: porters.Porter, trip: porters.Trip) -> porters.Trip:
            place = self._places[trip] = len(self._places) + 1
            now = self._way == "eager" or (self._way == "mixed" and self._rng.random() < 0.4)
            queue(porter, trip)
            if now:
                self._may_go(place)
                trip.done.wait(60)
            return trip

        def waited(porter: porters.Porter, trip: porters.Trip) -> bool:
            self._may_go(self._places[trip])
            return wait(porter, trip)

        def carried(work: Any, trip: porters.Trip) -> None:
            if self._way in ("lazy", "mixed"):
                with self._moved:  # by `close` too, which tells nobody
                    while self._places[trip] > self._wanted and not work.pager.stopped:
                        self._moved.wait(0.02)
            carry(work, trip)

        with (
            mock.patch.object(porters.Porter, "_queue", queued),
            mock.patch.object(porters.Porter, "wait", waited),
            mock.patch.object(porters._Work, "_carry", carried),
        ):
            yield

    def _may_go(self, place: int) -> None:
        with self._moved:
            self._wanted = max(self._wanted, place)
            self._moved.notify_all()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory with NaN that awaits bytes from the tier."""
    renew = Origin.renew

    def poison(origin: Origin) -> Tensor:
        memory = renew(origin)
        memory.numpy().fill(255)  # no version counter sees it
        return memory

    with mock.patch.object(Origin, "renew", poison):
        yield


class Interrupts:
    """Ctrl-C before or after some actions of the backward pass."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self._left = [rng.randrange(1, 60) for _ in range(count)]
        self._before = rng.random() < 0.5
        self.on = False

    def _strike(self) -> None:
        if self.on and self._left:
            self._left[0] -= 1
            if not self._left[0]:
                del self._left[0]
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def struck(self) -> Iterator[None]:
        def performed(perform: Callable[..., Any]) -> Callable[..., Any]:
            def struck(*given: Any) -> Any:
                if self._before:
                    self._strike()
                answer = perform(*given)
                if not self._before:
                    self._strike()
                return answer

            return struck

        with contextlib.ExitStack() as patches:
            for name in ("_advance", "_tape", "_save", "_load", "_pulled", "_transfer"):
                patches.enter_context(mock.patch.object(loop, name, performed(getattr(loop, name))))
            yield
