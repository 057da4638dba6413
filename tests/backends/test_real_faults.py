"""Faults by real means: full disks, limits of the system, files damaged under a running job."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from chains import digest

import multistage
from multistage.backends import FileStore
from multistage.model.chain import FunctionChain
from multistage.reversal import Reversal

TESTS = Path(faults.__file__).parent
FILE_STORES = [name for name in faults.STORES if name.startswith(faults.FILE_ENGINES)]


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=faults.quick_folder() or tmp_path) as folder:
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def run_child(code: str, *arguments: object, **environment: str) -> Any:
    """Run Python code in a process of its own, which ends by itself; return what it told."""
    preamble = """
        import faulthandler
        faulthandler.dump_traceback_later(270, exit=True)
        import json, os, sys, tempfile
        from pathlib import Path
        import faults
    """
    path = os.pathsep.join([str(Path(multistage.__file__).parents[1]), str(TESTS)])
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code)]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


# --------------------------------------------------------------------- damaged files


@pytest.mark.long(but="*-direct")
@pytest.mark.parametrize("name", FILE_STORES)
@pytest.mark.parametrize("damage", faults.DAMAGE)
def test_files_damaged_at_every_moment(quick: Path, name: str, damage: str) -> None:
    total = faults.Outcome()
    for outcome in faults.damage_cases(name, damage, quick):
        total += outcome
        assert list(quick.iterdir()) == []
    assert total.cases == total.exact >= 15
    # Extents of four are few, and may be written after the damage or read before it.
    assert total.noticed >= (1 if name.endswith("coalesced") else 3), "nobody noticed"


# ------------------------------------------------------------------------ full disks


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.long(but="aiofiles-300000")
@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("state_bytes", [5 << 20, 300_000])
@pytest.mark.parametrize("engine", faults.FILE_ENGINES)
def test_a_disk_that_fills_up(small: Path, engine: Any, state_bytes: int) -> None:
    n = 100_000_000 // state_bytes
    chain = FunctionChain(
        lambda x, i: x * np.uint8(5) + np.uint8(i % 256), lambda x, a, i: digest(x[:999], a, i)
    )
    start = np.arange(state_bytes, dtype=np.uint8)
    state, heads = start, []
    for i in range(n):
        heads.append(state[:999].copy())
        state = chain.advance(state, i, i + 1)
    wanted = 1
    for i in reversed(range(n)):
        wanted = digest(heads[i], wanted, i)
    plan = faults.SCHEDULES["overlapped"](n)  # all of them to the disk
    store = FileStore(small, engine, buffer_bytes=4 << 20, queue_depth=4)
    with Reversal(chain, planner=plan, tiers=store) as run:
        last = run.forward(start)
        assert run.reverse(1) == wanted
    assert last.tobytes() == state.tobytes()
    assert store.stats.refused or store.stats.lost, "there was room for everything"


@pytest.mark.long(but="aiofiles")
@pytest.mark.parametrize("engine", faults.FILE_ENGINES)
def test_a_neighbour_takes_the_room(small: Path, engine: Any) -> None:
    """At every moment of a run, all that is left of the disk is taken."""
    plan, taken, noticed = faults.SCHEDULES["overlapped"](faults.N), small / "taken", 0
    for at in range(1000):
        trigger = faults.Trigger(at)

        def tick(trigger: faults.Trigger = trigger) -> None:
            if trigger():
                fill(taken)

        store = FileStore(small, engine, buffer_bytes=0, queue_depth=4)
        outcome = faults.run_case(
            store, plan, False, name="large", chain=faults.watched_chain(tick, "large")
        )
        taken.unlink(missing_ok=True)
        if not trigger.struck:
            break
        assert outcome.exact == 1
        noticed += outcome.noticed
    assert at >= 18
    assert noticed >= 1  # how often depends on how far the writer is


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file:
        step = 64 << 20
        while step >= 4096:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
            except OSError:
                step //= 2


def test_files_that_may_not_grow() -> None:
    """RLIMIT_FSIZE: from nothing to more than is needed."""
    told = run_child(
        """
        import resource
        from multistage.backends import FileStore
        plan, found = faults.SCHEDULES["overlapped"](faults.N), {}
        for engine in faults.FILE_ENGINES:
            for limit in (0, 4096, 100_000, 479_999, 480_000, 486_400, 2_000_000, 50_000_000):
                total = found.setdefault(engine, [0, 0, 0])
                with tempfile.TemporaryDirectory(dir=faults.quick_folder()) as name:
                    store = FileStore(name, engine, buffer_bytes=0, queue_depth=4)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
                    outcome = faults.run_case(store, plan, False, sweeps=2, name="large")
                    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
                total[0] += 1
                total[1] += outcome.exact
                total[2] += outcome.noticed
        print(json.dumps(found))
        """
    )
    for engine, (cases, exact, noticed) in told.items():
        assert cases == exact == 8, engine
        assert 4 <= noticed <= 7, engine


# ------------------------------------------------------- a system call that fails


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes the system's reads and writes of our files fail."""
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler to build the shim with")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", str(library)]
    subprocess.run([*command, str(TESTS / "shim.c"), "-ldl"], check=True)
    return library


SHIM = """
    import ctypes
    from multistage.backends import FileStore
    shim = ctypes.CDLL(sys.argv[1])
    engine, chain, fault, what, code, on_writes, on_reads, lasting = json.loads(sys.argv[2])
    plan, total, hits = faults.SCHEDULES["overlapped"](faults.N), faults.Outcome(), 0
    with tempfile.TemporaryDirectory(dir=faults.quick_folder()) as name:
        for at in range(1000):
            store = FileStore(name, engine, buffer_bytes=0, queue_depth=4)
            shim.shim_set(what, code, at, lasting, on_writes, on_reads)
            outcome = faults.run_case(store, plan, False, name=chain)
            hit = shim.shim_hits()
            shim.shim_set(0, 0, 0, 0, 0, 0)
            if not hit:
                break
            hits += hit
            total += outcome
            assert not os.listdir(name)
    print(json.dumps([total.cases, total.exact, total.noticed, hits]))
"""
_FAIL, _SHORT, _NOTHING = 1, 2, 3
SHIMMED: dict[str, tuple[int, int, int, int]] = {  # what, code, on writes, on reads
    "short writes": (_SHORT, 0, 1, 0),
    "short reads": (_SHORT, 0, 0, 1),
    "writes of nothing": (_NOTHING, 0, 1, 0),
    "reads of nothing": (_NOTHING, 0, 0, 1),
    "EIO of a write": (_FAIL, errno.EIO, 1, 0),
    "EIO of a read": (_FAIL, errno.EIO, 0, 1),
    "ENOSPC of a write": (_FAIL, errno.ENOSPC, 1, 0),
    "calls interrupted (EINTR)": (_FAIL, errno.EINTR, 1, 1),
}


@pytest.mark.long(but="*-direct")
@pytest.mark.parametrize("engine", faults.FILE_ENGINES)
@pytest.mark.parametrize("fault", SHIMMED)
def test_a_system_call_that_fails(shim: Path, engine: str, fault: str) -> None:
    what, code, on_writes, on_reads = SHIMMED[fault]
    harmless = fault.startswith(("short", "calls"))
    lasting = int(fault.startswith("short"))  # from the call on: none must be lost
    case = [engine, "large", fault, what, code, on_writes, on_reads, lasting]
    cases, exact, noticed, hits = run_child(SHIM, shim, json.dumps(case), LD_PRELOAD=str(shim))
    assert cases == exact >= 3
    assert hits >= cases
    if harmless:
        assert noticed == 0, "what could have been completed was given up"
    else:
        assert noticed >= 2
