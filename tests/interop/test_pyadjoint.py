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
PLANS = {
    "store-all": 9,
    "revolve": 2,
    "online": 3,
    "mixed": 3,
    "periodic": 4,
    "recursive": 3,
}


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


def test_store_all_as_published() -> None:
    functional = reduced(kept_for_later, exported("store-all"))
    functional(pyadjoint.AdjFloat(2.0))
    slope = float(functional.derivative())
    value = [float(functional(pyadjoint.AdjFloat(2.0 + h))) for h in (1e-4, -1e-4)]
    assert np.isclose(slope, (value[0] - value[1]) / 2e-4)


@pytest.mark.parametrize("name", sorted(set(PLANS) - {"store-all"}))
def test_a_new_control_is_refused_where_it_would_be_wrong(name: str) -> None:
    functional = reduced(chain, exported(name))
    assert float(functional.derivative()) == gradients(chain, None)[0]
    with pytest.raises(ScheduleError, match="replayable=True"):
        functional(pyadjoint.AdjFloat(0.41))
    early = reduced(chain, exported(name))
    with pytest.raises(ScheduleError, match="replayable=True"):
        early(pyadjoint.AdjFloat(0.41))


def test_pyadjoint_is_wrong_with_its_own_revolve() -> None:
    # When this fails, pyadjoint is mended, and what `replayable` does can go.
    wrong = [
        problem
        for problem in PROBLEMS
        if not np.allclose(gradients(problem, their.Revolve(N, 2)), gradients(problem, None))
    ]
    assert len(wrong) >= 5


@pytest.mark.parametrize("replayable", [True, False])
def test_a_second_tape_needs_another_schedule(replayable: bool) -> None:
    schedule = exported("revolve", replayable=replayable)
    reduced(chain, schedule).derivative()
    with pytest.raises(ScheduleError, match="make another" if replayable else "each tape needs"):
        reduced(chain, schedule)
