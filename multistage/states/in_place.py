"""Slots of in-place chains: copies, put back into the tree that steps overwrite."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import optree

from ..errors import StateError
from .layout import Array, Layout, Layouts, bytes_of, ordered_as, put_in_order, same_order
from .references import References, VariedReferences, keep_tape
from .sharing import (
    KEPT,
    Frozen,
    Memory,
    counts,
    is_known,
    lone_owners,
    overlap,
    parts_of,
    references,
    stays,
)
from .slots import Kept
from .strides import Geometry, alike, duplicate, geometry, owner, room

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

    def given_back(self, live: object, kept: Kept) -> bool:
        """Put the state that the sweep began with back; False if that cannot be."""
        self.load(kept, live)
        return True

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
            copy[...] = array  # in a fifth of the time that `copyto` takes to begin
        return copies

    def _made(self, arrays: list[Array]) -> list[Array]:
        """Return arrays for copies of these."""
        return [np.empty_like(array) for array in arrays]

    def _copy_back(self, targets: list[Array], kept: Kept) -> None:
        arrays: Sequence[Any] = kept.arrays
        for target, array in zip(targets, arrays, strict=True):
            target[...] = array

    def _recycle(self, kept: Kept) -> None:
        self._pool.append(kept.arrays)

    def _live(self, state: object, where: int | str) -> list[Array]:
        """Return the arrays to copy from."""
        return self._layout.arrays(state, where)


_NOTHING: Any = object()  # no state
_EMPTY = np.zeros(0)


class InPlace(Copies):
    """Slots of an in-place chain, whose live state is a tree that steps overwrite.

    Steps find their state in the tree that they are given.  They may write into
    its arrays, swap them, or put others in their place; a load restores the
    tree.  Which arrays it may write into is the question: those that the sweep
    began with, since the caller gave them to be overwritten.  In place of any
    other a new array is put.  An operator that knows an array by another name
    too, such as an attribute of its own, would not see that, and an array that
    is written to elsewhere would change what was restored: arrays that the sweep
    did not begin with are refused unless nothing else refers to them.

    An adjoint step that keeps a reference to this tree would find another state there
    than the one it was given: it is refused (`guarded`).

    Where states differ (`Layouts`), a step may put arrays of other shapes or dtypes in the
    place of those in its containers, and a load puts arrays of the kept shapes back.  Then
    copies are not pooled: the room of one state need not hold the next.
    """

    def __init__(self, layout: Layout | Layouts) -> None:
        super().__init__(layout if isinstance(layout, Layout) else layout.first)
        self._layouts, self._varied = layout, layout.varied
        self.frozen = Frozen()
        self._home: list[Any] = []  # the arrays that the sweep began with
        self._simple = True  # arrays only, no scalars
        self._overlap: bool | None = None  # not known yet
        self._only: Any = _NOTHING  # the array that is the whole state, if it is one
        self._tree: Any = _NOTHING  # the live state, as it was seen last
        self._geometries: list[Geometry] = []  # theirs, and those of the pool
        self._places: dict[int, int] = {}  # id -> where in `_home`
        self._memory = Memory(())

    def load(self, kept: Kept, live: State) -> State:
        arrays: Sequence[Any] = kept.arrays
        if self._varied:
            leaves: list[Any] = optree.tree_leaves(cast(Any, live), none_is_leaf=True)
        elif live is self._only and type(arrays[0]) is np.ndarray:
            put_back(self._home[0], arrays[0], "")
            return live
        else:
            leaves = self._leaves(live)
            if (
                self._is_home(leaves)
                and all(type(array) is np.ndarray for array in arrays)
                and same_order(leaves, arrays)
            ):
                self._copy_back(leaves, kept)
                return live
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
        where: Any = kept.state
        layout = self._layouts.at(where)  # its keys have the order they had in that state
        if fresh:
            live = replaced(live, layout.state(leaves))
            for k in fresh:
                leaves[k] = duplicate(arrays[k])
        self._tree = replaced(live, layout.state(leaves))
        return cast(State, self._tree)

    def check(self, live: object, where: int | str) -> None:
        if live is not self._only:
            self._live(live, where)
        else:
            self._layouts.arrays(live, where)  # a step can set the shape of an array

    def given_back(self, live: State, kept: Kept) -> bool:
        """Put the state that the sweep began with back into its tree, whatever that is now.

        For a sweep that a state of another layout has ended: what its arrays were is
        copied into those of them that are there still, else into new ones.  False if the
        tree cannot take new ones, as an array or a tuple.
        """
        tree: Any = live
        found: list[Any] = optree.tree_leaves(tree, none_is_leaf=True)
        own = list(map(id, self._home))
        fits = len(found) == len(self._layout.leaves)
        arrays: Sequence[Any] = kept.arrays
        leaves: list[Any] = []
        for k, array in enumerate(arrays):
            leaf: Any = found[k] if fits else None
            # Any other array may be the operators' own.
            if id(leaf) == own[k] and (leaf.shape, leaf.dtype) == (array.shape, array.dtype):
                put_back(leaf, array, self._layout.leaves[k].path)
                leaves.append(leaf)
            else:
                leaves.append(duplicate(array) if type(array) is np.ndarray else array)
        return replaced(live, self._layout.state(leaves)) is live

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        memory = self._memory_of(states[1])
        return keep_tape(self.frozen, tape, states, memory, f"the tape of step {step}")

    def adopt_adjoint(self, adjoint: Adjoint, live: object) -> Adjoint:
        return self._memory_of(live).apart(adjoint, "the adjoint")

    def apart(self, adjoint: Adjoint, live: object) -> Adjoint:
        return adjoint  # since its step, which is guarded

    def guarded(
        self, reverse: Callable[[object, Adjoint, int], Adjoint]
    ) -> Callable[[object, Adjoint, int], Adjoint]:
        """Return an adjoint step whose result is apart from the live state.

        It raises StateError if the operator has kept a reference to that state.
        """
        return partial(self._reversed_by, reverse)

    def _reversed_by(
        self,
        reverse: Callable[[object, Adjoint, int], Adjoint],
        tape: object,
        adjoint: Adjoint,
        step: int,
    ) -> Adjoint:
        parts = parts_of(self._tree)
        before = counts(parts)
        adjoint = self._memory_of(self._tree).visibly_apart(reverse(tape, adjoint, step))

        def grew() -> bool:
            return any(map(operator.gt, counts(parts), before)) or is_known(self._tree, parts)

        if counts(parts) != before and stays(grew):
            raise StateError(
                KEPT.format(f"the adjoint of step {step}")
                + ", and return arrays, or tuples, lists, dicts or dataclasses of arrays"
            )
        return adjoint

    def release(self, kept: Kept) -> None:
        super().release(kept)
        if self.frozen.entries:
            for array in kept.arrays:
                self.frozen.free(array)

    def release_all(self) -> None:
        super().release_all()
        self.frozen.free_all()
        self._home = []
        self._only = self._tree = _NOTHING
        self._places = {}
        self._memory = Memory(())

    def _leaves(self, state: object, where: int | str = "the live state") -> list[Any]:
        """Return the leaves of a state; those of the first one looked at may be overwritten."""
        leaves = self._layouts.arrays(state, where)
        self._tree = state
        if not self._home:
            self._begin(leaves, self._layouts.arrays(state, where))
        return leaves

    def _begin(self, home: list[Any], again: list[Any]) -> None:
        for leaf, one, other in zip(self._layout.leaves, home, again, strict=True):
            if one is not other and type(one) is np.ndarray:
                raise StateError(
                    f"leaf {leaf.path} is another array each time the state is looked at; an "
                    "in-place chain's state must hold the arrays that its steps overwrite"
                )
        self._home = home
        self._simple = all(type(array) is np.ndarray for array in home)
        self._overlap = None
        self._only = home[0] if self._simple and self._layout.single is not None else _NOTHING
        geometries = [geometry(array) for array in home]
        if geometries != self._geometries:
            self._geometries = geometries
            self._pool.clear()  # copies keep the strides: they may decide the last bit
        self._places = {id(array): k for k, array in enumerate(home)}
        self._memory = Memory(home)

    def _is_home(self, leaves: list[Any]) -> bool:
        """Whether a state has the arrays that the sweep began with, each in its place."""
        return self._simple and all(map(operator.is_, leaves, self._home))

    def _memory_of(self, live: object) -> Memory:
        if live is self._only:
            return self._memory
        leaves = self._leaves(live)
        return self._memory if self._is_home(leaves) else Memory(leaves)

    def _live(self, state: object, where: int | str) -> list[Array]:
        """Return the arrays to copy from.  Raises StateError if they could not be restored."""
        leaves = self._leaves(state, where)
        if not self._is_home(leaves):
            self._judge(leaves, where)
            if self._varied:
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

    def _judge(self, leaves: list[Any], where: int | str) -> None:
        """Raise StateError if a leaf was replaced by an array that something else refers to."""
        if self._overlap is None:
            self._overlap = overlap(self._home)
        if self._overlap:
            raise StateError(
                f"state {where} has other arrays in place of leaves that share memory with one "
                "another; such a state must keep the arrays it began with"
            )
        found: set[int] = set()
        views: list[int] = []
        for k in range(len(leaves)):  # by number: a name would be one more reference
            if type(leaves[k]) is not np.ndarray:
                continue
            place = self._places.get(id(leaves[k]))
            if place is None:
                # The tree and the list here.
                if references(leaves, k) != 2 and stays(partial(_is_shared, leaves, k)):
                    raise self._refused(k, where, "another array, which something else refers to")
                if not leaves[k].flags.owndata:
                    views.append(k)
            elif place in found:
                raise self._refused(k, where, "an array that is another leaf too")
            else:
                found.add(place)
                if place != k and geometry(leaves[k]).strides != self._geometries[k].strides:
                    raise self._refused(k, where, "another leaf's array, of another memory layout")
        lone = lone_owners([leaves[k] for k in views]) if views else ()
        for k in views:
            if id(leaves[k].base) not in lone and stays(
                partial(_is_owned_elsewhere, leaves, views, k)
            ):
                raise self._refused(k, where, "a view of memory that something else refers to")

    def _refused(self, k: int, where: int | str, what: str) -> StateError:
        path = self._layout.leaves[k].path
        if not path:
            return StateError(
                f"state {where} is another array than the one given; an in-place chain must "
                "return the state it was given"
            )
        return StateError(
            f"state {where}: leaf {path} was replaced by {what}; an in-place step writes into the "
            f"arrays of its state, as in state{path}[...] = value, swaps them, or puts new arrays "
            "in their place that it refers to nowhere else"
        )

    def _made(self, arrays: list[Array]) -> list[Array]:
        return [room(array) for array in arrays]

    def _copied(self, arrays: list[Array]) -> Sequence[Any]:
        if self._varied:
            return [writeable_copy(arrays[k]) for k in range(len(arrays))]
        if self._is_home(arrays):
            return super()._copied(arrays)
        copies: list[Any] = list(self._pool.pop() if self._pool else self._made(self._home))
        for k, array in enumerate(arrays):
            if type(array) is type(copies[k]) is np.ndarray and alike(copies[k], array):
                np.copyto(copies[k], array)
            else:
                copies[k] = writeable_copy(array)
        return tuple(copies)

    def _copy_back(self, targets: list[Array], kept: Kept) -> None:
        arrays: Sequence[Any] = kept.arrays
        for target, array, leaf in zip(targets, arrays, self._layout.leaves, strict=True):
            put_back(target, array, leaf.path)

    def _recycle(self, kept: Kept) -> None:
        if self._varied:
            return  # the next state may be of another size
        arrays = kept.arrays
        if type(arrays) is not list:  # of a state that was exchanged, or whose keys were
            like = zip(arrays, self._geometries, self._home, strict=True)
            arrays = [
                array if type(array) is np.ndarray and geometry(array) == where else room(home)
                for array, where, home in like
            ]
        self._pool.append(arrays)


class VariedInPlace(InPlace):
    """Slots of an in-place chain whose states differ; what they hold is counted."""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._count = layouts.count

    def keep(self, state: object, where: int | str) -> Kept:
        kept = super().keep(state, where)
        self._count(kept.arrays)
        return kept

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        self._count(arrays)
        return Kept(step, arrays)

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        kept = super().keep_tape(tape, states, step)
        self._count(kept.arrays)
        return kept

    def release(self, kept: Kept) -> None:
        self._count(kept.arrays, -1)
        super().release(kept)

    def used_up(self, live: State) -> State:
        """Return the tree of a state that no step starts from any more, its arrays released."""
        tree: Any = live
        leaves: list[Any] = optree.tree_leaves(tree, none_is_leaf=True)
        empty = [leaf if id(leaf) in self._places else _EMPTY for leaf in leaves]
        self._tree = replaced(live, self._layout.state(empty))
        return cast(State, self._tree)


def writeable_copy(array: object) -> object:
    """Return a copy that is laid out as an array is, whatever it repeats; a scalar as it is."""
    if type(array) is not np.ndarray:
        return array
    made = room(array)
    np.copyto(made, array)
    return made


def put_back(target: Array, array: Array, path: str) -> None:
    """Copy an array's values into the one that the operator was given."""
    if target.shape != array.shape or target.dtype != array.dtype:  # or it would be repeated
        raise StateError(
            f"leaf {path or 'array'} was made {target.shape} {target.dtype} from {array.shape} "
            f"{array.dtype} in place; an in-place chain's operators leave its arrays' shapes, or "
            "put other arrays into its containers"
        )
    if target.flags.writeable:
        np.copyto(target, array)
    elif target.tobytes() != array.tobytes():
        raise StateError(
            f"leaf {path} is read-only and has changed since its state was kept; an in-place "
            "chain's state is copied back into its arrays, which must be writeable"
        )


def replaced(live: State, wanted: object) -> State:
    """Return `live` with the leaves of `wanted`, in the order of its keys.

    A container that cannot change is exchanged.
    """
    tree: Any = live
    leaves: Any = wanted
    kind = type(tree)
    if kind in (dict, OrderedDict, defaultdict):
        parts = {key: replaced(tree[key], leaf) for key, leaf in leaves.items()}
        tree.update(parts)
        if list(tree) != list(parts):
            put_in_order(tree, list(parts))
    elif kind in (list, deque):
        for k, value in enumerate(leaves):
            tree[k] = replaced(tree[k], value)
    elif kind is type(leaves) and (
        kind is tuple or hasattr(kind, "_make")
    ):  # what hangs below it may change
        made = [replaced(one, other) for one, other in zip(tree, leaves, strict=True)]
        if not all(map(operator.is_, made, tree)):
            tree = kind._make(made) if hasattr(kind, "_make") else tuple(made)
    elif kind is type(leaves) and hasattr(tree, "__dict__"):  # a registered node
        vars(tree).update(vars(leaves))
    else:
        tree = leaves
    state: State = tree
    return state


def _is_shared(leaves: Sequence[object], k: int) -> bool:
    """Whether more refers to a leaf than its tree and the list of leaves."""
    return references(leaves, k) != 2


def _is_owned_elsewhere(leaves: Sequence[Array], views: Sequence[int], k: int) -> bool:
    """Whether more than some views of these leaves refers to the memory of one of them."""
    return id(leaves[k].base) not in lone_owners([leaves[each] for each in views])


class ArrayStates:
    """Pytrees of NumPy arrays; `in_place` if steps overwrite those of their state."""

    def __init__(self, in_place: bool, kind: type[Layout] = Layout) -> None:
        self._in_place, self._kind = in_place, kind

    def layout(self, state: object) -> Layout:
        return self._kind.of(state)

    def slots(self, layout: Layout) -> InPlace | References:
        return InPlace(layout) if self._in_place else References(layout)


class VariedStates:
    """Pytrees of NumPy arrays that differ from step to step; `layouts` are of the last sweep."""

    def __init__(self, in_place: bool, kind: type[Layout] = Layout) -> None:
        self._in_place, self._kind = in_place, kind
        self.layouts: Layouts | None = None
        self._weights: dict[int, tuple[Layout, int]] = {}  # bytes of a layout, by its identity

    def layout(self, state: object) -> Layouts:
        self.layouts = Layouts(state, self._in_place, self._kind)
        self._weights.clear()
        return self.layouts

    def at(self, step: int) -> Layout:
        """Return the layout of a state that has been seen."""
        assert self.layouts is not None
        return self.layouts.at(step)

    def see(self, state: object, step: int) -> Layout:
        """Return the layout of a live state.  Raises StateError."""
        assert self.layouts is not None
        return self.layouts.see(state, step)

    def weigh(self, state: object, step: int) -> int:
        layout = self.see(state, step)
        found = self._weights.get(id(layout))
        if found is None:
            found = self._weights[id(layout)] = layout, bytes_of(layout)
        return found[1]

    def slots(self, layout: Layouts) -> VariedInPlace | VariedReferences:
        return VariedInPlace(layout) if self._in_place else VariedReferences(layout)


def _of_one_kind(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and alike(one, other)
