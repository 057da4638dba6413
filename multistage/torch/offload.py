"""`offload`: what autograd saves, moved to slow tiers and fetched back in reverse.

The counterpart of recomputation: nothing runs twice, but everything travels.  Writes are in
flight while the forward pass continues; the backward pass asks for tensors in about the
reverse order, and those before the one asked for are fetched ahead.

What moves is the memory that tensors lie in, once for all that read it, as with the tapes of
a chain (`tiers/groups.py`): what comes back is what kernels saw, the same bytes with the same
strides, alignment and conjugate and negative bits, in memory shared as before.

Memory moves once nothing but the graph holds it.  Nothing can write to it any more by then,
neither an operator that fills in a tensor after saving it nor one of the writes that no version
counter sees (`.data`, `.numpy()`, another module's kernel); and what is held elsewhere would not
be given up by moving.

What stays where it is: parameters and their views, small tensors, memory that PyTorch
does not own, whatever is held elsewhere or the tiers have no room for, and tensors that
are more than their bytes: subclasses, sparse, nested, MKL-DNN and quantised ones, wrappers
of `torch.func`.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..backends.base import Store
from ..backends.urls import Tiers, tier_names
from ..errors import ArgumentError, MultistageError
from ..support.units import parse_bytes
from .measurement.saved import itself, written_to
from .tensors.geometry import is_plain, whole
from .tensors.streams import Home, the_device
from .tiers.groups import Origin, Watch
from .tiers.lane import ChainTier, Transfer
from .tiers.pinned import open_tiers

_IN_FLIGHT = 4  # storages whose writes may be in flight
_LOOKS = 8  # at a storage that was just saved, one at each save, before it counts as held
_HELD_LOOKS = 2  # at storages that are held, at each save


class Memory:
    """A storage that graphs hold: here, on its way, or in the tier.

    Attributes
    ----------
    origin : Origin
    held : Tensor or None
        All its bytes; None once they have left.
    sent : Transfer or None
        Their way to the tier.
    home : Home
        The stream that it was saved on, or came back on.
    looks : int
        How often it was found held elsewhere.
    """

    __slots__ = ("__weakref__", "held", "home", "looks", "origin", "sent")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.origin = Origin(storage)
        self.held: Tensor | None = whole(storage)
        self.sent: Transfer | None = None
        self.home = Home(storage.device)
        self.looks = 0


class Kept:
    """One saved tensor that stays."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = itself(tensor), tensor._version


# A tensor that stays, or which save it was, the memory it lies in, and what makes it again.
Saved: TypeAlias = Kept | tuple[int, Memory, Watch]


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many hold a tensor's storage, and how many the object that stands for it."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _alone() -> tuple[int, int]:
    """Return `_holders` of a storage that a single tensor holds."""
    return _holders(torch.empty(1, device="cpu"))


def is_sole(tensor: Tensor) -> bool:
    """Whether nothing but a tensor holds its memory."""
    (uses, references), (one_use, few) = _holders(tensor), _alone()
    return uses <= one_use and references <= few


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether others may write to a storage unseen: NumPy, other processes."""
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


@dataclass(slots=True)
class OffloadStats:
    """What an `offload` did.

    Attributes
    ----------
    moved, moved_bytes : int
        Storages that went to the tiers, each with all tensors that lie in it.
    kept, kept_bytes : int
        That stayed: small, held elsewhere when the context ended, no room.
    shared : int
        Tensors saved in memory that was there already.
    """

    moved: int = 0
    moved_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    shared: int = 0


class SavedTensors:
    """What one `offload` holds.

    Notes
    -----
    A backward may run on any thread, and on several at a time: a lock makes one
    thread of them for what is held here.
    """

    def __init__(
        self,
        store: Store,
        device: torch.device,
        least: int,
        ahead: int,
        stays: Sequence[Tensor],
    ) -> None:
        self._device, self._least, self._ahead = device, least, ahead
        self.stats = OffloadStats()
        self._stays = {t.untyped_storage()._cdata: t for t in stays if is_plain(t.detach())}
        self._tier = ChainTier(store, device)  # is closed when it goes
        self._lane = self._tier.open()
        self._lock = threading.RLock()
        self._saves = 0
        # By the number of each save, and by address.
        self._order: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._recent: deque[weakref.ref[Memory]] = deque()
        self._held: deque[weakref.ref[Memory]] = deque()  # longer, and held elsewhere
        self._writing: deque[weakref.ref[Memory]] = deque()
        self._coming: deque[Tensor] = deque(maxlen=ahead + 1)  # back, the latest

    # ----------------------------------------------------------------- forward

    def pack(self, tensor: Tensor) -> Saved:
        """Note that a tensor is to be moved; return what stands for it."""
        if not is_plain(tensor) or tensor.device != self._device:
            return Kept(tensor)
        base = tensor if tensor._base is None else tensor._base
        is_parameter = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
        storage = tensor.untyped_storage()
        if is_parameter or storage._cdata in self._stays or is_foreign(storage):
            return Kept(tensor)
        if not 0 < storage.nbytes() >= self._least:
            self._keeps(storage.nbytes())
            return Kept(tensor)
        with self._lock:
            self._put_ready()
            memory = self._memories.get(storage._cdata)
            # Or another had this address, or another size (`out=`).
            if memory is None or memory.held is None or memory.origin.nbytes != storage.nbytes():
                memory = self._memories[storage._cdata] = Memory(storage)
                self._recent.append(weakref.ref(memory))
            else:
                self.stats.shared += 1
            self._order[self._saves] = memory
            self._saves += 1
            return self._saves - 1, memory, Watch(tensor, memory.origin, tensor._version)

    def _keeps(self, nbytes: int) -> None:
        self.stats.kept += 1
        self.stats.kept_bytes += nbytes

    def _put_ready(self) -> None:
        """Put what nothing else holds any more, of what was saved of late and some of the rest."""
        for _ in range(len(self._recent)):
            memory = self._recent.popleft()()
            if memory is not None and not self._put_if_sole(memory):
                memory.looks += 1
                queue = self._recent if memory.looks < _LOOKS else self._held
                queue.append(weakref.ref(memory))
        for _ in range(min(_HELD_LOOKS, len(self._held))):
            memory = self._held.popleft()()
            if memory is not None and not self._put_if_sole(memory):
                self._held.append(weakref.ref(memory))

    def _put_if_sole(self, memory: Memory) -> bool:
        """Put memory that nothing else holds; return whether that was so."""
        assert memory.held is not None
        resized = memory.held.untyped_storage().nbytes() != memory.origin.nbytes
        if resized or not is_sole(memory.held):
            return False
        self._settle(_IN_FLIGHT - 1)
        with memory.home.context():  # whatever the stream of the operation that comes next
            memory.sent = self._lane.write([memory.held])
        weakref.finalize(memory, self._lane.drop, memory.sent)
        self._writing.append(weakref.ref(memory))
        return True

    def _settle(self, most: int) -> None:
        """Wait for the oldest writes in flight, until so many are left."""
        while len(self._writing) > most:
            memory = self._writing.popleft()()
            if memory is not None:
                self._written(memory)

    def _written(self, memory: Memory) -> None:
        """Release memory once its write is done, or keep it for good."""
        if memory.sent is None or memory.held is None:
            return
        if self._lane.wait(memory.sent):
            memory.held = None
            self.stats.moved += 1
            self.stats.moved_bytes += memory.origin.nbytes
        else:
            memory.sent = None
            self._keeps(memory.origin.nbytes)

    def settle(self) -> None:
        """Wait for the writes in flight: the forward pass is over."""
        with self._lock:
            for reference in (*self._recent, *self._held):
                memory = reference()
                if memory is not None and not self._put_if_sole(memory):
                    self._keeps(memory.origin.nbytes)
            self._recent.clear()
            self._held.clear()
            self._settle(0)

    # ---------------------------------------------------------------- backward

    def unpack(self, saved: Saved) -> Tensor:
        """Return the tensor that stands behind what `pack` returned.

        Raises
        ------
        RuntimeError
            If it was written to since it was saved, as autograd does.
        MultistageError
            If it is lost.
        """
        if isinstance(saved, Kept):
            if saved.tensor._version != saved.version:
                raise written_to()
            return saved.tensor
        number, memory, watch = saved
        with self._lock:
            self._written(memory)
            found = memory.held if memory.held is not None else self._back(number, memory)
            if watch.spoilt:
                raise written_to()
            memory.home.hand(found)
            return watch.tensor(found)

    def _back(self, number: int, memory: Memory) -> Tensor:
        """Return all bytes of memory that has left; ask for what was saved before, too."""
        found, filler = self._asked(memory)
        for before in range(number - 1, max(-1, number - self._ahead - 1), -1):
            other = self._order.get(before)
            if other is not None and other.held is None:
                self._asked(other)
        if not self._lane.wait(filler):
            raise MultistageError(
                f"a saved tensor is lost, and nothing can compute it again: {filler.error}"
            )
        return found

    def _asked(self, memory: Memory) -> tuple[Tensor, Transfer]:
        """Return all bytes of memory that has left, and what brings them."""
        origin, sent = memory.origin, memory.sent
        found, filler = None if origin.written else origin.bytes(), origin.filler
        if found is None or filler is None:
            assert sent is not None
            found, memory.home = origin.renew(), Home(self._device)
            filler = origin.filler = self._lane.fetch(sent, [origin.line(found)])
            self._coming.append(found)
        return found, filler


@contextmanager
def offload(
    tiers: Tiers,
    *,
    min_bytes: int | str = "1 MiB",
    ahead: int = 4,
    stays: Sequence[Tensor] = (),
    device: torch.device | str | None = None,
) -> Iterator[OffloadStats]:
    """Move what autograd saves in this context to slow tiers, until the backward asks for it.

    Plain PyTorch code as it stands; the numbers are the same bits.  What is held elsewhere
    (a variable, a module's buffer, a list of outputs) until the context ends is not moved.

    Parameters
    ----------
    tiers : str or Store, or a sequence of them
        As for `multistage.torch.unroll`.
    min_bytes : int or str
        Of a storage; smaller ones stay.
    ahead : int
        Saved tensors to fetch ahead of the one asked for.
    stays : sequence of Tensor
        Not moved, nor views of them, such as inputs that are held anyway.
    device : torch.device or str, optional
        Of the tensors to move; default: CUDA where there is such a device.

    Yields
    ------
    OffloadStats
        Counts, up to date after the context.

    Raises
    ------
    ArgumentError
        For no tier, or negative numbers.
    RuntimeError
        In the backward, if a saved tensor was written to meanwhile, as plain
        autograd has it.

    Notes
    -----
    Backwards may run on several threads.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(4)))
    >>> x = torch.ones(512, 1024, requires_grad=True)
    >>> with mst.offload("memory:") as stats:
    ...     loss = layers(x).sum()
    >>> loss.backward()
    >>> stats.moved
    4
    """
    names = tier_names(tiers)
    if not names:
        raise ArgumentError("offload needs a tier, as in offload('pinned:8GiB')")
    if ahead < 0:
        raise ArgumentError(f"ahead={ahead} must not be negative")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = the_device(torch.device(device))
    least = parse_bytes(min_bytes, "min_bytes")
    store = open_tiers(names, place)
    assert store is not None
    saved = SavedTensors(store, place, least, ahead, stays)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved.stats
    finally:
        saved.settle()
