"""Blocks of steps: several steps of a chain as one step of the schedule.

A schedule checkpoints at the borders of blocks only, and the driver, the
stores and the planner see a block as one step.  That suits steps so short that
the driver would be felt (a microsecond or two per action), and operators that
advance many time steps in one call.  What it costs is memory inside a block,
beside the budget:

=====================  =======================================================
tape of the chain      while the adjoint of a block runs
=====================  =======================================================
the state itself       the block's steps are run again, size - 1 states kept
the latest only        the same, each step taped before its adjoint
something else         the tapes of the block's steps are its tape: size tapes
=====================  =======================================================

The adjoint steps are the chain's own, in the same order, so the adjoint is the
same to the last bit.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar, cast

from ..errors import ArgumentError
from ..states.in_place import ArrayStates
from ..states.layout import Array, Layout
from ..states.sharing import apart_from
from ..states.slots import Kept, Slots, guarded, no_adjoint, told_of
from ..support.values import whole_or_none
from .chain import Chain

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Blocks(Generic[State, Adjoint]):
    """A chain whose step b is the steps [b size, min((b + 1) size, n_steps)) of another.

    Parameters
    ----------
    chain : Chain
    size : int
        Steps per block, at least 1.
    n_steps : int or None
        Steps of `chain` in all; the last block may be short.  None for an
        unknown number of full blocks.

    Attributes
    ----------
    n_blocks : int or None
        Steps of this chain: what a `Reversal` of it gets as `n_steps`.

    Raises
    ------
    ArgumentError
        If `size` or `n_steps` is no int above 0.

    Notes
    -----
    The adjoint of a block overwrites the state it starts from if the chain
    works in place; its caller must not use that state afterwards.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage import FunctionChain, Reversal
    >>> chain = FunctionChain(lambda x, i: x * x, lambda x, a, i: 2 * x * a)
    >>> blocks = Blocks(chain, size=2, n_steps=3)
    >>> with Reversal(blocks, n_steps=blocks.n_blocks, memory="1 slot") as run:
    ...     last = run.forward(np.array(2.0))
    ...     gradient = run.reverse(np.array(1.0))
    >>> float(last), float(gradient)
    (256.0, 1024.0)
    """

    def __init__(self, chain: Chain[State, Adjoint], size: int, n_steps: int | None = None) -> None:
        self._chain = chain
        self._size = _count("size", size)
        self._n_steps = None if n_steps is None else _count("n_steps", n_steps)
        self.n_blocks = None if self._n_steps is None else -(-self._n_steps // self._size)
        # A chain with one tape cannot tape a block: its steps are run again, too.
        self._again = bool(getattr(chain, "one_tape", False))
        # With their arrays, for the next block; several sweeps may run blocks at the same time.
        self._idle: list[tuple[Layout, Slots[State, Array]]] = []

    @property
    def in_place(self) -> bool:
        return self._chain.in_place

    @property
    def state_is_tape(self) -> bool:
        return self._again or self._chain.state_is_tape

    @property
    def one_tape(self) -> bool:
        return False  # that of a block is the state it begins with

    def around(self, make: Callable[[Chain[State, Adjoint]], object]) -> Self:
        """Return blocks of the same size, of the steps of what is made of their chain."""
        made = copy.copy(self)
        made._chain, made._idle = cast(Chain[State, Adjoint], make(self._chain)), []
        return made

    def _first(self, block: int) -> int:
        """Return the first step of a block; that after the last is n_steps."""
        if self._n_steps is None or self.n_blocks is None:
            return block * self._size
        if block > self.n_blocks:
            raise ArgumentError(
                f"block {block - 1} of {self.n_blocks}: {self._n_steps} steps in blocks of "
                f"{self._size}; give the Reversal n_steps={self.n_blocks} (n_blocks)"
            )
        return min(block * self._size, self._n_steps)

    def advance(self, state: State, start: int, stop: int) -> State:
        return self._chain.advance(state, self._first(start), self._first(stop))

    def tape(self, state: State, step: int) -> tuple[State, object]:
        kept: list[Kept] = []
        with self._borrowed(state) as slots:
            for i in range(self._first(step), self._first(step + 1)):
                before = state
                state, tape = self._chain.tape(state, i)
                kept.append(slots.keep_tape(tape, (before, state), i))
                tape = None  # or it would be another reference to what the state holds
                slots.check(state, i + 1)
            return state, [each.state for each in kept]

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        first, stop = self._first(step), self._first(step + 1)
        if self.state_is_tape:
            return self._run_again(cast(State, tape), adjoint, first, stop)
        tapes, wanted = cast(list[object], tape), adjoint is not None
        for i in reversed(range(first, stop)):
            adjoint = self._chain.reverse(tapes.pop(), adjoint, i)  # popped: free after its use
            if adjoint is None and wanted:
                raise no_adjoint(i)
        return adjoint

    def _run_again(self, state: State, adjoint: Adjoint, first: int, stop: int) -> Adjoint:
        """Run the steps of a block again keeping their states, then their adjoints."""
        chain, wanted, kept = self._chain, adjoint is not None, list[Kept]()
        with self._borrowed(state) as slots:
            reverse = guarded(slots, chain.reverse)
            for i in range(first, stop - 1):
                kept.append(slots.keep(state, i))
                state = chain.advance(state, i, i + 1)
                slots.check(state, i + 1)
            for i in reversed(range(first, stop)):
                if i < stop - 1:
                    state = slots.load(kept[-1], state)
                tape = state if chain.state_is_tape else chain.tape(state, i)[1]
                adjoint = reverse(tape, adjoint, i)
                if not chain.state_is_tape:
                    adjoint = apart_from(adjoint, tape)
                adjoint = slots.apart(adjoint, state)
                if adjoint is None and wanted:
                    raise no_adjoint(i)
                if i < stop - 1:
                    slots.release(kept.pop())
            return adjoint

    @contextlib.contextmanager
    def _borrowed(self, state: State) -> Iterator[Slots[State, Array]]:
        """Lend slots for states like this one; an operator's write to what they hold is told."""
        layout, found = Layout.of(state), None
        with contextlib.suppress(IndexError):
            found = self._idle.pop()
        if found is None or not layout.same_as(found[0]):
            found = layout, ArrayStates(self._chain.in_place).slots(layout)
        try:
            with told_of(found[1]):
                yield found[1]
        finally:
            found[1].release_all()
            self._idle.append(found)


def _count(name: str, value: int) -> int:
    count = whole_or_none(value)
    if count is None or count < 1:
        raise ArgumentError(f"{name}={value!r} must be an int, at least 1")
    return count
