"""`scan`: a loop in blocks, the states before which go to a tier.

The forward sweep saves the state before each block.  The reverse sweep loads it and runs the
block again, keeping in memory what the gradient of each step is computed from; then it turns the
block step by step.  So a step is run twice.  A state that is missing is made from the last one
there is, by running again from there.

A step's gradient is computed as `jax.lax.scan` does it, from the same residuals: XLA compiles the
same operations, and rounds alike.

How many steps a block has is decided as the program begins to run, by the times that the runs
before it have shown (I = ceil(T_T / T_A), see the package); the program has room for the most.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.urls import TierName
from ..errors import ArgumentError, BudgetError
from ..model.budget import Budget
from ..support.units import format_bytes
from .handlers import Arrays, Site, load, opened, save, shaped

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")

_LINE = 64
_MOST_BUFFERS, _BUFFERS = 16 << 20, 4  # bytes of a stream's buffers at most; in records at least
_LEAST_BLOCK = 128 << 10  # bytes of states a block stands for: a save costs microseconds
_MOST_STEPS = 2**31 - 1  # programs count steps in 32 bits
_PACKED = re.compile(r"(?:u?int|float)[124](?:_|$)")


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _raw(array: Any) -> jax.Array:
    """Return an array, of typed keys their data."""
    made: jax.Array = jax.random.key_data(array) if _is_key(array) else array
    return made


class _Tree:
    """How a tree of arrays is held by a program: as a tuple, typed keys as their data."""

    def __init__(self, tree: Any) -> None:
        leaves: list[Any]
        leaves, structure = jax.tree.flatten(tree)
        self.structure: Any = structure
        self.keys = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]

    def raw(self, tree: Any) -> Arrays:
        """Return the arrays of a tree."""
        return tuple(map(_raw, jax.tree.leaves(tree)))

    def leaves(self, arrays: Arrays) -> list[Any]:
        """Return the leaves of the tree that some arrays are those of."""
        return [
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for array, impl in zip(arrays, self.keys, strict=True)
        ]

    def tree(self, arrays: Arrays) -> Any:
        """Return the tree that some arrays are those of."""
        return self.structure.unflatten(self.leaves(arrays))


def _varies(array: Any) -> bool:
    """Whether there are derivatives by an array."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _varying(arrays: Arrays) -> Arrays:
    return tuple(filter(_varies, arrays))


def _merged(some: Arrays, arrays: Arrays, rest: Callable[[Any], Any] = lambda array: array) -> Any:
    """Return arrays with those that vary exchanged, the others as `rest` returns them."""
    left = iter(some)
    return tuple(next(left) if _varies(array) else rest(array) for array in arrays)


def _row(arrays: Arrays, i: jax.Array) -> Arrays:
    return tuple(lax.dynamic_index_in_dim(array, i, 0, keepdims=False) for array in arrays)


def _put(arrays: Arrays, row: Arrays, i: jax.Array) -> Arrays:
    return tuple(
        lax.dynamic_update_index_in_dim(array, one.astype(array.dtype), i, 0)
        for array, one in zip(arrays, row, strict=True)
    )


def _nbytes(arrays: Arrays) -> int:
    sizes = (-(-array.size * array.dtype.itemsize // _LINE) * _LINE for array in arrays)
    return max(_LINE, sum(sizes))


def scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    memory: Budget | int | str,
    tiers: TierName,
) -> tuple[Carry, Y]:
    """Do what `jax.lax.scan(f, init, xs, length, reverse)` does, within a memory budget.

    For use inside `jax.jit`: outside of it, each call is compiled anew.  Its gradient is that of
    `jax.lax.scan`, whatever is kept where: to the last bit wherever XLA compiles a step alike in
    both programs, which it usually does; else the last bit may differ, as for `jax.checkpoint`.

    Parameters
    ----------
    f : callable
        `f(carry, x) -> (carry, y)`, pure; it may close over anything.  Run twice a step.
    init : pytree of arrays
        State 0.
    xs : pytree of arrays, optional
        Of the same length n; f is given a row of each.
    length : int, optional
        n, needed where there are no xs.
    reverse : bool
        Take the rows of xs from the last to the first.
    unroll : int or bool
        Without effect.
    memory : Budget, int or str
        For what the gradients of a block's steps are computed from, the buffers of the tier, and
        state 0: bytes, `"64 MiB"`, or `"100 slots"` for a block of so many steps.  Inputs, outputs
        and gradients are not counted.  Under `vmap`, for each member of the batch.
    tiers : str, Path or Store
        Where the other states go: `"file:///scratch"` or `"memory:"`, each with a `capacity`.

    Returns
    -------
    (carry, ys)
        The last state, and the y of all steps.

    Raises
    ------
    ArgumentError
        For xs of different lengths, a tier that cannot be used inside a program, a mutable Ref
        that f closes over, arrays whose elements are smaller than a byte, another device than a
        CPU, a gradient in a program for several devices, or without the C core.
    BudgetError
        For less memory than a block of one step takes: names the least.
    StoreError
        If the tier cannot be used.  All of them before the program runs.
    TypeError
        If f returns a carry of another structure, shape or dtype than it is given.

    Notes
    -----
    Reverse mode, once: `jvp`, second derivatives and a second call of a pullback are errors.  Of
    `jax.checkpoint` the loop is run again as a whole.  `last_report` tells what a run did.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> def loss(x):
    ...     last, ys = scan(
    ...         lambda c, _: (jnp.sin(c), c.sum()), x, length=100, memory="1 MiB", tiers="memory:"
    ...     )
    ...     return last.sum() + ys.sum()
    >>> x = jnp.ones(3)
    >>> jax.jit(jax.grad(loss))(x).shape
    (3,)
    """
    folder, capacity_bytes = opened(tiers)
    budget = Budget.parse(memory)
    init = jax.tree.map(jnp.asarray, init)
    xs = jax.tree.map(jnp.asarray, xs)
    n = _length(xs, length)
    loop, init = _Loop.of(f, init, xs, n, reverse)
    _room(budget, loop.carry, 1)
    if not n:
        return init, jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), loop.y_like)

    def site(residuals: Arrays) -> Site:
        most, buffer_bytes = _room(budget, loop.carry, _nbytes(residuals))
        most = min(n, most)
        least = min(most, max(1, _LEAST_BLOCK // _nbytes(loop.carry)))
        return Site(folder, capacity_bytes, n, least, most, buffer_bytes)

    last, ys = loop.run(site)
    return loop.carry_tree.tree(last), loop.y_tree.tree(ys)


def _strong(value: Any) -> jax.Array:
    array = jnp.asarray(value)
    return array if _is_key(array) else lax.convert_element_type(array, array.dtype)


def _differ(init: Any, carry: Any) -> bool:
    """Whether a carry has the structure of state 0, but other dtypes."""
    before, after = (cast(Any, jax.tree.structure(tree)) for tree in (init, carry))
    if before != after:
        return False
    pairs = zip(jax.tree.leaves(init), jax.tree.leaves(carry), strict=True)
    return any(one.dtype != other.dtype for one, other in pairs)


def _promoted(value: Any, other: Any) -> Any:
    """Return a leaf of state 0; a weak one as `jax.lax.scan` takes it, beside what f returns."""
    if not jax.typeof(value).weak_type or value.dtype == other.dtype:
        return value
    return lax.convert_element_type(value, jnp.result_type(value, other.dtype))


def _length(xs: Any, length: int | None) -> int:
    """Return the number of steps.  Raises ArgumentError."""
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else -1 for leaf in jax.tree.leaves(xs)}
    if length is not None:
        lengths.add(int(length))
    if len(lengths) != 1 or min(lengths) < 0:
        raise ArgumentError(
            f"xs and length= give the lengths {sorted(lengths)}; they must give one, at least 0"
        )
    if max(lengths) > _MOST_STEPS:
        raise ArgumentError(f"length={max(lengths)} > {_MOST_STEPS}; put a loop in a loop")
    return lengths.pop()


def _room(budget: Budget, carry: Arrays, step_bytes: int) -> tuple[int, int]:
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
    state_bytes = _nbytes(carry)
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


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop: what its program takes, and its step as a function of that.

    Attributes
    ----------
    closed : ClosedJaxpr
        Of f.
    consts, carry, xs : tuple of arrays
        What f closes over, state 0, and the inputs.
    steps : int
    backwards : bool
    """

    closed: Any
    const_tree: _Tree
    carry_tree: _Tree
    x_tree: _Tree
    y_tree: _Tree
    y_like: Any
    consts: Arrays
    carry: Arrays
    xs: Arrays
    steps: int
    backwards: bool

    @classmethod
    def of(
        cls, f: Callable[..., Any], init: Any, xs: Any, n: int, backwards: bool
    ) -> tuple[_Loop, Any]:
        """Return the loop of `scan` and state 0, its weak types as f makes them.

        Raises TypeError for a carry that changes its type otherwise.
        """
        y_trees = []

        def traced(carry: Any, x: Any) -> Any:
            carry, y = f(carry, x)
            y_trees.append(_Tree(jax.tree.map(jnp.asarray, y)))
            return carry, y

        x = jax.tree.map(lambda a: shaped(a.shape[1:], a.dtype), xs)
        closed, (carry, y_like) = jax.make_jaxpr(traced, return_shape=True)(init, x)
        if _differ(init, carry):
            init = jax.tree.map(_promoted, init, carry)
            y_trees.clear()
            closed, (carry, y_like) = jax.make_jaxpr(traced, return_shape=True)(init, x)
        _require_alike(init, carry)
        init = jax.tree.map(_strong, init)
        if any(not isinstance(jax.typeof(one), jax.core.ShapedArray) for one in closed.consts):
            raise ArgumentError("f closes over a mutable Ref; return what it would hold as a y")
        const_tree, carry_tree, x_tree = _Tree(tuple(closed.consts)), _Tree(init), _Tree(xs)
        made = cls(
            closed,
            const_tree,
            carry_tree,
            x_tree,
            y_trees[0],
            y_like,
            const_tree.raw(tuple(map(jnp.asarray, closed.consts))),
            carry_tree.raw(init),
            x_tree.raw(xs),
            n,
            backwards,
        )
        return made, init

    def step(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Return the carry and the y of a step."""
        given = (*self.carry_tree.leaves(carry), *self.x_tree.leaves(x))
        made = jax.core.eval_jaxpr(self.closed.jaxpr, self.const_tree.leaves(consts), *given)
        count = len(carry)
        after = tuple(
            lax.convert_element_type(_raw(one), like.dtype)
            for one, like in zip(made[:count], carry, strict=True)
        )
        return after, tuple(_raw(jnp.asarray(one)) for one in made[count:])

    def row(self, arrays: Arrays, i: jax.Array) -> Arrays:
        """Return what step i is given, of xs or of the gradients of ys."""
        return _row(arrays, self._at(i))

    def put(self, arrays: Arrays, row: Arrays, i: jax.Array) -> Arrays:
        """Return ys, or gradients of xs, with those of step i."""
        return _put(arrays, row, self._at(i))

    def _at(self, i: jax.Array) -> jax.Array:
        return self.steps - 1 - i if self.backwards else i

    def blank(self) -> Arrays:
        """Return zeros for the ys of all steps."""
        x = tuple(shaped(a.shape[1:], a.dtype) for a in self.xs)
        _, y = jax.eval_shape(self.step, self.consts, self.carry, x)
        return tuple(jnp.zeros((self.steps, *one.shape), one.dtype) for one in y)

    def block(
        self, given: tuple[Arrays, Arrays], first: Any, stop: Any, made: tuple[Arrays, Arrays]
    ) -> tuple[Arrays, Arrays]:
        """Run steps first..stop-1 from a carry; return the carry after them and the ys."""
        consts, xs = given

        def go(i: jax.Array, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            carry, y = self.step(consts, made[0], self.row(xs, i))
            return carry, self.put(made[1], y, i)

        found: tuple[Arrays, Arrays] = lax.fori_loop(first, stop, go, made)
        return found

    def run(self, site: Callable[[Arrays], Site]) -> tuple[Arrays, Arrays]:
        """Return the last carry and the ys, with a gradient.

        `site(residuals)` is asked for only where there is to be one.
        """
        pullbacks: list[tuple[_Pullback, int]] = []

        def plain(consts: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            return self.block((consts, xs), 0, self.steps, (carry, self.blank()))

        def forward(consts: Arrays, carry: Arrays, xs: Arrays) -> Any:
            pullback = _Pullback.of(self)
            made = site(pullback.like)
            pullbacks[:] = [(pullback, made.most_every)]
            return _forward(self, made, consts, carry, xs)

        def backward(kept: Any, cotangents: Any) -> Any:
            return _reverse(self, *pullbacks[0], kept, cotangents)

        whole: Any = jax.custom_vjp(plain)
        whole.defvjp(forward, backward)
        found: tuple[Arrays, Arrays] = whole(self.consts, self.carry, self.xs)
        return found


def _require_alike(init: Any, carry: Any) -> None:
    """Raise TypeError if the carry that a step returns is of another type than its own."""
    before, after = (cast(Any, jax.tree.structure(tree)) for tree in (init, carry))
    if before != after:
        raise TypeError(f"f returns a carry of structure {after}, it is given one of {before}")
    leaves = jax.tree_util.tree_leaves_with_path(init)
    for (path, one), other in zip(leaves, jax.tree.leaves(carry), strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise TypeError(
                f"f returns {other.dtype}{list(other.shape)} for the carry's leaf "
                f"{jax.tree_util.keystr(path) or 'itself'}, which is {one.dtype}{list(one.shape)}"
            )


@dataclass(frozen=True, slots=True)
class _Pullback:
    """What the gradient of a step is computed from: residuals, as `jax.lax.scan` keeps them.

    Attributes
    ----------
    loop : _Loop
    structure : PyTreeDef
        Of the pullback.
    moving : tuple of bool
        Of each of its leaves, whether it differs from step to step.
    like : tuple of ShapeDtypeStruct
        Those that do.
    """

    loop: _Loop
    structure: Any
    moving: tuple[bool, ...]
    like: tuple[Any, ...]

    @classmethod
    def of(cls, loop: _Loop) -> _Pullback:
        """Return what the gradients of a loop's steps are computed from."""
        x = tuple(shaped(a.shape[1:], a.dtype) for a in loop.xs)
        structures: list[Any] = []

        def leaves(consts: Arrays, carry: Arrays, x: Arrays) -> list[Any]:
            found, structure = jax.tree.flatten(_pulled(loop, consts, carry, x)[1])
            structures.append(structure)
            return found

        jaxpr = jax.make_jaxpr(leaves)(loop.consts, loop.carry, x).jaxpr
        moving = set(map(id, jaxpr.invars[len(loop.consts) :]))
        for equation in jaxpr.eqns:
            if any(id(var) in moving for var in equation.invars):
                moving.update(map(id, equation.outvars))
        flags = tuple(id(var) in moving for var in jaxpr.outvars)
        like = tuple(
            shaped(var.aval.shape, var.aval.dtype)
            for var, moves in zip(jaxpr.outvars, flags, strict=True)
            if moves
        )
        return cls(loop, structures[0], flags, like)

    def fixed(self, consts: Arrays) -> list[Any]:
        """Return the leaves that are those of every step, None in place of the others."""
        x = tuple(jnp.zeros(a.shape[1:], a.dtype) for a in self.loop.xs)
        _, pulled = _pulled(self.loop, consts, tuple(map(jnp.zeros_like, self.loop.carry)), x)
        leaves = zip(jax.tree.leaves(pulled), self.moving, strict=True)
        return [None if moves else leaf for leaf, moves in leaves]

    def residuals(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Return the carry after a step, and the leaves that differ from step to step."""
        after, pulled = _pulled(self.loop, consts, carry, x)
        leaves = zip(jax.tree.leaves(pulled), self.moving, strict=True)
        found = tuple(leaf for leaf, moves in leaves if moves)
        assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in self.like]
        return after, found

    def pulled(self, fixed: list[Any], residuals: Arrays) -> Any:
        """Return the pullback of a step."""
        left = iter(residuals)
        leaves = zip(fixed, self.moving, strict=True)
        return self.structure.unflatten([next(left) if moves else leaf for leaf, moves in leaves])


def _pulled(loop: _Loop, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Any]:
    """Return the carry after a step, and its pullback."""

    def varied(consts_: Arrays, carry_: Arrays, x_: Arrays) -> Any:
        after, y = loop.step(_merged(consts_, consts), _merged(carry_, carry), _merged(x_, x))
        return (_varying(after), _varying(y)), after

    _, pulled, after = jax.vjp(varied, _varying(consts), _varying(carry), _varying(x), has_aux=True)
    return after, pulled


def _stop(b: jax.Array, every: jax.Array, n: int) -> jax.Array:
    """Return where block b ends; (b + 1) * every may be more than 32 bits hold."""
    return b * every + jnp.minimum(every, n - b * every)


def _forward(
    loop: _Loop, site: Site, consts: Arrays, carry: Arrays, xs: Arrays
) -> tuple[tuple[Arrays, Arrays], Any]:
    """Run all steps, the state before each block saved; return what the reverse sweep needs."""
    run, every = site.begin((*consts, *carry, *xs))
    n = loop.steps

    def go(b: jax.Array, made: Any) -> Any:
        token, witness, carry, ys = made
        token, witness = save(run, token, b, witness, carry)
        stop = _stop(b, every, n)
        return token, witness, *loop.block((consts, xs), b * every, stop, (carry, ys))

    started = (jnp.uint32(0), jnp.zeros(()), carry, loop.blank())
    token, witness, last, ys = lax.fori_loop(0, -(-n // every), go, started)
    return (last, ys), (run, every, token, witness, consts, xs)


def _reverse(
    loop: _Loop, pullback: _Pullback, most_every: int, kept: Any, cotangents: Any
) -> tuple[Any, Any, Any]:
    """Return the gradients by what f closes over, by state 0 and by the inputs."""
    run, every, token, witness, consts, xs = kept
    like, n = loop.carry, loop.steps
    given = tuple(one for one, a in zip(cotangents[0], like, strict=True) if _varies(a))
    given_y = tuple(a for a in cotangents[1] if a.dtype != jax.dtypes.float0)
    blocks = -(-n // every)

    fixed = pullback.fixed(consts)

    def run_on(i: jax.Array, carry: Arrays) -> Arrays:
        return loop.step(consts, carry, loop.row(xs, i))[0]

    def turned(j: jax.Array, made: Any) -> Any:
        token, adjoint, total, x_adjoints, residuals = made
        b = blocks - 1 - j
        first, stop = b * every, _stop(b, every, n)
        token, found, carry = load(run, token, b, witness, like)
        carry = lax.fori_loop(found * every, first, run_on, carry)  # none if it was there

        def again(i: jax.Array, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            carry, residuals = made
            carry, more = pullback.residuals(consts, carry, loop.row(xs, i))
            return carry, _put(residuals, more, i - first)

        _, residuals = lax.fori_loop(first, stop, again, (carry, residuals))

        def back(m: jax.Array, made: Any) -> Any:
            adjoint, total, x_adjoints = made
            i = stop - 1 - m
            pulled = pullback.pulled(fixed, _row(residuals, i - first))
            more, adjoint, x_adjoint = pulled((adjoint, loop.row(given_y, i)))
            total = tuple(a + b for a, b in zip(total, more, strict=True))
            return adjoint, total, loop.put(x_adjoints, x_adjoint, i)

        done = lax.fori_loop(0, stop - first, back, (adjoint, total, x_adjoints))
        return token, *done, residuals

    zeros = tuple(map(jnp.zeros_like, _varying(consts))), tuple(map(jnp.zeros_like, _varying(xs)))
    residuals = tuple(jnp.zeros((most_every, *a.shape), a.dtype) for a in pullback.like)
    started = (token, given, *zeros, residuals)
    _, adjoint, total, x_adjoints, _ = lax.fori_loop(0, blocks, turned, started)

    def none(_: Any) -> None:
        return None

    return _merged(total, consts, none), _merged(adjoint, like, none), _merged(x_adjoints, xs, none)
