"""States made of PyTorch tensors, for the executor and the stores.

A state is kept by reference: steps return new tensors and leave their inputs
alone.  A write to one is detected by autograd's version
counters, each time a state is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...errors import StateError
from ...states.layout import Layout
from ...states.slots import Kept

Adjoint = TypeVar("Adjoint")
Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
# The bytes of a tensor as a store has them: on a device as a tensor.
Line: TypeAlias = Bytes | Tensor


class TensorState:
    """Detached tensors, and the versions they had.

    Parameters
    ----------
    tensors : sequence of Tensor
    """

    __slots__ = ("tensors", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.versions = [t._version for t in tensors]

    def checked(self) -> tuple[Tensor, ...]:
        """Return the tensors.  Raises StateError if one was written to."""
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise StateError(
                    "a state was modified by an inplace operation after the step that made it: "
                    "by the cell (which must return new tensors), or by code that holds the "
                    "initial state or an output"
                )
        return self.tensors


Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


def kind_of(tensor: Tensor) -> Kind:
    """Return what a tensor is but for its values."""
    return tensor.shape, tensor.dtype, tensor.device


def said(kind: Kind) -> str:
    """Return a kind in words.

    Examples
    --------
    >>> said(kind_of(torch.zeros(2, 3)))
    '(2, 3) float32 on cpu'
    """
    size, dtype, device = kind
    return f"{tuple(size)} {str(dtype).removeprefix('torch.')} on {device}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a tensor that its bytes do not contain."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class TensorLayout:
    """Shapes, dtypes and devices that all states share.

    Attributes
    ----------
    nbytes : int
        Bytes of one state, each tensor rounded up to a multiple of 64.
    record : Layout
        What a store is opened for: each tensor's bytes as one array.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        self._kinds: list[Kind] = [kind_of(t) for t in tensors]
        self._names = list(names)
        sizes = [t.numel() * t.element_size() for t in tensors]
        cuda = [t.device for t in tensors if t.device.type == "cuda"]
        self._through = cuda[0] if cuda else None  # where a store takes states from
        self.record = Layout.of(tuple(np.broadcast_to(np.uint8(0), (n,)) for n in sizes))
        self.nbytes = self.record.nbytes

    def arrays(self, state: TensorState, where: int | str = "the state") -> list[Tensor]:
        """Return the tensors of a state.  Raises StateError if they are of another layout."""
        kinds = [kind_of(t) for t in state.tensors]
        if kinds != self._kinds:
            where = f"state {where}" if isinstance(where, int) else where
            for name, was, now in zip(self._names, self._kinds, kinds, strict=False):
                if was != now:
                    raise StateError(
                        f"{where} changed {name} from {said(was)} to {said(now)}; a cell must "
                        "return a state like the one it got, or say unequal=True"
                    )
            raise StateError(f"{where} has {len(kinds)} tensors in place of {len(self._kinds)}")
        return list(state.tensors)

    def pack(self, tensors: Sequence[Tensor]) -> tuple[list[Line], list[Shape]]:
        """Return the bytes of each tensor, and the shapes `unpack` needs."""
        flat: list[Line] = []
        shapes = []
        for tensor in tensors:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            if not _is_dense(tensor):
                tensor = tensor.contiguous()
            shapes.append(Shape(tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
            line = _line(tensor)
            if self._through is not None:  # such as states of generators, which lie in host memory
                # From plain memory: the bytes are taken at once, and nothing waits for the device.
                line = line.to(self._through, non_blocking=True)
            flat.append(line.numpy() if line.device.type == "cpu" else line)
        return flat, shapes

    def unpack(self, arrays: Sequence[Line], packing: Sequence[Shape]) -> list[Tensor]:
        """Return the tensors that `pack` was given, on memory of the store."""
        tensors = []
        for array, shape in zip(arrays, packing, strict=True):
            line = array if isinstance(array, Tensor) else _from_numpy(array)
            if line.device != shape.device:
                line = line.to(shape.device)
            tensors.append(line.view(shape.dtype).as_strided(shape.size, shape.stride))
        return tensors

    def same_as(self, other: TensorLayout) -> bool:
        """Whether both describe the same states."""
        return self._kinds == other._kinds


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in whatever order of axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _line(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as one row."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


def _from_numpy(array: Bytes) -> Tensor:
    """Return a tensor on read-only memory of a store, which only versions guard from now on."""
    if not len(array):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # By address: torch takes read-only arrays with a warning only.
    memory = (ctypes.c_char * len(array)).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=torch.uint8)


class _Arrays(Protocol):
    def arrays(self, state: TensorState, where: int | str = ...) -> list[Tensor]: ...


class TensorSlots:
    """Fast slots: references, and copies of views that would keep more alive than themselves."""

    shared = True

    def __init__(self, layout: _Arrays) -> None:
        self._layout = layout

    def keep(self, state: TensorState, where: int | str) -> Kept:
        tensors = self._layout.arrays(state, where)
        if any(t.untyped_storage().nbytes() > t.numel() * t.element_size() for t in tensors):
            tensors = [t.clone() for t in state.checked()]
            state = TensorState(tensors)
        return Kept(state, tensors)

    def adopt(self, arrays: list[Tensor], step: int) -> Kept:
        return Kept(TensorState(arrays), arrays)

    def load(self, kept: Kept, live: object) -> TensorState:
        assert isinstance(kept.state, TensorState)
        return kept.state

    def trim(self) -> None:
        return

    def check(self, live: TensorState, where: int | str) -> None:
        self._layout.arrays(live, where)

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        return Kept(tape, ())

    def adopt_adjoint(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint

    def apart(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint

    def release(self, kept: Kept) -> None:
        """Nothing: references keep a tensor alive."""

    def release_all(self) -> None:
        """Nothing, as `release`."""


class TensorStates:
    """States of tensors, for an executor.

    Parameters
    ----------
    names : sequence of str
        What the tensors are called in messages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def layout(self, state: TensorState) -> TensorLayout:
        return TensorLayout(state.tensors, self._names)

    def slots(self, layout: TensorLayout) -> TensorSlots:
        return TensorSlots(layout)
