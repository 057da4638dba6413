"""The list of seeded faults is complete and true to the code; see `mutants.py` for running it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT, Mutant, copy, harm, passes

from multistage import backends
from multistage.planners import PLANNERS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.line[:50])
def test_each_is_in_the_code_once(mutant: Mutant) -> None:
    assert mutant.path  # which looks for it
    assert mutant.line != mutant.instead
    assert mutant.tests and all((ROOT / "tests" / name).exists() for name in mutant.tests)


def test_every_planner_and_store_has_one() -> None:
    harmed = {f"multistage/{mutant.path}" for mutant in MUTANTS}
    made = [
        *PLANNERS.values(),
        *(vars(backends)[name] for name in dir(backends) if name.endswith("Store")),
    ]
    files = {inspect.getsourcefile(inspect.unwrap(each)) for each in made if callable(each)}
    found = {str(Path(file).relative_to(ROOT)) for file in files if file}
    unharmed = found - harmed
    # Names, protocols and thin classes, whose work is done in other files of the list.
    thin = {"base.py", "wrapper.py", "urls.py", "memory.py", "files.py"}
    assert {Path(file).name for file in unharmed} <= thin


@pytest.mark.long
def test_a_fault_is_seen_and_none_is_not(tmp_path: Path) -> None:
    copy(tmp_path)
    fault = next(mutant for mutant in MUTANTS if mutant.path == "planners/single/segments.py")
    assert passes(tmp_path, fault.tests)
    harm(fault, tmp_path)
    assert not passes(tmp_path, fault.tests)
