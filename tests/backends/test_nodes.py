"""Memory nodes as the kernel tells of them, and what is proposed for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from multistage.backends.nodes import MemoryNode, advice, fast_node, memory_nodes

GIB = 1 << 30


def node(number: int, cpus: str, gib: int, rate: float | None = None) -> MemoryNode:
    return MemoryNode(number, cpus, gib * GIB, gib * GIB, (10, 20), rate)


def test_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number, cpus, kib, rate in ((0, "0-3", 1000, ""), (10, "", 2000, "409600\n")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        (folder / "access0/initiators").mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        (folder / "distance").write_text("10 17\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:  {kib} kB\nNode {number} MemFree:  {kib // 2} kB\n"
        )
        if rate:
            (folder / "access0/initiators/read_bandwidth").write_text(rate)
    near, alone = memory_nodes(tmp_path)
    assert (near.node, near.cpus, near.total_bytes, near.distances) == (0, "0-3", 1024000, (10, 17))
    assert near.bandwidth_bytes_per_s is None
    assert (alone.node, alone.cpus, alone.free_bytes) == (10, "", (1000 - 2000 // 64) * 1024)
    assert alone.bandwidth_bytes_per_s == 409.6e9


@pytest.mark.parametrize(
    ("nodes", "fast"),
    [
        ([node(0, "0-63", 96, 90e9), node(1, "", 16, 400e9)], 1),  # KNL, HBM
        ([node(0, "0-63", 96, 200e9), node(1, "", 256, 30e9)], 0),  # CXL
        ([node(0, "0-31", 96, 100e9), node(1, "32-63", 96, 104e9)], None),  # two sockets
        ([node(0, "0-63", 96, 90e9), node(1, "", 16)], None),
        ([node(0, "0-63", 96, 90e9)], None),
        ([node(0, "0-63", 96, 90e9), node(1, "64", 0, 400e9)], None),  # a node without memory
    ],
)
def test_the_fast_node(nodes: list[MemoryNode], fast: int | None) -> None:
    found = fast_node(nodes)
    assert (found and found.node) == fast


def test_advice() -> None:
    hbm = advice([node(0, "0-63", 96, 90e9), node(1, "", 16, 400e9)])
    assert "Node 1 is the fast one" in hbm[0]
    assert hbm[1] == (
        "  numactl --membind=1 python adjoint.py    # with tiers='numa:0?capacity=73728MiB'"
    )
    cxl = advice([node(0, "0-63", 96, 200e9), node(1, "", 256, 30e9)])
    assert "--membind=0 " in cxl[1] and "numa:1?capacity=196608MiB" in cxl[1]
    sockets = advice([node(0, "0-31", 96), node(1, "32-63", 96)])
    assert "--cpunodebind=0 --membind=0 " in sockets[1] and "numa:1?" in sockets[1]
    assert "One memory node" in advice([node(0, "0-3", 8)])[0]
    assert "reports no memory nodes" in advice([])[0]


def test_this_machine() -> None:
    for found in memory_nodes(measure=True):
        assert found.total_bytes >= 0 and found.bandwidth_bytes_per_s != 0
