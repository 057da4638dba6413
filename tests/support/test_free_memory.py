"""Free memory under cgroups of both versions, nested, and on memory nodes."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from multistage import native
from multistage.support import free_memory as limits

GIB = 1 << 30


class Machine:
    """A made-up `proc` and `sys`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, limit: str | int, used: int, reclaimable: int = 0) -> None:
        """Write a memory cgroup of version 2."""
        self.write(f"{path}/memory.max", f"{limit}\n")
        self.write(f"{path}/memory.current", f"{used}\n")
        self.write(f"{path}/memory.stat", f"anon 5\ninactive_file {reclaimable}\n")

    def old_group(self, path: str, limit: int, used: int) -> None:
        """Write a memory cgroup of version 1."""
        self.write(f"{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{used}\n")

    def free(self) -> int:
        return limits.free_bytes(self.root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    available = type("Available", (), {"available": 64 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", available)
    monkeypatch.setattr(native, "nodes_wanted", list)
    return Machine(tmp_path)


def _v2(machine: Machine, path: str, mounted: str = "/", point: str = "/sys/fs/cgroup") -> None:
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write(
        "proc/self/mountinfo",
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"30 22 0:26 {mounted} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    )


@pytest.mark.parametrize(
    "tightest", ["", "/system.slice", "/system.slice/slurmd", "/system.slice/slurmd/job_7/step_0"]
)
def test_the_tightest_group_above_the_process_counts(machine: Machine, tightest: str) -> None:
    path = Path("/system.slice/slurmd/job_7/step_0")
    _v2(machine, str(path))
    for folder in (path, *path.parents):
        machine.group(f"sys/fs/cgroup{folder}", "max", 0)
    machine.group(f"sys/fs/cgroup{tightest}", 9 * GIB, 4 * GIB, reclaimable=GIB)
    assert machine.free() == 6 * GIB


def test_other_groups_do_not_count(machine: Machine) -> None:
    _v2(machine, "/a/b")
    machine.group("sys/fs/cgroup/a/b", "max", 0)
    machine.group("sys/fs/cgroup/a/c", 1, 1)
    machine.group("sys/fs/cgroup/z", 1, 1)
    assert machine.free() == 64 * GIB


def test_memory_high_is_a_limit_too(machine: Machine) -> None:
    _v2(machine, "/user.slice")
    machine.group("sys/fs/cgroup/user.slice", 20 * GIB, GIB)
    machine.write("sys/fs/cgroup/user.slice/memory.high", f"{3 * GIB}\n")
    assert machine.free() == 2 * GIB


@pytest.mark.parametrize("text", ["nonsense\n", "", "-5\n"])
def test_an_unreadable_limit_is_ignored(machine: Machine, text: str) -> None:
    _v2(machine, "/")
    machine.group("sys/fs/cgroup", text, 5)
    assert machine.free() == 64 * GIB


@pytest.mark.parametrize(
    ("path", "mounted"),
    [
        ("/docker/3f2a", "/docker/3f2a"),  # a container that sees the host's names
        ("/", "/"),  # one with a namespace of its own
        ("/../../other", "/.."),  # a process moved out of its namespace
        ("/elsewhere", "/docker/3f2a"),
    ],
)
def test_containers(machine: Machine, path: str, mounted: str) -> None:
    _v2(machine, path, mounted)
    machine.group("sys/fs/cgroup", 5 * GIB, GIB)
    assert machine.free() == 4 * GIB


def test_a_part_of_the_hierarchy_whose_name_mountinfo_escapes(machine: Machine) -> None:
    _v2(machine, r"/a.slice/docker\x2d1.scope/job", r"/a.slice/docker\134x2d1.scope")
    machine.group("sys/fs/cgroup", 5 * GIB, GIB)
    machine.group("sys/fs/cgroup/job", 3 * GIB, GIB)
    assert machine.free() == 2 * GIB


def test_version_1_beside_version_2(machine: Machine) -> None:
    machine.write(
        "proc/self/cgroup",
        "5:cpu,cpuacct:/x\n4:memory,hugetlb:/slurm/uid_7/job_9/step_0\n1:name=systemd:/\n0::/\n",
    )
    machine.write(
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory,hugetlb\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
    )
    base = "sys/fs/cgroup/my memory"
    for path in ("", "/slurm", "/slurm/uid_7", "/slurm/uid_7/job_9/step_0"):
        machine.old_group(base + path, 0x7FFFFFFFFFFFF000, 0)
    machine.old_group(f"{base}/slurm/uid_7/job_9", 10 * GIB, 7 * GIB)
    assert machine.free() == 3 * GIB


def _nodes(machine: Machine, **free_mib: int) -> None:
    for name, free in free_mib.items():
        machine.write(
            f"sys/devices/system/node/{name}/meminfo",
            f"Node 0 MemTotal:  {free << 10} kB\nNode 0 MemFree:  {free << 9} kB\n"
            f"Node 0 Active(file):  {free << 7} kB\nNode 0 Inactive(file):  {free << 7} kB\n",
        )


def test_memory_reserved_by_the_kernel_is_not_free(machine: Machine) -> None:
    _nodes(machine, node1=6400)
    assert limits.node_free_bytes(1, machine.root) == 4600 << 20
    held_back = [
        "Node 0, zone   Normal\n  pages free     9\n        high     999999\n",
        "Node 1, zone    DMA32\n  pages free     9\n        high     256\n",
        "Node 1, zone   Normal\n        high     1024\n        spanned  5\n",
        "              high:  378\n",  # of a processor's own pages
    ]
    machine.write("proc/zoneinfo", "".join(held_back))
    held_back_bytes = 1280 * mmap.PAGESIZE
    assert limits.node_free_bytes(1, machine.root) == (4600 << 20) - 2 * held_back_bytes


def test_nodes_that_the_process_is_bound_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nodes(machine, node0=640, node1=6400, node2=640)
    assert limits.node_free_bytes(0, machine.root) == 460 << 20
    assert limits.node_free_bytes(7, machine.root) is None
    assert machine.free() == 64 * GIB
    machine.write("proc/self/status", "Name:\tx\nMems_allowed_list:\t0-2\n")
    assert machine.free() == 64 * GIB
    machine.write("proc/self/status", "Name:\tx\nMems_allowed_list:\t0,2-3\n")
    assert machine.free() == 2 * 460 << 20
    for unknown in ("\nvoluntary_ctxt_switches:\t5", "(null)"):
        machine.write("proc/self/status", f"Mems_allowed_list:\t{unknown}\n")
        assert machine.free() == 64 * GIB
    monkeypatch.setattr(native, "nodes_wanted", lambda: [1])
    assert machine.free() == 4600 << 20


@pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")
def test_the_policy_of_this_process() -> None:
    assert native.nodes_wanted() == []
    code = """
import ctypes, platform
from multistage import native
mask = ctypes.c_ulong(1)
number = 237 if platform.machine() == "aarch64" else 238
for mode in (1, 2, 2 | 1 << 15, 3):
    failed = ctypes.CDLL(None, use_errno=True).syscall(number, mode, ctypes.byref(mask), 64)
    print(failed, native.nodes_wanted())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.stdout.startswith("-1"):
        pytest.skip("this kernel has no memory policies")
    assert done.stdout == "0 [0]\n0 [0]\n0 [0]\n0 []\n", done.stderr
