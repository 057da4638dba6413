"""Names and keywords in programs that no other test runs: scripts, strings, commands of the docs.

A test whose machine CI lacks, a program that a script writes and a command in the docs keep the
names of yesterday when something is renamed. mypy resolves the names of programs, the command
line's own help those of options.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from multistage.cli import main, parser

ROOT = Path(__file__).parent.parent
SCRIPTS = [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file()]
SHELL = [*SCRIPTS, ROOT / "tests" / "numa_node.sh", ROOT / ".ci" / "run"]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
# Modules that CI does not run, or runs in part: a GPU, two memory nodes, hours of fuzzing.
SELDOM_RUN = [
    "backends/test_two_nodes.py",
    "torch/test_gpu.py",
    "torch/test_gpu_races.py",
    "durable_kills.py",
    "fuzz.py",
    "fuzz_gradients.py",
    "interop/fake_mpi.py",  # which durable_kills imports
    "torch/fuzz_cells.py",
    "torch/fuzz_modules.py",
    "torch/fuzz_offload.py",
    "torch/fuzz_tiers.py",
    "torch/operators.py",
]


def text_of(node: ast.AST) -> str | None:
    """Return the text of a literal; 0 stands where an f-string inserts something."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "0" for part in node.values)
    return None


def parsed(text: str) -> str | None:
    """Return a text without its indentation if it is a Python program that imports multistage."""
    program = textwrap.dedent(text)
    if not re.search(r"^(import|from) multistage\b", program, re.MULTILINE):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes, in what is no program
        try:
            ast.parse(program)
        except SyntaxError:  # a sentence, or a part of a program
            return None
    return program


def in_strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        text = text_of(node)
        if text is not None and (program := parsed(text)) is not None:
            yield program


def in_heredocs(path: Path) -> Iterator[str]:
    text = path.read_text()
    if text.startswith("#!/usr/bin/env python3"):
        yield text
    for found in re.finditer(r"<<'?(\w+)'?\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE):
        if (program := parsed(found[2])) is not None:
            yield program


def programs() -> dict[str, str]:
    """Return each program by the name of a module for it."""
    found: dict[str, str] = {}
    for folder in ("tests", "benchmarks", "multistage", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path != Path(__file__):
                for program in in_strings(path):
                    found[f"p{len(found)}_{path.stem}"] = program
    for path in SHELL:
        for program in in_heredocs(path):
            found[f"p{len(found)}_{path.stem.replace('-', '_')}"] = program
    return found


def written(folder: Path, found: dict[str, str]) -> None:
    """Write programs, some of them parts of programs, with what is asked of their names alone."""
    (folder / "programs").mkdir()
    asked = "check-untyped-defs, allow-untyped-defs, allow-untyped-calls, implicit-reexport"
    others = "arg-type,assignment,call-overload,name-defined,no-redef,var-annotated"
    for name, program in found.items():
        head = f'# mypy: {asked}, disable-error-code="{others}"'
        (folder / "programs" / f"{name}.py").write_text(f"{head}\n{program}")


def resolved(files: list[Path]) -> str:
    """Return what mypy says of the names, keywords and imports in these files, if anything."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.long
def test_programs_and_modules_that_ci_does_not_run(tmp_path: Path) -> None:
    found = programs()
    assert any("test_install" in name for name in found)  # a script
    assert any("test_interrupts" in name for name in found)  # a string of a test
    written(tmp_path, found)
    assert resolved([tmp_path / "programs", *(ROOT / "tests" / name for name in SELDOM_RUN)]) == ""


@pytest.mark.long
def test_old_names_are_found(tmp_path: Path) -> None:
    old = [
        "ms.Reversal(print, print, 3, tier='memory:')",
        "import multistage.limits",
        "from multistage import nobody",
        "def f():\n    return ms.open_store('memory:').nothing()",
    ]
    text = "\n".join(["import multistage as ms", *old])
    assert parsed(text) is not None
    written(tmp_path, {"old": text})
    assert {
        int(line) for line in re.findall(r":(\d+): error: ", resolved([tmp_path / "programs"]))
    } == {3, 4, 5, 7}


def commands(path: Path) -> Iterator[list[str]]:
    """Yield the words of each call of the command line, from the command's name on."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix == ".md":
        text = "\n".join(
            re.findall(r"^```(?:console|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        )
    pattern = r"(?:bin/|-m |\$ |^)multistage\"? +([a-z][^\n|;>&#)]*)"
    for found in re.finditer(pattern, text, re.MULTILINE):
        yield found[1].split()


def options(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the options that the help of a command names."""
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))


def test_options_of_commands_in_scripts_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[tuple[str, ...], set[str]] = {}
    for path in [*SHELL, *PAGES]:
        for words in commands(path):
            command = (words[0], words[1]) if words[0] == "demo" else (words[0],)
            if command not in known:
                known[command] = options(command, capsys)
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= known[command], f"{path.relative_to(ROOT)}: {' '.join(words)}"
    every = next(a for a in parser()._actions if isinstance(a.choices, dict)).choices
    shown = {words[0] for words in known}
    assert shown == set(every) - {"clean"}  # which pages name within a sentence


def test_paths_and_modules_in_scripts_and_pages() -> None:
    seen = set[str]()
    for path in [*SHELL, *PAGES]:
        if path.name == "CHANGELOG.md":  # names of then
            continue
        text = path.read_text()
        named = re.findall(r"(?<![\w/])(?:tests|benchmarks|scripts)/[\w/.-]*\w", text)
        modules = re.findall(r"-m (benchmarks(?:\.\w+)+)", text)
        for found in [*named, *(each.replace(".", "/") + ".py" for each in modules)]:
            assert (ROOT / found).exists(), f"{path.relative_to(ROOT)} names {found}"
            seen.add(found)
    assert {"tests/mutants.py", "scripts/test", "benchmarks/all.py"} <= seen
