"""The layout of a state: its tree, shapes and dtypes, and the way to raw buffers and back."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeVar, cast

import numpy as np
import optree

from ..errors import StateError
from .strides import Geometry, c_strides, flattened, geometry, owner, restored

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
# For each leaf how it lies in memory, None for plain C order, or that it is a scalar.
Packing = Sequence[Geometry | Literal["scalar"] | None]
SCALAR: Final = "scalar"
ItemT = TypeVar("ItemT")
T = TypeVar("T")
ALIGN = 64
Keys = tuple[tuple[Hashable, ...], ...]


class Reordered(list[Any]):
    """A list with an item for each leaf of a state whose dicts have their keys in another order.

    Another than those of the state that a layout was made of.

    An operator can see that order: it belongs to the state, as the arrays do.

    Attributes
    ----------
    keys : tuple of tuples
        What `key_orders` returns for the state.
    """

    __slots__ = ("keys",)

    def __init__(self, items: Iterable[object], keys: Keys) -> None:
        super().__init__(items)
        self.keys = keys


def ordered_as(items: Sequence[ItemT], state: Sequence[object]) -> list[ItemT]:
    """Return items for the leaves of a state as a list that has the order of its keys, too.

    Parameters
    ----------
    state : sequence
        The arrays of a state that has that order.
    """
    if type(state) is Reordered:
        return Reordered(items, state.keys)
    return list(items)


def same_order(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether the dicts of two states of a layout have their keys in one order."""
    if type(one) is Reordered and type(other) is Reordered:
        return one.keys == other.keys
    return type(one) is not Reordered and type(other) is not Reordered


@dataclass(frozen=True, slots=True)
class Leaf:
    """Shape, dtype and place of one array in a record."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    offset: int
    nbytes: int


class Layout:
    """Tree, shapes and dtypes that every state of a computation shares.

    Values belong to the keys of dicts, in whatever order these are.  The order of
    the keys is kept beside the arrays (`Reordered`) where it is not the layout's own.

    A leaf is an array, or a NumPy scalar where a step returns one in place of
    a 0-d array: the two give different bits in some operators (`x**3`), so each
    stays what it is.  A *record* is one state as raw bytes: its leaves one
    after the other, in the `places` of their sizes.

    Attributes
    ----------
    leaves : tuple of Leaf
    nbytes : int
        Bytes of one record.
    single : (shape, dtype) or None
        Of the one array that is the whole state, if it is one.
    spec : optree.PyTreeSpec
    flat : type or None
        Tuple, list or dict, if the state is one of arrays only.
    keys : tuple of tuples
        The order of the keys in the dicts of the state that it was made of.
    fixed : bool
        Whether no leaf of a state can be exchanged for another: its tree is
        made of tuples only.
    varied : bool
        Whether states differ in the number, shapes and dtypes of their arrays; see `up_to`.

    Examples
    --------
    >>> layout = Layout.of({"h": np.zeros(3), "c": np.zeros(5)})
    >>> layout.nbytes, [leaf.path for leaf in layout.leaves]
    (128, ["['c']", "['h']"])
    """

    def __init__(
        self, spec: optree.PyTreeSpec, leaves: tuple[Leaf, ...], nbytes: int, keys: Keys
    ) -> None:
        self.spec = spec
        self.leaves = leaves
        self.nbytes = nbytes
        self.varied = False
        self.single = (
            (leaves[0].shape, leaves[0].dtype) if spec.is_leaf() and len(leaves) == 1 else None
        )
        self.fixed = _is_fixed(spec)
        # A plain tuple, list or dict of arrays is looked into without walking a tree.
        flat = spec.type in (tuple, list, dict) and all(c.is_leaf() for c in spec.children())
        self.flat = spec.type if flat else None
        self.keys = keys
        # Those that the tree would lack as optree makes it: an OrderedDict's after `move_to_end`.
        made = key_orders(spec.unflatten(range(len(leaves)))) if keys else keys
        self._turned = keys if made != keys else None
        self._kinds = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._plain = [c_strides(leaf.shape, leaf.dtype.itemsize) for leaf in leaves]

    @classmethod
    def of(cls, state: object) -> Self:
        """Return the layout of a state.

        Raises
        ------
        StateError
            If a leaf is no plain NumPy array, holds objects, or there is none.
        """
        paths, values, spec = optree.tree_flatten_with_path(cast(Any, state), none_is_leaf=True)
        if not values:
            raise StateError("the state holds no array; it must be a pytree with at least one")
        names = ["".join(f"[{key!r}]" for key in path) for path in paths]
        arrays = list(map(_plain, values, names))
        offsets, nbytes = places([array.nbytes for array in arrays])
        leaves = tuple(
            Leaf(name, array.shape, array.dtype, offset, array.nbytes)
            for name, array, offset in zip(names, arrays, offsets, strict=True)
        )
        _hashable(spec, state)
        return cls(spec, leaves, nbytes, key_orders(state))

    @classmethod
    def up_to(cls, nbytes: int) -> Layout:
        """Return the layout of states that differ, each of arrays of at most so many bytes.

        Examples
        --------
        >>> layout = Layout.up_to(1000)
        >>> layout.nbytes, layout.varied
        (1024, True)
        """
        layout = cls.of(np.broadcast_to(np.uint8(0), (nbytes,)))
        layout.varied = True
        return layout

    def parted(self) -> Layout:
        """Return the layout of parts of such states, each of arrays of its own."""
        found = copy.copy(self)
        found.varied = True
        return found

    def at(self, step: int) -> Layout:
        """Return the layout of a state: of equal ones, this."""
        return self

    def seen(self, state: object, where: int | str) -> tuple[Layout, list[Array]]:
        """Return the layout of a state and its arrays; see `arrays`."""
        return self, self.arrays(state, where)

    def arrays(self, state: object, where: int | str = "the state") -> list[Array]:
        """Return the arrays of `state`, in record order.

        Parameters
        ----------
        where : int or str
            Index or description of the state, for the message.

        Raises
        ------
        StateError
            If tree, shape or dtype differ from this layout; the message names
            the leaf and both values.
        """
        kind = type(state)
        if kind is np.ndarray and (state.shape, state.dtype) == self.single:  # type: ignore[attr-defined]
            return [cast(Array, state)]
        if kind is self.flat:
            found = self._level(state)
            for value in found:
                if type(value) is not np.ndarray:
                    break
            else:
                if [(value.shape, value.dtype) for value in found] == self._kinds and (
                    kind is not dict or tuple(cast(Any, state)) == self.keys[0]
                ):
                    return found
        values, spec = optree.tree_flatten(cast(Any, state), none_is_leaf=True)
        state_index = where if isinstance(where, int) else None
        if spec != self.spec:
            where = f"state {where}" if isinstance(where, int) else where
            linked = _is_linked(spec)
            raise _differs(
                state_index,
                f"{where} changed its structure from {self.spec} to {spec}; "
                "every state must have the tree of the first"
                + (" (an OrderedDict: use a dict, whose order may change)" if linked else ""),
            )
        arrays = []
        for leaf, value in zip(self.leaves, values, strict=True):
            array = _plain(value, leaf.path, where)
            if array.shape != leaf.shape or array.dtype != leaf.dtype:
                where = f"state {where}" if isinstance(where, int) else where
                raise _differs(
                    state_index,
                    f"{where} changed leaf {leaf.path or 'array'} from {leaf.shape} {leaf.dtype} "
                    f"to {array.shape} {array.dtype}; every state must have the layout of the "
                    "first",
                )
            arrays.append(array)
        if self.keys:
            keys = key_orders(state)
            if keys != self.keys:
                return Reordered(arrays, keys)
        return arrays

    def example(self) -> object:
        """Return a tree with the keys of dicts as they are in the state it was made of.

        Its arrays take no memory: they repeat one element.
        """
        arrays = [np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for leaf in self.leaves]
        return self.spec.unflatten(arrays)

    def _level(self, state: Any) -> list[Any]:
        """Return the leaves of a tuple, list or dict; none if its keys are others."""
        if self.flat is not dict:
            return list(state)
        try:
            return self.spec.flatten_up_to(state)
        except ValueError:
            return []

    def state(self, arrays: Sequence[Array]) -> object:
        """Return the state made of `arrays`, the inverse of `arrays()`: a tree of its own."""
        if self.single is not None:
            return arrays[0]
        if self.flat is tuple:
            return tuple(arrays)
        made: object = self.spec.unflatten(arrays)
        keys = arrays.keys if type(arrays) is Reordered else self._turned
        return made if keys is None else in_order(made, keys)

    def views(self, record: Array) -> list[Array]:
        """Return the arrays of a record as views into its bytes (uint8, at least `nbytes`)."""
        return [
            record[leaf.offset : leaf.offset + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
            for leaf in self.leaves
        ]

    def pack(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], Packing | None]:
        """Return what a store takes, C-contiguous arrays, and what `unpack` needs besides."""
        return packed(arrays, None if self.varied else self._plain)

    def unpack(self, arrays: Sequence[Array], packing: Packing | None) -> list[Array]:
        """Return the arrays that `pack` was given, from the store's copies."""
        if packing is None:
            return list(arrays)
        found = [
            array if where is None else array[()] if where == SCALAR else restored(array, where)
            for array, where in zip(arrays, packing, strict=True)
        ]
        return ordered_as(found, packing)

    def same_as(self, other: Layout) -> bool:
        """Whether both describe the same states."""
        same = self.spec == other.spec and self.leaves == other.leaves
        return same and self.varied == other.varied


class Layouts:
    """The layouts of states that differ from step to step, as on a mesh that is refined on the way.

    The layout of each state is learnt when it is first made, in the forward sweep.  A
    state that is made again later must have the same; each sweep starts again.  In functional
    chains trees, shapes and dtypes may differ; in in-place chains the tree stays.

    Parameters
    ----------
    state : pytree of arrays
        State 0.
    in_place : bool
        Whether the tree of all states is that of the first.
    kind : type
        Of the layouts.

    Attributes
    ----------
    nbytes : int
        Bytes of one record of the largest state so far.
    held_bytes : int
        Bytes of the states and tapes that slots hold; what several of them share counts once.
    """

    varied = True

    def __init__(self, state: object, in_place: bool, kind: type[Layout] = Layout) -> None:
        self.first = self._last = kind.of(state)
        self._in_place, self._kind = in_place, kind
        self._at: dict[int, Layout] = {0: self.first}
        self._kinds = {(self.first.spec, self.first.leaves): self.first}  # each kind once
        self.nbytes = self.first.nbytes
        self.held_bytes = 0
        # By the array behind a chain of views: how often it is held, and the bytes of the views.
        self._shares: dict[int, tuple[int, int]] = {}

    def count(self, arrays: Sequence[object], sign: int = 1) -> None:
        """Count the arrays that a slot holds from now on or, with -1, gives back."""
        sized: Sequence[Any] = arrays
        for array in sized:
            whole = owner(array)
            times, nbytes = self._shares.pop(id(whole), (0, 0))
            now = nbytes + sign * array.nbytes
            if times + sign:
                self._shares[id(whole)] = times + sign, now
            self.held_bytes += min(now, whole.nbytes) - min(nbytes, whole.nbytes)

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
        self._last = layout
        self.know(step, layout)
        return layout

    def know(self, step: int, layout: Layout) -> None:
        """Take the layout of a state that an earlier process has made."""
        self._at[step] = layout
        self.nbytes = max(self.nbytes, layout.nbytes)

    def _like(self, state: object) -> Layout:
        last = self._last
        if type(state) is np.ndarray and (state.shape, state.dtype) == last.single:
            return last
        made = self._kind.of(state)
        return self._kinds.setdefault((made.spec, made.leaves), made)

    def seen(self, state: object, where: int | str) -> tuple[Layout, list[Array]]:
        """Return the layout of a state and its arrays.  Raises StateError as `see` does."""
        layout = self.see(state, where) if isinstance(where, int) else self._kind.of(state)
        return layout, layout.arrays(state, where)

    def arrays(self, state: object, where: int | str = "the state") -> list[Array]:
        """Return the arrays of a state.  Raises StateError as `see` does."""
        return self.seen(state, where)[1]

    def same_as(self, other: object) -> bool:
        """Whether both describe the same states: each sweep has its own."""
        return self is other


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where in a record arrays of so many bytes lie, and the bytes of the record.

    A record takes whole lines of 64 bytes.  An array begins at a multiple of the least power of
    two that is not less than its size, 64 at most: small ones share a line.

    Examples
    --------
    >>> places([8, 8, 4, 100, 8])
    ([0, 8, 16, 64, 168], 192)
    """
    offsets, end = [], 0
    for nbytes in sizes:
        step = min(ALIGN, 1 << max(0, nbytes - 1).bit_length())
        offsets.append(-(-end // step) * step)
        end = offsets[-1] + nbytes
    return offsets, max(ALIGN, -(-end // ALIGN) * ALIGN)


def bytes_of(layout: Layout) -> int:
    """Return the bytes of a state's arrays, which lie apart in fast memory."""
    return sum(leaf.nbytes for leaf in layout.leaves)


def key_orders(tree: object) -> Keys:
    """Return the keys of the dicts in a tree, in the order they have: outer dicts first.

    Examples
    --------
    >>> key_orders([{"b": 1, "a": {"y": 2, "x": 3}}, {}])
    (('b', 'a'), ('y', 'x'), ())
    """
    return tuple(tuple(each) for each in dicts_in(tree))


def dicts_in(tree: object) -> Iterator[dict[Hashable, object]]:
    """Yield the dicts in a tree; those in a dict follow it in the order of its keys by then."""
    for part in optree.tree_leaves(cast(Any, tree), is_leaf=_is_dict, none_is_leaf=True):
        if isinstance(part, dict):
            yield part
            for value in part.values():
                if type(value) is not np.ndarray:
                    yield from dicts_in(value)


def in_order(tree: T, keys: Keys) -> T:
    """Return a tree with the keys of its dicts put into the order that `key_orders` gave."""
    for each, order in zip(dicts_in(tree), keys, strict=True):
        if tuple(each) != order:
            put_in_order(each, order)
    return tree


def put_in_order(tree: dict[Hashable, object], keys: Sequence[Hashable]) -> None:
    """Put the keys of a dict, which these are, into an order."""
    if type(tree) is OrderedDict:  # for optree its keys stay in the order they came in
        for key in keys:
            tree.move_to_end(key)
        return
    items = [(key, tree[key]) for key in keys]
    tree.clear()
    tree.update(items)


def rebuilt(tree: T, spec: optree.PyTreeSpec, leaves: Iterable[object]) -> T:
    """Return a tree of other leaves, with the keys of each OrderedDict in the order they have.

    Parameters
    ----------
    spec : optree.PyTreeSpec
        Of the tree.
    """
    made: Any = spec.unflatten(leaves)
    return in_order(made, key_orders(tree)) if _is_linked(spec) else cast(T, made)


def _is_linked(spec: optree.PyTreeSpec) -> bool:
    """Whether there is an OrderedDict in a tree, whose order optree does not see."""
    if spec.type is OrderedDict:
        return True
    # Most have no containers in them.
    return spec.num_nodes > spec.num_leaves + 1 and any(map(_is_linked, spec.children()))


def _is_dict(value: object) -> bool:
    return type(value) in (dict, defaultdict, OrderedDict)


def packed(
    arrays: Sequence[Array], plain_strides: Sequence[tuple[int, ...]] | None = None
) -> tuple[Sequence[Array], Packing | None]:
    """Return arrays, C-contiguous; those of the strides given as they are.  See `Layout.pack`.

    By default the strides are those of C order.
    """
    if plain_strides is None:
        plain_strides = [c_strides(array.shape, array.dtype.itemsize) for array in arrays]
    ordered = type(arrays) is Reordered
    for array, strides in zip(arrays, plain_strides, strict=True):
        if type(array) is not np.ndarray or array.strides != strides or not array.flags.aligned:
            break
    else:
        if not ordered:  # nearly all
            return arrays, None
    flat: list[Array] = []
    packing: list[Geometry | Literal["scalar"] | None] = []
    for array, strides in zip(arrays, plain_strides, strict=True):
        where: Geometry | Literal["scalar"] | None = None
        if type(array) is not np.ndarray:
            array, where = np.asarray(array), SCALAR
        elif array.strides != strides or not array.flags.aligned:
            if array.nbytes:
                where = geometry(array)
                array = flattened(array, where)
            else:
                array = np.ascontiguousarray(array).reshape(array.shape)
        flat.append(array)
        packing.append(where)
    return flat, ordered_as(packing, arrays) if ordered or any(packing) else None


def _differs(state: int | None, message: str, *, varies: bool = True) -> StateError:
    error = StateError(message)
    error.state, error.varies = state, varies
    return error


def _plain(value: object, path: str, where: int | str = "") -> Array:
    """Return a leaf: an array, or a NumPy scalar, which has all that is asked of an array here."""
    if type(value) is not np.ndarray and (
        not isinstance(value, np.generic) or isinstance(value, np.void)  # which can be written to
    ):
        within = f"state {where}: " if isinstance(where, int) else where and f"{where}: "
        raise _differs(
            where if isinstance(where, int) else None,
            f"{within}leaf {path or 'of the state'} is {type(value).__name__}; every leaf must be "
            "a plain numpy.ndarray (wrap numbers with numpy.asarray)",
            varies=False,
        )
    leaf = cast(Array, value)
    if leaf.dtype.hasobject:
        raise StateError(
            f"leaf {path or 'of the state'} has dtype {leaf.dtype}, which holds Python objects; "
            "use a numeric dtype"
        )
    return leaf


def _is_fixed(spec: optree.PyTreeSpec) -> bool:
    if spec.is_leaf():
        return True
    kind = spec.type
    immutable = kind is tuple or optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)
    return immutable and all(map(_is_fixed, spec.children()))


def _hashable(spec: optree.PyTreeSpec, state: Any) -> None:
    """Raise StateError if a registered node keeps in its metadata what a step could change.

    A tree is made again with the metadata it had at first; a list in them
    would be the one that the step has changed since.
    """
    if spec.is_leaf() or _is_fixed(spec):
        return
    kind = cast(type, spec.type)
    children, metadata, _, _ = optree.tree_flatten_one_level(state, none_is_leaf=True)
    if kind.__module__ not in ("builtins", "collections"):
        try:
            hash(metadata)
        except TypeError as error:
            raise StateError(
                f"pytree node {kind.__name__} has metadata that can change ({error}); "
                "make them hashable, or children of the node"
            ) from None
    for child, inner in zip(spec.children(), children, strict=True):
        _hashable(child, inner)
