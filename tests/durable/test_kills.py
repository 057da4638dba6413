"""kill -9 at random moments, and at calls to the disk; see `durable_kills.py` for more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Where syncing does not wait for what else is written to the disk: it is processes that die here.
MEMORY = Path("/dev/shm")
LOOP = Path(__file__).parent.parent / "durable_kills.py"


@pytest.mark.long(but=("options2-15", "options3-15"))
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "least"),
    [
        (("--kills", "10", "--seed", "5"), 10),
        (("--calls", "2"), 30),
        (("--calls", "4", "--case", "short-found"), 15),
        (("--calls", "3", "--case", "short-unequal"), 15),
        (("--kills", "10", "--case", "unequal"), 10),
    ],
)
def test_every_gradient_is_exact(options: tuple[str, ...], least: int) -> None:
    environment = {**os.environ, "TMPDIR": str(MEMORY)} if MEMORY.is_dir() else None
    done = subprocess.run(
        [sys.executable, LOOP, *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= least
    assert "every gradient exact" in done.stdout
