"""Our schedules under pyadjoint: the gradient at any control, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from multistage.errors import ScheduleError
from multistage.interop.checkpoint_schedules import as_schedule
from multistage.model.costs import Costs
from multistage.planners import PLANNERS

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, at import
their = pytest.importorskip("checkpoint_schedules")
pyadjoint = pytest.importorskip("pyadjoint")
numpy_adjoint = pytest.importorskip("numpy_adjoint")

N = 6


def chain(m: Any, steps: Iterable[int]) -> Any:
    x = m
    for _ in steps:
        x = x * x + 0.3 * x
    return x


def at_every_step(m: Any, steps: Iterable[int]) -> Any:
    x = pyadjoint.AdjFloat(0.5)
    for _ in steps:
        x = x * m + 0.3 * x
    return x


def summed(m: Any, steps: Iterable[int]) -> Any:
    total = pyadjoint.AdjFloat(0.0)
    for _ in steps:
        total = total + m * m
    return total


def kept_for_later(m: Any, steps: Iterable[int]) -> Any:
    """As in pyadjoint's issue 260."""
    for i in steps:
        if i == 0:
            f, u = 2 * m, m * 1.0
        elif i == 2:
            u = u * f
        else:
            u = 1.1 * u
    return u * u


def every_third_step(m: Any, steps: Iterable[int]) -> Any:
    """As in pyadjoint's issue 211."""
    u, f = m * 1.0, m * m
    for i in steps:
        u = u * f if i % 3 == 0 else u * 1.1 + 0.1 * u * u
    return u


def before_and_after(m: Any, steps: Iterable[int]) -> Any:
    x = m * m
    for _ in steps:
        x = x * x * 0.5 + 0.3
    return x * m


def two_levels(m: Any, steps: Iterable[int]) -> Any:
    a, b = m * 1.0, m * 0.5
    for _ in steps:
        a, b = a * b + 0.2, a
    return a * b


def observed(m: Any, steps: Iterable[int]) -> Any:
    x, misfit = m * 1.0, pyadjoint.AdjFloat(0.0)
    for i in steps:
        x = x * x * 0.5 + 0.3
        misfit = misfit + (x - 0.1 * i) ** 2
    return misfit


PROBLEMS = [
    chain,
    at_every_step,
    summed,
    kept_for_later,
    every_third_step,
    before_and_after,
    two_levels,
    observed,
]
PLANS = {"store-all": 9, "revolve": 2, "online": 3, "mixed": 3, "periodic": 4, "recursive": 3}


def reduced(problem: Callable[..., Any], schedule: Any) -> Any:
    """The functional at 0.4, taped under a schedule of N steps."""
    pyadjoint.set_working_tape(pyadjoint.Tape())
    pyadjoint.continue_annotation()
    tape = pyadjoint.get_working_tape()
    if schedule is not None:
        tape.enable_checkpointing(schedule)
    control = pyadjoint.AdjFloat(0.4)
    value = problem(control, tape.timestepper(iter(range(N))))
    pyadjoint.pause_annotation()
    return pyadjoint.ReducedFunctional(value, pyadjoint.Control(control))


def gradients(problem: Callable[..., Any], schedule: Any, *, at_first: bool = True) -> list[float]:
    functional = reduced(problem, schedule)
    found = [float(functional.derivative())] if at_first else []
    for control in (0.41, 0.7, 0.4):  # as an optimiser does
        found.append(float(functional(pyadjoint.AdjFloat(control))))
        found.append(float(functional.derivative()))
    return found


def exported(name: str, **options: Any) -> Any:
    made = PLANNERS[name](Costs(1.0, 2.0, tape_step_s=1.1), PLANS[name], N)
    return as_schedule(made, **options)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("at_first", [True, False])
def test_gradients_at_new_controls(problem: Any, name: str, at_first: bool) -> None:
    schedule = exported(name, replayable=True)
    found = gradients(problem, schedule, at_first=at_first)
    assert found == gradients(problem, None, at_first=at_first)


@pytest.mark.parametrize("name", sorted(set(PLANS) - {"store-all"}))
def test_what_would_be_wrong_is_refused_before_the_first_step(name: str) -> None:
    with pytest.raises(ScheduleError, match="replayable=True"):
        reduced(chain, exported(name))


def vector(values: Any) -> Any:
    return numpy_adjoint.ndarray(np.shape(values), buffer=np.ascontiguousarray(values))


class Squared(pyadjoint.Block):  # type: ignore[misc]
    """u := u * u + 0.3 * u or, at the end, its sum."""

    def __init__(self, u: Any, *, summed: bool) -> None:
        super().__init__()
        self.summed = summed
        self.add_dependency(u)

    def recompute_component(self, inputs: Any, *_: Any) -> Any:
        u = np.asarray(inputs[0])
        return pyadjoint.AdjFloat(u.sum()) if self.summed else vector(u * u + 0.3 * u)

    def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
        u = np.asarray(inputs[0])
        return np.ones_like(u) * adjoints[0] if self.summed else (2 * u + 0.3) * adjoints[0]


def overwritten(schedule: Any, *, at_first: bool) -> list[bytes]:
    """Gradients of steps that overwrite one state, as Functions of Firedrake are."""
    tape = pyadjoint.Tape()
    pyadjoint.set_working_tape(tape)
    pyadjoint.continue_annotation()
    if schedule is not None:
        tape.enable_checkpointing(schedule)

    def run(block: Any, into: Any) -> Any:
        tape.add_block(block)
        with pyadjoint.stop_annotating():
            made = block.recompute_component([u])
            if into is not None:
                np.ndarray.__setitem__(into, Ellipsis, made)
                made = into
        block.add_output(made.create_block_variable())
        return made

    control = vector(np.linspace(0.2, 0.6, 5))
    u = control
    for i in tape.timestepper(iter(range(N))):
        u = run(Squared(u, summed=False), u if i else None)
    functional = pyadjoint.ReducedFunctional(
        run(Squared(u, summed=True), None), pyadjoint.Control(control)
    )
    pyadjoint.pause_annotation()
    found = [functional.derivative()] if at_first else []
    for factor in (1.1, 0.7):
        functional(vector(factor * np.linspace(0.2, 0.6, 5)))
        found.append(functional.derivative())
    return [np.asarray(each).tobytes() for each in found]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("at_first", [True, False])
def test_states_overwritten_in_place(name: str, at_first: bool) -> None:
    found = overwritten(exported(name, replayable=True), at_first=at_first)
    assert found == overwritten(None, at_first=at_first)


def test_pyadjoint_is_wrong_at_the_first_control_already() -> None:
    # When this fails, pyadjoint is mended, and what `replayable` does can go.
    plain = overwritten(None, at_first=True)
    assert overwritten(their.Revolve(N, 2), at_first=True)[0] != plain[0]


def test_pyadjoint_is_wrong_with_its_own_revolve() -> None:
    # When this fails, pyadjoint is mended, and what `replayable` does can go.
    wrong = [
        problem
        for problem in PROBLEMS
        if not np.allclose(gradients(problem, their.Revolve(N, 2)), gradients(problem, None))
    ]
    assert len(wrong) >= 5


def test_a_second_tape_needs_another_schedule() -> None:
    schedule = exported("revolve", replayable=True)
    reduced(chain, schedule).derivative()
    with pytest.raises(ScheduleError, match="make another"):
        reduced(chain, schedule)
