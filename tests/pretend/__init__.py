"""A CUDA device that is not there, for tests of what runs on one (see `device.cpp`).

As a plugin of pytest it is there before anything imports torch:

    PYTHONPATH=tests python -m pytest -p pretend -m gpu

It shows wrong orders of copies and kernels, wrong life times of memory, and
calls that torch does not know.  It shows nothing about speed, nor about the
kernels of a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    """Return the C++ compiler, None if there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path) -> Path:
    """Compile the device for the torch that is installed, unless that was done.

    Raises
    ------
    RuntimeError
        If the compiler refuses; its words are in the message.
    """
    spec = importlib.util.find_spec("torch")  # which does not import it
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    torch = Path(spec.origin).parent
    options = ["-std=c++20", "-O1", "-shared", "-fPIC"]
    key = f"{importlib.metadata.version('torch')} {torch} {options}".encode() + _SOURCE.read_bytes()
    library = folder / f"pretend-{hashlib.sha256(key).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes that share the tests compile it once
        if library.exists():
            return library
        made = Path(scratch) / library.name
        include = torch / "include"
        command = [str(compiler()), *options, str(_SOURCE), "-o", str(made)]
        command += [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        command += [f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        made.replace(library)
    return library


def begin(seed: int = 0, most_delay_us: int = 0) -> None:
    """Put the device in the place of CUDA, before torch is imported.

    Parameters
    ----------
    seed : int
        Of the delays of its streams.
    most_delay_us : int
        Longest of them, in microseconds; one task in four is delayed.  Without
        them the default stream is never late, and faster; copy streams are.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the device: it would not be seen")
    folder = Path(os.environ.get("PRETEND_FOLDER", tempfile.gettempdir()))
    ctypes.CDLL(str(build(folder)), ctypes.RTLD_GLOBAL)
    import torch

    if torch.version.cuda is not None:
        raise RuntimeError("this torch was built with CUDA: use it, on a machine that has it")
    device = torch.ops.pretend
    device.configure(seed, most_delay_us)
    place = torch.device("cuda", 0)
    cuda: Any = torch.cuda

    def stream(priority: Any = None, **_: Any) -> Any:
        return torch.Stream(device=place)

    def event(enable_timing: bool = False, **_: Any) -> Any:
        return torch.Event(device=place, enable_timing=enable_timing)

    @contextlib.contextmanager
    def on(wanted: Any) -> Iterator[None]:
        if wanted is None:
            yield
            return
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(wanted)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    about = SimpleNamespace(
        name="a device that is not there", major=0, minor=0, total_memory=device.total()
    )
    in_place = {
        "_lazy_init": lambda: None,
        "_initialized": True,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *a, **k: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "default_generators": (device.generator(),),
        "Stream": stream,
        "Event": event,
        "stream": on,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "memory_allocated": lambda device=None: device_bytes("allocated"),
        "max_memory_allocated": lambda device=None: device_bytes("peak"),
        "memory_reserved": lambda device=None: device_bytes("reserved"),
        "reset_peak_memory_stats": lambda device=None: device_bytes("reset_peak"),
        "empty_cache": lambda: device_bytes("empty_cache"),
        "mem_get_info": lambda device=None: (
            device_bytes("total") - device_bytes("reserved"),
            device_bytes("total"),
        ),
        "get_device_properties": lambda device=None: about,
        "get_device_name": lambda device=None: about.name,
        "_sleep": lambda cycles: device.sleep(cycles // 1000),  # as at one gigahertz
    }

    def device_bytes(what: str) -> Any:
        return getattr(device, what)()

    cpu_clone = torch.UntypedStorage.clone

    def clone(storage: Any) -> Any:  # which torch makes by device types it was built with
        if storage.device.type != "cuda":
            return cpu_clone(storage)
        bytes_of = torch.empty(0, dtype=torch.uint8, device=place).set_(storage)
        return bytes_of.clone().untyped_storage()

    torch.UntypedStorage.clone = clone
    for name, value in in_place.items():
        for module in (cuda, cuda.random, cuda.memory):
            if hasattr(module, name):
                setattr(module, name, value)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Begin, where this is a plugin: before the conftests, which import torch."""
    begin(int(os.environ.get("PRETEND_SEED", 0)), int(os.environ.get("PRETEND_DELAY_US", 0)))


@pytest.fixture(autouse=True)
def _by_default() -> Iterator[None]:
    """Make tensors on the device unless told otherwise, where PRETEND_DEFAULT is set."""
    if not os.environ.get("PRETEND_DEFAULT"):
        yield
        return
    import torch

    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
