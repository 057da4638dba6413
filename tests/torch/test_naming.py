"""What code names: read from its bytes, as `dis` reads it."""

from __future__ import annotations

import argparse
import dis
import inspect
import typing
from types import CodeType, FunctionType

import pytest
from torch import nn

from multistage.torch.environment.naming import global_names, steps_of

_NAMING = (
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "STORE_GLOBAL",
    "DELETE_GLOBAL",
    "LOAD_ATTR",
    "LOAD_METHOD",
    "STORE_ATTR",
)


def _codes(space: object) -> list[CodeType]:
    found = []
    for value in vars(space).values():
        members = list(vars(value).values()) if inspect.isclass(value) else [value]
        found += [m.__code__ for m in members if isinstance(m, FunctionType)]
    return found


@pytest.mark.parametrize("space", [argparse, typing, nn.functional, nn.modules.module])
def test_the_names_of_code_are_those_of_dis(space: object) -> None:
    codes = _codes(space)
    assert len(codes) > 50
    for code in codes:
        known = [
            (step.opname, step.argval) if step.opname in _NAMING else ("", "")
            for step in dis.get_instructions(code)
            if step.opname != "EXTENDED_ARG"
        ]
        assert list(steps_of(code)) == known


def test_a_name_beyond_255_others_is_found() -> None:
    lines = [f"    name_{n}.value" for n in range(300)]
    space: dict[str, typing.Any] = {}
    exec("def function():\n" + "\n".join(lines), space)
    loaded, _, attributes = global_names(space["function"].__code__)
    assert loaded == tuple(f"name_{n}" for n in range(300))
    assert ("name_299", "value") in attributes
