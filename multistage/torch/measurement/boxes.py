"""What one run of a stage saves, kept for its backward and counted."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from .exploring import tensors_of
from .sizes import Count, Sizes
from .traits import Traits


class Saved(Count):
    """What one run of a stage saves, kept for its backward and counted."""

    __slots__ = ("_boxes",)

    def __init__(self, number: int, sizes: Sizes) -> None:
        super().__init__(number, sizes)
        self._boxes: list[weakref.ref[_Box]] = []

    def kept(self, trait: Traits) -> AbstractContextManager[object]:
        """Return hooks for a stage to run under, if it runs under any."""
        if trait.unhooked:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unboxed)

    def _pack(self, tensor: Tensor) -> _Box:
        self.add(tensor)
        box = _Box(tensor)
        self._boxes.append(weakref.ref(box))
        return box

    @property
    def count(self) -> int:
        """Tensors that were saved."""
        return len(self._boxes)

    def tensors(self, output: object) -> list[Tensor]:
        """Return what is saved now, and the tensors of an output."""
        boxes = [box for reference in self._boxes if (box := reference()) is not None]
        return [*tensors_of(output), *(box.tensor for box in boxes if box.tensor is not None)]

    def close(self) -> None:
        """Keep nothing any more: an output that its own node keeps is a cycle nothing collects."""
        for reference in self._boxes:
            box = reference()
            if box is not None:
                box.tensor = None


class _Box:
    """Holds a tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


def _unboxed(box: _Box) -> Tensor:
    assert box.tensor is not None
    return box.tensor
