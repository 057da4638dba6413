"""Steps of loops as functions of arrays, and what their gradients are computed from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core.primitives import convert_element_type_p

from ..errors import ArgumentError, BudgetError
from ..model.budget import Budget
from ..support.units import format_bytes
from .handlers import Arrays, Site, shaped

MOST_STEPS = 2**31 - 1  # programs count steps in 32 bits
Flags: TypeAlias = tuple[bool, ...]  # of some arrays, which have a gradient

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


def is_weak(kind: object) -> bool:
    """Whether a type of arrays is a weak one, as that of Python's numbers."""
    return bool(getattr(kind, "weak_type", False))


def weakened(array: jax.Array, weak: bool) -> jax.Array:
    """Return an array whose type is a weak one, if it is to be that."""
    if not weak:
        return array
    options = {"new_dtype": array.dtype, "weak_type": True, "sharding": None}
    made: jax.Array = convert_element_type_p.bind(array, **options)
    return made


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


def _chosen(arrays: Sequence[Any], flags: Flags) -> tuple[Any, ...]:
    """Return those of some arrays that are flagged."""
    return tuple(array for array, flag in zip(arrays, flags, strict=True) if flag)


def _exchanged(some: Sequence[Any], arrays: Sequence[Any], flags: Flags) -> tuple[Any, ...]:
    """Return arrays with those that are flagged exchanged."""
    left = iter(some)
    return tuple(next(left) if flag else a for a, flag in zip(arrays, flags, strict=True))


def _instantiated(adjoints: Sequence[Any]) -> Arrays:
    """Return gradients of which JAX may know some to be zeros."""
    return tuple(
        jnp.zeros(a.shape, a.dtype) if isinstance(a, SymbolicZero) else a for a in adjoints
    )


def _reached(function: Callable[..., Sequence[Any]], arrays: Arrays, moved: Flags) -> Flags:
    """Return which of a function's results have a tangent where some of its arguments have one."""
    found: list[bool] = []
    probe: Any = jax.custom_jvp(lambda *_: jnp.zeros(()))

    def seen(_arrays: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        found[:] = [not isinstance(tangent, SymbolicZero) for tangent in tangents]
        return jnp.zeros(()), jnp.zeros(())

    probe.defjvp(seen, symbolic_zeros=True)

    def run(*arrays: jax.Array) -> tuple[()]:
        made: list[Any] = []

        def probed(*some: jax.Array) -> Any:
            made.extend(function(*_exchanged(some, arrays, moved)))
            return probe(*made)

        some = _chosen(arrays, moved)
        jax.jvp(probed, some, tuple(map(jnp.zeros_like, some)))
        found.extend([False] * (len(made) - len(found)))
        return ()

    jax.make_jaxpr(run)(*arrays)
    return tuple(found)


def _settled(
    step: Callable[..., Sequence[Any]], given: Arrays, state: Arrays, fixed: Flags, first: Flags
) -> Flags:
    """Return which parts of a state have a tangent at some step, from those at the first.

    `step(*given, *state)` returns the next state; `fixed` flags what is given.
    """
    found = first
    while True:
        after = _reached(step, (*given, *state), (*fixed, *found))
        both = tuple(a or b for a, b in zip(found, after, strict=True))
        if both == found:
            return found
        found = both


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
    number: int,
) -> Site:
    """Return the site of a loop of at most some steps, whose blocks fit the budget."""
    most, buffer_bytes = room(budget, carry, nbytes(residuals))
    most = min(steps, most)
    least = min(most, max(1, _LEAST_BLOCK // nbytes(carry)))
    return Site(*tier, steps, least, most, buffer_bytes, number)


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

    given: tuple[object, ...]
    _consts: Sequence[Any]
    _step: Any  # a Jaxpr: from consts and what is given to what a step returns and its residuals
    _fixed: Any  # another, from consts alone to the leaves that are those of every step
    _structure: Any
    moving: tuple[bool, ...]
    like: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(
        cls, pull: Callable[..., tuple[Arrays, object]], consts: Arrays, *given: object
    ) -> Pullback:
        """Return what the gradients of steps are computed from.

        `pull(consts, *given)` returns what a step returns and its pullback, a pytree; of what is
        given, shapes are enough.  It is traced, never run with values of another kind.
        """
        given = jax.tree.map(lambda a: shaped(a.shape, a.dtype), given)
        structures: list[Any] = []

        def leaves(consts: Arrays, *given: Any) -> list[Any]:
            after, pulled = pull(consts, *given)
            found, structure = jax.tree.flatten(pulled)
            structures.append(structure)
            return [*found, *after]

        closed = jax.make_jaxpr(leaves)(consts, *given)
        jaxpr = closed.jaxpr
        count = structures[0].num_leaves
        found, after = jaxpr.outvars[:count], jaxpr.outvars[count:]
        moving = set(map(id, jaxpr.invars[len(consts) :]))
        for equation in jaxpr.eqns:
            if any(id(var) in moving for var in equation.invars):
                moving.update(map(id, equation.outvars))
        flags = tuple(id(var) in moving for var in found)
        residuals = [var for var, moves in zip(found, flags, strict=True) if moves]
        fixed = [var for var, moves in zip(found, flags, strict=True) if not moves]
        return cls(
            given,
            closed.consts,
            jaxpr.replace(outvars=[*after, *residuals]),
            _needed(jaxpr, jaxpr.invars[: len(consts)], fixed),
            structures[0],
            flags,
            tuple(shaped(var.aval.shape, var.aval.dtype) for var in residuals),
        )

    def fixed(self, consts: Arrays) -> list[jax.Array | None]:
        """Return the leaves that are those of every step, None in place of the others."""
        left = iter(jax.core.eval_jaxpr(self._fixed, self._consts, *consts))
        return [None if moves else next(left) for moves in self.moving]

    def residuals(self, consts: Arrays, *given: object) -> tuple[Arrays, Arrays]:
        """Return what a step returns, and the leaves that differ from step to step."""
        leaves = *consts, *jax.tree.leaves(given)
        made = tuple(jax.core.eval_jaxpr(self._step, self._consts, *leaves))
        count = len(made) - len(self.like)
        return made[:count], made[count:]

    def blank(self, count: int) -> Arrays:
        """Return room for the residuals of some steps."""
        return tuple(jnp.zeros((count, *a.shape), a.dtype) for a in self.like)

    def pulled(self, fixed: list[jax.Array | None], residuals: Arrays) -> object:
        """Return the pullback of a step."""
        left = iter(residuals)
        leaves = zip(fixed, self.moving, strict=True)
        return self._structure.unflatten([next(left) if moves else leaf for leaf, moves in leaves])


def _needed(jaxpr: Any, given: Sequence[Any], made: Sequence[Any]) -> Any:
    """Return the part of a Jaxpr that makes some of its variables, from a part of its arguments."""
    needed, equations = set(map(id, made)), []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(map(id, equation.outvars)):
            needed.update(map(id, equation.invars))
            equations.append(equation)
    return jaxpr.replace(invars=given, outvars=made, eqns=equations[::-1], effects=set())


def stop_of(b: jax.Array, every: jax.Array, n: int | jax.Array) -> jax.Array:
    """Return where block b ends; (b + 1) * every may be more than 32 bits hold."""
    return b * every + jnp.minimum(every, n - b * every)
