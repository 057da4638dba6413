"""A chain whose operators are watched: what a run with `checked=True` finds out about them.

Steps are run one by one.  A digest of each state and tape is kept: 16 bytes a step.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import numpy as np
import optree
import xxhash

from ..durable.records import value_bytes
from ..errors import StateError
from ..model.chain import Chain
from ..states.layout import Array, key_orders
from ..states.naming import read_by
from ..states.sharing import KEPT, Memory, Unseen, arrays_in, counts, stays

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_AGAIN = (
    "state {} differs from what it was when step {} ran first; a step must do the same each time "
    "it runs: give it copies of whatever changes (an attribute, a global, an object it keeps, a "
    "random generator), or make that a part of the state"
)
_WRITTEN = (
    "{} was written to since it was made; operators may write to the state of an InPlaceChain "
    "while they are called with it, and to nothing else that they returned or were given, views of "
    "it included"
)
_READ = (
    "the adjoint operator, called with the tape of step {}, reads the arrays of the live state by "
    "name, which are overwritten by then; give it copies in the tape"
)


class Checked(Generic[State, Adjoint]):
    """A chain that raises StateError where an operator breaks a rule of `docs/howto/operators.md`.

    Parameters
    ----------
    chain : Chain
    operator : callable
        Returns the user's own adjoint step, which the chain calls.
    """

    def __init__(self, chain: Chain[State, Adjoint], operator: Callable[[], object]) -> None:
        self._chain, self._operator = chain, operator
        self.in_place = chain.in_place
        self.state_is_tape = chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))
        self._states: dict[int, bytes] = {}
        self._tapes: dict[int, bytes] = {}

    def begin(self) -> None:
        """Forget the sweep before."""
        self._states.clear()
        self._tapes.clear()

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps start..stop-1 one by one; return the state after them."""
        self._see(state, start)
        for i in range(start, stop):
            with self._lent(state, i):
                state = self._chain.advance(state, i, i + 1)
            self._see(state, i + 1, made=True)
        return state

    def tape(self, state: State, step: int) -> tuple[State, object]:
        """Run one step keeping its tape."""
        self._see(state, step)
        after, tape = self._chain.tape(state, step)
        self._see(after, step + 1, made=True)
        if self.in_place:
            self._require_apart(after, step)
        if not self.one_tape:
            self._tapes[step] = digest(tape)
        return after, tape

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        """Return the adjoint of the state before `step`."""
        if self.state_is_tape:
            self._see(tape, step)
        elif self._tapes.pop(step, None) not in (None, digest(tape)):
            raise StateError(_WRITTEN.format(f"the tape of step {step}"))
        return self._chain.reverse(tape, adjoint, step)

    @contextlib.contextmanager
    def _lent(self, state: object, step: int) -> Iterator[None]:
        """Raise StateError if a step keeps a reference to a state that it overwrites."""
        # A step may put others in place of inner containers, which are not held here.
        leaves = optree.tree_leaves(cast(Any, state), none_is_leaf=True)
        arrays = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        parts = [state, *arrays] if self.in_place else []
        before = counts(parts)
        yield
        if stays(lambda: any(map(operator.gt, counts(parts), before))):
            raise StateError(KEPT.format(f"step {step}"))

    def _see(self, state: object, step: int, *, made: bool = False) -> None:
        now = digest(state)
        if self._states.setdefault(step, now) != now:
            told = _AGAIN.format(step, step - 1) if made else _WRITTEN.format(f"state {step}")
            raise StateError(told)

    def _require_apart(self, state: object, step: int) -> None:
        """Raise StateError if the adjoint operator names an array of the state, not its tape's."""
        live = Memory(optree.tree_leaves(cast(Any, state), none_is_leaf=True))
        for value in read_by(self._operator()):
            if any(map(live.meets, _arrays(value))):
                raise StateError(_READ.format(step))


def digest(tree: object) -> bytes:
    """Return what identifies the arrays in a tree, and the order of its keys."""
    seen = xxhash.xxh3_128(repr(key_orders(tree)).encode())
    for leaf in optree.tree_leaves(cast(Any, tree), none_is_leaf=True):
        for each in sorted(map(_digest_of, _arrays(leaf))):
            seen.update(each)
    return seen.digest()


def _arrays(leaf: object) -> Iterator[Array]:
    if isinstance(leaf, np.generic) or (type(leaf) is np.ndarray and not leaf.dtype.hasobject):
        yield np.asarray(leaf)
        return
    try:
        yield from arrays_in(leaf)
    except Unseen:
        return


def _digest_of(array: Array) -> bytes:
    seen = xxhash.xxh3_128(f"{array.shape}{array.dtype}".encode())
    if not array.dtype.hasobject:
        for piece in value_bytes(np.ascontiguousarray(array)):
            seen.update(piece.data)
    return seen.digest()
