"""Fast slots: how a state is kept, by reference or by copy.

The fast tier needs no store: a checkpoint there is a reference to arrays that
nobody overwrites, or a copy.  Which of the two depends on the chain:

references (functional chains)
    The arrays of a kept state are marked read-only and get their flag back
    when the last slot that holds them is freed.  An array that does not own
    its memory is copied: whoever owns it could still write to it.
copies (in-place chains)
    A kept state is copied into pooled arrays, and copied back on load.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .layout import Array, Layout


class Kept(NamedTuple):
    """One kept state; give it back with `release`."""

    state: Any
    arrays: Sequence[Any]


class StateLayout(Protocol):
    """What an executor asks of a layout; `multistage.layout.Layout` is that of NumPy states."""

    @property
    def nbytes(self) -> int: ...

    def arrays(self, state: Any, where: int | str = ...) -> list[Any]:
        """Return the arrays of a state.  Raises StateError if it is of another layout."""
        ...

    def pack(self, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return what a store takes, and None or what `unpack` needs besides."""
        ...

    def unpack(self, arrays: Sequence[Any], packing: Any) -> list[Any]:
        """Return the arrays that `pack` was given, from the store's copies."""
        ...

    def same_as(self, other: Any) -> bool:
        """Whether both describe the same states."""
        ...


class States(Protocol):
    """What states are made of: how an executor describes and keeps them."""

    def layout(self, state: Any) -> StateLayout:
        """Return the layout of a state.  Raises StateError."""
        ...

    def slots(self, layout: Any) -> Slots:
        """Return fast slots for states of that layout."""
        ...


class ArrayStates:
    """Pytrees of NumPy arrays.

    Parameters
    ----------
    in_place : bool
        Whether steps overwrite the arrays of their state.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place

    def layout(self, state: Any) -> Layout:
        return Layout.of(state)

    def slots(self, layout: Layout) -> Slots:
        return Copies(layout) if self._in_place else References(layout)


class Slots(Protocol):
    """Keeps states of one layout."""

    def keep(self, state: Any, where: int | str) -> Kept:
        """Keep a state.  Raises StateError if it is not of the layout."""
        ...

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        """Wrap arrays of state `step` that nobody else writes to, as those read from a store."""
        ...

    def load(self, kept: Kept, live: Any) -> Any:
        """Return the live state equal to `kept`; copies overwrite `live`."""
        ...

    def release(self, kept: Kept) -> None:
        """Give a kept state back."""
        ...

    def trim(self) -> None:
        """Let memory go that is only kept to be reused: something else takes its place."""
        ...

    def release_all(self) -> None:
        """Give everything back, after an error or at the end of a run."""
        ...


_kept = tuple.__new__  # what Kept(...) does, without the call around it


class References:
    """Slots of a functional chain."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._single = layout.single
        self._frozen: dict[int, list[Any]] = {}  # id -> [array, holders]
        # Of a sweep that is dropped, not ended: the caller gets the arrays back as they were.
        weakref.finalize(self, _thaw, self._frozen).atexit = False

    def keep(self, state: Any, where: int | str) -> Kept:
        frozen, copied = self._frozen, False
        if type(state) is np.ndarray and (state.shape, state.dtype) == self._single:
            # The same as below for the commonest case.
            entry = frozen.get(id(state))
            if entry is not None:
                entry[1] += 1
                return _kept(Kept, (state, (state,)))
            if state.base is None:
                flags = state.flags
                if flags.writeable:
                    flags.writeable = False
                    frozen[id(state)] = [state, 1]
                return _kept(Kept, (state, (state,)))
        arrays = self._layout.arrays(state, where)
        for k, array in enumerate(arrays):
            entry = frozen.get(id(array))
            if entry is not None:
                entry[1] += 1
                continue
            if array.base is not None:
                arrays[k] = array = array.copy(order="K")
                copied = True
            if array.flags.writeable:
                array.flags.writeable = False
                frozen[id(array)] = [array, 1]
        return Kept(self._layout.state(arrays) if copied else state, arrays)

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        return Kept(self._layout.state(arrays), arrays)

    def load(self, kept: Kept, live: Any) -> Any:
        return kept.state

    def release(self, kept: Kept) -> None:
        frozen = self._frozen
        for array in kept.arrays:
            entry = frozen.get(id(array))
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    del frozen[id(array)]
                    array.flags.writeable = True

    def trim(self) -> None:
        return

    def release_all(self) -> None:
        _thaw(self._frozen)


def _thaw(frozen: dict[int, list[Any]]) -> None:
    for array, _ in frozen.values():
        array.flags.writeable = True
    frozen.clear()


def _owned(array: Array) -> bool:
    """Whether the memory behind an array is NumPy's own."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is None


class Copies:
    """Slots of an in-place chain; freed arrays are reused by later checkpoints.

    State 0 is kept once for however many hold it: the caller's copy of it and
    the checkpoint that most schedules begin with are the same.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pool: list[Sequence[Array]] = []
        self._own: dict[int, list[Any]] = {}  # id -> [kept, holders]
        self._first: Kept | None = None

    def keep(self, state: Any, where: int | str) -> Kept:
        if where == 0 and self._first is not None:
            self._own[id(self._first)][1] += 1
            return self._first
        kept = Kept(where, self._copied(self._live(state, where)))
        self._own[id(kept)] = [kept, 1]
        if where == 0:
            self._first = kept
        return kept

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        # Views of a store's buffers take no memory of their own; copies take a slot's.
        if self._pool and any(_owned(array) for array in arrays):
            self._pool.pop()
        return Kept(step, arrays)

    def load(self, kept: Kept, live: Any) -> Any:
        self._copy_back(self._places(live, kept.state), kept)
        return live

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
        copies = self._pool.pop() if self._pool else [np.empty_like(array) for array in arrays]
        for copy, array in zip(copies, arrays, strict=True):
            np.copyto(copy, array)
        return copies

    def _copy_back(self, targets: list[Array], kept: Kept) -> None:
        for target, array in zip(targets, kept.arrays, strict=True):
            np.copyto(target, array)

    def _recycle(self, kept: Kept) -> None:
        self._pool.append(kept.arrays)

    def _live(self, state: Any, where: int | str) -> list[Array]:
        """Return the arrays to copy from."""
        return self._layout.arrays(state, where)

    def _places(self, live: Any, where: int | str) -> list[Array]:
        """Return the arrays to copy back into."""
        return self._layout.arrays(live, where)
