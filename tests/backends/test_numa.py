"""Memory of one node: the contract, the binding itself, and nodes that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from multistage import native
from multistage.backends import NumaStore, open_store
from multistage.backends.arena import pages_of_node
from multistage.backends.testing import check_store
from multistage.errors import ArgumentError, StoreError
from multistage.states.layout import Layout


def _can_bind() -> bool:
    try:
        pages_of_node(1, 0)
    except (OSError, AssertionError):
        return False
    return True


can_bind = pytest.mark.skipif(
    native.LIBRARY is None or not _can_bind(), reason="memory cannot be bound to node 0 here"
)


@pytest.mark.long(but="None")
@can_bind
@pytest.mark.parametrize("capacity_bytes", [None, 24 << 20])
def test_contract(capacity_bytes: int | None) -> None:
    check_store(lambda: NumaStore(0, capacity_bytes, buffer_bytes=48 << 10))


@can_bind
@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="no /proc/self/numa_maps")
def test_pages_are_bound() -> None:
    array = pages_of_node(1 << 20, 0)
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (mine,) = [line for line in lines if int(line.split()[0], 16) == array.ctypes.data]
    assert "bind:0" in mine


@pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")
def test_a_missing_node_is_named_in_the_error() -> None:
    import numpy as np

    store = open_store("numa:999?capacity=1MiB")
    assert isinstance(store, NumaStore) and store.name == "numa 999"
    with pytest.raises(StoreError, match="this machine has no memory node 999"):
        store.open(Layout.of(np.zeros(3)))
    with pytest.raises(OSError, match="bound to node 4096"):
        pages_of_node(1, 4096)


@pytest.mark.parametrize("text", ["numa:", "numa:one", "numa:-1"])
def test_names_that_are_no_nodes(text: str) -> None:
    with pytest.raises(ArgumentError, match="must name a node"):
        open_store(text)
