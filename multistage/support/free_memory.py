"""How much memory this process may still take: the default budget.

The least of what bounds it:

* the memory that is available on the machine;
* every memory cgroup above the process, from its own to the root of the hierarchy: a
  container's, a Slurm step's and job's, a systemd service's and its slices'.  Both
  versions of cgroups are followed, through `/proc/self/cgroup` and the mount points
  in `/proc/self/mountinfo`;
* the memory nodes that the process is bound to, as by `numactl --membind`, or prefers.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import psutil

from .. import native

# With no budget given, checkpoints may take this share of what is free.
DEFAULT_SHARE = 0.25

# By version: the files of limits and of use, and the key in memory.stat of file pages that
# the kernel gives up before it refuses memory.
_Version: TypeAlias = tuple[tuple[str, ...], str, str]
_V2: _Version = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1: _Version = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_ESCAPED = re.compile(r"\\([0-7]{3})")


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes this process may still take.

    Parameters
    ----------
    root : Path
        Where `proc` and `sys` are.

    Examples
    --------
    >>> free_bytes() > 0
    True
    """
    free = [int(psutil.virtual_memory().available)]
    for folder, version in _cgroups(root):
        free += _left(folder, *version)
    if nodes := _bound_nodes(root):
        free.append(sum(node_free_bytes(node, root) or 0 for node in nodes))
    return max(0, min(free))


def default_budget_bytes() -> int:
    """Return a quarter of the memory that is free."""
    return int(DEFAULT_SHARE * free_bytes())


def node_free_bytes(node: int, root: Path = Path("/")) -> int | None:
    """Return the bytes that one memory node can still give, None if the kernel reports none."""
    text = _text(root / f"sys/devices/system/node/node{node}/meminfo")
    if not text:
        return None
    kib = {name: int(size) for name, size in re.findall(r"(\S+):\s+(\d+) kB", text)}
    kept = _watermark_kib(node, root) + kib.get("MemTotal", 0) // 64
    files = kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0)
    # As the kernel reckons MemAvailable: of file pages it gives up all but what it needs itself.
    return max(0, kib.get("MemFree", 0) - kept + files - min(files // 2, kept)) << 10


def _watermark_kib(node: int, root: Path) -> int:
    """Return the KiB that the kernel holds back on a node: below it, processes are ended."""
    pages, here = 0, False
    for line in _text(root / "proc/zoneinfo").splitlines():
        if line.startswith("Node "):
            here = line.startswith(f"Node {node},")
        elif here and (found := re.match(r"\s+high\s+(\d+)", line)):
            pages += int(found[1])
    return pages * (mmap.PAGESIZE // 1024)


def _bound_nodes(root: Path) -> set[int]:
    """Return the memory nodes that the process is bound to or prefers; none if it may use all."""
    there = {int(p.name[4:]) for p in (root / "sys/devices/system/node").glob("node[0-9]*")}
    # On its own line: an empty list must not take the next line for its value.
    found = re.search(
        r"^Mems_allowed_list:[ \t]*([0-9,-]+)$", _text(root / "proc/self/status"), re.M
    )
    allowed = set(native.nodes_wanted())
    for first, last in _RANGE.findall(found[1]) if found and not allowed else ():
        allowed |= set(range(int(first), int(last or first) + 1))
    return set() if there <= allowed else there & allowed


def _left(folder: Path, limits: tuple[str, ...], usage: str, reclaimable: str) -> list[int]:
    """Return what each limit of a cgroup leaves; nothing for a group without one."""
    used, given_up = _text(folder / usage).strip(), 0
    if not used.isdecimal():
        return []
    found = re.search(rf"^{reclaimable} (\d+)$", _text(folder / "memory.stat"), re.M)
    if found:
        given_up = min(int(found[1]), int(used))
    texts = [_text(folder / name).strip() for name in limits]
    return [int(text) - int(used) + given_up for text in texts if text.isdecimal()]


def _cgroups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the folders of the memory cgroups of this process, its own first, then those above."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, kind = _V2, "cgroup2"
        elif "memory" in controllers.split(","):
            version, kind = _V1, "cgroup"
        else:
            continue
        for found, options, mounted, point in mounts:
            if found == kind and (kind == "cgroup2" or "memory" in options):
                for inner in _upward(PurePosixPath(path), PurePosixPath(mounted)):
                    yield root / point.lstrip("/") / inner, version


def _upward(path: PurePosixPath, mounted: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield a group's path below its mount point, those above it, then the mount point.

    A container may see a hierarchy of which only its own part, or none of it, is mounted.
    """
    inner = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
    if ".." in inner.parts:  # a group outside of this process's cgroup namespace
        inner = PurePosixPath()
    yield inner
    if inner.parts:
        yield from inner.parents


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Yield type, options, mounted folder and mount point of each file system."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        first, last = before.split(), after.split()
        if len(first) > 4 and len(last) > 2:
            # Both are escaped: systemd's names of groups hold backslashes ("docker\\x2d1.scope").
            places = [_ESCAPED.sub(lambda code: chr(int(code[1], 8)), text) for text in first[3:5]]
            yield last[0], last[2].split(","), places[0], places[1]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
