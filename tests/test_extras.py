"""Whatever is not installed is named with the extra that brings it; the bounds are tested ones."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import multistage as ms
from multistage.errors import ArgumentError, StoreError
from multistage.schedule.timeline import Timeline
from multistage.states.layout import Layout

ROOT = Path(ms.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BOUND = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)")


def names(extra):
    return re.escape(f"pip install 'multistage-checkpointing[{extra}]'")


def _picture(tmp_path):
    from multistage.view import save_chart
    from multistage.view.timeline import timeline_chart

    save_chart(timeline_chart(Timeline(), "nothing"), tmp_path / "t.png")


def _theirs(tmp_path):
    from multistage.interop.checkpoint_schedules import as_schedule

    as_schedule(ms.plan(ms.Costs(1, 1), "3 slots", 9))


def _open(tier):
    def opened(tmp_path):
        store = ms.open_store(tier.format(tmp_path))
        try:
            store.open(Layout.of(np.zeros(3)))
        finally:
            store.close()

    return opened


def _ranks(tmp_path):
    from multistage.interop.ranks import Ranks

    Ranks()


def _shots(tmp_path):
    from multistage.interop.dask import map_shots

    map_shots(SimpleNamespace(asynchronous=False), lambda *_: 0, [1], memory="2 slots")


@pytest.mark.parametrize(
    ("extra", "module", "use", "error"),
    [
        ("report", "cairosvg", _picture, ArgumentError),
        (
            "pyrevolve",
            "pyrevolve",
            lambda _: ms.plan(ms.Costs(1, 1), "3 slots", 9, "pyrevolve"),
            ArgumentError,
        ),
        ("checkpoint-schedules", "checkpoint_schedules", _theirs, ArgumentError),
        ("mpi", "mpi4py", _ranks, ArgumentError),
        ("dask", "distributed", _shots, ArgumentError),
        ("compress", "blosc2", _open("file:{}?compress=blosc"), ArgumentError),
        ("compress", "zfpy", _open("file:{}?compress=zfp&tolerance=1e-3"), ArgumentError),
        ("remote", "fsspec.core", _open("s3://bucket/run"), StoreError),
        ("remote", "s3fs", _open("s3://bucket/run"), StoreError),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch, tmp_path, extra, module, use, error
):
    assert extra in EXTRAS
    if module == "s3fs":
        pytest.importorskip("fsspec")
        registry = importlib.import_module("fsspec.registry")._registry
        monkeypatch.delitem(registry, "s3", raising=False)
    for name in [n for n in sys.modules if n == module or n.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(error, match=names(extra)):
        use(tmp_path)


def test_the_torch_front_end_names_its_extra():
    code = "import sys; sys.modules['torch'] = None; import multistage.torch"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 1
    assert "multistage.torch needs PyTorch; " + "pip install" in ran.stderr
    assert "multistage-checkpointing[torch]" in ran.stderr


def test_every_extra_that_is_named_exists():
    # In the form pip before 23.3 takes, which ignores any other without an error.
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", extra) for extra in EXTRAS)
    places = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml"]
    places += [*(ROOT / "multistage").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    found = set()
    for path in places:
        for each in re.findall(r"multistage-checkpointing\[([\w,-]+)\]", path.read_text()):
            found |= {(path.name, extra.strip()) for extra in each.split(",")}
    assert {extra for _, extra in found} >= set(EXTRAS) - {"test", "docs"}
    assert not {(place, extra) for place, extra in found if extra not in EXTRAS}


def bounds(requirements):
    return dict(match.groups() for match in map(BOUND.match, requirements) if match)


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def version(text):
    numbers = [int(number) for number in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def test_the_lowest_versions_are_those_of_constraints_min():
    lowest = pins("constraints-min.txt")
    wanted = [*PROJECT["dependencies"]]
    for extra in set(EXTRAS) - {"test", "docs", "torch", "jax", "diffrax", "devito"}:
        wanted += EXTRAS[extra]
    tools = bounds(EXTRAS["test"])
    wanted += [f"{tool}>={tools[tool]}" for tool in ("hypothesis", "pytest", "pytest-timeout")]
    assert len(bounds(wanted)) == len(wanted)  # each has a lower bound, and none but that
    for name, bound in bounds(wanted).items():
        # The first release that there is, where the bound names none.
        least = version(lowest[name])
        assert least[: len(version(bound))] == version(bound), name


def test_each_tested_version_is_within_the_bounds():
    tested = pins("constraints.txt")
    for extra in set(EXTRAS) - {"docs"}:
        for name, bound in bounds(EXTRAS[extra]).items():
            found = re.match(r"[\d.]+\d", tested[name])
            assert found and version(found[0]) >= version(bound), name
