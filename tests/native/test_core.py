"""The core is there, or is not, and says so: `MULTISTAGE_CORE` and the warning."""

import ctypes
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import multistage
from multistage import native
from multistage.errors import ArgumentError, SlowWarning
from multistage.native.header import sum_of_sources

ROOT = Path(multistage.__file__).parents[1]
needs_core = pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")


def spec(monkeypatch, origin):
    """Let the import system find the core at `origin`, or not at all."""
    found = origin and importlib.machinery.ModuleSpec("_native", None, origin=str(origin))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)


@pytest.mark.parametrize("wanted", ["", "required"])
def test_a_core_that_was_not_built(monkeypatch, wanted):
    spec(monkeypatch, None)
    if wanted:
        with pytest.raises(
            ImportError, match=r"\(it was not built, or not for.*multistage\); install a C"
        ):
            native._load(wanted)
    else:
        library, why = native._load(wanted)
        assert library is None and why.startswith("it was not built, or not for the package in ")


def test_a_file_that_is_not_a_library_is_refused(monkeypatch, tmp_path):
    (tmp_path / "_native.so").write_bytes(b"junk")
    spec(monkeypatch, tmp_path / "_native.so")
    library, why = native._load("")
    assert library is None and "_native.so" in why


@pytest.mark.parametrize("wanted", ["", "required"])
def test_a_library_of_another_version_is_an_error(monkeypatch, wanted):
    libc = next(p for p in Path("/proc/self/maps").read_text().split() if "libc.so" in p)
    spec(monkeypatch, libc)
    with pytest.raises(ImportError, match=r"another version \(.*ms_"):
        native._load(wanted)


@needs_core
@pytest.mark.parametrize("wanted", ["", "required"])
def test_a_core_older_than_its_sources_is_an_error(monkeypatch, wanted):
    monkeypatch.setattr(native, "sum_of_sources", lambda folder: sum_of_sources(folder) ^ 1)
    with pytest.raises(ImportError, match=r"compiled from other sources.*pip install -e \."):
        native._load(wanted)


@needs_core
def test_an_installed_core_has_no_sources_to_compare(monkeypatch):
    monkeypatch.setattr(native, "sum_of_sources", lambda folder: 0)
    assert native._load("required")[0] is not None


def test_every_byte_of_the_sources_and_their_names_order_counts(tmp_path):
    (tmp_path / "core.h").write_text("int a;")
    assert sum_of_sources(tmp_path) == 0
    (tmp_path / "a.c").write_text("int b;")
    one = sum_of_sources(tmp_path)
    (tmp_path / "core.h").write_text("int c;")
    assert 0 != one != sum_of_sources(tmp_path) != 0


def test_off_does_not_search_for_the_core(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("looked"))
    assert native._load("off") == (None, "")


def test_the_warning_is_issued_once_and_not_when_the_core_is_off(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    monkeypatch.setattr(native, "_WHY", "")
    assert not native.available()  # warnings are errors here
    monkeypatch.setattr(native, "_WHY", "a reason of this test")
    with pytest.warns(SlowWarning, match="a reason of this test") as seen:
        assert not native.available()
        assert not native.available()
    assert len(seen) == 1
    assert "100 times longer" in str(seen[0].message) and "--no-cache-dir" in str(seen[0].message)


CODE = """
import hashlib, sys
import numpy as np
import multistage as ms
from multistage import native
from multistage.backends.files import available_engines

assert native.LIBRARY is None or sys.argv[1] == "with"
assert ("native" in available_engines()) == (native.LIBRARY is not None)
step = lambda x, i: np.sin(x) + 0.01 * i
costs = ms.Costs(1e-3, 2e-3, state_bytes=160_000, tiers=(ms.Tier("file", 1e-3, 1e-3),))
with ms.Reversal(step, lambda x, a, i: np.cos(x) * a, 300, memory="8 slots",
                 tiers=f"file:{sys.argv[2]}", planner="streaming", costs=costs) as run:
    last = run.forward(np.linspace(0, 1, 20_000))
    gradient = run.reverse(last)
    assert run.report().counts.writes > 0
layer = ms.Stage("layer", forward_s=1e-3, backward_s=2e-3, output_bytes=100, tape_bytes=300)
chain = ms.plan_chain(ms.StageCosts.uniform(12, layer, input_bytes=100), 2000)
print(hashlib.sha256(gradient.tobytes()).hexdigest(), chain.makespan_s, chain.peak_bytes)
"""


def run_code(core, which, tmp_path):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE, which, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MULTISTAGE_CORE": core},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_a_sweep_and_a_chain_are_the_same_without_the_core(tmp_path):
    off = run_code("off", "without", tmp_path)
    assert off.returncode == 0, off.stderr
    if native.LIBRARY is None:
        return
    on = run_code("required", "with", tmp_path)
    assert on.returncode == 0, on.stderr
    assert on.stdout == off.stdout


def test_where_an_array_is():
    whole = np.arange(12.0).reshape(3, 4)
    odd = np.ones(3, "M8[s]"), type("Line", (np.ndarray,), {})(4), np.frombuffer(b"1" * 8)
    for array in (whole, whole[1:], whole[:0], whole[1, 2, ...], *odd):
        at = native.whereabouts(array)
        if native.HEAD:
            at = ctypes.c_void_p.from_address(at + native.HEAD).value
        assert at == array.ctypes.data
    with pytest.raises(ArgumentError, match="arrays of NumPy, not memoryview"):
        native.whereabouts(memoryview(whole))  # what states of one's own may give a store
