"""A sweep whose first steps are timed: legal, within the slots, no step more than planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import kept

from multistage.actions import Schedule
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import NOT_KEPT, Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, online_schedule
from multistage.reversal import Reversal
from multistage.reversing import uniform
from multistage.reversing.first_sweep import GUESSED_STEP_S, FirstSteps, first_sweep
from multistage.schedule.rules import check

KIND: dict[str, Any] = {"tape_slots": 9.0, "in_place": True, "one_tape": True}


def costs(rho: float) -> Costs:
    tiers = (Tier("file", rho, rho),)
    return Costs(1.0, 2.0, tape_step_s=1.0, tape_bytes=NOT_KEPT, tiers=tiers)


def swept(make: Callable[..., Schedule], slots: int, n: int | None, is_last: Any = None) -> Any:
    first: FirstSteps[Any, Any] = FirstSteps(
        FunctionChain(lambda x, i: x, lambda t, a, i: a, lambda x, i: (x, x))
    )
    return first_sweep(first, slots, n, is_last, lambda reached, is_last: make(is_last))


def partial_of(make: Callable[[], Schedule]) -> Callable[..., Schedule]:
    return lambda _: make()


@pytest.mark.long(but=("1.0-streaming", "1.0-online"))
@pytest.mark.parametrize("planner", ["revolve", "streaming", "interval", "h-revolve", "online"])
@pytest.mark.parametrize("rho", [0.2, 1.0, 3.0, 20.0])
def test_first_steps_are_those_of_the_plan(planner: str, rho: float) -> None:
    few = 0
    for n in (*range(1, 12), 33, 200):
        for slots in (1, 2, 3, 4, 6, 12, 40, 100):
            plan = PLANNERS[planner](costs(rho), slots, n)
            alone = check(plan.schedule(), n, slots, **KIND)
            found = check(swept(partial_of(plan.schedule), slots, n), n, slots, **KIND)
            more = found.forward_steps - alone.forward_steps
            assert found.transfers == alone.transfers
            assert 0 <= more <= 3, (n, slots)
            few += more > 0
            assert not more or slots <= 4 or planner == "online", (n, slots)
    assert few < 20


@pytest.mark.parametrize("n", [1, 2, 3, 5, 30, 100])
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 40])
def test_unknown_length(slots: int, n: int) -> None:
    asked: list[int] = []

    def is_last(i: int) -> bool:
        asked.append(i)
        return i == n

    def make(is_last: Any) -> Schedule:
        return online_schedule(costs(1.0).without_tiers(), slots, is_last)

    alone = check(make(lambda i: i == n), None, slots, **KIND)
    found = check(swept(make, slots, None, is_last), None, slots, **KIND)
    assert asked == list(range(1, n + 1))
    assert found.forward_steps <= alone.forward_steps + (slots == 1)


def test_steps_are_timed_until_it_stops() -> None:
    asked: list[float] = []

    def agree(seconds: float) -> float:
        asked.append(seconds)
        return float(len(asked))

    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x + i, lambda x, a, i: a)
    first: FirstSteps[Any, Any] = FirstSteps(chain, agree)
    assert first.typical_s == (GUESSED_STEP_S, GUESSED_STEP_S)
    for step in range(4):
        assert first.advance(np.zeros(1), step, step + 1) == step
    assert (first.typical_s, first.spent_s, first.tape_bytes) == ((1.0, 1.0), 3.0 + 4.0, 0)
    first.stop(chain)
    assert first.advance(np.zeros(1), 2, 4) == 5
    assert len(asked) == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_tapes_are_weighed_beside_each_other(in_place: bool) -> None:
    """Of a step's tape counts what the one before does not hold; in place the state is copied."""
    table, ran = np.zeros(1000), list[str]()

    def step(x: Any, *_: int) -> Any:
        ran.append("step")
        return x

    def tape(x: Any, i: int) -> Any:
        ran.append("tape")
        made = (table, x, np.zeros(10))
        return made if in_place else (x, made)

    chain: Any = FunctionChain(step, lambda t, a, i: a, tape)
    if in_place:
        chain = InPlaceChain(step, lambda t, a, i: a, tape=tape)
    first: FirstSteps[Any, Any] = FirstSteps(chain)
    x = np.zeros(5)
    for i in range(5):
        x = first.advance(x, i, i + 1)
    assert ran == ["tape", "tape", "step", "step", "tape"]
    assert first.tape_bytes == 80 + 40 * in_place


STEPS = 40
TIERS = (None, "memory:?buffers=0", "file:{}?buffers=0&compress=blosc", "memory:64kB > file:{}")


class Counting:
    """A chain of some kind that counts its steps, and knows no step beyond the last."""

    def __init__(self, kind: str) -> None:
        self.in_place, self.state_is_tape = "in place" in kind, "taped" not in kind
        self.one_tape = False
        self.ran: list[int] = []

    def advance(self, state: Any, start: int, stop: int) -> Any:
        for step in range(start, stop):
            state = self._step(state, step)
        return state

    def tape(self, state: Any, step: int) -> Any:
        tape = np.cos(state)
        return self._step(state, step), tape

    def reverse(self, tape: Any, adjoint: Any, step: int) -> Any:
        return adjoint * (np.cos(tape) if self.state_is_tape else tape)

    def _step(self, state: Any, step: int) -> Any:
        assert step < STEPS
        self.ran.append(step)
        return np.sin(state, out=state if self.in_place else None)


def store_all() -> bytes:
    chain = FunctionChain(lambda x, i: np.sin(x), lambda x, a, i: a * np.cos(x))
    return kept(chain, np.linspace(0.1, 1, 50), np.ones(50), STEPS)[1].tobytes()


@pytest.mark.parametrize("kind", ["functional", "taped", "in place", "in place, taped"])
@pytest.mark.parametrize("tier", [*TIERS, "durable"])
@pytest.mark.parametrize("unknown", [False, True])
def test_no_step_runs_that_the_schedule_does_not_ask_for(
    kind: str, tier: str | None, unknown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may count its runs, and may not exist beyond the end."""
    if "compress" in (tier or ""):
        pytest.importorskip("blosc2")
    monkeypatch.setattr(uniform, "_PROBE_S", 0.03)
    options: dict[str, Any] = {"tiers": tier and tier.format(tmp_path)}
    if tier == "durable":
        options = {"durable": tmp_path / "run"}
    until: Any = (lambda _, i: i == STEPS) if unknown else None
    chain = Counting(kind)
    with Reversal(chain, n_steps=None if unknown else STEPS, memory="5 slots", **options) as run:
        run.forward(np.linspace(0.1, 1, 50), until)
        forward = len(chain.ran)
        assert run.reverse(np.ones(50)).tobytes() == store_all()
        counts = run.report().counts
        assert run.costs.tape_bytes == (0 if chain.state_is_tape else 400)
        assert len(run.costs.tiers) == (tier is not None)
    assert forward == STEPS  # no state of the first sweep was computed twice
    taped = 0 if chain.state_is_tape else STEPS  # at most one right before each adjoint step
    assert counts.forward_steps <= len(chain.ran) <= counts.forward_steps + taped
