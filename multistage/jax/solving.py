"""`MultistageAdjoint`: the loop of `diffrax.diffeqsolve`, in blocks as those of `scan`.

A loop of unknown length: its program asks before each step whether it goes on, in the forward
sweep and, of a batch, for each member.  Large arrays that a step only writes a row of, such as
`ys`, are no part of the state: each row is written once, so that the gradient of what is written
is read where it was.

Of what diffrax's loop takes, only that has a gradient on which one was asked for, directly or
through other parts of its state: times, for one, may have none.  JAX is asked for that, by a
function whose own derivative sees which of its arguments have a tangent.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..backends.urls import TierName
from ..errors import ArgumentError
from ..model.budget import Budget
from .handlers import Arrays, most, new_site, opened, require_unmapped, save, shaped, typed, wide
from .pullbacks import (
    MOST_STEPS,
    Flags,
    Pullback,
    Tree,
    _chosen,
    _exchanged,
    _instantiated,
    _settled,
    put,
    raw,
    row,
    site_of,
    stop_of,
    strong,
    varies,
)

_TESTED = {"diffrax": "0.7", "equinox": "0.13"}


def _require_tested() -> None:
    """Raise ArgumentError unless diffrax and equinox are installed, in versions that are tested."""
    extra = "pip install 'multistage-checkpointing[diffrax]'"
    for name, tested in _TESTED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise ArgumentError(f"MultistageAdjoint needs {name}; {extra}") from error
        if found.split(".")[:2] != tested.split("."):
            raise ArgumentError(
                f"MultistageAdjoint was tested with {name} {tested}, which it takes the loop of; "
                f"{found} is installed; {extra}, or use diffrax.RecursiveCheckpointAdjoint"
            )


_require_tested()

import diffrax  # noqa: E402 - of a version that is known
import equinox as eqx  # noqa: E402
import equinox.internal as eqxi  # noqa: E402

# --- members of a batch, which may end at different steps -------------------------------------


@custom_vmap
def _any(going: jax.Array) -> jax.Array:
    """Whether a loop goes on for any member of a batch."""
    return going


@_any.def_vmap
def _any_batch(_size: int, _batched: object, going: jax.Array) -> tuple[Any, bool]:
    return _any(going.any(0)), False


@custom_vmap
def _kept(going: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """Return the new arrays, of the members of a batch that the loop has ended for the old."""
    return new


@_kept.def_vmap
def _kept_batch(size: int, batched: Any, going: jax.Array, new: Arrays, old: Arrays) -> Any:
    if not batched[0] and batched[1] == batched[2]:
        return _kept(going, new, old), batched[1]

    new, old = wide(size, batched[1], new), wide(size, batched[2], old)
    if not batched[0]:
        return _kept(going, new, old), (True,) * len(new)
    chosen = (
        jnp.where(going.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        for a, b in zip(new, old, strict=True)
    )
    return tuple(chosen), (True,) * len(new)


# --- arrays that steps write rows of -----------------------------------------------------------


@jax.custom_vjp
def _written(array: jax.Array, i: jax.Array, x: jax.Array, going: jax.Array) -> jax.Array:
    return array.at[i].set(_kept(going, (x,), (array[i],))[0])


def _written_forward(array: Any, i: Any, x: Any, going: Any) -> tuple[jax.Array, Any]:
    return _written(array, i, x, going), (i, going)


def _written_back(kept: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    """Leave the row where it is, since none is written twice, and so no gradient read twice."""
    i, going = kept
    of_row = cotangent[i]
    return cotangent, None, _kept(going, (of_row,), (jnp.zeros_like(of_row),))[0], None


_written.defvjp(_written_forward, _written_back)


class _Buffer(eqx.Module):
    """An array that a step writes rows of, as `array.at[i].set(x)`; each once, and reads none."""

    array: Any  # or what a loop inside the step makes of it
    going: Any

    @property
    def at(self) -> _At:
        return _At(self)


def _is_buffer(one: object) -> bool:
    return isinstance(one, _Buffer)


@dataclass(frozen=True, slots=True)
class _At:
    buffer: _Buffer
    i: Any = None

    def __getitem__(self, i: Any) -> _At:
        return _At(self.buffer, i)

    def get(self) -> jax.Array:
        """Return what is there, to be written again where nothing is to be."""
        made: jax.Array = lax.stop_gradient(self.buffer.array[self.i])
        return made

    def set(self, x: Any) -> _Buffer:
        array, going = self.buffer.array, self.buffer.going
        if not isinstance(array, jax.Array):
            return _Buffer(array.at[self.i].set(x, pred=going), going)
        x = jnp.broadcast_to(jnp.asarray(x, array.dtype), array.shape[1:])
        if varies(array):
            return _Buffer(_written(array, self.i, x, going), going)
        return _Buffer(array.at[self.i].set(_kept(going, (x,), (array[self.i],))[0]), going)


# --- the loop ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _While:
    """A loop: whether it goes on, and its step, as functions of what its program takes."""

    cond: Any
    body: Any
    n_cond: int
    const_tree: Tree
    carry_tree: Tree
    most_steps: int
    buffers: tuple[Any, ...]

    def going(self, consts: Arrays, carry: Arrays) -> jax.Array:
        """Return whether there is another step, of a batch for each member."""
        given = (*self.carry_tree.leaves(carry), *self.blank())
        some = self.const_tree.leaves(consts)[: self.n_cond]
        found: jax.Array = jax.core.eval_jaxpr(self.cond, some, *given)[0]
        return found

    def blank(self) -> Arrays:
        """Return buffers for steps whose rows are not asked for."""
        return tuple(jnp.zeros(a.shape, a.dtype) for a in self.buffers)

    def step(
        self, going: jax.Array, consts: Arrays, carry: Arrays, buffers: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Return the carry and the buffers after a step, of a member that has ended anything."""
        given = (going, *self.carry_tree.leaves(carry), *buffers)
        some = self.const_tree.leaves(consts)[self.n_cond :]
        made = tuple(
            lax.convert_element_type(raw(jnp.asarray(one)), like.dtype)
            for one, like in zip(
                jax.core.eval_jaxpr(self.body, some, *given), (*carry, *buffers), strict=True
            )
        )
        return made[: len(carry)], made[len(carry) :]

    def run(
        self, first: Any, stop: Any, consts: Arrays, carry: Arrays, buffers: Arrays
    ) -> tuple[jax.Array, Arrays, Arrays]:
        """Run steps from first until stop or the end; return how many were done, and after them."""

        def more(made: Any) -> jax.Array:
            return jnp.logical_and(made[0] < stop, _any(self.going(consts, made[1])))

        def go(made: Any) -> Any:
            i, carry, buffers = made
            going = self.going(consts, carry)
            after, buffers = self.step(going, consts, carry, buffers)
            return i + 1, _kept(going, after, carry), buffers

        found: tuple[jax.Array, Arrays, Arrays] = lax.while_loop(
            more, go, (jnp.int32(first), carry, buffers)
        )
        return found

    def moved(
        self, arrays: Any, consts: Flags, carry: Flags, buffers: Flags
    ) -> tuple[Flags, Flags]:
        """Return which parts of a state have a gradient at some step, from those at the first."""
        n_consts, n_carry = len(consts), len(carry)

        def flat(*given: Any) -> Sequence[Any]:
            consts, carry = given[:n_consts], given[n_consts : n_consts + n_carry]
            going = self.going(consts, carry)
            after, buffers = self.step(going, consts, carry, given[n_consts + n_carry :])
            return (*after, *buffers)

        given, *state = arrays
        found = _settled(flat, given, sum(state, ()), consts, carry + buffers)
        return found[:n_carry], found[n_carry:]

    def pull(
        self, flags: tuple[Flags, Flags, Flags], consts: Arrays, carry: Arrays
    ) -> tuple[Arrays, Any]:
        """Return the carry after a step, and its pullback, beside whether there was a step."""
        going, blank = self.going(consts, carry), self.blank()

        def varied(some: Arrays, carry_: Arrays, buffers: Arrays) -> Any:
            after, made = self.step(
                going,
                _exchanged(some, consts, flags[0]),
                _exchanged(carry_, carry, flags[1]),
                _exchanged(buffers, blank, flags[2]),
            )
            return (_chosen(after, flags[1]), _chosen(made, flags[2])), after

        given = map(_chosen, (consts, carry, blank), flags)
        _, pulled, after = jax.vjp(varied, *given, has_aux=True)
        return _kept(going, after, carry), (going, pulled)


def _while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None,
    buffers: Callable[[Any], Any],
    memory: Budget,
    tier: tuple[str, int],
) -> Any:
    """Return the last state of a loop, as `equinox.internal.while_loop` does, with a gradient."""
    structure: Any
    leaves, structure = jax.tree.flatten(init_val)
    marks = eqx.tree_at(
        lambda state: jax.tree.leaves(buffers(state)),
        structure.unflatten([False] * len(leaves)),
        replace_fn=lambda _: True,
    )
    is_buffer: Flags = tuple(jax.tree.leaves(marks))
    leaves = list(map(strong, leaves))
    of_carry = tuple(not flag for flag in is_buffer)
    carry, rows = _chosen(leaves, of_carry), _chosen(leaves, is_buffer)

    def state(going: Any, given: Sequence[Any]) -> Any:
        held = [_Buffer(array, going) for array in given[len(carry) :]]
        return structure.unflatten(_exchanged(given, _exchanged(held, leaves, is_buffer), of_carry))

    def cond(*given: Any) -> jax.Array:
        return jnp.asarray(cond_fun(state(True, given)))

    def body(going: Any, *given: Any) -> list[Any]:
        made: list[Any]
        after: Any
        made, after = jax.tree.flatten(body_fun(state(going, given)), is_leaf=_is_buffer)
        assert after == structure
        return [
            *map(strong, _chosen(made, of_carry)),
            *(one.array for one in _chosen(made, is_buffer)),
        ]

    given = carry + rows
    cond_jaxpr: Any = jax.make_jaxpr(cond)(*given)
    body_jaxpr: Any = jax.make_jaxpr(body)(jnp.bool_(True), *given)
    consts = (*cond_jaxpr.consts, *body_jaxpr.consts)
    const_tree, carry_tree = Tree(consts), Tree(carry)
    loop = _While(
        cond_jaxpr.jaxpr,
        body_jaxpr.jaxpr,
        len(cond_jaxpr.consts),
        const_tree,
        carry_tree,
        MOST_STEPS if max_steps is None else min(max_steps, MOST_STEPS),
        tuple(shaped(a.shape, a.dtype) for a in rows),
    )
    raw_consts = const_tree.raw(tuple(map(jnp.asarray, consts)))
    last, rows = _solved(loop, memory, tier, raw_consts, carry_tree.raw(carry), rows)
    return structure.unflatten(
        _exchanged(carry_tree.leaves(last), _exchanged(rows, leaves, is_buffer), of_carry)
    )


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Sweep:
    """A loop that has run forward, which of its arrays have a gradient, and what from.

    JAX may trace the forward sweep for other gradients in between, as an outer loop does that
    asks what has one, and gives the reverse sweep what the last trace has returned.  So a
    reverse sweep takes the gradients that any trace was asked for.
    """

    loop: _While
    flags: tuple[Flags, Flags, Flags]
    pullback: Pullback
    memory: Budget
    tier: tuple[str, int]
    number: int
    traced: list[_Sweep]


def _solved(
    loop: _While,
    memory: Budget,
    tier: tuple[str, int],
    consts: Arrays,
    carry: Arrays,
    buffers: Arrays,
) -> tuple[Arrays, Arrays]:
    """Return the last carry and the buffers, with a gradient."""
    traced: list[_Sweep] = []
    number = new_site()

    def plain(consts: Arrays, carry: Arrays, buffers: Arrays) -> tuple[Arrays, Arrays]:
        return loop.run(0, loop.most_steps, consts, carry, buffers)[1:]

    def forward(*given: Any) -> Any:
        consts, first, buffers = arrays = tuple(tuple(a.value for a in some) for some in given)
        require_unmapped((*consts, *first))
        asked: tuple[Any, ...] = tuple(
            tuple(a.perturbed and varies(a.value) for a in some) for some in given
        )
        flags = asked[0], *loop.moved(arrays, *asked)
        pullback = Pullback.of(partial(loop.pull, flags), consts, first)
        site = site_of(tier, memory, first, pullback.like, loop.most_steps, number)
        run, every = site.begin((*consts, *first))

        def more(made: Any) -> jax.Array:
            done, b, carry = made[0], made[1], made[4]
            goes_on = (done < loop.most_steps) & _any(loop.going(consts, carry))
            # State 0 is saved always: its load ends the run.
            return jnp.logical_or(b == 0, goes_on)

        def go(made: Any) -> Any:
            _, b, token, witness, carry, buffers = made
            token, witness = save(run, token, b, witness, carry)
            stop = stop_of(b, every, loop.most_steps)
            done, carry, buffers = loop.run(b * every, stop, consts, carry, buffers)
            return done, b + 1, token, witness, carry, buffers

        zero = jnp.int32(0)
        started = zero, zero, jnp.uint32(0), jnp.zeros(()), first, buffers
        n, _, token, witness, last, buffers = lax.while_loop(more, go, started)
        sweep = _Sweep(loop, flags, pullback, memory, tier, number, traced)
        traced.append(sweep)
        # No other branch of a batch has numbers of that shape.
        kept = sweep, run, n.reshape(1, 1, 1, 1), token, witness, consts, first
        return (last, buffers), kept

    whole: Any = jax.custom_vjp(plain)
    whole.defvjp(forward, _reverse, symbolic_zeros=True)
    found: tuple[Arrays, Arrays] = whole(consts, carry, buffers)
    return found


def _reverse(kept: Any, cotangents: Any) -> tuple[Any, ...]:
    """Return the gradients by what the loop closes over, by its first state and its buffers."""
    sweep, run, n, token, witness, consts, first_carry = kept
    loop, like = sweep.loop, sweep.pullback.given[0]
    of_all = zip(*(one.flags for one in sweep.traced), strict=True)
    flags: Any = tuple(tuple(map(any, zip(*some, strict=True))) for some in of_all)
    pullback = Pullback.of(partial(loop.pull, flags), consts, like)
    site = site_of(sweep.tier, sweep.memory, like, pullback.like, loop.most_steps, sweep.number)
    run, every, token = site.turn(run, token)
    # As many as any branch of a batch; steps after the last do nothing.
    n = jnp.where(every > 0, jnp.clip(most(n).sum(), 0, loop.most_steps), 0)
    every = jnp.maximum(every, 1)
    blocks = jnp.maximum(-(-n // every), 1)
    given, of_rows = map(_instantiated, map(_chosen, cotangents, flags[1:]))
    fixed = pullback.fixed(consts)

    def run_on(k: jax.Array, made: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        token, carry = made
        first, stop = k * every, (k + 1) * every
        _, last, _ = loop.run(first, stop, consts, carry, loop.blank())
        return save(run, token, k + 1, witness, last)[0], last

    def turned(j: jax.Array, made: Any) -> Any:
        token, adjoint, total, residuals = made
        b = blocks - 1 - j
        first, stop = b * every, stop_of(b, every, n)
        numbers = run, token, b, n, every
        token, found, carry = site.load(numbers, witness, typed(first_carry, like))
        token, carry = lax.fori_loop(found, b, run_on, (token, carry))  # none if it was there

        def again(i: jax.Array, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            carry, more = pullback.residuals(consts, made[0])
            return carry, put(made[1], more, i - first)

        _, residuals = lax.fori_loop(first, stop, again, (carry, residuals))

        def back(m: jax.Array, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            adjoint, total = made
            step: Any = pullback.pulled(fixed, row(residuals, stop - 1 - m - first))
            going, pulled = step
            more, before, _ = pulled((adjoint, of_rows))
            more = _kept(going, more, tuple(map(jnp.zeros_like, more)))
            total = tuple(a + b for a, b in zip(total, more, strict=True))
            return _kept(going, before, adjoint), total

        done = lax.fori_loop(0, stop - first, back, (adjoint, total))
        return token, *done, residuals

    zeros = tuple(map(jnp.zeros_like, _chosen(consts, flags[0])))
    started = token, given, zeros, pullback.blank(site.most_every)
    _, adjoint, total, _ = lax.fori_loop(0, blocks, turned, started)
    gradients = total, adjoint, of_rows
    return tuple(
        _exchanged(a, (None,) * len(some), some) for a, some in zip(gradients, flags, strict=True)
    )


def _inner_loop(
    cond: Any,
    body: Any,
    init: Any,
    *,
    buffers: Callable[[Any], Any],
    max_steps: int,
    checkpoints: int,  # one for each time
) -> Any:
    """Run a loop inside of a step, over the times that it saves at.

    It is run again for its gradient: a step that kept what that is computed from would keep a
    state for each time, and all rows.
    """
    del checkpoints

    def arrays(state: Any) -> list[Any]:
        found = jax.tree.leaves(buffers(state), is_leaf=_is_buffer)
        return [one.array if _is_buffer(one) else one for one in found]

    def run(state: Any) -> Any:
        options: Any = {"max_steps": max_steps, "kind": "checkpointed"}
        return eqxi.while_loop(cond, body, state, buffers=arrays, **options)

    return jax.checkpoint(run, prevent_cse=False)(init)


class MultistageAdjoint(diffrax.AbstractAdjoint):
    """The gradient of a solve of diffrax, within a memory budget, states on a slow tier.

    For `diffrax.diffeqsolve(..., adjoint=MultistageAdjoint(memory=, tiers=))`: in place of
    `diffrax.RecursiveCheckpointAdjoint`, whose gradient it has up to rounding.  Each step is run
    twice, whatever their number; `max_steps` may be None.

    Parameters
    ----------
    memory, tiers
        As for `scan`.  Rows of `ys` and of a dense solution are not counted.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        As `scan` does, before the program runs; with versions of diffrax or equinox that are not
        tested; for an `UnsafeBrownianPath`, whose values are not the same when a step is run again.

    Notes
    -----
    Reverse mode, once, as for `scan`.  A progress meter is an error where there is a gradient.

    Examples
    --------
    >>> import diffrax, jax, jax.numpy as jnp
    >>> def loss(y0):
    ...     solution = diffrax.diffeqsolve(
    ...         diffrax.ODETerm(lambda t, y, args: -y), diffrax.Tsit5(), 0.0, 1.0, 0.01, y0,
    ...         adjoint=MultistageAdjoint(memory="1 MiB", tiers="memory:"),
    ...     )
    ...     return solution.ys[0]
    >>> print(f"{jax.grad(loss)(1.0):.4f}")
    0.3679
    """

    memory: Budget | int | str = eqx.field(static=True, kw_only=True)
    tiers: TierName = eqx.field(static=True, kw_only=True)

    def loop(
        self,
        *,
        terms: object,
        init_state: object,
        max_steps: int | None,
        throw: bool,
        passed_solver_state: bool,
        passed_controller_state: bool,
        **rest: object,
    ) -> object:
        """Solve, as diffrax asks for it."""

        def is_path(one: object) -> bool:
            return isinstance(one, diffrax.UnsafeBrownianPath)

        if any(map(is_path, jax.tree.leaves(terms, is_leaf=is_path))):
            raise ArgumentError(
                "MultistageAdjoint runs steps again, an UnsafeBrownianPath would be another then; "
                "use diffrax.VirtualBrownianTree"
            )
        options: Any = {"memory": Budget.parse(self.memory), "tier": opened(self.tiers)}
        return self._loop(
            terms=terms,
            init_state=init_state,
            max_steps=max_steps,
            inner_while_loop=_inner_loop,
            outer_while_loop=partial(_while_loop, **options),
            **rest,
        )
