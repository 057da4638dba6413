"""What a test may leave behind, counted."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descriptors() -> set[str]:
    """Return what the open descriptors of this process are, apart from pipes and the like."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        if not target.startswith("/proc/"):
            found.add(f"{link.name} -> {target}")
    return found


def native_threads() -> int:
    """Return how many threads of the C core's engine there are; the interpreter knows none."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended just now
            names.append(task.read_text().strip())
    return names.count("multistage-io")
