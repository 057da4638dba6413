"""States whose layout differs from step to step, as on a mesh that is refined on the way.

The layout of each state is learnt when it is first made, in the forward sweep.  A
state that is made again later must have the same; each sweep starts again.

functional chains
    Trees, shapes and dtypes may differ.
in-place chains
    The tree stays; a step may put arrays of other shapes or dtypes in place of those
    in its containers, arrays that nothing else refers to.  A load puts arrays of the
    kept shapes back: those that the sweep began with where they fit, else new ones.

Copies are not pooled: the room of one state need not hold the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import optree

from ..errors import StateError
from .in_place import InPlace, put_back, replaced, writeable_copy
from .layout import Array, Layout, Packing, ordered_as, packed
from .references import References
from .sharing import Memory
from .slots import Kept
from .strides import alike, c_strides, duplicate

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_EMPTY = np.zeros(0)


def bytes_of(layout: Layout) -> int:
    """Return the bytes of a state's arrays, which lie apart in fast memory."""
    return sum(leaf.nbytes for leaf in layout.leaves)


class Layouts:
    """The layouts of the states of one sweep, by their index.

    Parameters
    ----------
    state : pytree of arrays
        State 0.
    in_place : bool
        Whether the tree of all states is that of the first.

    Attributes
    ----------
    nbytes : int
        Bytes of one record of the largest state so far.
    held_bytes : int
        Bytes of the states and tapes that slots hold, counted as often as they are held.
    """

    def __init__(self, state: object, in_place: bool) -> None:
        self.first = self._last = Layout.of(state)
        self._in_place = in_place
        self._at: dict[int, Layout] = {0: self.first}
        self._kinds = {(self.first.spec, self.first.leaves): self.first}  # each kind once
        self.nbytes = self.first.nbytes
        self.held_bytes = 0

    def count(self, kept: Kept, sign: int = 1) -> Kept:
        """Count what a slot holds from now on or, with -1, gives back."""
        arrays: Sequence[Any] = kept.arrays
        self.held_bytes += sign * sum(array.nbytes for array in arrays)
        return kept

    def at(self, step: int) -> Layout:
        """Return the layout of a state that has been seen."""
        return self._at[step]

    def see(self, state: object, step: int) -> Layout:
        """Return the layout of state `step`; learn it if it is new.

        Raises
        ------
        StateError
            If a leaf is no plain array, the state differs from what it was
            before, or an in-place chain's from the tree of the first.
        """
        known = self._at.get(step)
        if known is not None:
            try:
                known.arrays(state, step)
            except StateError as error:
                raise StateError(
                    f"state {step} differs from what it was when the step before it first ran "
                    f"({str(error).split(';')[0]}); a step must do the same each time it is run"
                ) from None
            return known
        try:
            layout = self._like(state)
        except StateError as error:
            raise StateError(f"state {step}: {error}") from None
        if self._in_place and layout.spec != self.first.spec:
            raise StateError(
                f"state {step} changed its structure from {self.first.spec} to {layout.spec}; the "
                "shapes and dtypes in an in-place chain's state may change, its tree may not"
            )
        self._at[step] = self._last = layout
        self.nbytes = max(self.nbytes, layout.nbytes)
        return layout

    def _like(self, state: object) -> Layout:
        last = self._last
        if type(state) is np.ndarray and (state.shape, state.dtype) == last.single:
            return last
        made = Layout.of(state)
        return self._kinds.setdefault((made.spec, made.leaves), made)

    def arrays(self, state: object, where: int | str = "the state") -> list[Array]:
        """Return the arrays of a state.  Raises StateError as `see` does."""
        layout = self.see(state, where) if isinstance(where, int) else Layout.of(state)
        return layout.arrays(state, where)

    def pack(self, arrays: Sequence[Array]) -> tuple[list[Array], Packing | None]:
        """Return what a store of things of any size takes, and what `unpack` needs besides."""
        return packed(arrays, [c_strides(array.shape, array.dtype.itemsize) for array in arrays])

    def unpack(self, arrays: Sequence[Array], packing: Packing | None) -> list[Array]:
        """Return the arrays that `pack` was given, from the store's copies."""
        return self.first.unpack(arrays, packing)

    def same_as(self, other: object) -> bool:
        """Whether both describe the same states: each sweep has its own."""
        return self is other


class VariedStates:
    """Pytrees of NumPy arrays that differ from step to step.

    Parameters
    ----------
    in_place : bool
        Whether steps overwrite the arrays of their state.

    Attributes
    ----------
    layouts : Layouts or None
        Those of the sweep begun last.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self.layouts: Layouts | None = None

    def layout(self, state: object) -> Layouts:
        """Return layouts for a sweep from this state 0.  Raises StateError."""
        self.layouts = Layouts(state, self._in_place)
        return self.layouts

    def slots(self, layout: Layouts) -> VariedInPlace | VariedReferences:
        """Return fast slots for states of these layouts."""
        return VariedInPlace(layout) if self._in_place else VariedReferences(layout)


class VariedReferences(References):
    """Slots of a functional chain: references, to states of the layout that each step makes."""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts.first)
        self.shared = False
        self._layouts = layouts
        self._by_layout: dict[int, References] = {}

    def _of(self, layout: Layout) -> References:
        found = self._by_layout.get(id(layout))
        if found is None:
            found = self._by_layout[id(layout)] = References(layout, self.frozen)
        return found

    def keep(self, state: object, where: int | str) -> Kept:
        assert isinstance(where, int)
        return self._layouts.count(self._of(self._layouts.see(state, where)).keep(state, where))

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        return self._layouts.count(self._of(self._layouts.at(step)).adopt(arrays, step))

    def used_up(self, live: object) -> None:
        """Return what is live in place of a state that no step starts from any more."""
        return

    def check(self, live: object, where: int | str) -> None:
        assert isinstance(where, int)
        self._layouts.see(live, where)

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        return self._layouts.count(super().keep_tape(tape, states, step))

    def _arrays_of(self, live: object) -> list[Array]:
        return self._layouts.arrays(live)

    def release(self, kept: Kept) -> None:
        self._layouts.count(kept, -1)
        super().release(kept)


class VariedInPlace(InPlace):
    """Slots of an in-place chain whose steps put arrays of other shapes into their state."""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts.first)
        self._layouts = layouts

    def keep(self, state: object, where: int | str) -> Kept:
        return self._layouts.count(super().keep(state, where))

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        return self._layouts.count(Kept(step, arrays))

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        return self._layouts.count(super().keep_tape(tape, states, step))

    def release(self, kept: Kept) -> None:
        self._layouts.count(kept, -1)
        super().release(kept)

    def load(self, kept: Kept, live: State) -> State:
        arrays: Sequence[Any] = kept.arrays
        tree: Any = live
        leaves: list[Any] = optree.tree_leaves(tree, none_is_leaf=True)
        fresh: list[int] = []
        for k, value in enumerate(arrays):
            if type(value) is not np.ndarray:
                leaves[k] = value
            elif id(leaves[k]) in self._places and _of_one_kind(leaves[k], value):
                put_back(leaves[k], value, self._layout.leaves[k].path)
            else:
                leaves[k] = _EMPTY  # what is there goes before anything comes in its place
                fresh.append(k)
        leaves = ordered_as(leaves, arrays)
        if fresh:
            live = replaced(live, self._layout.state(leaves))
            for k in fresh:
                leaves[k] = duplicate(arrays[k])
        self._tree = replaced(live, self._layout.state(leaves))
        return cast(State, self._tree)

    def used_up(self, live: State) -> State:
        """Return the tree of a state that no step starts from any more, its arrays released."""
        tree: Any = live
        leaves: list[Any] = optree.tree_leaves(tree, none_is_leaf=True)
        empty = [leaf if id(leaf) in self._places else _EMPTY for leaf in leaves]
        self._tree = replaced(live, self._layout.state(empty))
        return cast(State, self._tree)

    def check(self, live: object, where: int | str) -> None:
        self._live(live, where)

    def _live(self, state: object, where: int | str) -> list[Array]:
        leaves = super()._live(state, where)
        if not self._is_home(leaves):
            self._let_go(leaves)
        return leaves

    def _let_go(self, leaves: list[Any]) -> None:
        """Forget arrays the sweep began with that the state has no more: they take memory."""
        found = set(map(id, leaves))
        for k, array in enumerate(self._home):
            if id(array) in self._places and id(array) not in found:
                del self._places[id(array)]
                self._home[k] = _EMPTY
        self._memory = Memory(())  # asked for only where the state has all of them

    def _leaves(self, state: object, where: int | str = "the live state") -> list[Any]:
        leaves = self._layouts.arrays(state, where)
        self._tree = state
        if not self._home:
            self._begin(leaves, self._layouts.arrays(state, where))
        return leaves

    def _copied(self, arrays: list[Array]) -> Sequence[Any]:
        return [writeable_copy(arrays[k]) for k in range(len(arrays))]

    def _recycle(self, kept: Kept) -> None:
        """Nothing: the next state may be of another size."""


def _of_one_kind(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and alike(one, other)
