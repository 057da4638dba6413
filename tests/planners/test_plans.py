"""Plans of steps and of chains: what they say, and JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import PLANNERS, Costs, Plan, Stage, StageCosts, Tier, native, plan, plan_chain
from multistage.errors import ArgumentError, BudgetError, MultistageError, ScheduleError
from multistage.planners import pages
from multistage.planners.chain.heterogeneous import memory_curve, smallest_memory
from multistage.planners.chain.memory import use_of
from multistage.planners.predict import sealing
from multistage.planners.streaming.online import durable_plan
from tests.chain_schedules import MIXED, offload_all, small_chain

COSTS = Costs(1.0, 2.0, state_bytes=64, tiers=(Tier("disk", 4.0, 3.0, capacity_states=40),))
STAGES = StageCosts.uniform(5, Stage("a", 1.0, 2.0, 10, 30), 10)
TIER = Tier.of_rates(10.0, 10.0)


def judged(actions: list[Any], costs: StageCosts, **fields: Any) -> Plan:
    use = use_of(actions, costs, [TIER])
    made = Plan.judged("optimal", costs, use.peak_bytes, actions, TIER)
    return replace(made, **fields)


def test_fates() -> None:
    mixed = judged(MIXED, small_chain(2, 5))
    assert mixed.fates() == [
        "input kept",
        "input to tier",
        "recomputed",
        "tape to tier, input kept",
        "tape kept",
    ]
    assert mixed.runs() == [2, 2, 2, 1, 1]
    offloading = judged(offload_all(4), small_chain(1, 4))
    assert offloading.fates() == ["tape to tier"] * 3 + ["tape kept"]


@pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
def test_the_text_gives_time_memory_stalls_bound_and_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = plan_chain(StageCosts.uniform(9, Stage("a", 0.1, 0.2, 10, 31), 7), 0.4, tiers=TIER)
    text = str(made)
    assert "tape kept" in text and "every tape to the tier" in text and "no tier" in text
    assert made.lower_bound_s is not None and made.gap is not None
    assert 0 < made.lower_bound_s <= made.makespan_s
    assert f"{100 * made.gap:.2f} %" in text
    monkeypatch.setattr(pages, "chain_bound_s", lambda *_: None)
    assert made.gap is None and "lower bound not known" in str(made)
    without = plan_chain(made.stage_costs)
    assert without.gap is None and without.candidates == ()


def in_files() -> dict[str, Plan]:
    """Return plans of every planner, and of chains."""
    costs = StageCosts.uniform(9, Stage("a", 0.1, 0.2, 10, 31), 7)
    made = {name: plan(COSTS, "70 slots", 60, name) for name in ("auto", *PLANNERS)}
    tier = "write=300B/s,latency=1ms,capacity=1KiB,shared"
    return made | {
        "mixed by hand": judged(MIXED, small_chain(2, 5)),
        "offloading": judged(offload_all(4), small_chain(1, 4), given_up=3),
        "chain": plan_chain(costs, 0.4),
        "chain and tier": plan_chain(costs, 0.4, tiers=tier),
        "segments": plan_chain(costs, planner="periodic"),
        "beyond": plan(Costs(1.0, 2.0, state_bytes=1 << 40), f"{1 << 40} slots", 30),
    }


def test_plans_come_back_from_json(tmp_path: Path) -> None:
    for name, made in in_files().items():
        made.save(tmp_path / "plan.json")
        found = Plan.load(tmp_path / "plan.json")
        assert found == made, name
        assert str(replace(found, given_up=made.given_up)) == str(made)
        assert found.sealed == made.sealed
        assert list(zip(found.schedule(), range(50), strict=False)) == list(
            zip(made.schedule(), range(50), strict=False)
        )


def put_in(name: str, value: Any) -> Callable[[Any], None]:
    return lambda data: data.__setitem__(name, value)


OF_STEPS = [
    (put_in("format", "multistage-plan-1"), ArgumentError, "not 'multistage-plan-1'; plan again"),
    (put_in("format", "multistage-chain-plan-3"), ArgumentError, "'format' must be .*plan again"),
    (put_in("format", 3), ArgumentError, "'format' must be 'multistage-plan-2', not 3$"),
    (put_in("planner", "mine"), ArgumentError, "planner 'mine' is none of store-all"),
    (put_in("planner", ["revolve"]), ArgumentError, "is none of"),
    (put_in("memory_bytes", -1), ArgumentError, "memory_bytes=-1"),
    (put_in("memory_bytes", None), ArgumentError, "memory_bytes=None"),
    (put_in("memory_bytes", 63), ArgumentError, "slots=0"),
    (put_in("n_steps", 0), ArgumentError, "n_steps=0"),
    (put_in("costs", [3]), ArgumentError, "not the costs of steps"),
    (put_in("costs", {"forward_step_s": 1.0}), ArgumentError, "reverse_step_s"),
    (
        put_in("costs", {"forward_step_s": float("nan"), "reverse_step_s": 1.0}),
        ArgumentError,
        "forward_step_s=nan",
    ),
    (put_in("costs", None), ArgumentError, "not the costs of steps"),
    (lambda data: data.pop("memory_bytes"), ArgumentError, "'memory_bytes' is missing"),
]
OF_STAGES = [
    (lambda data: data.pop("actions"), ArgumentError, "'actions' is missing"),
    (put_in("planner", "best"), ArgumentError, "'best' is not known"),
    (put_in("planner", ["optimal"]), ArgumentError, "is not known"),
    (put_in("actions", "none"), ArgumentError, "must be a list of actions"),
    (put_in("memory_bytes", 3.5), ArgumentError, r"memory_bytes=3\.5"),
    (put_in("tiers", [{"write": 3}]), ArgumentError, "no tier: "),
    (put_in("tiers", [3]), ArgumentError, "no tier: "),
    (put_in("tiers", 3), ArgumentError, "must be a list of one tier"),
    (put_in("costs", None), ArgumentError, "not the costs of a chain"),
    (put_in("candidates", "long"), ArgumentError, "candidates='long'"),
    (put_in("candidates", [3]), ArgumentError, "candidate 3 must name"),
    (put_in("candidates", [{"planner": "no tier"}]), ArgumentError, "must be a list of actions"),
    (
        lambda data: data["actions"].pop(3),
        ScheduleError,
        r"^action \d+: Evict\(1, 0, tape=True\) but no write",
    ),
    (
        lambda data: data["actions"][2].__setitem__(1, 9),
        ScheduleError,
        r"^action 2: Tape\(9\) but the live state is 1",
    ),
    (
        lambda data: data.update(memory_bytes=data["memory_bytes"] - 1),
        ScheduleError,
        r"^action \d+: .* but the limit is \d+; free more",
    ),
    (
        lambda data: data["costs"]["stages"][1].update(tape_bytes=1000),
        ScheduleError,
        r"^action 2: Tape\(1\) needs 10\d\d bytes",
    ),
    (
        lambda data: data["tiers"][0].update(capacity_bytes=5),
        ScheduleError,
        r"^action 3: Put\(.* but tier 0 is full: 4 of 5 bytes",
    ),
    (lambda data: data.update(tiers=[]), ArgumentError, "names tier 0"),
    (lambda data: data["actions"].insert(0, ["Jump", 3]), ArgumentError, r"actions\[0\]"),
    (lambda data: data["actions"].insert(0, 3), ArgumentError, r"actions\[0\]=3 must be"),
    (lambda data: data["actions"].insert(0, ["Tape"]), ArgumentError, "must have the values"),
    (lambda data: data["actions"].insert(0, ["Tape", -1]), ArgumentError, "step=-1"),
    (lambda data: data["actions"].insert(0, ["Put", 0, 0, 1]), ArgumentError, "tape=1 must be"),
    (lambda data: data["actions"].insert(0, ["Advance", 0, 1 << 39]), ScheduleError, r"^action 0"),
]


@pytest.mark.parametrize(
    ("make", "change", "error", "message"),
    [
        *((lambda: plan(COSTS, "5 slots", 30, "revolve"), *case) for case in OF_STEPS),
        *((lambda: judged(offload_all(4), small_chain(1, 4)), *case) for case in OF_STAGES),
    ],
)
def test_a_plan_edited_by_hand_is_refused(
    make: Callable[[], Plan], change: Any, error: type[MultistageError], message: str
) -> None:
    data = json.loads(json.dumps(make().to_dict()))
    change(data)
    with pytest.raises(error, match=message):
        Plan.from_dict(data)


def test_predictions_in_a_file_are_ignored() -> None:
    data = plan(COSTS, "5 slots", 30).to_dict()
    fewer = {**data, "makespan_s": 0.0, "memory_bytes": 4 * 64}
    assert Plan.from_dict(fewer) == plan(COSTS, "4 slots", 30)
    with pytest.raises(BudgetError):
        Plan.from_dict({**data, "planner": "store-all", "candidates": []})
    made = judged(offload_all(4), small_chain(1, 4))
    flattery = {"makespan_s": 0.0, "peak_bytes": 0, "stall_s": 0.0, "fates": []}
    found = Plan.from_dict({**made.to_dict(), **flattery, "lower_bound_s": 0})
    assert found == made and found.lower_bound_s == made.lower_bound_s


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"format": 3}'])
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ArgumentError, match="cannot be read"):
        Plan.load(path)
    path.write_text(text)
    with pytest.raises(ArgumentError, match="plan"):
        Plan.load(path)


def test_a_plan_whose_schedule_is_in_no_file_is_not_saved(tmp_path: Path) -> None:
    made, durable = plan(COSTS, "5 slots", 30), sealing(durable_plan)(COSTS, 100, 50)
    for other in (made.with_tier("write=1GB/s"), replace(made, planner="mine"), durable):
        with pytest.raises(ArgumentError, match=f"planner '{other.planner}' makes of these costs"):
            other.save(tmp_path / "plan.json")
        other.save(tmp_path / "plan.html")
    assert not (tmp_path / "plan.json").exists()


def test_the_schedule_of_stages_is_that_of_its_actions() -> None:
    made, fewer = plan_chain(STAGES), plan_chain(STAGES, 0.7)
    assert tuple(replace(made, actions=fewer.actions).schedule()) == fewer.actions != made.actions


def test_what_only_plans_of_the_other_kind_have_is_refused() -> None:
    steps, stages = plan(COSTS, "5 slots", 30), plan_chain(STAGES)
    for ask in (steps.runs, steps.fates, lambda: steps.kept, lambda: steps.plain_s):
        with pytest.raises(ArgumentError, match="of steps that are alike, not of stages"):
            ask()
    for one in (lambda: stages.step_costs, lambda: stages.slots):
        with pytest.raises(ArgumentError, match=r"not of steps|has no limit"):
            one()


seconds = st.floats(0.0, 1e3, allow_subnormal=False)
positive = st.floats(1e-3, 1e3)
sizes = st.integers(1, 1000)


@st.composite
def uniform_plans(draw: st.DrawFn) -> Plan:
    tiers = st.builds(Tier, st.just("disk"), seconds, seconds, seconds, queue_depth=st.just(2))
    costs = Costs(
        draw(positive),
        draw(seconds),
        draw(st.none() | seconds),
        draw(sizes),
        tiers=tuple(draw(st.lists(tiers, max_size=1))),
        action_s=0.0,  # predictions only estimate how many actions there are
    )
    planner = draw(st.sampled_from(["revolve", "streaming", "interval", "online", "auto"]))
    return plan(costs, f"{draw(st.integers(3, 9))} slots", draw(st.integers(1, 25)), planner)


@st.composite
def chain_plans(draw: st.DrawFn) -> Plan:
    def stage(name: str) -> Stage:
        output = draw(sizes)
        return Stage(name, draw(seconds), draw(seconds), output, output + draw(sizes))

    costs = StageCosts(tuple(stage(f"s{i}") for i in range(draw(st.integers(1, 4)))), draw(sizes))
    rates = Tier.of_rates(draw(positive), draw(positive), draw(seconds), shared=draw(st.booleans()))
    tiers = draw(st.sampled_from([None, rates]))
    try:
        return plan_chain(costs, draw(st.floats(0.3, 1.0)), tiers=tiers, resolution=64)
    except BudgetError:
        return plan_chain(costs, None, tiers=tiers, resolution=64)


@settings(max_examples=60, deadline=None)
@given(st.one_of(uniform_plans(), chain_plans()))
def test_plans_of_both_kinds_come_back_and_are_as_they_were_predicted(made: Plan) -> None:
    data = json.loads(json.dumps(made.to_dict()))
    found = Plan.from_dict(data)
    assert found == made
    assert found.to_dict() == made.to_dict()
    run = found.simulate()
    assert run.makespan_s == pytest.approx(made.makespan_s, rel=1e-9)
    assert (run.forward_steps, run.writes, run.reads, run.peak_bytes) == (
        made.forward_steps,
        made.writes,
        made.reads,
        made.peak_bytes,
    )
    assert made.memory_bytes is None or made.peak_bytes <= made.memory_bytes


@pytest.mark.parametrize(
    "make",
    [lambda: plan(COSTS, "5 slots", 20), lambda: plan_chain(STAGES, 0.7, tiers="write=9B/s")],
    ids=["uniform", "chain"],
)
def test_both_kinds_of_plans_have_the_same_interface(
    make: Callable[[], Plan], tmp_path: Path
) -> None:
    made = make()
    assert str(made).startswith(made.summary())
    assert made.table() in str(made)
    assert made.gap is not None and made.lower_bound_s is not None
    assert made.gap == pytest.approx(made.makespan_s / made.lower_bound_s - 1)
    assert made.recompute_factor == made.forward_steps / made.n_steps
    assert list(made.limits()) == ["fast", *(tier.name for tier in made.tiers)]
    assert made.limits()["fast"] == made.memory_bytes
    assert "<svg" in made._repr_html_()
    for what in ("schedule", "timeline", "trade-off"):
        made.picture(tmp_path / f"{what}.svg", what)
        assert (tmp_path / f"{what}.svg").read_text().startswith("<svg")
    made.save(tmp_path / "plan.html")
    assert made.title in (tmp_path / "plan.html").read_text()


def test_plain_training_does_not_take_what_the_executor_does() -> None:
    stage = Stage("a", 1.0, 2.0, 10, 30, overhead_s=0.25)
    plan = plan_chain(StageCosts.uniform(4, stage, 10))
    assert (plan.makespan_s, plan.plain_s) == (12.0, 11.0)
    assert Plan.from_dict(plan.to_dict()).plain_s == 11.0


def test_auto_is_the_optimal_planner_of_chains() -> None:
    costs = StageCosts.uniform(8, Stage("layer", 1.0, 2.0, 10, 30), 10)
    plan = plan_chain(costs, 0.5, "auto", tiers="write=1B/s")
    assert plan == plan_chain(costs, 0.5, tiers="write=1B/s") and plan.planner == "optimal"
    assert smallest_memory(costs, "auto") == smallest_memory(costs)
    assert memory_curve(costs, "auto") == memory_curve(costs)
    for name in ("pieces", "survey", 3):
        with pytest.raises(ArgumentError, match="auto"):
            plan_chain(costs, 0.5, name)
        with pytest.raises(ArgumentError, match="auto"):
            smallest_memory(costs, name)
