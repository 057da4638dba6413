"""Threads that copy in place of the streams of a CUDA device, for pinned memory without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multistage.backends.lanes import Lane
from multistage.support.waiting import Latch
from multistage.torch.tiers.pinned import PinnedStore

CPU = torch.device("cpu")


class Event:
    """A place in a lane, or in the computation; `at` is when it happened, 0.0 before."""

    def __init__(self) -> None:
        self._happened = Latch()
        self.at = 0.0

    def set(self) -> None:
        self.at = time.perf_counter()
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()


class HostStreams:
    """Two threads that copy within host memory; the compute stream is the caller itself."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane[Callable[[], object]]] = {
            name: Lane(f"multistage-copy-{name}") for name in ("out", "in")
        }
        try:
            for lane in self._lanes.values():
                lane.start(_do)
        except BaseException:  # there is no other thread: nor is there need of the first
            self.close()
            raise

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def record(self, lane: str) -> Event:
        event = Event()
        if lane == "compute":
            event.set()
        else:
            self._lanes[lane].put(event.set)
        return event

    def wait(self, lane: str, event: Event) -> None:
        if lane == "compute":
            event.synchronize()
        else:
            self._lanes[lane].put(event.synchronize)

    def copy(self, lane: str, target: Tensor, source: Tensor) -> None:
        # NumPy, which lets the interpreter go meanwhile, as torch does for large tensors only.
        to, what = target.numpy(), source.numpy()
        self._lanes[lane].put(lambda: to.__setitem__(slice(None), what))

    def used_by(self, lane: str, tensors: Sequence[Tensor]) -> None:
        """Nothing: what is queued refers to its memory."""

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def span(self, began: Event, ended: Event) -> tuple[float, float] | None:
        return (began.at, ended.at) if ended.at else None

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.end()
        for lane in self._lanes.values():
            lane.join()


def _do(task: Callable[[], object]) -> None:
    task()


def pinned(capacity: int | None, make: Callable[[], Any] = HostStreams) -> PinnedStore:
    """Return a store of pinned memory whose streams are threads, or what else is given."""
    return PinnedStore(capacity, CPU, lambda device: make())
