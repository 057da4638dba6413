"""The C core must be there; long tests come first; what was imported is frozen for gc."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Generator
from doctest import UnexpectedException
from pathlib import Path

import pytest

from multistage import native

TESTS = Path(__file__).parent
# Without PyTorch, `import torch` would find the folder of its tests, which has no file of its own.
_found = importlib.util.find_spec("torch")
if _found is not None and _found.origin is None:
    sys.modules["torch"] = None  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test the Python twins unless that is asked for.

    A checkout beside a package that is not installed in editable mode finds no C core.
    """
    if native.LIBRARY is None and os.environ.get("MULTISTAGE_CORE") != "off":
        raise pytest.UsageError(
            f"these tests would run on the Python twins: {native.missing()}. Compile the C core "
            "with `pip install -e .`; to test the twins, set MULTISTAGE_CORE=off"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip what MULTISTAGE_CORE=off leaves out, tiers for chains: see `test_without_core`."""
    try:
        return (yield)
    except Exception as error:
        cause = error.exc_info[1] if isinstance(error, UnexpectedException) else error
        if native.LIBRARY is None and "that differ needs the C core" in str(cause):
            pytest.skip("a tier for a chain, without the C core")
        raise


# Files with tests of five seconds and more, the longest first.
LONG = (
    "native/test_sanitizers.py",
    "torch/test_pretend.py",
    "test_examples.py",
    "backends/test_remote.py",
    "interop/test_mpi.py",
    "interop/test_devito.py",
    "interop/test_dask.py",
    "torch/test_distributed.py",
    "torch/test_zoo.py",
    "torch/test_offload_exact.py",
    "torch/test_unroll.py",
    "torch/test_pinned_faults.py",
    "durable/test_kills.py",
    "backends/test_load.py",
    "backends/test_contract.py",
    "test_readme.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of long tests.

    Processes that share the tests take the last ones from each other: were a long one among
    them, the others would have nothing to do until it ends.
    """
    ranks = {TESTS / name: rank for rank, name in enumerate(LONG)}
    assert all(path.is_file() for path in ranks)
    items.sort(key=lambda item: ranks.get(item.path, len(LONG)))  # which keeps equals in order


@pytest.fixture(scope="module", autouse=True)
def imported_is_frozen() -> None:
    """Exempt everything alive from collections, before the tests of each module.

    A process that has imported torch, transformers and Dask holds a million objects, and each of
    the many tests that collect garbage would spend half a second looking through them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def tiers_are_waited_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sweeps wait for their tiers, but in the tests of late ones.

    Whether a tier is late depends on the load of the machine: steps of microseconds are soon
    faster without it, and what a test says of transfers would not happen.
    """
    if "late" not in request.path.stem:
        monkeypatch.setattr("multistage.execute.late.Late.__call__", lambda *_: None)
