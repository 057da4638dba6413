"""Strange values at the public entries of planning: a result, or a documented error."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import multistage
from multistage import Budget, Costs, Jitter, Reversal, Tier, check, plan, plan_chain, simulate
from multistage.actions import EndForward, Reverse, Tape
from multistage.errors import ArgumentError, BudgetError, ScheduleError
from multistage.model.stages import Stage, StageCosts
from multistage.planners import PLANNERS
from multistage.planners.ranking import trade_off
from multistage.support.units import parse_bytes

STRANGE = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 3.5, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan),
            *(10**400, -(10**400), 1 << 62, 1 << 63, b"7", (), [1, 2], {}, {1}, object, 1j),
            *("", "1ms", "3.5 slots", "-5 slots", "9" * 400, "9" * 6000, "9" * 6000 + " slots"),
            *("nan", "²", np.float32(2.5), np.int64(7), np.uint8(3), np.bool_(True)),
            *(np.float64("nan"), np.datetime64("NaT"), np.array([1.0, 2.0])),
        ]
    ),
    st.floats(),
    st.integers(),
    st.text(max_size=5),
)
COSTS = Costs(1.0, 2.0, state_bytes=10, tiers=(Tier("file", 2.0, 2.0),))
CHAIN = StageCosts.uniform(4, Stage("layer", 1.0, 2.0, 10, 30), 10)
ONE_STEP = [Tape(0), EndForward(), Reverse(0)]


def given_to(made: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class of an object, and the arguments that make it."""
    return type(made), {field.name: getattr(made, field.name) for field in fields(made)}


ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Tier": given_to(COSTS.tiers[0]),
    "Costs": given_to(COSTS),
    "Budget": given_to(Budget(slots=3)),
    "Budget.parse": (Budget.parse, {"given": "3 slots"}),
    "Costs.from_json": (Costs.from_json, {"text": COSTS.to_json()}),
    "StageCosts.from_json": (StageCosts.from_json, {"text": CHAIN.to_json()}),
    "StageCosts.from_dict": (StageCosts.from_dict, {"data": CHAIN.to_dict()}),
    "parse_bytes": (parse_bytes, {"text": "3 MiB"}),
    "plan": (
        plan,
        {"costs": COSTS, "memory": "3 slots", "n_steps": 9, "planner": "revolve"}
        | {"buffer_bytes": 0},
    ),
    "plan_chain": (
        plan_chain,
        {"costs": CHAIN, "memory": 0.9, "planner": "optimal", "resolution": 50, "threads": 1}
        | {"segments": None},
    ),
    "smallest_memory": (multistage.smallest_memory, {"costs": CHAIN, "planner": "optimal"}),
    "memory_curve": (
        multistage.memory_curve,
        {"costs": CHAIN, "planner": "optimal", "resolution": 50, "threads": 1},
    ),
    "trade_off": (
        trade_off,
        {"costs": COSTS, "n_steps": 9, "planners": ("revolve",), "slots": [1, 2], "also": None},
    ),
    "simulate": (
        simulate,
        {"schedule": ONE_STEP, "n_steps": 1, "costs": COSTS, "slots": 0, "jitter": None, "seed": 0},
    ),
    "check": (
        check,
        {"schedule": ONE_STEP, "n_steps": 1, "slots": 0, "tape_slots": 1.0, "tier_slots": None},
    ),
    "Jitter": given_to(Jitter(0.1, 0.1, 2.0)),
    "Jitter.parse": (Jitter.parse, {"text": "spikes:0.1,2"}),
    "StageCosts": given_to(CHAIN),
    "Stage": given_to(CHAIN.stages[0]),
}
DOCUMENTED = (ArgumentError, ScheduleError)


@pytest.mark.parametrize("name", ENTRIES)
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_strange_arguments_end_in_documented_errors(name: str, data: st.DataObject) -> None:
    entry, arguments = ENTRIES[name]
    changed = data.draw(st.sampled_from(sorted(arguments)))
    value = data.draw(STRANGE)
    try:
        entry(**{**arguments, changed: value})
    except DOCUMENTED as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "pyrevolve"])
@settings(max_examples=25, deadline=None)
@given(slots=STRANGE, n=STRANGE)
def test_planners_by_name_take_whole_slots_and_steps(name: str, slots: Any, n: Any) -> None:
    for changed in ((slots, 9), (3, n)):
        try:
            made = PLANNERS[name](COSTS, *changed)
        except ArgumentError:
            continue
        assert type(made.slots) is int and type(made.n_steps) is int


@pytest.mark.parametrize("name", [*PLANNERS, "auto"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_extreme_costs_are_planned_with(name: str, data: st.DataObject) -> None:
    """Whatever `Costs` takes, the planners can do with."""
    if name == "pyrevolve":
        pytest.importorskip("pyrevolve")
    some = st.sampled_from([0.0, 1e-15, 1e-9, 1.0, 7.0, 1e12])
    tier = st.builds(
        Tier,
        write_s=some,
        read_s=some,
        write_overhead_s=some,
        capacity_states=st.sampled_from([None, 0, 1, 1 << 62]),
        queue_depth=st.sampled_from([1, 1 << 62]),
    )
    costs = data.draw(
        st.builds(
            Costs,
            st.sampled_from([1e-15, 1e-9, 1.0, 1e12]),
            some,
            tape_step_s=st.one_of(st.none(), some),
            state_bytes=st.sampled_from([1, 10, 1 << 62]),
            tape_bytes=st.sampled_from([0, 1, 10, 1 << 62]),
            tiers=st.lists(tier, max_size=2),
            action_s=some,
        )
    )
    slots, n = data.draw(st.sampled_from([1, 2, 5, 1 << 62])), data.draw(st.integers(1, 40))
    try:
        made = plan(costs, Budget(slots=slots), n, name, progress=False)
    except ArgumentError as error:  # too little memory, or more than is solved in a second
        assert isinstance(error, BudgetError) or (name == "mixed" and "to solve" in str(error))
        return
    assert str(made) and made.makespan_s >= 0 and made.gap >= -1e-9


def test_numbers_of_numpy_are_numbers() -> None:
    tier = Tier("file", np.float32(2.0), np.int64(2), capacity_states=np.int32(9))
    costs = Costs(np.float64(1.0), np.float32(2.0), state_bytes=np.int64(10), tiers=[tier])
    assert json.loads(costs.to_json())["tiers"][0]["capacity_states"] == 9
    made = plan(costs, Budget(slots=np.int64(3)), np.int64(9))
    assert made == plan(costs, 30, 9) == plan(costs, np.int64(30), 9)
    assert type(made.slots) is int


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan(COSTS, 3.5, 9), "3.5 must be a whole number of bytes"),
        (lambda: plan(COSTS, "3.5 slots", 9), "slots must be a whole number"),
        (lambda: plan(COSTS, "-5 slots", 9), "slots must be a whole number"),
        (lambda: Budget(slots=3.5), "slots=3.5 must be a whole number"),
        (lambda: PLANNERS["revolve"](COSTS, 3.5, 9), "slots=3.5 must be a whole number"),
        (lambda: plan({}, 30, 9), "must be multistage.Costs"),
        (lambda: plan(CHAIN, 30, 9), "plan_chain"),
        (lambda: StageCosts((1, 2)), "must be a Stage"),
        (lambda: Costs("1ms", 2.0), "forward_step_s='1ms' must be a finite number"),
        (lambda: Costs(True, 2.0), "forward_step_s=True must be a finite number"),
        (lambda: Costs.from_json("[" * 100_000), "not the costs of steps"),
        (lambda: StageCosts.from_json("[" * 100_000), "not the costs of a chain"),
        (lambda: parse_bytes("9" * 400), "must be at most"),
        (lambda: check(np.array(3), 5, 3), "schedule=array.* must be an iterable"),
        (lambda: simulate(np.array(3), 5, COSTS, 3), "schedule=array.* must be an iterable"),
        (lambda: trade_off(COSTS, 9, np.array("revolve")), "must be several names"),
        (lambda: trade_off(COSTS, 9, slots=np.array(3)), "must be several numbers"),
        (lambda: Reversal(abs, abs, 3, states=3), r"states=3 must .* give memory='3 slots'"),
        (lambda: Reversal(abs, abs, 3, tiers=np.array(3)), "must be a string, a path or a store"),
    ],
)
def test_messages_name_the_allowed_values(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_steps_that_take_no_time_have_a_gap() -> None:
    costs = Costs(1.0, 0.0, 0.0)
    for name in ("auto", "store-all"):
        made = plan(costs, "20 slots", 9, name)
        assert made.makespan_s == 0 and made.gap == 0 and "0.00 %" in str(made)
    assert plan(costs, "1 slots", 9, "revolve").gap == math.inf


@pytest.mark.parametrize("tape_step_s", [None, 1.5])
@pytest.mark.parametrize("n", [9, 100])
def test_every_plan_can_be_pickled(n: int, tape_step_s: float | None) -> None:
    tiers = (Tier("host", 2.0, 2.0, capacity_states=30), Tier("file", 9.0, 9.0))
    costs = Costs(1.0, 2.0, tape_step_s, state_bytes=10, tiers=tiers)
    for name in ("auto", *PLANNERS):
        if name == "pyrevolve":
            continue
        slots = 200 if name == "store-all" else 24
        made = plan(costs, Budget(slots=slots), n, name, progress=False)
        again = pickle.loads(pickle.dumps(made))
        assert again == made
        steps = None if name == "online" else n
        runs = [simulate(each.schedule(), steps, costs, slots) for each in (made, again)]
        assert runs[0] == runs[1]
    chain = plan_chain(CHAIN, 0.9)
    assert pickle.loads(pickle.dumps(chain)) == chain
