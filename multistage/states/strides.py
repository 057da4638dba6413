"""Where the elements of an array lie in memory, and an array laid out alike on other memory.

NumPy's kernels and BLAS choose their way, and with it the last bit, by strides:
whether they are contiguous, their sign, gaps, repetitions by a stride of 0, and
whether elements are aligned.  A copy of a view is therefore laid out as the view
is, and so is what comes back from a tier.

The strides themselves are kept where elements and gaps together take at most
twice the bytes of the array.  Of a wider view (a column of a matrix) the gaps
are closed down to one element: signs, the order of axes, repetitions and which
axes follow on one another without a gap stay.  A copy of a view with gaps may
thus take about twice the bytes that a budget counts for a state; a tier's
copies have no gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
_WIDEST = 2  # times the bytes of an array: what it may span with its gaps
# Closed gaps add an element to each axis: 2 for the innermost, less for each one around it.
_SPAN_MOST = 4


def owner(array: Array) -> Array:
    """Return the array behind a chain of views, the array itself if it is none."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Geometry(NamedTuple):
    """The strides of an array in bytes, and how far its first element is off its alignment."""

    strides: tuple[int, ...]
    shift: int


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array in C order."""
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def geometry(array: Array) -> Geometry:
    """Return how a copy of an array is to be laid out."""
    strides = array.strides
    if not array.nbytes:
        return Geometry(strides, 0)
    low, high = _reach(array.shape, strides)
    if high - low + array.itemsize > _WIDEST * array.nbytes:
        strides = _closed(array)
    shift = 0 if array.flags.aligned else array.ctypes.data % array.dtype.alignment
    return Geometry(strides, shift)


def is_sound(where: Geometry, shape: Sequence[int], dtype: np.dtype[np.generic]) -> bool:
    """Whether a geometry is one that `geometry` returns for arrays of a shape and dtype."""
    low, high = _reach(shape, where.strides)
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    return (
        nbytes > 0
        and 0 <= where.shift < dtype.alignment
        and high - low + dtype.itemsize <= _SPAN_MOST * nbytes
    )


def alike(one: Array, other: Array) -> bool:
    """Whether copies of two arrays of a shape and dtype are laid out alike."""
    return geometry(one) == geometry(other)


def room(array: Array) -> Array:
    """Return an array of any content that is laid out as a copy of another is to be."""
    made = np.empty_like(array)
    if array.nbytes and (made.strides != array.strides or not array.flags.aligned):
        return _blank(array.shape, array.dtype, geometry(array))
    return made


def duplicate(array: Array) -> Array:
    """Return a copy that is laid out as an array is; read-only if its elements share memory.

    A view that repeats elements is read-only unless it was forced; steps that write where
    they may would write several values to one place of a writeable copy.
    """
    made = room(array)
    np.copyto(made, array)
    if repeats(made):
        made.flags.writeable = False
    return made


def repeats(array: Array) -> bool:
    """Whether elements may share memory, as those of broadcast arrays and windows do."""
    if array.flags.forc or array.size < 2:
        return False
    reach = array.itemsize
    for step, n in sorted(
        (abs(step), n) for n, step in zip(array.shape, array.strides, strict=True)
    ):
        if n > 1 and step < reach:
            return True
        reach += (n - 1) * step
    return False


def flattened(array: Array, where: Geometry) -> Array:
    """Return the elements of an array of that geometry in C order: a view if it has no gaps."""
    order, flips = _order(where.strides)
    return np.ascontiguousarray(array[flips].transpose(order)).reshape(array.shape)


def restored(flat: Array, where: Geometry) -> Array:
    """Return the array that `flattened` was given, from a C-contiguous copy of its result."""
    order, flips = _order(where.strides)
    outer_first = flat.reshape([flat.shape[k] for k in order])
    turned: Array = outer_first.transpose(np.argsort(order))[flips]
    if not where.shift and turned.strides == where.strides:
        return turned
    if not where.shift and all(
        n == 1 or mine == asked
        for n, mine, asked in zip(flat.shape, turned.strides, where.strides, strict=True)
    ):
        low, _ = _reach(flat.shape, where.strides)
        raw = flat.reshape(-1).view(np.uint8)
        return np.ndarray(flat.shape, flat.dtype, raw, -low, where.strides)
    made = _blank(flat.shape, flat.dtype, where)
    np.copyto(made, turned)
    return made


def _blank(shape: tuple[int, ...], dtype: np.dtype[np.generic], where: Geometry) -> Array:
    """Return an array of that geometry with any content."""
    low, high = _reach(shape, where.strides)
    raw = np.empty(where.shift + high - low + dtype.itemsize, np.uint8)
    return np.ndarray(shape, dtype, raw, where.shift - low, where.strides)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int]:
    """Return where the first and the last element in memory begin, from element 0."""
    ends = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)


def _order(strides: tuple[int, ...]) -> tuple[list[int], tuple[Any, ...]]:
    """Return the axes as they lie in memory, the outermost first, and how to turn them forward."""
    order = sorted(range(len(strides)), key=lambda axis: (-abs(strides[axis]), axis))
    # The ellipsis keeps an array without axes an array.
    return order, (..., *(slice(None, None, -1 if step < 0 else 1) for step in strides))


def _closed(array: Array) -> tuple[int, ...]:
    """Return the strides of an array with each gap closed to one element."""
    shape, strides, item = array.shape, list(array.strides), array.itemsize
    # What overlaps, as windows do, continues to do so if all of it shrinks alike.
    common = math.gcd(*strides)
    shrunk = tuple(step // common * 2 * item for step in strides)
    low, high = _reach(shape, shrunk)
    if common % item == 0 and common > 2 * item and high - low + item <= _WIDEST * array.nbytes:
        return shrunk
    order, _ = _order(array.strides)
    old = new = item  # the stride that would follow on without a gap
    reach = 0  # of the axes within
    for axis in reversed(order):
        n, step = shape[axis], abs(strides[axis])
        if n == 1 or not step:
            continue
        unit = _unit(step, array.dtype)
        if step == old:
            made = new
        elif step > old:
            made = new + unit
        else:  # the next row begins before the gap after the last element ends
            made = max(new - unit, reach + item)
        strides[axis] = made if strides[axis] > 0 else -made
        old, new = step * n, made * n
        reach += made * (n - 1)
    return tuple(strides)


def _unit(step: int, dtype: np.dtype[np.generic]) -> int:
    """Return the least gap that leaves a stride as much aligned as it is."""
    if step % dtype.itemsize == 0:
        return dtype.itemsize
    return dtype.alignment if step % dtype.alignment == 0 else 1
