"""Where a tensor's elements lie in its storage, and the same tensor on other memory.

Kernels choose their way, and so their rounding, by strides, by alignment and by
the lazy conjugate and negative bits.  Equal values are therefore not enough for
equal gradients: what comes back from a tier is laid out as what went there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def aligned_to(device: torch.device) -> int:
    """Return up to which alignment kernels of a device choose their way: cuBLAS to 256 bytes."""
    return 64 if device.type == "cpu" else 256


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its storage, its geometry and the conjugate and negative bits.

    Others are more than their bytes: subclasses (parameters among them), sparse,
    nested, MKL-DNN and quantised tensors, wrappers of `torch.func`, zeros without
    memory, and named ones.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_meta
        and not tensor.is_inference()
        and not any(getattr(tensor, "names", ()))  # gone since torch 2.13
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and tensor.data_ptr() % tensor.element_size() == 0
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a plain tensor reads its storage.

    Attributes
    ----------
    size, stride, offset
        As the tensor has them, in elements.
    dtype : torch.dtype
    conj, neg : bool
        The lazy bits.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, offset: int | None = None) -> Geometry:
        """Return that of a plain tensor, which begins at another element if one is given."""
        return cls(
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()) if offset is None else offset,
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def hull(self) -> tuple[int, int]:
        """The bytes of the storage from its first element to its last; not for empty ones."""
        reach = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        start = self.offset * self.dtype.itemsize
        return start, start + (reach + 1) * self.dtype.itemsize

    @property
    def distinct(self) -> torch.Size:
        """Its size without repetitions by a stride of 0."""
        return torch.Size(n if s else 1 for n, s in zip(self.size, self.stride, strict=True))

    @property
    def is_row(self) -> bool:
        """Whether its elements fill the hull, each once, in whatever order of axes."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    def on(self, root: Tensor, shift: int) -> Tensor:
        """Return the tensor on a row of bytes, with whose version counter it counts."""
        nbytes = self.dtype.itemsize
        typed = root[: len(root) - len(root) % nbytes].view(self.dtype)
        return self.read(typed, self.offset + shift // nbytes)

    def read(self, row: Tensor, offset: int | None = None) -> Tensor:
        """Return the tensor on a row of elements, from an element of the storage on.

        Parameters
        ----------
        offset : int, optional
            Of its first element in the storage; where the row begins if not given.
        """
        tensor = row.as_strided(self.size, self.stride, offset)
        if self.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.neg else tensor


def whole(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of a storage as one row."""
    blank = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return blank.set_(storage, 0, (storage.nbytes(),), (1,))
