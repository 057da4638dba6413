"""Page-aligned memory for transfers, and the pool that checkpoints land in."""

from __future__ import annotations

import errno
import mmap
import os
import sys

import numpy as np

from .. import native
from ..layout import Array
from ..limits import node_free_bytes

PAGE = 4096
_HUGE = 2 << 20


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


class LandingPool:
    """Buffers that checkpoints are read into, reused when nobody refers to them.

    A state handed out is a set of views of its buffer, and nothing tells when
    its user is done: a step may pass an array on to the next state, an adjoint
    may keep one for an hour.  Overwriting the buffer then would change a state
    behind its user's back: a wrong gradient without an error.  So the pool
    asks the interpreter: every view refers to the buffer's array, hence a
    buffer whose reference count is back at that of an untouched one is free.
    If none is, a new one is made; those beyond `size` are not kept.

    Buffers smaller than a huge page share one area: a disk reads a megabyte
    into huge pages in a third of the time it takes into small ones.  Each is
    an array of its own over that area, no view of another, which would hide
    references to it.

    `take` is for one thread alone.  That others drop their views meanwhile is
    harmless: a count can only fall then, and nobody but the pool can make it
    rise from that of an idle buffer.
    """

    def __init__(self, nbytes: int, size: int) -> None:
        self._nbytes = nbytes
        self._buffers: list[Array] = []
        sample = [np.empty(1, np.uint8)]
        for buffer in sample:  # counted as in `take`
            self._idle = _references(buffer)
        view = sample[0][:]
        for buffer in sample:
            # An interpreter that does not count like this gets no reuse at all.
            self._size = size if _references(buffer) > self._idle else 0
        del view

    def take(self) -> Array:
        """Return a buffer that nobody else refers to."""
        for buffer in self._buffers:
            if _references(buffer) <= self._idle:
                return buffer
        if self._size and not self._buffers and self._nbytes < _HUGE:
            nbytes = max(PAGE, round_up(self._nbytes))
            area = _area(whole_huge(self._size * nbytes))
            for at in range(self._size):
                self._buffers.append(np.frombuffer(area, np.uint8, nbytes, at * nbytes))
            return self.take()
        fresh = pages(self._nbytes, touch=False)
        if len(self._buffers) < self._size:
            self._buffers.append(fresh)
        return fresh


def _references(buffer: Array) -> int:
    return sys.getrefcount(buffer)
