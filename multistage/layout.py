"""The layout of a state: its tree, shapes and dtypes, and the way to raw buffers and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import optree

from .errors import StateError

Array = np.ndarray[Any, np.dtype[Any]]
# For each array the axes that restore its order, None for plain C order.
Packing = Sequence[tuple[int, ...] | None]
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """Shape, dtype and place of one array in a record."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    nbytes: int


class Layout:
    """Tree, shapes and dtypes that every state of a computation shares.

    A *record* is one state as raw bytes: its arrays one after the other, each
    at a multiple of 64 bytes.

    Attributes
    ----------
    leaves : tuple of Leaf
    nbytes : int
        Bytes of one record.
    single : (shape, dtype) or None
        Of the one array that is the whole state, if it is one.

    Examples
    --------
    >>> layout = Layout.of({"h": np.zeros(3), "c": np.zeros(5)})
    >>> layout.nbytes, [leaf.path for leaf in layout.leaves]
    (128, ["['c']", "['h']"])
    """

    def __init__(self, spec: optree.PyTreeSpec, leaves: tuple[Leaf, ...], nbytes: int) -> None:
        self._spec = spec
        self.leaves = leaves
        self.nbytes = nbytes
        self.single = (
            (leaves[0].shape, leaves[0].dtype) if spec.is_leaf() and len(leaves) == 1 else None
        )
        # A plain tuple of arrays is checked without walking a tree.
        flat = spec.type is tuple and all(child.is_leaf() for child in spec.children())
        self._flat = [(leaf.shape, leaf.dtype) for leaf in leaves] if flat else None

    @classmethod
    def of(cls, state: object) -> Layout:
        """Return the layout of a state.

        Raises
        ------
        StateError
            If a leaf is no plain NumPy array, holds objects, or there is none.
        """
        paths, values, spec = optree.tree_flatten_with_path(cast(Any, state), none_is_leaf=True)
        if not values:
            raise StateError("the state holds no array; it must be a pytree with at least one")
        leaves: list[Leaf] = []
        offset = 0
        for path, value in zip(paths, values, strict=True):
            name = "".join(f"[{key!r}]" for key in path)
            array = _plain(value, name)
            leaves.append(Leaf(name, array.shape, array.dtype, offset, array.nbytes))
            offset += -(-array.nbytes // _ALIGN) * _ALIGN
        return cls(spec, tuple(leaves), max(offset, _ALIGN))

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
        if type(state) is np.ndarray and (state.shape, state.dtype) == self.single:
            return [state]
        if type(state) is tuple and self._flat is not None:
            for value in state:
                if type(value) is not np.ndarray:
                    break
            else:
                if [(value.shape, value.dtype) for value in state] == self._flat:
                    return list(state)
        values, spec = optree.tree_flatten(cast(Any, state), none_is_leaf=True)
        if spec != self._spec:
            where = f"state {where}" if isinstance(where, int) else where
            raise StateError(
                f"{where} changed its structure from {self._spec} to {spec}; "
                "every state must have the tree of the first"
            )
        arrays = []
        for leaf, value in zip(self.leaves, values, strict=True):
            array = _plain(value, leaf.path)
            if array.shape != leaf.shape or array.dtype != leaf.dtype:
                where = f"state {where}" if isinstance(where, int) else where
                raise StateError(
                    f"{where} changed leaf {leaf.path or 'array'} from {leaf.shape} {leaf.dtype} "
                    f"to {array.shape} {array.dtype}; every state must have the layout of the first"
                )
            arrays.append(array)
        return arrays

    def state(self, arrays: Sequence[Array]) -> Any:
        """Return the state made of `arrays`, the inverse of `arrays()`."""
        if self.single is not None:
            return arrays[0]
        if self._flat is not None:
            return tuple(arrays)
        return optree.tree_unflatten(self._spec, arrays)

    def views(self, record: Array) -> list[Array]:
        """Return the arrays of a record as views into its bytes (uint8, at least `nbytes`)."""
        return [
            record[leaf.offset : leaf.offset + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
            for leaf in self.leaves
        ]

    def pack(self, arrays: Sequence[Array]) -> tuple[list[Array], Packing | None]:
        """Return what a store takes, C-contiguous arrays, and what `unpack` needs besides."""
        packed = [dense(array) for array in arrays]
        # Stores know shapes in C order only: same bytes, reshaped.
        flat = [
            array if axes is None else array.reshape(leaf.shape)
            for (array, axes), leaf in zip(packed, self.leaves, strict=True)
        ]
        packing = [axes for _, axes in packed]
        return flat, packing if any(axes is not None for axes in packing) else None

    def unpack(self, arrays: Sequence[Array], packing: Packing | None) -> list[Array]:
        """Return the arrays that `pack` was given, from the store's copies."""
        if packing is None:
            return list(arrays)
        return [
            array
            if order is None
            else array.reshape([array.shape[k] for k in np.argsort(order)]).transpose(order)
            for array, order in zip(arrays, packing, strict=True)
        ]

    def same_as(self, other: Layout) -> bool:
        """Whether both describe the same states."""
        return self._spec == other._spec and self.leaves == other.leaves


def _plain(value: object, path: str) -> Array:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if type(value) is not np.ndarray:
        raise StateError(
            f"leaf {path or 'of the state'} is {type(value).__name__}; every leaf must be a "
            "plain numpy.ndarray (wrap numbers with numpy.asarray)"
        )
    if value.dtype.hasobject:
        raise StateError(
            f"leaf {path or 'of the state'} has dtype {value.dtype}, which holds Python objects; "
            "use a numeric dtype"
        )
    return value


def dense(array: Array) -> tuple[Array, tuple[int, ...] | None]:
    """Return a C-contiguous array of the same bytes, and the axes that restore its order.

    `restored = dense_array.transpose(axes)` has the axis order in memory of the
    original, so that operators sensitive to it give the same bits.  The first
    result is a view where the original is dense, else a copy; the second is
    None for plain C order.
    """
    if array.flags.c_contiguous:
        return array, None
    order = sorted(range(array.ndim), key=lambda axis: (-abs(array.strides[axis]), axis))
    axes = tuple(int(a) for a in np.argsort(order))
    return np.ascontiguousarray(array.transpose(order)), axes
