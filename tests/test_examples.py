"""Every example runs, small, and finds its gradient equal to the plain one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = {  # the packages an example takes beside NumPy
    "automaton": ["torch"],
    "devito_fwi": ["devito"],
    "fwi_acoustic": ["scipy"],
    "inner_loop": ["torch"],
    "lstm_ddp": ["torch"],
    "shots_dask": ["distributed"],
    "transformer": ["torch"],
    "wave_mpi": ["mpi4py"],
}
SLOW = NEEDS.keys() - {"fwi_acoustic"}  # by what they import
# Run by tests/interop/test_mpi.py, which has an mpiexec to run it under.
ELSEWHERE = {"wave_mpi"}
EQUAL = re.compile(r"equals? .*bit for bit|equal to the last bit|equals that of one rank: True")


def run(name: str, *options: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, in an empty folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )


def names() -> list[object]:
    every = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    return [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
        for name in every
        if name not in ELSEWHERE
    ]


@pytest.mark.parametrize("name", names())
def test_the_gradient_is_the_plain_one(name: str, tmp_path: Path) -> None:
    for package in NEEDS.get(name, []):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    ran = run(name, "--quick", tmp_path=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert EQUAL.search(ran.stdout.splitlines()[-1]), ran.stdout
    assert not list(tmp_path.rglob("*")), "left behind"
    if name == "durable_resume":
        assert ran.stdout.count("ended with -9") == 2
        begins = re.findall(r"forward sweep begins at step (\d+)", ran.stdout)
        assert begins[0] == "0" and int(begins[1]) > 0


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_each_says_what_it_shows_and_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert re.match(r'"""[A-Z].*\.\n\n', text)
    assert f"examples/{name}.py" in text and "--quick" in text
    # Each is a page of the docs too.
    assert f"{name}.py" in next((ROOT / "docs").rglob("examples.md")).read_text()


def test_a_gradient_that_differs_ends_an_example_with_an_error(tmp_path: Path) -> None:
    # The example as it is, but for one number of the plain sweep.
    text = (EXAMPLES / "lstm_numpy.py").read_text()
    broken = text.replace("return model.gradients\n", "return model.gradients | {'V': 0}\n")
    assert broken != text
    (tmp_path / "broken.py").write_text(broken)
    ran = subprocess.run(
        [sys.executable, "broken.py", "--quick"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 1 and "the gradients differ" in ran.stderr
