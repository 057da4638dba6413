"""Exact accounting of the memory that a computation allocates.

On the CPU every operation passes through a dispatch mode, which notes the
storages it makes and asks before each look whether they still live; what a
kernel allocates and frees inside itself is not seen.  On CUDA the caching
allocator's own statistics are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(TorchDispatchMode):
    """Counts the bytes of storages made inside it that are still alive, and their peak.

    Parameters
    ----------
    device : torch.device
        Where memory is counted.

    Examples
    --------
    >>> with Meter(torch.device("cpu")) as meter:
    ...     a = torch.ones(1000)
    ...     b = (a + 1).sum()
    >>> meter.live_bytes(), meter.peak_bytes
    (4004, 8004)
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._cuda = device.type == "cuda"
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0
        self._start = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of some tensors out of the count."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), 0

    def live_bytes(self) -> int:
        """Return the bytes alive now."""
        if self._cuda:
            return torch.cuda.memory_allocated(self._device) - self._start
        gone = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        for key in gone:
            del self._storages[key]
        return sum(nbytes for _, nbytes in self._storages.values())

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were alive since the start or `reset_peak`."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return self._peak

    def reset_peak(self) -> None:
        """Begin the peak anew, at what is alive now."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._peak = self.live_bytes()

    def __enter__(self) -> Meter:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
            return self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._cuda:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device == self._device:
                storage = leaf.untyped_storage()
                known = self._storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._peak = max(self._peak, self.live_bytes())
        return result
