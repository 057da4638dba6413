"""Tests of derivatives: Taylor remainders, and dot products of a tangent and an adjoint.

They take functions and trees of arrays, of NumPy, PyTorch or JAX, and know nothing of how a
gradient was computed: by a `Reversal`, `multistage.torch`, `multistage.jax` or pyadjoint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import optree
from tabulate import tabulate

from .errors import ArgumentError

Point = TypeVar("Point")
Image = TypeVar("Image")

# A remainder below so many roundings of the functional tells nothing of an order.
_ROUNDINGS = 64
_SEEN = 1000  # such remainders times it must be less than what the gradient explains


@dataclass(frozen=True, slots=True)
class Taylor:
    """The remainders of a Taylor expansion, and the orders in which they fall.

    Attributes
    ----------
    sizes, remainders : tuple of float
        Steps along the direction, each half of the one before; what is left there.
    rounding : float
        Remainders below it are rounding errors.
    """

    sizes: tuple[float, ...]
    remainders: tuple[float, ...]
    rounding: float

    @property
    def orders(self) -> tuple[float, ...]:
        """The orders between neighbouring sizes; infinite where only rounding errors are left."""
        return tuple(
            math.inf if other <= self.rounding else math.log2(one / other) if one > 0 else -math.inf
            for one, other in itertools.pairwise(self.remainders)
        )

    @property
    def order(self) -> float:
        """The least of them: 2 for a gradient, 3 with a Hessian; 1 if the gradient is wrong."""
        return min(self.orders)

    def __str__(self) -> str:
        rows = zip(self.sizes, self.remainders, (None, *self.orders), strict=True)
        return tabulate(
            rows, headers=("size", "remainder", "order"), floatfmt=(".3g", ".3e", ".3f")
        )


@dataclass(frozen=True, slots=True)
class DotProduct:
    """The two sides of ⟨F v, w⟩ = ⟨v, Fᵀ w⟩.

    Attributes
    ----------
    left, right : float
    scale : float
        The product of the norms of what is multiplied, on the larger side.
    """

    left: float
    right: float
    scale: float

    @property
    def error(self) -> float:
        """How far they differ, relative to the norms: some roundings if the adjoint is right."""
        return abs(self.left - self.right) / self.scale if self.scale else 0.0

    def __str__(self) -> str:
        return f"⟨F v, w⟩ = {self.left:.15g}, ⟨v, Fᵀ w⟩ = {self.right:.15g}: {self.error:.1e} apart"


def taylor(
    functional: Callable[[Point], object],
    at: Point,
    gradient: object,
    direction: object = None,
    *,
    hessian: object = None,
    size: float | None = None,
    sizes: int = 5,
    seed: int = 0,
) -> Taylor:
    """Return how fast J(m + h d) - J(m) - h ⟨g, d⟩ falls with h; with a Hessian, - h²/2 ⟨H d, d⟩.

    Parameters
    ----------
    functional : callable
        `functional(m)` returns a number.
    at : pytree of arrays or floats
        m.
    gradient : pytree
        g, of the structure of `at`.
    direction : pytree, optional
        d; if not given, normal random numbers, times the root mean square of each array of `at`.
    hessian : pytree, optional
        H d, the action of the Hessian on the direction, which is to be given then.
    size : float, optional
        The first h; 5e-4 in double and 0.07 in single precision if not given.
    sizes : int
        How many h, each half of the one before; at least 2.
    seed : int
        Of the random direction.

    Returns
    -------
    Taylor
        Print it, or ask for its `order` in a test.

    Raises
    ------
    ArgumentError
        For trees of different structures, complex or integer arrays, a Hessian without its
        direction, a functional whose value is no finite number, or a size so small that a wrong
        gradient would not be seen beside rounding errors.

    Examples
    --------
    >>> import numpy as np
    >>> m = np.linspace(0.0, 1.0, 5)
    >>> taylor(lambda m: np.sin(m).sum(), m, np.cos(m)).order > 1.95
    True
    >>> taylor(lambda m: np.sin(m).sum(), m, 1.01 * np.cos(m)).order < 1.5
    True
    """
    eps = max(float(np.finfo(leaf.dtype).eps) for leaf in _arrays(at))
    size = 4 * eps**0.25 if size is None else size
    if sizes < 2 or not (size > 0 and math.isfinite(size)):
        raise ArgumentError(f"size={size} must be above 0, and sizes={sizes} at least 2")
    if hessian is not None and direction is None:
        raise ArgumentError("hessian= is the Hessian's action on a direction; give direction=, too")
    if direction is None:
        direction = _random_like(at, np.random.default_rng(seed), scaled=True)
    slope = _dot(gradient, direction, at)
    bend = 0.0 if hessian is None else _dot(hessian, direction, at)
    value = _number(functional, _copied(at))
    steps = tuple(size * 0.5**k for k in range(sizes))
    values = [_number(functional, _moved(at, h, direction)) for h in steps]
    left = [
        abs(moved - value - h * slope - h * h / 2 * bend)
        for h, moved in zip(steps, values, strict=True)
    ]
    rounding = _ROUNDINGS * eps * max(map(abs, (value, *values)))
    if max(left[1:]) <= rounding and size * abs(slope) < _SEEN * rounding:
        raise ArgumentError(
            f"from size={size:.2g} on there is nothing but rounding errors, which would hide a "
            "wrong gradient; give a larger size or direction"
        )
    return Taylor(steps, tuple(left), rounding)


def dot_product(
    tangent: Callable[[Point], object],
    adjoint: Callable[[Image], object],
    given: Point,
    returned: Image,
    *,
    seed: int = 0,
) -> DotProduct:
    """Return whether an adjoint is that of a linear function: ⟨F v, w⟩ = ⟨v, Fᵀ w⟩ for random v, w.

    Parameters
    ----------
    tangent : callable
        `tangent(v)` returns F v: a linear step, or the derivative of one at some state.
    adjoint : callable
        `adjoint(w)` returns Fᵀ w.
    given, returned : pytree of arrays or floats
        Examples of v and of w; their values do not matter.
    seed : int

    Returns
    -------
    DotProduct
        Print it, or ask for its `error` in a test.

    Raises
    ------
    ArgumentError
        For trees of other structures than the examples, complex or integer arrays.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.arange(6.0).reshape(2, 3)
    >>> dot_product(lambda v: a @ v, lambda w: a.T @ w, np.zeros(3), np.zeros(2)).error < 1e-14
    True
    """
    rng = np.random.default_rng(seed)
    v, w = _random_like(given, rng), _random_like(returned, rng)
    # An operator may overwrite what it is given.
    after, before = tangent(_copied(v)), adjoint(_copied(w))
    left, right = _dot(after, w, returned), _dot(before, v, given)
    scale = max(_norm(after) * _norm(w), _norm(before) * _norm(v))
    return DotProduct(left, right, scale)


def _arrays(tree: object) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Return the leaves of a tree as arrays of NumPy.  Raises ArgumentError."""
    found = []
    for leaf in optree.tree_leaves(cast(Any, tree)):
        array = np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)
        if not np.issubdtype(array.dtype, np.floating):
            raise ArgumentError(f"derivatives are tested of real floats, not of {array.dtype}")
        found.append(array)
    if not found:
        raise ArgumentError("there is no array to differentiate by")
    return found


def _random_like(tree: Point, rng: np.random.Generator, *, scaled: bool = False) -> Point:
    """Return normal numbers of the kinds and shapes of a tree's leaves."""
    scales = [_rms(array) if scaled else 1.0 for array in _arrays(tree)]
    leaves, structure = optree.tree_flatten(cast(Any, tree))
    made = [_random(leaf, scale, rng) for leaf, scale in zip(leaves, scales, strict=True)]
    return cast(Point, structure.unflatten(made))


def _rms(array: np.ndarray[Any, np.dtype[Any]]) -> float:
    """Return the root mean square, 1 if that is 0."""
    return float(np.sqrt(np.mean(_wide(array) ** 2))) or 1.0 if array.size else 1.0


def _random(leaf: Any, scale: float, rng: np.random.Generator) -> object:
    values = scale * rng.standard_normal(np.shape(leaf))
    if hasattr(leaf, "new_tensor"):
        return leaf.new_tensor(values)
    return float(values) if isinstance(leaf, float) else values.astype(leaf.dtype)


def _copied(tree: Point) -> Point:
    return _moved(tree, 0.0, tree)


def _moved(tree: Point, size: float, direction: object) -> Point:
    """Return new arrays, some way along a direction."""

    def move(leaf: Any, along: Any) -> Any:
        start = leaf.detach() if hasattr(leaf, "detach") else leaf
        return start + size * along

    return cast(Point, optree.tree_map(move, cast(Any, tree), cast(Any, direction)))


def _number(functional: Callable[[Point], object], at: Point) -> float:
    found: Any = functional(at)
    value = float(found.detach() if hasattr(found, "detach") else found)
    if not math.isfinite(value):
        raise ArgumentError(f"the functional returned {value}, which has no expansion")
    return value


def _dot(one: object, other: object, like: object) -> float:
    """Return the scalar product of two trees that must be like another one."""
    shapes = [[array.shape for array in _arrays(tree)] for tree in (one, other, like)]
    if not shapes[0] == shapes[1] == shapes[2]:
        raise ArgumentError(
            f"arrays of shapes {shapes[0]} are multiplied by ones of {shapes[1]}, where "
            f"{shapes[2]} are expected"
        )
    pairs = zip(_arrays(one), _arrays(other), strict=True)
    return sum(float(np.vdot(_wide(a), _wide(b))) for a, b in pairs)


def _norm(tree: object) -> float:
    return math.hypot(*(_length(array) for array in map(_wide, _arrays(tree))))


def _length(array: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return the norm of an array, by its largest entry: squares of others might overflow."""
    most = float(np.max(np.abs(array), initial=0.0))
    if not 0 < most < math.inf:
        return most
    unit = array / most
    return most * math.sqrt(float(np.vdot(unit, unit)))


def _wide(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    return array.astype(np.float64)
