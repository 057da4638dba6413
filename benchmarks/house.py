"""The state of the source: lengths, circles of imports, types of public signatures, tests.

Counts what the style guide limits, by parsing the source; nothing is run or timed.

    python -m benchmarks.house [--json FILE]

Of the package:

- `package_lines`, `median_lines`, `files_over_700`, `files_under_60`: lines of files, blank ones
  and docstrings included; empty files and `__init__.py` are not counted as short;
- `classes`, `functions`: all of them, methods and those inside of others too;
- `import_lines`: lines of import statements;
- `twins`: modules that do in Python what the C core does;
- `longest_function`, `functions_over_60`: lines of a function or method without its
  docstring and decorators;
- `import_cycles`: groups of modules that import one another; imports inside of functions and
  those for the type checker alone count;
- `same_level_imports`: groups of files and folders of one folder that import one another,
  in folders at any depth;
- `public_any`: `Any` in the signature of a public function or method (constructors and
  operators too), in a public attribute or in a public alias of a type;
- `isinstance_of_stores`, `getattr_of_stores`: where code outside of the stores' folders asks
  for the class of a store, or for an attribute that it may lack;
- `test_lines`: lines of `tests/`.

`long_benchmarks` and `long_c_files` list other files above 700 lines, without xxhash's header.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ._common import finish, options

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "multistage"
MOST_LINES = 700
MOST_LINES_OF_A_FUNCTION = 60
# What defines stores may know their classes.
OF_STORES = ("backends/", "durable/", "torch/tiers/pinned.py")
# Front ends that `package_lines` leaves out.
APART = ("jax/", "interop/pyadjoint/")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file.

    Attributes
    ----------
    path : str
        Below the package, with slashes.
    tree : ast.Module
    lines : int
    """

    path: str
    tree: ast.Module
    lines: int

    @property
    def is_package(self) -> bool:
        """Whether it is a folder's `__init__.py`."""
        return self.path.endswith("__init__.py")

    @property
    def module(self) -> str:
        """Its dotted name."""
        parts = ["multistage", *self.path.removesuffix(".py").split("/")]
        return ".".join(parts[:-1] if self.is_package else parts)


def sources(folder: Path) -> list[Source]:
    """Return every Python file below a folder."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(folder).as_posix()
        found.append(Source(name, ast.parse(text), len(text.splitlines())))
    return found


# ------------------------------------------------------------------- lengths


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function and method with its qualified name, those inside of others too."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, Definition) else prefix
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if isinstance(node, Definition) else prefix)


def lines_of(function: Function) -> int:
    """Return how many lines a function takes, its docstring left out."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        total -= first.end_lineno - first.lineno + 1
    return total


def lines_of_files(folder: Path, pattern: str) -> dict[str, int]:
    """Return the lines of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(folder.rglob(pattern))
    }


def long_files(folder: Path, pattern: str) -> dict[str, int]:
    """Return the files below a folder that have more than `MOST_LINES` lines."""
    lines = lines_of_files(folder, pattern)
    return {name: count for name, count in lines.items() if count > MOST_LINES}


# ------------------------------------------------------------------- imports


def imports(trees: Mapping[str, tuple[ast.Module, bool]]) -> dict[str, set[str]]:
    """Return which modules of the package each module imports.

    `trees` holds for each dotted name its syntax tree and whether it is a package.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name, (tree, is_package) in trees.items():
        for base, attribute in _imported(tree, name, is_package):
            target = f"{base}.{attribute}" if f"{base}.{attribute}" in trees else base
            if target in trees and target != name:
                found[name].add(target)
    return found


def _imported(tree: ast.AST, name: str, is_package: bool) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) of each import, "" for the module itself."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, "") for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                parts = name.split(".")
                parts = parts[: len(parts) - level + is_package] if level else []
                base = ".".join([*parts, *([module] if module else [])])
                yield from ((base, alias.name) for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]) if _name(func) in (
                "import_module",
                "__import__",
            ):
                yield module, ""


def import_lines(tree: ast.AST) -> int:
    """Return the lines of import statements."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
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


def same_level(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of members of one folder that import one another, in every folder.

    `p.a.x` that imports `p.b` and `p.b` that imports `p.a.y` are no circle of modules, but
    one of the folders `p.a` and `p.b`.
    """
    folders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, targets in graph.items():
        for target in targets:
            one, other = name.split("."), target.split(".")
            shared = 0
            while shared < min(len(one), len(other)) and one[shared] == other[shared]:
                shared += 1
            # The folder itself is its `__init__`, which stands beside its members.
            members = [
                ".".join(parts[: shared + 1]) if len(parts) > shared else f"{name}.__init__"
                for parts, name in ((one, name), (other, target))
            ]
            folders[".".join(one[:shared])][members[0]].add(members[1])
    return [group for folder in sorted(folders) for group in cycles(folders[folder])]


# ------------------------------------------------------------------- types


def public_any(tree: ast.Module) -> list[str]:
    """Return the public functions, methods, attributes and aliases whose types are `Any`."""
    aliases = {
        name
        for name, value in _assigned(tree)
        if name.lstrip("_")[:1].isupper() and _mentions(value, {"Any"})
    }
    vague = {"Any", *aliases}
    found = [name for name in sorted(aliases) if not name.startswith("_")]
    holders: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    holders += [(f"{node.name}.", node) for node in classes if not node.name.startswith("_")]
    for prefix, holder in holders:
        for node in holder.body:
            if isinstance(node, Function) and _is_public(node.name):
                arguments = node.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                every += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
                if any(_mentions(t, vague) for t in [*(a.annotation for a in every), node.returns]):
                    found.append(prefix + node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                if _is_public(name) and name not in aliases and _mentions(node.annotation, vague):
                    found.append(prefix + name)
    return found


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names assigned at the top of a module, and their values."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _mentions(node: ast.AST | None, names: set[str]) -> bool:
    """Return whether an expression uses one of the names, also where it is quoted."""
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Name | ast.Attribute) and _name(each) in names:
            return True
        if isinstance(each, ast.Constant) and names & set(re.findall(r"\w+", f"{each.value}")):
            return True
    return False


def _name(node: ast.AST) -> str:
    """Return the last part of a name: "FileStore" of `files.FileStore`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


# ------------------------------------------------------------------- stores


def classes_of_stores(found: Iterable[Source]) -> set[str]:
    """Return the names of the concrete stores: what has `put`, `get` and `open`, or inherits it."""
    classes = {
        node.name: node
        for source in found
        if source.path.startswith(OF_STORES)
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    }
    stores = {"Store", *({"HeldStore"} & classes.keys())}  # which opens for those below it
    while True:
        more = {
            name
            for name, node in classes.items()
            if {"put", "get", "open"} <= {n.name for n in node.body if isinstance(n, Function)}
            or stores & {_name(base) for base in node.bases}
        }
        if more <= stores:
            return stores - {"Store"}
        stores |= more


_ASKING = ("isinstance", "issubclass")


def isinstance_of_stores(path: str, tree: ast.AST, stores: set[str]) -> list[str]:
    """Return where a module outside of the stores' folders asks for the class of a store."""
    if path.startswith(OF_STORES):
        return []
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, args=[_, kinds]) if _name(func) in (
                "isinstance",
                "issubclass",
            ):
                asked = _mentions(kinds, stores)
            case ast.MatchClass(cls=cls):
                asked = _mentions(cls, stores)
            case ast.Compare(left=ast.Call(func=func), comparators=kinds) if _name(func) == "type":
                asked = any(_mentions(kind, stores) for kind in kinds)
            case _:
                continue
        if asked:
            line = node.cls.lineno if isinstance(node, ast.MatchClass) else node.lineno
            found.append(f"{path}:{line}")
    return found


def getattr_of_stores(path: str, tree: ast.AST) -> list[str]:
    """Return where a module outside of the stores' folders asks what a store may lack."""
    if path.startswith(OF_STORES):
        return []
    return [
        f"{path}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and _name(node.func) in ("getattr", "hasattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and any("store" in _name(part).lower() for part in ast.walk(node.args[0]))
    ]


# ------------------------------------------------------------------- all of it

Samples = dict[str, dict[str, int] | list[str] | list[list[str]]]


def measured() -> tuple[Samples, dict[str, float]]:
    """Return what was found, and the figures."""
    found = sources(PACKAGE)
    lengths = {
        f"{source.path}:{function.lineno} {name}": lines_of(function)
        for source in found
        for name, function in functions(source.tree)
    }
    graph = imports({source.module: (source.tree, source.is_package) for source in found})
    stores = classes_of_stores(found)
    samples: Samples = {
        "files_under_60": {s.path: s.lines for s in found if s.lines < 60 and not s.is_package},
        "twins": [source.path for source in found if source.path.endswith("_twin.py")],
        "long_files": long_files(PACKAGE, "*.py"),
        "long_benchmarks": long_files(ROOT / "benchmarks", "*.py"),
        "long_c_files": long_files(PACKAGE, "native/*.[ch]"),
        "long_functions": {n: k for n, k in lengths.items() if k > MOST_LINES_OF_A_FUNCTION},
        "import_cycles": cycles(graph),
        "same_level_imports": same_level(graph),
        "public_any": [f"{s.path}:{name}" for s in found for name in public_any(s.tree)],
        "isinstance_of_stores": [
            x for s in found for x in isinstance_of_stores(s.path, s.tree, stores)
        ],
        "getattr_of_stores": [x for s in found for x in getattr_of_stores(s.path, s.tree)],
    }
    names = {"long_files": "files_over_700", "long_functions": "functions_over_60"}
    figures: dict[str, float] = {
        "files": len(found),
        "package_lines": sum(s.lines for s in found if not s.path.startswith(APART)),
        "classes": sum(isinstance(n, ast.ClassDef) for s in found for n in ast.walk(s.tree)),
        "functions": len(lengths),
        "import_lines": sum(import_lines(source.tree) for source in found),
        # An `__init__.py` of one line is its docstring.
        "median_lines": statistics.median(s.lines for s in found if s.lines > 1),
        "longest_function": max(lengths.values()),
        **{names.get(what, what): len(each) for what, each in samples.items()},
        "test_lines": sum(lines_of_files(ROOT / "tests", "*.py").values()),
    }
    return samples, figures


def main() -> None:
    """Print what was found, and write it where `--json` says."""
    args = options(__doc__).parse_args()
    samples, figures = measured()
    for what, found in samples.items():
        for name in found:
            more = found[name] if isinstance(found, dict) and isinstance(name, str) else ""
            print(f"{what}: {name} {more}".rstrip())
    finish(args, "house", dict(samples), figures)


if __name__ == "__main__":
    main()
