"""States made of PyTorch tensors, for the executor and the stores.

A state is kept by reference: steps return new tensors and leave their inputs
alone.  A write to one is detected by autograd's version
counters, each time a state is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...errors import StateError
from ...states.layout import Layout
from ...states.slots import Kept, Slots
from .geometry import Geometry, aligned_to

Adjoint = TypeVar("Adjoint")
Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
# The bytes of a tensor as a store has them: on a device as a tensor.
Line: TypeAlias = Bytes | Tensor


Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tensor reads its memory, and how that is aligned, without its values.

    Attributes
    ----------
    where : Geometry
    device : torch.device
    align_bytes : int
        Of its first element, modulo 64 in host memory.
    """

    where: Geometry
    device: torch.device
    align_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Return that of a tensor."""
        align_bytes = tensor.data_ptr() % aligned_to(tensor.device)
        return cls(Geometry.of(tensor, offset=0), tensor.device, align_bytes)

    def on(self, row: Tensor) -> Tensor:
        """Return the tensor whose elements lie in a row: on that memory where it serves."""
        where, most = self.where, aligned_to(self.device)
        row = row.view(where.dtype)
        if row.numel() and not where.is_row:
            # A tensor that repeats elements, by a stride of 0, is written to once.
            memory = self._room(where.hull[1] - where.hull[0])
            values = row.view(where.size)[tuple([slice(n) for n in where.distinct])]
            memory.as_strided(where.distinct, where.stride).copy_(values)
        elif row.data_ptr() % most == self.align_bytes:
            memory = row
        else:
            memory = self._room(row.nbytes).copy_(row)
        return where.read(memory)

    def _room(self, nbytes: int) -> Tensor:
        """Return a new row of elements with the alignment of the tensor."""
        dtype, most = self.where.dtype, aligned_to(self.device)
        blank = torch.empty(nbytes + most, dtype=torch.uint8, device=self.device)
        start = (self.align_bytes - blank.data_ptr()) % most
        start -= start % dtype.itemsize
        return blank[start : start + nbytes].view(dtype)


def row_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as one row, on its memory where they fill a stretch of it."""
    tensor = tensor.detach()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)  # the numbers in memory
    if tensor.is_conj():
        tensor = tensor.conj()
    if not Geometry.of(tensor).is_row:
        tensor = tensor.contiguous()
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the strides and the alignment of a tensor, without a graph."""
    copy = Shape.of(tensor).on(row_of(tensor).clone())
    if copy.is_conj() or copy.is_neg():
        return copy
    blank = torch.empty(0, dtype=copy.dtype, device=copy.device)  # autograd takes it for no view
    return blank.set_(copy.untyped_storage(), copy.storage_offset(), copy.size(), copy.stride())


@dataclass(frozen=True, slots=True)
class Folded:
    """A view that is kept as its elements alone: what it is a view of goes, gaps take nothing.

    Attributes
    ----------
    row : Tensor
        Its elements.
    shape : Shape
    """

    row: Tensor
    shape: Shape

    @classmethod
    def of(cls, tensor: Tensor) -> Folded:
        """Return the elements of a tensor on memory of their own."""
        row = row_of(tensor)
        own = row.data_ptr() != tensor.data_ptr()
        return cls(row if own else row.clone(), Shape.of(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.row.nbytes


Part: TypeAlias = Tensor | Folded  # of a state that is kept


class TensorState:
    """Detached tensors, and the versions they had."""

    __slots__ = ("parts", "versions")

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.versions = [t._version if isinstance(t, Tensor) else 0 for t in parts]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, on new memory where they are folded."""
        return tuple([t if isinstance(t, Tensor) else t.shape.on(t.row) for t in self.parts])

    def checked(self) -> tuple[Tensor, ...]:
        """Return the tensors.  Raises StateError if one was written to."""
        for part, version in zip(self.parts, self.versions, strict=True):
            if isinstance(part, Tensor) and part._version != version:
                raise StateError(
                    "a state was modified by an inplace operation after the step that made it: "
                    "by the cell (which must return new tensors), or by code that holds the "
                    "initial state or an output"
                )
        return self.tensors


def kind_of(tensor: Tensor) -> Kind:
    """Return what a tensor is but for its values."""
    return tensor.shape, tensor.dtype, tensor.device


def kind_of_part(part: Part) -> Kind:
    """Return what a part of a state is but for its values."""
    if isinstance(part, Tensor):
        return kind_of(part)
    return part.shape.where.size, part.shape.where.dtype, part.shape.device


def said(kind: Kind) -> str:
    """Return a kind in words.

    Examples
    --------
    >>> said(kind_of(torch.zeros(2, 3)))
    '(2, 3) float32 on cpu'
    """
    size, dtype, device = kind
    return f"{tuple(size)} {str(dtype).removeprefix('torch.')} on {device}"


class TensorLayout:
    """Shapes, dtypes and devices of states: all share them, or each has its own.

    Parameters
    ----------
    tensors : sequence of Tensor
        Of a state.
    names : sequence of str
        What they are called in messages.
    varied : bool
        Whether states differ from step to step.  Those of one step are alike, and go to stores
        by way of host memory.

    Attributes
    ----------
    nbytes : int
        Bytes of that state, each tensor rounded up to a multiple of 64.
    record : Layout
        What a store is opened for: each tensor's bytes as one array.
    """

    def __init__(
        self, tensors: Sequence[Tensor], names: Sequence[str], *, varied: bool = False
    ) -> None:
        self._kinds: list[Kind] = [kind_of(t) for t in tensors]
        self._names, self._varied = list(names), varied
        self._at: dict[int, list[Kind]] = {}  # of varied states, by step
        sizes = [t.numel() * t.element_size() for t in tensors]
        cuda = [t.device for t in tensors if t.device.type == "cuda"]
        self._through = cuda[0] if cuda else None  # where a store takes states from
        self.record = Layout.of(tuple(np.broadcast_to(np.uint8(0), (n,)) for n in sizes))
        self.nbytes = self.record.nbytes

    def arrays(self, state: TensorState, where: int | str = "the state") -> list[Part]:
        """Return the tensors of a state.  Raises StateError if they are of another layout."""
        kinds = [kind_of_part(t) for t in state.parts]
        if self._varied:
            if isinstance(where, int) and kinds != (known := self._at.setdefault(where, kinds)):
                first, last = (", ".join(map(said, each)) for each in (known, kinds))
                raise StateError(
                    f"state {where} of the chunks was {first} when the steps before it first ran, "
                    f"and is {last} now; a step must do the same each time it is run"
                )
        elif kinds != self._kinds:
            where = f"state {where}" if isinstance(where, int) else where
            for name, was, now in zip(self._names, self._kinds, kinds, strict=False):
                if was != now:
                    raise StateError(
                        f"{where} changed {name} from {said(was)} to {said(now)}; a cell must "
                        "return a state like the one it got, or say unequal=True"
                    )
            raise StateError(f"{where} has {len(kinds)} tensors in place of {len(self._kinds)}")
        return list(state.parts)

    def at(self, step: int) -> TensorLayout:
        """Return this: what is packed says itself of what shape it is."""
        return self

    def pack(self, tensors: Sequence[Part]) -> tuple[list[Line], list[Shape]]:
        """Return the bytes of each tensor, and the shapes `unpack` needs."""
        flat: list[Line] = []
        shapes = []
        for part in tensors:
            tensor = part.row if isinstance(part, Folded) else part
            shapes.append(part.shape if isinstance(part, Folded) else Shape.of(part))
            line = row_of(tensor).view(torch.uint8)
            if self._through is not None:  # such as states of generators, which lie in host memory
                # From plain memory: the bytes are taken at once, and nothing waits for the device.
                line = line.to(self._through, non_blocking=True)
            if self._varied:
                line = line.cpu()
            flat.append(line.numpy() if line.device.type == "cpu" else line)
        return flat, shapes

    def unpack(self, arrays: Sequence[Line], packing: Sequence[Shape]) -> list[Tensor]:
        """Return the tensors that `pack` was given, on memory of the store where it serves."""
        tensors = []
        for array, shape in zip(arrays, packing, strict=True):
            line = array if isinstance(array, Tensor) else _from_numpy(array)
            if line.device != shape.device:
                line = line.to(shape.device)
            tensors.append(shape.on(line))
        return tensors

    def same_as(self, other: TensorLayout) -> bool:
        """Whether both describe the same states: if they vary, each sweep has its own."""
        return self is other if self._varied else self._kinds == other._kinds


def _from_numpy(array: Bytes) -> Tensor:
    """Return a tensor on read-only memory of a store, which only versions guard from now on."""
    if not len(array):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # By address: torch takes read-only arrays with a warning only.
    memory = (ctypes.c_char * len(array)).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)


class TensorSlots(Slots[TensorState, Part]):
    """Fast slots: references, and copies of views that would keep more alive than themselves."""

    shared = True

    def __init__(self, layout: TensorLayout) -> None:
        self._layout = layout

    def keep(self, state: TensorState, where: int | str) -> Kept:
        parts = self._layout.arrays(state, where)
        if any(isinstance(t, Tensor) and _keeps_more(t) for t in parts):
            state.checked()
            parts = [Folded.of(t) if isinstance(t, Tensor) and _keeps_more(t) else t for t in parts]
            state = TensorState(parts)
        return Kept(state, parts)

    def adopt(self, arrays: list[Part], step: int) -> Kept:
        return Kept(TensorState(arrays), arrays)

    def load(self, kept: Kept, live: object) -> TensorState:
        assert isinstance(kept.state, TensorState)
        return kept.state

    def check(self, live: TensorState, where: int | str) -> None:
        self._layout.arrays(live, where)

    def used_up(self, live: object) -> None:
        """Return what is live in place of a state that no step starts from any more."""
        return


def _keeps_more(tensor: Tensor) -> bool:
    """Whether a tensor keeps more memory alive than its elements take."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


class TensorStates:
    """States of tensors, for an executor.

    Parameters
    ----------
    names : sequence of str
        What the tensors are called in messages.
    varied : bool
        Whether states differ from step to step.
    """

    def __init__(self, names: Sequence[str], *, varied: bool = False) -> None:
        self._names, self._varied = names, varied

    def layout(self, state: TensorState) -> TensorLayout:
        return TensorLayout(state.tensors, self._names, varied=self._varied)

    def slots(self, layout: TensorLayout) -> TensorSlots:
        return TensorSlots(layout)
