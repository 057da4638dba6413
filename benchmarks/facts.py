"""What a machine is: processor, memory nodes, GPUs, disks, filesystems, versions.

Nothing that names a person, a host or a folder is collected; `Scrubber` takes
such names out of text that programs printed.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from multistage import native
from multistage.backends.nodes import memory_nodes
from multistage.support.free_memory import free_bytes

PACKAGES = (
    "multistage-checkpointing",
    "numpy",
    "torch",
    "pyrevolve",
    "checkpoint_schedules",
    "devito",
    "mpi4py",
    "matplotlib",
)
_FLAGS = ("avx2", "avx512f", "amx_tile", "asimd", "sve")
_GPU_FIELDS = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max")


def facts(scratch: Path | None = None, *, root: Path = Path("/")) -> dict[str, Any]:
    """Return what a machine is, as plain data.

    Parameters
    ----------
    scratch : Path, optional
        A folder whose filesystem is described, without its name.
    root : Path
        Where `sys` and `proc` are, for tests.
    """
    folders = {"shared memory": root / "dev" / "shm"}
    if scratch is not None:
        folders = {"scratch": scratch, **folders}
    return {
        "processor": processor(root),
        "memory": memory(root),
        "nodes": nodes(root),
        "gpus": gpus(),
        "disks": disks(root),
        "filesystems": {
            name: filesystem(folder, root) for name, folder in folders.items() if folder.is_dir()
        },
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions(),
        "c_core": native.LIBRARY is not None,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter and are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def processor(root: Path = Path("/")) -> dict[str, Any]:
    """Return the processor's name, cores and the vector instructions it has."""
    info = _text(root / "proc" / "cpuinfo")
    model = re.search(r"^(?:model name|Model)\s*:\s*(.*)$", info, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.M)
    there = set(flags[1].split()) if flags else set()
    return {
        "model": model[1].strip() if model else platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "threads": os.cpu_count(),
        "cores": psutil.cpu_count(logical=False),
        "vectors": [flag for flag in _FLAGS if flag in there],
    }


def memory(root: Path = Path("/")) -> dict[str, Any]:
    """Return the bytes of memory, those this process may still take, and its huge pages."""
    pages = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", pages)
    return {
        "total_bytes": int(psutil.virtual_memory().total),
        "free_bytes": free_bytes(),
        "huge_pages": chosen[1] if chosen else "not known",
    }


def nodes(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return the memory nodes: a node without processors is MCDRAM, HBM or CXL memory."""
    found = memory_nodes(root, measure=root == Path("/"))
    return [{**asdict(node), "distances": list(node.distances)} for node in found]


def gpus() -> list[dict[str, str]]:
    """Return what nvidia-smi tells of each GPU; none where it is not there."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = (line.split(", ") for line in done.stdout.splitlines() if line.strip())
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]


def disks(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return the block devices: model, size, whether it turns.  No serial numbers."""
    found = []
    for folder in sorted((root / "sys/block").glob("*")):
        sectors = int(_text(folder / "size").strip() or 0)
        if not sectors or re.match(r"loop|ram|zram|dm-|md|sr", folder.name):
            continue
        found.append(
            {
                "kind": re.sub(r"\d.*", "", folder.name),
                "model": _text(folder / "device/model").strip(),
                "bytes": sectors * 512,
                "turns": _text(folder / "queue/rotational").strip() == "1",
            }
        )
    return found


def filesystem(folder: Path, root: Path = Path("/")) -> dict[str, Any]:
    """Return the kind and the room of the filesystem that a folder is on."""
    space = os.statvfs(folder)
    best, kind = -1, "not known"
    place = str(folder.resolve())
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4]
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best and after:
            best, kind = len(mount), after.split()[0]
    return {
        "kind": kind,
        "bytes": space.f_blocks * space.f_frsize,
        "free_bytes": space.f_bavail * space.f_frsize,
    }


class Scrubber:
    """Takes names of people, hosts and folders out of text.

    Parameters
    ----------
    folders : paths
        Besides the home folder and the one worked in.

    Examples
    --------
    >>> Scrubber(Path("/scratch/run 7")).scrub("in /scratch/run 7/state: no room")
    'in FOLDER/state: no room'
    """

    def __init__(self, *folders: Path) -> None:
        places = {str(p) for f in (*folders, Path.cwd()) for p in (f, f.resolve())}
        places |= {str(Path("~").expanduser()), os.environ.get("VIRTUAL_ENV", "")}
        self._folders = sorted((p for p in places if len(p) > 1), key=len, reverse=True)
        names = {"USER": _user(), "HOST": socket.gethostname()}
        names["HOST.DOMAIN"] = names["HOST"]
        names["HOST"] = names["HOST"].partition(".")[0]
        # A name that is also a word would take words out; those are told by nobody.
        common = {"root", "user", "localhost", "ubuntu", "runner", ""}
        self._names = {word: name for word, name in names.items() if name not in common}

    def scrub(self, text: str) -> str:
        """Return the text without the names."""
        for folder in self._folders:
            text = text.replace(folder, "FOLDER")
        # What is left of other paths: at least who works where.
        text = re.sub(r"/(home|Users|root)/[\w.-]+", "FOLDER", text)
        for word, name in sorted(self._names.items(), key=lambda pair: -len(pair[1])):
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
        return text

    def scrubbed(self, data: Any) -> Any:
        """Return plain data with every text scrubbed."""
        match data:
            case str():
                return self.scrub(data)
            case dict():
                return {self.scrub(str(key)): self.scrubbed(value) for key, value in data.items()}
            case list() | tuple():
                return [self.scrubbed(value) for value in data]
        return data


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def _text(path: Path) -> str:
    """Return a file's text; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
