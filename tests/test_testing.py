"""Tests of derivatives tell right ones from wrong ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from multistage import Reversal, testing
from multistage.errors import ArgumentError

M: Any = {"c": np.linspace(0.2, 1.0, 7), "k": 0.5}


def functional(m: Any) -> float:
    return float((np.sin(m["c"]) ** 2).sum() * np.exp(m["k"]))


def gradient(m: Any) -> Any:
    s, e = np.sin(m["c"]), np.exp(m["k"])
    return {"c": 2 * s * np.cos(m["c"]) * e, "k": float((s**2).sum() * e)}


def test_orders_of_right_and_wrong_gradients() -> None:
    right = testing.taylor(functional, M, gradient(M))
    assert right.order > 1.95 and "order" in str(right)
    wrong = gradient(M)
    wrong["c"][3] *= 1.02
    assert testing.taylor(functional, M, wrong).order < 1.6
    assert testing.taylor(functional, M, {"c": 0 * M["c"], "k": 0.0}).order < 1.1


def test_the_order_with_a_hessian() -> None:
    d: Any = {"c": np.cos(np.arange(7.0)), "k": 0.3}
    h = 1e-6
    ahead, behind = ({"c": M["c"] + s * d["c"], "k": M["k"] + s * d["k"]} for s in (h, -h))
    bend = {k: (gradient(ahead)[k] - gradient(behind)[k]) / (2 * h) for k in ("c", "k")}
    words: dict[str, Any] = {"direction": d, "size": 0.1}
    assert testing.taylor(functional, M, gradient(M), hessian=bend, **words).order > 2.9
    bend["c"] = 1.1 * bend["c"]
    assert testing.taylor(functional, M, gradient(M), hessian=bend, **words).order < 2.7


@pytest.mark.parametrize("slope", [1e-11, 4e-11])
def test_a_wrong_gradient_is_not_taken_for_rounding_errors(slope: float) -> None:
    """Of both slopes only the first remainder, at most, is above the rounding errors."""
    one = np.ones(1)
    with pytest.raises(ArgumentError, match="which would hide a wrong gradient"):
        testing.taylor(lambda m: 1.0 + slope * float(m[0]), one, 0 * one, one)


def test_only_rounding_errors_left() -> None:
    found = testing.taylor(lambda m: float(m.sum()), np.ones(4), np.ones(4))
    assert found.order == math.inf


def test_a_gradient_of_a_reversal_and_single_precision() -> None:
    with Reversal(
        lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a, 9, memory="3 slots"
    ) as run:
        x = np.linspace(0.1, 1.0, 5)
        run.forward(x)
        found = run.reverse(np.ones(5))

    def end(m: Any) -> float:
        for _ in range(9):
            m = np.sin(m)
        return float(m.sum())

    assert testing.taylor(end, x, found).order > 1.95
    x = x.astype(np.float32)
    assert testing.taylor(end, x, found.astype(np.float32)).order > 1.8
    assert testing.taylor(end, x, 1.1 * found.astype(np.float32)).order < 1.5


def test_torch_and_jax() -> None:
    torch = pytest.importorskip("torch")
    x = torch.linspace(0.1, 1.0, 6, dtype=torch.float64, requires_grad=True)
    torch.sin(x).sum().backward()
    assert testing.taylor(lambda m: torch.sin(m).sum(), x, x.grad).order > 1.95
    jax = pytest.importorskip("jax")
    x = jax.numpy.linspace(0.1, 1.0, 6)
    y = jax.numpy.sin(x).sum()
    assert float(y) > 0
    found = testing.taylor(lambda m: jax.numpy.sin(m).sum(), x, jax.numpy.cos(x))
    assert found.order > 1.8


def test_dot_products() -> None:
    a = np.random.default_rng(0).standard_normal((4, 6))

    def tangent(v: Any) -> Any:
        v["u"] *= 2  # an operator may overwrite what it is given
        return a @ v["u"] + v["p"].sum()

    def adjoint(w: Any) -> Any:
        return {"u": 2 * a.T @ w, "p": np.full(3, w.sum())}

    given = {"u": np.zeros(6), "p": np.zeros(3)}
    right = testing.dot_product(tangent, adjoint, given, np.zeros(4))
    assert right.error < 1e-14 and "apart" in str(right)

    def wrong(w: Any) -> Any:
        return {**adjoint(w), "p": np.zeros(3)}

    assert testing.dot_product(tangent, wrong, given, np.zeros(4)).error > 1e-3


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_dot_products_of_numbers_whose_squares_are_out_of_range(scale: float) -> None:
    x = np.zeros(3)
    right = testing.dot_product(lambda v: scale * v, lambda w: scale * w, x, x)
    wrong = testing.dot_product(lambda v: scale * v, lambda w: 3 * scale * w, x, x)
    assert right.error < 1e-14 and wrong.error > 0.1
    nothing = testing.dot_product(lambda v: 0 * v, lambda w: 0 * w, np.zeros(3), np.zeros(3))
    assert nothing.error == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: testing.taylor(functional, M, np.ones(7)), "shapes"),
        (lambda: testing.taylor(functional, M, gradient(M), sizes=1), "sizes=1"),
        (lambda: testing.taylor(functional, M, gradient(M), size=0.0), "size=0.0"),
        (lambda: testing.taylor(functional, M, gradient(M), hessian=M), "give direction="),
        (lambda: testing.taylor(np.sum, np.arange(3), np.ones(3)), "real floats, not of int"),
        (lambda: testing.taylor(np.sum, np.ones(3), np.ones(3) * 1j), "not of complex"),
        (
            lambda: testing.taylor(functional, M, gradient(M), size=1e-13),
            "nothing but rounding errors, which would hide",
        ),
        (lambda: testing.taylor(lambda m: math.nan, np.ones(3), np.ones(3)), "returned nan"),
        (lambda: testing.taylor(lambda m: 1.0, (), ()), "no array"),
        (lambda: testing.dot_product(np.sum, np.sum, np.ones(3), np.ones(3)), "shapes"),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
