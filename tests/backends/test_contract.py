"""Every store meets the one contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from multistage.backends import (
    CascadeStore,
    CheckpointLost,
    FileStore,
    MemoryStore,
    Store,
    StripedStore,
)
from multistage.backends.base import require_distinct
from multistage.backends.files import available_engines
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import FaultyStore, check_store
from multistage.errors import ArgumentError
from multistage.states.layout import Array, Layout

STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(),
    "memory, bounded": lambda folder: MemoryStore(24 << 20),
    "memory, small buffers": lambda folder: MemoryStore(24 << 20, buffer_bytes=48 << 10),
    "memory, no buffers": lambda folder: MemoryStore(buffer_bytes=0, queue_depth=1, threads=1),
    "native": lambda folder: FileStore(folder, "native"),
    "native, deep queue": lambda folder: FileStore(folder, "native", queue_depth=9),
    "native, small buffers": lambda folder: FileStore(
        folder, "native", capacity_bytes=24 << 20, buffer_bytes=48 << 10
    ),
    "native, no buffers": lambda folder: FileStore(
        folder, "native", buffer_bytes=0, queue_depth=1, threads=1
    ),
    "direct": lambda folder: FileStore(folder, "direct", queue_depth=4),
    "direct, small buffers": lambda folder: FileStore(
        folder, "direct", capacity_bytes=24 << 20, buffer_bytes=48 << 10
    ),
    "aiofiles": lambda folder: FileStore(folder, "aiofiles"),
    "aiofiles, small buffers": lambda folder: FileStore(
        folder, "aiofiles", capacity_bytes=24 << 20, buffer_bytes=100 << 10
    ),
    # The upper level holds a state of each kind, seldom more than two.
    "cascade": lambda folder: CascadeStore(MemoryStore(8 << 20), MemoryStore()),
    "cascade, bounded": lambda folder: CascadeStore(
        MemoryStore(8 << 20), FileStore(folder, "direct", capacity_bytes=20 << 20)
    ),
    "cascade, small buffers": lambda folder: CascadeStore(
        FileStore(folder, "direct", capacity_bytes=6 << 20, buffer_bytes=100 << 10),
        FileStore(folder, "aiofiles", capacity_bytes=20 << 20, buffer_bytes=100 << 10),
    ),
    "cascade of three": lambda folder: CascadeStore(
        MemoryStore(6 << 20),
        CascadeStore(FileStore(folder, "direct", capacity_bytes=11 << 20), MemoryStore()),
    ),
    "striped": lambda folder: StripedStore(FileStore(folder), MemoryStore()),
    "striped, bounded": lambda folder: StripedStore(
        FileStore(folder, capacity_bytes=9 << 20, buffer_bytes=100 << 10),
        MemoryStore(15 << 20, buffer_bytes=100 << 10),
    ),
    "striped, under": lambda folder: CascadeStore(
        MemoryStore(8 << 20),
        StripedStore(MemoryStore(), FaultyStore(MemoryStore()), FileStore(folder, "aiofiles")),
    ),
    "striped, plain": lambda folder: StripedStore(MemoryStore(12 << 20), MemoryStore(12 << 20)),
    "wrapped": lambda folder: FaultyStore(MemoryStore(24 << 20)),
    "plain": lambda folder: MemoryStore(24 << 20),
    "plain, direct": lambda folder: FileStore(folder, "direct", queue_depth=4),
    "plain, aiofiles": lambda folder: FileStore(folder, "aiofiles"),
}


@pytest.mark.long(
    but=(
        "memory",
        "memory, bounded",
        "native, small buffers",
        "direct",
        "aiofiles",
        "cascade, bounded",
        "striped",
        "striped, bounded",
        "wrapped",
        "plain",
        "plain, direct",
    )
)
@pytest.mark.parametrize("name", STORES)
def test_contract(name: str, tmp_path: Path) -> None:
    if name.startswith("native") and "native" not in available_engines():
        pytest.skip("the C core was not built")
    check_store(lambda: STORES[name](tmp_path))


@pytest.mark.parametrize("kind", ["stream", "plain"])
def test_bytes_that_were_changed_are_lost(kind: str) -> None:
    state = np.arange(1000.0)
    store = StreamedStore("flipped", Flipped, buffer_bytes=0)
    store.open(Layout.of(state))
    for key in range(2):
        assert store.put(key, [state], block=True)
    with pytest.raises(CheckpointLost, match="checksum does not match"):
        store.get(0)
    assert store.stats.lost == 1
    assert store.get(1)[0].tolist() == state.tolist()
    store.close()


class Flipped(Ram):
    def read(self, slot: int, data: Array) -> None:
        super().read(slot, data)
        data[5] ^= not slot


def test_a_store_inside_of_another_belongs_to_one_run() -> None:
    store = MemoryStore(1 << 20)
    outer = FaultyStore(CascadeStore(store, MemoryStore()))
    assert outer.exact
    assert outer.name == "memory>memory"
    with pytest.raises(ArgumentError, match="name the store 'memory' twice"):
        require_distinct([outer, store], "the tiers")
