"""Stores that fail, transfers that come early or late, and interrupts."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from multistage.actions import Action
from multistage.backends import FileStore, MemoryStore
from multistage.backends.base import CheckpointLost
from multistage.torch.chains.holdings import Holdings
from multistage.torch.chains.runner import Links, Script
from multistage.torch.tiers.groups import Origin
from multistage.torch.tiers.lane import TierLane, Transfer


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
        return super().put(key, arrays, block=block)

    def wait_written(self, key: int) -> bool:
        written = super().wait_written(key)
        return written and not (self._what == "write" and self._when(key))

    def get(self, key: int) -> list[Any]:
        if self._what == "read" and self._when(key):
            raise CheckpointLost("bad checksum")
        return super().get(key)


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
        self._places: dict[Transfer, int] = {}
        self._wanted = 0  # up to this one they may go
        self._moved = threading.Condition()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        queue, wait, carry = TierLane._queue, TierLane.wait, TierLane._carry

        def queued(lane: TierLane, transfer: Transfer) -> Transfer:
            place = self._places[transfer] = len(self._places) + 1
            now = self._way == "eager" or (self._way == "mixed" and self._rng.random() < 0.4)
            queue(lane, transfer)
            if now:
                self._may_go(place)
                transfer.done.wait(60)
            return transfer

        def waited(lane: TierLane, transfer: Transfer) -> bool:
            self._may_go(self._places[transfer])
            return wait(lane, transfer)

        def carried(lane: TierLane, transfer: Transfer) -> None:
            if self._way in ("lazy", "mixed"):
                with self._moved:  # by `close` too, which tells nobody
                    while self._places[transfer] > self._wanted and not lane._pager.stopped:
                        self._moved.wait(0.02)
            carry(lane, transfer)

        with (
            mock.patch.object(TierLane, "_queue", queued),
            mock.patch.object(TierLane, "wait", waited),
            mock.patch.object(TierLane, "_carry", carried),
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
    """Ctrl-C at some moments of the backward pass.

    A moment is before or after an action, or the begin or end of a call that an action
    makes: of an operator, a slot or the tier.

    Parameters
    ----------
    moments : sequence of int
        How many moments pass before each interrupt.

    Attributes
    ----------
    on : bool
        Whether moments are counted.
    struck : list of str
        Where interrupts fell, such as "before Advance" or "in keep".
    """

    def __init__(self, moments: Sequence[int]) -> None:
        self._left = list(moments)
        self.on = False
        self.struck: list[str] = []

    @classmethod
    def by_chance(cls, rng: random.Random, count: int) -> Interrupts:
        return cls([rng.randrange(1, 120) for _ in range(count)])

    def _pass(self, where: str) -> None:
        if self.on and self._left:
            self._left[0] -= 1
            if not self._left[0]:
                del self._left[0]
                self.struck.append(where)
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def strike(self) -> Iterator[None]:
        left = Script._left

        def actions(script: Script) -> Iterator[Action]:
            for action in left(script):
                name = type(action).__name__
                self._pass(f"before {name}")
                yield action
                self._pass(f"after {name}")

        def called(call: Callable[..., Any]) -> Callable[..., Any]:
            def interrupted(*given: Any) -> Any:
                self._pass(f"in {call.__name__}")
                answer = call(*given)
                self._pass(f"in {call.__name__}")
                return answer

            return interrupted

        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(Script, "_left", actions))
            for owner, name in CALLS:
                call = called(getattr(owner, name))
                patches.enter_context(mock.patch.object(owner, name, call))
            yield


CALLS = (
    *((Links, name) for name in ("advance", "tape", "keep", "load", "keep_tape", "release")),
    *((Holdings, name) for name in ("write", "read", "wait", "evict", "drop", "find", "find_tape")),
)
