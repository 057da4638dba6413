"""`scan`: a loop in blocks, the states before which go to a tier.

The forward sweep saves the state before each block.  The reverse sweep loads it and runs the
block again, keeping in memory what the gradient of each step is computed from; then it turns the
block step by step.  So a step is run twice.  A state that is missing is made from the last one
there is, by running again from there; those on the way are saved again.

A step's gradient is computed as `jax.lax.scan` does it, from the same residuals: XLA compiles the
same operations, and rounds alike.

How many steps a block has is decided as the program begins to run, by the times that the runs
before it have shown (I = ceil(T_T / T_A), see the package); the program has room for the most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.urls import TierName
from ..errors import ArgumentError
from ..model.budget import Budget
from .handlers import Arrays, Site, opened, require_unmapped, save, shaped
from .pullbacks import (
    Pullback,
    Tree,
    merged,
    put,
    raw,
    room,
    row,
    site_of,
    stop_of,
    strong,
    varies,
    varying,
)

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")

_MOST_STEPS = 2**31 - 1  # programs count steps in 32 bits


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
    Reverse mode, once: `jvp` and second derivatives are errors.  A second call of a pullback runs
    the loop again, as does `jax.checkpoint`.  `last_report` tells what a run did.

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
    tier = opened(tiers)
    budget = Budget.parse(memory)
    init = jax.tree.map(jnp.asarray, init)
    xs = jax.tree.map(jnp.asarray, xs)
    n = _length(xs, length)
    loop, init = _Loop.of(f, init, xs, n, reverse)
    room(budget, loop.carry, 1)
    if not n:
        return init, jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), loop.y_like)

    def site(residuals: tuple[jax.ShapeDtypeStruct, ...]) -> Site:
        return site_of(tier, budget, loop.carry, residuals, n)

    last, ys = loop.run(site)
    return cast(tuple[Carry, Y], (loop.carry_tree.tree(last), loop.y_tree.tree(ys)))


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
    const_tree: Tree
    carry_tree: Tree
    x_tree: Tree
    y_tree: Tree
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
            y_trees.append(Tree(jax.tree.map(jnp.asarray, y)))
            return carry, y

        x = jax.tree.map(lambda a: shaped(a.shape[1:], a.dtype), xs)
        closed, (carry, y_like) = jax.make_jaxpr(traced, return_shape=True)(init, x)
        if _differ(init, carry):
            init = jax.tree.map(_promoted, init, carry)
            y_trees.clear()
            closed, (carry, y_like) = jax.make_jaxpr(traced, return_shape=True)(init, x)
        _require_alike(init, carry)
        init = jax.tree.map(strong, init)
        if any(not isinstance(jax.typeof(one), jax.core.ShapedArray) for one in closed.consts):
            raise ArgumentError("f closes over a mutable Ref; return what it would hold as a y")
        const_tree, carry_tree, x_tree = Tree(tuple(closed.consts)), Tree(init), Tree(xs)
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
            lax.convert_element_type(raw(one), like.dtype)
            for one, like in zip(made[:count], carry, strict=True)
        )
        return after, tuple(raw(jnp.asarray(one)) for one in made[count:])

    def row(self, arrays: Arrays, i: jax.Array) -> Arrays:
        """Return what step i is given, of xs or of the gradients of ys."""
        return row(arrays, self._at(i))

    def put(self, arrays: Arrays, row: Arrays, i: jax.Array) -> Arrays:
        """Return ys, or gradients of xs, with those of step i."""
        return put(arrays, row, self._at(i))

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

    def run(
        self, site: Callable[[tuple[jax.ShapeDtypeStruct, ...]], Site]
    ) -> tuple[Arrays, Arrays]:
        """Return the last carry and the ys, with a gradient.

        `site(residuals)` is asked for only where there is to be one.
        """
        pullbacks: list[tuple[Pullback, Site]] = []

        def plain(consts: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
            return self.block((consts, xs), 0, self.steps, (carry, self.blank()))

        def forward(consts: Arrays, carry: Arrays, xs: Arrays) -> Any:
            require_unmapped((*consts, *carry, *xs))
            x = tuple(shaped(a.shape[1:], a.dtype) for a in self.xs)
            pullback = Pullback.of(partial(_pulled, self), consts, carry, x)
            made = site(pullback.like)
            pullbacks[:] = [(pullback, made)]
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


def _pulled(loop: _Loop, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Any]:
    """Return the carry after a step, and its pullback."""

    def varied(consts_: Arrays, carry_: Arrays, x_: Arrays) -> Any:
        after, y = loop.step(merged(consts_, consts), merged(carry_, carry), merged(x_, x))
        return (varying(after), varying(y)), after

    _, pulled, after = jax.vjp(varied, varying(consts), varying(carry), varying(x), has_aux=True)
    return after, pulled


def _forward(
    loop: _Loop, site: Site, consts: Arrays, carry: Arrays, xs: Arrays
) -> tuple[tuple[Arrays, Arrays], Any]:
    """Run all steps, the state before each block saved; return what the reverse sweep needs."""
    run, every = site.begin((*consts, *carry, *xs))
    n = loop.steps

    def go(b: jax.Array, made: Any) -> Any:
        token, witness, carry, ys = made
        token, witness = save(run, token, b, witness, carry)
        stop = stop_of(b, every, n)
        return token, witness, *loop.block((consts, xs), b * every, stop, (carry, ys))

    started = (jnp.uint32(0), jnp.zeros(()), carry, loop.blank())
    token, witness, last, ys = lax.fori_loop(0, -(-n // every), go, started)
    return (last, ys), (run, every, token, witness, consts, carry, xs)


def _reverse(
    loop: _Loop, pullback: Pullback, site: Site, kept: Any, cotangents: Any
) -> tuple[Any, Any, Any]:
    """Return the gradients by what f closes over, by state 0 and by the inputs."""
    run, every, token, witness, consts, first_carry, xs = kept
    like, n = loop.carry, loop.steps
    given = tuple(one for one, a in zip(cotangents[0], like, strict=True) if varies(a))
    given_y = tuple(a for a in cotangents[1] if a.dtype != jax.dtypes.float0)
    blocks = -(-n // every)

    fixed = pullback.fixed(consts)

    def step_on(i: jax.Array, carry: Arrays) -> Arrays:
        return loop.step(consts, carry, loop.row(xs, i))[0]

    def run_on(k: jax.Array, made: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        token, carry = made
        carry = lax.fori_loop(k * every, (k + 1) * every, step_on, carry)
        return save(run, token, k + 1, witness, carry)[0], carry

    def turned(j: jax.Array, made: Any) -> Any:
        token, adjoint, total, x_adjoints, residuals = made
        b = blocks - 1 - j
        first, stop = b * every, stop_of(b, every, n)
        numbers = run, token, b, jnp.int32(n), every
        token, found, carry = site.load(numbers, witness, first_carry)
        token, carry = lax.fori_loop(found, b, run_on, (token, carry))  # none if it was there

        def again(i: jax.Array, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            carry, residuals = made
            carry, more = pullback.residuals(consts, carry, loop.row(xs, i))
            return carry, put(residuals, more, i - first)

        _, residuals = lax.fori_loop(first, stop, again, (carry, residuals))

        def back(m: jax.Array, made: Any) -> Any:
            adjoint, total, x_adjoints = made
            i = stop - 1 - m
            pulled: Any = pullback.pulled(fixed, row(residuals, i - first))
            more, adjoint, x_adjoint = pulled((adjoint, loop.row(given_y, i)))
            total = tuple(a + b for a, b in zip(total, more, strict=True))
            return adjoint, total, loop.put(x_adjoints, x_adjoint, i)

        done = lax.fori_loop(0, stop - first, back, (adjoint, total, x_adjoints))
        return token, *done, residuals

    zeros = tuple(map(jnp.zeros_like, varying(consts))), tuple(map(jnp.zeros_like, varying(xs)))
    started = (token, given, *zeros, pullback.blank(site.most_every))
    _, adjoint, total, x_adjoints, _ = lax.fori_loop(0, blocks, turned, started)

    def none(_: Any) -> None:
        return None

    return merged(total, consts, none), merged(adjoint, like, none), merged(x_adjoints, xs, none)
