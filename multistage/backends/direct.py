"""One nameless file of extents, written past the page cache where the filesystem allows it.

The file never shows in its folder: nobody can open, exchange or remove it, and nothing is
left of it when the process ends, however it ends.  Where the system knows no nameless files it
has a name for an instant.  It grows in steps, so that a full disk shows before
checkpoints are lost to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import warnings
from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import SlowWarning, StoreError
from ..states.layout import Array
from .arena import PAGE, pages
from .medium import is_full

# Larger requests gain nothing and keep the interpreter from being told of signals.
_CHUNK = 4 << 20
_GROW = 64 << 20


class DirectFile:
    """Extents in an anonymous file.

    Parameters
    ----------
    folder : Path
    most_bytes : int or None
        Of the file, whole pages; None for all there are.
    direct : bool
        Whether to bypass the page cache (O_DIRECT) where that is possible.

    Attributes
    ----------
    direct : bool
        Whether it is bypassed.
    folder : str
        For messages.

    Raises
    ------
    StoreError
        If there can be no file in the folder: why, and the remedy.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None, *, direct: bool = True) -> None:
        self._most_bytes, self.folder = most_bytes, str(folder)
        self._most_pages = None if most_bytes is None else most_bytes // PAGE
        self._free: list[tuple[int, int]] = []  # first page, pages; ascending, none adjacent
        self._end = 0  # from this page on none was taken
        self._runs: dict[int, list[tuple[int, int]]] = {}  # the pages of each extent
        self._gone: deque[int] = deque()  # freed, but for the writing thread to note
        self._allocated = 0
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self.direct = bool(flag)
        try:
            try:
                self._fd = _open_nameless(folder, flag)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = False  # the filesystem takes no O_DIRECT
                self._fd = _open_nameless(folder, 0)
        except OSError as error:
            raise _refused(folder, error) from error
        try:
            if self.direct and not _takes_pages(self._fd):
                self.direct = False
                self.close()
                self._fd = _open_nameless(folder, 0)
                warnings.warn(
                    f"folder {str(folder)!r} takes no direct transfers (O_DIRECT) of "
                    f"{PAGE} bytes, its device has larger blocks: files are written through the "
                    "page cache, which is slower; for direct ones name a folder on another device",
                    SlowWarning,
                    stacklevel=2,
                )
        except BaseException:  # no memory, or warnings are errors
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor, -1 once closed."""
        return self._fd

    def begin(self, slot: int, nbytes: int) -> None:
        while self._gone:
            self._give(self._runs.pop(self._gone.popleft(), ()))
        self._give(self._runs.pop(slot, ()))
        self._runs[slot] = self._take(nbytes // PAGE)

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Return runs of pages, the first free ones before those that were never taken."""
        runs: list[tuple[int, int]] = []
        while count and self._free:
            first, length = self._free.pop(0)
            if length > count:
                self._free.insert(0, (first + count, length - count))
            runs.append((first, min(length, count)))
            count -= runs[-1][1]
        if count and self._most_pages is not None and self._end + count > self._most_pages:
            self._give(runs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if count:
            runs.append((self._end, count))
            self._end += count
        return runs

    def _give(self, runs: Sequence[tuple[int, int]]) -> None:
        free = self._free
        for first, length in runs:
            at = bisect(free, (first, 0))
            if at < len(free) and free[at][0] == first + length:
                length += free.pop(at)[1]
            if at and sum(free[at - 1]) == first:
                at -= 1
                first, before = free.pop(at)
                length += before
            free.insert(at, (first, length))

    def free(self, slot: int) -> None:
        self._gone.append(slot)

    def _places(self, slot: int, offset: int, data: Array) -> Iterator[tuple[int, memoryview]]:
        """Yield where in the file the parts of an extent from `offset` on lie."""
        view = memoryview(data)  # type: ignore[arg-type]
        for first, length in self._runs[slot]:
            if offset < length * PAGE and view:
                part = view[: length * PAGE - offset]
                yield first * PAGE + offset, part
                view, offset = view[len(part) :], 0
            else:
                offset -= length * PAGE

    def write(self, slot: int, offset: int, data: Array) -> None:
        for position, view in self._places(slot, offset, data):
            try:
                if position + len(view) > self._allocated:
                    self._grow(position + len(view))
                while view:
                    done = self._pwrite(view[:_CHUNK], position)
                    if done <= 0:
                        raise OSError(errno.EIO, "the file took no more bytes")
                    position += done
                    view = view[done:]
            except OSError as error:
                if is_full(error):
                    self._most_pages = self._end  # what it holds now is its capacity
                raise

    def _grow(self, end: int) -> None:
        if not hasattr(os, "posix_fallocate"):
            return
        ahead = self._allocated + _GROW
        if self._most_bytes is not None:
            ahead = min(ahead, self._most_bytes)
        for size in (max(end, ahead), end):
            try:
                os.posix_fallocate(self._fd, self._allocated, size - self._allocated)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    size = end
                elif size > end:
                    continue
                else:
                    raise
            self._allocated = size
            return

    def read(self, slot: int, data: Array) -> None:
        if slot not in self._runs:
            raise OSError(errno.EIO, f"extent {slot} was never written")
        for position, view in self._places(slot, 0, data):
            while view:
                done = self._pread(view[:_CHUNK], position)
                if done <= 0:
                    raise OSError(errno.EIO, "the file ends before the checkpoint does")
                position += done
                view = view[done:]

    def _pwrite(self, view: memoryview, position: int) -> int:
        return os.pwrite(self._fd, view, position)

    def _pread(self, view: memoryview, position: int) -> int:
        return os.preadv(self._fd, [view], position)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _takes_pages(fd: int) -> bool:
    """Whether a file opened with O_DIRECT takes a page at a multiple of a page.

    The kernel requires lengths, positions and addresses to be multiples of the
    device's blocks.  These are larger than a page on some devices and network
    filesystems, and only newer kernels report them (statx), not for all filesystems.
    So one page is written; the file is empty again after it.
    """
    try:
        os.pwritev(fd, [memoryview(pages(PAGE))], PAGE)  # type: ignore[arg-type]
        os.ftruncate(fd, 0)
    except OSError as error:
        return error.errno != errno.EINVAL  # the first checkpoint shows any other error
    return True


def _open_nameless(folder: Path, flags: int) -> int:
    """Open a new file that never shows in the folder, or for an instant only."""
    flags |= os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            # What a filesystem or an old kernel says that knows no such files.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    # Others may rename or remove it, but not open it: what is written goes to the file itself.
    path = folder / f".multistage-{secrets.token_hex(8)}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # some leave it behind when they refuse O_DIRECT


def _refused(folder: Path, error: OSError) -> StoreError:
    reason = f"{error}; choose another"
    if isinstance(error, NotADirectoryError):
        reason = "it is no folder; name one"
    elif isinstance(error, FileNotFoundError) and not folder.exists():
        reason = "it does not exist; create it"
    elif isinstance(error, PermissionError):
        reason = "it cannot be written; choose another or change its permissions"
    return StoreError(f"folder {str(folder)!r} cannot hold checkpoints: {reason}")
