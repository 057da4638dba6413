"""Imports point one way, and `import multistage` stays light."""

from __future__ import annotations

import ast
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
RANK = {name: rank for rank, name in enumerate(ORDER)}

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
    "chain",
    "profiling",
    "offload",
    "unroll",
)


def imports_of(path: Path, below: tuple[str, ...] = ("multistage",)) -> set[str]:
    """Modules and folders below `below` that a file imports, at any depth of nesting."""
    package = ("multistage", *path.relative_to(ROOT).parts[:-1])
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        else:
            continue
        depth = len(below)
        found |= {name[depth] for name in names if (*name[:depth],) == below and len(name) > depth}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts == ("__init__",):
        return
    assert parts[0] in RANK, f"{parts[0]} has no place; add it to ORDER"
    for name in imports_of(path) - {parts[0]}:
        if name in RANK:
            assert RANK[name] < RANK[parts[0]], f"{path.name} imports {name}, which comes later"


@pytest.mark.parametrize("name", ORDER_IN_TORCH)
def test_imports_inside_of_torch_point_one_way(name: str) -> None:
    allowed = {*ORDER_IN_TORCH[: ORDER_IN_TORCH.index(name) + 1]}
    place = ROOT / "torch" / name
    paths = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert paths
    for path in paths:
        later = imports_of(path, ("multistage", "torch")) - allowed
        assert not later, f"{name}: {path.name} imports {later}, which come later"


@cache
def sources() -> list[house.Source]:
    return house.sources(ROOT)


def graph_of(changed: str = "", line: str = "") -> dict[str, set[str]]:
    """Which modules each module imports, with a line added to one."""
    trees = {}
    for source in sources():
        more = ast.parse(line).body if source.module == f"multistage.{changed}" else []
        trees[source.module] = ast.Module([*source.tree.body, *more], []), source.is_package
    return house.imports(trees)


def test_no_circle_of_imports_at_any_depth() -> None:
    graph = graph_of()
    assert len(graph) > 200
    found = [group[0] for group in house.cycles(graph)]
    assert found == [group[0] for group in house.same_level(graph)]
    # A circle by imports for the type checker, whose modules are to be one.
    assert found == ["multistage.execute.accounts"]


@pytest.mark.parametrize(
    ("module", "line", "circle"),
    [
        # Of two modules of one folder, inside of a function.
        ("planners.chain.table", "def f(): from .plan import ChainPlan", "planners.chain.plan"),
        ("view.chart", "import multistage.view.svg", "view.svg"),
        ("view.chart", "importlib.import_module('multistage.view.svg')", "view.svg"),
        # Of a folder and its own `__init__`.
        ("planners.uniform", "from . import PLANNERS", "planners"),
    ],
)
def test_a_circle_of_modules_that_is_put_in_is_found(module: str, line: str, circle: str) -> None:
    found = next(g for g in house.cycles(graph_of(module, line)) if f"multistage.{module}" in g)
    assert {f"multistage.{module}", f"multistage.{circle}"} <= set(found)


@pytest.mark.parametrize(
    ("module", "line", "circle"),
    [
        ("planners.single.store_all", "from ..streaming import online", ("single", "streaming")),
        (
            "torch.tensors.streams",
            "from ..environment import random_state",
            ("tensors", "environment"),
        ),
    ],
)
def test_a_circle_of_folders_that_is_put_in_is_found(
    module: str, line: str, circle: tuple[str, str]
) -> None:
    """Though no two modules import each other."""
    graph = graph_of(module, line)
    assert house.cycles(graph) == house.cycles(graph_of())
    (found,) = (group for group in house.same_level(graph) if group not in house.cycles(graph))
    folder = module.split(".")[0]
    assert {f"multistage.{folder}.{name}" for name in circle} <= set(found)


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
