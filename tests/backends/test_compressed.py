"""Compression: every bit back without loss, a bound that holds with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import files_of

from multistage.backends import (
    CascadeStore,
    CompressedStore,
    FileStore,
    MemoryStore,
    RemoteStore,
    codecs,
    open_store,
)
from multistage.backends.base import CheckpointLost
from multistage.backends.compressed import _axes
from multistage.backends.testing import FaultyStore, check_store
from multistage.errors import ArgumentError, StateError
from multistage.states.layout import Layout

pytest.importorskip("blosc2")
pytest.importorskip("zfpy")

STORES: dict[str, Callable[[Path], CompressedStore | CascadeStore]] = {
    "memory": lambda folder: CompressedStore(MemoryStore(24 << 20)),
    "direct": lambda folder: CompressedStore(FileStore(folder, "direct")),
    "aiofiles, small buffers": lambda folder: CompressedStore(
        FileStore(folder, "aiofiles", capacity_bytes=24 << 20, buffer_bytes=100 << 10)
    ),
    "auto": lambda folder: CompressedStore(MemoryStore(), "auto"),
    "levels": lambda folder: CascadeStore(
        CompressedStore(MemoryStore(8 << 20)), CompressedStore(FileStore(folder, "direct"))
    ),
}


def waves(size: int, key: int = 0, dtype: Any = np.float64) -> Any:
    return np.sin(np.linspace(0, 3, size) + key).astype(dtype)


@pytest.mark.long(but="auto")
@pytest.mark.parametrize("name", STORES)
def test_contract(name: str, tmp_path: Path) -> None:
    check_store(lambda: STORES[name](tmp_path))


@pytest.mark.long(but=("*-500", "f8-700000"))
@pytest.mark.parametrize("size", [500, 700_000])
@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", ">f8", "c8", "c16", "i1", "u8", "?", "S300", "M8[s]", "f4,i2,f8"]
)
def test_states_are_restored_bit_for_bit(dtype: str, size: int) -> None:
    """Smooth bits, so that they are compressed, and the special ones among them."""
    layout = Layout.of(np.zeros(size, dtype))
    raw = np.repeat(np.arange(layout.leaves[0].nbytes // 64 + 1, dtype="<u8"), 8).view(np.uint8)
    raw = raw[: layout.leaves[0].nbytes].copy()
    special = np.array([np.nan, -np.nan, -0.0, np.inf, 5e-324])
    special.view(np.uint64)[0] |= np.uint64(0xABC)  # a NaN's payload
    raw[: special.nbytes] = special.view(np.uint8)
    state = raw.view(dtype)
    store = CompressedStore(MemoryStore(buffer_bytes=0))
    store.open(layout)
    for key in range(3):
        assert store.put(key, [state], block=True) and store.wait_written(key)
    (found,), said = store.get(1), store.notes()[0]
    assert (found.dtype, found.tobytes()) == (np.dtype(dtype), raw.tobytes())
    assert store.exact and "nothing is lost" in said
    if layout.nbytes > 8192:  # less than a page is never stored as less
        assert float(said.rpartition(" ")[2]) > 1.5
    store.close()


def test_less_is_stored() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    layout = Layout.of(np.zeros(700_000))
    used = []
    for text in ("fsspec:memory://tests/run", "fsspec:memory://tests/run?compress=blosc"):
        store = open_store(text)
        store.open(layout)
        for key in range(4):
            state = np.repeat(waves(7000, key), 100)
            assert store.put(key, [state], block=True) and store.wait_written(key)
        used.append(sum(memory.size(path) for path in memory.find("/tests")))
        store.close()
    assert used[0] >= 4 * layout.nbytes > 3 * used[1] > 0
    assert memory.find("/") == []


@pytest.mark.parametrize("scheme", ["blosc", "zfp"])
def test_compressed_bytes_that_change_are_noticed(scheme: Any) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    layout = Layout.of(np.zeros(700_000))
    store = CompressedStore(
        RemoteStore("memory://tests"), scheme, tolerance=1e-3 if scheme == "zfp" else None
    )
    store.open(layout)
    for key in range(2):
        assert store.put(key, [np.repeat(waves(7000, key), 100)], block=True)
        assert store.wait_written(key)
    for path in memory.find("/tests"):
        if "/0." in path:
            content = bytearray(memory.cat_file(path))
            content[len(content) // 2] ^= 4
            memory.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointLost, match="checksum does not match: compressed"):
        store.get(0)
    assert len(store.get(1)) == 1
    store.close()


# ------------------------------------------------------------------------- zfp


@pytest.mark.long(but=("300-*", "600000-float64"))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [300, 600_000])
def test_the_bound_holds(size: int, dtype: Any) -> None:
    state = (
        waves(size, 1, dtype),
        waves(24, 2, dtype).reshape(2, 3, 1, 2, 1, 2),
        np.zeros((0, 3), dtype),
        np.asarray(0.1, dtype),
    )
    layout = Layout.of(state)
    store = open_store("memory:?compress=zfp&tolerance=1e-4&buffers=1MiB")
    assert isinstance(store, CompressedStore)
    store.open(layout)
    states = [[np.array(leaf + dtype(key / 70)) for leaf in state] for key in range(400)]
    if size > 1000:  # one extent each; of the small ones the last stay in the buffers
        states = states[:4]
    for key, arrays in enumerate(states):
        assert store.put(key, arrays, block=True)
    largest = 0.0
    for key, arrays in reversed(list(enumerate(states))):
        for found, put in zip(store.get(key), arrays, strict=True):
            assert (found.shape, found.dtype) == (put.shape, put.dtype)
            largest = max(largest, float(np.abs(found.astype(float) - put).max(initial=0)))
        store.drop(key)
    assert 0 < largest <= 1e-4
    said = store.notes()[0]
    assert "tolerance 0.0001" in said
    assert "the adjoint is not exact" in said
    assert float(said.partition("ratio ")[2].partition(",")[0]) > 1.5
    assert not store.exact
    store.close()


def test_a_codec_that_breaks_its_bound_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    zfp = codecs.zfp
    monkeypatch.setattr(
        codecs, "zfp", lambda array, tolerance: zfp(array, tolerance=32 * tolerance)
    )
    state = waves(4000, 1, np.float64)
    store = open_store("memory:?compress=zfp&tolerance=1e-4&buffers=0")
    store.open(Layout.of(state))
    assert store.put(0, [state], block=True)
    assert store.wait_written(0)
    assert store.get(0)[0].tobytes() == state.tobytes()
    assert "1 of 1 arrays kept as they were" in str(store.notes())
    store.close()


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 3e38])
def test_values_beyond_zfps_tolerance_are_stored_uncompressed(special: float) -> None:
    state = waves(5000, 0, np.float32)
    state[1234] = special
    store = CompressedStore(MemoryStore(buffer_bytes=0), "zfp", tolerance=1e-9)
    store.open(Layout.of(state))
    for key in range(2):
        assert store.put(key, [state], block=True)
        assert store.wait_written(key)
    assert store.get(0)[0].tobytes() == state.tobytes()
    assert "2 of 2 arrays kept as they were" in store.notes()[0]
    store.close()


def test_faults_under_zfp() -> None:
    inner = CompressedStore(MemoryStore(buffer_bytes=0), "zfp", tolerance=1e-2)
    store = FaultyStore(inner, lose_read={0})
    store.open(Layout.of(np.zeros(500)))
    assert store.put(0, [np.ones(500)])
    with pytest.raises(CheckpointLost):
        store.get(0)
    store.close()


def test_axes_are_four_at_most() -> None:
    assert _axes(1, ()) == (1,)
    assert _axes(7, (5,)) == (7, 5)
    assert _axes(1, (1, 5, 1)) == (5,)
    assert _axes(2, (3, 4, 5, 6)) == (6, 4, 5, 6)


# ---------------------------------------------------------------------- errors


def test_zfp_takes_floats_alone() -> None:
    for state in (np.zeros(3, np.int32), {"a": np.zeros(3), "b": np.zeros(3, complex)}):
        store = CompressedStore(MemoryStore(), "zfp", tolerance=1e-3)
        with pytest.raises(StateError, match="zfp takes float32 and float64 alone"):
            store.open(Layout.of(state))
    with pytest.raises(StateError, match="dtype >f8"):
        store.open(Layout.of(np.zeros(3, ">f8")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory:?compress=gzip", "compress='gzip' must be one of auto, blosc, zfp"),
        ("memory:?compress=zfp", "needs its bound"),
        ("memory:?compress=blosc&tolerance=1e-3", "takes no tolerance"),
        ("memory:?tolerance=1e-3", "tolerance goes with compress=zfp"),
        ("memory:?compress=zfp&tolerance=small", "tolerance='small' must be a number"),
        ("memory:?compress=zfp&tolerance=0", "finite number above 0"),
        ("memory:?compress=zfp&tolerance=nan", "finite number above 0"),
        (
            "memory:1MiB?compress=zfp&tolerance=1e-3 > memory:",
            r"upper level 'memory\+zfp' of a cascade loses information",
        ),
    ],
)
def test_invalid_options_are_named_in_the_error(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_store(text)


def test_stores_that_cannot_be_compressed_are_refused() -> None:
    cascade = CascadeStore(MemoryStore(1 << 20), MemoryStore())
    wrapped: Any = FaultyStore(MemoryStore())
    for store in (cascade, wrapped, CompressedStore(MemoryStore())):
        with pytest.raises(ArgumentError, match="cannot be compressed"):
            CompressedStore(store)


def test_a_missing_package_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multistage.backends.codecs.installed", lambda scheme: False)
    for scheme, package in (("blosc", "blosc2"), ("auto", "blosc2"), ("zfp", "zfpy")):
        tolerance = 1e-3 if scheme == "zfp" else None
        with pytest.raises(ArgumentError, match=rf"needs {package}; pip install .*\[compress\]"):
            CompressedStore(MemoryStore(), scheme, tolerance=tolerance)  # type: ignore[arg-type]


def test_leftovers_of_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    store = CompressedStore(FileStore(tmp_path), "zfp", tolerance=1e-3)
    with pytest.raises(StateError):
        store.open(Layout.of(np.zeros(3, int)))
    store.open(Layout.of(np.zeros(3)))
    store.close()
    store.open(Layout.of(np.zeros(4)))
    assert len(files_of(tmp_path)) == 1
    store.close()


def test_a_large_state_needs_one_more_buffer_of_its_size() -> None:
    layout, inner = Layout.of(np.zeros(10 << 20)), MemoryStore()
    more = CompressedStore(inner).buffer_bytes(layout) - inner.buffer_bytes(layout)
    assert layout.nbytes < more < 1.2 * layout.nbytes


def test_large_states_move_down_to_a_compressed_level() -> None:
    state = np.random.default_rng(3).integers(0, 99, 1 << 20) / 7
    store = CascadeStore(MemoryStore(2 * state.nbytes), CompressedStore(MemoryStore()))
    store.open(Layout.of(state))
    assert all(store.put(key, [state + key], block=True) for key in range(5))
    assert all(store.get(key)[0].tobytes() == (state + key).tobytes() for key in range(5))
    store.close()
