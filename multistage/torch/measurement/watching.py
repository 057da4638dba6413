"""Some of the iterations that train, metered: what they hold at least, against the limit."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.meter import Meter, storages_of
from .traits import nbytes_of

_APART = 8  # iterations 2 and 3, 16 and 17, 128 and 129: a meter slows small operations down


@dataclass(slots=True)
class Seen:
    """What metered iterations by one plan held.

    Attributes
    ----------
    runs : int
        Iterations, metered or not.
    most_bytes : int
        At least, at once, the chain's input and output included.
    twice : bool
        Whether that was with a graph that is kept for a second backward pass.
    """

    runs: int = 0
    most_bytes: int = 0
    twice: bool = False

    def is_due(self) -> bool:
        """Whether to meter the next iteration; of two in a row, one sees what the other left."""
        self.runs += 1
        apart = 2
        while apart + 1 < self.runs:
            apart *= _APART
        return apart <= self.runs


class Watch:
    """Meters iterations by a chain's plans, one at a time.

    One meter sees them all, and so what is left of each in the next.

    Attributes
    ----------
    told : bool
        Whether a warning was issued that the limit was exceeded.
    """

    def __init__(self) -> None:
        self._meter: Meter | None = None
        self._last: weakref.ref[Metered] | None = None
        self.told = False

    def next(self, seen: Seen, device: torch.device) -> Metered | None:
        """Return what meters the next iteration by a plan, None if it is not to be metered.

        Not on devices whose allocator counts for the caller too, nor as long as another has
        not come to its backward pass, whose tensors are held beside this one.
        """
        if not seen.is_due() or device.type != "cpu":
            return None
        last = None if self._last is None else self._last()
        if last is not None and last.is_forward:
            return None
        self._meter = self._meter or Meter(device)
        metered = Metered(self._meter, seen)
        self._last = weakref.ref(metered)
        return metered


class Metered:
    """Meters one iteration: the sweep forward, and all that runs again.

    The gradients that autograd makes meanwhile are not seen.

    Parameters
    ----------
    meter : Meter
    seen : Seen
        Gets the bytes.
    """

    def __init__(self, meter: Meter, seen: Seen) -> None:
        self._meter, self._seen = meter, seen
        self._beside = 0  # bytes of the input and the output, which the caller holds
        self._keeps = False  # whether the graph is kept for a second backward pass
        self.is_forward = True

    def given(self, state: Sequence[Tensor], known: Iterable[Tensor]) -> None:
        """Note the chain's input, and what the stages refer to, which is not metered."""
        self._meter.ignore([*state, *known])
        self._beside = _bytes_seen(state)

    def returned(self, output: Sequence[Tensor]) -> None:
        """Note the chain's output, which is the caller's from now on."""
        self._beside += _bytes_seen(output)
        self._meter.forget(output)

    @contextlib.contextmanager
    def on(self, *, again: bool = False) -> Iterator[None]:
        """Meter the sweep forward, or a run again in the backward pass."""
        self.is_forward = not again
        if again:
            self._keeps |= torch._C._autograd._get_current_graph_task_keep_graph()
        self._meter.reset_peak()
        with self._meter:
            yield
        seen = self._meter.peak_bytes + self._beside
        if seen > self._seen.most_bytes:
            self._seen.most_bytes, self._seen.twice = seen, self._keeps


def _bytes_seen(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of storages, or of less where tensors are parts of a data set."""
    storages: dict[int, tuple[int, int]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        for key, storage in storages_of(tensor).items():
            _, before = storages.get(key, (0, 0))
            storages[key] = storage.nbytes(), before + nbytes_of(tensor)
    return sum(min(both) for both in storages.values())
