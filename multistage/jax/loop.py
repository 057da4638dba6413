"""The loop of `scan`, and its program: blocks of steps, the states before which go to a tier.

The forward sweep saves the state before each block.  The reverse sweep loads it and runs the
block again, keeping in memory what the gradient of each step is computed from; then it turns the
block step by step.  So a step is run twice.  A state that is missing is made from the last one
there is, by running again from there; those on the way are saved again.

A step's gradient is computed as `jax.lax.scan` does it, from the same residuals: XLA compiles the
same operations, and rounds alike.

How many steps a block has is decided as the program begins to run, by the times that the runs
before it have shown (`interval` of `native/loop.c`); the program has room for the most.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ..errors import ArgumentError, BudgetError
from .handlers import Arrays, Site, require_first, require_unmapped, save, shaped, typed
from .pullbacks import (
    Flags,
    Pullback,
    Tree,
    _chosen,
    _exchanged,
    _instantiated,
    _settled,
    is_weak,
    put,
    raw,
    row,
    stop_of,
    strong,
    varies,
    weakened,
)

# One function for all loops: JAX keeps an entry for each that `jax.eval_shape` is given.
_raw_like: Any = cast(Any, jax.jit(raw)).eval_shape

# From the gradients by the last carry and the ys, zeros of JAX's among them, to those by what f
# closes over, state 0 and xs.
Reverse: TypeAlias = Callable[[tuple[Arrays, Arrays]], tuple[object, object, object]]


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


def _pair_of(made: object) -> tuple[Any, Any]:
    """Return what f has returned.  Raises TypeError if it is no pair."""
    if isinstance(made, tuple | list) and len(made) == 2:
        return made[0], made[1]
    told = f"{len(made)} things" if isinstance(made, tuple | list) else type(made).__name__
    raise TypeError(
        f"f returns {told}; it must return a pair, the carry and the y of a step, or None for none"
    )


def _as_arrays(tree: Any, what: str) -> Any:
    """Return a tree of arrays.  Raises TypeError, or ArgumentError for one that is gone."""

    def array(path: Any, leaf: Any) -> jax.Array:
        at = jax.tree_util.keystr(path)
        known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if known and leaf.is_deleted():
            raise ArgumentError(
                f"{what} holds an array{at and f' at {at}'} that was donated or deleted; pass what "
                "replaced it, or a copy"
            )
        try:
            return jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{what} holds a {type(leaf).__name__}{at and f' at {at}'}, which is no array of "
                "JAX; let f close over it"
            ) from error

    return jax.tree_util.tree_map_with_path(array, tree)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which arrays have a gradient: of what f closes over, the carry at any step, xs and ys.

    XLA rounds as for `jax.lax.scan` if no others are computed, of ys also those that are zero.
    """

    consts: Flags
    carry: Flags
    xs: Flags
    ys: Flags

    def by(self, ys: Sequence[Any]) -> _Asked:
        """Return the same, of the ys those whose gradients are not known to be zero."""
        known = (isinstance(a, SymbolicZero) or a.dtype == jax.dtypes.float0 for a in ys)
        return replace(self, ys=tuple(not zero for zero in known))

    def __or__(self, other: _Asked) -> _Asked:
        """Return the flags that one or the other has."""
        both = zip(astuple(self), astuple(other), strict=True)
        return _Asked(*(tuple(map(operator.or_, *pair)) for pair in both))


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop: what its program takes, and its step as a function of that.

    Attributes
    ----------
    jaxpr : Jaxpr
        Of f.
    consts, carry, xs : tuple of arrays
        What f closes over, state 0, and the inputs.
    y_like : tuple of ShapeDtypeStruct
        Shapes and dtypes of the y of a step.
    weak : tuple of bool
        Of each leaf of what f returns, whether its type is a weak one.
    steps : int
    backwards : bool
    """

    jaxpr: Any
    const_tree: Tree
    carry_tree: Tree
    x_tree: Tree
    y_tree: Tree
    consts: Arrays
    carry: Arrays
    xs: Arrays
    y_like: tuple[jax.ShapeDtypeStruct, ...]
    weak: tuple[bool, ...]
    steps: int
    backwards: bool

    @classmethod
    def of(cls, f: Callable[..., Any], init: Any, xs: Any, n: int, backwards: bool) -> _Loop:
        """Return the loop of `scan`, the weak types of state 0 as f makes them.

        Raises TypeError for a carry that changes its type otherwise.
        """
        y_trees = []

        def traced(carry: Any, x: Any) -> Any:
            carry, y = _pair_of(f(carry, x))
            _as_arrays(carry, "the carry that f returns")
            y_trees.append(Tree(_as_arrays(y, "the y that f returns")))
            return carry, y

        x = jax.tree.map(lambda a: shaped(a.shape[1:], a.dtype, weak=is_weak(jax.typeof(a))), xs)
        closed, (carry, _) = jax.make_jaxpr(traced, return_shape=True)(init, x)
        if _differ(init, carry):
            init = jax.tree.map(_promoted, init, carry)
            y_trees.clear()
            closed, (carry, _) = jax.make_jaxpr(traced, return_shape=True)(init, x)
        _require_alike(init, carry)
        init = jax.tree.map(strong, init)
        if any(not isinstance(jax.typeof(one), jax.core.ShapedArray) for one in closed.consts):
            raise ArgumentError("f closes over a mutable Ref; return what it would hold as a y")
        const_tree, carry_tree, x_tree = Tree(tuple(closed.consts)), Tree(init), Tree(xs)
        return cls(
            closed.jaxpr,
            const_tree,
            carry_tree,
            x_tree,
            y_trees[0],
            const_tree.raw(tuple(map(strong, closed.consts))),
            carry_tree.raw(init),
            x_tree.raw(jax.tree.map(strong, xs)),
            tuple(map(_raw_like, closed.out_avals[len(carry_tree.keys) :])),
            tuple(map(is_weak, closed.out_avals)),
            n,
            backwards,
        )

    def step(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Return the carry and the y of a step."""
        given = (*self.carry_tree.leaves(carry), *self.x_tree.leaves(x))
        made = jax.core.eval_jaxpr(self.jaxpr, self.const_tree.leaves(consts), *given)
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

    @property
    def x_like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of what a step is given of xs."""
        return tuple(shaped(a.shape[1:], a.dtype) for a in self.xs)

    def blank(self, rows: int) -> Arrays:
        """Return zeros for the ys of some steps."""
        return tuple(jnp.zeros((rows, *y.shape), y.dtype) for y in self.y_like)

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

    def onward(self, given: tuple[Arrays, Arrays], first: Any, stop: Any, carry: Arrays) -> Arrays:
        """Run steps first..stop-1 from a carry; return the carry after them."""
        consts, xs = given

        def go(i: jax.Array, carry: Arrays) -> Arrays:
            return self.step(consts, carry, self.row(xs, i))[0]

        found: Arrays = lax.fori_loop(first, stop, go, carry)
        return found

    def turn(
        self,
        pullback: Pullback,
        fixed: list[jax.Array | None],
        given: tuple[Arrays, Arrays, Arrays],
        block: tuple[Any, Any, Arrays],
        made: tuple[Arrays, Arrays, Arrays, Arrays],
    ) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Run the steps of a block again, then turn them one by one, the last one first.

        Parameters
        ----------
        pullback, fixed
            Of a step.
        given : tuple
            What f closes over, xs, and the gradients of ys.
        block : tuple
            Its first step, where it stops, and the carry before it.
        made : tuple
            The gradients so far: by the carry after the block, by what f closes over, by xs; and
            room for the residuals of its steps.

        Returns
        -------
        tuple
            The same, by the carry before the block.
        """
        (consts, xs, given_y), (first, stop, carry) = given, block
        adjoint, total, x_adjoints, residuals = made

        def again(i: jax.Array, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            carry, residuals = made
            carry, more = pullback.residuals(consts, carry, self.row(xs, i))
            return carry, put(residuals, more, i - first)

        _, residuals = lax.fori_loop(first, stop, again, (carry, residuals))

        def back(m: jax.Array, made: Any) -> Any:
            adjoint, total, x_adjoints = made
            i = stop - 1 - m
            pulled: Any = pullback.pulled(fixed, row(residuals, i - first))
            total, adjoint, x_adjoint = pulled((adjoint, self.row(given_y, i), total))
            return adjoint, total, self.put(x_adjoints, x_adjoint, i)

        done: Any = lax.fori_loop(0, stop - first, back, (adjoint, total, x_adjoints))
        return *done, residuals

    def asked(self, consts: Flags, carry: Flags, xs: Flags) -> _Asked:
        """Return which arrays have a gradient, from those of the loop's that one is asked by."""
        n_consts, n_carry = len(consts), len(carry)

        def flat(*given: jax.Array) -> Arrays:
            carry = given[-n_carry:] if n_carry else ()
            return self.step(given[:n_consts], carry, given[n_consts : len(given) - n_carry])[0]

        given: Any = *self.consts, *self.x_like
        found = _settled(flat, given, self.carry, consts + xs, carry)
        return _Asked(consts, found, xs, tuple(map(varies, self.y_like)))

    def pullback(self, asked: _Asked, consts: Arrays) -> Pullback:
        """Return what the gradient of a step is computed from."""
        return Pullback.of(partial(_pulled, self, asked), consts, self.carry, self.x_like)

    def made(self, carry: Arrays, ys: Arrays) -> Any:
        """Return the last state and the ys as f returns them, their weak types, too."""
        trees = self.carry_tree.tree(carry), self.y_tree.tree(ys)
        leaves: list[Any]
        structure: Any
        leaves, structure = jax.tree.flatten(trees)
        return structure.unflatten(map(weakened, leaves, self.weak))

    def run(
        self,
        site: Callable[[tuple[jax.ShapeDtypeStruct, ...]], Site],
        driven: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]],
        driven_forward: Callable[
            [tuple[Flags, Flags, Flags], Arrays, Arrays, Arrays],
            tuple[tuple[Arrays, Arrays], Reverse],
        ],
    ) -> tuple[Arrays, Arrays]:
        """Return the last carry and the ys, with a gradient.

        Parameters
        ----------
        site : callable
            `site(residuals)` returns where the loop is in a program that is traced.
        driven, driven_forward : callable
            Where none is, they run the loop: without a gradient, and to have one by the arrays that
            are flagged.
        """
        # JAX may trace the forward sweep for other gradients before it asks for the reverse sweep
        # of the first, so that this takes the gradients that any of them was asked for.
        traced: list[_Asked] = []
        reverses: list[Reverse] = []

        def plain(*given: Arrays) -> tuple[Arrays, Arrays]:
            if not _traced(given):
                return driven(*given)
            consts, carry, xs = given
            try:
                site(())
            except BudgetError:  # name what gradients take, which JAX may ask for next
                all_asked = self.asked(*(tuple(map(varies, some)) for some in given))
                site(self.pullback(all_asked, consts).like)
                raise
            return self.block((consts, xs), 0, self.steps, (carry, self.blank(self.steps)))

        def forward(*marked: Any) -> Any:
            given: Any = tuple(tuple(a.value for a in some) for some in marked)
            flags: Any = tuple(
                tuple(a.perturbed and varies(a.value) for a in some) for some in marked
            )
            if not _traced(given):
                found, reverse = driven_forward(flags, *given)
                reverses[:] = [reverse]
                return found, ()
            require_first(sum(given, ()))
            require_unmapped(sum(given, ()))
            asked = self.asked(*flags)
            traced.append(asked)
            return _forward(self, site(self.pullback(asked, given[0]).like), *given)

        def backward(kept: Any, cotangents: Any) -> Any:
            if not kept:
                return reverses[0](cotangents)
            asked = reduce(operator.or_, traced)
            place = site(self.pullback(asked, kept[-3]).like)
            return _reverse(self, asked.by(cotangents[1]), place, kept, cotangents)

        whole: Any = jax.custom_vjp(plain)
        whole.defvjp(forward, backward, symbolic_zeros=True)
        found: tuple[Arrays, Arrays] = whole(self.consts, self.carry, self.xs)
        return found


def _is_of_loop(jaxpr: Any) -> bool:
    """Whether a Jaxpr with a derivative of its own is that of a loop in a step."""
    return f" at {__file__}:" in str(jaxpr.debug_info.func_src_info)


def _traced(given: tuple[Arrays, ...]) -> bool:
    """Whether there are arrays whose values are not known, as in a program that is compiled."""
    return any(isinstance(array, jax.core.Tracer) for arrays in given for array in arrays)


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


def _pulled(
    loop: _Loop, asked: _Asked, consts: Arrays, carry: Arrays, x: Arrays
) -> tuple[Arrays, Any]:
    """Return the carry after a step, and its pullback.

    This takes the gradients so far by what f closes over as those by the same that a step returns,
    so that those of its parts are added to them one by one, as in `jax.lax.scan`.
    """

    def varied(consts_: Arrays, carry_: Arrays, x_: Arrays) -> Any:
        after, y = loop.step(
            _exchanged(consts_, consts, asked.consts),
            _exchanged(carry_, carry, asked.carry),
            _exchanged(x_, x, asked.xs),
        )
        return (_chosen(after, asked.carry), _chosen(y, asked.ys), consts_), after

    given = map(_chosen, (consts, carry, x), (asked.consts, asked.carry, asked.xs))
    _, pulled, after = jax.vjp(varied, *given, has_aux=True)
    return after, pulled


def zeros_of(arrays: Arrays, flags: Flags) -> Arrays:
    """Return what gradients by some arrays begin with."""
    return tuple(map(jnp.zeros_like, _chosen(arrays, flags)))


def gradients(
    asked: _Asked, total: Arrays, adjoint: Arrays, x_adjoints: Arrays
) -> tuple[object, object, object]:
    """Return gradients by what f closes over, state 0 and xs: None where there are none."""
    by_consts, by_carry, by_xs = (
        _exchanged(some, (None,) * len(flags), flags)
        for some, flags in zip(
            (total, adjoint, x_adjoints), (asked.consts, asked.carry, asked.xs), strict=True
        )
    )
    return by_consts, by_carry, by_xs


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

    started = (jnp.uint32(0), jnp.zeros(()), carry, loop.blank(n))
    token, witness, last, ys = lax.fori_loop(0, -(-n // every), go, started)
    return (last, ys), (run, token, witness, consts, carry, xs)


def _reverse(
    loop: _Loop, asked: _Asked, site: Site, kept: Any, cotangents: Any
) -> tuple[object, object, object]:
    """Return the gradients by what f closes over, by state 0 and by the inputs."""
    run, token, witness, consts, first_carry, xs = kept
    like = loop.carry
    run, every, token = site.turn(run, token)
    n = jnp.where(every > 0, jnp.int32(loop.steps), jnp.int32(0))
    every = jnp.maximum(every, 1)
    given = _instantiated(_chosen(cotangents[0], asked.carry))
    given_y = _chosen(cotangents[1], asked.ys)
    blocks = jnp.maximum(-(-n // every), 1)

    pullback = loop.pullback(asked, consts)
    fixed = pullback.fixed(consts)

    def run_on(k: jax.Array, made: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        token, carry = made
        carry = loop.onward((consts, xs), k * every, (k + 1) * every, carry)
        return save(run, token, k + 1, witness, carry)[0], carry

    def turned(j: jax.Array, made: Any) -> Any:
        token, adjoint, total, x_adjoints, residuals = made
        b = blocks - 1 - j
        first, stop = b * every, stop_of(b, every, n)
        numbers = run, token, b, n, every
        token, found, carry = site.load(numbers, witness, typed(first_carry, like))
        token, carry = lax.fori_loop(found, b, run_on, (token, carry))  # none if it was there

        made = adjoint, total, x_adjoints, residuals
        return token, *loop.turn(pullback, fixed, (consts, xs, given_y), (first, stop, carry), made)

    zeros = zeros_of(consts, asked.consts), zeros_of(xs, asked.xs)
    started = (token, given, *zeros, pullback.blank(site.most_every))
    _, adjoint, total, x_adjoints, _ = lax.fori_loop(0, blocks, turned, started)
    return gradients(asked, total, adjoint, x_adjoints)
