"""Streams and events: CUDA's, and threads in their place where there is no device.

Both have a compute stream, whichever is current when a method is called, and one for copies in
each direction.  What runs on one stream runs in order.  An event marks a place in a stream;
another stream that waits for it runs what comes later only when everything
before that place is done.  The calling thread itself waits in `synchronize`
alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...backends.lanes import Lane as WorkLane
from ...support.waiting import Latch


class CopyFailed(Exception):
    """A copy that an event comes after could not be made."""


Lane: TypeAlias = Literal["compute", "out", "in"]


class CudaStreams:
    """Streams of a CUDA device.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy = {
            "out": torch.cuda.Stream(device),
            "in": torch.cuda.Stream(device),
        }
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

    def record(self, lane: Lane) -> torch.Event:
        """Return an event after everything queued on a lane so far."""
        event: torch.Event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        """Let what is queued on a lane from now on run after an event.

        May raise CopyFailed on the compute stream, as `synchronize`.
        """
        assert isinstance(event, torch.Event)
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
        """Block until an event has happened.

        Raises
        ------
        CopyFailed
            If a copy between the lane's event before and this one failed.
        """
        event.synchronize()

    def span(self, began: Event, ended: Event) -> tuple[float, float] | None:
        """Return when two events of a lane happened, by `time.perf_counter`; None if not yet."""
        assert isinstance(began, torch.Event) and isinstance(ended, torch.Event)
        if not ended.query():
            return None
        start_s = self._origin_s + self._origin.elapsed_time(began) / 1e3
        # A difference of its own: from an origin long ago it would be rounded (single precision).
        return start_s, start_s + began.elapsed_time(ended) / 1e3

    def close(self) -> None:
        """Wait for everything queued; stop threads."""
        for stream in self._copy.values():
            stream.synchronize()


class HostStreams:
    """Two threads that copy within host memory; the compute stream is the caller itself.

    A copy that fails does not end its thread, or every later event would be
    waited for in vain: the next event of its lane has the error, and raises it
    in whoever waits for that on the compute stream.  Methods are as those of `CudaStreams`.
    """

    def __init__(self) -> None:
        self._lanes: dict[str, WorkLane[_Task]] = {
            name: WorkLane(f"multistage-copy-{name}") for name in ("out", "in")
        }
        try:
            for lane in self._lanes.values():
                lane.start(_Copier().do)
        except BaseException:  # there is no other thread: nor is there need of the first
            self.close()
            raise

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def record(self, lane: Lane) -> Event:
        event = _HostEvent()
        if lane == "compute":
            event.set(None)
        else:
            self._lanes[lane].put(event)
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, _HostEvent)
        if lane == "compute":
            event.synchronize()
        else:
            # For the order alone: what failed before the event is no fault of what comes after.
            self._lanes[lane].put(event.wait)

    def copy(self, lane: Lane, target: Tensor, source: Tensor) -> None:
        if lane == "compute":
            target.copy_(source)
        else:
            # NumPy, which lets the interpreter go meanwhile, as torch does for large tensors only.
            to, what = target.numpy(), source.numpy()
            self._lanes[lane].put(lambda: to.__setitem__(slice(None), what))

    def used_by(self, lane: Lane, tensors: Sequence[Tensor]) -> None:
        """Nothing: what is queued refers to its memory."""

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def span(self, began: Event, ended: Event) -> tuple[float, float] | None:
        assert isinstance(began, _HostEvent) and isinstance(ended, _HostEvent)
        return (began.at, ended.at) if ended.at else None

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.end()
        for lane in self._lanes.values():
            lane.join()


class _HostEvent:
    """A place in a lane, or in the computation; `at` is when it happened, 0.0 before."""

    def __init__(self) -> None:
        self._happened = Latch()
        self._error: Exception | None = None
        self.at = 0.0

    def set(self, error: Exception | None) -> None:
        self._error = error
        self.at = time.perf_counter()
        self._happened.set()

    def wait(self) -> None:
        self._happened.wait()

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        self._happened.wait()
        if self._error is not None:
            raise CopyFailed(f"{type(self._error).__name__}: {self._error}") from self._error


# A place in a stream, for those streams alone that recorded it.
Event: TypeAlias = torch.Event | _HostEvent
Streams: TypeAlias = CudaStreams | HostStreams
_Task: TypeAlias = _HostEvent | Callable[[], object]


class _Copier:
    """What the thread of a lane does."""

    def __init__(self) -> None:
        self._failed: Exception | None = None  # since the last event

    def do(self, task: _Task) -> None:
        """Make a copy, or say that an event has happened."""
        if isinstance(task, _HostEvent):
            task.set(self._failed)
            self._failed = None
            return
        try:
            task()
        except Exception as error:  # the event after it is waited for, whatever the error is
            self._failed = self._failed or error


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


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
