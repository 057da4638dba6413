"""What pyrevolve's `tools` holds."""

from __future__ import annotations

import os
import sys
import tempfile
from types import TracebackType
from typing import IO, Self


class OutputGrabber:
    """Keeps what is written to a stream, by C code too, until it is stopped.

    pyrevolve silences its C++ core by it.  Nothing in this package does.

    Parameters
    ----------
    stream : file, optional
        With a descriptor; `sys.stdout` if None.
    threaded : bool
        Without effect: what is written goes to an unnamed file, which takes
        any length.

    Attributes
    ----------
    capturedtext : str
    """

    escape_char = "\b"

    def __init__(self, stream: IO[str] | IO[bytes] | None = None, threaded: bool = False) -> None:
        self.origstream = sys.stdout if stream is None else stream
        self.threaded = threaded
        self.origstreamfd: int = self.origstream.fileno()
        self.capturedtext = ""
        self._kept: tuple[IO[bytes], int] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to keep what is written."""
        self.stop()
        self.capturedtext = ""
        self.origstream.flush()
        self._kept = tempfile.TemporaryFile(), os.dup(self.origstreamfd)  # noqa: SIM115
        os.dup2(self._kept[0].fileno(), self.origstreamfd)

    def stop(self) -> None:
        """Let the stream go where it went before."""
        if self._kept is None:
            return
        (file, original), self._kept = self._kept, None
        self.origstream.flush()
        os.dup2(original, self.origstreamfd)
        os.close(original)
        with file:
            file.seek(0)
            self.capturedtext = file.read().decode(errors="replace")

    def readOutput(self) -> None:
        """Nothing is left to be read: `stop` does."""
