"""Files as a slow tier: one nameless file, three engines, no leftovers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .. import native
from ..errors import ArgumentError, StoreError
from ..states.layout import Layout
from ..support.interrupts import Shield
from ..support.values import folder_path
from .direct import DirectFile
from .medium import Medium
from .streamed import StreamedStore

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable
    from concurrent.futures import ThreadPoolExecutor


class AioFile(DirectFile):
    """Extents in an anonymous file, moved by aiofiles: each thread runs an event loop of its own.

    Parameters
    ----------
    folder : Path
    most_bytes : int or None
        Of the file.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        import asyncio
        import os
        from concurrent.futures import ThreadPoolExecutor

        from aiofiles.os import wrap

        super().__init__(folder, most_bytes, direct=False)
        self._new_loop, self._new_threads = asyncio.new_event_loop, ThreadPoolExecutor
        self._write_at, self._read_at = wrap(os.pwrite), wrap(os.preadv)
        self._loops: dict[int, tuple[asyncio.AbstractEventLoop, ThreadPoolExecutor]] = {}

    def _pwrite(self, view: memoryview, position: int) -> int:
        return self._run(self._write_at(self.fd, view, position))

    def _pread(self, view: memoryview, position: int) -> int:
        return self._run(self._read_at(self.fd, [view], position))

    def _run(self, work: Awaitable[int]) -> int:
        thread = threading.get_ident()
        if thread not in self._loops:
            loop, threads = self._new_loop(), self._new_threads(1)
            loop.set_default_executor(threads)
            self._loops[thread] = loop, threads
        return self._loops[thread][0].run_until_complete(work)

    def close(self) -> None:
        """End the loops and their threads, close the file."""
        # By hand: asyncio's own way takes another thread, of which there may be
        # none, and may not be gone where a loop runs, as in a notebook.
        for loop, threads in self._loops.values():
            threads.shutdown()
            loop.close()
        self._loops.clear()
        super().close()


Engine = Literal["auto", "native", "direct", "aiofiles"]
ENGINES: tuple[Engine, ...] = ("auto", "native", "direct", "aiofiles")


def available_engines() -> tuple[Engine, ...]:
    """Return the engines that work here, the fastest first."""
    linux = sys.platform == "linux"
    fast: tuple[Engine, ...] = ("native",) if linux and native.available() else ()
    return (*fast, "direct", "aiofiles") if linux else ("aiofiles", "direct")


class FileStore(StreamedStore):
    """Checkpoints in files, written and read back by background threads.

    The file has no name: no other user can open or exchange it, and it is gone when the
    store closes or the process ends, killed or not.  It holds raw bytes; what they mean is
    known only to the running process, which verifies a 64-bit checksum (XXH3) on every
    read.

    Parameters
    ----------
    folder : path
        An existing folder, which you may write to, on the disk to use.
    engine : {"auto", "native", "direct", "aiofiles"}
        `native`: past the page cache (O_DIRECT where the filesystem takes it), moved by
        threads of the C core.  `direct`: the same, moved by threads of Python.
        `aiofiles`: portable, through the page cache.  `auto`: the first of them that is there.
    capacity_bytes : int or None
        Most bytes it takes on the disk; None for all there are.
    buffer_bytes : int
        Page-aligned buffers for transfers, in bytes.
    queue_depth : int
        Writes that may be waiting or in flight.
    threads : {2, 1}
        Threads each way. Of two, one copies and sums while the other waits for the disk; one
        alone does both in turn and never takes more than one core.
    cpus : str or iterable of int, optional
        The CPUs that the threads run on, as in `"14-15"`; anywhere if not given.

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
        threads: int = 2,
        cpus: str | Iterable[int] | None = None,
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
            threads=threads,
            cpus=cpus,
            bounces=2 if engine == "native" else 1,
        )
        self.folder = folder_path(folder, "folder")
        self.engine: Engine = engine
        self._hooks = (None, None) if engine == "native" else None

    def check(self) -> None:
        """Raise StoreError if the folder cannot be used; nothing is left in it."""
        with Shield(up=True):
            DirectFile(self.folder, direct=False).close()

    def open(self, layout: Layout) -> None:
        """Make the file, start the threads.

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
        """Return a fresh medium, a file where the native engine's threads move its bytes."""
        if self.engine == "aiofiles":
            return AioFile(self.folder, self.capacity_bytes)
        return DirectFile(self.folder, self.capacity_bytes)
