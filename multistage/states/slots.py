"""Fast slots: how a state is kept, by reference or by copy.

The fast tier needs no store: a checkpoint there is a reference to arrays that
nobody overwrites, or a copy.  Which of the two depends on the chain:

references (functional chains)
    The arrays of a kept state are marked read-only and get their flag back
    when the last slot that holds them is freed.  An array that does not own
    its memory is copied, strides included: whoever owns it could still write to it.
copies (in-place chains)
    A kept state is copied into pooled arrays, and copied back on load.

The containers of a state (lists, dicts, ...) belong to the user's steps, which
may put other arrays into them.  What is kept has containers of its own, and
each load of a reference makes new ones.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import optree

from ..errors import StateError
from .layout import Array, Layout
from .sharing import Frozen, Memory, is_record, lone_owners, overlap, owner, references, thaw
from .strides import Geometry, alike, duplicate, geometry, room

Adjoint = TypeVar("Adjoint")


class Kept(NamedTuple):
    """One kept state or tape; give it back with `release`."""

    state: Any
    arrays: Sequence[Any]


def no_adjoint(step: int) -> StateError:
    """Return the error for an adjoint step that returned None."""
    return StateError(
        f"the adjoint of step {step} returned None; an adjoint step returns the adjoint of the "
        "state before it, also where it has overwritten its argument"
    )


def overwritten(error: BaseException) -> BaseException:
    """Return a StateError for an operator that wrote to a read-only array, or the error itself."""
    if type(error) is not ValueError or "read-only" not in str(error):
        return error
    return StateError(
        f"an operator wrote to a state that a checkpoint refers to, or to a tape that is held "
        f"({error}); return new arrays, or use InPlaceChain for operators that overwrite"
    )


class StateLayout(Protocol):
    """What an executor asks of a layout; `states.layout.Layout` is that of NumPy states."""

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
        return InPlace(layout) if self._in_place else References(layout)


class Slots(Protocol):
    """Keeps states of one layout, and tapes beside them."""

    @property
    def shared(self) -> bool:
        """Whether a kept state is its `state`: it need not be loaded."""
        ...

    def keep(self, state: Any, where: int | str) -> Kept:
        """Keep a state.  Raises StateError if it is not of the layout."""
        ...

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        """Wrap arrays of state `step` that nobody else writes to, as those read from a store."""
        ...

    def load(self, kept: Kept, live: Any) -> Any:
        """Return the live state equal to `kept`; copies overwrite `live`."""
        ...

    def check(self, live: Any, where: int | str) -> None:
        """Raise StateError if the live state is of another layout, or could not be restored."""
        ...

    def keep_tape(self, tape: Any, states: tuple[Any, Any], step: int) -> Kept:
        """Keep the tape of a step; `states` are those before and after it.  Raises StateError."""
        ...

    def adopt_adjoint(self, adjoint: Adjoint, live: Any) -> Adjoint:
        """Return a user's adjoint, copied where it shares memory with what a sweep holds."""
        ...

    def apart(self, adjoint: Adjoint, live: Any) -> Adjoint:
        """Return what an adjoint step returned, copied where later steps would change it.

        `live` is the state it was given, which is done with.
        """
        ...

    def release(self, kept: Kept) -> None:
        """Give a kept state or tape back."""
        ...

    def trim(self) -> None:
        """Let memory go that is only kept to be reused: something else takes its place."""
        ...

    def release_all(self) -> None:
        """Give everything back, after an error or at the end of a run."""
        ...


_NOTHING: Any = object()  # no state
_kept = tuple.__new__  # what Kept(...) does, without the call around it


def keep_tape(
    frozen: Frozen, tape: Any, states: tuple[Any, Any], memory: Memory | None, said: str
) -> Kept:
    """Return a tape as a tree of its own, its arrays marked read-only.

    Parameters
    ----------
    states : pair of states
        Before and after the step, which a tape may refer to.
    memory : Memory, optional
        What later steps overwrite; the tape is copied where it shares it.
    said : str
        What the tape is, for messages.
    """
    leaves, spec = optree.tree_flatten(tape, none_is_leaf=True)
    if memory is not None:
        leaves = [memory.leaf(leaf, said) for leaf in leaves]
    arrays: list[Any] = []
    found = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    if not all(array.flags.owndata for array in found):
        views = [k for k, leaf in enumerate(leaves) if _is_view(leaf)]
        # The operator may write through the array that it made a view of.  The view is copied
        # unless that array is a state's, or read-only, or nothing but the tape refers to it.
        given = {id(a) for a in optree.tree_leaves(cast(Any, states)) if isinstance(a, np.ndarray)}
        lone = lone_owners([leaves[k] for k in views])
        for k in views:
            whole = owner(leaves[k])
            if whole.flags.owndata and (id(whole) in given or not whole.flags.writeable):
                arrays.append(whole)
            elif id(whole) not in lone:
                leaves[k] = duplicate(leaves[k])
        found = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    arrays += found
    for array in arrays:
        frozen.hold(array)
    return _kept(Kept, (spec.unflatten(leaves), arrays))


def apart_from(adjoint: Adjoint, given: Any) -> Adjoint:
    """Return what an adjoint step returned, copied where it shares memory with what it was given.

    That is a state or a tape which is done with: operators may make the next one
    in the same arrays.
    """
    if type(given) is type(adjoint) is np.ndarray:
        if adjoint is not given and adjoint.flags.owndata and given.flags.owndata:
            return adjoint  # the commonest case
        return Memory([given]).visibly_apart(adjoint)
    mine, theirs = _owned(adjoint), _owned(given)
    if mine is not None and theirs is not None and not _meet(mine, theirs):
        return adjoint
    given = optree.tree_leaves(given, none_is_leaf=True)
    return Memory(given).visibly_apart(adjoint)


def _meet(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether one of some objects is one of the others; of few, in less time than sets take."""
    for one in some:
        for other in others:
            if one is other:
                return True
    return False


def _owned(tree: Any) -> Sequence[Any] | None:
    """Return the leaves of a tree, None if one borrows its memory or refers to arrays."""
    kind = type(tree)
    leaves: Sequence[Any]
    if kind is tuple or kind is list:
        leaves = tree
    elif kind is np.ndarray:
        leaves = (tree,)
    elif kind is dict:
        leaves = tuple(tree.values())
    else:
        leaves = optree.tree_leaves(tree, none_is_leaf=True)
    for leaf in leaves:
        if type(leaf) is not np.ndarray:
            leaves = optree.tree_leaves(tree, none_is_leaf=True)
            break
        if not leaf.flags.owndata:
            return None
    else:
        return leaves
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.owndata:
                return None
        elif is_record(leaf):
            return None
    return leaves


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and not leaf.flags.owndata


class References:
    """Slots of a functional chain."""

    def __init__(self, layout: Layout, frozen: Frozen | None = None) -> None:
        self._layout = layout
        single: tuple[Any, Any] = layout.single or (None, None)
        self._shape, self._dtype = single
        self._frozen = Frozen() if frozen is None else frozen
        self._entries = self._frozen.entries
        self.shared = layout.fixed
        self._later: optree.PyTreeSpec | None = None  # of a state that a step returned

    def keep(self, state: Any, where: int | str) -> Kept:
        frozen, copied = self._entries, False
        if type(state) is np.ndarray and state.dtype is self._dtype and state.shape == self._shape:
            # The same as below for the commonest case.
            entry = frozen.get(id(state))
            if entry is not None:
                entry[1] += 1
                return _kept(Kept, (state, (state,)))
            flags = state.flags
            if flags.owndata:
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
            if type(array) is not np.ndarray:
                continue  # a scalar: nothing can write to it
            flags = array.flags
            if not flags.owndata:
                arrays[k] = array = duplicate(array)
                flags, copied = array.flags, True
            if flags.writeable:
                flags.writeable = False
                frozen[id(array)] = [array, 1]
        if self.shared:
            return Kept(self._layout.state(arrays) if copied else state, arrays)
        if self._later is None and where != 0:
            self._later = optree.tree_structure(state, none_is_leaf=True)
        if self._layout.flat is dict and not copied:
            return Kept(state.copy(), arrays)  # in a tenth of the time that its structure takes
        return Kept(optree.tree_structure(state, none_is_leaf=True), arrays)

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        if self.shared:
            return Kept(self._layout.state(arrays), arrays)
        # With the keys of dicts in the order in which steps return them.
        return Kept(self._later if step and self._later else self._layout.spec, arrays)

    def load(self, kept: Kept, live: Any) -> Any:
        made = kept.state
        if self.shared:
            return made
        return made.copy() if type(made) is dict else made.unflatten(kept.arrays)

    def check(self, live: Any, where: int | str) -> None:
        self._layout.arrays(live, where)

    def keep_tape(self, tape: Any, states: tuple[Any, Any], step: int) -> Kept:
        return keep_tape(self._frozen, tape, states, None, "")

    def adopt_adjoint(self, adjoint: Adjoint, live: Any) -> Adjoint:
        held = [array for array, *_ in self._entries.values()]
        return Memory([*held, *self._layout.arrays(live)]).apart(adjoint, "the adjoint")

    apart = staticmethod(apart_from)

    def release(self, kept: Kept) -> None:
        frozen = self._entries
        for array in kept.arrays:
            entry = frozen.get(id(array))
            if entry is not None:
                entry[1] -= 1
                if not entry[1]:
                    del frozen[id(array)]
                    if len(entry) == 2 and array.flags.owndata:  # nearly all
                        array.flags.writeable = True
                    else:
                        thaw(frozen, entry)

    def trim(self) -> None:
        return

    def release_all(self) -> None:
        self._frozen.free_all()


class Copies:
    """Slots that copy arrays, whoever owns them; freed arrays are reused by later checkpoints.

    State 0 is kept once for however many hold it: the caller's copy of it and
    the checkpoint that most schedules begin with are the same.
    """

    shared = False

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
        if self._pool and any(owner(array).base is None for array in arrays):
            self._pool.pop()
        return Kept(step, arrays)

    def load(self, kept: Kept, live: Any) -> Any:
        self._copy_back(self._layout.arrays(live, kept.state), kept)
        return live

    def check(self, live: Any, where: int | str) -> None:
        """Nothing: the arrays are not the live state's."""

    def keep_tape(self, tape: Any, states: tuple[Any, Any], step: int) -> Kept:
        return Kept(tape, ())  # the operators' own

    def adopt_adjoint(self, adjoint: Adjoint, live: Any) -> Adjoint:
        return adjoint

    def apart(self, adjoint: Adjoint, live: Any) -> Adjoint:
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
        for target, array in zip(targets, kept.arrays, strict=True):
            np.copyto(target, array)

    def _recycle(self, kept: Kept) -> None:
        self._pool.append(kept.arrays)

    def _live(self, state: Any, where: int | str) -> list[Array]:
        """Return the arrays to copy from."""
        return self._layout.arrays(state, where)


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
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._frozen = Frozen()
        self._home: list[Any] = []  # the arrays that the sweep began with
        self._simple = True  # arrays only, no scalars
        self._overlap: bool | None = None  # not known yet
        self._only: Any = _NOTHING  # the array that is the whole state, if it is one
        self._geometries: list[Geometry] = []  # theirs, and those of the pool
        self._places: dict[int, int] = {}  # id -> where in `_home`
        self._memory = Memory(())

    def load(self, kept: Kept, live: Any) -> Any:
        if live is self._only and type(kept.arrays[0]) is np.ndarray:
            put_back(live, kept.arrays[0], "")
            return live
        leaves = self._leaves(live)
        if self._is_home(leaves) and all(type(array) is np.ndarray for array in kept.arrays):
            self._copy_back(leaves, kept)
            return live
        for k, value in enumerate(kept.arrays):
            if type(value) is not np.ndarray:
                leaves[k] = value
            elif id(leaves[k]) in self._places and alike(leaves[k], value):
                put_back(leaves[k], value, self._layout.leaves[k].path)
            else:
                leaves[k] = duplicate(value)
        return replaced(live, self._layout.state(leaves))

    def check(self, live: Any, where: int | str) -> None:
        if live is not self._only:
            self._live(live, where)
        else:
            self._layout.arrays(live, where)  # a step can set the shape of an array

    def given_back(self, live: Any, kept: Kept) -> bool:
        """Put the state that the sweep began with back into its tree, whatever that is now.

        For a sweep that a state of another layout has ended: what its arrays were is
        copied into those of them that are there still, else into new ones.  False if the
        tree cannot take new ones, as an array or a tuple.
        """
        found = optree.tree_leaves(live, none_is_leaf=True)
        own = list(map(id, self._home))
        fits = len(found) == len(self._layout.leaves)
        leaves: list[Any] = []
        for k, array in enumerate(kept.arrays):
            leaf: Any = found[k] if fits else None
            # Any other array may be the operators' own.
            if id(leaf) == own[k] and (leaf.shape, leaf.dtype) == (array.shape, array.dtype):
                put_back(leaf, array, self._layout.leaves[k].path)
                leaves.append(leaf)
            else:
                leaves.append(duplicate(array) if type(array) is np.ndarray else array)
        return replaced(live, self._layout.state(leaves)) is live

    def keep_tape(self, tape: Any, states: tuple[Any, Any], step: int) -> Kept:
        memory = self._memory_of(states[1])
        return keep_tape(self._frozen, tape, states, memory, f"the tape of step {step}")

    def adopt_adjoint(self, adjoint: Adjoint, live: Any) -> Adjoint:
        return self._memory_of(live).apart(adjoint, "the adjoint")

    def apart(self, adjoint: Adjoint, live: Any) -> Adjoint:
        return self._memory_of(live).visibly_apart(adjoint)

    def release(self, kept: Kept) -> None:
        super().release(kept)
        if self._frozen.entries:
            for array in kept.arrays:
                self._frozen.free(array)

    def release_all(self) -> None:
        super().release_all()
        self._frozen.free_all()
        self._home = []
        self._only = _NOTHING
        self._places = {}
        self._memory = Memory(())

    def _leaves(self, state: Any, where: int | str = "the live state") -> list[Any]:
        """Return the leaves of a state; those of the first one looked at may be overwritten."""
        leaves = self._layout.arrays(state, where)
        if not self._home:
            self._begin(leaves, self._layout.arrays(state, where))
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

    def _memory_of(self, live: Any) -> Memory:
        if live is self._only:
            return self._memory
        leaves = self._leaves(live)
        return self._memory if self._is_home(leaves) else Memory(leaves)

    def _live(self, state: Any, where: int | str) -> list[Array]:
        """Return the arrays to copy from.  Raises StateError if they could not be restored."""
        leaves = self._leaves(state, where)
        if not self._is_home(leaves):
            self._judge(leaves, where)
        return leaves

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
                if references(leaves, k) != 2:
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
            if id(leaves[k].base) not in lone:
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
        if self._is_home(arrays):
            return super()._copied(arrays)
        copies: list[Any] = list(self._pool.pop() if self._pool else self._made(self._home))
        for k, array in enumerate(arrays):
            if type(array) is not np.ndarray:
                copies[k] = array  # a scalar stays one
            elif type(copies[k]) is np.ndarray and alike(copies[k], array):
                np.copyto(copies[k], array)
            else:
                copies[k] = room(array)  # writeable, whatever it repeats: the pool's one day
                np.copyto(copies[k], array)
        return tuple(copies)

    def _copy_back(self, targets: list[Array], kept: Kept) -> None:
        for target, array, leaf in zip(targets, kept.arrays, self._layout.leaves, strict=True):
            put_back(target, array, leaf.path)

    def _recycle(self, kept: Kept) -> None:
        arrays = kept.arrays
        if type(arrays) is tuple:  # of an exchanged state
            like = zip(arrays, self._geometries, self._home, strict=True)
            arrays = [
                array if type(array) is np.ndarray and geometry(array) == where else room(home)
                for array, where, home in like
            ]
        self._pool.append(arrays)


def put_back(target: Array, array: Array, path: str) -> None:
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


def replaced(live: Any, made: Any) -> Any:
    """Return `live` with the leaves of `made`; a container that cannot change is exchanged."""
    kind = type(live)
    if kind in (dict, OrderedDict, defaultdict):
        for key in live:
            live[key] = replaced(live[key], made[key])
    elif kind in (list, deque):
        for k, value in enumerate(made):
            live[k] = replaced(live[k], value)
    elif kind is type(made) and (
        kind is tuple or hasattr(kind, "_make")
    ):  # what hangs below it may change
        parts = [replaced(one, other) for one, other in zip(live, made, strict=True)]
        if all(map(operator.is_, parts, live)):
            return live
        return kind._make(parts) if hasattr(kind, "_make") else tuple(parts)
    elif kind is type(made) and hasattr(live, "__dict__"):  # a registered node
        vars(live).update(vars(made))
    else:
        return made
    return live
