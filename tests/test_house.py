"""What `benchmarks.house` counts, on small sources, and what it says of the package."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from benchmarks import house


def tree(text: str) -> ast.Module:
    return ast.parse(dedent(text))


def test_lines_of_a_function_without_its_docstring() -> None:
    function = next(
        house.functions(
            tree('''
            def f():
                """Two
                lines."""
                x = 1
                return x
            ''')
        )
    )
    assert house.lines_of(function) == 3


def test_any_in_public_signatures_alone() -> None:
    found = house.public_any(
        tree("""
        from typing import Any
        def f(a: int) -> list[Any]: ...
        def _f(a: Any): ...
        def g(*a: Any): x: Any = 1
        def h(a: int): y: Any = a
        class C:
            def m(self, *, k: dict[str, Any]): ...
            def _m(self, k: Any): ...
        class _D:
            def m(self, k: Any): ...
        """)
    )
    assert found == ["f", "g", "C.m"]


def test_imports_are_those_that_run() -> None:
    graph = house.imports(
        {
            "p": (tree("from .a import f"), True),
            "p.a": (tree("def f():\n    from . import b"), False),
            "p.b": (tree("if TYPE_CHECKING:\n    from .a import f\nimport p.c.d"), False),
            "p.c": (tree(""), True),
            "p.c.d": (tree("from ..a import f\nfrom other import p"), False),
        }
    )
    assert graph == {"p": {"p.a"}, "p.a": {"p.b"}, "p.b": {"p.c.d"}, "p.c.d": {"p.a"}}
    assert house.cycles(graph) == [["p.a", "p.b", "p.c.d"]]


@pytest.mark.parametrize("name, found", [("reversal.py", ["reversal.py:1"]), ("backends/a.py", [])])
def test_checks_for_a_concrete_store_outside_of_stores(name: str, found: list[str]) -> None:
    code = tree("isinstance(x, (int, FileStore))\nisinstance(x, Store)")
    assert house.isinstance_of_stores(name, code, {"FileStore"}) == found


def test_no_two_folders_of_the_package_import_each_other() -> None:
    samples, ratios = house.measured()
    assert ratios["same_level_imports"] == 0, samples["same_level_imports"]
    assert ratios["files"] > 200 and ratios["longest_function"] > 20
