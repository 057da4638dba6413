"""The context in which an environment is as it was when it was captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .holders import Contents, Keys, is_same
from .randomness import State

if TYPE_CHECKING:
    from .captured import Environment


class Again:
    """A context in which an environment is as it was when it was captured."""

    __slots__ = ("_around", "_buffers", "_drawn", "_exchanged", "_flags", "_keys", "_present")

    def __init__(self, around: Environment, buffers: bool, random: bool) -> None:
        self._around, self._buffers = around, buffers
        self._drawn: tuple[State | None, ...] | None = None
        self._present: list[Contents] = []
        self._keys: dict[int, Keys] = {}  # of holders that hold something else now
        self._exchanged: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._flags: list[tuple[Tensor, bool, bool]] = []
        if not random:
            self._drawn = ()

    def __enter__(self) -> None:
        around = self._around
        around.refuse_changed()
        found = around.found
        self._present = present = [holder.read() for holder in found.holders]
        self._flags = around.toggled()
        try:
            for holder, before, now in zip(found.holders, found.contents, present, strict=True):
                if not is_same(before, now):
                    self._keys[id(holder)] = holder.keys()
                    holder.write(before)
            for tensor, flag, _ in self._flags:
                tensor.requires_grad_(flag)
            if self._buffers:
                for owner, key, value in around.stand_ins():
                    self._exchanged.append((owner, key, owner[key]))
                    owner[key] = value
            if around.drawn_from is not None and self._drawn is None:
                assert around.drawn is not None
                self._drawn = around.drawn_from.capture_those(around.drawn)
                around.drawn_from.restore(around.drawn)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        around = self._around
        if self._drawn and around.drawn_from is not None:
            around.drawn_from.restore(self._drawn)
        for owner, key, value in reversed(self._exchanged):
            owner[key] = value
        for tensor, _, flag in self._flags:
            tensor.requires_grad_(flag)
        for holder, now in zip(around.found.holders, self._present, strict=True):
            if not is_same(now, holder.read()):
                holder.write(now, self._keys.get(id(holder)))
