"""The command line: what it prints, what it writes, how bad input ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from multistage.backends.files import available_engines
from multistage.cli import main, parser
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners import Plan, plan
from multistage.planners.chain.heterogeneous import plan_chain

TIMES = ["--forward-step=1ms", "--reverse-step=2ms"]
STEPS = ["--n-steps=300", "--memory=20 slots"]
NUMBERS = [*TIMES, "--state=64KiB", "--write=4ms", *STEPS]


def test_plan_as_json_and_costs_files(capsys, tmp_path: Path) -> None:
    saved = tmp_path / "costs.json"
    assert main(["plan", *NUMBERS, "--json", f"--save-costs={saved}"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["planner"] == "streaming"
    assert facts["slots"] == 20
    assert Costs.load(saved).tier.write_s == 0.004
    again = ["plan", f"--costs={saved}", "--n-steps=300", "--memory=20 slots", "--json"]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out) == facts


def test_a_tier_of_steps_can_be_given_by_its_rates(capsys, tmp_path: Path) -> None:
    made = []
    for tier in (["--write=4ms", "--read=8ms"], ["--rates=write=25kB/s,read=12500B/s"]):
        numbers = [n for n in NUMBERS if not n.startswith("--write")]
        assert main(["plan", *numbers, "--state=100", *tier, "--json"]) == 0
        made.append(json.loads(capsys.readouterr().out))
    assert made[0] == made[1]
    path = tmp_path / "plan.json"
    assert main(["plan", *NUMBERS, f"--save={path}"]) == 0
    capsys.readouterr()
    assert main(["simulate", f"--load={path}", "--rates=write=1B/s", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["makespan_s"] > run["predicted_s"] and run["planner"] == "streaming"


def test_simulate_draws_and_traces(capsys, tmp_path: Path) -> None:
    picture, trace = tmp_path / "t.svg", tmp_path / "t.json"
    jitter = ["--jitter=lognormal:0.3", "--seed=3"]
    files = [f"--picture={picture}", f"--trace={trace}"]
    assert main(["simulate", *NUMBERS, *jitter, *files]) == 0
    assert "makespan" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["simulate", *NUMBERS, "--json", "--planner=online"]) == 0
    assert json.loads(capsys.readouterr().out)["planner"] == "online"


def test_probe(capsys, tmp_path: Path) -> None:
    assert main(["probe", str(tmp_path), "--sizes=4KiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["engine"] for row in rows} == set(available_engines())
    assert all(row["write_bytes_per_s"] > 0 for row in rows)
    assert main(["probe", str(tmp_path), "--sizes=4KiB"]) == 0
    assert "round trip" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tier", "names"),
    [
        ("file:{}", None),
        ("file:{}?engine=direct", {"direct"}),
        ("file:{}?capacity=8MiB&engine=aiofiles", {"aiofiles"}),
        ("memory:", {"memory"}),
        ("memory:8MiB > file:{}", {"memory>file"}),
    ],
)
def test_probe_accepts_every_string_for_tiers(capsys, tmp_path: Path, tier, names) -> None:
    folder = tmp_path / "of:files"
    folder.mkdir()
    assert main(["probe", tier.format(folder), "--sizes=4KiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["engine"] for row in rows} == (names or set(available_engines()))
    assert list(folder.iterdir()) == []


def test_probe_of_a_folder_whose_name_looks_like_a_tier(capsys, tmp_path, monkeypatch) -> None:
    (tmp_path / "run:1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["probe", "run:1", "--sizes=4KiB", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(available_engines())


def test_probe_without_a_tier_lists_memory_nodes(capsys, monkeypatch) -> None:
    from multistage.backends import nodes

    two = [
        nodes.MemoryNode(0, "0-63", 96 << 30, 80 << 30, (10, 20), 90e9),
        nodes.MemoryNode(1, "", 16 << 30, 12 << 30, (20, 10), 400e9, True),
    ]
    monkeypatch.setattr(nodes, "memory_nodes", lambda measure: two)
    assert main(["probe"]) == 0
    text = capsys.readouterr().out
    assert "1 (fast)" in text and "none: memory alone" in text and "copying" in text
    assert (
        "numactl --membind=1 python adjoint.py    # with tiers='numa:0?capacity=61440MiB'" in text
    )
    assert main(["probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [node["fast"] for node in found["nodes"]] == [False, True]


def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    StageCosts.uniform(3000, Stage("layer", 1.0, 2.0, 10, 30), 10).save(costs)
    command = [sys.executable, "-m", "multistage", "plan", "--chain", str(costs), "--json"]
    with subprocess.Popen(
        [*command, "--planner=store-all"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        run.stdout.readline()
        run.stdout.close()
        said = run.stderr.read()
    # Status 0 where all of it fitted into the pipe before the reader went.
    assert (run.returncode, said) in {(141, b""), (0, b"")}


def test_demo_trains_and_compares(capsys, tmp_path: Path) -> None:
    small = ["--n-steps=120", "--width=8", "--batch=2", "--sweeps=2", f"--output={tmp_path}"]
    assert main(["demo", "lstm", *small, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gradients_equal"] is True
    assert result["losses"][1] < result["losses"][0]
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "timeline.svg",
        "trace.json",
    }
    assert main(["demo", "lstm", *small, "--planner=streaming", "--tiers=memory:"]) == 0
    text = capsys.readouterr().out
    for part in ("T_A", "T_W", "plan streaming", "predicted", "measured", "to the last bit"):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "--n-steps=3", "--memory=1"], "give --costs FILE"),
        (["plan", *TIMES, "--n-steps=9"], "--memory is missing"),
        (["plan", *NUMBERS, "--n-steps=0"], "n_steps=0"),
        (["plan", *NUMBERS, "--memory=1 KiB"], "65536 bytes needed"),
        (["plan", *NUMBERS, "--memory=lots"], "'lots' is no byte count"),
        (["plan", *NUMBERS, "--write=-4ms"], "--write '-4ms'"),
        (["plan", *STEPS, "--costs=/nonexistent/costs.json"], "No such file"),
        (["plan", *NUMBERS, "--costs=costs.json"], "leave --forward-step out"),
        (["plan", *STEPS, "--costs=costs.json", "--capacity=3"], "leave --capacity out"),
        (["plan", *NUMBERS, "--planner=optimal"], "planner 'optimal' is not known"),
        (["plan", *STEPS, *TIMES, "--read=4ms"], "without --write there is no slow tier"),
        (["plan", *STEPS, *TIMES, "--rates=write=1", "--capacity=3"], "leave --capacity out"),
        (["plan", "--load=plan.json", "--planner=revolve"], "leave --planner out"),
        (["simulate", "--load=plan.json", "--write-overhead=1s"], "leave --write-overhead out"),
        (["plan", *NUMBERS, "--planner=store-all"], "store-all needs 299"),
        (["simulate", *NUMBERS, "--jitter=gauss:1"], "jitter 'gauss:1'"),
        (["simulate", *NUMBERS, "--picture=t.xyz"], "'t.xyz' must end in .svg or .png"),
        (["plan", *STEPS, f"--costs={sys.executable}"], "cannot be read"),
        (["probe", "/nonexistent"], "it does not exist; create it"),
        (["probe", "file:/nonexistent"], "it does not exist; create it"),
        (["probe", "ftp://x"], "'ftp://x' is not known"),
        (["probe", "pinned:"], "is for PyTorch alone"),
        (["plan", *NUMBERS, "--memory=."], "memory='.' is no byte count"),
        (["plan", *NUMBERS, "--rates=write=1"], "leave --write out"),
        (["plan", *TIMES, "--n-steps=9", "--memory=9"], "--state is missing: --memory 9"),
        (["simulate", *TIMES, "--n-steps=9", "--memory=1 MiB"], "--state is missing"),
        (["plan", *TIMES, *STEPS, "--rates=write=1"], "--state is missing: --rates write=1"),
        (["plan", *TIMES, *STEPS, "--tape=9"], "--state is missing: --tape 9"),
        (["plan", *TIMES, *STEPS, "--state=1", "--read-overhead=0"], "leave --read-overhead out"),
        (["plan", "--costs=c.json", *STEPS, "--state=1"], "leave --state out"),
        (["plan", "--load=p.json", "--planner=auto"], "leave --planner out"),
        (["simulate", *NUMBERS, "--seed=0"], "leave --seed out"),
        (["simulate", *NUMBERS, "--html=page.txt"], "'page.txt' must end in .html"),
        (["simulate", *NUMBERS, "--trace=no/where.json"], "its folder does not exist"),
        (["plan", *NUMBERS, "--html=no/where.html"], "its folder does not exist"),
        (["plan", *NUMBERS, "--save-costs=no/where.json"], "its folder does not exist"),
        (["simulate", *NUMBERS, "--save-costs=no/where.json"], "its folder does not exist"),
        (["probe", "--sizes=64KiB"], "leave --sizes out"),
        (["probe", "memory:", "--sizes=1000000TB"], "Unable to allocate"),
        (["plan", *NUMBERS, "--save=plan.html"], "must end in .json"),
        (["plan", *NUMBERS, "--save=plan.json", "--curve"], "leave --save out"),
        (["plan", *NUMBERS, "--load=plan.json"], "leave --n-steps out"),
        (["plan", "--load=/nonexistent/plan.json"], "cannot be read"),
        (["plan", "--load=plan.json", "--memory=1"], "leave --memory out"),
        (["demo", "lstm", "--n-steps=0"], "steps=0"),
        (["demo", "lstm", "--sweeps=0"], "sweeps=0"),
        (["demo", "lstm", "--width=0"], "width=0 must be at least 1"),
        (["demo", "lstm", "--batch=0"], "batch=0 must be at least 1"),
        (["demo", "lstm", "--seed=-1"], "seed=-1 must not be negative"),
        (["demo", "lstm", "--rate=nan"], "rate=nan must be a finite number"),
        (["demo", "lstm", "--n-steps=10", "--tiers=ftp://x"], "'ftp://x' is not known"),
        (["demo", "lstm", "--n-steps=9", "--tiers=file:/nonexistent/x"], "it does not exist"),
        (["demo", "lstm", "--n-steps=9", "--memory=1 KiB"], "bytes needed for one state"),
        (["demo", "lstm", "--n-steps=9", "--memory=lots"], "'lots' is no byte count"),
        (["status", "/nonexistent"], "it does not exist"),
        (["clean", "/nonexistent"], "it does not exist"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, monkeypatch, argv, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    error = captured.err.strip()
    assert error.startswith("multistage: error: ")
    assert message in error
    assert "\n" not in error


def test_ctrl_c_ends_quietly(capsys, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("multistage.cli.options.plan", interrupt)
    assert main(["plan", *NUMBERS]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_help_and_version_are_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "multistage", "plan", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "examples:" in done.stdout
    assert "--memory" in done.stdout
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0


def test_a_chain_is_planned_from_its_file(tmp_path, capsys) -> None:
    layer = Stage("layer", 1.0, 2.0, 10, 30)
    StageCosts.uniform(12, layer, 10).save(tmp_path / "chain.json")
    options = ["plan", "--chain", str(tmp_path / "chain.json")]
    assert main([*options, "--memory", "0.6"]) == 0
    text = capsys.readouterr().out
    assert "plan optimal: 12 stages" in text and "tape kept" in text
    assert main([*options, "--memory", "200", "--planner", "revolve", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["planner"] == "revolve" and facts["peak_bytes"] <= 200
    assert main([*options, "--curve", "--json"]) == 0
    curve = json.loads(capsys.readouterr().out)
    assert curve[-1]["makespan_s"] == 36.0
    assert main([*options, "--curve"]) == 0
    assert "above the fastest" in capsys.readouterr().out
    for wrong, message in (
        (["--memory", "20"], "smallest limit"),
        (["--memory", "much"], "much"),
        (["--memory", "."], "memory='.' is no byte count"),
        (["--memory", "1.2.3"], "'1.2.3'"),
        (["--curve", "--planner", "periodic"], "--curve"),
    ):
        assert main([*options, *wrong]) != 0
        assert message in capsys.readouterr().err


def a_chain_file(tmp_path: Path, **changes: object) -> str:
    data = StageCosts.uniform(12, Stage("layer", 1e-3, 2e-3, 10, 40), 10).to_dict()
    data["stages"][3].update(changes)
    (tmp_path / "chain.json").write_text(json.dumps(data))
    return f"--chain={tmp_path / 'chain.json'}"


def test_a_chain_with_a_tier_is_planned_drawn_and_read_back(tmp_path, capsys) -> None:
    options = ["plan", a_chain_file(tmp_path), "--memory=0.4"]
    there = [f"--{name}={tmp_path / file}" for name, file in FILES.items()]
    assert main([*options, "--rates=write=90kB/s,read=90kB/s,name=disk", *there]) == 0
    text = capsys.readouterr().out
    for words in ("to tier", "tier disk: writes", "no tier", "every tape to the tier"):
        assert words in text
    assert "plan.json" in text
    assert "coming from a tier" in (tmp_path / "plan.svg").read_text()
    assert "Timeline, predicted" in (tmp_path / "plan.html").read_text()
    assert main(["plan", f"--load={tmp_path / 'plan.json'}"]) == 0
    assert capsys.readouterr().out.splitlines() == text.splitlines()[:-3]
    assert main([*options, "--rates=write=90kB/s", "--json"]) == 0
    assert Plan.from_dict(json.loads(capsys.readouterr().out)).tier is not None


def test_a_plan_of_steps_is_kept_in_a_file(tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *NUMBERS, f"--save={path}"]) == 0
    text = capsys.readouterr().out
    for part in ("streaming", "interval", "revolve", "lower bound", "Chosen: streaming"):
        assert part in text
    assert main(["plan", f"--load={path}"]) == 0
    assert capsys.readouterr().out.splitlines() == text.splitlines()[:-1]
    path.write_text("[]")
    assert main(["plan", f"--load={path}"]) == 2
    assert "no plan: 'format' must be" in capsys.readouterr().err


FILES = {"save": "plan.json", "html": "plan.html", "picture": "plan.svg"}


def test_a_chain_s_plan_is_simulated_with_a_slower_tier(tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    options = ["plan", a_chain_file(tmp_path), "--memory=0.4", "--rates=write=90kB/s"]
    assert main([*options, f"--save={path}"]) == 0
    capsys.readouterr()
    assert main(["simulate", f"--load={path}", "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert usual["makespan_s"] == usual["predicted_s"]
    slower = ["simulate", f"--load={path}", "--rates=write=20kB/s", "--jitter=lognormal:0.3"]
    assert main([*slower, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan_s"] > usual["makespan_s"]
    assert found["peak_bytes"] == usual["peak_bytes"] <= found["memory_bytes"]
    picture, trace = tmp_path / "t.svg", tmp_path / "t.json"
    page = tmp_path / "run.html"
    assert main([*slower, f"--picture={picture}", f"--trace={trace}", f"--html={page}"]) == 0
    assert "stalls" in capsys.readouterr().out
    assert "Timeline, simulated" in page.read_text()
    assert "coming from a tier" in picture.read_text() and json.loads(trace.read_text())
    assert main(["plan", a_chain_file(tmp_path), f"--save={path}"]) == 0
    for argv, message in (
        (slower, "has no tier to replace"),
        ([*slower, "--n-steps=3"], "leave --n-steps out"),
        (["simulate", *NUMBERS, "--rates=write=1"], "leave --write out"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err


def test_the_lower_bound_of_a_simulation_is_that_of_its_tier(tmp_path, capsys) -> None:
    layers = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    chain = plan_chain(layers, 0.2, tiers="write=5B/s")
    steps = plan(Costs(1.0, 1.0, tiers=(Tier("file", 2.0, 2.0),)), "10 slots", 100)
    for made in (chain, steps):
        made.save(tmp_path / "plan.json")
        argv = ["simulate", f"--load={tmp_path / 'plan.json'}", "--rates=write=4kB/s", "--json"]
        assert main(argv) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["lower_bound_s"] < made.lower_bound_s
        assert found["lower_bound_s"] <= found["makespan_s"]
        assert found["predicted_s"] == made.makespan_s


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, ["--rates=fast"], "tier 'fast': 'fast' is not understood; write it as"),
        ({}, ["--rates=read=1GB/s"], "lacks its rate of writing"),
        ({}, ["--rates=write=0"], "must be above 0"),
        ({}, ["--rates=write=1,capacity=39"], "capacity=39 bytes < 40 bytes of the smallest tape"),
        (
            {},
            ["--rates=write=1,capacity=9,states-only"],
            "of the smallest state; give it more room",
        ),
        ({}, ["--rates=write=1", "--planner=revolve"], "tiers go with planner 'optimal'"),
        ({}, ["--rates=write=1", "--curve"], "leave --rates out"),
        ({}, ["--save=plan.txt"], "must end in .json"),
        ({}, ["--write=4ms"], "leave --write out"),
        ({}, ["--save-costs=costs.json"], "leave --save-costs out"),
        ({}, ["--rates=write=1", "--memory=20"], "memory=20 bytes < "),
        ({"output_bytes": 900, "tape_bytes": 990}, ["--memory=800", "--rates=write=1"], "< "),
        ({"forward_s": float("nan")}, [], "stage 'layer': forward_s=nan"),
        ({"backward_s": -1.0}, [], "stage 'layer': backward_s=-1.0"),
        ({"tape_bytes": 3}, [], "tape_bytes=3 < output_bytes=10"),
        ({"output_bytes": "many"}, [], "output_bytes='many'"),
        ({"speed": 3}, [], "not the costs of a chain"),
    ],
)
def test_bad_input_of_a_chain(tmp_path, capsys, monkeypatch, changes, options, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", a_chain_file(tmp_path, **changes), "--memory=0.4", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("multistage: error: ")
    assert message in error and "\n" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["chain.json"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["bogus"],
        ["demo"],
        ["plan", "--planner=nope"],
        ["simulate", "--seed=x"],
        ["status"],
        ["clean", "a", "b"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_parse_end_with_one_line(argv: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert told.endswith(" --help\n")


def test_nothing_is_written_where_one_file_cannot_be(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, more in (("plan", "--save=plan.json"), ("simulate", "--trace=trace.json")):
        assert main([command, *NUMBERS, "--picture=p.svg", "--html=page.txt", more]) == 2
    assert not list(tmp_path.iterdir())


def test_an_option_means_the_same_in_every_command() -> None:
    """`--tiers` is a place everywhere; the rates of a tier have an option of their own."""
    commands = parser()._subparsers._group_actions[0].choices
    for name in ("plan", "simulate"):
        options = {option for each in commands[name]._actions for option in each.option_strings}
        assert "--rates" in options and "--tiers" not in options
    demos = commands["demo"]._subparsers._group_actions[0].choices
    for demo in demos.values():
        assert "--tiers" in {option for each in demo._actions for option in each.option_strings}
