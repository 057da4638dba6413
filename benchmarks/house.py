"""The state of the source: lengths, import cycles, types of public signatures, tests.

Counts what the style guide limits, by parsing the source; nothing is run or timed.

    python -m benchmarks.house [--json FILE]

`import_cycles` counts groups of modules that import one another, imports inside of
functions included, those for the type checker alone left out; `same_level_imports`
counts pairs of folders that import each other; `public_any` counts public functions
and methods with `Any` in their signatures; `isinstance_of_stores` counts checks for a
concrete store outside of the folders that define stores.
"""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._common import finish, options

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "multistage"
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
# Folders that define stores may know their own.
OF_STORES = ("backends", "durable", "torch/tiers/pinned.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(folder: Path) -> dict[Path, str]:
    """Return every Python file below a folder and its text."""
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function and method, those inside of others too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def lines_of(function: Function) -> int:
    """Return how many lines a function takes, its docstring left out."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        total -= first.end_lineno - first.lineno + 1
    return total


def public_any(tree: ast.Module) -> list[str]:
    """Return the public functions and methods with `Any` in their signatures."""
    found = []
    holders: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    holders += [(f"{node.name}.", node) for node in classes if not node.name.startswith("_")]
    for prefix, holder in holders:
        for node in holder.body:
            if not isinstance(node, Function) or node.name.startswith("_"):
                continue
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
            types = [a.annotation for a in every] + [node.returns]
            names = {n.id for t in types if t for n in ast.walk(t) if isinstance(n, ast.Name)}
            if "Any" in names:
                found.append(prefix + node.name)
    return found


def imports(trees: dict[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Return which modules of the package each module imports when it runs.

    `trees` holds for each dotted name its syntax tree and whether it is a package.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name, (tree, is_package) in trees.items():
        for node in _that_run(tree):
            if isinstance(node, ast.Import):
                bases = [(alias.name, "") for alias in node.names]
            else:
                parts = name.split(".")
                parts = parts[: len(parts) - node.level + is_package] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                bases = [(base, alias.name) for alias in node.names]
            for base, attribute in bases:
                target = f"{base}.{attribute}" if f"{base}.{attribute}" in trees else base
                if target in trees and target != name:
                    found[name].add(target)
    return found


def _that_run(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield imports, those for the type checker left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from _that_run(node)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of two or more nodes that can all be reached from one another."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for following in graph.get(ahead.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    ahead.append(following)
        reached[start] = seen
    groups = {
        tuple(sorted(other for other in seen if start in reached.get(other, ())))
        for start, seen in reached.items()
        if start in seen
    }
    return sorted(map(list, groups))


def isinstance_of_stores(name: str, tree: ast.Module, stores: set[str]) -> list[str]:
    """Return the checks for a concrete store in a module outside of the stores' folders."""
    if name.startswith(OF_STORES):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            if names & stores:
                found.append(f"{name}:{node.lineno}")
    return found


def measured() -> tuple[dict[str, Any], dict[str, float]]:
    """Return what was found, and the figures."""
    texts = sources(PACKAGE)
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(text) for path, text in texts.items()}
    modules = {_module(name): (tree, name.endswith("__init__.py")) for name, tree in trees.items()}
    lines = {
        path.relative_to(PACKAGE).as_posix(): len(text.splitlines()) for path, text in texts.items()
    }
    lengths = {
        f"{name}:{function.name}": lines_of(function)
        for name, tree in trees.items()
        for function in functions(tree)
    }
    graph = imports(modules)
    folders: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            one, other = name.split(".")[1:2], target.split(".")[1:2]
            if one and other and one != other:
                folders[one[0]].add(other[0])
    both = sorted(
        {tuple(sorted((a, b))) for a, bs in folders.items() for b in bs if a in folders.get(b, ())}
    )
    stores = {
        node.name
        for name, tree in trees.items()
        if name.startswith(OF_STORES)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Store") and node.name != "Store"
    }
    kinds = [x for n, t in trees.items() for x in isinstance_of_stores(n, t, stores)]
    anys = [f"{name}:{x}" for name, tree in trees.items() for x in public_any(tree)]
    in_tests = sum(len(text.splitlines()) for text in sources(ROOT / "tests").values())
    samples = {
        "long_files": {n: k for n, k in sorted(lines.items()) if k > MOST_LINES},
        "long_functions": {n: k for n, k in lengths.items() if k > MOST_LINES_OF_A_FUNCTION},
        "import_cycles": cycles(graph),
        "same_level_imports": both,
        "public_any": anys,
        "isinstance_of_stores": kinds,
    }
    ratios = {
        "files": len(lines),
        "median_lines": statistics.median(k for k in lines.values() if k > 1),
        "files_over_400": len(samples["long_files"]),
        "functions_over_60": len(samples["long_functions"]),
        "longest_function": max(lengths.values()),
        "import_cycles": len(samples["import_cycles"]),
        "same_level_imports": len(both),
        "public_any": len(anys),
        "isinstance_of_stores": len(kinds),
        "share_of_source_in_tests": in_tests / (in_tests + sum(lines.values())),
    }
    return samples, ratios


def _module(name: str) -> str:
    """Return the dotted name of a file of the package."""
    parts = ["multistage", *name.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main() -> None:
    args = options(__doc__).parse_args()
    samples, ratios = measured()
    for what, found in samples.items():
        if isinstance(found, dict):
            for name, count in found.items():
                print(f"{what}: {name} {count}")
        else:
            for name in found:
                print(f"{what}: {name}")
    finish(args, "house", samples, ratios)


if __name__ == "__main__":
    main()
