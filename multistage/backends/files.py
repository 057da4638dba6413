"""Files as a slow tier: a private folder, two engines, no leftovers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Literal

from ..errors import ArgumentError, StoreError
from ..layout import Layout
from .aio import AioFiles
from .direct import DirectFile
from .medium import Medium
from .streamed import StreamedStore

Engine = Literal["auto", "direct", "aiofiles"]
ENGINES: tuple[Engine, ...] = ("auto", "direct", "aiofiles")
_PREFIX = ".multistage-"
_LOCK = "lock"


class FileStore(StreamedStore):
    """Checkpoints in files, written and read back by background threads.

    The files lie in a private folder (0700, files 0600) made inside `folder`
    and are gone when the store closes, when the interpreter exits, and at the
    next run in that folder if the process was killed.  They hold raw bytes;
    what they mean is known only to the running process, which verifies an
    xxh3 checksum on every read.

    Parameters
    ----------
    folder : path
        An existing folder on the disk to use.
    engine : {"auto", "direct", "aiofiles"}
        `direct`: one anonymous file past the page cache (O_DIRECT where the
        filesystem takes it).  `aiofiles`: portable, one plain file per extent.
        `auto`: direct on Linux, else aiofiles.
    capacity_bytes : int or None
        Most bytes it takes on the disk; None for all there are.
    buffer_bytes : int
        Page-aligned buffers for transfers, in bytes.
    queue_depth : int
        Writes that may be waiting or under way.

    Raises
    ------
    StoreError
        From `open`, if the folder cannot be used.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from multistage.layout import Layout
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FileStore(folder)
    ...     store.open(Layout.of(np.zeros(3)))
    ...     accepted = store.put(7, [np.array([1.0, 2.0, 3.0])])
    ...     arrays = store.get(7)
    ...     store.close()
    >>> accepted, arrays
    (True, [array([1., 2., 3.])])
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Engine = "auto",
        *,
        capacity_bytes: int | None = None,
        buffer_bytes: int = 8 << 20,
        queue_depth: int = 2,
    ) -> None:
        if engine not in ENGINES:
            raise ArgumentError(f"engine={engine!r} must be one of {', '.join(ENGINES)}")
        if engine == "auto":
            engine = "direct" if sys.platform == "linux" else "aiofiles"
        super().__init__(
            "file",
            self._make_medium,
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
        )
        self.folder = Path(folder)
        self.engine: Engine = engine
        self._private: _PrivateFolder | None = None

    def check(self) -> None:
        """Raise StoreError if the folder cannot be used; nothing is left in it."""
        _PrivateFolder(self.folder).remove()

    def open(self, layout: Layout) -> None:
        """Make the private folder, clear leftovers of dead processes, start the threads."""
        self.close()
        self._private = _PrivateFolder(self.folder)
        try:
            super().open(layout)
        except BaseException:
            self._remove()
            raise

    def close(self) -> None:
        """Stop the threads and remove the files.  May be called twice."""
        try:
            super().close()
        finally:
            self._remove()

    def _remove(self) -> None:
        private, self._private = self._private, None
        if private is not None:
            private.remove()

    def _make_medium(self, extent_bytes: int) -> Medium:
        assert self._private is not None
        if self.engine == "direct":
            return DirectFile(self._private.path, extent_bytes, self.capacity_bytes)
        return AioFiles(self._private.path, extent_bytes)


class _PrivateFolder:
    """A folder of our own, locked for as long as we live.

    A lock, not a process number, tells the living from the dead: numbers are
    used again, and mean nothing to another container on the same disk.  The
    race: a folder exists for an instant before its lock is taken, and a
    neighbour that cleans up just then could take it for a leftover.  So a
    folder without a lock file is never touched, and whoever takes a lock
    checks that the folder it belongs to is still there.
    """

    def __init__(self, parent: Path) -> None:
        reason = None
        if not parent.exists():
            reason = "it does not exist; create it"
        elif not parent.is_dir():
            reason = "it is no folder; name one"
        elif not os.access(parent, os.W_OK | os.X_OK):
            reason = "it cannot be written; choose another or change its permissions"
        if reason is not None:
            raise StoreError(f"folder {str(parent)!r} cannot hold checkpoints: {reason}")
        _clear_leftovers(parent)
        try:
            self.path, self._lock = self._make(parent)
        except OSError as error:
            raise StoreError(
                f"folder {str(parent)!r} cannot hold checkpoints: {error}; choose another"
            ) from error
        self.remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    @staticmethod
    def _make(parent: Path) -> tuple[Path, int]:
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # 0700
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        # A forked child inherits the duty to clean up at exit, but the folder
        # is still its parent's.
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _clear_leftovers(parent: Path) -> None:
    """Remove what killed processes of this user left in `parent`."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
