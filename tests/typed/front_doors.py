"""Programs of users who check their types: `mypy --strict` reads this, nothing runs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from multistage import (
    Blocks,
    Budget,
    Chain,
    Costs,
    FunctionChain,
    HessianVector,
    InPlaceChain,
    Plan,
    Report,
    Result,
    Reversal,
    Stage,
    StageCosts,
    Tier,
    check,
    hessian_vector,
    measure,
    open_store,
    plan,
    plan_chain,
    reverse,
    simulate,
)
from multistage.actions import Advance, EndForward, Reverse, Schedule
from multistage.backends import MemoryStore, Store
from multistage.backends.base import BaseStore, CheckpointLost
from multistage.backends.testing import check_store
from multistage.interop.pyrevolve import Checkpoint, MemoryRevolver, Operator
from multistage.states.layout import Array, Layout

Vector = npt.NDArray[np.float64]
Fields = dict[str, Vector]


def step(x: Vector, i: int) -> Vector:
    """Run step i."""
    return np.sin(x)


def adjoint_step(x: Vector, adjoint: Vector, i: int) -> Vector:
    """Return the adjoint before step i."""
    return np.cos(x) * adjoint


def by_functions(x: Vector) -> Vector:
    """Reverse plain functions, in one call and in two."""
    result: Result[Vector, Vector] = reverse(step, adjoint_step, x, np.ones(3), 100)
    scaled = reverse(step, adjoint_step, x, lambda last: 2 * last, 100, memory="5 slots")
    with Reversal(step, adjoint_step, n_steps=100, memory=Budget(slots=5)) as run:
        last: Vector = run.forward(x)
        gradient: Vector = run.reverse(2 * last)
        report: Report = run.report()
    assert report.n_steps and result.last_state.size
    return gradient + result.adjoint + scaled.adjoint


def several(x: Vector) -> Vector:
    """Reverse two functionals at once, and take a Hessian-vector product."""
    with Reversal(step, adjoint_step, n_steps=100, memory="5 slots", functionals=2) as run:
        last: Vector = run.forward(x)
        one, other = run.reverse([last, 2 * last])
    found: HessianVector[Vector, Vector] = hessian_vector(
        step,
        adjoint_step,
        lambda x, t, i: np.cos(x) * t,
        lambda x, t, a, s, i: np.cos(x) * s - np.sin(x) * t * a,
        x,
        np.ones(3),
        lambda last: last,
        lambda last, tangent: tangent,
        100,
    )
    total: Vector = one + other + found.gradient + found.product
    return total


class Squares:
    """A chain of one's own; its tape is what it makes it."""

    in_place, state_is_tape, one_tape = False, False, False

    def advance(self, state: Vector, start: int, stop: int) -> Vector:
        """Run some steps."""
        for _ in range(start, stop):
            state = state * state
        return state

    def tape(self, state: Vector, step: int) -> tuple[Vector, object]:
        """Run one step, keeping its tape."""
        return state * state, (2 * state,)

    def reverse(self, tape: object, adjoint: Vector, step: int) -> Vector:
        """Return the adjoint before a step."""
        assert isinstance(tape, tuple)
        (derivative,) = tape
        result: Vector = derivative * adjoint
        return result


def by_chains(x: Vector, fields: Fields) -> tuple[Vector, Fields]:
    """Reverse chains: a class of one's own, in blocks, and operators that overwrite."""
    chain: Chain[Vector, Vector] = Squares()
    blocks = Blocks(chain, size=2, n_steps=10)
    with Reversal(blocks, n_steps=blocks.n_blocks, tiers="memory:") as run:
        run.forward(x)
        gradient = run.reverse(x)

    def forward(state: Fields, start: int, stop: int) -> None:
        for _ in range(start, stop):
            state["u"] += np.sin(state["v"])

    def tape(state: Fields, i: int) -> Vector:
        forward(state, i, i + 1)
        return state["v"].copy()

    def back(v: Vector, adjoint: Fields, i: int) -> Fields:
        return {"u": adjoint["u"], "v": adjoint["v"] + np.cos(v) * adjoint["u"]}

    waves: InPlaceChain[Fields, Fields] = InPlaceChain(forward, back, tape)
    with Reversal(waves, n_steps=10, planner="revolve", memory="3 slots") as in_place:
        in_place.forward(fields)
        return gradient, in_place.reverse(fields)


def by_plans(x: Vector) -> None:
    """Measure, plan, simulate, and read plans back."""
    costs: Costs = measure(FunctionChain(step, adjoint_step), x, 100, open_store("memory:"))
    made = plan(costs, "5 slots", n_steps=100, planner="auto")
    simulated_s: float = simulate(made.schedule(), 100, costs, 5).makespan_s
    stages = StageCosts((Stage("first", 1.0, 2.0, 8, 8), Stage("second", 1.0, 2.0, 8, 8)), 8)
    chain = plan_chain(stages, "1 MiB", tiers=Tier("file", write_s=1e-3, read_s=1e-3))
    again: list[Plan] = [Plan.from_dict(made.to_dict()), type(chain).load("plan.json")]
    facts: dict[str, object] = again[0].to_dict()
    makespan_s = facts["makespan_s"]
    assert isinstance(makespan_s, float) and makespan_s == simulated_s
    assert Costs.from_dict(costs.to_dict()) == costs


def one_step() -> Schedule:
    """Yield a schedule of one's own."""
    yield Advance(0, 1)
    yield EndForward()
    yield Reverse(0)


class ListStore(BaseStore):
    """A store of one's own."""

    queue_depth = 1

    def __init__(self) -> None:
        inner = MemoryStore()
        self.name, self.stats, self.transfers = "list", inner.stats, inner.transfers
        self._held: dict[int, list[Array]] = {}

    def open(self, layout: Layout) -> None:
        """Begin empty."""
        self._held.clear()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return what it holds besides states."""
        return 0

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many it can hold."""
        return None

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Keep a copy."""
        self._held[key] = [array.copy() for array in arrays]
        return True

    def wait_written(self, key: int) -> bool:
        """Return whether it is there."""
        return key in self._held

    def prefetch(self, key: int) -> None:
        """Do nothing."""

    def get(self, key: int) -> list[Array]:
        """Return a state."""
        if key not in self._held:
            raise CheckpointLost(f"state {key} is not here")
        return self._held[key]

    def drop(self, key: int) -> None:
        """Let it go."""
        self._held.pop(key, None)

    def close(self) -> None:
        """Let all go."""
        self._held.clear()


def by_stores(x: Vector) -> float:
    """Use a store of one's own as a tier, and a store by itself."""
    store: Store = ListStore()
    check_store(ListStore)
    check(one_step(), n_steps=1, slots=1)
    with Reversal(step, adjoint_step, n_steps=9, memory="2 slots", tiers=[store, "memory:"]) as run:
        run.forward(x)
        run.reverse(x)
    store.open(Layout.of(x))
    store.put(0, [x], block=True)
    found = store.get(0)[0]
    return float(found.sum())


class Heat(Operator):
    """An operator as pyrevolve's users write them."""

    def __init__(self, u: Vector) -> None:
        self.u = u

    def apply(self, t_start: int, t_end: int) -> None:
        """Run some steps."""
        for _ in range(t_start, t_end):
            self.u += 1


class HeatState(Checkpoint):
    """What such an operator overwrites."""

    def __init__(self, u: Vector) -> None:
        self.u = u

    @property
    def dtype(self) -> npt.DTypeLike:
        """The dtype of the field."""
        return self.u.dtype

    @property
    def size(self) -> int:
        """The numbers in a state."""
        return self.u.size

    def get_data(self, timestep: int) -> list[Vector]:
        """Return the field."""
        return [self.u]

    def get_data_location(self, timestep: int) -> list[Vector]:
        """Return the field."""
        return [self.u]


def by_pyrevolve(u: Vector) -> float:
    """Run such operators."""
    revolver = MemoryRevolver(HeatState(u), Heat(u), Heat(u), None, 100, memory="4 slots")
    revolver.apply_forward()
    revolver.apply_reverse()
    return revolver.plan.makespan_s
