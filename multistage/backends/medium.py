"""Where extents lie: the Medium protocol, room on a medium, and host memory as one."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import warnings
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..errors import CheckpointWarning
from ..states.layout import Array
from .arena import pages

logger = logging.getLogger(__name__)

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


@functools.cache  # once in a process: a tier that is measured opens several times
def warn_of_memory(folder: str) -> None:
    """Log that a folder lies in memory."""
    logger.warning("folder %r lies in memory (tmpfs): checkpoints there take as much of it", folder)


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


class Room:
    """The bytes that may lie in a place, and numbers for what lies there.

    The number given back last is taken first.

    Parameters
    ----------
    most_bytes : int or None
        How many there are; None if unbounded.

    Attributes
    ----------
    closed : bool
        Whether the place was found to be full: the most that it held is all it takes.

    Examples
    --------
    >>> room = Room(300)
    >>> room.take(100), room.take(150), room.fits(50), room.fits(100)
    (0, 1, True, False)
    >>> room.give(0)
    >>> room.take(60)
    0
    """

    __slots__ = ("_free", "_held", "_next", "_peak", "_taken", "closed", "most_bytes")

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes = most_bytes
        self._held: dict[int, int] = {}  # the bytes of each number
        self._free: list[int] = []
        self._next = self._taken = self._peak = 0
        self.closed = False

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes can be taken."""
        return self.most_bytes is None or self._taken + nbytes <= self.most_bytes

    def take(self, nbytes: int) -> int:
        """Return a number for so many bytes, which must fit."""
        if self._free:
            number = self._free.pop()
        else:
            number, self._next = self._next, self._next + 1
        self._held[number] = nbytes
        self._taken += nbytes
        self._peak = max(self._peak, self._taken)
        return number

    def give(self, number: int) -> None:
        """Give a number back."""
        self._taken -= self._held.pop(number)
        self._free.append(number)

    def close(self) -> None:
        """Say that the place is full."""
        self.most_bytes = self._peak
        self.closed = True


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


PLACE = 36  # bits of a position that are a place in an extent
TEXT = 1 << 16  # errors from here on are an exception's text
Hook = Callable[[int, int, int, int], int]


def moves(medium: Medium, texts: dict[int, str]) -> tuple[Hook, Hook]:
    """Return what writes and reads in place of a file, and notes the text of errors."""

    def write(nbytes: int, slot: int, offset: int, data: Array) -> None:
        if not offset:
            medium.begin(slot, nbytes)
        medium.write(slot, offset, data)

    def read(nbytes: int, slot: int, offset: int, data: Array) -> None:
        medium.read(slot, data)

    def moving(move: Callable[[int, int, int, Array], None], first: int) -> Hook:
        failures = 0

        def hook(nbytes: int, address: int, length: int, position: int) -> int:
            nonlocal failures
            memory = memoryview((ctypes.c_uint8 * length).from_address(address))
            data = np.frombuffer(memory, np.uint8)
            try:
                move(nbytes, position >> PLACE, position & (1 << PLACE) - 1, data)
            except Exception as error:  # whatever it is: states are lost, not runs
                if is_full(error):
                    assert isinstance(error, OSError)
                    return -(error.errno or errno.ENOSPC)
                failures = (failures + 1) % 1024
                texts[first + failures] = str(error)
                return -(first + failures)
            return length

        return hook

    return moving(write, TEXT), moving(read, 2 * TEXT)
