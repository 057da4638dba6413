"""The C core under the address and undefined-behaviour sanitizers, by the kernels' own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import multistage
from multistage.native.header import sum_of_sources

HERE = Path(__file__).parent
TESTS = HERE.parent
SOURCES = sorted((Path(multistage.__file__).parent / "native").glob("*.c"))
# What calls the kernels, without what takes long to judge their answers.
CALLERS = (
    "test_bound",
    "test_binomial",
    "test_hierarchy",
    "test_heterogeneous",
    "test_joint",
    "test_joint_bound",
)
LONG = (
    "true_sizes",
    "theorem_1",
    "too_long",
    "few_slots",
    "more_memory",
    "judges",
    "legal",
    "no_worse",
    "that_optimum",
    "below_the_optimum",
    "no_synchronous",
    "walk_costs",
    "best_period",
    "thinned_out",
    "a_tier",
    "a_faster",
    "longer_chains",
)
FLAGS = ("-std=gnu11", "-g", "-O1", "-fno-omit-frame-pointer", "-shared", "-fPIC", "-pthread")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MISTAKES = {
    "address": "int64_t ms_wrong(int64_t n) { int64_t *a = malloc(8 * n); a[n] = n; return a[n]; }",
    "undefined": "int64_t ms_wrong(int64_t n) { return INT64_MAX - 2 + n; }",
}


def _compiler() -> str:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux" or not SOURCES:
        pytest.skip("no C compiler, or no sources, to build the C core from")
    return compiler


def _runtimes() -> str:
    """Return the sanitizers' libraries, which an interpreter built without them must load first."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [_compiler(), f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"the compiler has no {name}")
        found.append(path)
    return " ".join(found)


def _build(library: Path, *sources: Path) -> None:
    number = f"-DMULTISTAGE_SOURCES={sum_of_sources(SOURCES[0].parent)}"
    command = [_compiler(), *FLAGS, *SANITIZE, number, "-o", str(library)]
    command += [*map(str, sources), "-lm"]
    subprocess.run(command, check=True)


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": _runtimes(),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # the interpreter's own are no leaks
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "MULTISTAGE_CORE": "required",
        "PYTHONMALLOC": "malloc",  # or its pools would hide what is beyond a buffer
        "PYTHONPATH": str(Path(multistage.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=840, env=environment)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    library = tmp_path / "_native.so"
    _build(library, *SOURCES)
    files = [TESTS / "planners" / f"{name}.py" for name in CALLERS]
    done = _run(
        HERE / "sanitized.py",
        library,
        "-q",
        *(
            "-p",
            "no:cacheprovider",
            "--rootdir",
            TESTS.parent,
            "-c",
            TESTS.parent / "pyproject.toml",
            "--timeout=800",  # of one test, on a busy machine
        ),
        *("-k", " and ".join(f"not {name}" for name in LONG)),
        *files,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(tmp_path: Path, mistake: str) -> None:
    library, source = tmp_path / "wrong.so", tmp_path / "wrong.c"
    source.write_text(f"#include <stdint.h>\n#include <stdlib.h>\n{MISTAKES[mistake]}\n")
    _build(library, source)
    call = f"import ctypes; ctypes.CDLL({str(library)!r}).ms_wrong(ctypes.c_int64(5))"
    done = _run("-c", call)
    assert done.returncode != 0
    assert {"address": "heap-buffer-overflow", "undefined": "overflow"}[mistake] in done.stderr
