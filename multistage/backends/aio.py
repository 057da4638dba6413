"""The portable engine: one plain file per extent, through aiofiles.

For systems and filesystems where the direct engine does not work.  Each
background thread runs an event loop of its own.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout import Array

if TYPE_CHECKING:
    import asyncio


class AioFiles:
    """Extents as files named by their number, in a private folder."""

    def __init__(self, folder: Path, extent_bytes: int) -> None:
        import asyncio

        import aiofiles

        self._new_loop = asyncio.new_event_loop
        self._open = aiofiles.open
        self._folder = folder
        self._loops: dict[int, asyncio.AbstractEventLoop] = {}

    def write(self, slot: int, offset: int, data: Array) -> None:
        self._run(self._write(self._folder / f"{slot}", offset, data))

    def read(self, slot: int, data: Array) -> None:
        self._run(self._read(self._folder / f"{slot}", data))

    def _run(self, work: object) -> None:
        thread = threading.get_ident()
        loop = self._loops.get(thread)
        if loop is None:
            loop = self._loops[thread] = self._new_loop()
        loop.run_until_complete(work)  # type: ignore[arg-type]

    async def _write(self, path: Path, offset: int, data: Array) -> None:
        async with self._open(path, "r+b" if offset else "wb", opener=_private) as file:
            await file.seek(offset)
            view = memoryview(data)  # type: ignore[arg-type]
            while view:
                view = view[await file.write(view) :]

    async def _read(self, path: Path, data: Array) -> None:
        async with self._open(path, "rb", buffering=0) as file:
            view = memoryview(data)  # type: ignore[arg-type]
            while view:
                done = await file.readinto(view)
                if not done:
                    raise OSError(errno.EIO, "the file ends before the checkpoint does")
                view = view[done:]

    def close(self) -> None:
        # In a notebook the caller runs inside an event loop, and a thread with
        # a running loop may run no other: a thread without one finishes ours.
        closer = threading.Thread(target=self._close_loops, name="multistage-closer")
        closer.start()
        closer.join()

    def _close_loops(self) -> None:
        for loop in self._loops.values():
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
        self._loops.clear()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
