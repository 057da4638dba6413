"""Files as a slow tier: a private folder, three engines, no leftovers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from .. import native
from ..errors import ArgumentError, StoreError
from ..states.layout import Layout
from ..support.interrupts import Shield
from .aio import AioFiles
from .carrier import Carrier
from .direct import DirectFile
from .medium import Medium
from .native import NativeFile
from .private import PrivateFolder
from .streamed import StreamedStore

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
