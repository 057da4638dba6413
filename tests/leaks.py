"""What a test may leave behind: no thread, no descriptor, no file of ours."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


def descriptors() -> set[str]:
    """Return what the open descriptors of this process are, apart from pipes and the like."""
    found = set()
    if not Path("/proc/self/fd").is_dir():
        return found
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor of this very listing
        if not target.startswith("/proc/"):
            found.add(f"{link.name} -> {target}")
    return found


# Of the flags in a task's `stat`: it is ending.  A joined thread is listed a moment longer.
_ENDING = 0x4


def native_threads() -> int:
    """Return how many threads of the C core's engine there are; the interpreter knows none."""
    names = []
    for task in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
            if not int(rest.split()[6]) & _ENDING:
                names.append(name)
    return names.count("multistage-io")


@pytest.fixture(autouse=True)
def no_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    """Watch every test of a folder whose conftest imports it as `no_leak as no_leak`."""
    folder: Path | None = (
        request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    )
    threads, files, engine = set(threading.enumerate()), descriptors(), native_threads()

    def left() -> list[object]:
        found: list[object] = [thread.name for thread in set(threading.enumerate()) - threads]
        found += [
            *(descriptors() - files),
            *["a thread of the C core"] * (native_threads() - engine),
        ]
        return found + ([] if folder is None else list(folder.glob("**/.multistage-*")))

    yield
    if left():
        gc.collect()  # seconds in a process that has loaded much: not for every test
        assert left() == []
