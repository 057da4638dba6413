"""The C core must be there; long tests are marked and come first; imports are frozen for gc."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from doctest import UnexpectedException
from fnmatch import fnmatchcase
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from multistage import native

TESTS = Path(__file__).parent


class Installed(PathFinder):
    """Finds what is installed: where PyTorch is not, `import torch` would find its tests' folder.

    A None in `sys.modules` would do so as well, but wadler_lindig, which diffrax needs, takes
    what is there for a module.
    """

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, None for a folder of tests."""
        found = super().find_spec(fullname, path, target)
        is_folder = found is not None and found.origin is None
        return None if is_folder and fullname in ("torch", "jax") else found


sys.meta_path[:] = [Installed if one is PathFinder else one for one in sys.meta_path]


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


def is_long(item: pytest.Item) -> bool:
    """Return whether a test is left to `scripts/test --all`.

    `@pytest.mark.long` marks a test, `@pytest.mark.long(but="memory-*")` all of its cases but
    those whose ids match a pattern, or one of several.
    """
    mark = item.get_closest_marker("long")
    if mark is None or "but" not in mark.kwargs:
        return mark is not None
    patterns = mark.kwargs["but"]
    name = item.callspec.id
    return not any(
        fnmatchcase(name, pattern)
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )


# Files whose long tests take longest.
FIRST = (
    "native/test_sanitizers.py",
    "torch/test_pretend.py",
    "backends/test_faults.py",
    "test_examples.py",
    "backends/test_remote.py",
    "interop/test_mpi.py",
    "torch/test_zoo.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the mark from cases that are not long; begin with the files of long ones.

    Processes that share the tests take the last ones from each other: were a long one among
    them, the others would have nothing to do until it ends.
    """
    ranks = {TESTS / name: rank for rank, name in enumerate(FIRST)}
    assert all(path.is_file() for path in ranks)
    left, kept = set[str](), set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if is_long(item):
            ranks.setdefault(item.path, len(FIRST))
            mark = item.get_closest_marker("long")
            left |= {name} if mark is not None and mark.kwargs else set()
        else:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "long"]
            kept.add(name)
    if "CI" in os.environ and left - kept:  # elsewhere cases may be chosen by their names
        raise pytest.UsageError(f"no case matches the `but` of {sorted(left - kept)}")
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))  # which keeps equals in order


@pytest.fixture(scope="module", autouse=True)
def imported_is_frozen() -> None:
    """Exempt everything alive from collections, before the tests of each module.

    A process that has imported torch, transformers and Dask holds a million objects, and each of
    the many tests that collect garbage would spend half a second looking through them.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collections_run_no_python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep JAX, once a test of this process has imported it, out of collections of others' tests.

    It has Python called at each collection, and an exception raised there, such as the
    KeyboardInterrupt of a test that interrupts a run anywhere, is printed and lost.
    """
    kept = gc.callbacks[:]
    if TESTS / "jax" not in request.path.parents:
        gc.callbacks[:] = [
            call for call in kept if not getattr(call, "__module__", "").startswith("jax")
        ]
    yield
    gc.callbacks[:] = kept + [call for call in gc.callbacks if call not in kept]


@pytest.fixture(autouse=True)
def tiers_are_waited_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sweeps wait for their tiers, but in the tests of late ones.

    Whether a tier is late depends on the load of the machine: steps of microseconds are soon
    faster without it, and what a test says of transfers would not happen.
    """
    if "late" not in request.path.stem:
        monkeypatch.setattr("multistage.execute.late.Late.__call__", lambda *_: None)
