"""Where extents lie: the Medium protocol, and host memory as one."""

from __future__ import annotations

import errno
import warnings
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
    """Numbered extents of equal size.

    `write` and `read` are called by one background thread each, `close` when
    both have stopped.  Failures are OSErrors; `is_full` recognises those of a full medium.
    """

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write bytes (page-aligned memory, whole pages) into an extent at `offset`."""
        ...

    def read(self, slot: int, data: Array) -> None:
        """Fill `data` (page-aligned memory, whole pages) from the start of an extent."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Ram:
    """Host memory; extents are allocated at first use and reused.

    Parameters
    ----------
    extent_bytes : int
    allocate : callable
        `allocate(nbytes)` returns page-aligned memory, or raises OSError.
    """

    def __init__(self, extent_bytes: int, allocate: Callable[[int], Array] = pages) -> None:
        self._extent_bytes = extent_bytes
        self._allocate = allocate
        self._extents: dict[int, Array] = {}

    def write(self, slot: int, offset: int, data: Array) -> None:
        extent = self._extents.get(slot)
        if extent is None:
            try:
                extent = self._allocate(self._extent_bytes)
            except OSError as error:
                raise OSError(error.errno, f"no memory for another checkpoint: {error}") from error
            self._extents[slot] = extent
        np.copyto(extent[offset : offset + len(data)], data)

    def read(self, slot: int, data: Array) -> None:
        extent = self._extents.get(slot)
        if extent is None:
            raise OSError(f"extent {slot} was never written")
        np.copyto(data, extent[: len(data)])

    def close(self) -> None:
        self._extents.clear()
