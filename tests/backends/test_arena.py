"""Page-aligned memory, and buffers that are reused only when nobody looks at them."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from multistage.backends.arena import (
    PAGE,
    LandingPool,
    landing_bytes,
    landing_pool,
    pages,
    round_up,
)


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, PAGE), (PAGE, PAGE), (4097, 8192)])
def test_round_up(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes) == rounded


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 3 * PAGE + 1, 2 << 20])
@pytest.mark.parametrize("touch", [True, False])
def test_pages(nbytes: int, touch: bool) -> None:
    array = pages(nbytes, touch=touch)
    assert array.dtype == np.uint8
    assert array.ctypes.data % PAGE == 0
    assert len(array) >= max(nbytes, 1)
    assert len(array) % PAGE == 0
    assert not array.any()
    array[:] = 1


def address(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return array.ctypes.data


def test_a_buffer_without_references_is_reused() -> None:
    pool = LandingPool(PAGE, 2)
    first = address(pool.take())
    for _ in range(5):
        assert address(pool.take()) == first


@pytest.mark.parametrize(
    "look",
    [
        lambda buffer: buffer,
        lambda buffer: buffer[8:16],
        lambda buffer: buffer[:16].view(np.float64).reshape(2, 1)[1],
        lambda buffer: memoryview(buffer)[3:4],
        lambda buffer: [buffer[:8]],
        lambda buffer: (lambda view: lambda: view)(buffer[:8]),
        lambda buffer: iter(buffer[:8]),
        lambda buffer: np.broadcast_to(buffer[:8], (3, 8)),
    ],
)
def test_a_buffer_under_any_reference_is_not(look: object) -> None:
    pool = LandingPool(PAGE, 2)
    buffer = pool.take()
    first = address(buffer)
    kept = look(buffer)  # type: ignore[operator]
    del buffer
    others = {address(pool.take()) for _ in range(5)}
    assert first not in others
    del kept
    assert first in {address(pool.take()) for _ in range(2)}


def test_more_than_its_size_is_not_kept() -> None:
    pool = LandingPool(PAGE, 2)
    held = [pool.take() for _ in range(6)]
    assert len({address(buffer) for buffer in held}) == 6
    held.clear()
    assert len(pool._idle) == 2
    assert not pool._lent


def resident_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Anonymous:"))) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux only")
@pytest.mark.parametrize("nbytes", [300 << 10, 1 << 20, 3 << 19, 2 << 20, 12 << 20])
def test_idle_buffers_take_the_documented_memory(nbytes: int) -> None:
    pool = landing_pool(nbytes)
    before = resident_bytes()
    held = [pool.take() for _ in range(40 if nbytes < 12 << 20 else 12)]
    for buffer in held:
        buffer[::PAGE] = 1
    assert resident_bytes() - before >= len(held) * nbytes - (1 << 20)
    del buffer
    held.clear()
    assert resident_bytes() - before <= landing_bytes(nbytes) + (1 << 20)
    assert len({address(pool.take()) for _ in range(5)}) == 1


def test_buffers_outlive_the_pool() -> None:
    pool = landing_pool(4 << 20)
    buffer, idle = pool.take(), pool.take()
    buffer[:] = 7
    area = weakref.ref(idle.base.obj)  # type: ignore[union-attr]
    del idle
    assert area() is not None
    gc.disable()
    try:
        del pool  # what is idle goes with it, though a buffer is still in use
        assert area() is None
    finally:
        gc.enable()
    assert (buffer == 7).all()


def test_references_dropped_by_another_thread() -> None:
    pool = LandingPool(PAGE, 1)
    box = [pool.take()[:9]]
    first = address(box[0])
    started, stop = threading.Barrier(2), threading.Barrier(2)

    def drop() -> None:
        mine = box.pop()
        started.wait()
        stop.wait()
        del mine

    thread = threading.Thread(target=drop)
    thread.start()
    started.wait()
    assert address(pool.take()) != first
    stop.wait()
    thread.join()
    assert address(pool.take()) == first


def test_no_pool_no_reuse() -> None:
    pool = LandingPool(PAGE, 0)
    one, two = pool.take(), pool.take()
    assert address(one) != address(two)
    del one, two
    assert not pool._idle
