"""Every store, every fault, at every call: the adjoint of store-all or an error, and an end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import faults
import pytest

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "faults.md"
RAISED_READING = ("read error (EIO)", "no memory while reading", "a bug while reading")


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory: thousands of stores are opened in it."""
    with tempfile.TemporaryDirectory(dir=faults.quick_folder() or tmp_path) as folder:
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest.mark.long(but="memory-*")
@pytest.mark.parametrize(("name", "fault"), faults.CASES)
def test_a_fault_at_every_call(name: str, fault: str, quick: Path) -> None:
    total = faults.Outcome()
    for outcome in faults.cases_of(name, fault, quick):
        total += outcome
        assert list(quick.iterdir()) == []
    if fault in faults.OPERATOR_FAULTS:
        assert total.errors == total.cases
        assert total.cases >= 60
        return
    if fault == faults.INTERRUPT:
        assert total.cases == total.exact + total.errors
        assert total.errors >= 5, "no interrupt reached the caller"
        return
    assert total.errors == 0  # every state can be computed again: nothing is a reason to stop
    assert total.exact == total.cases
    if fault == "a hundred times slower":
        return
    assert total.cases >= 2, "the fault was hardly put in"
    if name == "cascade, lower level" and fault in (*faults.WRITE_FAULTS, *RAISED_READING):
        return  # what cannot go down stays above; what cannot come up is read again when wanted
    # A write that tears a checkpoint never read is noticed by nobody.
    assert total.noticed >= 1, "nobody noticed that anything failed"


def test_the_page_lists_every_fault() -> None:
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[2].isdecimal():
            rows[cells[0]] = [int(cell) for cell in cells[2:]]
    every = {*faults.FAULTS, faults.INTERRUPT, *faults.OPERATOR_FAULTS, *faults.DAMAGE}
    assert set(rows) == every
    for cases, exact, errors in rows.values():
        assert cases == exact + errors > 0
