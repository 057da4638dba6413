"""Hessian-vector products: Taylor remainders of order three, symmetry, bits of store-all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.acoustic import Acoustic2D, _laplacian, build
from multistage import (
    Blocks,
    FunctionChain,
    InPlaceChain,
    Reversal,
    Stage,
    StageCosts,
    hessian_vector,
    testing,
)
from multistage.errors import ArgumentError, StateError
from multistage.hessian import _Tangents

N = 11
X = np.linspace(0.2, 1.1, 7)
D = np.cos(np.arange(7.0))
W = np.linspace(0.5, 1.5, 7)  # couples the entries


def step(x: Any, i: int) -> Any:
    return np.sin(x) + 0.1 * np.roll(x, 1) ** 2


def adjoint_step(x: Any, a: Any, i: int) -> Any:
    return np.cos(x) * a + np.roll(0.2 * np.roll(x, 1) * a, -1)


def tangent_step(x: Any, t: Any, i: int) -> Any:
    return np.cos(x) * t + 0.2 * np.roll(x, 1) * np.roll(t, 1)


def second_adjoint_step(x: Any, t: Any, a: Any, s: Any, i: int) -> Any:
    return adjoint_step(x, s, i) - np.sin(x) * t * a + np.roll(0.2 * np.roll(t, 1) * a, -1)


def functional(x: Any) -> float:
    for i in range(N):
        x = step(x, i)
    return float((W * x**3).sum())


def at_the_end(x: Any) -> Any:
    return 3 * W * x**2


def bent_at_the_end(x: Any, t: Any) -> Any:
    return 6 * W * x * t


def found(direction: Any = D, chain: Any = step, back: Any = adjoint_step, **options: Any) -> Any:
    words: dict[str, Any] = {"tangent": tangent_step, "second": second_adjoint_step} | options
    tangent, second = words.pop("tangent"), words.pop("second")
    words.setdefault("memory", "3 slots")
    return hessian_vector(
        chain, back, tangent, second, X.copy(), direction, at_the_end, bent_at_the_end, N, **words
    )


def by_hand(direction: Any = D) -> tuple[Any, Any]:
    """Return gradient and product, every pair kept."""
    pairs, x, t = [], X, direction
    for i in range(N):
        pairs.append((x, t))
        x, t = step(x, i), tangent_step(x, t, i)
    a, s = at_the_end(x), bent_at_the_end(x, t)
    for i in reversed(range(N)):
        x, t = pairs[i]
        a, s = adjoint_step(x, a, i), second_adjoint_step(x, t, a, s, i)
    return a, s


def test_remainders_are_of_order_three_and_products_symmetric() -> None:
    one = found()
    test = testing.taylor(functional, X, one.gradient, D, hessian=one.product, size=0.02)
    assert test.order > 2.95, test
    wrong = testing.taylor(functional, X, one.gradient, D, hessian=1.02 * one.product, size=0.02)
    assert wrong.order < 2.5
    assert_symmetric(lambda v: found(v).product, X)


def assert_symmetric(product: Callable[[Any], Any], like: Any) -> None:
    """Assert that u.Hv is v.Hu."""
    rng = np.random.default_rng(4)
    u, v = rng.standard_normal(like.shape), rng.standard_normal(like.shape)
    left, right = float((u * product(v)).sum()), float((v * product(u)).sum())
    assert abs(left - right) < 1e-10 * abs(left)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "1 slot"},
        {"memory": "3 slots", "tiers": "memory:?buffers=0"},
        {"memory": "1 MiB"},
        {"memory": "4 slots", "planner": "revolve"},
    ],
)
def test_bits_are_those_of_keeping_every_pair(options: Any) -> None:
    gradient, product = by_hand()
    one = found(**options)
    assert one.gradient.tobytes() == gradient.tobytes()
    assert one.product.tobytes() == product.tobytes()
    assert one.report.complete and one.report.counts.reverse_steps == N
    assert float((at_the_end(one.last_state) * one.last_tangent).sum()) == pytest.approx(
        float((gradient * D).sum())
    )


def in_place(back: Any = adjoint_step) -> InPlaceChain[Any, Any]:
    def forward(x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            x[:] = step(x, i)

    return InPlaceChain(forward, back)


def tangent_in_place(x: Any, t: Any, i: int) -> None:
    t[:] = tangent_step(x, t, i)


def over(function: Any) -> Any:
    """Return an adjoint step that overwrites its last argument but the step's number."""

    def back(*given: Any) -> Any:
        given[-2][:] = function(*given)
        return given[-2]

    return back


@pytest.mark.parametrize("tiers", [None, "memory:"])
@pytest.mark.parametrize("alias", [False, True])
def test_in_place(tiers: str | None, alias: bool) -> None:
    direction = X if alias else D.copy()
    chain = in_place(over(adjoint_step))
    state = X.copy()
    one = hessian_vector(
        chain, None, tangent_in_place, over(second_adjoint_step),
        state, state if alias else direction, at_the_end, bent_at_the_end, N,
        memory="3 slots", tiers=tiers,
    )  # fmt: skip
    gradient, product = by_hand(direction)
    assert one.gradient.tobytes() == gradient.tobytes()
    assert one.product.tobytes() == product.tobytes()


@pytest.mark.parametrize("views", [False, True])
def test_a_direction_of_one_array_for_all(views: bool) -> None:
    """In place its leaves are overwritten: they are apart unless those of the state are not."""

    def forward(state: Any, start: int, stop: int) -> None:
        for _ in range(start, stop):
            state["u"] *= 1.5
            state["v"] += state["u"] ** 2

    def tangent(state: Any, t: Any, i: int) -> None:
        t["u"] *= 1.5
        t["v"] += 2 * (1.5 * state["u"]) * t["u"]

    def like(values: Any) -> Any:
        return {"u": values, "v": values[:] if views else values.copy()}

    one = np.ones(7)
    found = hessian_vector(
        InPlaceChain(forward, lambda x, a, i: a), None, tangent, lambda x, t, a, s, i: s,
        like(X.copy()), {"u": one, "v": one}, np.ones(1), np.ones(1), 3, memory="2 slots",
    )  # fmt: skip
    state, expected = like(X.copy()), like(np.ones(7))
    for i in range(3):
        tangent(state, expected, i)
        forward(state, i, i + 1)
    for key in ("u", "v"):
        assert found.last_tangent[key].tobytes() == expected[key].tobytes()


def test_operators_that_share_a_buffer() -> None:
    out = np.empty(7)

    def into(function: Any) -> Any:
        def back(*given: Any) -> Any:
            out[:] = function(*given)
            return out

        return back

    one = found(back=into(adjoint_step), second=into(second_adjoint_step))
    gradient, product = by_hand()
    assert one.gradient.tobytes() == gradient.tobytes()
    assert one.product.tobytes() == product.tobytes()


@pytest.mark.parametrize(
    "costs",
    [None, StageCosts.uniform(N, Stage("", 1.0, 1.0, 10_000, 10_000, gradient_bytes=0), 10_000)],
)
def test_a_durable_run_resumes(costs: StageCosts | None, tmp_path: Path) -> None:
    class BrokenOff(Exception):
        pass

    left = [True]

    def breaks(x: Any, a: Any, i: int) -> Any:
        if i == 4 and left:
            left.pop()
            raise BrokenOff
        return adjoint_step(x, a, i)

    words: dict[str, Any] = {"memory": None, "durable": tmp_path / "run", "durable_every_s": 0}
    words["costs"] = costs
    with pytest.raises(BrokenOff):
        found(back=breaks, **words)
    gradient, product = by_hand()
    one = found(back=breaks, **words)
    assert one.report.counts.reverse_steps < N
    assert one.gradient.tobytes() == gradient.tobytes()
    assert one.product.tobytes() == product.tobytes()


def spoils_the_state(x: Any, t: Any, a: Any, s: Any, i: int) -> Any:
    x *= 1
    return s


def spoils_the_adjoint(x: Any, t: Any, a: Any, s: Any, i: int) -> Any:
    a *= 1
    return s


def spoils_for_tangents(x: Any, t: Any, i: int) -> Any:
    x *= 1
    return t


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: found(second=spoils_the_state), "wrote to a state"),
        (lambda: found(second=spoils_the_adjoint), "wrote to a state"),
        (lambda: found(tangent=spoils_for_tangents), "wrote to a state"),
        (lambda: found(second=lambda *_: None), "adjoint of step 10 returned None"),
        (lambda: found(D[1:]), r"of shapes \[\(6,\)\], the state .* of \[\(7,\)\]"),
        (lambda: found((D,)), "give a tangent for each array"),
        (lambda: found(np.ones(7, int)), r"has dtypes \[dtype\('int64'\)\], the state .*float64"),
        (lambda: found(second=3), "second_adjoint_step=3 must be callable"),
        (lambda: found(tangent=None), "tangent_step=None must be callable"),
        (
            lambda: found(
                chain=FunctionChain(step, adjoint_step, lambda x, i: (step(x, i), x)), back=None
            ),
            "whose states are their tapes",
        ),
        (lambda: found(chain=in_place(), back=None), "overwrites the tangent"),
        (
            lambda: found(chain=Blocks(in_place(), 2), back=None, tangent=tangent_in_place),
            "wrote to a state",
        ),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises((ArgumentError, StateError), match=message):
        call()


class Curved:
    """The second derivatives of the wave's misfit in a direction of its velocity.

    Beside each method of `Acoustic2D` its derivative, over the whole grid at once.
    """

    def __init__(self, model: Acoustic2D, direction: Any) -> None:
        self.model, inner = model, model._inner
        self.direction = np.asarray(direction, float)
        self.push = model._push * 2 * self.direction[inner] / model.velocity[inner]  # its tangent
        self.recorded = np.zeros_like(model.recorded)

    def lap(self, u: Any) -> Any:
        rows = slice(2, u.shape[0] - 2)
        out, more = (np.empty_like(u[self.model._inner]) for _ in range(2))
        _laplacian(u, rows, out, more)
        return out

    def acceleration(self, now: Any, i: int) -> Any:
        out = self.lap(now)
        row, column = self.model.source
        out[row - 2, column - 2] += 12 * self.model.wavelet[i]
        return out

    def tangent(self, state: Any, tangent: Any, i: int) -> None:
        m = self.model
        now, new = tangent[i % 2], tangent[1 - i % 2][m._inner]
        new *= m._keep
        new += m._twice * now[m._inner] + m._push * self.lap(now)
        new += self.push * self.acceleration(state[i % 2], i)
        self.recorded[i] = tangent[1 - i % 2][m.receiver_row, m.columns]

    def second(self, state: Any, tangent: Any, adjoint: Any, second: Any, i: int) -> Any:
        m, inner = self.model, self.model._inner
        (levels, gradient), p = second, adjoint[0][1 - i % 2].copy()
        p[m.receiver_row, m.columns] += m.recorded[i] - m.observed[i]
        dp, dq = levels[1 - i % 2], levels[i % 2]
        dp[m.receiver_row, m.columns] += self.recorded[i]
        pushed, bent = m._push * p[inner], np.zeros_like(dp)
        bent[inner] = m._push * dp[inner] + self.push * p[inner]
        dq[inner] += m._twice * dp[inner] + self.lap(bent)
        gradient[inner] += self.lap(tangent[i % 2]) * pushed
        gradient[inner] += self.acceleration(state[i % 2], i) * bent[inner]
        dp[inner] *= m._keep
        return second

    def products(self, **options: Any) -> tuple[Any, Any, Any]:
        """Return gradient, product with the direction, and what `hessian_vector` returned."""
        m = self.model
        one = hessian_vector(
            m.chain(), None, self.tangent, self.second, m.start(), m.start(),
            m.start_adjoint(), m.start_adjoint(), m.n_steps, **options,
        )  # fmt: skip
        factor = 2 / m.velocity
        product = one.product[1] * factor
        product -= one.gradient[1] * factor * self.direction / m.velocity
        return m.gradient(one.gradient), product, one


@pytest.mark.parametrize("tiers", [None, "file:{}"])
def test_the_wave(tiers: str | None, tmp_path: Path) -> None:
    model = build(45, 57, 70, sponge=16)
    options: dict[str, Any] = {"memory": "9 slots", "tiers": tiers and tiers.format(tmp_path)}
    rng = np.random.default_rng(0)
    direction = 20 * rng.standard_normal(model.shape)
    gradient, product, one = Curved(model, direction).products(**options)
    assert one.report.counts.forward_steps >= 70
    with Reversal(model.chain(), n_steps=70, memory="9 slots") as run:
        run.forward(model.start())
        assert run.reverse(model.start_adjoint())[1].tobytes() == one.gradient[1].tobytes()
    test = testing.taylor(
        model.misfit_at, model.velocity, gradient, direction, hessian=product, size=0.2
    )
    assert test.order > 2.95, test
    assert_symmetric(lambda v: Curved(model, v).products(**options)[1], model.velocity)


def test_a_chain_of_pairs_makes_no_tape() -> None:
    chain: Any = FunctionChain(step, adjoint_step)
    with pytest.raises(AssertionError, match="own tape"):
        _Tangents(chain, tangent_step, second_adjoint_step).tape((X, D), 0)
