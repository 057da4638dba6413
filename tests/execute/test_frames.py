"""States that the frames of an error refer to are let go, without the cyclic collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multistage.errors import StateError
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.reversal import Reversal

N = 30
COSTS = Costs(1.0, 2.0, state_bytes=320)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Alive:
    """Counts the states that something refers to."""

    def __init__(self) -> None:
        self.now = 0

    def state(self, size: int) -> Any:
        made = np.ones(size)
        self.now += 1
        weakref.finalize(made, self._gone).atexit = False
        return made

    def _gone(self) -> None:
        self.now -= 1


@pytest.mark.parametrize("memory", ["4 slots", 5 * 8 * 60])
def test_a_survey_begins_with_state_0_alone(memory: Any) -> None:
    """The error that ended the sweep before kept two states or more."""
    alive, begun = Alive(), []

    def step(x: Any, i: int) -> Any:
        if i == 0:
            begun.append(alive.now)
        return alive.state(40 + i if i in (12, 20) else len(x))

    with Reversal(step, lambda x, a, i: a, N, memory=memory) as run:
        run.forward(alive.state(40))
        # The step that differs is looked for while the error still refers to what it returned.
        assert begun[-1] == 1 and max(begun) <= 2
        run.reverse(np.ones(1))
        assert alive.now == 0
    assert alive.now == 0


class Raised(Exception):
    pass


@pytest.mark.parametrize("tiers", [None, "memory:"])
@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("at", [25, -20])
def test_an_error_keeps_what_its_own_operator_was_given(
    at: int, taped: bool, tiers: str | None
) -> None:
    alive = Alive()

    def step(x: Any, i: int) -> Any:
        if i == at:
            raise Raised
        return alive.state(len(x))

    def reverse(x: Any, adjoint: Any, i: int) -> Any:
        if i == -at:
            raise Raised
        return adjoint

    def tape_step(x: Any, i: int) -> Any:
        return step(x, i), alive.state(len(x))

    chain = FunctionChain(step, reverse, tape_step if taped else None)
    costs = Costs(1.0, 2.0, 1.0, state_bytes=320, tape_bytes=320) if taped else COSTS
    run: Reversal[Any, Any] = Reversal(chain, n_steps=N, memory="6 slots", tiers=tiers, costs=costs)
    with run, pytest.raises(Raised) as caught:
        run.forward(alive.state(40))
        run.reverse(np.ones(1))
    assert caught.value.__traceback__ is not None
    assert alive.now <= 2


def test_an_in_place_sweep_that_ends_in_an_error_lets_its_copies_go() -> None:
    def forward(x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            x += i

    def reverse(x: Any, adjoint: Any, i: int) -> Any:
        kept.append(x)
        return adjoint

    kept: list[Any] = []
    with Reversal(InPlaceChain(forward, reverse), n_steps=N, memory="4 slots", costs=COSTS) as run:
        state = np.ones(40)
        run.forward(state)
        sweep = run._sweeps.executor._sweep
        with pytest.raises(StateError, match="kept a reference"):
            run.reverse(np.ones(1))
        assert not sweep.held and not sweep.tapes and sweep.live is None
