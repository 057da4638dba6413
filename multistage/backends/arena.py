"""Page-aligned memory for transfers, and the pool that checkpoints land in."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import weakref
from collections import deque

import numpy as np

from .. import native
from ..states.layout import Array, Layout
from ..support.free_memory import node_free_bytes

PAGE = 4096
_HUGE = 2 << 20
_FEW = 4  # one in use, two fetched ahead, one more


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return `nbytes` rounded up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


def whole_huge(nbytes: int) -> int:
    """Return `nbytes` rounded up so that huge pages cover all of it, where they cover most."""
    return round_up(nbytes, _HUGE) if nbytes >= _HUGE // 2 else nbytes


def pages(nbytes: int, *, touch: bool = True) -> Array:
    """Return a page-aligned uint8 array of zeros, of at least `nbytes`.

    Private memory, so that it counts against RLIMIT_DATA like any other; all
    touched, unless it is about to be filled by the kernel anyway.
    """
    array = np.frombuffer(_area(max(PAGE, round_up(nbytes))), np.uint8)
    if touch:
        array[::PAGE] = 0
    return array


def _area(size: int) -> mmap.mmap:
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    area = mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def pages_of_node(nbytes: int, node: int) -> Array:
    """Return memory like that of `pages`, bound to a NUMA node.

    Raises OSError, with ENOSPC where the node has no room: memory that is bound to a full
    node is not refused by the kernel, which ends a process instead when it is touched.
    """
    free = node_free_bytes(node)
    if free is not None and round_up(nbytes) > free:
        raise OSError(errno.ENOSPC, f"memory node {node} has {free} bytes left, not {nbytes}")
    array = pages(nbytes, touch=False)
    failed = native.library().ms_bind(array.ctypes.data, array.nbytes, node)
    if failed:
        raise OSError(failed, f"memory cannot be bound to node {node}: {os.strerror(failed)}")
    array[::PAGE] = 0
    return array


def landing_bytes(nbytes: int) -> int:
    """Return the bytes of `landing_pool(nbytes)` when nothing refers to a buffer of it."""
    return nbytes if nbytes >= _HUGE else whole_huge(_FEW * _paged(nbytes))


def landing_pool(nbytes: int) -> LandingPool:
    """Return a pool for states that each land in a buffer of their own.

    It keeps one buffer of a huge page and more, or a few smaller ones.
    """
    return LandingPool(nbytes, 1 if nbytes >= _HUGE else _FEW)


def _paged(nbytes: int) -> int:
    return max(PAGE, round_up(nbytes))


class LandingPool:
    """Buffers that checkpoints are read into, reused when nothing refers to them.

    A returned state is a set of views of its buffer, and nothing reports when
    its user is done: a step may pass an array on to the next state, an adjoint
    may keep one for an hour.  Overwriting the buffer then would change a state
    behind its user's back: a wrong gradient without an error.  So a buffer is
    an array that every view refers to, over memory that comes back to the pool
    when the interpreter frees the array.  The pool keeps the memory of at most
    `size` buffers to which nothing refers; what comes back beyond them is freed.

    Buffers smaller than a huge page share one area: a disk reads a megabyte
    into huge pages in a third of the time it takes into small ones.  Each is
    an array of its own over that area, no view of another, which would hide
    references to it.  They stay as long as the pool; those made when all are
    in use do not.

    Buffers come back from whichever thread drops the last view.
    """

    def __init__(self, nbytes: int, size: int) -> None:
        self._nbytes = nbytes
        self._size = size
        # Memory to which nothing refers: an area, and where in it.
        self._idle: deque[tuple[mmap.mmap, int]] = deque(maxlen=size)
        self._lent: dict[int, weakref.ref[Array]] = {}
        self._next = 0
        self._shared = False

    def take(self, nbytes: int | None = None) -> Array:
        """Return a buffer to which nothing else refers, for so many bytes of the usual ones.

        One of its own size is not kept: for more bytes, or for few of those of a large one.
        """
        least = self._nbytes // 2 if self._nbytes >= _HUGE else 0
        if nbytes is not None and not least <= nbytes <= self._nbytes:
            return pages(nbytes, touch=False)
        try:
            area, at = self._idle.pop()
        except IndexError:
            if self._shared or not self._size:
                return pages(self._nbytes, touch=False)
            area, at = self._new()
        buffer = np.frombuffer(area, np.uint8, _paged(self._nbytes), at)
        number = self._next
        self._next += 1
        # It does not keep the pool: one that is gone gets nothing back, and keeps nothing idle.
        back = functools.partial(_came_back, weakref.ref(self), number, area, at)
        self._lent[number] = weakref.ref(buffer, back)
        return buffer

    def trim(self) -> None:
        """Free the memory to which nothing refers, but for what small buffers share."""
        if not self._shared:
            self._idle.clear()

    def _new(self) -> tuple[mmap.mmap, int]:
        """Return memory for a buffer; for small ones, keep that of the others."""
        nbytes = _paged(self._nbytes)
        if nbytes >= _HUGE:
            return _area(nbytes), 0
        area = _area(whole_huge(self._size * nbytes))
        self._shared = True
        self._idle.extend((area, at * nbytes) for at in range(1, self._size))
        return area, 0


def _came_back(
    pool: weakref.ref[LandingPool],
    number: int,
    area: mmap.mmap,
    at: int,
    _buffer: weakref.ref[Array],
) -> None:
    """Keep the memory of a buffer to which nothing refers any more, in place of the oldest."""
    there = pool()
    if there is not None:
        there._lent.pop(number, None)
        there._idle.append((area, at))


def lines_of(layout: Layout, count: int, buffer: Array) -> list[Array]:
    """Return for each leaf one array over its places in all records of a buffer.

    A view for each place would take more memory than small states do.
    """
    lines = []
    for leaf in layout.leaves:
        strides, step = [], leaf.dtype.itemsize
        for length in reversed(leaf.shape):
            strides.append(step)
            step *= length
        lines.append(
            np.ndarray(
                (count, *leaf.shape),
                leaf.dtype,
                buffer=buffer.data,
                offset=leaf.offset,
                strides=(layout.nbytes, *reversed(strides)),
            )
        )
    return lines
