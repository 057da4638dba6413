"""Checksums: equal where the bits are equal, in a few bytes whatever the size.

Two runs of a model are compared by what they leave behind, and a run again with the first
one.  Keeping the tensors of one until the other has them too would take their memory once
more; 64 bits do not.  In host memory they are XXH3 of the bytes.  On a device they are
sums of the bits as integers.  Those of chunks that run again are not waited for: they are
compared on the device, and the verdict is read once, at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .meter import parts_of

Memory: TypeAlias = ctypes.Array[ctypes.c_byte]
_IN_MEMORY = {Tensor, nn.Parameter, nn.Buffer}
_PIECE_BYTES = 1 << 20  # of a tensor with gaps, copied at a time
_SMALL_BYTES = 1 << 14  # of which a checksum takes no longer than to find that it is known
# Odd, with bits all over: 2^64 / golden ratio, as Fibonacci hashing has it (Knuth 6.4).
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_WORDS = 1 << 20  # at a time: twice as many are memory beside the tensor


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a number that other bits would change; tensors elsewhere than on the CPU count as 0.

    Examples
    --------
    >>> checksum([torch.zeros(3)]) == checksum([torch.zeros(3)])
    True
    >>> checksum([torch.zeros(3)]) == checksum([torch.tensor([0.0, -0.0, 0.0])])
    False
    """
    found = array("Q")
    for tensor in tensors:
        memory = None if tensor.is_conj() or tensor.is_neg() else whole_memory(tensor)
        if memory is not None:
            found.append(xxhash.xxh3_64_intdigest(memory))
        elif tensor.is_cpu and tensor.layout is torch.strided:
            found.append(digest(_in_order(tensor.detach()).as_subclass(Tensor)) or 0)
    return xxhash.xxh3_64_intdigest(found)


def _in_order(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements in C order, and no lazy bits."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def digest(tensor: Tensor, memory: Memory | None = None) -> int | None:
    """Return a checksum of a tensor's elements in host memory (XXH3); None if they lie elsewhere.

    About 10 GB/s, and more what lies in a cache.  `memory` is its `whole_memory`, if known.

    Examples
    --------
    >>> digest(torch.eye(3)) == digest(torch.eye(3).T)
    True
    >>> digest(torch.zeros(3)) == digest(torch.ones(3))
    False
    >>> digest(torch.eye(3).to_sparse()) == digest(torch.eye(3).to_sparse() * 2)
    False
    """
    memory = memory or whole_memory(tensor)
    if memory is not None:
        return xxhash.xxh3_64_intdigest(memory)
    if type(tensor) not in _IN_MEMORY or not tensor.is_cpu or tensor.is_nested:
        return None
    if tensor.layout is not torch.strided:
        return hash(tuple([digest(part) for part in parts_of(tensor)]))
    if not tensor.untyped_storage().nbytes():  # of sharded parameters memory comes and goes
        return None
    found = xxhash.xxh3_64()
    for piece in _pieces(_ordered(tensor.detach())):
        found.update(_memory(piece))
    return found.intdigest()


def whole_memory(tensor: Tensor) -> Memory | None:
    """Return the host memory of a contiguous tensor; None if it has none, or has gaps."""
    if type(tensor) not in _IN_MEMORY or not tensor.is_cpu or tensor.is_nested:
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    there = not tensor.numel() or tensor.untyped_storage().nbytes()
    return _memory(tensor) if there else None


def _memory(tensor: Tensor) -> Memory:
    return (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())


def _ordered(tensor: Tensor) -> Tensor:
    """Return the elements in the order of memory, those of an expanded tensor once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # expanded
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor piece by piece, copied where it has gaps."""
    if tensor.is_contiguous() or tensor.nbytes <= _PIECE_BYTES:
        yield tensor.contiguous()
        return
    while tensor.shape[0] == 1:
        tensor = tensor[0]
    rows = max(1, tensor.shape[0] * _PIECE_BYTES // tensor.nbytes)
    for piece in tensor.split(rows):
        yield from _pieces(piece)


class Digests:
    """Checksums of the tensors that one run saves; of one that is saved twice, taken once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[object, tuple[StorageWeakRef, int, int | None]] = {}

    def of(self, tensor: Tensor) -> int | None:
        """Return a tensor's checksum; see `digest`."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return digest(tensor)
        if tensor.nbytes <= _SMALL_BYTES or not tensor.is_cpu:
            return digest(tensor)
        storage, version = tensor.untyped_storage(), tensor._version
        key = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        known = self._known.get(key)
        # A weak reference keeps the address of a storage from being used again.
        if known is None or known[0].expired() or known[1] != version:
            known = self._known[key] = StorageWeakRef(storage), version, digest(tensor)
        return known[2]


class Checksums:
    """Checksums of the results of all chunks of a first run.

    Parameters
    ----------
    n_steps : int
        Chunks.
    device : torch.device
        Where most tensors lie.
    """

    def __init__(self, n_steps: int, device: torch.device) -> None:
        self._host = array("Q", bytes(8 * n_steps))
        self._device = None
        self._first_bad: Tensor | None = None
        if device.type not in ("cpu", "meta"):
            self._device = torch.zeros(n_steps, dtype=torch.int64, device=device)
            self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def note(self, k: int, tensors: Sequence[Tensor]) -> None:
        """Remember the results of chunk k."""
        self._host[k] = checksum(tensors)
        if self._device is not None:
            self._device[k] = self._sum(tensors)

    def differs(self, k: int, tensors: Sequence[Tensor]) -> bool:
        """Whether chunk k gave other results now, as far as is known without waiting."""
        if self._device is not None:
            assert self._first_bad is not None
            same = self._device[k] == self._sum(tensors)
            # Chunks come last first: the last verdict is that of the earliest step.
            self._first_bad = torch.where(same, self._first_bad, k)
        return self._host[k] != checksum(tensors)

    def bad(self) -> int | None:
        """Return the first chunk that was found to differ on the device; waits for it."""
        if self._first_bad is None:
            return None
        first = int(self._first_bad)
        return None if first < 0 else first

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor | int:
        """Return a sum of all bits on the device: of a chunk's many outputs in a few kernels."""
        assert self._device is not None
        device = self._device.device
        rows = [_bytes(t) for t in tensors if t.device == device and t.layout is torch.strided]
        return _sum_of(torch.cat(rows)) if rows else 0


def fingerprint(value: object) -> object:
    """Return something small and hashable that is equal for values of equal bits.

    Tensors by shape, dtype, device and a checksum; numbers, strings and tuples by their
    content; other objects by their class.
    """
    match value:
        case Tensor():
            return _of_tensor(value)
        case bool() | int() | str() | bytes() | None:
            return value
        case float() | complex():
            return repr(value)  # one nan is like another
        case tuple():
            return tuple(map(fingerprint, value))
        case np.ndarray() | np.generic():
            return value.shape, hash(value.tobytes())
    return type(value).__qualname__


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and bits."""
    return fingerprint(one) == fingerprint(other)


def _of_tensor(tensor: Tensor) -> object:
    kind = tuple(tensor.shape), tensor.dtype, tensor.device
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return kind
    try:
        if tensor.is_nested:
            tensor = tensor.values()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        return *kind, _checksum(tensor)
    except (NotImplementedError, RuntimeError):  # a layout of which nothing else is known
        return kind


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of the elements in C order, wherever they lie.

    In host memory XXH3; else a sum of 64-bit words, each with an odd weight of its place.
    """
    with contextlib.suppress(RuntimeError):  # wrapped by torch.func
        found = digest(_in_order(tensor))
        if found is not None:
            return found
    return int(_sum_of(_bytes(tensor)))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor in C order, as one row of bytes."""
    return _in_order(tensor.detach()).reshape(-1).view(torch.uint8)


def _sum_of(row: Tensor) -> Tensor | int:
    """Return a sum of the 64-bit words of some bytes on a device, which is not waited for."""
    total: Tensor | int = 0
    if row.numel() % 8 or row.storage_offset() % 8:  # in memory of their own words are aligned
        row = nn.functional.pad(row, (0, -row.numel() % 8))
    words = row.view(torch.int64)
    if words.numel():
        size = min(_WORDS, words.numel())
        weights = torch.arange(size, device=row.device).mul_(_FACTOR).bitwise_or_(1)
        for piece in words.split(size):
            total = total * 0x100000001B3 + (piece * weights[: piece.numel()]).sum()  # FNV's prime
    return total
