"""Users' programs with types run as they are written; mypy reads them beside the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from typed.torch_user import PROGRAMS

import multistage.torch as mst
from multistage.torch.sequences.arguments import Options


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program.__name__))
def test_a_program_with_types_runs(program: Callable[[], None]) -> None:
    program()


def test_types_of_unroll_name_all_its_arguments() -> None:
    named = {"cell", "state", "inputs", "outputs", *Options.__annotations__}
    assert named == set(inspect.signature(mst.unroll).parameters)
