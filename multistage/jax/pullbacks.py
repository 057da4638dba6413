"""Steps of loops as functions of arrays, and what their gradients are computed from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import ArgumentError, BudgetError
from ..model.budget import Budget
from ..support.units import format_bytes
from .handlers import Arrays, Site, shaped

MOST_STEPS = 2**31 - 1  # programs count steps in 32 bits
_LINE = 64
_MOST_BUFFERS, _BUFFERS = 16 << 20, 4  # bytes of a stream's buffers at most; in records at least
_LEAST_BLOCK = 128 << 10  # bytes of states a block stands for: a save costs microseconds
_PACKED = re.compile(r"(?:u?int|float)[124](?:_|$)")


def is_key(array: object) -> bool:
    """Whether an array holds typed keys."""
    return bool(jnp.issubdtype(cast(Any, array).dtype, jax.dtypes.prng_key))


def raw(array: object) -> jax.Array:
    """Return an array, of typed keys their data."""
    return cast(jax.Array, jax.random.key_data(cast(Any, array)) if is_key(array) else array)


def strong(value: object) -> jax.Array:
    """Return an array whose type is not a weak one."""
    array = jnp.asarray(cast(Any, value))
    return array if is_key(array) else lax.convert_element_type(array, array.dtype)


class Tree:
    """How a tree of arrays is held by a program: as a tuple, typed keys as their data."""

    def __init__(self, tree: object) -> None:
        leaves: list[Any]
        leaves, structure = jax.tree.flatten(tree)
        self.structure: Any = structure
        self.keys = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]

    def raw(self, tree: object) -> Arrays:
        """Return the arrays of a tree."""
        return tuple(map(raw, jax.tree.leaves(tree)))

    def leaves(self, arrays: Arrays) -> list[jax.Array]:
        """Return the leaves of the tree that some arrays are those of."""
        return [
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self.keys, strict=True)
        ]

    def tree(self, arrays: Arrays) -> object:
        """Return the tree that some arrays are those of."""
        return self.structure.unflatten(self.leaves(arrays))


def varies(array: object) -> bool:
    """Whether there are derivatives by an array."""
    return bool(jnp.issubdtype(cast(Any, array).dtype, jnp.inexact))


def varying(arrays: Arrays) -> Arrays:
    """Return the arrays that there are derivatives by."""
    return tuple(filter(varies, arrays))


def merged(
    some: Arrays, arrays: Arrays, rest: Callable[[jax.Array], object] = lambda array: array
) -> Arrays:
    """Return arrays with those that vary exchanged, the others as `rest` returns them."""
    left = iter(some)
    return cast(Arrays, tuple(next(left) if varies(a) else rest(a) for a in arrays))


def row(arrays: Arrays, i: jax.Array) -> Arrays:
    """Return row i of each array."""
    return tuple(lax.dynamic_index_in_dim(array, i, 0, keepdims=False) for array in arrays)


def put(arrays: Arrays, row: Arrays, i: jax.Array) -> Arrays:
    """Return the arrays with row i exchanged."""
    return tuple(
        lax.dynamic_update_index_in_dim(array, one.astype(array.dtype), i, 0)
        for array, one in zip(arrays, row, strict=True)
    )


def nbytes(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """Return the bytes of a record that holds some arrays."""
    sizes = (-(-array.size * array.dtype.itemsize // _LINE) * _LINE for array in arrays)
    return max(_LINE, sum(sizes))


def room(budget: Budget, carry: Arrays, step_bytes: int) -> tuple[int, int]:
    """Return the most steps of a block, each of which takes some bytes, and the bytes of buffers.

    Raises
    ------
    ArgumentError
        For arrays whose elements are smaller than a byte.
    BudgetError
        If there is room for none.
    """
    for array in carry:
        if _PACKED.match(array.dtype.name):
            raise ArgumentError(
                f"the carry holds an array of {array.dtype.name}, whose elements are smaller than "
                "a byte; carry it as int8 or float32"
            )
    state_bytes = nbytes(carry)
    if budget.slots is not None:
        return budget.slots, max(_BUFFERS * state_bytes, _MOST_BUFFERS // 4)
    limit = budget.bytes_of(lambda: 0)
    buffer_bytes = max(_BUFFERS * state_bytes, min(limit // 4, _MOST_BUFFERS))
    most = (limit - buffer_bytes - state_bytes) // step_bytes
    least = (_BUFFERS + 1) * state_bytes + step_bytes
    if most < 1:
        raise BudgetError.below(
            f"memory={limit} bytes < {least} bytes ({format_bytes(least)}), which a block of one "
            f"step, state 0 and {_BUFFERS} buffers of the tier take; raise the budget",
            least,
        )
    return most, buffer_bytes


def site_of(
    tier: tuple[str, int],
    budget: Budget,
    carry: Arrays,
    residuals: Sequence[jax.ShapeDtypeStruct],
    steps: int,
) -> Site:
    """Return the site of a loop of at most some steps, whose blocks fit the budget."""
    most, buffer_bytes = room(budget, carry, nbytes(residuals))
    most = min(steps, most)
    least = min(most, max(1, _LEAST_BLOCK // nbytes(carry)))
    return Site(*tier, steps, least, most, buffer_bytes)


@dataclass(frozen=True, slots=True)
class Pullback:
    """What the gradient of a step is computed from: residuals, as `jax.lax.scan` keeps them.

    Attributes
    ----------
    given : tuple of pytrees
        Shapes and dtypes of what differs from step to step.
    moving : tuple of bool
        Of each leaf of the pullback, whether it differs from step to step.
    like : tuple of ShapeDtypeStruct
        Those that do.
    """

    _pull: Callable[..., Any]
    given: tuple[object, ...]
    _structure: Any
    moving: tuple[bool, ...]
    like: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(
        cls, pull: Callable[..., tuple[object, object]], consts: Arrays, *given: object
    ) -> Pullback:
        """Return what the gradients of steps are computed from.

        `pull(consts, *given)` returns what a step returns and its pullback, a pytree; of what is
        given, shapes are enough.
        """
        given = jax.tree.map(lambda a: shaped(a.shape, a.dtype), given)
        structures: list[Any] = []

        def leaves(consts: Arrays, *given: Any) -> list[Any]:
            found, structure = jax.tree.flatten(pull(consts, *given)[1])
            structures.append(structure)
            return found

        jaxpr = jax.make_jaxpr(leaves)(consts, *given).jaxpr
        moving = set(map(id, jaxpr.invars[len(consts) :]))
        for equation in jaxpr.eqns:
            if any(id(var) in moving for var in equation.invars):
                moving.update(map(id, equation.outvars))
        flags = tuple(id(var) in moving for var in jaxpr.outvars)
        like = tuple(
            shaped(var.aval.shape, var.aval.dtype)
            for var, moves in zip(jaxpr.outvars, flags, strict=True)
            if moves
        )
        return cls(pull, given, structures[0], flags, like)

    def fixed(self, consts: Arrays) -> list[jax.Array | None]:
        """Return the leaves that are those of every step, None in place of the others."""
        given = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.given)
        leaves = zip(jax.tree.leaves(self._pull(consts, *given)[1]), self.moving, strict=True)
        return [None if moves else leaf for leaf, moves in leaves]

    def residuals(self, consts: Arrays, *given: object) -> tuple[Arrays, Arrays]:
        """Return what a step returns, and the leaves that differ from step to step."""
        after, pulled = self._pull(consts, *given)
        leaves = zip(jax.tree.leaves(pulled), self.moving, strict=True)
        found = tuple(leaf for leaf, moves in leaves if moves)
        assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in self.like]
        return after, found

    def blank(self, count: int) -> Arrays:
        """Return room for the residuals of some steps."""
        return tuple(jnp.zeros((count, *a.shape), a.dtype) for a in self.like)

    def pulled(self, fixed: list[jax.Array | None], residuals: Arrays) -> object:
        """Return the pullback of a step."""
        left = iter(residuals)
        leaves = zip(fixed, self.moving, strict=True)
        return self._structure.unflatten([next(left) if moves else leaf for leaf, moves in leaves])


def stop_of(b: jax.Array, every: jax.Array, n: int | jax.Array) -> jax.Array:
    """Return where block b ends; (b + 1) * every may be more than 32 bits hold."""
    return b * every + jnp.minimum(every, n - b * every)
