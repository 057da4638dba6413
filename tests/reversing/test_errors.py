"""Errors of operators reach the caller as they are; those that we cause say what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multistage.errors import ArgumentError, StateError
from multistage.model.chain import FunctionChain
from multistage.model.costs import Costs
from multistage.reversal import Reversal

N = 9
COSTS = Costs(1.0, 2.0, state_bytes=64)


def run_of(step: Any, n_steps: int | None = N, **options: Any) -> Reversal[Any, Any]:
    chain = FunctionChain(step, lambda x, a, i: np.cos(x) * a)
    return Reversal(chain, n_steps=n_steps, memory="3 slots", **{"costs": COSTS} | options)


@pytest.mark.parametrize("costs", [COSTS, None])
def test_an_operators_own_error_about_something_read_only(costs: Any) -> None:
    own = ValueError("the configuration is read-only")

    def step(x: Any, i: int) -> Any:
        raise own

    with run_of(step, costs=costs) as run, pytest.raises(ValueError) as caught:
        run.forward(np.ones(4))
    assert caught.value is own


@pytest.mark.parametrize("costs", [COSTS, None])
def test_a_write_to_an_array_of_the_operators_own(costs: Any) -> None:
    table = np.ones(4)
    table.flags.writeable = False

    def step(x: Any, i: int) -> Any:
        def written(out: Any) -> None:
            out[0] = 2.0

        written(table)
        return np.sin(x)

    with run_of(step, costs=costs) as run, pytest.raises(ValueError, match="read-only") as caught:
        run.forward(np.ones(4))
    assert type(caught.value) is ValueError
    assert "If this is not an array of your own" in caught.value.__notes__[0]


@pytest.mark.parametrize("costs", [COSTS, None])
def test_a_write_that_may_be_to_either_has_a_note(costs: Any) -> None:
    table = np.ones(4)
    table.flags.writeable = False

    def step(x: Any, i: int) -> Any:
        x += table
        return x

    with run_of(step, costs=costs) as run, pytest.raises(ValueError, match="read-only") as caught:
        run.forward(np.ones(4))
    assert "return new arrays, or use InPlaceChain" in caught.value.__notes__[0]


@pytest.mark.parametrize("costs", [COSTS, None])
@pytest.mark.parametrize("way", ["name", "view", "tree", "function"])
def test_a_write_to_a_kept_state(way: str, costs: Any) -> None:
    def step(state: Any, i: int) -> Any:
        x = state["x"]
        if way == "name":
            x += 1
        elif way == "view":
            x[1:] += 1
        elif way == "tree":
            state["x"] *= 2
        else:
            np.sin(x, out=x)
        return {"x": x}

    chain = FunctionChain(step, lambda s, a, i: a)
    run: Reversal[Any, Any] = Reversal(chain, n_steps=N, memory="3 slots", costs=costs)
    with run, pytest.raises(StateError, match="an operator wrote to a state"):
        run.forward({"x": np.ones(4)})


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("costs", [COSTS, None])
def test_a_stop_iteration_of_until(costs: Any, durable: bool, tmp_path: Any) -> None:
    """Python turns one that leaves a generator into a RuntimeError."""
    own = StopIteration("no more")

    def until(x: Any, i: int) -> bool:
        if i == 3:
            raise own
        return False

    options = {"durable": tmp_path / "run"} if durable else {}
    with run_of(lambda x, i: np.sin(x), None, costs=costs, **options) as run:
        with pytest.raises(StopIteration) as caught:
            run.forward(np.ones(4), until=until)
        assert caught.value is own
        run.forward(np.ones(4), until=lambda x, i: i == 5)
        assert np.isfinite(run.reverse(np.ones(4))).all()


def test_a_stop_iteration_of_until_in_a_survey() -> None:
    def until(x: Any, i: int) -> bool:
        if i == 6:
            raise StopIteration
        return False

    with (
        run_of(lambda x, i: np.append(x, 1.0), None, costs=None) as run,
        pytest.raises(StopIteration),
    ):
        run.forward(np.ones(4), until=until)


def test_another_layout_between_the_sweeps() -> None:
    with run_of(lambda x, i: np.sin(x)) as run:
        run.forward(np.ones(4))
        run.prepare(np.ones(4))
        run.reverse(np.ones(4))  # as if nothing had been
        run.forward(np.ones(4))
        run.prepare(np.ones(5))
        with pytest.raises(ArgumentError, match=r"prepare\(\), with a state of another layout"):
            run.reverse(np.ones(4))
        run.forward(np.ones(5))
        run.reverse(np.ones(5))
        with pytest.raises(ArgumentError, match=r"one for each reverse\(\)$"):
            run.reverse(np.ones(5))
