"""A plain run of a model, forward and backward, that holds only some of what it saves.

The reference for the check of a chain must be plain autograd, and must not take plain
autograd's memory: within the limit, that is what the chain is for.  The forward pass keeps
the latest of the tensors that autograd saves, as many as there is room for.  When
the backward pass has used them up, the whole forward pass runs again and keeps those
before.  A model that needs three times the room is run forward three times; it need not
be cut anywhere.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..tensors.meter import storages_among, storages_of
from ..tensors.streams import Home
from .saved import Complete, Saved, itself, nodes_made, written_to

# The latest again with those before: a node may ask for its tensors in any order.
_OVERLAP = 8


class TooDear(Exception):
    """The room is so small that the model would be run forward too often.

    Or what a model saved and differentiates itself, in forward, is gone by then.
    """


class Windowed:
    """Runs a function as plain autograd does, within a bounded room for saved tensors.

    Parameters
    ----------
    call : callable
        No arguments; returns the result, whose graph is kept.  Must do the same each time
        within `again`.
    again : callable
        Returns a context in which `call` finds everything as it was at first.
    room_bytes : int
        For saved tensors; one tensor is always kept.
    costs_nothing : collection of Tensor
        Parameters and inputs: held anyway.

    Attributes
    ----------
    runs : int
        Forward, so far.
    most_runs : float
        Beyond which the backward pass raises TooDear.
    """

    def __init__(
        self,
        call: Callable[[], object],
        again: Callable[[], AbstractContextManager[object]],
        room_bytes: float,
        costs_nothing: Iterable[Tensor] = (),
    ) -> None:
        self._call, self._again = call, again
        self._room = room_bytes
        self._count = 0  # of tensors saved in the first run
        self._free = {*storages_among(costs_nothing)}
        self._window = _Window(room_bytes, self._free)
        self._home = Home()
        self.runs = 0
        self.most_runs = float("inf")

    def forward(self) -> object:
        """Run; return the result."""
        self.runs = 1
        with Saved(self._window.add, self._unpack, self._window.held) as saved:
            result = self._call()
        self._count = saved.count
        return result

    @property
    def expected_runs(self) -> float:
        """Runs forward that there will have been after the backward pass, about."""
        return self._window.seen_bytes / max(self._room, 1.0)

    def _unpack(self, number: int) -> Tensor:
        if not self._window.first <= number < self._window.stop:
            if self.runs >= self.most_runs:
                raise TooDear
            overlap = min(_OVERLAP, len(self._window) // 4)
            self._fill(min(self._count, number + 1 + overlap))
            if number < self._window.first:  # the overlap took the room
                self._fill(number + 1)
        tensor = self._window.get(number)
        self._home.hand(tensor)
        return tensor

    def _fill(self, stop: int) -> None:
        """Run forward again; keep the latest of the tensors before a number."""
        self.runs += 1
        self._window = window = _Window(self._room, self._free)

        last = 0  # of the nodes that saved what is kept

        def see(tensor: Tensor) -> None:
            nonlocal last
            if window.stop < stop:
                window.add(tensor)
                last = nodes_made()
            elif nodes_made() != last:  # or its kernel might still have to fill what it saved
                raise Complete

        with (
            self._home.context(),
            self._again(),
            contextlib.suppress(Complete),
            torch.enable_grad(),
            Saved(see, window.held, window.held),
        ):
            self._call()


def forgetting(
    room_bytes: float, costs_nothing: Iterable[Tensor]
) -> AbstractContextManager[object]:
    """Return a context in which graphs hold the latest tensors alone; not to be walked later."""
    window = _Window(room_bytes, {*storages_among(costs_nothing)})
    return Saved(window.add, window.held, window.held)


class _Window:
    """The latest of the tensors that are saved, by their numbers."""

    def __init__(self, room_bytes: float, free: Set[int]) -> None:
        self._room, self._free = room_bytes, free
        self._tensors: deque[tuple[Tensor, int]] = deque()
        self._storages: dict[int, int] = {}  # how many tensors of each
        self._held = 0
        self.first = 0
        self.seen_bytes = 0

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def stop(self) -> int:
        return self.first + len(self._tensors)

    def add(self, tensor: Tensor) -> None:
        self._tensors.append((itself(tensor), tensor._version))
        self._count(tensor, 1)
        while self._held > self._room and len(self._tensors) > 1:
            gone, _ = self._tensors.popleft()
            self.first += 1
            self._count(gone, -1)

    def _count(self, tensor: Tensor, change: int) -> None:
        for key, storage in storages_of(tensor).items():
            if key in self._free:
                continue
            before, nbytes = self._storages.get(key, 0), storage.nbytes()
            if before + change:
                self._storages[key] = before + change
            else:
                del self._storages[key]
            if before == 0:
                self._held += nbytes
                self.seen_bytes += nbytes
            elif before + change == 0:
                self._held -= nbytes

    def held(self, number: int) -> Tensor:
        """Return a tensor for a model that differentiates in its forward."""
        if not self.first <= number < self.stop:
            raise TooDear
        return self.get(number)

    def get(self, number: int) -> Tensor:
        tensor, version = self._tensors[number - self.first]
        if tensor._version != version:
            raise written_to()
        return tensor
