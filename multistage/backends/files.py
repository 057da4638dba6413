"""Files as a slow tier: a private folder, three engines, no leftovers.

`AioFiles` is the portable engine, one plain file per extent, for systems and filesystems where
the others do not work.  Each background thread runs an event loop of its own.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .. import native
from ..errors import ArgumentError, StoreError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield
from .carrier import Carrier
from .direct import DirectFile
from .medium import Medium
from .native import NativeFile
from .private import PrivateFolder
from .streamed import StreamedStore

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor


class AioFiles:
    """Extents as files named by their number, in a private folder.

    Parameters
    ----------
    folder : Path
    dir_fd : int or None
        `folder` itself, if it is open: its name is not looked up again then.
    """

    def __init__(self, folder: Path, *, dir_fd: int | None = None) -> None:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        import aiofiles

        self._new_loop, self._new_threads = asyncio.new_event_loop, ThreadPoolExecutor
        self._open = aiofiles.open
        self._folder = folder if dir_fd is None else Path()
        self._opener = partial(_private, dir_fd=dir_fd)
        self._loops: dict[int, tuple[asyncio.AbstractEventLoop, ThreadPoolExecutor]] = {}

    def begin(self, slot: int, nbytes: int) -> None:
        """Do nothing: `write` makes a file, or another one of what the number meant before."""

    def free(self, slot: int) -> None:
        """Do nothing: the file is written over."""

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write a part of an extent; the file is made at its beginning."""
        self._run(self._write(self._folder / f"{slot}", offset, data))

    def read(self, slot: int, data: Array) -> None:
        """Read the start of an extent."""
        self._run(self._read(self._folder / f"{slot}", data))

    def _run(self, work: object) -> None:
        thread = threading.get_ident()
        if thread not in self._loops:
            loop, threads = self._new_loop(), self._new_threads(1)
            loop.set_default_executor(threads)
            self._loops[thread] = loop, threads
        self._loops[thread][0].run_until_complete(work)  # type: ignore[arg-type]

    async def _write(self, path: Path, offset: int, data: Array) -> None:
        mode: Literal["r+b", "wb"] = "r+b" if offset else "wb"
        # Unbuffered: Python's buffers try again without end where nothing is taken.
        async with self._open(path, mode, buffering=0, opener=self._opener) as file:
            await file.seek(offset)
            view = memoryview(data)  # type: ignore[arg-type]
            while view:
                done = await file.write(view)
                if not done:
                    raise OSError(errno.EIO, "the file took no more bytes")
                view = view[done:]

    async def _read(self, path: Path, data: Array) -> None:
        async with self._open(path, "rb", buffering=0, opener=self._opener) as file:
            view = memoryview(data)  # type: ignore[arg-type]
            while view:
                done = await file.readinto(view)
                if not done:
                    raise OSError(errno.EIO, "the file ends before the checkpoint does")
                view = view[done:]

    def close(self) -> None:
        """End the loops and their threads."""
        # By hand: asyncio's own way takes another thread, of which there may be
        # none, and may not be gone where a loop runs, as in a notebook.
        for loop, threads in self._loops.values():
            threads.shutdown()
            loop.close()
        self._loops.clear()


def _private(path: str, flags: int, dir_fd: int | None) -> int:
    # What is there in place of our file is not followed if it is a link, and
    # not waited for if it is a pipe.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=dir_fd)


Engine = Literal["auto", "native", "direct", "aiofiles"]
ENGINES: tuple[Engine, ...] = ("auto", "native", "direct", "aiofiles")


def available_engines() -> tuple[Engine, ...]:
    """Return the engines that work here, the fastest first."""
    linux = sys.platform == "linux"
    fast: tuple[Engine, ...] = ("native",) if linux and native.available() else ()
    return (*fast, "direct", "aiofiles") if linux else ("aiofiles", "direct")


class FileStore(StreamedStore):
    """Checkpoints in files, written and read back by background threads.

    The files lie in a private folder (0700, files 0600) made inside `folder`,
    which must be safe from other users.  They are gone when the store closes,
    when the interpreter exits, and at the next run in that folder if the
    process was killed.  They hold raw bytes; what they mean is known only to
    the running process, which verifies a 64-bit checksum (XXH3) on every
    read.

    Parameters
    ----------
    folder : path
        An existing folder on the disk to use: your own, which no other user may
        write to, or one with the sticky bit such as /tmp.
    engine : {"auto", "native", "direct", "aiofiles"}
        `native`: one anonymous file past the page cache (O_DIRECT where the
        filesystem takes it), moved by threads of the C core.  `direct`: the
        same file, moved by threads of Python.  `aiofiles`: portable, one plain
        file per extent.  `auto`: the first of them that is there.
    capacity_bytes : int or None
        Most bytes it takes on the disk; None for all there are.
    buffer_bytes : int
        Page-aligned buffers for transfers, in bytes.
    queue_depth : int
        Writes that may be waiting or in flight.

    Raises
    ------
    StoreError
        From `open`, if the folder cannot be used.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from multistage.states.layout import Layout
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
            engine = available_engines()[0]
        super().__init__(
            "file",
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            bounces=2 if engine == "native" else 1,
        )
        self.folder = Path(folder)
        self.engine: Engine = engine
        self._private: PrivateFolder | None = None

    def check(self) -> None:
        """Raise StoreError if the folder cannot be used; nothing is left in it."""
        with Shield(up=True):
            private = PrivateFolder(self.folder)
            private.remove()  # of a name: called on a passing object, its end would swallow Ctrl-C

    def open(self, layout: Layout) -> None:
        """Make the private folder, clear leftovers of dead processes, start the threads.

        Raises
        ------
        StoreError
            If the folder cannot be used, the engine is not there, or the store is open.
        """
        if self.engine not in available_engines():
            raise StoreError(
                f"engine {self.engine!r} needs Linux and the C core, which was not built; "
                "use engine 'auto'"
            )
        super().open(layout)

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """Return a fresh medium; that of `direct` in place of the native engine's threads."""
        private = self._make_private()
        if self.engine == "aiofiles":
            return AioFiles(private.path, dir_fd=private.fd)
        return DirectFile(private.path, self.capacity_bytes, dir_fd=private.fd)

    def _new_carrier(self, layout: Layout, extent_bytes: int) -> Carrier:
        if self.engine != "native":
            return super()._new_carrier(layout, extent_bytes)
        private = self._make_private()
        return NativeFile(private.path, self.capacity_bytes, dir_fd=private.fd)

    def _make_private(self) -> PrivateFolder:
        self._private = PrivateFolder(self.folder)
        return self._private

    def _give_back(self) -> None:
        if self._private is not None:
            self._private.remove()
            self._private = None
