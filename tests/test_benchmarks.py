"""`benchmarks.all` and `benchmarks.node`: verdicts, pages, failures, resuming, no names."""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markup import checked

from benchmarks import all as runner
from benchmarks import catalog, chain_theorem, claims, docs, facts, node, node_page
from benchmarks.page import page
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory

ROOT = Path(__file__).parent.parent

# A benchmark as small as can be; FAILS and WAITS say how it ends.
TINY = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
for name in ("--json", "--plot"):
    parser.add_argument(name, type=pathlib.Path)
parser.add_argument("--quick", action="store_true")
parser.add_argument("--seed", type=int)
args = parser.parse_args()
print("says <this> first", flush=True)
{body}
ratios = {{"peak_async": 8.0, "none": float("inf")}}
args.json.write_text(json.dumps({{"ratios": ratios, "left_out": [], "machine": {{}},
                                 "seed": args.seed}}))
"""


def assert_page(text: str) -> None:
    """Assert that a page parses and asks for nothing from anywhere."""
    checked(text)
    assert not re.search(r"https?:|@import|url\(|<script|<link", text)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make benchmarks of a few lines, and have the runner know them alone."""
    package = tmp_path / "root" / "benchmarks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def make(**bodies: str) -> Path:
        for name, body in bodies.items():
            (package / f"{name}.py").write_text(TINY.format(body=body))
        entries = tuple(
            catalog.Entry(name, f"tiny {name}", items="figure", quick_s=30) for name in bodies
        )
        monkeypatch.setattr(runner, "ROOT", package.parent)
        monkeypatch.setattr(runner, "CATALOG", entries)
        return tmp_path / "out"

    return make


def quick(out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    status = runner.main(["--quick", "--out", str(out), *more])
    text = (out / "all.json").read_text()
    assert_schema(data := json.loads(text))
    assert "Infinity" not in text and "NaN" not in text
    return status, data


def assert_schema(data: dict[str, Any]) -> None:
    """Assert that `all.json` is what the page and the docs read."""
    assert set(data) == {"format", "mode", "machine", "load", "benchmarks", "claims"}
    assert data["format"] == "multistage-benchmarks-1" and data["mode"] in ("quick", "full")
    assert {"processor", "cores", "system", "versions"} <= set(data["machine"])
    for record in data["benchmarks"].values():
        assert record["status"] in ("done", "failed", "skipped")
        if record["status"] == "done":
            assert isinstance(record["ratios"], dict) and isinstance(record["left_out"], list)
        else:
            assert record["reason"]
    for claim in data["claims"]:
        assert claim["verdict"] in ("agrees", "differs", "not run", "no counterpart")
        assert (claim["value"] is not None) == (claim["verdict"] in ("agrees", "differs"))


# -------------------------------------------------------------------- the runner


def test_a_failing_benchmark_is_reported_and_the_rest_run(tiny: Any) -> None:
    out = tiny(first="raise SystemExit(3)", second="", third="args.json = args.plot")
    status, data = quick(out)
    assert status == 1
    records = data["benchmarks"]
    assert records["first"]["status"] == "failed" and records["first"]["reason"] == "exit status 3"
    assert "says <this> first" in records["first"]["output"]
    assert records["second"]["status"] == "done"
    assert records["second"]["ratios"] == {"peak_async": 8.0, "none": "inf"}  # strict JSON
    assert records["third"]["status"] == "failed" and "no result" in records["third"]["reason"]
    text = (out / "index.html").read_text()
    assert_page(text)
    assert "says &lt;this&gt; first" in text and "exit status 3" in text


@pytest.mark.long
def test_a_benchmark_that_takes_too_long_is_stopped_with_its_children(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    out = tiny(
        slow=f"import subprocess; c = subprocess.Popen(['sleep', '1000']); "
        f"pathlib.Path({str(pid)!r}).write_text(str(c.pid)); c.wait()"
    )
    entry = catalog.Entry("slow", "slow", quick_s=5)
    monkeypatch.setattr(runner, "CATALOG", (entry,))
    status, data = quick(out)
    assert status == 1
    assert data["benchmarks"]["slow"]["reason"] == "stopped after 5 s"
    assert "says <this> first" in data["benchmarks"]["slow"]["output"]
    assert _gone(int(pid.read_text()))


def _gone(pid: int) -> bool:
    """Whether a killed process ends, be it as one that nobody has waited for."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 60)[0])
    finally:
        os.close(process)


def test_benchmarks_without_their_packages_are_skipped_with_a_reason(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tiny(here="")
    lacking = catalog.Entry("gone", "gone", needs=("no_such_package",))
    monkeypatch.setattr(runner, "CATALOG", (*runner.CATALOG, lacking))
    status, data = quick(out)
    assert status == 0  # what cannot run here has not failed
    reason = "no_such_package is not installed"
    assert data["benchmarks"]["gone"] == {"status": "skipped", "reason": reason}


@pytest.mark.long(but="2")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_resumes(tiny: Any, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C, or the end of a job, during the second of three: the first is kept."""
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write('NAME ')"
    reached = tmp_path / "reached"
    os.mkfifo(reached)
    reader = os.open(reached, os.O_RDONLY | os.O_NONBLOCK)
    waits = f"open({str(reached)!r}, 'w').write('here'); time.sleep(1000)"
    out = tiny(one=note.replace("NAME", "one"), two=waits, three=note.replace("NAME", "three"))
    code = (
        "import sys, pathlib; from benchmarks import all as r, catalog\n"
        f"r.ROOT = pathlib.Path({str(runner.ROOT)!r})\n"
        "r.CATALOG = tuple(catalog.Entry(n, n) for n in ('one', 'two', 'three'))\n"
        f"sys.exit(r.main(['--quick', '--out', {str(out)!r}]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert select.select([reader], [], [], 240)[0], "the second did not begin"
        process.send_signal(how)
        printed, _ = process.communicate(timeout=280)
    os.close(reader)
    assert process.returncode == 130
    assert "--resume goes on from here" in printed
    kept = json.loads((out / "all.json").read_text())["benchmarks"]
    assert list(kept) == ["one"]
    assert_page((out / "index.html").read_text())
    tiny(two=note.replace("NAME", "two"))
    names = ("one", "two", "three")
    runner.CATALOG = tuple(catalog.Entry(name, name) for name in names)  # as monkeypatched
    status, data = quick(out, "--resume")
    assert status == 0
    assert {name: r["status"] for name, r in data["benchmarks"].items()} == dict.fromkeys(
        names, "done"
    )
    assert ran.read_text().split() == list(names)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "choose --quick, --full or --report"),
        (["--quick", "--only", "nothing"], "--only nothing: choose from async_model"),
        (["--report"], "is not there"),
    ],
)
def test_bad_arguments(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        runner.main([*arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_every_benchmark_is_in_the_catalog() -> None:
    parts = {"acoustic", "all", "catalog", "claims", "docs", "facts", "node", "node_page", "page"}
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - parts
    there = {name for name in modules if not name.startswith("_")}
    assert {entry.name for entry in catalog.CATALOG} == there


# -------------------------------------------------------------------- the claims


def test_published_claims_are_whole() -> None:
    data = claims.load()
    ids = [claim["id"] for claim in data["claims"]]
    assert len(ids) == len(set(ids))
    names = {entry.name for entry in catalog.CATALOG}
    for claim in data["claims"]:
        assert claim["paper"] in data["papers"], claim["id"]
        assert claim["source"] in ("text", "formula", "figure"), claim["id"]
        assert claim["how"] and claim["claim"] and claim["place"], claim["id"]
        if claim["benchmark"] is None:
            continue
        assert claim["benchmark"] in names, claim["id"]
        # A claim's ratio is one that the benchmark makes.
        source = (ROOT / "benchmarks" / f"{claim['benchmark']}.py").read_text()
        stem = re.sub(r"_\d+$", "_", claim["measured"])
        assert f'"{claim["measured"]}"' in source or f'f"{stem}{{' in source, claim["id"]
        claims.holds(claim["test"], 1.0, claim["published"])


@pytest.mark.parametrize(
    "test, published, good, bad",
    [
        ({"relative": 0.1}, 2.0, [1.81, 2.0, 2.19], [1.79, 2.21]),
        ({"within": 0.5}, 0.0, [0.5, -0.5], [0.51]),
        ({"min": 1}, None, [1, 2], [0.99]),
        ({"max": 1}, None, [1, 0], [1.01]),
        ({"equals": 0}, 0, [0], [1e-9]),
        ({"above": 2, "up_to": 6}, 6, [3, 6], [2, 7]),
    ],
)
def test_verdicts(
    test: dict[str, float], published: float | None, good: list[float], bad: list[float]
) -> None:
    assert all(claims.holds(test, value, published) for value in good)
    assert not any(claims.holds(test, value, published) for value in bad)


def test_verdicts_follow_the_data() -> None:
    name = "k-fig1-limit"

    def verdict(results: dict[str, Any]) -> str:
        return next(j.verdict for j in claims.judge_all(results) if j.claim["id"] == name)

    assert verdict({}) == "not run"
    assert verdict({"async_model": {"ratios": {}}}) == "not run"
    assert verdict({"async_model": {"ratios": {"peak_async": math.nan}}}) == "not run"
    assert verdict({"async_model": {"ratios": {"peak_async": 8.0}}}) == "agrees"
    assert verdict({"async_model": {"ratios": {"peak_async": 9.0}}}) == "differs"


# --------------------------------------------------------------------- the pages


def some_run(value: float = 8.0) -> dict[str, Any]:
    record = {
        "status": "done",
        "seconds": 1.0,
        "load_before": [0.5, 0.5, 0.5],
        "ratios": {"peak_async": value, "peak_conventional": 99.0},
        "left_out": ["a | b"],
    }
    return runner.summary("quick", {"async_model": record})


def test_a_page_of_every_claim_parses(tmp_path: Path) -> None:
    (tmp_path / "async_model.png").write_bytes(b"no picture, but bytes")
    text = page(some_run(), tmp_path)
    assert_page(text)
    assert text.count("data:image/png;base64,") == 1
    for claim in claims.load()["claims"]:
        assert claim["item"].split("<")[0].strip() in text.replace("&lt;", "<")


def test_the_docs_tables_are_rewritten_and_the_rest_is_left(tmp_path: Path) -> None:
    target = tmp_path / "reproduce.md"
    target.write_text((ROOT / "docs" / "reproduce.md").read_text())
    docs.rewrite(target, some_run())
    first = target.read_text()
    assert "| Figure 1, p. 2 |" in first and "8 states" in first and "| agrees |" in first
    assert "`--quick` on" in first and "load before each benchmark 0.5 to 0.5" in first
    docs.rewrite(target, some_run(9.0))
    assert "**differs**" in target.read_text() and "9 states" in target.read_text()
    docs.rewrite(target, some_run())
    assert target.read_text() == first

    def bare(text: str) -> str:
        return re.sub(r"(<!-- table: .*? -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.S)

    assert bare(first) == bare((ROOT / "docs" / "reproduce.md").read_text())
    target.write_text("<!-- table: nobody-1900 -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="nobody-1900"):
        docs.rewrite(target, some_run())


# -------------------------------------------------------------- the paper's models


def test_table_1_counts_what_the_judge_counts() -> None:
    assert chain_theorem.against_table_1(25, seed=3) == 0


def test_the_printed_theorem_lacks_one_gradient() -> None:
    """As printed some schedule is beyond its limit; with the gradient counted all are optimal."""
    rows = chain_theorem.theorem_1(2, seed=1)
    assert any(row["printed_peak"] > row["memory"] for row in rows)
    for row in rows:
        assert row["corrected"] == pytest.approx(row["exact"])
        assert row["printed"] <= row["exact"] + 1e-9
    costs = chain_theorem.random_chain(0, 4, 6)
    sizes = chain_theorem.Sizes.of(costs)
    none, trace = chain_theorem.printed(sizes, smallest_memory(costs) // 4)
    assert math.isinf(none) and trace == []
    plain = plan_chain(costs)
    assert chain_theorem.printed(sizes, 2 * plain.plain_bytes)[0] == plain.makespan_s


# ----------------------------------------------------------------------- the node


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Make a KNL in flat mode of files: a second node without processors."""
    nodes = tmp_path / "sys/devices/system/node"
    for number, (cpus, kib) in enumerate((("0-255", 98 << 20), ("", 16 << 20))):
        folder = nodes / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "distance").write_text("10 31\n" if number == 0 else "31 10\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:  {kib} kB\nNode {number} MemFree:  {kib // 2} kB\n"
        )
    disk = tmp_path / "sys/block/nvme0n1"
    (disk / "device").mkdir(parents=True)
    (disk / "queue").mkdir()
    (disk / "size").write_text("2000\n")
    (disk / "queue/rotational").write_text("0\n")
    (disk / "device/model").write_text("A disk  \n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name : Phi 7210\nflags : avx2 avx512f\n")
    return tmp_path


def test_facts_of_a_machine_with_two_kinds_of_memory(machine: Path) -> None:
    found = facts.facts(machine, root=machine)
    assert found["processor"]["model"] == "Phi 7210"
    assert found["processor"]["vectors"] == ["avx2", "avx512f"]
    assert [(n["cpus"], n["total_bytes"], n["distances"]) for n in found["nodes"]] == [
        ("0-255", 98 << 30, [10, 31]),
        ("", 16 << 30, [31, 10]),
    ]
    assert found["disks"] == [
        {"kind": "nvme", "model": "A disk", "bytes": 1_024_000, "turns": False}
    ]
    assert found["filesystems"]["scratch"]["kind"] == "not known"
    assert facts.filesystem(Path("/proc"))["kind"] == "proc"
    tried = node.tiers(Path("/scratch"), [0, 1])
    assert tried["node 1"] == "numa:1" and tried["memory"] == "memory:"


def test_names_are_taken_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.socket, "gethostname", lambda: "knl7.cluster.example")
    monkeypatch.setattr(facts.getpass, "getuser", lambda: "ada")
    scrubber = facts.Scrubber(tmp_path)
    told = {f"{tmp_path}/x": [f"in {tmp_path}/x at /home/ada/y on knl7, ada", 3, None]}
    assert scrubber.scrubbed(told) == {
        "FOLDER/x": ["in FOLDER/x at FOLDER/y on HOST, USER", 3, None]
    }
    assert scrubber.scrub("knl7.cluster.example: adaptive") == "HOST.DOMAIN: adaptive"


def keys_of(data: Any, below: str = "") -> set[str]:
    """Return the keys of nested data, but those of tiers and benchmarks, which are names."""
    if isinstance(data, list):
        return set().union(*map(keys_of, data))
    if not isinstance(data, dict):
        return set()
    inner = set().union(*(keys_of(value, key) for key, value in data.items()))
    return inner if below in ("tiers", "benchmarks", "hidden") else inner | set(data)


def test_a_node_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiny sizes: one tier that works, one that is not there, plans, the page."""
    monkeypatch.setattr(node, "SIZES", (4096, 8192))
    monkeypatch.setattr(node.probed, "__defaults__", ((4096, 8192),))
    monkeypatch.setattr(
        node, "tiers", lambda scratch, nodes: {"memory": "memory:", "node 99": "numa:99"}
    )
    monkeypatch.setattr(node, "_in_child", lambda task: {"forward": 0.5, "reverse": 0.25})
    monkeypatch.setattr(node, "cuda", lambda: False)
    monkeypatch.setattr(node, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(node, "busy_share", lambda: 0.04)
    monkeypatch.setattr(node, "rooms", lambda about: {"memory": 1e10})
    monkeypatch.setattr(
        node,
        "problems",
        lambda rate: [{"name": "p", "state_bytes": 8192, "steps": 300, "slots": 8, "step_s": 1e-4}],
    )
    arguments = ["--scratch", str(tmp_path), "--out", str(tmp_path / "out"), "--tiers-only"]
    assert node.main(arguments) == 0
    text = (tmp_path / "out/node.json").read_text()
    data = json.loads(text)
    assert data["format"] == "multistage-node-1"
    assert {"facts", "tiers", "plans", "benchmarks", "load_before", "copy_bytes_per_s"} <= set(data)
    assert [row["state_bytes"] for row in data["tiers"]["memory"]["sizes"]] == [4096, 8192]
    assert all(row["write_bytes_per_s"] > 0 for row in data["tiers"]["memory"]["sizes"])
    assert data["tiers"]["node 99"]["status"] == "failed"
    assert "no memory node 99" in data["tiers"]["node 99"]["reason"] or "C core" in text
    assert data["tiers"]["pinned"]["status"] == "skipped"
    assert [row["tier"] for row in data["plans"]] == ["none", "memory"]
    assert all(row["makespan_s"] > 0 for row in data["plans"])
    assert str(tmp_path) not in text and "names" not in data
    page = (tmp_path / "out/node.html").read_text()
    assert_page(page)
    explained = " ".join(node_page.KEYS)
    for key in keys_of({k: v for k, v in data.items() if k != "facts"}):
        assert re.search(rf"\b{key}\b", explained), f"{key} is not explained on the page"
    assert "warning" not in data and "Warning:" not in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    monkeypatch.setattr(node, "busy_share", lambda: 0.42)
    assert node.main([*arguments, "--names"]) == 0
    assert "warning: the machine was busy: 42 %" in capsys.readouterr().err
    assert "Warning: the machine was busy: 42 %" in (tmp_path / "out/node.html").read_text()
    assert json.loads((tmp_path / "out/node.json").read_text())["names"]["scratch"] == str(tmp_path)
    with pytest.raises(SystemExit):
        node.main(["--scratch", str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err
