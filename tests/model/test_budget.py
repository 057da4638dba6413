"""How much memory: the one reading of what users give."""

from __future__ import annotations

from typing import Any

import pytest

from multistage.errors import ArgumentError, BudgetError
from multistage.model.budget import Budget, memory_bytes


def test_budgets() -> None:
    assert Budget.parse("32 slots").slots_for(10**9) == 32
    assert Budget.parse("1 slot").slots == 1
    assert Budget.parse("1 KiB").slots_for(100) == 10
    assert Budget.parse(1024).slots_for(100, buffer_bytes=600) == 4
    budget = Budget(slots=3)
    assert Budget.parse(budget) is budget


def test_a_budget_below_one_state_names_the_bytes_needed() -> None:
    with pytest.raises(BudgetError, match=r"3000 bytes .* < 3400 bytes needed.*raise the budget"):
        Budget(bytes=3000).slots_for(3400)
    with pytest.raises(BudgetError, match="0 slots < 1 slot"):
        Budget(slots=0).slots_for(3400)
    with pytest.raises(BudgetError, match="4000 bytes of I/O buffers"):
        Budget(bytes=4000).slots_for(100, buffer_bytes=4000)


@pytest.mark.parametrize(
    "kind",
    [
        *({}, {"bytes": 1, "slots": 1}, {"bytes": 1, "fraction": 0.5}),
        *({"bytes": -1}, {"slots": -1}),
        *({"fraction": value} for value in ("0.5", True, float("nan"), [1])),
    ],
)
def test_bad_budgets(kind: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"=|memory"):
        Budget(**kind)


@pytest.mark.parametrize(
    ("given", "fraction"),
    [
        (0.5, 0.5),
        (1.0, 1.0),
        ("0.5", 0.5),
        (".25", 0.25),
        ("1.0", 1.0),
        ("00.5", 0.5),
        ("50 %", 0.5),
        ("5%", 0.05),
    ],
)
def test_fractions_are_of_plain_training(given: str | float, fraction: float) -> None:
    assert Budget.parse(given, of="stages") == Budget(fraction=fraction)
    assert memory_bytes(given, lambda: 1000) == int(1000 * fraction)
    with pytest.raises(ArgumentError, match=r"memory=.* whole number of bytes.* '32 slots'"):
        Budget.parse(given)


@pytest.mark.parametrize(
    "given", [0.0, -0.5, 1.5, float("nan"), "0 %", "101 %", "0.0", "1.5", "2."]
)
def test_fractions_lie_between_0_and_1(given: str | float) -> None:
    with pytest.raises(ArgumentError, match=r"memory=.* must be above 0 and at most 1"):
        memory_bytes(given, lambda: 1000)


def test_memory_of_stages_is_in_bytes() -> None:
    def not_asked() -> int:
        raise AssertionError("plain training was asked for")

    assert memory_bytes(None, not_asked) is None
    assert memory_bytes("1 KiB", not_asked) == memory_bytes(1024, not_asked) == 1024
    assert memory_bytes(Budget(bytes=7), not_asked) == 7
    for given in ("3 slots", Budget(slots=3)):
        with pytest.raises(ArgumentError, match="memory='3 slots' is of steps of equal size"):
            memory_bytes(given, not_asked)
    with pytest.raises(ArgumentError, match="memory='3 slots'"):
        Budget(slots=3).bytes_of(not_asked)
    with pytest.raises(ArgumentError, match=r"memory=0\.5 must be"):
        Budget(fraction=0.5).slots_for(10)
