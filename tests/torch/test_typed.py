"""Users' programs with types run as they are written; mypy reads them beside the package."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typed.torch_user import PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_a_program_with_types_runs(program: Callable[[], None]) -> None:
    program()
