"""Tensors that leave fast memory together and come back as they were.

A group is the tape of a stage, or a state between two.  What is transferred is the bytes of
the storages its tensors lie in; they come back with the same strides, alignment, lazy
bits and sharing of memory (`geometry.py`).  A storage that another group still has in
fast memory, or has brought back, is shared with it.

What stays: memory that is held elsewhere, such as parameters and the chain's input.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.geometry import Geometry, aligned_to, is_plain, whole
from .lane import Transfer

_UNASKED = Transfer([], lost="its way back was not asked for")
_UNASKED.end()


class Origin:
    """A storage, and the memory that has its bytes now: its own, or that it came back to.

    All tensors that come back to one memory count its versions together, whichever
    groups they are of: a write to it is found, as in plain training.

    Attributes
    ----------
    nbytes : int
    memories : int
        How often it got new memory.
    filler : Transfer or None
        That brings the bytes back; None while the memory is its own.
    """

    __slots__ = ("_align", "_alignment", "_device", "_probe", "_shift", "_weak", "filler",
                 "memories", "nbytes")  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._probe: Tensor | None = None  # counts with the memory it came back to
        self.memories = 0
        self.filler: Transfer | None = None
        self._device = storage.device
        self._align = aligned_to(self._device)
        self._alignment = storage.data_ptr() % self._align
        self._shift = 0
        # While it is referred to, no other storage has its address.
        self._weak = StorageWeakRef(storage)

    @classmethod
    def of(cls, storage: torch.UntypedStorage, known: dict[int, Origin]) -> Origin:
        """Return that of a storage; `known` are those that a run may send away, by address."""
        found = known.get(storage._cdata)
        if found is None:
            found = known[storage._cdata] = cls(storage)
        return found

    @property
    def address(self) -> int:
        """Of its present memory."""
        return int(self._weak.cdata)

    @property
    def is_there(self) -> bool:
        """Whether its memory, if it has any, has its bytes."""
        return self.filler is None or self.filler.awaited

    @property
    def written(self) -> bool:
        """Whether memory that it came back to was written to since, by anybody."""
        return self._probe is not None and self._probe._version > 0

    def bytes(self) -> Tensor | None:
        """Return its memory as one row of bytes, which may still be on their way; None if gone."""
        filler = self.filler
        if filler is not None and filler.done.is_set() and filler.error:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is None or self._probe is None:
            return None if storage is None else whole(storage)
        memory = self._probe.detach()
        memory.data = whole(storage)
        return memory

    def line(self, memory: Tensor) -> Tensor:
        """Return the part of its memory that is transferred; filling it counts as no write."""
        return whole(memory.untyped_storage())[self._shift : self._shift + self.nbytes]

    def renew(self) -> Tensor:
        """Return new memory for it, aligned as its own, for a `filler` that is named next."""
        self.filler = _UNASKED  # for good, if asking for one raises
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
        self._shift = (self._alignment - memory.data_ptr()) % self._align
        if self._shift:
            del memory
            memory = torch.empty(self.nbytes + self._align, dtype=torch.uint8, device=self._device)
            self._shift = (self._alignment - memory.data_ptr()) % self._align
        self._weak = StorageWeakRef(memory.untyped_storage())
        self._probe = memory.detach()
        self._probe.data = memory.new_empty(0)
        self.memories += 1
        return memory

    def tensor(self, geometry: Geometry, memory: Tensor) -> Tensor:
        """Return a tensor that lies in it."""
        return geometry.on(memory, self._shift)


class Watch:
    """Makes a released tensor again; tells whether code that still has its memory writes to it.

    Parameters
    ----------
    tensor : Tensor
        Of the origin's memory; it is not held.
    origin : Origin
    version : int
        Of the tensor, when it was right.
    """

    __slots__ = ("_geometry", "_memories", "_probe", "_version", "origin")

    def __init__(self, tensor: Tensor, origin: Origin, version: int) -> None:
        self._probe = tensor.detach()  # counts versions with it
        self._probe.data = torch.empty(0, device=tensor.device)
        self._version, self._geometry = version, Geometry.of(tensor)
        self.origin, self._memories = origin, origin.memories

    @property
    def spoilt(self) -> bool:
        """Whether its memory, the same still or that it came back to, was written to."""
        return self._probe._version != self._version or self.origin.written

    def tensor(self, memory: Tensor) -> Tensor:
        """Return the tensor on the present memory; it counts with the one that is watched."""
        tensor = self.origin.tensor(self._geometry, memory)
        if self.origin.memories != self._memories:
            return tensor
        probe = self._probe.detach()
        probe.data = tensor
        return probe


class TensorGroup:
    """Tensors that are transferred together.

    Parameters
    ----------
    held : sequence of (Tensor or None, int)
        With their versions, when they were right.
    known : dict of int to Origin
        The storages that the run has sent away or may send, by address.
    stays : container of int
        Storages, by address, that are held elsewhere.

    Attributes
    ----------
    tensors : list of Tensor or None
        None for those that are away or were taken.
    stuck : list of str
        What those tensors are that cannot be transferred, though nothing else holds them.
    versions : list of int
        Of the tensors, when they were right; -1 if one came back that had been written to.
    """

    __slots__ = (
        "_fillers",
        "_known",
        "_memory",
        "_places",
        "_renewed",
        "_watches",
        "stuck",
        "tensors",
        "versions",
    )

    def __init__(
        self,
        held: Sequence[tuple[Tensor | None, int]],
        known: dict[int, Origin],
        stays: Container[int],
    ) -> None:
        self.tensors = [tensor for tensor, _ in held]
        self.versions = [version for _, version in held]
        self.stuck: list[str] = []
        self._known = known
        self._memory: list[Tensor] = []  # that it comes back to
        self._renewed: list[Origin] = []  # what its own way back fills
        self._fillers: list[Transfer | None] = []  # of its storages
        self._watches: dict[int, Watch] = {}
        self._places = [None if t is None else self._place(t, stays) for t in self.tensors]

    def _place(self, tensor: Tensor, stays: Container[int]) -> Origin | None:
        if not is_plain(tensor):
            if not isinstance(tensor, torch.nn.Parameter):
                self.stuck.append(f"{type(tensor).__name__} of layout {tensor.layout}")
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in stays or not storage.nbytes():
            return None
        return Origin.of(storage, self._known)

    def _storages(self) -> list[Origin]:
        return list(dict.fromkeys(place for place in self._places if place is not None))

    def lines(self) -> list[Tensor]:
        """Return the bytes that are transferred."""
        lines = []
        for origin in self._storages():
            memory = origin.bytes()
            assert memory is not None
            lines.append(origin.line(memory))
        return lines

    def let_go(self) -> None:
        """Refer to nothing that was transferred."""
        self._memory = []
        for number, place in enumerate(self._places):
            tensor = self.tensors[number]
            if place is not None and tensor is not None:
                self._watches[number] = Watch(tensor, place, self.versions[number])
                self.tensors[number] = None

    def make_room(self) -> list[Tensor | None]:
        """Return lines to come back to, None for what is in fast memory still."""
        lines: list[Tensor | None] = []
        self._memory, self._renewed = [], []
        for origin in self._storages():
            memory = origin.bytes()
            if memory is None:
                del self._known[origin.address]
                memory = origin.renew()
                self._known[origin.address] = origin
                self._renewed.append(origin)
                lines.append(origin.line(memory))
            else:
                lines.append(None)
            self._memory.append(memory)
        return lines

    def on_its_way(self, trip: Transfer) -> None:
        """Note what fills the room that was made."""
        for origin in self._renewed:
            origin.filler = trip
        # An origin gets new memory once a filler has failed: then ours is not that.
        self._fillers = [origin.filler for origin in self._storages()]

    def fillers(self) -> list[Transfer]:
        """Return the ways back that its bytes are on, those of other groups included."""
        return list({id(trip): trip for trip in self._fillers if trip is not None}.values())

    def came_back(self) -> bool:
        """Make the tensors again, after `fillers` were awaited; return whether all are there."""
        memory = dict(zip(self._storages(), self._memory, strict=True))
        self._memory, self._renewed = [], []
        fillers, self._fillers = self._fillers, []
        if any(f is not o.filler for f, o in zip(fillers, memory, strict=True)):
            return False
        if not all(origin.is_there for origin in memory):
            return False
        for number, watch in self._watches.items():
            self.tensors[number] = tensor = watch.tensor(memory[watch.origin])
            self.versions[number] = -1 if watch.spoilt else tensor._version
        self._watches.clear()
        return True
