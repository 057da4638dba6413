"""Units, budgets and the costs file."""

from __future__ import annotations

import json

import pytest

from multistage.costs import Budget, Costs, Tier, format_bytes, format_seconds, parse_bytes
from multistage.errors import ArgumentError, BudgetError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("1 kB", 1_000),
        ("1KiB", 1_024),
        ("1.5 MiB", 3 << 19),
        ("2G", 2 << 30),
        (".5 TB", 5 * 10**11),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "x", "1 parsec", "-1", "1e3", "MiB", -1, True, 1.5])
def test_bad_sizes(text: object) -> None:
    with pytest.raises(ArgumentError, match="size"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_formats() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 << 30, 5 << 40)] == [
        "12 B",
        "2.00 KiB",
        "3.00 GiB",
        "5.00 TiB",
    ]
    assert [format_seconds(t) for t in (0, 2, 0.0021, 3.4e-5, 2e-8, float("inf"))] == [
        "0 s",
        "2 s",
        "2.1 ms",
        "34 us",
        "20 ns",
        "inf s",
    ]


def test_budgets() -> None:
    assert Budget.parse("32 slots").slots_for(10**9) == 32
    assert Budget.parse("1 slot").slots == 1
    assert Budget.parse("1 KiB").slots_for(100) == 10
    assert Budget.parse(1024).slots_for(100, buffer_bytes=600) == 4
    budget = Budget(slots=3)
    assert Budget.parse(budget) is budget


def test_a_budget_below_one_state_says_what_it_needs() -> None:
    with pytest.raises(BudgetError, match=r"3000 bytes .* < 3400 bytes needed.*raise the budget"):
        Budget(bytes=3000).slots_for(3400)
    with pytest.raises(BudgetError, match="0 slots < 1 slot"):
        Budget(slots=0).slots_for(3400)
    with pytest.raises(BudgetError, match="4000 bytes of I/O buffers"):
        Budget(bytes=4000).slots_for(100, buffer_bytes=4000)


@pytest.mark.parametrize("kind", [{}, {"bytes": 1, "slots": 1}, {"bytes": -1}, {"slots": -1}])
def test_bad_budgets(kind: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        Budget(**kind)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_step_s": 0.0},
        {"forward_step_s": -1.0},
        {"forward_step_s": float("nan")},
        {"reverse_step_s": -1.0},
        {"tape_step_s": float("inf")},
        {"action_s": -1e-9},
        {"state_bytes": 0},
        {"tape_bytes": -1},
    ],
)
def test_bad_costs(wrong: dict[str, float]) -> None:
    values = {"forward_step_s": 1.0, "reverse_step_s": 2.0, **wrong}
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Costs(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"write_s": -1.0}, {"read_s": float("inf")}, {"queue_depth": 0}, {"capacity_states": -1}],
)
def test_bad_tiers(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Tier(**wrong)  # type: ignore[arg-type]


def test_derived_costs() -> None:
    bare = Costs(1.0, 2.0)
    assert (bare.state_is_tape, bare.taping_s, bare.turn_s, bare.tape_slots) == (True, 1, 2, 1)
    assert bare.tier is None
    assert bare.rho == float("inf")
    taped = Costs(1.0, 2.0, tape_step_s=1.5, state_bytes=10, tape_bytes=25)
    assert (taped.state_is_tape, taped.taping_s, taped.turn_s) == (False, 1.5, 3.5)
    assert taped.tape_slots == 2.5


def test_costs_survive_their_file(tmp_path) -> None:
    costs = Costs(1.0, 2.0, 1.5, 10, 25, (Tier("a", 1, 2, 0.1, 0.2, 7, 3),), 1e-6)
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert costs.without_tiers().tiers == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": "other"}),
        json.dumps({"format": "multistage-costs-1", "surprise": 1}),
        json.dumps({"format": "multistage-costs-1", "forward_step_s": 1}),
        json.dumps({"format": "multistage-costs-1", "forward_step_s": -1, "reverse_step_s": 1}),
    ],
)
def test_bad_costs_files(text: str) -> None:
    with pytest.raises(ArgumentError):
        Costs.from_json(text)
