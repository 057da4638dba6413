"""Tiers that are said to be late, without a clock, and stores that never answer until released."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from unequal_chains import Case

from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.execute.late import Late
from multistage.model.tier import Tier
from multistage.states.layout import Array


def tier_for(case: Case, rho: float) -> Callable[[object], Tier]:
    """Return what measures a tier: all states take `rho` times as long as plain training."""
    rate = sum(case.sizes) / (rho * 3 * sum(case.seconds))
    return lambda *_: Tier.of_rates(rate, rate, tapes=False)


def by_chance(rng: random.Random, odds: float) -> Callable[[object], bool]:
    """Return what says late by chance."""
    return lambda _: rng.random() < odds


@contextlib.contextmanager
def said_late(is_late: Callable[[Any], bool]) -> Iterator[list[Late]]:
    """Have sweeps go on without their tiers before actions of which `is_late(action)` is true.

    For all others they wait.

    Gives what has done so, in the order in which it did.
    """
    found: list[Late] = []

    def called(late: Late, sweep: Any, action: Any) -> Any:
        if not is_late(action):
            return None
        schedule = late._left(sweep, action, sweep.clock())
        if schedule is not None:
            found.append(late)
        return schedule

    with mock.patch.object(Late, "__call__", called):
        yield found


def on_time() -> Any:
    """Have sweeps wait for their tiers, however long."""
    return mock.patch.object(Late, "__call__", lambda *_: None)


class Stopping(Ram):
    """Moves no bytes in one direction from the n-th transfer on, until it is released."""

    def __init__(self, stops: str, after: int, gate: threading.Event) -> None:
        super().__init__()
        self._stops, self._left, self._gate = stops, after, gate

    def _pass(self, kind: str) -> None:
        self._left -= kind == self._stops
        assert kind != self._stops or self._left >= 0 or self._gate.wait(60)

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write, or wait."""
        self._pass("write")
        super().write(slot, offset, data)

    def read(self, slot: int, data: Array) -> None:
        """Read, or wait."""
        self._pass("read")
        super().read(slot, data)


class StoppingStore(StreamedStore):
    """Host memory whose reads or writes never end, from the n-th on, until it is released."""

    def __init__(self, stops: str, after: int) -> None:
        self.gate = threading.Event()
        medium = partial(Stopping, stops=stops, after=after, gate=self.gate)
        super().__init__("stopping", medium, buffer_bytes=0)

    def close(self) -> None:
        """Release it, then close it."""
        self.gate.set()
        super().close()
