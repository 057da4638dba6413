"""pyadjoint's tape on our schedules and tiers: every answer bit for bit that of the tape alone."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, at import
pyadjoint = pytest.importorskip("pyadjoint")
tapes = pytest.importorskip("tapes")

from leaks import no_leak as no_leak  # noqa: E402

from multistage import testing  # noqa: E402
from multistage.backends.memory import MemoryStore  # noqa: E402
from multistage.backends.testing import FaultyStore  # noqa: E402
from multistage.errors import ArgumentError, BudgetError, StateError  # noqa: E402
from multistage.interop.pyadjoint import enable, register  # noqa: E402
from multistage.interop.pyadjoint.states import State, TapeLayout, made  # noqa: E402
from multistage.model.costs import Costs  # noqa: E402
from multistage.model.tier import Tier  # noqa: E402
from multistage.planners import PLANNERS  # noqa: E402

N = 9
# Not to be measured: slow steps, so that states are streamed.
COSTS = Costs(1e-3, 2e-3, tiers=(Tier("slow", 1e-3, 1e-3),), state_bytes=64)


@pytest.fixture(autouse=True)
def runs_are_closed(no_leak: None) -> Iterator[None]:
    """Stop the threads of a test's tapes before what they leave is looked at."""
    yield
    while tapes.OPEN:
        run = tapes.OPEN.pop()
        if run is not None:
            run.close()


def history(name: str) -> int:
    return 2 if name == "two_before" else 1


@pytest.mark.long(but=["*-True-file", "leapfrog-*-memory:", "middle-False-None"])
@pytest.mark.parametrize("tier", [None, "file", "memory:"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", sorted(tapes.BUILT))
def test_answers_are_those_of_the_tape_alone(
    name: str, known: bool, tier: str | None, tmp_path: Path
) -> None:
    where = f"file://{tmp_path}" if tier == "file" else tier
    for n, slots, at_first in ((1, 2, True), (2, 2, False), (N, 3, True), (N, 6, False)):
        alone, _ = tapes.reduced(tapes.BUILT[name], n)
        ours, run = tapes.reduced(
            tapes.BUILT[name],
            n,
            lambda tape, n=n, slots=slots: enable(
                tape,
                memory=f"{slots} slots",
                tiers=where,
                n_steps=n if known else None,
                history=history(name),
                costs=COSTS if known else None,
            ),
        )
        expected = tapes.answers(alone, at_first=at_first)
        assert tapes.answers(ours, at_first=at_first) == expected
        assert run.report().complete
        run.close()
        assert tapes.answers(ours) == tapes.answers(alone)  # opened again
        run.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - {"store-all", "periodic"}))
def test_every_planner(planner: str) -> None:
    alone, _ = tapes.reduced(tapes.overwritten, N)
    ours, run = tapes.reduced(
        tapes.overwritten,
        N,
        lambda tape: enable(
            tape, memory="4 slots", tiers="memory:", n_steps=N, planner=planner, costs=COSTS
        ),
    )
    assert tapes.answers(ours) == tapes.answers(alone)
    assert run.plan.planner == planner
    run.close()


@pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("fault", ["lose_read", "lose_write", "refuse"])
def test_what_a_tier_does_not_keep_is_computed_again(fault: str) -> None:
    store = FaultyStore(MemoryStore(), **{fault: range(0, 100, 2)})  # type: ignore[arg-type]
    alone, _ = tapes.reduced(tapes.observed, 24)
    ours, run = tapes.reduced(
        tapes.observed,
        24,
        lambda tape: enable(
            tape, memory="4 slots", tiers=store, n_steps=24, planner="streaming", costs=COSTS
        ),
    )
    np.testing.assert_array_equal(ours.derivative(), alone.derivative())
    counts = run.report().counts
    assert counts.refused > 1 if fault == "refuse" else counts.lost > 1
    assert tapes.answers(ours) == tapes.answers(alone)
    run.close()


def test_memory_is_that_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    n, size = 60, 50_000
    monkeypatch.setattr(tapes, "SIZE", size)

    def taken(setup: Any) -> float:
        gc.collect()
        tracemalloc.start()
        try:
            functional, _ = tapes.reduced(tapes.overwritten, n, setup)
            functional.derivative()
            functional([tapes.wave(0.3)])
            functional.derivative()
            return tracemalloc.get_traced_memory()[1] / (8 * size)
        finally:
            tracemalloc.stop()

    assert taken(None) > n
    # Beside the slots: the control, the state, its adjoint, the values in a step, one state more.
    assert taken(enabled(n_steps=n, planner="revolve")) < 4 + 14


@pytest.mark.parametrize("history", [1, 2, 3])
def test_what_is_read_much_later_stays_in_memory_and_has_its_limit(history: int) -> None:
    def kept(steps: Any) -> Any:
        u = m = tapes.wave(0)
        made = []
        for i in steps:
            made.append(tapes.copied(u))
            u = tapes.run(tapes.Product(0.9, u, made[max(0, i - 3)]))
        return tapes.run(tapes.Energy(u)), [m]

    alone, _ = tapes.reduced(kept, N)
    ours, _ = tapes.reduced(kept, N, enabled(memory="6 slots", n_steps=N, history=history))
    assert tapes.answers(ours) == tapes.answers(alone)
    if history > 1:
        return
    ours, _ = tapes.reduced(kept, 40, enabled(n_steps=40))
    with pytest.raises(BudgetError, match=r"read more than history=1 steps later .* raise history"):
        ours.derivative()
    with pytest.raises(ArgumentError, match="an error has ended the tape's first sweep"):
        ours.derivative()


class Space:
    size = 30


class Function(pyadjoint.OverloadedType):  # type: ignore[misc]
    """Firedrake's: mutable, assignment delegates, a checkpoint may be written into."""

    def __init__(self, space: Any, val: Any = None) -> None:
        super().__init__()
        values = np.zeros(space.size) if val is None else val
        self._space, self.dat = space, SimpleNamespace(data_ro_with_halos=values)

    def function_space(self) -> Any:
        return self._space

    def assign(self, other: Function) -> None:
        block = Assigned(other)
        pyadjoint.get_working_tape().add_block(block)
        values(self)[:] = values(other)
        variable = self.create_block_variable()
        block.add_output(variable)
        variable._checkpoint = Delegated(other.block_variable)

    def _ad_create_checkpoint(self) -> Any:
        return Function(self._space, values(self).copy())

    def _ad_restore_at_checkpoint(self, checkpoint: Any) -> Any:
        if isinstance(checkpoint, Delegated):
            return Function(self._space, values(checkpoint.other.saved_output))
        return checkpoint

    def _ad_init_object(self, value: Any) -> Any:
        return Function(self._space, np.asarray(getattr(value, "dat", value)))


Function.__module__, Function.__qualname__ = "firedrake.function", "Function"


def values(function: Any) -> Any:
    return function.dat.data_ro_with_halos


class Delegated(pyadjoint.OverloadedType):  # type: ignore[misc]
    def __init__(self, other: Any) -> None:
        self.other = other


class Assigned(pyadjoint.Block):  # type: ignore[misc]
    def __init__(self, other: Any) -> None:
        super().__init__()
        self.add_dependency(other)

    def recompute_component(self, inputs: Any, variable: Any, *_: Any) -> Any:
        return Delegated(self.get_dependencies()[0])

    def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
        return adjoints[0].copy()


class Solved(pyadjoint.Block):  # type: ignore[misc]
    """y + 0.1 y^3 = x, linearised about y; the initial guess may be a dependency."""

    def __init__(self, y: Any, x: Any, guess: bool) -> None:
        super().__init__()
        self.add_dependency(x)
        if guess:
            self.add_dependency(y)

    @staticmethod
    def solution(x: Any) -> Any:
        y = np.zeros_like(x)
        for _ in range(30):
            y = y - (y + 0.1 * y**3 - x) / (1 + 0.3 * y**2)
        return y

    def recompute_component(self, inputs: Any, variable: Any, *_: Any) -> Any:
        y = self.solution(values(inputs[0]))
        if isinstance(variable.checkpoint, Function):
            values(variable.checkpoint)[:] = y
            return variable.checkpoint
        return Function(Space, y)

    def evaluate_adj_component(
        self, inputs: Any, adjoints: Any, variable: Any, idx: int, *_: Any
    ) -> Any:
        y = values(self.get_outputs()[0].saved_output)
        return None if idx else adjoints[0] / (1 + 0.3 * y**2)


class Summed(pyadjoint.Block):  # type: ignore[misc]
    def __init__(self, u: Any) -> None:
        super().__init__()
        self.add_dependency(u)

    def recompute_component(self, inputs: Any, *_: Any) -> Any:
        return pyadjoint.AdjFloat(0.25 * float((values(inputs[0]) ** 4).sum()))

    def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
        return float(adjoints[0]) * values(inputs[0]) ** 3


@pytest.mark.parametrize("guess", [True, False])
@pytest.mark.parametrize("planner", ["revolve", "streaming", "auto"])
def test_functions_as_firedrake_has_them(planner: str, guess: bool) -> None:
    def model(steps: Any) -> Any:
        m = Function(Space, np.linspace(0.5, 1.5, Space.size))
        u, y = Function(Space), Function(Space)
        for i in steps:
            if i == 0:
                u.assign(m)
            block = Solved(y, u, guess)
            pyadjoint.get_working_tape().add_block(block)
            values(y)[:] = block.solution(values(u))
            block.add_output(y.create_block_variable())
            u.assign(y)
        block = Summed(u)
        pyadjoint.get_working_tape().add_block(block)
        total = block.recompute_component([u])
        block.add_output(total.block_variable)
        return total, [m]

    def gradients(functional: Any) -> list[bytes]:
        found = list(functional.derivative())
        for start in (0.3, 0.6):
            functional([Function(Space, np.linspace(start, 1.2, Space.size))])
            found += functional.derivative()
        return [values(each).tobytes() for each in found]

    alone, _ = tapes.reduced(model, 15)
    ours, run = tapes.reduced(
        model,
        15,
        lambda tape: enable(
            tape,
            memory="5 slots",
            tiers=None if planner == "revolve" else "memory:",
            n_steps=None if planner == "auto" else 15,
            planner=planner,
        ),
    )
    assert gradients(ours) == gradients(alone)
    run.close()


# --------------------------------------------------------------------------- refused


def enabled(**words: Any) -> Callable[[Any], Any]:
    return lambda tape: enable(tape, **{"memory": "4 slots", "costs": COSTS, **words})


def with_blocks(tape: Any) -> Any:
    tapes.stepped(tapes.wave(0))
    return enable(tape, memory="4 slots")


def twice(tape: Any) -> Any:
    enable(tape, memory="4 slots")
    return enable(tape, memory="4 slots")


@pytest.mark.parametrize(
    ("setup", "error", "message"),
    [
        (with_blocks, ArgumentError, "before anything is taped"),
        (twice, ArgumentError, "has a checkpoint manager"),
        (enabled(history=0), ArgumentError, "history=0"),
        (enabled(memory="0 slots"), BudgetError, "slots"),
        (enabled(planner="fastest"), ArgumentError, "fastest"),
        (enabled(tiers="nowhere:"), ArgumentError, "nowhere"),
        (enabled(memory="64 B"), BudgetError, "64 bytes"),
        (enabled(n_steps=N - 1), ArgumentError, "n_steps=8 timesteps, and another one begins"),
        (enabled(n_steps=N + 1), ArgumentError, "9 timesteps were taped, not n_steps=10"),
    ],
)
def test_refused(setup: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tapes.reduced(tapes.overwritten, N, setup)[0].derivative()


def test_states_of_other_arrays_are_refused() -> None:
    def grows(steps: Any) -> Any:
        u = m = more = tapes.wave(0)
        for i in steps:
            u = tapes.run(tapes.Product(1.0, u, more)) if i == 4 else tapes.stepped(u)
            more = tapes.copied(m) if i == 3 else more
        return tapes.run(tapes.Energy(u)), [m]

    with pytest.raises(StateError, match=r"state 4 has an array of shape \(40,\)"):
        tapes.reduced(grows, N, enabled(n_steps=N))


def test_a_type_is_registered() -> None:
    with pytest.raises(StateError, match=r"register\(type, to_array, from_array\)"):
        tapes.reduced(fields, N, enabled(n_steps=N))
    register(Field, lambda field: field.held, lambda array, output: Field(array))
    alone, _ = tapes.reduced(fields, N)
    ours, run = tapes.reduced(fields, N, enabled(n_steps=N, tiers="memory:", memory="3 slots"))
    assert values_of(ours) == values_of(alone)
    run.close()


class Field(pyadjoint.OverloadedType):  # type: ignore[misc]
    """A type of somebody else."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def _ad_create_checkpoint(self) -> Any:
        return Field(self.held.copy())

    def _ad_restore_at_checkpoint(self, checkpoint: Any) -> Any:
        return checkpoint

    def _ad_init_object(self, value: Any) -> Any:
        return Field(np.asarray(value))


class Grown(pyadjoint.Block):  # type: ignore[misc]
    def __init__(self, x: Any, *, summed: bool = False) -> None:
        super().__init__()
        self.summed = summed
        self.add_dependency(x)

    def recompute_component(self, inputs: Any, *_: Any) -> Any:
        x = inputs[0].held
        return pyadjoint.AdjFloat(x.sum()) if self.summed else Field(0.5 * x * x)

    def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
        x = inputs[0].held
        return np.full_like(x, float(adjoints[0])) if self.summed else x * adjoints[0]


def fields(steps: Any) -> Any:
    u = m = Field(np.linspace(0.5, 1.5, 20))
    for _ in steps:
        u = tapes.run(Grown(u))
    return tapes.run(Grown(u, summed=True)), [m]


def values_of(functional: Any) -> list[bytes]:
    first = functional.derivative()[0].held.tobytes()
    functional([Field(np.linspace(0.2, 1.1, 20))])
    return [first, functional.derivative()[0].held.tobytes()]


def test_a_tape_is_not_gone_on_with_copied_or_optimized() -> None:
    ours, _ = tapes.reduced(tapes.overwritten, N, enabled(n_steps=N))
    with pytest.raises(ArgumentError, match="a Hessian needs a derivative"):
        ours.tape.evaluate_hessian()
    ours.derivative()
    for refused in (ours.tape.copy, ours.optimize_tape):
        with pytest.raises(ArgumentError, match="on tiers cannot be"):
            refused()
    with pytest.raises(ArgumentError, match="last_block"):
        ours.tape.evaluate_adj(last_block=2)
    with pytest.raises(ArgumentError, match="tape new timesteps on a new tape"):
        ours.tape.end_timestep()
    pyadjoint.set_working_tape(ours.tape)
    pyadjoint.continue_annotation()
    tapes.stepped(tapes.wave(0))
    pyadjoint.pause_annotation()
    with pytest.raises(ArgumentError, match=f"had {N + 2} blocks .* and has {N + 3}"):
        ours.derivative()


def test_several_ranks_need_their_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(Get_size=lambda: 2)
    mpi = SimpleNamespace(Is_initialized=lambda: True, COMM_WORLD=world)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(ArgumentError, match=r"MPI started 2 ranks, .* give comm="):
        enable(pyadjoint.Tape(), memory="4 slots")


def test_an_error_in_a_block_leaves_the_tape_usable() -> None:
    alone, _ = tapes.reduced(tapes.overwritten, N)
    ours, run = tapes.reduced(tapes.overwritten, N, enabled(n_steps=N, memory="3 slots"))
    block = ours.tape.timesteps[4][0]
    for name in ("recompute_component", "evaluate_adj_component"):
        block.__class__ = type("Fails", (type(block),), {name: failing})
        with pytest.raises(KeyboardInterrupt):
            ours([tapes.wave(0.2)])
            ours.derivative()
        block.__class__ = tapes.Product
        assert tapes.answers(ours, at_first=False) == tapes.answers(alone, at_first=False)
    assert run.report().complete


def failing(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_block_that_does_not_recompute_its_output_is_refused() -> None:
    class Silent(tapes.Product):  # type: ignore[misc]
        silent = False

        def recompute_component(self, *given: Any) -> Any:
            return None if Silent.silent else super().recompute_component(*given)

    def model(steps: Any) -> Any:
        u = m = tapes.wave(0)
        for _ in steps:
            u = tapes.run(Silent(0.9, u))
        return tapes.run(tapes.Energy(u)), [m]

    ours, _ = tapes.reduced(model, N, enabled(n_steps=N, memory="2 slots"))
    Silent.silent = True
    with pytest.raises(
        StateError, match="Silent of step 1 reads a variable of step 0 whose value is not"
    ):
        ours([tapes.wave(0.2)])


def test_going_back_to_other_controls() -> None:
    found = []
    for setup in (None, enabled(n_steps=N)):
        functional, _ = tapes.reduced(tapes.observed, N, setup)
        functional([tapes.wave(0.3)])
        kept = functional.tape.checkpoint_block_vars(functional.controls)
        functional([tapes.wave(0.9)])
        functional.derivative()
        functional.tape.restore_block_vars(kept)
        found.append(np.asarray(functional.derivative()[0]).tobytes())
    assert found[0] == found[1]


def test_a_functional_that_is_an_array() -> None:
    def model(steps: Any) -> Any:
        u = m = at_4 = tapes.wave(0)
        for i in steps:
            u = tapes.stepped(u)
            at_4 = u if i == 4 else at_4
        return at_4, [m]

    alone, _ = tapes.reduced(model, N)
    ours, _ = tapes.reduced(model, N, enabled(n_steps=N, memory="3 slots"))
    for phase in (0.2, 0.6):
        np.testing.assert_array_equal(ours([tapes.wave(phase)]), alone([tapes.wave(phase)]))


@pytest.mark.parametrize("tiers", [None, "memory:"])
def test_the_tangent_of_an_array_is_asked_for_first(tiers: str | None) -> None:
    def model(steps: Any) -> Any:
        u = m = tapes.wave(0)
        for _ in steps:
            u = tapes.stepped(u)
        return u, [m]

    alone, _ = tapes.reduced(model, N)
    ours, _ = tapes.reduced(model, N, enabled(n_steps=N, memory="3 slots", tiers=tiers))
    for phase in (0.2, 0.6):
        direction = [tapes.wave(phase + 1)]
        np.testing.assert_array_equal(ours.tlm(direction), alone.tlm(direction))
        np.testing.assert_array_equal(ours([tapes.wave(phase)]), alone([tapes.wave(phase)]))


class Total(pyadjoint.Block):  # type: ignore[misc]
    """An array of one element: a tenth of the mean; or, of two arrays, their product."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        for each in given:
            self.add_dependency(each)

    def recompute_component(self, inputs: Any, *_: Any) -> Any:
        x = tapes.plain(inputs[0])
        return tapes.vector(x * inputs[1][0] if len(inputs) > 1 else [1 + 0.1 * x.mean()])

    def evaluate_adj_component(
        self, inputs: Any, adjoints: Any, variable: Any, idx: int, *_: Any
    ) -> Any:
        x, adjoint = tapes.plain(inputs[0]), adjoints[0]
        if len(inputs) == 1:
            return np.full_like(x, 0.1 * adjoint[0] / x.size)
        return np.array([x @ adjoint]) if idx else adjoint * inputs[1][0]


@pytest.mark.parametrize("slots", [2, 4])
def test_arrays_of_several_shapes(slots: int) -> None:
    """State 1 lacks the small array, which comes first in some states and last in others."""

    def model(steps: Any) -> Any:
        u, m, small = tapes.wave(0), None, None
        m = u
        for i in steps:
            if small is not None and i % 2:
                u, small = tapes.run(Total(u, small)), tapes.run(Total(u))
            elif small is not None:
                small, u = tapes.run(Total(u)), tapes.run(Total(u, small))
            else:
                u = tapes.stepped(u)
            if i == 1:
                small = tapes.run(Total(u))
        return tapes.run(tapes.Energy(u)), [m]

    found = []
    for setup in (None, enabled(n_steps=N, memory=f"{slots} slots", tiers="memory:", history=1)):
        functional, _ = tapes.reduced(model, N, setup)
        given = [functional.derivative()]
        for phase in (0.3, 0.7):
            given += [[functional([tapes.wave(phase)])], functional.derivative()]
        found.append([np.asarray(each[0]).tobytes() for each in given])
    assert found[0] == found[1]


def mixed(setup: Any) -> list[bytes]:
    """Derivatives by one of two controls that were given values; the second is made in a step."""

    def model(steps: Any) -> Any:
        u = m = tapes.wave(0)
        made = []
        for i in steps:
            u = tapes.stepped(u)
            if i == N - 2:
                made = [tapes.copied(tapes.wave(1))]
                u = tapes.run(tapes.Product(0.9, u, *made))
        return tapes.run(tapes.Energy(u)), [m, *made]

    both, _ = tapes.reduced(model, N, setup)
    tape, J, (first, second) = both.tape, both.functional, both.controls
    found = [both.tlm([tapes.wave(2), tapes.wave(3)])]
    found.append(both([tapes.wave(0.2), tapes.wave(0.3)]))
    kept = tape.checkpoint_block_vars(both.controls)
    found += [pyadjoint.compute_derivative(J, first, tape=tape) for _ in range(2)]
    for one, other in ((first, second), (second, first)):
        found += both.derivative()
        found.append(pyadjoint.compute_tlm(J, one, tapes.wave(2), tape=tape))
        found.append(pyadjoint.compute_hessian(J, other, None, tape=tape, evaluate_tlm=False))
    pyadjoint.ReducedFunctional(J, first, tape=tape)(tapes.wave(0.5))
    tape.restore_block_vars(kept)
    found.append(pyadjoint.compute_derivative(J, first, tape=tape))
    return [np.asarray(each).tobytes() for each in found]


@pytest.mark.parametrize("slots", [2, 3, 20])
def test_controls_made_in_steps_keep_the_values_given_to_them(slots: int) -> None:
    assert mixed(enabled(memory=f"{slots} slots", n_steps=N)) == mixed(None)


def test_arrays_keep_the_order_of_their_memory_in_stores() -> None:
    class Columns(tapes.Product):  # type: ignore[misc]
        def recompute_component(self, inputs: Any, *_: Any) -> Any:
            return np.asfortranarray(0.5 * np.sin(tapes.plain(inputs[0]))).view(type(inputs[0]))

        def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
            x = tapes.plain(inputs[0])
            return np.cos(x) * adjoints[0] * (1 + 1e-3 * x.ravel("K").sum())

    def model(steps: Any) -> Any:
        u = m = tapes.vector(np.random.default_rng(3).random((130, 70)))
        for _ in steps:
            u = tapes.run(Columns(0.5, u))
        return tapes.run(tapes.Energy(u)), [m]

    found = []
    for setup in (None, enabled(n_steps=N, tiers="memory:", planner="streaming")):
        functional, _ = tapes.reduced(model, N, setup)
        functional([tapes.vector(np.random.default_rng(4).random((130, 70)))])
        found.append(np.asarray(functional.derivative()[0]).tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("dtypes", [(float,), (np.float32,), (np.float32, float)])
@pytest.mark.parametrize("tiers", [None, "memory:"])
def test_tangents_of_another_precision_than_the_states(dtypes: Any, tiers: str | None) -> None:
    class Single(tapes.Product):  # type: ignore[misc]
        def recompute_component(self, inputs: Any, *_: Any) -> Any:
            return tapes.vector(self.value(inputs).astype(np.float32))

        def evaluate_tlm_component(self, inputs: Any, tangents: Any, *_: Any) -> Any:
            x, t = (tapes.plain(each[0]) for each in (inputs, tangents))
            return 2 * np.float32(self.c) * x * t + np.float32(0.1) * np.roll(t, 1)

    def model(steps: Any) -> Any:
        u = m = tapes.vector(tapes.wave(0).astype(np.float32))
        for _ in steps:
            u = tapes.run(Single(0.7, u, square=True))
        return tapes.run(tapes.Energy(u)), [m]

    found = []
    for setup in (None, enabled(n_steps=N, memory="3 slots", tiers=tiers)):
        functional, _ = tapes.reduced(model, N, setup)
        given = []
        for dtype in dtypes:
            direction = [tapes.vector(tapes.wave(1).astype(dtype))]
            given += [functional.tlm(direction), functional.derivative()[0]]
            given += functional.hessian(direction)
        found.append([np.asarray(each).tobytes() for each in given])
    assert found[0] == found[1]


def test_taylor_and_the_dot_product_of_a_tape() -> None:
    def sums(steps: Any) -> Any:
        x = m = pyadjoint.AdjFloat(0.5)
        for _ in steps:
            x = 0.9 * x + 0.1 * x * x
        return x * x, [m]

    reduced, _ = tapes.reduced(sums, N, enabled(n_steps=N, memory="3 slots"))

    def functional(m: float) -> Any:
        return reduced([pyadjoint.AdjFloat(m)])

    functional(0.4)
    (gradient,), (product,) = reduced.derivative(), reduced.hessian([pyadjoint.AdjFloat(1.5)])
    assert testing.taylor(functional, 0.4, gradient, 1.5).order > 1.95
    found = testing.taylor(functional, 0.4, gradient, 1.5, hessian=product, size=0.01)
    assert found.order > 2.95, found

    def arrays(steps: Any) -> Any:
        u = m = tapes.wave(0)
        for _ in steps:
            u = tapes.stepped(u)
        return u, [m]

    reduced, _ = tapes.reduced(arrays, N, enabled(n_steps=N, memory="4 slots"))
    tape, (control,) = reduced.tape, reduced.controls

    def adjoint(w: Any) -> Any:
        tape.reset_variables(("adjoint",))
        reduced.functional.block_variable.adj_value = w
        with tape.marked_control_dependents([control]), pyadjoint.stop_annotating():
            tape.evaluate_adj(markings=True)
        return tapes.plain(control.block_variable.adj_value)

    like = np.zeros(tapes.SIZE)
    test = testing.dot_product(lambda v: reduced.tlm([tapes.vector(v)]), adjoint, like, like)
    assert test.error < 1e-14 and test.left, test


def test_a_cleared_tape_is_enabled_again() -> None:
    tape = pyadjoint.Tape()
    for _ in range(2):
        enable(tape, memory="4 slots")
        tape.clear_tape()
    assert type(tape) is pyadjoint.Tape


def test_a_record_is_read_as_it_was_written() -> None:
    """Though the same state is made of other objects when it is computed again."""
    kind = ((3,), np.dtype(float))
    layout = TapeLayout.for_kinds([kind, kind])
    one, other = tapes.vector([1.0, 2, 3]), tapes.vector([4.0, 5, 6])
    u, v = one.create_block_variable(), other.create_block_variable()
    shared = layout.arrays(State(5, {u: one, v: one}, {}))
    flat, packing = layout.pack(shared)
    layout.arrays(State(5, {u: other, v: tapes.vector([7.0, 8, 9])}, {}))
    found = made(layout.unpack([array.copy() for array in flat], packing), 5)
    assert found.values[u] is found.values[v]
    np.testing.assert_array_equal(found.values[v], one)
