"""Imports point one way, and `import multistage` stays light."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import multistage
from benchmarks import house

ROOT = Path(multistage.__file__).parent

# A folder, or a module beside the folders, imports only from those before it in this list.
ORDER = (
    "version",
    "errors",
    "actions",
    "native",
    "support",
    "states",
    "model",
    "schedule",
    "view",
    "planners",
    "backends",
    "execute",
    "measurement",
    "durable",
    "report",
    "reversing",
    "reversal",
    "torch",
    "interop",
    "demos",
    "cli",
    "__main__",
)

# The same inside of the largest folder; the front doors come last.
ORDER_IN_TORCH = (
    "tensors",
    "environment",
    "measurement",
    "tiers",
    "chains",
    "tracing",
    "planning",
    "sequences",
    "adopting",
    "sequential",
    "compiling",
    "profiling",
    "offload",
    "unroll",
)


@cache
def graph() -> dict[str, set[str]]:
    """Return which modules each module imports."""
    found = house.sources(ROOT)
    return house.imports({each.module: (each.tree, each.is_package) for each in found})


@pytest.mark.parametrize(
    ("below", "order"), [("multistage.", ORDER), ("multistage.torch.", ORDER_IN_TORCH)]
)
def test_imports_point_one_way(below: str, order: tuple[str, ...]) -> None:
    rank = {name: place for place, name in enumerate(order)}
    seen = 0
    for module, targets in graph().items():
        if module.startswith(below):
            place = module.removeprefix(below).split(".")[0]
            assert place in rank, f"{place} has no place; add it to the order"
            for target in targets:
                other = target.removeprefix(below).split(".")[0]
                if target.startswith(below) and other != place:
                    seen += 1
                    assert rank[other] < rank[place], f"{module} imports {target}, later in order"
    assert seen > 150


def test_no_circle_of_imports_at_any_depth() -> None:
    assert len(graph()) > 200
    assert not house.cycles(graph())
    assert not house.same_level(graph())


def test_every_place_in_the_order_is_taken() -> None:
    for place, order in ((ROOT, ORDER), (ROOT / "torch", ORDER_IN_TORCH)):
        found = {path.stem for path in place.iterdir() if path.suffix in ("", ".py")}
        assert set(order) <= found, place
    torch = {path.stem for path in (ROOT / "torch").glob("[!_]*")}
    assert torch == set(ORDER_IN_TORCH)


def test_import_is_light() -> None:
    code = (
        "import sys, multistage; "
        "heavy = {'torch', 'pyrevolve', 'matplotlib', 'aiofiles', 'asyncio', 'mpi4py', 'dask', "
        "'checkpoint_schedules', 'fsspec', 'jinja2', 'cairosvg', 'xml.etree', 'blosc2', 'zfpy'}; "
        "heavy &= set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_front_page_is_short() -> None:
    public = [name for name in vars(multistage) if not name.startswith("_")]
    submodules = {path.stem for path in ROOT.iterdir()} - {"actions", "backends", "errors"}
    assert len([name for name in public if name not in submodules]) <= 29


def test_modules_named_in_docs_and_comments_exist() -> None:
    paths = (path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py"))
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    names = {module.rpartition(".")[2] for module in modules}
    pages = [*ROOT.rglob("*.py"), *(ROOT.parent / "docs").rglob("*.md")]
    for page in pages:
        for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)`", page.read_text(encoding="utf-8")):
            first, _, rest = name.partition(".")
            of_a_file = name.endswith(".svg") and first != "view"
            if (
                of_a_file
                or first in ("mst", "run", "torch")
                or name.rpartition(".")[2] not in names
            ):
                continue
            found = any(f".{module}".endswith(f".{name}") for module in modules)
            found |= first == "multistage" and hasattr(multistage, rest)
            assert found, f"{page.name}: no module `{name}`"
