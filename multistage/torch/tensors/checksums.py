"""Checksums of tensors: whether a run again gave the bits that the first one gave.

In host memory a checksum of the bytes (CRC-32), about 3 GB/s.  On a device the
sum of the bits as integers, which the host does not wait for: it is compared
there, and the verdict read once, at the end.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

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
            elif not tensor.is_contiguous():
                tensor = tensor.contiguous()
            if tensor.numel():
                found = zlib.crc32(tensor.numpy().data, found)
    return found


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
        total: Tensor | int = 0
        for tensor in tensors:
            away = self._device is not None and tensor.device == self._device.device
            if away and tensor.layout is torch.strided:
                total = total + _bits(tensor).sum(dtype=torch.int64)
        return total
