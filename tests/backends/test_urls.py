"""Stores named by strings."""

from __future__ import annotations

from pathlib import Path

import pytest

from multistage.backends import FileStore, MemoryStore, StoreStats, open_store
from multistage.backends.files import available_engines
from multistage.errors import ArgumentError


def test_files() -> None:
    store = open_store(
        "file:///scratch/my%20runs?engine=aiofiles&capacity=2GiB&buffers=1MiB&queue=5"
    )
    assert isinstance(store, FileStore)
    assert store.folder == Path("/scratch/my runs")
    assert store.engine == "aiofiles"
    assert (store.capacity_bytes, store.queue_depth) == (2 << 30, 5)
    assert store._buffer_bytes == 1 << 20


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the error advises: it named a folder "~" in the current one."""
    home = tmp_path / "my%20home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ArgumentError, match="for a folder write 'file:~/'"):
        open_store("~/")
    for text, folder in (("file:~/", home), ("file:~/a%20b", home / "a b"), ("file:x~", "x~")):
        store = open_store(text)
        assert isinstance(store, FileStore)
        assert store.folder == Path(folder)
    open_store("file:~/").check()


def test_defaults() -> None:
    store = open_store("file:relative/folder")
    assert isinstance(store, FileStore)
    assert store.folder == Path("relative/folder")
    assert store.engine == available_engines()[0]
    assert (store.capacity_bytes, store.queue_depth) == (None, 2)
    assert not store.folder.exists()  # naming a tier touches nothing


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("memory:", None),
        ("memory:64MiB", 64 << 20),
        ("memory:?capacity=1GiB", 1 << 30),
        ("memory://", None),
    ],
)
def test_memory(text: str, capacity: int | None) -> None:
    store = open_store(text)
    assert isinstance(store, MemoryStore)
    assert store.capacity_bytes == capacity


def test_a_store_is_itself() -> None:
    store = MemoryStore()
    assert open_store(store) is store


def test_a_path_is_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path / "a ? # > folder")
    assert isinstance(store, FileStore)
    assert store.folder == tmp_path / "a ? # > folder"


@pytest.mark.parametrize("what", [7, 1.5, b"file:.", object()])
def test_objects_that_are_not_tiers_are_refused(what: object) -> None:
    with pytest.raises(ArgumentError, match="must be a string, a path or a store"):
        open_store(what)  # type: ignore[arg-type]


def test_an_incomplete_store_is_refused_by_its_missing_methods() -> None:
    class Incomplete:
        name, queue_depth, stats = "incomplete", 1, StoreStats()
        put = open = close = get = drop = prefetch = wait_written = None

    with pytest.raises(
        ArgumentError, match=r"lacks arrived, buffer_bytes, .*, transfers, waits, which every"
    ):
        open_store(Incomplete())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not known; write file:"),
        ("/scratch", "has no scheme; for a folder write 'file:/scratch'"),
        ("pinned:1GiB", "is for PyTorch alone: unroll"),
        ("file:///x?fast", "write options as name=value"),
        ("ftp://host/folder", "is not known"),
        ("file:", "must name a folder, as in file:///scratch"),
        ("file://host/scratch", "must name a folder"),
        ("file:///x?engine=fast", "engine='fast' must be one of"),
        ("file:///x?speed=9", "unknown option 'speed'"),
        ("memory:?engine=direct", "unknown option 'engine'"),
        ("file:///x?queue=two", "queue='two' must be a whole number"),
        ("file:///x?threads=0", "threads=0 must be 1 or 2"),
        ("memory:?cpus=one", "cpus='one' must be numbers and ranges"),
        ("file:///x?queue=0", "queue_depth=0 must be at least 1"),
        ("file:///x?capacity=lots", "lots"),
        ("file:///x?capacity=", "capacity=.* is no byte count"),
        ("file:///x?buffers=-1", "-1"),
        ("memory:plenty", "plenty"),
        ("memory://512MiB", "memory:512MiB"),
        ("memory:1GiB?capacity=2GiB", "twice"),
        ("file:///x?capacity=1GiB&capacity=2GiB", "'capacity' twice"),
        ("file:///runs#2", "%23"),
        ("file://[no address]/x", "is not a valid URL"),
    ],
)
def test_invalid_tiers_are_named_in_the_error(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_store(text)
