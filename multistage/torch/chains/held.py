"""Tapes and states of a chain, in fast memory or away."""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass

from torch import Tensor

from ..environment.states import EmptyState, KeptState
from ..measurement.saved import Caught, written_to
from ..tensors.geometry import Geometry, is_plain
from ..tiers.parcels import Origin, Origins, Parcel, Watch


class HeldTape:
    """What a stage saved for its gradient.

    Parameters
    ----------
    caught : Caught
    state : KeptState or None
        That it was made from, which it holds on to.

    Attributes
    ----------
    output : KeptState or None
        The state that the stage made, if the tape holds it.
    """

    __slots__ = ("_given", "_inputs", "_parcel", "_parts", "_spare", "_stage", "_tensors",
                 "_versions", "output", "state")  # fmt: skip

    def __init__(self, caught: Caught, state: KeptState | None) -> None:
        self._tensors, self._versions, self._parts = caught.tape, caught.versions, caught.parts
        self._stage = caught.stage
        self._given: list[weakref.ref[Tensor] | None] = [None] * len(caught.tape)
        self._inputs: dict[int, tuple[Origin, Geometry, Watch]] = {}
        self._parcel: Parcel | None = None
        self._spare: EmptyState | None = None
        self.state = state
        self.output: KeptState | None = None

    def packed(
        self,
        origins: Origins,
        stays: Container[int],
        inputs: Container[int],
        output: KeptState | None,
    ) -> None:
        """Sort what the stage saved, so that the tape can leave fast memory.

        Parameters
        ----------
        origins : Origins
        stays, inputs : container of int
            Storages, by address: held elsewhere; of the state before, which is away at
            times and is not part of this tape.
        output : KeptState or None
            The state that the stage made, unless it is held elsewhere.
        """
        for number, tensor in enumerate(self._tensors):
            if tensor is not None and is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in inputs:
                    origin = origins.of(storage)
                    watch = Watch(tensor, origin, self._versions[number])
                    self._inputs[number] = origin, Geometry.of(tensor), watch
                    self._tensors[number] = None
        self.output = output
        others = [] if output is None else output.tensors()
        self._parcel = Parcel([*self._tensors, *others], origins, stays)
        self._tensors = self._parcel.tensors

    @property
    def parcel(self) -> Parcel:
        """What of it travels."""
        assert self._parcel is not None
        return self._parcel

    def leave(self) -> None:
        """Release the states beside it; what was written to since it was saved is spoilt."""
        for number, version in enumerate(self._versions):
            tensor = self._tensors[number]
            if tensor is not None and tensor._version != version:
                self._versions[number] = -1
        self._spare = None if self.output is None else self.output.emptied()
        self.output = self.state = None

    def returned(self) -> None:
        """Take what came back."""
        count, now = len(self._versions), self.parcel.versions
        for number, version in enumerate(self._versions):
            if version >= 0:
                self._versions[number] = now.get(number, version)
        if self._spare is not None:
            of_output = {number - count: version for number, version in now.items()}
            self.output = self._spare.filled(self._tensors[count:], of_output)
            self._spare = None

    def begin(self) -> None:
        """Release the output: the adjoint of the stage begins, and those above are done."""
        self.output = None
        del self._tensors[len(self._versions) :]

    def is_input(self, number: int) -> bool:
        """Whether the `number`-th tensor lies in the state before, which is not held on to."""
        return number in self._inputs

    def take(self, number: int) -> Tensor | None:
        """Return the tensor saved as the `number`-th and hold it no more; None if it is gone.

        Raises
        ------
        RuntimeError
            If it was written to since it was saved.
        """
        while self._parts and number < self._parts[-1]:
            # The stages above are done with: what nothing has asked for goes.
            part = self._parts.pop()
            self._tensors[part:] = [None] * (len(self._tensors) - part)
        if number in self._inputs:
            origin, geometry, watch = self._inputs[number]
            # Where the state before is lost, another parcel may be bringing these bytes.
            memory = origin.bytes() if origin.is_there else None
            if memory is None:
                return None
            if watch.changed or origin.written:
                raise written_to(self._stage)
            return watch.joined(origin.tensor(geometry, memory))
        tensor = self._tensors[number]
        if tensor is None:
            # Asked for twice, as a custom Function may: nothing else may hold it any more.
            reference = self._given[number]
            tensor = None if reference is None else reference()
            if tensor is None:
                return None
        if tensor._version != self._versions[number]:
            raise written_to(self._stage)
        # From here on it lives as long as the node that asked wants it.
        self._tensors[number], self._given[number] = None, weakref.ref(tensor)
        return tensor


@dataclass(slots=True)
class AwayState:
    """A state in the tier."""

    empty: EmptyState
    parcel: Parcel

    def back(self) -> KeptState:
        """Return the state, whose parcel has come back."""
        return self.empty.filled(self.parcel.tensors, self.parcel.versions)
