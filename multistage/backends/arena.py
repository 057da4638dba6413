"""Page-aligned memory for transfers, and the pool that checkpoints land in."""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from .. import native
from ..layout import Array

PAGE = 4096
_HUGE = 2 << 20


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Return `nbytes` rounded up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


def pages(nbytes: int, *, touch: bool = True) -> Array:
    """Return a page-aligned uint8 array of zeros, of at least `nbytes`.

    Private memory, so that it counts against RLIMIT_DATA like any other; all
    touched, unless it is about to be filled by the kernel anyway.
    """
    size = max(PAGE, round_up(nbytes))
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    area = mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(area, np.uint8)
    if touch:
        array[::PAGE] = 0
    return array


def pages_of_node(nbytes: int, node: int) -> Array:
    """Return memory like that of `pages`, bound to a NUMA node.  Raises OSError."""
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
        fresh = pages(self._nbytes, touch=False)
        if len(self._buffers) < self._size:
            self._buffers.append(fresh)
        return fresh


def _references(buffer: Array) -> int:
    return sys.getrefcount(buffer)
