"""The portable engine: one plain file per extent, through aiofiles.

For systems and filesystems where the direct engine does not work.  Each
background thread runs an event loop of its own.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..states.layout import Array

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
        self._run(self._write(self._folder / f"{slot}", offset, data))

    def read(self, slot: int, data: Array) -> None:
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
