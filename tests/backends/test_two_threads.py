"""A medium's two threads at each other's every line, and stores at full speed: nothing is mixed."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from multistage.backends import (
    CascadeStore,
    CheckpointLost,
    CompressedStore,
    FileStore,
    MemoryStore,
    RemoteStore,
)
from multistage.backends.arena import pages, round_up
from multistage.backends.compressed import _Blosc, _Codec, _Compressed, _Zfp
from multistage.backends.direct import DirectFile
from multistage.backends.files import available_engines
from multistage.backends.medium import Medium, Ram
from multistage.backends.remote import RemoteObjects
from multistage.backends.streamed import StreamedStore
from multistage.states.layout import Layout

COUNT = 1000  # numbers of a state: less than a page once compressed
LAYOUT = Layout.of(np.zeros(COUNT))
EXTENT = round_up(LAYOUT.nbytes)


def state(key: int) -> Any:
    return np.repeat(np.sin(np.arange(COUNT / 10) + key), 10)


def paged(numbers: Any) -> Any:
    data = pages(EXTENT)
    data[: numbers.nbytes] = numbers.view(np.uint8)
    return data


def numbers_in(data: Any) -> Any:
    return data[: LAYOUT.nbytes].view(np.float64)


def compressed(folder: Path, codec: Callable[[], _Codec]) -> Medium:
    pytest.importorskip("blosc2")
    pytest.importorskip("zfpy")
    return _Compressed(DirectFile(folder), codec(), EXTENT, EXTENT)


def remote(folder: Path) -> Medium:
    fsspec = pytest.importorskip("fsspec")
    return RemoteObjects(fsspec.filesystem("memory"), "/threads")


MEDIA: dict[str, Callable[[Path], Medium]] = {
    "memory": lambda folder: Ram(),
    "direct": lambda folder: DirectFile(folder),
    "remote": remote,
    "blosc": lambda folder: compressed(folder, lambda: _Blosc(LAYOUT)),
    "zfp": lambda folder: compressed(folder, lambda: _Zfp(LAYOUT, 1e-6)),
}


class Meanwhile:
    """Has another thread do something before one line of this one; in files of backends."""

    def __init__(self, at: int, work: Callable[[], None]) -> None:
        self.left, self._work = at, work

    def __enter__(self) -> Meanwhile:
        sys.settrace(self._traced)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _traced(self, frame: FrameType, event: str, arg: object) -> Any:
        if Path(frame.f_code.co_filename).parent.name != "backends":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                thread = threading.Thread(target=self._work)
                thread.start()
                thread.join()
        return self._traced


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("name", MEDIA)
def test_a_read_and_a_write_at_the_same_time(name: str, writes: bool, tmp_path: Path) -> None:
    """While a state fitted a page its compressed bytes went through one buffer both ways."""
    medium = MEDIA[name](tmp_path)
    for number in (0, 1):
        medium.begin(number, EXTENT)
    medium.write(0, 0, paged(state(0)))
    medium.write(1, 0, paged(state(1)))
    at, left = 1, 0
    while left <= 0:
        landing = pages(EXTENT)
        read = functools.partial(medium.read, 0, landing)
        write = functools.partial(medium.write, 1, 0, paged(state(at + 1)))
        work, other = (write, read) if writes else (read, write)
        with Meanwhile(at, other) as meanwhile:
            work()
        left = meanwhile.left
        if left > 0:
            other()
        assert np.allclose(numbers_in(landing), state(0), rtol=0, atol=1e-6)
        medium.read(1, landing)
        assert np.allclose(numbers_in(landing), state(at + 1), rtol=0, atol=1e-6)
        at += 1
    assert at > 3
    medium.close()


def test_zfp_does_not_believe_a_buffer_that_was_changed(tmp_path: Path) -> None:
    """The checksum is that of what the codec returned, not of what is in the buffer by then."""
    pytest.importorskip("zfpy")

    class Changing(DirectFile):
        def write(self, slot: int, offset: int, data: Any) -> None:
            data[100] ^= 1
            super().write(slot, offset, data)

    medium = _Compressed(Changing(tmp_path), _Zfp(LAYOUT, 1e-6), EXTENT, EXTENT)
    medium.begin(0, EXTENT)
    medium.write(0, 0, paged(state(0)))
    with pytest.raises(OSError, match="checksum does not match: compressed"):
        medium.read(0, pages(EXTENT))
    medium.close()


def test_parts_of_an_object_when_there_are_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was queued in vain would be read into a buffer that is another's by then."""
    fsspec = pytest.importorskip("fsspec")
    size = 1 << 20
    medium = RemoteObjects(fsspec.filesystem("memory"), "/threads", 4)
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for _ in range(3):
        medium.write(0, 0, data)
        landing = pages(size)
        medium.read(0, landing)
        assert landing.tobytes() == data.tobytes()
    assert not any(thread.is_alive() for thread in started)
    medium.close()


# ------------------------------------------------------------------ at full speed


def files(folder: Path, engine: Any, buffer_bytes: int) -> FileStore:
    if engine not in available_engines():
        pytest.skip("the C core was not built")
    return FileStore(folder, engine, buffer_bytes=buffer_bytes)


def squeezed(store: StreamedStore, scheme: Any = "blosc") -> CompressedStore:
    pytest.importorskip("blosc2")
    pytest.importorskip("zfpy")
    return CompressedStore(store, scheme, tolerance=1e-6 if scheme == "zfp" else None)


def objects(buffer_bytes: int) -> RemoteStore:
    pytest.importorskip("fsspec")
    return RemoteStore("memory://threads", connections=2, buffer_bytes=buffer_bytes)


STORES: dict[str, Callable[[Path, int], StreamedStore]] = {
    "memory": lambda folder, size: MemoryStore(buffer_bytes=size),
    "native": lambda folder, size: files(folder, "native", size),
    "direct": lambda folder, size: files(folder, "direct", size),
    "aiofiles": lambda folder, size: files(folder, "aiofiles", size),
    "objects": lambda folder, size: objects(size),
    "blosc": lambda folder, size: squeezed(files(folder, "direct", size)),
    "zfp": lambda folder, size: squeezed(files(folder, "direct", size), "zfp"),
    "cascade": lambda folder, size: CascadeStore(
        squeezed(MemoryStore(8 * 16384, buffer_bytes=size)), squeezed(files(folder, "direct", size))
    ),
}


@pytest.fixture
def threads_take_turns_quickly() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_take_turns_quickly")
@pytest.mark.parametrize("buffer_bytes", [0, 6 * 16384], ids=["large", "small"])
@pytest.mark.parametrize("name", STORES)
def test_keys_are_used_again_and_arrays_kept(name: str, buffer_bytes: int, tmp_path: Path) -> None:
    """Random calls: no state is lost or another's, and an array that is kept never changes."""
    draw = random.Random(f"{name} {buffer_bytes}")
    store = STORES[name](tmp_path, buffer_bytes)
    store.open(LAYOUT)
    there: dict[int, Any] = {}
    kept: list[tuple[Any, bytes]] = []
    for number in range(600):
        key = draw.randrange(40)
        if key not in there:
            there[key] = state(number)
            assert store.put(key, [there[key]], block=True)
            continue
        if draw.random() < 0.3:
            store.prefetch(draw.choice([*there]))
        try:
            (found,) = store.get(key)
        except CheckpointLost as error:
            raise AssertionError(f"{key} is lost") from error
        assert np.allclose(found, there[key], rtol=0, atol=0 if store.exact else 1e-6)
        kept.append((found, found.tobytes()))
        del kept[:-8]
        if draw.random() < 0.7:
            assert store.wait_written(key)
            store.drop(key)
            del there[key]
    store.close()
    assert all(found.tobytes() == content for found, content in kept)
