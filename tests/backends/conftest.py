"""No test of a store may leave a thread, a descriptor or a file behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import descriptors, native_threads


@pytest.fixture(autouse=True)
def no_leak(request: pytest.FixtureRequest) -> Iterator[None]:
    folder: Path | None = (
        request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    )
    threads = set(threading.enumerate())
    before = descriptors() if Path("/proc/self/fd").is_dir() else set()
    yield
    gc.collect()
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    assert native_threads() == 0
    if before:
        assert descriptors() - before == set()
    if folder is not None:
        assert list(folder.glob("**/.multistage-*")) == []
