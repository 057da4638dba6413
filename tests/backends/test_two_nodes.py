"""A machine with two memory nodes, 0 with the processors and 1 without: where every page lies.

Skipped elsewhere; `scripts/test-numa` boots such a machine.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multistage as ms
from multistage import native
from multistage.backends import NumaStore
from multistage.backends.arena import pages_of_node
from multistage.backends.nodes import fast_node, memory_nodes
from multistage.errors import CheckpointWarning, StoreError
from multistage.support import free_memory

NODES = memory_nodes()
pytestmark = pytest.mark.skipif(
    len(NODES) != 2 or NODES[1].cpus != "" or native.LIBRARY is None,
    reason="needs two memory nodes, the second without processors; see scripts/test-numa",
)
PAGE = mmap.PAGESIZE
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
MIB = 1 << 20


def where(array: np.ndarray[Any, Any]) -> dict[int, int]:
    """Return how many of an array's pages lie on each node, as the kernel says (move_pages)."""
    first = array.ctypes.data // PAGE * PAGE
    pages = [*range(first, array.ctypes.data + array.nbytes, PAGE)]
    addresses = (ctypes.c_void_p * len(pages))(*pages)
    status = (ctypes.c_int * len(pages))()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        MOVE_PAGES[platform.machine()], 0, ctypes.c_ulong(len(pages)), addresses, None, status, 0
    )
    assert failed == 0, ctypes.get_errno()
    return dict(Counter(status))


def mapped(node: int) -> int:
    """Return the bytes of this process on a node, as the kernel counts them (numa_maps)."""
    total = 0
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        total += int(words.get(f"N{node}", 0)) * int(words.get("kernelpagesize_kB", 4)) * 1024
    return total


def chain(n: int = 40, size: int = 1 << 17, **options: Any) -> ms.Reversal[Any, Any]:
    """Return a reversal with states of 1 MiB."""
    costs = ms.Costs(
        1e-2, 2e-2, state_bytes=8 * size, tiers=(ms.Tier("numa", 1e-3, 1e-3, queue_depth=2),)
    )
    return ms.Reversal(
        lambda x, i: np.sin(x + i),
        lambda x, a, i: np.cos(x + i) * a,
        n,
        planner="streaming",
        costs=costs,
        **options,
    )


def store_all(n: int = 40, size: int = 1 << 17) -> Any:
    states = [np.full(size, 0.3)]
    for i in range(n - 1):
        states.append(np.sin(states[-1] + i))
    adjoint = np.ones(size)
    for i in reversed(range(n)):
        adjoint = np.cos(states.pop() + i) * adjoint
    return adjoint


def run_bound(how: list[str], code: str) -> Any:
    """Run code under numactl; return what it printed last, as JSON."""
    setup = (
        "import json, sys, numpy as np, multistage as ms\nsys.path.insert(0, 'tests/backends')\n"
    )
    setup += "import test_two_nodes as t\n"
    done = subprocess.run(
        ["numactl", *how, sys.executable, "-W", "error", "-c", setup + textwrap.dedent(code)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_fast_node_is_found_by_the_firmware() -> None:
    fast = fast_node(memory_nodes(measure=True))
    assert fast is not None and fast.node == 1 and not fast.measured


def test_bound_pages_lie_on_their_node() -> None:
    for node in (0, 1):
        array = pages_of_node(8 * MIB, node)
        assert where(array) == {node: 8 * MIB // PAGE}


def test_states_lie_on_the_tiers_node_and_the_computation_on_its_own() -> None:
    before = mapped(1)
    store = NumaStore(1)
    with chain(memory="6 slots", tiers=store) as run:
        last = run.forward(np.full(1 << 17, 0.3))
        held = mapped(1) - before
        written = store.stats.writes
        assert written >= 4
        assert written * MIB <= held <= (written + 4) * MIB  # whole extents
        assert where(last).keys() == {0}
        adjoint = run.reverse(np.ones(1 << 17))
    assert adjoint.tobytes() == store_all().tobytes()
    assert where(adjoint).keys() == {0}
    assert mapped(1) - before < MIB  # all of it was given back


def test_the_computation_in_the_fast_node_and_states_in_the_other() -> None:
    """The whole process in node 1, budget, staging and landing slots too; states in node 0."""
    found = run_bound(
        ["--cpunodebind=0", "--membind=1"],
        """
        before = t.mapped(0)
        store = ms.backends.NumaStore(0)
        with t.chain(memory="6 slots", tiers=store) as run:
            last = run.forward(np.full(1 << 17, 0.3))
            held, writes = t.mapped(0) - before, store.stats.writes
            places = [t.where(last)]
            adjoint = run.reverse(np.ones(1 << 17))
        same = adjoint.tobytes() == t.store_all().tobytes()
        places = [list(p) for p in [*places, t.where(adjoint)]]
        print(json.dumps([same, held, writes, places]))
        """,
    )
    same, held, writes, places = found
    assert same and places == [[1], [1]]
    assert writes >= 4 and writes * MIB <= held <= (writes + 4) * MIB


def test_the_default_budget_is_of_the_node_that_the_process_is_bound_to() -> None:
    code = "m = t.free_memory; print(json.dumps([m.default_budget_bytes(), m.node_free_bytes(1)]))"
    for how in (["--membind=1"], ["--preferred=1"]):
        budget, free = run_bound(how, code)
        assert abs(budget - free // 4) < free // 50
    budget, free = run_bound([], code)
    assert budget > free // 4


def test_preferred_memory_spills_and_the_tier_stays() -> None:
    """With --preferred the computation may spill to node 0, the tier's states never do."""
    found = run_bound(
        ["--preferred=0"],
        """
        store = ms.backends.NumaStore(1)
        before = t.mapped(1)
        with t.chain(memory="6 slots", tiers=store) as run:
            last = run.forward(np.full(1 << 17, 0.3))
            held, writes = t.mapped(1) - before, store.stats.writes
            adjoint = run.reverse(np.ones(1 << 17))
        print(json.dumps([adjoint.tobytes() == t.store_all().tobytes(), held, writes]))
        """,
    )
    same, held, writes = found
    assert same and writes * MIB <= held <= (writes + 4) * MIB


def test_a_capacity_is_never_exceeded() -> None:
    before = mapped(1)
    store = NumaStore(1, 8 * MIB)
    with (
        pytest.warns(CheckpointWarning, match="its capacity of 8388608 bytes is used"),
        chain(memory="6 slots", tiers=store) as run,
    ):
        run.forward(np.full(1 << 17, 0.3))
        assert 4 * MIB <= mapped(1) - before <= 8 * MIB
        adjoint = run.reverse(np.ones(1 << 17))
    assert adjoint.tobytes() == store_all().tobytes()


def test_a_full_node_is_a_full_tier() -> None:
    """Without a look at what is free the kernel would end this process."""
    free = free_memory.node_free_bytes(1)
    assert free is not None and free > 64 * MIB
    ballast = pages_of_node(free - 24 * MIB, 1)
    left = free_memory.node_free_bytes(1)
    assert left is not None and left < 40 * MIB
    with (
        pytest.warns(CheckpointWarning, match="takes no more checkpoints: no space is left"),
        chain(n=120, memory="8 slots", tiers="numa:1") as run,
        pytest.warns(CheckpointWarning, match="is lost: could not be written"),
    ):
        run.forward(np.full(1 << 17, 0.3))
        adjoint = run.reverse(np.ones(1 << 17))
        report = run.report()
    assert adjoint.tobytes() == store_all(120).tobytes()
    assert 0 < report.tiers[0].peak_stored_bytes < 40 * MIB
    assert where(ballast[: 16 * MIB]) == {1: 16 * MIB // PAGE}
    with pytest.raises(OSError, match=r"memory node 1 has \d+ bytes left"):
        pages_of_node(free, 1)


def test_nodes_that_do_not_exist() -> None:
    with pytest.raises(StoreError, match="no memory node 2; it has 0, 1"):
        chain(memory="6 slots", tiers="numa:2")
