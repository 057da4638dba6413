"""Real text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from ..errors import ArgumentError
from ..support.arrays import Bytes


def standard_library(characters: int) -> bytes:
    """Return the first `characters` bytes of the standard library's source, files in order.

    Raises
    ------
    ArgumentError
        If there is not that much of it.
    """
    parts: list[bytes] = []
    have = 0
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if have >= characters:
            break
        part = path.read_bytes()
        parts.append(part)
        have += len(part)
    if have < characters:
        raise ArgumentError(
            f"{characters} characters wanted, the standard library here has {have}; "
            "use fewer steps or a smaller batch"
        )
    return b"".join(parts)[:characters]


def encode(text: bytes, batch: int) -> tuple[Bytes, int]:
    """Return the text as `batch` parallel streams of character numbers, and how many there are.

    Returns
    -------
    streams : uint8, shape (steps + 1, batch)
        Row i holds the characters of step i, row i + 1 what they should predict.
    vocabulary : int
    """
    used, numbers = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    rows = len(text) // batch
    streams = numbers[: rows * batch].astype(np.uint8).reshape(batch, rows)
    return np.ascontiguousarray(streams.T), len(used)
