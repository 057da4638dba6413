"""The README and the docs: their blocks run as they stand, their links lead somewhere.

A block of ```python runs by itself.  On a page of docs/tutorials, blocks build
on each other: ```python shares its names, ```sh runs in the same folder.  A
comment before a block, unseen by readers, says what a machine may lack or that
the block is a file that later blocks run:

    <!-- needs: mpiexec -->
    <!-- file: wave.py -->
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import multistage
import multistage.backends
from multistage.backends.streamed import StreamedStore

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
COMMAND = f"""\
set -eu
python() {{ {sys.executable} "$@"; }}
multistage() {{ {sys.executable} -m multistage "$@"; }}
"""


@dataclass(frozen=True)
class Block:
    """A fenced block and what the comment before it says."""

    language: str
    text: str
    needs: tuple[str, ...] = ()
    file: str | None = None

    def lacks(self) -> list[str]:
        """Return what this machine lacks for it."""
        return [need for need in self.needs if not _there(need)]


def _there(need: str) -> bool:
    if need == "cuda":
        import torch

        return torch.cuda.is_available()
    if need == "numa:0":
        return Path("/sys/devices/system/node/node0").exists()
    return bool(shutil.which(need) or importlib.util.find_spec(need))


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that can run."""
    fence = r"((?:<!--[^>]*-->\n+)*)^```(python|sh)\n(.*?)^```"
    found = []
    for said, language, text in re.findall(fence, page.read_text(), re.S | re.M):
        notes = dict(re.findall(r"<!-- (\w+): ([^>]*?) -->", said))
        needs = tuple(notes.get("needs", "").replace(",", " ").split())
        found.append(Block(language, text, needs, notes.get("file")))
    return found


ALONE = {
    f"{page.relative_to(ROOT)}-{number}": block
    for page in PAGES
    if page not in TUTORIALS
    for number, block in enumerate(b for b in blocks(page) if b.language == "python")
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func.jvp
@pytest.mark.parametrize("block", ALONE.values(), ids=ALONE.keys())
def test_blocks_run(block: Block, tmp_path: Path, monkeypatch, capsys) -> None:
    if lacks := block.lacks():
        pytest.skip(f"needs {', '.join(lacks)}")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(block.text, "README or docs", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search("plan |predicted|Stats|steps in blocks|remainder", printed)
    assert list(tmp_path.iterdir()) == []
    if "multistage.jax" in sys.modules:
        sys.modules["multistage.jax"].clear()  # else the engines of its tiers stay


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_tutorials_run(page: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    ran = 0
    for block in blocks(page):
        if block.lacks():
            continue
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "sh":
            done = subprocess.run(
                ["bash", "-c", COMMAND + block.text],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        else:
            exec(compile(block.text, page.name, "exec"), names)
        ran += 1
    assert ran >= 3
    assert not list(tmp_path.rglob(".multistage*")), "a tier left files"


def _anchors(page: Path) -> set[str]:
    """Return the anchors that forges give to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if not link.startswith("http"):
                path, _, anchor = link.partition("#")
                target = page.parent / path if path else page
                assert target.exists(), f"{page.name}: {link}"
                if anchor and target.suffix == ".md":
                    assert anchor in _anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/design.md"])
def test_files_that_a_page_names_are_there(page: str) -> None:
    files = {
        str(f.relative_to(ROOT))
        for name in ("multistage", "tests", "benchmarks")
        for f in (ROOT / name).rglob("*.*")
    }
    for named in re.findall(r"`([\w/]+\.(?:py|c|h))`", (ROOT / page).read_text()):
        assert any(f"/{file}".endswith(f"/{named}") for file in files), f"{page}: {named}"


@pytest.mark.parametrize("call", ["put", "get"])
def test_the_walk_of_a_state_is_the_one_it_takes(call: str, monkeypatch) -> None:
    page = (DOCS / "explanation" / "design.md").read_text()
    walk = re.findall(r"^\| `([\w/]+\.[cp]y?)` \|", page.partition("**One tensor")[0], re.M)
    package, original = Path(multistage.__file__).parent, getattr(StreamedStore, call)
    taken = set()

    def noted(*args: object, **options: object) -> object:
        files = [Path(frame.filename) for frame in reversed(inspect.stack(0))]
        ours = [str(f.relative_to(package)) for f in files if f.is_relative_to(package)]
        taken.add(tuple(dict.fromkeys(ours)))
        return original(*args, **options)

    monkeypatch.setattr(StreamedStore, call, noted)
    costs = multistage.Costs(1e-3, 2e-3, state_bytes=8, tiers=(multistage.Tier("m", 1e-6, 1e-6),))
    step, adjoint = (lambda x, i: np.sin(x)), (lambda x, a, i: np.cos(x) * a)
    with multistage.Reversal(
        step, adjoint, 40, memory="2 slots", tiers="memory:", costs=costs, planner="h-revolve"
    ) as run:
        run.reverse(run.forward(np.ones(1)))
    assert taken == {tuple(walk[:-3])}
    assert walk[-3:] == ["backends/streamed.py", "native/stream.c", "native/io.c"]


def _conf(name: str) -> object:
    """Return a function of docs/conf.py, which imports Sphinx, without importing it."""
    tree = ast.parse((DOCS / "conf.py").read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    names: dict[str, object] = {"re": re}
    exec(compile(ast.Module([function], []), "conf.py", "exec"), names)
    return names[name]


def test_every_page_is_on_the_map() -> None:
    trees = _conf("toctrees")((DOCS / "index.md").read_text())
    listed = set(re.findall(r"</(\S+)>$", trees, re.M))
    pages = {
        str(page.relative_to(ROOT).with_suffix(""))
        for page in (*DOCS.rglob("*.md"), *DOCS.rglob("*.rst"))
    }
    project = {"README", "CHANGELOG", "CONTRIBUTING"}
    assert listed == (pages - {"docs/index"}) | project


def test_every_planner_and_error_is_explained() -> None:
    planners = (DOCS / "explanation" / "planners.md").read_text()
    for name in multistage.PLANNERS:
        assert f"## `{name}`" in planners
    errors = (DOCS / "reference" / "errors.md").read_text()
    for name, value in vars(multistage.errors).items():
        if inspect.isclass(value) and not name.startswith("_"):
            assert f"`{name}`" in errors, name


def test_quoted_messages_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for path in sorted((ROOT / "multistage").rglob("*.py")))
    said = re.sub(r'"\s*(?:\n\s*)f?"', "", code)  # adjacent literals are one
    said = re.sub(r"\{[^{}]*\}", "...", said)
    for row in re.findall(
        r"^\| (`.*?`) \| .* \| .* \|$", (DOCS / "reference/errors.md").read_text(), re.M
    ):
        for part in re.split(r"\.\.\.", row.strip("`")):
            assert part.strip() in said, row


def test_pages_quote_the_figures_of_the_measurements() -> None:
    measured = (DOCS / "reference/measurements.md").read_text()
    table = re.findall(r"^\|.*(?: µs| ms| a step).*\|$", (ROOT / "README.md").read_text(), re.M)
    assert len(table) == 5
    for row in table:
        assert row in measured
    compared = (DOCS / "explanation/comparison.md").read_text()
    figures = re.findall(r"\b[\d.]+ (?:µs|MiB)\b", compared)
    assert len(figures) >= 7
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(figure)}", measured), figure


@pytest.mark.parametrize("name", ["multistage", "multistage.torch", "multistage.backends"])
def test_every_public_name_is_in_the_reference(name: str) -> None:
    if name == "multistage.torch":
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    pages = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.rst"))
    listed = set(re.findall(r"^\.\. (?:auto\w+|data):: (?:[\w.]+\.)?(\w+)$", pages, re.M))
    public = {n for n, v in vars(module).items() if n[0] != "_" and not inspect.ismodule(v)}
    assert public - listed == set()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    pytest.importorskip("sphinx_copybutton")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-c", "docs", ".", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert tmp_path / "docs" / "index.html" in pages
    for page in pages:  # nothing is fetched when a page is read
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"([^\"]*)", text)
        assert not [url for url in fetched if "//" in url], page
    assert "<math" in (tmp_path / "docs" / "explanation" / "model.html").read_text()
