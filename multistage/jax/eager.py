"""`scan` outside of compiled programs: a `Reversal` runs the loop, a block of steps at a time.

A step of the reversal is a block of the loop's steps, one call of a compiled program, so that
what Python takes for it does not count.  A block is as long as the residuals of its steps fit
half the memory, or most of it where there is a tier; the rest is for states between blocks.
Nothing writes to arrays of JAX: a checkpoint in fast memory is a reference, and a store is given
NumPy's views of the bytes.

What is compiled serves all loops with the same jaxpr, wherever their functions were made: a
training step that is not compiled itself makes its closures anew each time.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.extend.core as jax_core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..backends.base import Store
from ..backends.urls import Tiers, open_store, tier_names
from ..errors import ArgumentError, BudgetError
from ..model.budget import Budget
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..planners import Plan, Planner
from ..reversal import Reversal
from ..states.layout import Array, Layout
from ..states.slots import Kept, Slots
from ..support.units import format_bytes
from .handlers import Arrays, remember
from .loop import Reverse, _Asked, _is_of_loop, _Loop, gradients, zeros_of
from .pullbacks import Flags, _chosen, _instantiated, nbytes, put, varies

_MOST_STEPS, _LEAST_BLOCKS = 1024, 16  # of a block; of a loop, for a tier to write beside
_FEW = 4  # states in memory, beside a tier
_BUFFERS = 8  # part of the memory that is for those of tiers, unless these say otherwise
_PROGRAMS = 64  # kept
_NO_STEPS = np.int32(0), np.int32(0)
_NOTHING = np.zeros(1, np.uint8)  # what a store has of a carry without arrays


def _fit(
    budget: Budget, state_bytes: int, step_bytes: int, buffers: Callable[[int], int], steps: int
) -> tuple[int, Budget]:
    """Return the steps of a block, and what is left for states.  Raises BudgetError.

    `buffers(limit)` are the bytes of the tiers' buffers within a limit.
    """
    if budget.slots is not None:
        return min(budget.slots_for(state_bytes), steps), budget
    limit = budget.bytes_of(lambda: 0)

    def least_of(limit: int) -> int:
        return step_bytes + 2 * state_bytes + buffers(limit)

    if limit < (least := least_of(limit)):
        while least < (more := least_of(least)):  # buffers grow with the limit
            least = more
        raise BudgetError.below(
            f"memory={limit} bytes < {least} bytes ({format_bytes(least)}), which a block of one "
            f"step, state 0, a state and {buffers(least)} bytes of the tiers' buffers take; raise "
            "the budget",
            least,
        )
    left = limit - 2 * state_bytes - (taken := buffers(limit))
    # A tier has room for states; those ahead and behind are still in memory.
    states = min(left // 2, max(_FEW * state_bytes, limit // _BUFFERS)) if taken else left // 2
    room = max(step_bytes, left - states)
    every = min(room // step_bytes, _MOST_STEPS, -(-steps // _LEAST_BLOCKS))
    return every, Budget(bytes=limit - every * step_bytes - state_bytes)


# --- states -----------------------------------------------------------------------------------


class _Layout(Layout):
    """The layout of a carry, whose arrays are XLA's.

    Attributes
    ----------
    places : list
        Where its arrays are, None for one that follows what it is used with.
    """

    places: list[Any]

    @classmethod
    def of_carry(cls, carry: Arrays) -> _Layout:
        """Return the layout of a carry."""
        one = [np.broadcast_to(np.zeros((), array.dtype), array.shape) for array in carry]
        made = cls.of(tuple(one or [_NOTHING]))
        made.places = [array.sharding if array.committed else None for array in carry]
        return made

    def arrays(self, state: object, where: int | str = "the state") -> list[Any]:
        """Return the arrays of a carry, which the types of the program have seen to."""
        return list(cast(Arrays, state))

    def pack(self, arrays: Sequence[Any]) -> Any:
        """Return NumPy's views of them."""
        return super().pack([np.asarray(array) for array in arrays] or [_NOTHING])

    def unpack(self, arrays: Sequence[Array], packing: Any) -> list[Any]:
        """Return arrays of XLA's that take the bytes of a store's."""
        found = super().unpack(arrays, packing)[: len(self.places)]
        return list(map(jax.device_put, found, self.places))


class _States(Slots[Arrays, jax.Array]):
    """Slots of carries: references."""

    shared = True
    layout = staticmethod(_Layout.of_carry)

    def slots(self, layout: Layout) -> _States:
        """Return slots for states of a layout."""
        return self

    def keep(self, state: Arrays, where: int | str) -> Kept:
        """Keep a state."""
        return Kept(state, state)

    def adopt(self, arrays: list[jax.Array], step: int) -> Kept:
        """Return a state from a store."""
        return self.keep(tuple(arrays), step)

    def load(self, kept: Kept, live: Arrays) -> Arrays:
        """Return a kept state."""
        return cast(Arrays, kept.state)

    def check(self, live: Arrays, where: int | str) -> None:
        """Do nothing: the program's types have seen to it."""


# --- programs ---------------------------------------------------------------------------------


class _Turn:
    """What is compiled to turn a block, for the gradients that are asked for."""

    def __init__(self, loop: _Loop, asked: _Asked) -> None:
        pullback = loop.pullback(asked, loop.consts)

        def turn(
            consts: Arrays,
            xs: Arrays,
            given_y: Arrays,
            carry: Arrays,
            adjoint: Arrays,
            made: Any,
            first: Any,
            stop: Any,
        ) -> Any:
            fixed, given = pullback.fixed(consts), (consts, xs, given_y)
            block = first, stop, carry
            adjoint, *made = loop.turn(pullback, fixed, given, block, (adjoint, *made))
            return adjoint, tuple(made)  # as it was given: a list would be another program

        self.pullback = pullback
        self.run: Callable[..., Any] = jax.jit(turn, donate_argnums=(4, 5))


class _Program:
    """What is compiled for the loops that have one jaxpr.

    Attributes
    ----------
    costs : dict
        Of a block, as earlier loops have shown them; by its steps and the tiers.
    """

    def __init__(self, loop: _Loop, asks: bool, kept: list[object]) -> None:
        like = {
            name: jax.tree.map(jax.typeof, getattr(loop, name))
            for name in ("consts", "carry", "xs")
        }
        self.loop = loop = replace(loop, **like)
        self.asks, self._kept = asks, kept
        self.costs: dict[Hashable, Costs | StageCosts | None] = {}

        def front(
            consts: Arrays, xs: Arrays, carry: Arrays, ys: Arrays, first: Any, stop: Any
        ) -> Any:
            if not asks:
                return stop, False, *loop.block((consts, xs), first, stop, (carry, ys))

            def more(made: Any) -> jax.Array:
                return jnp.logical_and(made[0] < stop, jnp.logical_not(made[1]))

            def go(made: Any) -> Any:
                i, _, carry, ys = made
                carry, y = loop.step(consts, carry, loop.row(xs, i))
                return i + 1, y[-1], carry, put(ys, y, i)

            return lax.while_loop(more, go, (first, jnp.bool_(False), carry, ys))

        def again(consts: Arrays, xs: Arrays, carry: Arrays, first: Any, stop: Any) -> Arrays:
            return loop.onward((consts, xs), first, stop, carry)

        self.front: Callable[..., Any] = jax.jit(front, donate_argnums=3)
        self.again: Callable[..., Any] = jax.jit(again)
        self._turns: dict[_Asked, _Turn] = {}
        self._asked: dict[tuple[Flags, Flags, Flags], _Asked] = {}

    def asked(self, flags: tuple[Flags, Flags, Flags]) -> _Asked:
        """Return which arrays have a gradient, from those that one is asked by."""
        return self._asked.get(flags) or self._asked.setdefault(flags, self.loop.asked(*flags))

    def turn(self, asked: _Asked) -> _Turn:
        """Return what turns a block, for some gradients."""
        return self._turns.get(asked) or self._turns.setdefault(asked, _Turn(self.loop, asked))


_programs: OrderedDict[Hashable, _Program] = OrderedDict()


def _program(loop: _Loop, asks: bool) -> _Program:
    """Return what is compiled for a loop, and for those before it that had its jaxpr."""
    kept: list[object] = []
    trees = loop.carry_tree, loop.x_tree, loop.y_tree
    key = (
        asks,
        loop.steps,
        loop.backwards,
        _is_x64(),
        tuple((tree.structure, tuple(tree.keys)) for tree in trees),
        tuple(loop.const_tree.keys),
        tuple((a.shape, a.dtype) for a in loop.xs),
        _same(loop.jaxpr, kept),
    )
    found = _programs.pop(key, None) or _Program(loop, asks, kept)
    _programs[key] = found
    while len(_programs) > _PROGRAMS:
        _programs.popitem(last=False)
    return found


def _same(value: Any, kept: list[object], *, derived: bool = True) -> Hashable:
    """Return what is equal for equal parts of jaxprs alone.

    Parameters
    ----------
    kept : list
        Is given what cannot be compared, and must live as long as the result.
    derived : bool
        Whether derivatives are taken of the operations, not their values alone.
    """
    same = partial(_same, kept=kept, derived=derived)
    match value:
        case jax_core.ClosedJaxpr():
            kept.extend(value.consts)
            consts = (same(a) if isinstance(a, np.ndarray) else id(a) for a in value.consts)
            return same(value.jaxpr), tuple(consts)
        case jax_core.Jaxpr():
            numbers: dict[Any, int] = {}

            def named(atom: Any) -> Hashable:
                if isinstance(atom, jax_core.Literal):
                    literal = np.asarray(atom.val)
                    return atom.aval, literal.dtype, literal.tobytes()
                return numbers.setdefault(atom, len(numbers)), atom.aval

            given = tuple(map(named, (*value.constvars, *value.invars)))
            made = []
            for eqn in value.eqns:
                params = sorted(_params(eqn, kept, derived=derived).items())
                atoms = tuple(map(named, (*eqn.invars, *eqn.outvars)))
                made.append((eqn.primitive, eqn.ctx, atoms, same(tuple(params))))
            return given, tuple(made), tuple(map(named, value.outvars))
        case tuple() | list():
            return type(value), tuple(map(same, value))
        case dict():
            return dict, tuple(map(same, value.items()))
        case float():
            return float, value.hex()  # 0.0 == -0.0
        case np.ndarray():  # which can have been written to since
            kept.append(value)
            return id(value), hashlib.blake2b(value.tobytes()).digest()
    try:
        hash(value)
    except TypeError:
        kept.append(value)
        return id(value)
    return type(value), value


def _params(eqn: Any, kept: list[object], *, derived: bool) -> dict[str, Any]:
    """Return the parameters of an operation; a custom derivative, a function, as its jaxpr."""
    found: dict[str, Any] = eqn.params
    if str(found.get("target_name")).startswith("multistage_"):  # of a loop in a step
        attributes = tuple(pair for pair in found["attributes"] if pair[0] != "site")
        return {**found, "attributes": attributes}
    given, made = ([atom.aval for atom in some] for some in (eqn.invars, eqn.outvars))
    jaxprs = {name: one for name, one in found.items() if isinstance(one, jax_core.ClosedJaxpr)}
    if not (eqn.primitive.name.startswith("custom_") and jaxprs):
        return found
    if derived:
        jaxpr = next(iter(jaxprs.values())).jaxpr
        known = _is_of_loop(jaxpr) or not found.get("symbolic_zeros")
        if not (known and all(map(varies, made))):
            return found
        atoms = [jax_core.Var(aval) for aval in given]
        said = jaxpr.debug_info

        def pulled(given: Any, cotangents: Any) -> Any:
            eqns = [eqn.replace(invars=atoms)]
            one = jax_core.Jaxpr((), atoms, eqn.outvars, eqns, debug_info=said)
            return jax.vjp(partial(jax.core.eval_jaxpr, one, ()), *given)[1](cotangents)

        jaxprs["rule"] = jax.make_jaxpr(pulled)(given, made)
    return {name: _same(one, kept, derived=False) for name, one in jaxprs.items()}


# --- sweeps -----------------------------------------------------------------------------------


_wait: Callable[[object], object] = cast(Any, jax.block_until_ready)


class _Blocks:
    """A chain whose step b is the steps b * every, ..., (b + 1) * every - 1 of a loop.

    Attributes
    ----------
    n : int or None
        Steps; None while they are not known.
    first : tuple of arrays
        State 0.
    """

    in_place, state_is_tape, one_tape = False, True, False

    def __init__(
        self, program: _Program, every: int, consts: Arrays, first: Arrays, xs: Arrays
    ) -> None:
        self._program, self._every, self._consts, self._xs = program, every, consts, xs
        # What programs make is committed to a device if anything is that they are given.
        placed = [a.sharding for a in (*consts, *first, *xs) if a.committed]
        place = next((one for one in placed if len(one.device_set) == 1), None)
        self._placed: Callable[..., Any] = partial(jax.device_put, device=place)
        self.first: Arrays = self._placed(first)
        self._most = program.loop.steps
        self.n = None if program.asks else self._most
        self._reached = 0
        self._rows = min(self._most, _LEAST_BLOCKS * every) if program.asks else self._most
        self._ys: Arrays = self._placed(program.loop.blank(self._rows))
        self._given_y: Arrays = ()
        self._made: Any = ()
        self._turn: _Turn

    def _span(self, b: int) -> tuple[np.int32, np.int32]:
        stop = min((b + 1) * self._every, self._most if self.n is None else self.n)
        return np.int32(b * self._every), np.int32(stop)

    def advance(self, state: Arrays, start: int, stop: int) -> Arrays:
        """Run blocks; those that are run for the first time give their ys."""
        for b in range(start, stop):
            first, end = self._span(b)
            if first >= self._reached:
                state = self._front(state, first, end)
            else:
                state = self._program.again(self._consts, self._xs, state, first, end)
            _wait((state, self._ys))
        return state

    def compile(self) -> None:
        """Run no steps, so that the times of blocks are not those of XLA's compiler."""
        given = self._consts, self._xs, self.first, self._ys
        *_, self._ys = self._program.front(*given, *_NO_STEPS)

    def _front(self, state: Arrays, first: np.int32, end: np.int32) -> Arrays:
        program, given = self._program, (self._consts, self._xs)
        if end > self._rows:
            more = self._placed(program.loop.blank(self._rows))
            self._ys = tuple(map(jnp.concatenate, zip(self._ys, more, strict=True)))
            self._rows *= 2
        done, ended, state, self._ys = program.front(*given, state, self._ys, first, end)
        if program.asks and (ended or end == self._most):
            self.n = int(done)
        self._reached = int(end)
        return state

    def left(self, b: int) -> bool:
        """Whether there is a block b."""
        return self.n is None or b * self._every < self.n

    def taken_ys(self) -> Arrays:
        """Return the ys of all steps, which are given away."""
        found, self._ys = self._ys, ()
        return tuple(y[: self.n] for y in found) if self._program.asks else found

    def tape(self, state: Arrays, step: int) -> tuple[Arrays, object]:
        """Not called: a state is its own tape."""
        raise AssertionError("a state is its own tape")

    def begin(self, asked: _Asked, cotangents: tuple[Sequence[Any], Sequence[Any]]) -> Arrays:
        """Stand ready for the reverse sweep, with the gradients by the last carry and by ys."""
        assert self.n is not None
        given_y = _chosen(cotangents[1], asked.ys)
        if self._rows > self.n:  # or other lengths would be other programs
            more = [(0, self._rows - self.n)]
            given_y = tuple(jnp.pad(a, more + [(0, 0)] * (a.ndim - 1)) for a in given_y)
        self._given_y, self._turn = given_y, self._program.turn(asked)
        zeros = zeros_of(self._consts, asked.consts), zeros_of(self._xs, asked.xs)
        self._made = self._placed((*zeros, self._turn.pullback.blank(self._every)))
        given = _instantiated(_chosen(cotangents[0], asked.carry))
        adjoint = self._placed(given, may_alias=False)  # the caller's; programs take it over
        self._program.again(self._consts, self._xs, self.first, *_NO_STEPS)  # as in `compile`
        return self._turned(self.first, adjoint, *_NO_STEPS)

    def reverse(self, tape: object, adjoint: Arrays, step: int) -> Arrays:
        """Turn the steps of a block."""
        return self._turned(tape, adjoint, *self._span(step))

    def _turned(self, carry: object, adjoint: Arrays, first: np.int32, stop: np.int32) -> Arrays:
        given = self._consts, self._xs, self._given_y, carry, adjoint, self._made
        adjoint, self._made = self._turn.run(*given, first, stop)
        _wait(adjoint)
        return adjoint

    def ended(self) -> tuple[Arrays, Arrays]:
        """Return the gradients by what f closes over and by xs; let all arrays go."""
        total, x_adjoints, _ = self._made
        self._consts = self.first = self._xs = self._given_y = self._made = ()
        return total, x_adjoints


_Begun: TypeAlias = tuple[Arrays, _Blocks, Reversal[Arrays, Arrays]]


def _pullback(
    asked: _Asked,
    begun: Callable[[], _Begun],
    ready: list[tuple[_Blocks, Reversal[Arrays, Arrays]]],
    learn: Callable[[Costs | StageCosts | None], None],
) -> Reverse:
    """Return the pullback of a loop, which runs forward again for each call but the first."""
    x64 = _is_x64()

    def reverse(cotangents: tuple[Arrays, Arrays]) -> tuple[object, object, object]:
        if any(isinstance(array, jax.core.Tracer) for some in cotangents for array in some):
            raise ArgumentError(
                "the pullback of a loop that was run from Python takes arrays; for jacrev, and for "
                "vmap or jit of a pullback, put the loop and its gradient inside jax.jit"
            )
        # Else programs would be compiled again.
        with nullcontext() if _is_x64() == x64 else jax.enable_x64(x64):
            try:
                blocks, run = ready.pop()  # one thread has it
            except IndexError:
                _, blocks, run = begun()
            with run:
                given = blocks.begin(asked.by(cotangents[1]), cotangents)
                adjoint = run.reverse(given)
                total, x_adjoints = blocks.ended()
        learn(run.costs)
        remember(run.report)
        return gradients(asked, total, adjoint, x_adjoints)

    return reverse


def _is_x64() -> bool:
    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)


@dataclass(frozen=True, slots=True)
class Driven:
    """Runs a loop from Python.

    Attributes
    ----------
    loop : _Loop
        Its last y says of a step whether it was the last, if the loop `asks` for that.
    budget, tiers, planner, progress
        As for `scan`.
    asks : bool
    """

    loop: _Loop
    budget: Budget
    tiers: Tiers | None
    planner: str | Plan | Planner
    progress: bool | None
    asks: bool

    def plain(self, consts: Arrays, carry: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """Return the last carry and the ys."""
        blocks = _Blocks(self._program(), min(self.loop.steps, _MOST_STEPS), consts, carry, xs)
        b, carry = 0, blocks.first
        while blocks.left(b):
            carry = blocks.advance(carry, b, b + 1)
            b += 1
        return carry, blocks.taken_ys()

    def forward(
        self, flags: tuple[Flags, Flags, Flags], consts: Arrays, carry: Arrays, xs: Arrays
    ) -> tuple[tuple[Arrays, Arrays], Reverse]:
        """Return the same, and what the gradients are to be had from."""
        if any(len(array.sharding.device_set) > 1 for array in (*consts, *carry, *xs)):
            raise ArgumentError(
                "multistage.jax.scan takes gradients of arrays on one device, and here are some on "
                "several; put them on one, or use jax.lax.scan with jax.checkpoint"
            )
        program, layout = self._program(), _Layout.of_carry(carry)
        tiers = tier_names(self.tiers)
        asked = program.asked(flags)
        step_bytes, steps = nbytes(program.turn(asked).pullback.like), self.loop.steps

        def stores(limit: int) -> tuple[Store, ...]:
            return tuple(open_store(tier, limit // (_BUFFERS * len(tiers))) for tier in tiers)

        def buffers(limit: int) -> int:
            return sum(store.buffer_bytes(layout) for store in stores(limit))

        every, memory = _fit(self.budget, layout.nbytes, step_bytes, buffers, steps)
        key = asked, every, tuple(store.name for store in stores(0))

        def begun() -> _Begun:
            blocks = _Blocks(program, every, consts, carry, xs)
            blocks.compile()
            run: Reversal[Arrays, Arrays] = Reversal(
                blocks,
                n_steps=None if self.asks else -(-steps // every),
                memory=memory,
                tiers=stores(self.budget.bytes or sys.maxsize),  # its own: others may run now
                planner=self.planner,
                costs=None if isinstance(self.planner, Plan) else program.costs.get(key),
                progress=self.progress,
                states=cast(Any, _States()),
            )
            until = (lambda _, b: not blocks.left(b)) if self.asks else None
            return run.forward(blocks.first, until), blocks, run

        last, blocks, run = begun()
        learn = partial(program.costs.__setitem__, key)
        return (last, blocks.taken_ys()), _pullback(asked, begun, [(blocks, run)], learn)

    def _program(self) -> _Program:
        return _program(self.loop, self.asks)
