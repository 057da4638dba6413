"""Where a tensor's elements lie in its storage, and the same tensor on other memory.

Kernels choose their way, and so their rounding, by strides, by alignment and by
the lazy conjugate and negative bits.  Equal values are therefore not enough for
equal gradients: what comes back from a tier is laid out as what went there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .streams import Home

ALIGN_BYTES = 256  # cuBLAS chooses kernels by alignment up to this
_WHOLE = 8  # a view with gaps comes back in its whole storage, if that is at most so much more

# Types whose copies are copies of bits, by their size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


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
        and tensor.element_size() in _BITS
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
    def is_dense(self) -> bool:
        """Whether its elements fill the hull, repetitions by a stride of 0 aside."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.distinct, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def is_row(self) -> bool:
        """Whether its elements fill the hull, each once, in whatever order of axes."""
        return self.is_dense and self.distinct == self.size

    @property
    def goes_as_hull(self) -> bool:
        """Whether the hull is what travels; else the elements alone, without the gaps."""
        start, stop = self.hull
        return self.is_dense or stop - start <= prod(self.distinct) * self.dtype.itemsize

    @property
    def elements(self) -> object:
        """What distinguishes its elements from others in the same storage.

        Tensors with equal answers read the same bytes and no other ones, whatever
        they make of them.
        """
        if self.is_dense:
            return self.hull
        return self.hull, self.distinct, self.stride, self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        if 0 in self.size:
            return 0
        start, stop = self.hull
        return stop - start if self.goes_as_hull else prod(self.distinct) * self.dtype.itemsize

    def line(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the bytes that travel as one row, on the storage itself where possible."""
        start, stop = self.hull
        if self.goes_as_hull:
            return _bytes(storage, start, stop)
        apart = self._apart(whole(storage), self.offset)
        line = torch.empty(apart.shape, dtype=apart.dtype, device=apart.device)
        return line.copy_(apart).flatten().view(torch.uint8)

    def fill(self, root: Tensor, shift: int, line: Tensor) -> None:
        """Put such bytes where they belong in a row of bytes; no version counter sees it.

        Parameters
        ----------
        root : Tensor
        shift : int
            Where the first byte of the storage would be in it; may be negative.
        line : Tensor
        """
        root = whole(root.untyped_storage())
        start, stop = self.hull
        if self.goes_as_hull:
            root[start + shift : stop + shift].copy_(line)
        else:
            place = self._apart(root, self.offset + shift // self.dtype.itemsize)
            place.copy_(line.view(place.dtype).view(place.shape))

    def _apart(self, root: Tensor, offset: int) -> Tensor:
        """Return its distinct elements on a row of bytes, as mere bits."""
        bits = _typed(root, _BITS[self.dtype.itemsize])
        return bits.as_strided(self.distinct, self.stride, offset)

    def on(self, root: Tensor, shift: int) -> Tensor:
        """Return the tensor on a row of bytes, with whose version counter it counts."""
        return self.read(_typed(root, self.dtype), self.offset + shift // self.dtype.itemsize)

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
    return _bytes(storage, 0, storage.nbytes())


def _bytes(storage: torch.UntypedStorage, start: int, stop: int) -> Tensor:
    blank = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return blank.set_(storage, start, (stop - start,), (1,))


def _typed(root: Tensor, dtype: torch.dtype) -> Tensor:
    return root[: len(root) - len(root) % dtype.itemsize].view(dtype)


class Place:
    """A part of a storage that was given away, and the memory it comes back to.

    Whatever reads that storage comes back to the same memory, while anything
    that did is alive.

    Parameters
    ----------
    storage : UntypedStorage
    where : tuple of int
        First byte and end of the part; see `extent`.
    """

    def __init__(self, storage: torch.UntypedStorage, where: tuple[int, int]) -> None:
        self._start, self._stop = where
        self._align = (storage.data_ptr() + self._start) % ALIGN_BYTES
        self._device = storage.device
        self._weak: StorageWeakRef | None = None
        self._filled: dict[int, Home] = {}

    def root(self) -> tuple[Tensor, int]:
        """Return its memory, and where the first byte of the storage would be in it."""
        storage = None
        if self._weak is not None and not self._probe._version:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is None:
            root = self._new()
        else:
            root = self._probe.detach()
            root.data = whole(storage)
            self._home.hand(root)
        return root, (self._align - root.data_ptr()) % ALIGN_BYTES - self._start

    def _new(self) -> Tensor:
        nbytes = self._stop - self._start + ALIGN_BYTES
        root = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        # Counts with it without keeping its memory: who writes to what came back is found out.
        self._probe = root.detach()
        self._probe.data = root.new_empty(0)
        self._weak = StorageWeakRef(root.untyped_storage())
        self._home = Home(self._device)
        self._filled = {}
        return root

    def has(self, number: int, root: Tensor) -> bool:
        """Whether what has this number has come back, for the current stream to use."""
        home = self._filled.get(number)
        if home is not None:
            home.hand(root)
        return home is not None

    def filled(self, number: int) -> None:
        """Note that what has this number has come back, on the current stream."""
        self._filled[number] = Home(self._device)


def extent(storage: torch.UntypedStorage, geometry: Geometry) -> tuple[int, int]:
    """Return which bytes of its storage a tensor comes back with."""
    available = storage.nbytes()
    # Neighbours in one storage, such as queries, keys and values, share their gaps.
    if not geometry.is_dense and available <= _WHOLE * geometry.nbytes:
        return 0, available
    return geometry.hull
