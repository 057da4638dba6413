"""Checksums of tensors: whether a run again gave the bits that the first one gave.

In host memory a checksum of the bytes (CRC-32), about 3 GB/s.  On a device the
sum of the bits as integers, which the host does not wait for: it is compared
there, and the verdict read once, at the end.
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .meter import parts_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return a number that other bits would change; tensors elsewhere than on the CPU count as 0.

    Examples
    --------
    >>> checksum([torch.zeros(3)]) == checksum([torch.zeros(3)])
    True
    >>> checksum([torch.zeros(3)]) == checksum([torch.tensor([0.0, -0.0, 0.0])])
    False
    """
    found = 0
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            tensor = tensor.detach()
            if tensor.dtype not in _PLAIN:
                tensor = _bits(tensor)
            if tensor.numel():
                found = zlib.crc32(tensor.contiguous().numpy().data, found)
    return found


def digest(tensor: Tensor) -> int | None:
    """Return a checksum of a tensor's elements in host memory (XXH3); None if they lie elsewhere.

    About 10 GB/s, and more what lies in a cache.

    Examples
    --------
    >>> digest(torch.eye(3)) == digest(torch.eye(3).T)
    True
    >>> digest(torch.zeros(3)) == digest(torch.ones(3))
    False
    >>> digest(torch.eye(3).to_sparse()) == digest(torch.eye(3).to_sparse() * 2)
    False
    """
    if type(tensor) not in _IN_MEMORY or not tensor.is_cpu or tensor.is_nested:
        return None
    if tensor.layout is not torch.strided:
        return hash(tuple([digest(part) for part in parts_of(tensor)]))
    if not tensor.untyped_storage().nbytes():  # of sharded parameters memory comes and goes
        return 0 if not tensor.numel() else None
    if tensor.is_contiguous():
        return xxhash.xxh3_64_intdigest(_memory(tensor))
    found = xxhash.xxh3_64()
    for piece in _pieces(_ordered(tensor.detach())):
        found.update(_memory(piece))
    return found.intdigest()


_IN_MEMORY = {Tensor, nn.Parameter, nn.Buffer}
_PIECE_BYTES = 1 << 20  # of a tensor with gaps, copied at a time
_SMALL_BYTES = 1 << 14  # of which a checksum takes no longer than to find that it is known


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_byte]:
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


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as integers, in one row."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])


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
        self._host = array("L", bytes(array("L").itemsize * n_steps))
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
        """Return the sum of all bits on the device: of a chunk's many outputs in a few kernels."""
        assert self._device is not None
        rows: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device == self._device.device and tensor.layout is torch.strided:
                row = _bits(tensor)
                rows.setdefault(row.dtype, []).append(row)
        total: Tensor | int = 0
        for alike in rows.values():
            total = total + torch.cat(alike).sum(dtype=torch.int64)
        return total
