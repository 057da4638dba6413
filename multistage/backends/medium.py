"""Where extents lie: the Medium protocol, and host memory as one."""

from __future__ import annotations

import errno
import warnings
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..errors import CheckpointWarning
from ..states.layout import Array
from .arena import pages

# No room on the disk, none in the user's share of it, the longest file there
# may be (RLIMIT_FSIZE), no more memory.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the tier is full: it accepts no more, its contents are valid.

    Examples
    --------
    >>> is_full(OSError(errno.EDQUOT, "quota exceeded")), is_full(OSError(errno.EIO, "bad block"))
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in _FULL


def warn_full(tier: str, reason: str) -> None:
    """Warn that a tier takes no more checkpoints."""
    warnings.warn(
        f"{tier} takes no more checkpoints: {reason}; more steps will be computed again",
        CheckpointWarning,
        stacklevel=6,  # of the put, through the stores
    )


class Medium(Protocol):
    """Numbered extents of any size.

    `begin` and `write` are called by one background thread, `read` by another, `free` by the
    computing thread, `close` when the others have stopped.  Failures are OSErrors; `is_full`
    recognises those of a full medium.
    """

    def begin(self, slot: int, nbytes: int) -> None:
        """Make room for an extent, in whole pages, in place of what the number meant before.

        No more bytes are written to it.
        """
        ...

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write bytes (page-aligned memory, whole pages) into an extent at `offset`."""
        ...

    def read(self, slot: int, data: Array) -> None:
        """Fill `data` (page-aligned memory, whole pages) from the start of an extent."""
        ...

    def free(self, slot: int) -> None:
        """Forget an extent that nobody is at.  Never blocks."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Ram:
    """Host memory; that of freed extents is used again for others of the same size.

    Parameters
    ----------
    allocate : callable
        `allocate(nbytes)` returns page-aligned memory, or raises OSError.

    Notes
    -----
    No more is held altogether than extents have taken at a time.
    """

    def __init__(self, allocate: Callable[[int], Array] = pages) -> None:
        self._allocate = allocate
        self._extents: dict[int, Array] = {}
        self._gone: deque[int] = deque()  # freed, but for the writing thread to note
        self._idle: dict[int, list[Array]] = {}  # by size
        self._live_bytes = self._most_bytes = self._idle_bytes = 0

    def begin(self, slot: int, nbytes: int) -> None:
        while self._gone:
            self._keep(self._extents.pop(self._gone.popleft(), None))
        self._keep(self._extents.pop(slot, None))
        if same := self._idle.get(nbytes):
            self._idle_bytes -= nbytes
            extent = same.pop()
        else:
            if self._idle_bytes + self._live_bytes + nbytes > self._most_bytes:
                self._idle.clear()
                self._idle_bytes = 0
            try:
                extent = self._allocate(nbytes)
            except OSError as error:
                raise OSError(error.errno, f"no memory for another checkpoint: {error}") from error
        self._extents[slot] = extent
        self._live_bytes += len(extent)
        self._most_bytes = max(self._most_bytes, self._live_bytes)

    def _keep(self, extent: Array | None) -> None:
        if extent is not None:
            self._live_bytes -= len(extent)
            self._idle_bytes += len(extent)
            self._idle.setdefault(len(extent), []).append(extent)

    def write(self, slot: int, offset: int, data: Array) -> None:
        np.copyto(self._extents[slot][offset : offset + len(data)], data)

    def read(self, slot: int, data: Array) -> None:
        extent = self._extents.get(slot)
        if extent is None:
            raise OSError(f"extent {slot} was never written")
        np.copyto(data, extent[: len(data)])

    def free(self, slot: int) -> None:
        self._gone.append(slot)

    def close(self) -> None:
        self._extents.clear()
        self._idle.clear()
