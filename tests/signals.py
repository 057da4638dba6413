"""Ctrl-C for tests that send it, wherever they run."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_works() -> Iterator[None]:
    """Import it as `ctrl_c_works as ctrl_c_works`: then SIGINT raises in a module's tests.

    What a shell starts in the background ignores it, and so do its children.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
