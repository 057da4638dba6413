"""Plans of chains: what they say, and JSON both ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multistage import native
from multistage.errors import ArgumentError, MultistageError, ScheduleError
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import memory_curve, plan_chain, smallest_memory
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.plan import ChainPlan
from tests.chain_schedules import MIXED, offload_all, small_chain

TIER = Tier.of_rates(10.0, 10.0)


def a_plan(actions: list[Any], costs: StageCosts, **fields: Any) -> ChainPlan:
    use = use_of(actions, costs, [TIER])
    known: dict[str, Any] = {"no_tier_s": None, "offload_s": 1e3, **fields}
    return ChainPlan.judged("optimal", costs, use.peak_bytes, actions, TIER, **known)


def test_fates() -> None:
    mixed = a_plan(MIXED, small_chain(2, 5))
    assert mixed.fates() == [
        "input kept",
        "input to tier",
        "recomputed",
        "tape to tier, input kept",
        "tape kept",
    ]
    assert mixed.runs() == [2, 2, 2, 1, 1]
    offloading = a_plan(offload_all(4), small_chain(1, 4))
    assert offloading.fates() == ["tape to tier"] * 3 + ["tape kept"]


@pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
def test_the_text_gives_time_memory_stalls_bound_and_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = a_plan(MIXED, small_chain(2, 5))
    text = str(plan)
    assert "tape to tier, input kept" in text
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert plan.lower_bound_s is not None and plan.gap is not None
    assert 0 < plan.lower_bound_s <= plan.makespan_s
    assert plan.gap == pytest.approx(plan.makespan_s / plan.lower_bound_s - 1)
    assert lines["lower bound"].endswith(f"{-100 * plan.gap / (1 + plan.gap):+.1f} %")
    assert lines["no tier"].endswith("does not fit")
    assert f"{1e3 / plan.makespan_s - 1:+.1%}".replace("%", " %") in lines["every tape to the tier"]
    assert "of which waiting" in text
    module = sys.modules[ChainPlan.__module__]
    monkeypatch.setattr(module, "_bound_s", lambda *_: None)
    assert plan.gap is None
    assert "not known" in str(plan)
    without = plan_chain(plan.costs)
    assert "lower bound" not in str(without)
    assert without.gap is None


@pytest.mark.parametrize("suffix", [".json"])
def test_a_plan_comes_back_from_json(tmp_path: Path, suffix: str) -> None:
    costs = StageCosts.uniform(9, Stage("a", 0.1, 0.2, 10, 31), 7)
    plans = [
        a_plan(MIXED, small_chain(2, 5)),
        a_plan(offload_all(4), small_chain(1, 4), no_tier_s=9.0),
        plan_chain(costs, 0.4),
        plan_chain(costs, 0.4, tiers="write=300B/s,latency=1ms,capacity=1KiB,shared"),
        plan_chain(costs, planner="periodic"),
    ]
    for number, plan in enumerate(plans):
        path = tmp_path / f"plan {number}{suffix}"
        plan.save(path)
        found = ChainPlan.load(path)
        assert found == plan
        assert str(found) == str(plan)


def edited(change: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(a_plan(offload_all(4), small_chain(1, 4)).to_dict()))
    change(data)
    return data


def put_in(name: str, value: Any) -> Any:
    return lambda data: data.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (put_in("format", "multistage-chain-plan-1"), ArgumentError, "'format' must be"),
        (lambda data: data.pop("actions"), ArgumentError, "'actions' is missing"),
        (put_in("planner", "best"), ArgumentError, "'best' is not known"),
        (put_in("planner", ["optimal"]), ArgumentError, "is not known"),
        (put_in("actions", "none"), ArgumentError, "must be a list of actions"),
        (put_in("memory_bytes", 3.5), ArgumentError, r"memory_bytes=3\.5"),
        (put_in("tier", {"write": 3}), ArgumentError, "no tier: "),
        (put_in("tier", [3]), ArgumentError, "no tier: "),
        (put_in("costs", None), ArgumentError, "not the costs of a chain"),
        (put_in("offload_s", "long"), ArgumentError, "offload_s='long'"),
        (put_in("no_tier_s", float("nan")), ArgumentError, "no_tier_s=nan"),
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
            lambda data: data["tier"].update(capacity_bytes=5),
            ScheduleError,
            r"^action 3: Put\(.* but tier 0 is full: 4 of 5 bytes",
        ),
        (lambda data: data.update(tier=None), ArgumentError, "names tier 0"),
        (lambda data: data["actions"].insert(0, ["Jump", 3]), ArgumentError, r"actions\[0\]"),
        (lambda data: data["actions"].insert(0, 3), ArgumentError, r"actions\[0\]=3 must be"),
        (lambda data: data["actions"].insert(0, ["Tape"]), ArgumentError, "must have the values"),
        (lambda data: data["actions"].insert(0, ["Tape", -1]), ArgumentError, "step=-1"),
        (lambda data: data["actions"].insert(0, ["Put", 0, 0, 1]), ArgumentError, "tape=1 must be"),
        (
            lambda data: data["actions"].insert(0, ["Advance", 0, 1 << 39]),
            ScheduleError,
            r"^action 0",
        ),
    ],
)
def test_a_plan_edited_by_hand_is_refused(
    change: Any, error: type[MultistageError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ChainPlan.from_dict(edited(change))


def test_time_and_memory_in_the_file_are_ignored() -> None:
    def flatter(data: dict[str, Any]) -> None:
        data.update(makespan_s=0.0, peak_bytes=0, stall_s=0.0, fates=[], kept=[0], lower_bound_s=0)

    plan = a_plan(offload_all(4), small_chain(1, 4))
    found = ChainPlan.from_dict(edited(flatter))
    assert found == plan
    assert found.lower_bound_s == plan.lower_bound_s


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"format": 3}'])
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ArgumentError, match="cannot be read"):
        ChainPlan.load(path)
    path.write_text(text)
    with pytest.raises(ArgumentError, match="plan"):
        ChainPlan.load(path)


def test_a_plan_runs_with_another_tier_within_its_memory() -> None:
    plan = a_plan(MIXED, small_chain(2, 5))
    assert plan.simulate().makespan_s == plan.makespan_s
    slow = plan.simulate(tiers="write=1B/s,read=1B/s")
    assert slow.makespan_s > plan.makespan_s
    assert slow.peak_bytes == plan.peak_bytes


def test_plain_training_does_not_take_what_the_executor_does() -> None:
    stage = Stage("a", 1.0, 2.0, 10, 30, overhead_s=0.25)
    plan = plan_chain(StageCosts.uniform(4, stage, 10))
    assert (plan.makespan_s, plan.plain_s) == (12.0, 11.0)
    assert ChainPlan.from_dict(plan.to_dict()).plain_s == 11.0


def test_auto_is_the_optimal_planner_of_chains():
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
