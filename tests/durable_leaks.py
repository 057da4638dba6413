"""No test of durable runs may leave a thread or a descriptor behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


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


@pytest.fixture(autouse=True)
def no_leak() -> Iterator[None]:
    """Import it as `no_leak as no_leak`: then it watches every test of a module."""
    threads = set(threading.enumerate())
    before = descriptors() if Path("/proc/self/fd").is_dir() else set()
    yield
    gc.collect()
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    if before:
        assert descriptors() - before == set()
