"""Seconds of a computation on its device, without those in which others had the core."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

# By the clock, computed by the thread, and how often it lost its core; or an event on a device.
Moment: TypeAlias = tuple[float, float, int] | torch.Event

_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # on Linux


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
