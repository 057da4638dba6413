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
    "testing",
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
    "hessian",
    "torch",
    "jax",
    "interop",
    "demos",
    "cli",
    "__main__",
)

# The same inside of the largest folder; the front doors come last, but `offload`, used by one.
ORDER_IN_TORCH = (
    "tensors",
    "environment",
    "measurement",
    "tiers",
    "chains",
    "tracing",
    "planning",
    "offload",
    "sequences",
    "adopting",
    "sequential",
    "compiling",
    "unroll",
)


@cache
def graph() -> dict[str, set[str]]:
    """Return which modules each module imports."""
    found = house.sources(ROOT)
    return house.imports({each.module: (each.tree, each.is_package) for each in found})


def backward(found: dict[str, set[str]], below: str, order: tuple[str, ...]) -> list[str]:
    """Return the imports below a package of what is later in the order."""
    rank = {name: place for place, name in enumerate(order)}
    wrong = []
    for module in (name for name in found if name.startswith(below)):
        place = module.removeprefix(below).split(".")[0]
        assert place in rank, f"{place} has no place; add it to the order"
        for target in (name for name in found[module] if name.startswith(below)):
            other = target.removeprefix(below).split(".")[0]
            if rank[other] > rank[place]:
                wrong.append(f"{module} imports {target}")
    return wrong


@pytest.mark.parametrize(
    ("below", "order"), [("multistage.", ORDER), ("multistage.torch.", ORDER_IN_TORCH)]
)
def test_imports_point_one_way(below: str, order: tuple[str, ...]) -> None:
    assert backward(graph(), below, order) == []
    # The same imports turned round: each that leaves its place is found.
    turned: dict[str, set[str]] = {}
    across = 0
    for module, targets in graph().items():
        for target in (name for name in targets if name.startswith(below)):
            if module.startswith(below):
                turned.setdefault(target, set()).add(module)
                places = {name.removeprefix(below).split(".")[0] for name in (module, target)}
                across += len(places) == 2
    assert len(backward(turned, below, order)) == across > 0


def test_no_circle_of_imports_at_any_depth() -> None:
    assert not house.cycles(graph())
    assert not house.same_level(graph())
    # One import put in by hand closes a circle of modules, another one of folders.
    direct = graph() | {"multistage.errors": {"multistage.reversal"}}
    assert any({"multistage.errors", "multistage.reversal"} <= set(c) for c in house.cycles(direct))
    folders = graph() | {"multistage.errors": {"multistage.cli.plan"}}
    assert any("multistage.cli" in group for group in house.same_level(folders))


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
