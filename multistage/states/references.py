"""Slots of functional chains: a checkpoint is a reference to arrays that nothing overwrites.

The arrays of a kept state are marked read-only and get their flag back when the last
slot that holds them is freed.  An array that does not own its memory is copied, strides
included: the owner could still write to it.

The containers of a state (lists, dicts, ...) belong to the user's steps, which
may put other arrays into them.  What is kept has containers of its own, and
each load makes new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import optree

from .layout import Array, Layout, Layouts, rebuilt
from .naming import has_methods
from .sharing import Frozen, Memory, apart_from, lone_owners, thaw
from .slots import Kept
from .strides import duplicate, owner

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_kept = tuple.__new__  # what Kept(...) does, without the call around it


class References:
    """Slots of a functional chain."""

    def __init__(self, layout: Layout | Layouts) -> None:
        self._layout = layout
        self._shape: object = None
        self._dtype: object = None
        self.shared = False
        if isinstance(layout, Layout):
            self._shape, self._dtype = layout.single or (None, None)
            self.shared = layout.fixed
        self.frozen = Frozen()
        self._entries = self.frozen.entries

    def keep(self, state: object, where: int | str) -> Kept:
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
        layout, arrays = self._layout.seen(state, where)
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
            return Kept(layout.state(arrays) if copied else state, arrays)
        if layout.flat is dict and not copied:
            tree: Any = state
            return Kept(tree.copy(), arrays)  # in a tenth of the time that a new tree takes
        return Kept(layout, arrays)

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        layout = self._layout.at(step)
        return Kept(layout.state(arrays) if self.shared else layout, arrays)

    def load(self, kept: Kept, live: State) -> State:
        """Return a kept state in containers of its own, unless these are tuples."""
        made, arrays = kept
        if type(made) is dict:
            return cast(State, made.copy())
        return cast(State, made.state(cast(Any, arrays)) if isinstance(made, Layout) else made)

    def check(self, live: object, where: int | str) -> None:
        self._layout.arrays(live, where)

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        return keep_tape(self.frozen, tape, states, None, "")

    def adopt_adjoint(self, adjoint: Adjoint, live: object) -> Adjoint:
        held = [array for array, *_ in self._entries.values()]
        return Memory([*held, *self._layout.arrays(live)]).apart(adjoint, "the adjoint")

    apart = staticmethod(apart_from)

    def release(self, kept: Kept) -> None:
        frozen = self._entries
        arrays: Sequence[Any] = kept.arrays
        for array in arrays:
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
        self.frozen.free_all()


class VariedReferences(References):
    """Slots of a functional chain whose states differ; what they hold is counted."""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__(layouts)
        self._count = layouts.count

    def keep(self, state: object, where: int | str) -> Kept:
        kept = super().keep(state, where)
        self._count(kept.arrays)
        return kept

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        self._count(arrays)
        return super().adopt(arrays, step)

    def used_up(self, live: object) -> None:
        """Return what is live in place of a state that no step starts from any more."""
        return

    def keep_tape(self, tape: object, states: tuple[object, object], step: int) -> Kept:
        kept = super().keep_tape(tape, states, step)
        self._count(kept.arrays)
        return kept

    def release(self, kept: Kept) -> None:
        self._count(kept.arrays, -1)
        super().release(kept)


def keep_tape(
    frozen: Frozen, tape: object, states: tuple[object, object], memory: Memory | None, said: str
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
    tree: Any = tape
    leaves: list[Any]
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    if memory is not None:
        leaves = [memory.leaf(leaf, said) for leaf in leaves]
        for kind in _classes(spec):
            memory.leaf(kind, said)
    arrays: list[Any] = []
    numbered = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    views = [k for k, array in numbered if not array.flags.owndata]
    if views:
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
    arrays += [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    for array in arrays:
        frozen.hold(array)
    return _kept(Kept, (rebuilt(tree, spec, leaves), arrays))


def _classes(spec: optree.PyTreeSpec) -> Iterator[type]:
    """Yield the classes of a tree's containers that have methods."""
    kind = spec.type
    if kind is not None and has_methods(kind):
        yield kind
    if spec.num_nodes > spec.num_leaves + 1:
        for each in spec.children():
            yield from _classes(each)
