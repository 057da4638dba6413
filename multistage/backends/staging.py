"""Buffers in which small states are gathered, each written when it is full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..states.layout import Array, Layout
from .arena import pages, whole_huge
from .extents import Extent, TransferState

BUFFERS = 3  # being filled or written; as many again are read into


class Staging:
    """The staging buffers of an open store; each holds one extent.

    Parameters
    ----------
    layout : Layout
    count : int
        States of an extent.
    extent_bytes : int

    Notes
    -----
    An extent can be read from its buffer until that is reused.
    """

    def __init__(self, layout: Layout, count: int, extent_bytes: int) -> None:
        arena = pages(whole_huge(BUFFERS * extent_bytes))
        self._layout = layout
        self.buffers = list(arena[: BUFFERS * extent_bytes].reshape(BUFFERS, extent_bytes))
        self._lines = [_lines(layout, count, buffer) for buffer in self.buffers]
        self._holders: list[Extent | None] = [None] * BUFFERS

    def free(self) -> int | None:
        """Return a buffer whose extent is written, the oldest first; None if there is none."""
        best, age = None, -1
        for number, holder in enumerate(self._holders):
            if holder is None:
                return number
            if holder.state in (TransferState.DONE, TransferState.FAILED) and (
                best is None or holder.serial < age
            ):
                best, age = number, holder.serial
        return best

    def hold(self, number: int, extent: Extent) -> None:
        """Give a free buffer to an extent: the one before is read from the medium from now on."""
        before = self._holders[number]
        if before is not None:
            before.buffer = None
        extent.buffer = number
        self._holders[number] = extent

    def let_go(self, extent: Extent) -> None:
        """Take the buffer of an extent back, if it has one."""
        if extent.buffer is not None:
            self._holders[extent.buffer] = None
            extent.buffer = None

    def fill(self, extent: Extent, arrays: Sequence[Array]) -> None:
        """Copy a state into the next place of an extent."""
        assert extent.buffer is not None
        at = extent.filled
        for line, array in zip(self._lines[extent.buffer], arrays, strict=True):
            line[at] = array

    def record(self, number: int, place: int) -> Array:
        """Return a copy of one state: a buffer is reused without asking who looks at it."""
        start = place * self._layout.nbytes
        return self.buffers[number][start : start + self._layout.nbytes].copy()


def _lines(layout: Layout, count: int, buffer: Array) -> list[Array]:
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
