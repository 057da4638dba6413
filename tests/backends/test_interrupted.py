"""Ctrl-C at every instruction of a stream: no wait is left that never ends."""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from leaks import descriptors, native_threads
from signals import ctrl_c_works as ctrl_c_works

import multistage
from multistage.backends import (
    CascadeStore,
    CheckpointLost,
    CompressedStore,
    FileStore,
    MemoryStore,
    StripedStore,
)
from multistage.backends.arena import _came_back
from multistage.backends.direct import DirectFile
from multistage.backends.files import available_engines
from multistage.durable.folder import Folder
from multistage.durable.headers import Kind, encode
from multistage.durable.store import DurableStore
from multistage.measurement.store import probe_store
from multistage.states.layout import Layout

_PACKAGE = Path(multistage.__file__).parent

_FILES = {"streamed.py", "striped.py", "plain.py", "lanes.py"}


class CtrlC:
    """Raises KeyboardInterrupt before one instruction of this thread."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> CtrlC:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        file = Path(code.co_filename)
        if file.parent.name == "backends" and file.name in _FILES:
            frame.f_trace_opcodes = True
            return self._instruction
        return None

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._instruction


@pytest.fixture(autouse=True)
def hangs_end() -> Iterator[None]:
    def hung(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("a wait did not end")

    before = signal.signal(signal.SIGALRM, hung)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


STORES: dict[str, Callable[[Path], Any]] = {
    "memory, large": lambda folder: MemoryStore(buffer_bytes=0),
    "memory, small": lambda folder: MemoryStore(buffer_bytes=6 * 40 << 10),
    "native, large": lambda folder: FileStore(folder, "native", buffer_bytes=0),
    "native, small": lambda folder: FileStore(folder, "native", buffer_bytes=6 * 40 << 10),
    "plain": lambda folder: MemoryStore(),
    "cascade": lambda folder: CascadeStore(
        MemoryStore(3 * 8192, buffer_bytes=0), MemoryStore(buffer_bytes=0)
    ),
    "striped": lambda folder: StripedStore(
        MemoryStore(buffer_bytes=0), MemoryStore(buffer_bytes=0)
    ),
}
_COUNT = 6


@pytest.mark.long(but=("cascade-53", "striped-53"))
@pytest.mark.parametrize(
    ("name", "stride"), [*((name, 17) for name in STORES), ("cascade", 53), ("striped", 53)]
)
def test_no_wait_is_left_that_never_ends(
    name: str, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multistage.backends.striped._LEAST", 1)  # these states are cut
    if name.startswith("native") and "native" not in available_engines():
        pytest.skip("the C core was not built")
    states = [np.full(1024, float(key)) for key in range(_COUNT)]
    at, hit = 1, True
    while hit:
        hit = False
        store = STORES[name](tmp_path)
        store.open(Layout.of(states[0]))
        signal.setitimer(signal.ITIMER_REAL, 120.0)
        try:
            with CtrlC(at):
                for key, state in enumerate(states):
                    store.put(key, [state], block=True)
                store.put(_COUNT, [states[0]], block=True)
                store.cancel(_COUNT)
                for key in reversed(range(_COUNT)):
                    store.ended(key, 60.0)
                    store.wait_written(key)
                    store.prefetch(key)
                    store.get(key)
        except KeyboardInterrupt:
            hit = True
        except CheckpointLost:
            pass
        lost = 0
        store.wait_written(_COUNT)
        store.drop(_COUNT)
        for key, state in enumerate(states):
            store.wait_written(key)
            try:
                assert store.get(key)[0].tolist() == state.tolist()
            except CheckpointLost:
                lost += 1
            store.drop(key)
        assert hit or not lost
        for key, state in enumerate(states):
            assert store.put(100 + key, [state], block=True)
        for key, state in enumerate(states):
            assert store.wait_written(100 + key)
            assert store.get(100 + key)[0].tolist() == state.tolist()
        store.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        at += stride
    assert at > 150


def tasks() -> set[Path]:
    """Return the threads of this process, those of the C core too."""
    return set(Path("/proc/self/task").iterdir())


def test_a_close_that_is_interrupted_stops_the_threads_when_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalizer counted as done before the threads were stopped: their memory went."""
    if "native" not in available_engines():
        pytest.skip("the C core was not built")
    before = tasks()
    store, state = FileStore(tmp_path, "native"), np.zeros(1 << 18)
    store.open(Layout.of(state))
    assert store.put(0, [state]) and store.put(1, [state])
    stream = store._stream
    assert stream is not None
    library, times = stream._library, iter([True])

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            if next(times, False):
                raise KeyboardInterrupt
            return getattr(library, name)

    monkeypatch.setattr(stream, "_library", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        store.close()
    store.close()
    signal.setitimer(signal.ITIMER_REAL, 120.0)
    while tasks() - before:  # a thread that was joined is listed for a moment longer
        pass
    store.close()


def test_no_slot_is_given_back_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = np.zeros(1024)
    store = FileStore(tmp_path, "direct", buffer_bytes=0)
    store.open(Layout.of(state))
    assert store.put(0, [state]) and store.wait_written(0)
    free = DirectFile.free
    times = iter([True])

    def interrupted(medium: DirectFile, slot: int) -> None:
        if next(times, False):
            raise KeyboardInterrupt
        free(medium, slot)

    monkeypatch.setattr(DirectFile, "free", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.drop(0)
    for key in range(1, 5):
        assert store.put(key, [state + key], block=True) and store.wait_written(key)
    assert [store.get(key)[0][0] for key in range(1, 5)] == [1, 2, 3, 4]
    assert store.stats.stored_bytes == 4 * 8192
    store.close()


class Signal:
    """Calls the handler of SIGINT where the interpreter may do so: one such place of this thread.

    That is where a function begins, after a call of one that is not Python's, and where a
    loop begins again; in files of this package.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self._before: dict[FrameType, str] = {}
        self._called: set[FrameType | None] = set()  # functions of Python's

    def __enter__(self) -> Signal:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._before.clear()
        self._called.clear()

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        self._called.add(frame.f_back)
        if not Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
            return None
        if frame.f_code is _came_back.__code__:  # what Python calls itself drops every exception
            return None
        frame.f_trace_opcodes = True
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._before.pop(frame, None)
        elif event == "opcode":
            before = self._before.get(frame, "")
            self._before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            calls = before.startswith("CALL") and frame not in self._called
            self._called.discard(frame)
            if calls or before in ("RESUME", "JUMP_BACKWARD"):
                self.left -= 1
                if self.left == 0:
                    handler = signal.getsignal(signal.SIGINT)
                    assert callable(handler)
                    handler(signal.SIGINT, frame)
        return self._instruction


def opened_twice(store: Any, layout: Layout) -> bool:
    """Open a store, again if Ctrl-C came; return whether it did."""
    try:
        store.open(layout)
    except KeyboardInterrupt:
        store.open(layout)  # which a store that is open refuses
        return True
    return False


@pytest.mark.long(but=("memory, large-*", "durable-*"))
@pytest.mark.parametrize("what", ["open", "close", "measured"])
@pytest.mark.parametrize("name", [*STORES, "direct", "aiofiles", "blosc", "durable"])
def test_a_store_opens_and_closes_whole(name: str, what: str, tmp_path: Path) -> None:
    """Ctrl-C while a native store opened: its threads worked in memory that was given back.

    And while a tier closed after it was measured: its folder and its threads stayed.
    """
    if name.startswith("native") and "native" not in available_engines():
        pytest.skip("the C core was not built")
    if name == "blosc":
        pytest.importorskip("blosc2")
    state = np.ones(1024)
    layout = Layout.of(state)
    folder = Folder(tmp_path) if name == "durable" else None
    if folder is not None:
        folder.lock()
    make: dict[str, Callable[[Path], Any]] = {
        **STORES,
        "direct": lambda at: FileStore(at, "direct", buffer_bytes=0),
        "aiofiles": lambda at: FileStore(at, "aiofiles", buffer_bytes=0),
        "blosc": lambda at: CompressedStore(FileStore(at, "direct", buffer_bytes=0)),
        "durable": lambda at: DurableStore(lambda: folder, lasting=False),  # type: ignore[arg-type, return-value]
    }
    places = {**_left(), **dict.fromkeys(tmp_path.iterdir())}
    at = 1
    while True:
        store = make[name](tmp_path)
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        interrupt, hit = Signal(at), False
        if what == "open":
            with interrupt:
                hit = opened_twice(store, layout)
        elif what == "close":
            store.open(layout)
            assert store.put(0, [state], block=True)
            try:
                with interrupt:
                    store.close()
            except KeyboardInterrupt:
                hit = True
        else:
            try:
                with interrupt:
                    probe_store(store, layout, seconds=0, most=2)
            except KeyboardInterrupt:
                hit = True
            store.open(layout)  # it is given back
        store.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if folder is not None:
            folder.clear()  # as its run does
        assert {**_left(), **dict.fromkeys(tmp_path.iterdir())} == places, at
        if interrupt.left > 0:
            break
        assert hit, at
        at += 1 if at < 20 else 7
    assert at > 10
    if folder is not None:
        folder.close()


@pytest.mark.parametrize("nameless", [True, False])
def test_files_of_a_durable_folder_are_closed(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the opening of a file and its name left a descriptor, or a lock."""
    if not nameless:
        monkeypatch.delattr("os.O_TMPFILE", raising=False)
    before, at = _left(), 1

    def used() -> None:
        folder = Folder(tmp_path / "run", create=True)
        try:
            assert folder.lock()
            folder.publish("last", [header_of(folder), b"abc"])
            assert folder.header("last").run == folder.run
            folder.clear()
        finally:
            folder.close()

    while True:
        interrupt = Signal(at)
        try:
            with interrupt:
                used()
        except KeyboardInterrupt:
            assert interrupt.left <= 0
        assert _left() == before, at
        used()  # it is not locked
        if interrupt.left > 0:
            break
        at += 1
    assert at > 100


def header_of(folder: Folder) -> bytes:
    return encode(Kind.STATES, folder.run, b"", 3)


def _left() -> dict[object, None]:
    return dict.fromkeys([*threading.enumerate(), *descriptors(), native_threads()])
