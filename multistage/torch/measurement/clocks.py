"""Seconds of a computation on its device, without those in which others had the core."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

# By the clock, computed by the thread, and how often it lost its core; or an event on a device.
HostMoment: TypeAlias = tuple[float, float, int]
Moment: TypeAlias = HostMoment | torch.Event

_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # on Linux


class Clock:
    """Moments of a computation, on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        """Return this moment."""
        if self._device.type != "cuda":
            return _moment()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Moment, stop: Moment) -> float:
        """Return the seconds between two moments."""
        if isinstance(start, tuple):
            assert isinstance(stop, tuple)
            return seconds_between(start, stop)
        assert not isinstance(stop, tuple)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds some work takes, on its device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = _moment()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds_between(began, _moment())


def _moment() -> HostMoment:
    """Return this moment, seconds that this thread has computed, and how often it lost its core."""
    lost = resource.getrusage(_THREAD).ru_nivcsw if _THREAD is not None else 0
    return time.perf_counter(), time.thread_time(), lost


def seconds_between(began: HostMoment, ended: HostMoment) -> float:
    """Return the seconds between two moments, but those in which others had the thread's core.

    Where torch computes in other threads too, these are unknown, and part of it.
    """
    if ended[2] > began[2] and torch.get_num_threads() == 1:
        return ended[1] - began[1]
    return ended[0] - began[0]
