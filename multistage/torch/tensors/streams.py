"""Streams and events of a CUDA device.

There is a compute stream, whichever is current when a method is called, and one for copies in
each direction.  What runs on one stream runs in order.  An event marks a place in a stream;
another stream that waits for it runs what comes later only when everything
before that place is done.  The calling thread itself waits in `synchronize`
alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Event: TypeAlias = torch.Event  # a place in a stream
Lane: TypeAlias = Literal["compute", "out", "in"]


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = {"out": torch.cuda.Stream(device), "in": torch.cuda.Stream(device)}
        self._unsure_s = math.inf  # of the host's time of an event
        for _ in range(5):  # a thread that is suspended in between has another time than the event
            began_s = time.perf_counter()
            event = self.record("out")
            event.synchronize()
            ended_s = time.perf_counter()
            if ended_s - began_s < self._unsure_s:
                self._unsure_s = ended_s - began_s
                self._origin, self._origin_s = event, ended_s

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        # Asked for at each call, and never inside a copy stream's context.
        return torch.cuda.current_stream(self._device) if lane == "compute" else self._copy[lane]

    def empty(self, nbytes: int) -> Tensor:
        """Return device memory that the compute stream may use at once, and others after it."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def host(self, nbytes: int) -> Tensor:
        """Return host memory fit for asynchronous copies."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def record(self, lane: Lane) -> Event:
        """Return an event after everything queued on a lane so far."""
        event: Event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        """Let what is queued on a lane from now on run after an event."""
        self._stream(lane).wait_event(event)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        """Queue a copy on a lane."""
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source, non_blocking=True)

    def used_by(self, lane: Lane, tensors: Sequence[Tensor]) -> None:
        """Let memory not be handed on before what is queued on a lane now is done."""
        # Nothing for memory of that very stream.  For other memory reuse then depends on
        # timing, which is why ordinary copies go by events.
        for tensor in tensors:
            tensor.record_stream(self._stream(lane))

    def synchronize(self, event: Event) -> None:
        """Block until an event has happened."""
        event.synchronize()

    def span(self, began: Event, ended: Event) -> tuple[float, float] | None:
        """Return when two events of a lane happened, by `time.perf_counter`; None if not yet."""
        if not ended.query():
            return None
        start_s = self._origin_s + self._origin.elapsed_time(began) / 1e3
        # A difference of its own: from an origin long ago it would be rounded (single precision).
        return start_s, start_s + began.elapsed_time(ended) / 1e3

    def close(self) -> None:
        """Wait for everything queued."""
        for stream in self._copy.values():
            stream.synchronize()


class Home:
    """The CUDA stream that is current now, for work that others ask for later.

    Parameters
    ----------
    device : torch.device, optional
        The current CUDA device if not given.

    Attributes
    ----------
    stream : torch.cuda.Stream or None
        None for another device, or while CUDA is not in use.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        cuda = torch.cuda.is_initialized() and (device is None or device.type == "cuda")
        self.stream = torch.cuda.current_stream(device) if cuda else None

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which it is the current stream again."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def hand(self, tensor: Tensor) -> None:
        """Let the current stream use a tensor that was made at home."""
        if self.stream is None or tensor.device.type != "cuda":
            return
        here = torch.cuda.current_stream(tensor.device)
        if here != self.stream:
            here.wait_stream(self.stream)
            tensor.record_stream(here)


def the_device(device: torch.device) -> torch.device:
    """Return a device as tensors have it: "cuda" stands for the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
