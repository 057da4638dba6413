"""The C core must be there; what was imported is no longer looked through for garbage."""

from __future__ import annotations

import gc
import os

import pytest

from multistage import native


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test the Python twins unless that is asked for.

    A checkout beside a package that is not installed in editable mode finds no C core.
    """
    if native.LIBRARY is None and os.environ.get("MULTISTAGE_CORE") != "off":
        raise pytest.UsageError(
            f"these tests would run on the Python twins: {native.missing()}. Compile the C core "
            "with `pip install -e .`; to test the twins, set MULTISTAGE_CORE=off"
        )


@pytest.fixture(scope="module", autouse=True)
def imported_is_frozen() -> None:
    """Exempt everything alive from collections, before the tests of each module.

    A process that has imported torch, transformers and Dask holds a million objects, and each of
    the many tests that collect garbage would spend half a second looking through them.
    """
    gc.collect()
    gc.freeze()
