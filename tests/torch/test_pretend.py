"""What runs on a CUDA device, on one that is not there: streams that are late, memory in use again.

The tests that need a device run in a process whose torch has `pretend`'s, and
those of `unroll` and `offload` with every tensor on it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pretend
import pytest
import torch

# The interpreter's end would race with autograd's thread of the device, which may ask for it.
PROGRAM = """if True:
    import os, sys, pytest
    status = pytest.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
    """
HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "pretend"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(pretend.compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA of its own"),
]


def _run(
    *arguments: str, seed: int = 0, delay_us: int = 0, by_default: bool = False, skipped: int = 1
) -> None:
    """Run tests on the device; all of them pass, but for few that lack a tool or a driver."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent),
        "PRETEND_FOLDER": str(FOLDER),
        "PRETEND_SEED": str(seed),
        "PRETEND_DELAY_US": str(delay_us),
        "PRETEND_DEFAULT": "1" if by_default else "",
    }
    command = [sys.executable, "-c", PROGRAM, "-p", "pretend", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*command, "-q", *arguments], cwd=HERE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped)", done.stdout)}
    assert counts["passed"] > 10 and counts.get("skipped", 0) <= skipped, done.stdout


def test_races() -> None:
    _run("test_gpu_races.py", seed=1, delay_us=301)


def test_chains_and_sequences() -> None:
    _run("test_gpu.py", skipped=5)


def test_with_every_tensor_on_the_device() -> None:
    # Three are about peaks of memory (one in many steps; two to the byte, which on a device
    # depends on when autograd's threads let go), one limits the process, one tells of a faulty
    # store, where on a device a pinned one stands before it.
    others = "not is_flat and not any_length and not hard_limit and not lost_tensor"
    others += " and not (test_numbers_are_those_of_plain_autograd and loss-stack)"
    without_cudnn = ["-W", "ignore:PyTorch was compiled without cuDNN"]
    modules = ["test_unroll.py", "test_offload.py"]
    _run(*modules, "-k", others, *without_cudnn, by_default=True)
