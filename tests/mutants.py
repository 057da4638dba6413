"""Seeded faults, one line of the package each (`seeded/`): tests must catch every one.

    python tests/mutants.py            # all, some seconds each
    python tests/mutants.py sweep io   # those whose file's name has one of these words

Each fault is a line of the package, found wherever it is, replaced in a copy; on it the
tests named are run, without long ones but for faults that only these catch
(`only_all`); they must fail, within two minutes.  Before that they must pass on
an unharmed copy.  C sources are built again.  Exit 1 if a fault goes unseen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seeded import MUTANTS as MUTANTS
from seeded import Mutant as Mutant

from multistage import native
from multistage.native.header import sum_of_sources

ROOT = Path(__file__).parent.parent
LIMIT_S = 120


# An editable install finds the package by a hook of its own, wherever the path leads.
RUN = """
import os
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
import multistage, pytest
assert multistage.__file__.startswith(os.getcwd()), multistage.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def copy(to: Path) -> None:
    """Copy the package, its C core, tests, the benchmarks they read, and their configuration."""
    for name in ("multistage", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to)
    if native.LIBRARY is not None:
        shutil.copy(native.LIBRARY._name, to / "multistage" / "native" / "_native.so")


def harm(mutant: Mutant, folder: Path) -> None:
    """Put the fault into a copy, built again where it is in C."""
    path = folder / "multistage" / mutant.path
    text = path.read_text()
    assert text.count(mutant.line) == 1, f"{mutant.path} has {mutant.line!r} not once"
    path.write_text(text.replace(mutant.line, mutant.instead))
    if mutant.path.startswith("native/") and path.suffix in (".c", ".h"):
        sources = [str(source) for source in sorted(path.parent.glob("*.c"))]
        number = f"-DMULTISTAGE_SOURCES={sum_of_sources(path.parent)}"
        command = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", number, *sources]
        command += ["-pthread", "-lm"]
        subprocess.run([*command, "-o", path.parent / "_native.so"], check=True)


def passes(folder: Path, tests: tuple[str, ...], only_all: bool = False) -> bool:
    """Run tests on a copy, long ones if `only_all`; a run that does not end fails."""
    command = [sys.executable, "-c", RUN, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "" if only_all else "not long"]
    command += [f"tests/{name}" for name in tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S, text=True
        )
    except subprocess.TimeoutExpired:
        return False
    # 1: tests failed.  All else is no verdict.
    assert done.returncode in (0, 1, 2), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode == 0


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(word in m.path for word in words)]
    unseen = 0
    with tempfile.TemporaryDirectory() as scratch:
        sound = Path(scratch, "sound")
        copy(sound)
        for name, long in sorted({(name, m.only_all) for m in chosen for name in m.tests}):
            if not passes(sound, (name,), long):
                print(f"tests/{name} does not pass on the package as it is")
                return 1
        for number, mutant in enumerate(chosen):
            folder = Path(scratch, str(number))
            copy(folder)
            harm(mutant, folder)
            began = time.perf_counter()
            seen = not passes(folder, mutant.tests, mutant.only_all)
            unseen += not seen
            shutil.rmtree(folder)
            print(
                f"{'caught' if seen else 'UNSEEN'}  {mutant.path}: {mutant.instead.strip()!r} "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - unseen} of {len(chosen)} faults caught")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
