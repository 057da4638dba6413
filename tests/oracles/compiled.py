"""Oracles in C, compiled by the first who asks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def compiler() -> str | None:
    """Return the C compiler, None where there is none."""
    return shutil.which("cc")


@cache
def library(name: str, *flags: str) -> ctypes.CDLL:
    """Return `name.c` of this folder, compiled and loaded."""
    command = compiler()
    assert command is not None, "no C compiler"
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        made = Path(folder) / f"{name}.so"
        subprocess.run([command, *_FLAGS, *flags, "-o", str(made), str(source)], check=True)
        return ctypes.CDLL(str(made))
