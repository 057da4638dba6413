"""Seconds: of work on the host and on devices, and of what runs again cost beside it."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..tensors.checksums import digest
from ..tensors.sums import differentiate
from .saved import Caught, Saved

_STEADY = 0.02
_ENGINE_ROUNDS = 20
_DIGEST_BYTES = 1 << 22
_OTHERS_BYTES = 1 << 22  # more than the caches that a core has for itself
# By the clock, computed by the thread, and how often it lost its core; or an event on a device.
Moment: TypeAlias = tuple[float, float, int] | torch.Event
_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # on Linux


@dataclass(slots=True)
class Times:
    """Seconds of stages that perform the same operations: the least of all rounds."""

    forward_s: float = math.inf
    spared_s: float = math.inf
    backward_s: float = math.inf
    rounds: int = 0
    is_steady: bool = False  # whether a round took as long as the shortest before

    @property
    def round_s(self) -> float:
        """Seconds that a round takes, which runs forward twice."""
        return 2 * self.forward_s + self.backward_s

    def add(self, forward_s: float, spared_s: float, backward_s: float) -> None:
        """Add a round."""
        took_s, least_s = forward_s + backward_s, self.forward_s + self.backward_s
        self.is_steady = self.is_steady or (
            self.rounds > 0 and abs(took_s - least_s) < _STEADY * least_s
        )
        self.forward_s = min(self.forward_s, forward_s)
        self.spared_s = min(self.spared_s, spared_s)
        self.backward_s = min(self.backward_s, backward_s)
        self.rounds += 1


def moment(device: torch.device) -> Moment:
    """Return this moment of a computation on a device, which is not waited for."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event
    lost = resource.getrusage(_THREAD).ru_nivcsw if _THREAD is not None else 0
    return time.perf_counter(), time.thread_time(), lost


def seconds_between(began: Moment, ended: Moment) -> float:
    """Return the seconds between two moments, but those in which others had the thread's core.

    Where torch computes in other threads too, these are unknown, and part of it.
    """
    if isinstance(began, tuple) and isinstance(ended, tuple):
        own = ended[2] > began[2] and torch.get_num_threads() == 1
        return ended[1] - began[1] if own else ended[0] - began[0]
    assert not isinstance(began, tuple) and not isinstance(ended, tuple)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds some work takes, on its device and until it is done."""
    host = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = moment(host)
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds_between(began, moment(host))


def empty_caches(device: torch.device) -> None:
    """Leave the host's caches as a stage does that computes on a device."""
    if device.type == "cpu":
        np.ones(_OTHERS_BYTES, np.uint8)


@cache
def engine_s() -> float:
    """Return the seconds in which the engine starts: once for a chain, not once a stage."""
    tensor, one, least = torch.zeros(1, requires_grad=True), torch.ones(1), math.inf
    for _ in range(_ENGINE_ROUNDS):
        with torch.enable_grad():
            made = tensor.view_as(tensor)  # whose adjoint does next to nothing
        run = partial(differentiate, [made], [one], [tensor])
        least = min(least, seconds_of(run, torch.device("cpu")))
    return least


@cache
def digest_s() -> float:
    """Return the seconds that a checksum takes for each byte."""
    tensor = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)
    found = min(seconds_of(partial(digest, tensor), torch.device("cpu")) for _ in range(5))
    return found / _DIGEST_BYTES


@cache
def hook_s() -> float:
    """Return the seconds to hand a saved tensor to a hook that keeps its kind, and back."""
    tensor, count = torch.zeros(1, requires_grad=True), 64

    def run() -> None:
        with torch.enable_grad():
            made = tensor
            for _ in range(count):
                made = made.exp()
            differentiate([made], [torch.ones(1)], [tensor])

    def given(number: int) -> Tensor:
        return torch.ones(1)

    def hooked() -> None:
        with Saved(Caught(holds=False).see, given, given):
            run()

    cpu = torch.device("cpu")
    plain_s, hooked_s = (min(seconds_of(f, cpu) for _ in range(5)) for f in (run, hooked))
    return max(0.0, hooked_s - plain_s) / count
