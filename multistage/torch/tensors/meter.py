"""Exact accounting of the memory that a computation allocates.

On the CPU every operation passes through a dispatch mode, which notes the
storages it makes; a weak reference shows when each is freed.  What a kernel
allocates and frees inside itself is not seen.  On CUDA the caching allocator's
own statistics are read.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from ...errors import ArgumentError
from ...support.free_memory import default_budget_bytes
from .sums import differentiate

# Operators whose results have a size, or are a number, that the values of tensors decide.
_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_DEVICE_SHARE = 0.9  # of the free memory of a CUDA device, where no limit is given
_BLOCK = 512  # bytes that CUDA's allocator rounds up to


class Seeing(TorchDispatchMode):
    """Sees the operations that are performed inside it, also those of compiled code.

    Raises ArgumentError where an operator runs functions of its own, as `torch.cond` does.
    """

    supports_higher_order_operators = True  # so that they come here

    def __init__(self) -> None:
        super().__init__()
        self._eager: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> Self:
        skips = not self.ignore_compile_internals()
        self._eager.append(_without_compiler() if skips else contextlib.nullcontext())
        self._eager[-1].__enter__()
        # Not by `super`, whose flags are one for all threads: two at a time leave them set.
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()
        self._eager.pop().__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object] | HigherOrderOperator,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if isinstance(func, HigherOrderOperator):
            raise ArgumentError(
                f"memory is not counted inside of torch's operator {func.name()!r}; choose by "
                "torch.where, or write the loop in Python"
            )
        return self.perform(func, args, kwargs or {})

    def perform(
        self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        """Perform an operation, and see it."""
        result = func(*args, **kwargs)
        self.see(func, args, result)
        return result

    def see(self, func: OpOverload[..., object], args: Sequence[object], result: object) -> None:
        """Take note of an operation that was performed."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Return a context in which compiled functions run as they were written.

    TorchDynamo skips what it meets below a dispatch mode, now and at every later call.
    """
    compiles = torch._C._dynamo.eval_frame.get_eval_frame_callback() not in {None, False}
    if "torch._dynamo" not in sys.modules or compiles:  # then a stance is refused
        yield
        return
    _EAGER.begin()
    try:
        yield
    finally:
        _EAGER.end()


class _Eager:
    """The stance of TorchDynamo, one for all threads, while some of them see operations."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._stance: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._stance = torch.compiler.set_stance("force_eager")
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count = max(0, self._count - 1)
            if not self._count:
                self._stance.__exit__(None, None, None)
                self._stance = contextlib.nullcontext()

    def begin_anew(self) -> None:
        """Begin anew in a child process, where no other thread goes on."""
        self._lock, self._count = threading.Lock(), min(self._count, 1)
        self.end()


_EAGER = _Eager()
os.register_at_fork(after_in_child=_EAGER.begin_anew)


class Meter(Seeing):
    """Counts the bytes of storages made inside it that are still alive, and their peak.

    Parameters
    ----------
    device : torch.device
        Where memory is counted.
    notes : bool
        Whether to note the operations and their shapes too.
    by_storages : bool
        Whether to count storages on a CUDA device too, whose allocator else counts whatever
        it has given out: workspaces of libraries, and what another stream may still use.

    Examples
    --------
    >>> with Meter(torch.device("cpu")) as meter:
    ...     a = torch.ones(1000)
    ...     b = (a + 1).sum()
    >>> meter.live_bytes(), meter.peak_bytes
    (4004, 8004)
    """

    def __init__(
        self, device: torch.device, *, notes: bool = False, by_storages: bool = False
    ) -> None:
        super().__init__()
        self._operations: list[object] | None = [] if notes else None
        self._device = device
        self._cuda = device.type == "cuda" and not by_storages
        self._block = _BLOCK if device.type == "cuda" else 1
        self._references: dict[int, _Reference] = {}  # by the storage's address
        self.sizes_vary = False  # whether an operation's depend on the values of tensors
        self._live = 0
        self._peak = 0
        self._start = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of some tensors out of the count, but for those it has seen made."""
        for tensor in tensors:
            self._note(tensor, counted=False)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Leave the storages of some tensors out of the count from now on."""
        self.ignore(tensors)
        for key in storages_among(tensors):
            reference = self._references[key]
            self._live -= reference.nbytes
            reference.nbytes = 0

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        for key, storage in storages_of(tensor).items():
            known = self._references.get(key)
            if known is None or known() is None:
                nbytes = -(-storage.nbytes() // self._block) * self._block if counted else 0
                reference = self._references[key] = _Reference(storage, self._freed)
                reference.key, reference.nbytes = key, nbytes
                self._live += nbytes

    def _freed(self, reference: _Reference) -> None:
        self._live -= reference.nbytes
        if self._references.get(reference.key) is reference:
            del self._references[reference.key]

    def operations(self) -> object:
        """Return what distinguishes computations, as noted."""
        return tuple(self._operations or ())

    def bytes_but(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes alive now, without those of some tensors."""
        storages = storages_among(tensors)
        if self._cuda:
            nbytes = sum(-(-each.nbytes() // _BLOCK) * _BLOCK for each in storages.values())
        else:
            counted = (self._references.get(key) for key in storages)
            nbytes = sum(each.nbytes for each in counted if each is not None)
        return self.live_bytes() - nbytes

    def live_bytes(self) -> int:
        """Return the bytes alive now."""
        if self._cuda:
            _end_last_task(self._device)
            return torch.cuda.memory_allocated(self._device) - self._start
        return self._live

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were alive since the start or `reset_peak`."""
        if self._cuda:
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return self._peak

    def reset_peak(self) -> None:
        """Reset the peak to what is alive now."""
        if self._cuda:
            _end_last_task(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._peak = self.live_bytes()

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            _end_last_task(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
            return self
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._cuda:
            super().__exit__(*error)

    def see(self, func: OpOverload[..., object], args: Sequence[object], result: object) -> None:
        """Count what an operation has made."""
        for leaf in (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.device == self._device:
                self._note(leaf, counted=True)
            if self._operations is not None:
                self._operations.append(leaf.numel() if leaf.is_nested else leaf.shape)
        if self._operations is not None:
            self._operations.append(func)
        self.sizes_vary = self.sizes_vary or not _BY_VALUES.isdisjoint(func.tags)
        self._peak = max(self._peak, self._live)


class Operations(Seeing):
    """Notes which operations are performed inside it, but those that only hand numbers on.

    Attributes
    ----------
    noted : list of OpOverload
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[OpOverload[..., object]] = []

    def see(self, func: OpOverload[..., object], args: Sequence[object], result: object) -> None:
        """Note an operation."""
        if not (func.is_view or func in _COPIES):
            self.noted.append(func)

    @property
    def may_draw(self) -> bool:
        """Whether one of them may draw random numbers."""
        return any(torch.Tag.nondeterministic_seeded in func.tags for func in self.noted)


_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.detach.default}  # autograd makes some


def _end_last_task(device: torch.device) -> None:
    """Have autograd's thread of a CUDA device release its last task, and so of its gradients.

    It holds them until it is given another, or a moment longer than `backward` takes.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        leaf = torch.ones(0, device=device, requires_grad=True)  # allocates nothing
        differentiate([leaf.clone()], [torch.ones(0, device=device)], [leaf])


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensor, or its parts if it is sparse."""
    match tensor.layout:
        case torch.strided:
            return [tensor]
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case torch.jagged:
            return [tensor._values, tensor._offsets]  # type: ignore[attr-defined, list-item]
        case _:  # of oneDNN: no memory that can be seen
            return []


def storages_among(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of some tensors, each once, by their addresses."""
    return {key: storage for tensor in tensors for key, storage in storages_of(tensor).items()}


def storages_of(tensor: Tensor) -> dict[int, torch.UntypedStorage]:
    """Return the storages of a tensor, or of its parts if it is sparse, by their addresses."""
    try:
        found = [part.untyped_storage() for part in parts_of(tensor)]
    except NotImplementedError:  # wrapped by torch.func: none of its own
        return {}
    return {storage._cdata: storage for storage in found}


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each once."""
    return sum(storage.nbytes() for storage in storages_among(tensors).values())


class _Reference(weakref.ref[torch.UntypedStorage]):
    """Tells when a storage is freed: its Python object lives as long as itself."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that may be used where no limit is given."""
    if device.type != "cuda":
        return default_budget_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_DEVICE_SHARE * (free + idle))
