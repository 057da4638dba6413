"""The memory nodes of a machine: which one is fast, and how to use the others as a tier."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..states.layout import Array
from ..support.free_memory import node_free_bytes
from .arena import pages_of_node

_SYS = Path("/sys/devices/system/node")
# Copied per thread to measure a node whose rate the firmware does not give: beyond the caches.
_COPIED_BYTES = 64 << 20
# Nodes whose bandwidths are nearer than this are taken for the same kind of memory.
_SAME_KIND = 1.3


@dataclass(frozen=True, slots=True)
class MemoryNode:
    """One memory node, as `numactl --hardware` numbers it.

    Attributes
    ----------
    node : int
    cpus : str
        Its processors, as in `"0-15,32"`; empty for memory alone: MCDRAM, HBM or CXL.
    total_bytes, free_bytes : int
    distances : tuple of int
        To each node, from the firmware's table; 10 is the node itself.
    bandwidth_bytes_per_s : float or None
        Told by the firmware (HMAT) for the nearest processors, or measured; None if neither.
    measured : bool
        Whether the bandwidth was measured by copying.
    """

    node: int
    cpus: str
    total_bytes: int
    free_bytes: int
    distances: tuple[int, ...]
    bandwidth_bytes_per_s: float | None = None
    measured: bool = False


def memory_nodes(root: Path = Path("/"), *, measure: bool = False) -> list[MemoryNode]:
    """Return the memory nodes of this machine; none if the kernel does not report them.

    Parameters
    ----------
    root : Path
        Where `sys` is.
    measure : bool
        Copy memory on nodes whose bandwidth the firmware does not give.

    Examples
    --------
    >>> [node.node for node in memory_nodes(Path("/nonexistent"))]
    []
    """
    found = []
    folders = sorted(
        (root / _SYS.relative_to("/")).glob("node[0-9]*"), key=lambda p: int(p.name[4:])
    )
    for folder in folders:
        number = int(folder.name[4:])
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        told = _text(folder / "access0/initiators/read_bandwidth").strip()  # MB/s
        bandwidth = int(told) * 1e6 if told.isdecimal() and int(told) else None
        found.append(
            MemoryNode(
                node=number,
                cpus=_text(folder / "cpulist").strip(),
                total_bytes=int(total[1]) * 1024 if total else 0,
                free_bytes=node_free_bytes(number, root) or 0,
                distances=tuple(int(x) for x in _text(folder / "distance").split()),
                bandwidth_bytes_per_s=bandwidth,
            )
        )
    if measure and len(found) > 1 and any(n.bandwidth_bytes_per_s is None for n in found):
        return [_measured(node) for node in found]  # all of them, to be compared
    return found


def advice(nodes: Sequence[MemoryNode]) -> list[str]:
    """Return, as lines of text, where to run a computation and which tier to give it.

    The fast node is the one of the highest bandwidth; among nodes of one kind, as two
    sockets are, there is none, and the other socket's memory is the tier.
    """
    usable = [node for node in nodes if node.total_bytes]
    if not usable:
        return ["The kernel reports no memory nodes."]
    if len(usable) == 1:
        return ["One memory node: use a disk as the tier, as in tiers='file:///scratch'."]
    fast = fast_node(usable)
    if fast is not None:
        others = [node for node in usable if node is not fast]
        largest = max(others, key=lambda node: node.total_bytes)
        return [
            f"Node {fast.node} is the fast one. Run the computation in it, states go to node "
            f"{largest.node}:",
            f"  numactl --membind={fast.node} python adjoint.py    # with "
            f"tiers='numa:{largest.node}?capacity={_capacity(largest)}'",
        ]
    near = next((node for node in usable if node.cpus), usable[0])
    far = max((n for n in usable if n is not near), key=lambda node: node.total_bytes)
    where = f"--cpunodebind={near.node} " if far.cpus else ""
    return [
        "No node is known to be faster than the others. Run the computation in one, states go "
        "to another:",
        f"  numactl {where}--membind={near.node} python adjoint.py    # with "
        f"tiers='numa:{far.node}?capacity={_capacity(far)}'",
    ]


def fast_node(nodes: Sequence[MemoryNode]) -> MemoryNode | None:
    """Return the node whose bandwidth stands out, None if none does or it is not known."""
    rated = [(n.bandwidth_bytes_per_s or 0.0, -n.node, n) for n in nodes if n.total_bytes]
    if len(rated) < 2 or not all(rate for rate, _, _ in rated):
        return None
    rated.sort(key=lambda entry: entry[:2], reverse=True)
    # Several of the highest bandwidth are one kind of memory, if another kind is there.
    return rated[0][2] if rated[0][0] > _SAME_KIND * rated[-1][0] else None


def _capacity(node: MemoryNode) -> str:
    """Return three quarters of what is free, as a tier's capacity is written."""
    return f"{max(1, 3 * node.free_bytes // 4 >> 20)}MiB"


def _measured(node: MemoryNode) -> MemoryNode:
    """Return the node with the rate at which all processors copy inside it, where there is room."""
    threads = max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    try:
        areas = [pages_of_node(2 * _COPIED_BYTES, node.node) for _ in range(threads)]
    except (OSError, AssertionError):  # no room, no right to bind, no C core
        return replace(node, bandwidth_bytes_per_s=None)

    def copied(area: Array) -> None:
        for _ in range(4):
            np.copyto(area[:_COPIED_BYTES], area[_COPIED_BYTES : 2 * _COPIED_BYTES])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copied, areas))  # threads are started, caches filled
        began = time.perf_counter()
        list(pool.map(copied, areas))
        elapsed_s = time.perf_counter() - began
    rate = 8 * threads * _COPIED_BYTES / elapsed_s  # read and written
    return replace(node, bandwidth_bytes_per_s=rate, measured=True)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
