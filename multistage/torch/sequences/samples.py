"""Chunks of a sequence that are looked at more closely, since no other run would show it.

A cell may keep a state in a place that nothing can find: a slot of an object, a long list,
a closure of a method.  Plain autograd leads a gradient through it.  A chunk that was first
run without a graph leaves a tensor without history there, and the chunk that reads it when
it is run again gets the same numbers, and no gradient goes back.  With a graph the tensor
has its history, and the graph of every chunk that is run again is walked: what is older
than the chunk is an error.  Therefore all chunks of the first sequences of a cell, and a
seeded sample of those of later ones, are run with a graph each time.

What a chunk writes to and does not own is seen by a dispatch mode, in a sample as well.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...errors import StateError
from ..environment.states import tensors_in
from ..tensors.meter import Seeing, storages_among, storages_of

_WHOLE = 2  # first sequences of a cell, all of whose chunks are run with a graph
_GRAPHED, _WATCHED = 16, 32  # one chunk of so many in later ones
# Batch norm's kernels write to these arguments, and their schemas do not say so.
_WRITTEN = {"running_mean", "running_var"}
_TRAINING = {"training", "train"}


class Samples:
    """The chunks of one sequence that are looked at more closely.

    The number is that of the sequence among those of its cell; None looks at all chunks.  With
    `watch` a dispatch mode may see the operations: compiled cells run otherwise then.
    """

    def __init__(self, number: int | None, chunks: int, *, watch: bool = True) -> None:
        draw = random.Random(number)
        self._whole = number is None or number < _WHOLE
        # One at least; of those that are watched as many on the average.
        self._graphed = frozenset(draw.sample(range(chunks), -(-chunks // _GRAPHED)))
        if number is None:
            count = chunks
        else:
            count = -(-chunks // 4) if self._whole else (chunks + number % _WATCHED) // _WATCHED
        self._watched = frozenset(draw.sample(range(chunks), count) if watch else ())

    def graphed(self, k: int) -> bool:
        """Whether chunk k is run with a graph each time."""
        return self._whole or k in self._graphed

    def watched(self, k: int) -> bool:
        """Whether chunk k is watched when it is run again for its gradient."""
        return k in self._watched


class Watch(Seeing):
    """Sees what a chunk writes to that is neither its own nor known.

    It may write to buffers, the state and inputs, as the caller sees to it.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        # By storages' addresses: of an earlier storage, seen here, one may be used again.
        self._own: set[int] = set()
        self.knows(known)
        self._looks = True
        self._foreign: set[int] = set()
        self._written: list[tuple[weakref.ref[torch.UntypedStorage], str]] = []

    def knows(self, tensors: Iterable[Tensor]) -> None:
        """Let a chunk write to some more tensors."""
        self._own |= storages_among(tensors).keys()

    def unseen(self, call: Callable[..., object]) -> Callable[..., object]:
        """Return a function whose operations are not looked at: x_t may be made in a buffer."""

        def unseen(*given: object) -> object:
            self._looks = False
            try:
                return call(*given)
            finally:
                self._looks = True

        return unseen

    def perform(
        self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Perform an operation, and note what it writes to."""
        if not self._looks:
            return func(*args, **kwargs)
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
        given |= kwargs
        training = any(given.get(name) is True for name in _TRAINING)
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            alias = argument.alias_info
            writes = alias is not None and alias.is_write
            writes = writes or (training and argument.name in _WRITTEN)
            for tensor in tensors_in(value):
                self._read(tensor, str(func) if writes else None)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._own.update(storages_of(tensor).keys() - self._foreign)
        return result

    def _read(self, tensor: Tensor, written_by: str | None) -> None:
        for key, storage in storages_of(tensor).items():
            if key in self._own:
                continue
            self._foreign.add(key)
            if written_by is not None:
                what = f"a tensor of shape {tuple(tensor.shape)} (by {written_by})"
                self._written.append((weakref.ref(storage), what))

    def refuse_written(self, name: str, steps: tuple[int, int]) -> None:
        """Raise StateError if something else holds what was written to; its own has gone."""
        first, last = steps
        for storage, what in self._written:
            if storage() is not None:
                raise StateError(
                    f"{name} writes to {what} that is kept outside of it at steps {first} to "
                    f"{last - 1}, and would once more when it is run again; register it as a "
                    "buffer of a module, or return it in the state"
                )
