"""What a run may leave behind: nothing, and no flag or setting changed."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from leaks import descriptors, native_threads

from multistage.errors import CheckpointWarning

from .trees import leaves


class Watch:
    """Notes what is there before a case, and tells what is other after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = set(threading.enumerate())
        self._native = native_threads()
        self._descriptors = descriptors()
        self._interval = sys.getswitchinterval()
        self._handler = signal.getsignal(signal.SIGINT)
        self._flags: list[tuple[Any, bool]] = []
        self.unraised: list[str] = []

    def flags(self, *trees: Any) -> None:
        """Note which arrays of trees are writeable; they must be so at the end."""
        for tree in trees:
            self._flags += [
                (leaf, leaf.flags.writeable)
                for leaf in leaves(tree)
                if isinstance(leaf, np.ndarray)
            ]

    def _left(self) -> list[str]:
        found = [f"thread {t.name}" for t in set(threading.enumerate()) - self._threads]
        found += [f"descriptor {name}" for name in descriptors() - self._descriptors]
        if native_threads() > self._native:
            found.append("thread of the C core")
        found += [f"file {path.name}" for path in self._folder.iterdir()]
        return found

    def differences(self) -> list[str]:
        """Return what is not as it was."""
        found = self._left()
        if found:
            gc.collect()
            found = self._left()
        if sys.getswitchinterval() != self._interval:
            found.append(f"switch interval {sys.getswitchinterval()}")
            sys.setswitchinterval(self._interval)
        if signal.getsignal(signal.SIGINT) is not self._handler:
            found.append("handler of SIGINT")
            signal.signal(signal.SIGINT, self._handler)
        changed = sum(array.flags.writeable != before for array, before in self._flags)
        if changed:
            found.append(f"{changed} arrays of the caller's changed their writeable flag")
        return [f"left behind: {each}" for each in found] + self.unraised


@contextlib.contextmanager
def recorded(watch: Watch) -> Iterator[None]:
    """Record warnings and exceptions that nobody raises; those that are not documented are told."""

    def unraisable(what: Any) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):
            watch.unraised.append(f"unraisable {what.exc_value!r} in {what.object!r}")

    def in_thread(what: Any) -> None:
        watch.unraised.append(f"a thread ended with {what.exc_value!r}")

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = unraisable, in_thread
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
    finally:
        sys.unraisablehook, threading.excepthook = before
    watch.unraised += sorted(
        {
            f"warning {each.category.__name__}: {each.message}"
            for each in seen
            if not issubclass(each.category, CheckpointWarning)
        }
    )
