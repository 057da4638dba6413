"""The wave equation: an exact transpose, a gradient of order two, equal bits whatever the means."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.acoustic import Acoustic2D, build, layered, taylor_test
from multistage import PLANNERS, Blocks, Costs, Reversal, Tier
from multistage.errors import ArgumentError

STEPS = 70
COSTS = Costs(1e-4, 2e-4, tiers=(Tier("file", 2.5e-4, 2.5e-4),))


def small(dtype: Any = np.float64, steps: int = STEPS) -> Acoustic2D:
    return build(45, 57, steps, dtype, sponge=16)


def store_all(model: Acoustic2D, start: Any = None) -> tuple[float, Any]:
    """Return misfit and adjoint of state 0, every state kept."""
    state = model.start() if start is None else start.copy()
    states = []
    for i in range(model.n_steps):
        states.append(state.copy())
        model.forward(state, i, i + 1)
    adjoint = model.start_adjoint()
    for i in reversed(range(model.n_steps)):
        adjoint = model.reverse(states[i], adjoint, i)
    return model.misfit(), adjoint


def plain_steps(model: Acoustic2D, steps: int) -> tuple[Any, Any]:
    """Return the last two levels by the printed formula, apart from the model's own loops."""
    rows, columns = model.shape
    weights = {-2: -1 / 12, -1: 4 / 3, 0: -5 / 2, 1: 4 / 3, 2: -1 / 12}
    before, now = np.zeros(model.shape), np.zeros(model.shape)
    sigma = model._sigma()
    courant = (model.velocity * model.step_s / model.spacing_m) ** 2
    for i in range(steps):
        after = np.zeros(model.shape)
        for z in range(2, rows - 2):
            for x in range(2, columns - 2):
                lap = sum(w * (now[z + k, x] + now[z, x + k]) for k, w in weights.items())
                lap += model.wavelet[i] * ((z, x) == model.source)
                s = sigma[z, x]
                after[z, x] = 2 * now[z, x] - (1 - s) * before[z, x] + courant[z, x] * lap
                after[z, x] /= 1 + s
        before, now = now, after
    return before, now


def test_steps_are_those_of_the_formula() -> None:
    model = Acoustic2D(layered((16, 19))[0], 9, sponge=3, source=(6, 7))
    before, now = plain_steps(model, 9)
    state = model.start()
    model.forward(state, 0, 9)
    assert abs(now).max() > 1e-4
    np.testing.assert_allclose(state[1], now, rtol=0, atol=1e-17)
    np.testing.assert_allclose(state[0], before, rtol=0, atol=1e-17)
    assert np.array_equal(model.recorded[-1], state[1][model.receiver_row, model.columns])


def test_strips_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for strip_bytes in (1, 2_000, 1 << 30):
        monkeypatch.setattr("benchmarks.acoustic._STRIP_BYTES", strip_bytes)
        results.append(store_all(small()))
    for misfit, adjoint in results[1:]:
        assert misfit == results[0][0]
        assert all(np.array_equal(a, b) for a, b in zip(adjoint, results[0][1], strict=True))


@pytest.mark.parametrize("steps", [1, 2, STEPS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_adjoint_is_the_transpose(dtype: type[np.floating], steps: int) -> None:
    """<F x, y> = <x, F' y> to rounding, F the n steps from a random state."""
    model = small(dtype, steps)
    model.wavelet[:] = 0  # linear now
    rng = np.random.default_rng(0)

    def noise() -> Any:
        levels = model.start()
        levels[:, 2:-2, 2:-2] = rng.standard_normal((2, 41, 53))
        return levels

    x, y = noise(), noise()
    after = x.copy()
    states = []
    for i in range(steps):
        states.append(after.copy())
        model.forward(after, i, i + 1)
    model.observed[...] = model.recorded  # no residual
    adjoint = y.copy(), model.start_adjoint()[1]
    for i in reversed(range(steps)):
        adjoint = model.reverse(states[i], adjoint, i)
    left = float((after.astype(np.float64) * y).sum())
    right = float((x.astype(np.float64) * adjoint[0]).sum())
    scale = float(np.linalg.norm(after) * np.linalg.norm(y))
    assert abs(left - right) < 8 * np.finfo(dtype).eps * scale


def test_receivers_are_transposed_too() -> None:
    """Without source and data the misfit is a quadratic form of state 0: x . J'(x) = 2 J(x)."""
    model = small()
    model.wavelet[:] = 0
    model.observed[:] = 0
    x = model.start()
    x[:, 2:-2, 2:-2] = np.random.default_rng(1).standard_normal((2, 41, 53))
    misfit, (levels, _) = store_all(model, x)
    assert misfit > 1
    assert float((levels * x).sum()) == pytest.approx(2 * misfit, rel=1e-13)


def test_the_gradient_has_a_remainder_of_order_two() -> None:
    model = small()
    misfit, adjoint = store_all(model)
    gradient = model.gradient(adjoint)
    rng = np.random.default_rng(2)
    for direction in (
        layered(model.shape)[0] - model.velocity,
        20 * rng.standard_normal(model.shape),
    ):
        rows = taylor_test(model, gradient, direction, misfit, 6)
        first = [a[1] / b[1] for a, b in itertools.pairwise(rows)]
        second = [a[2] / b[2] for a, b in itertools.pairwise(rows)]
        assert first[-1] == pytest.approx(2, rel=0.05)
        assert second[-3:] == pytest.approx([4, 4, 4], rel=0.05)
        wrong = taylor_test(model, 1.01 * gradient, direction, misfit, 6)
        assert wrong[-2][2] / wrong[-1][2] < 3.5  # a gradient 1 % off is seen


@pytest.mark.long(but="*-float64-True")
@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("planner", PLANNERS)
def test_gradients_equal_store_all_bit_for_bit(
    planner: str, dtype: type[np.floating], taped: bool, tmp_path: Path
) -> None:
    model = small(dtype)
    misfit, expected = store_all(model)
    slots = STEPS if planner in ("store-all", "periodic", "recursive") else 6
    costs = COSTS if not taped else Costs(1e-4, 1e-4, 1.1e-4, 2, 1, COSTS.tiers)
    with Reversal(
        model.chain(taped),
        n_steps=STEPS,
        memory=f"{slots} slots",
        tiers=f"file:{tmp_path}",
        planner=planner,
        costs=costs,
        checked=True,
    ) as run:
        for _ in range(2):
            model.recorded[...] = np.nan
            run.forward(model.start())
            assert model.misfit() == misfit
            adjoint = run.reverse(model.start_adjoint())
            assert all(np.array_equal(a, b) for a, b in zip(adjoint, expected, strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("taped", [False, True])
def test_blocks_and_measured_costs(taped: bool, tmp_path: Path) -> None:
    model = small()
    _, expected = store_all(model)
    blocks = Blocks(model.chain(taped), 8, STEPS)
    with Reversal(
        blocks, n_steps=blocks.n_blocks, memory="4 slots", tiers=f"file:{tmp_path}"
    ) as run:
        run.forward(model.start())
        adjoint = run.reverse(model.start_adjoint())
        assert run.costs is not None
        field = 41 * 53 * 8
        assert run.costs.tape_bytes == (8 * field if taped else 0)
    assert all(np.array_equal(a, b) for a, b in zip(adjoint, expected, strict=True))


def test_a_step_allocates_no_field() -> None:
    model = Acoustic2D(np.full((500, 500), 2000.0), 8)
    state, adjoint = model.start(), model.start_adjoint()
    model.forward(state, 0, 2)
    tracemalloc.start()
    model.forward(state, 2, 8)
    model.reverse(state, adjoint, 6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # NumPy's iterators take 64 KiB for each operand that is a view.
    assert peak < 4 * 65_536 < state.nbytes / 2 / 7


def test_the_sponge_absorbs() -> None:
    energies = []
    for sponge in (0, 20):
        model = Acoustic2D(
            np.full((101, 101), 2000.0), 420, sponge=sponge, source=(50, 50), receiver_row=50
        )
        state = model.start()
        model.forward(state, 0, 420)
        energies.append(float((state[:, 30:70, 30:70] ** 2).sum()))
    assert energies[1] < 1e-3 * energies[0]


def test_the_misfit_at_another_velocity_leaves_the_model_alone() -> None:
    model = small()
    store_all(model)
    misfit, velocity = model.misfit(), model.velocity
    assert model.misfit_at(layered(model.shape)[0]) == 0.0  # what made the data
    assert (model.misfit(), model.velocity is velocity) == (misfit, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_steps": 0}, "steps=0 must be at least 1"),
        ({"velocity": np.zeros((50, 50))}, "finite numbers > 0"),
        ({"velocity": np.full((50, 50), np.nan)}, "finite numbers > 0"),
        ({"velocity": np.ones(50)}, "2-D array"),
        ({"velocity": np.ones((50, 38))}, "50 x 38 cells has no room for a sponge of 16; it takes"),
        ({"step_s": 0.004}, r"step_s=0.004 must lie between 0 and 0.00306"),
        ({"step_s": 0.0}, "step_s=0 must lie between"),
        ({"source": (1, 20)}, r"source \(1, 20\)"),
        ({"source": (20, 48)}, r"source \(20, 48\)"),
        ({"receiver_row": 48}, "receiver_row=48"),
        ({"dtype": np.int32}, "dtype=int32 must be float32 or float64"),
    ],
)
def test_bad_shots_are_refused(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"velocity": np.full((50, 50), 2000.0), "n_steps": 9, "sponge": 16}
    options |= change
    with pytest.raises(ArgumentError, match=message):
        Acoustic2D(**options)


def test_a_velocity_that_is_unstable_is_refused() -> None:
    model = small()
    with pytest.raises(ArgumentError, match="is unstable at 9000 m/s"):
        model.velocity = np.full(model.shape, 9000.0)
    with pytest.raises(ArgumentError, match="rows=0 must be at least 1"):
        build(0, 50, 9)
