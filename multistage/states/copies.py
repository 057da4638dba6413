"""Slots that copy: a kept state is copied into pooled arrays, and copied back on load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .layout import Array, Layout, ordered_as
from .sharing import owner
from .slots import Kept

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Copies:
    """Slots that copy arrays, whatever owns them; freed arrays are reused by later checkpoints.

    State 0 is kept once for however many hold it: the caller's copy of it and
    the checkpoint that most schedules begin with are the same.
    """

    shared = False

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pool: list[Sequence[Any]] = []
        self._own: dict[int, list[Any]] = {}  # id -> [kept, holders]
        self._first: Kept | None = None

    def keep(self, state: object, where: int | str) -> Kept:
        if where == 0 and self._first is not None:
            self._own[id(self._first)][1] += 1
            return self._first
        live = self._live(state, where)
        copies = self._copied(live)
        kept = Kept(where, copies if type(live) is list else ordered_as(copies, live))
        self._own[id(kept)] = [kept, 1]
        if where == 0:
            self._first = kept
        return kept

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        # Views of a store's buffers take no memory of their own; copies take a slot's.
        if self._pool and any(owner(array).base is None for array in arrays):
            self._pool.pop()
        return Kept(step, arrays)

    def load(self, kept: Kept, live: State) -> State:
        where: Any = kept.state
        self._copy_back(self._layout.arrays(live, where), kept)
        return live

    def check(self, live: object, where: int | str) -> None:
        """Nothing: the arrays are not the live state's."""

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        return Kept(tape, ())  # the operators' own

    def adopt_adjoint(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint

    def apart(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint

    def release(self, kept: Kept) -> None:
        entry = self._own.get(id(kept))
        if entry is None:
            return  # adopted: a store's
        entry[1] -= 1
        if not entry[1]:
            del self._own[id(kept)]
            self._recycle(kept)
            if kept is self._first:
                self._first = None

    def trim(self) -> None:
        self._pool.clear()

    def release_all(self) -> None:
        for kept, _ in self._own.values():
            self._recycle(kept)
        self._own.clear()
        self._first = None

    def _copied(self, arrays: list[Array]) -> Sequence[Any]:
        copies = self._pool.pop() if self._pool else self._made(arrays)
        for copy, array in zip(copies, arrays, strict=True):
            np.copyto(copy, array)
        return copies

    def _made(self, arrays: list[Array]) -> list[Array]:
        """Return arrays for copies of these."""
        return [np.empty_like(array) for array in arrays]

    def _copy_back(self, targets: list[Array], kept: Kept) -> None:
        arrays: Sequence[Any] = kept.arrays
        for target, array in zip(targets, arrays, strict=True):
            np.copyto(target, array)

    def _recycle(self, kept: Kept) -> None:
        self._pool.append(kept.arrays)

    def _live(self, state: object, where: int | str) -> list[Array]:
        """Return the arrays to copy from."""
        return self._layout.arrays(state, where)
