"""Cheap garbage collections: what was imported is no longer looked through."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def imported_is_frozen() -> None:
    """Exempt everything alive from collections, before the tests of each module.

    A process that has imported torch, transformers and Dask holds a million objects, and each of
    the many tests that collect garbage would spend half a second looking through them.
    """
    gc.collect()
    gc.freeze()
