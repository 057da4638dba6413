"""The user's computation: the Chain protocol and adapters from plain functions.

A *state* is a pytree (nested tuples, lists, dicts) of NumPy arrays.  A chain
never holds checkpoints; it only runs steps.

Who owns a buffer: a functional chain (`in_place` false) returns new states
and leaves its arguments alone, so checkpoints are kept by reference.  To make
that promise hold, arrays under a checkpoint are marked read-only while they
are kept, and arrays that do not own their memory are copied: a step that
overwrites its input then raises instead of spoiling a gradient.  One hole is
left: writing to an array through a view of it that was made earlier, which a run
with `checked=True` finds.  Containers
are not shared at all: each step is given lists and dicts of its own, in which it
may exchange arrays.  An in-place chain overwrites the arrays of its live state,
so checkpoints are copies, and what a tape shares with that state is copied too.
Arrays of a tape are marked read-only while it is held, and copied where they
borrow memory that the operator can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ..errors import ArgumentError

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Chain(Protocol[State, Adjoint]):
    """A computation of steps and its adjoint.

    Attributes
    ----------
    in_place : bool
        Whether `advance` overwrites the arrays of the state it is given (and
        returns that same state).
    state_is_tape : bool
        Whether the tape of a step is its input state; `tape` is then never
        called and `reverse` gets the state itself.
    one_tape : bool
        Whether there is but one tape, the latest, such as that of operators
        that leave it in arrays of their own; plans then keep states only.

    Examples
    --------
    A class of one's own; `FunctionChain` and `InPlaceChain` make one of functions.

    >>> import numpy as np
    >>> from multistage import Reversal
    >>> class Squares:
    ...     in_place, state_is_tape, one_tape = False, True, False
    ...     def advance(self, state, start, stop):
    ...         for _ in range(start, stop):
    ...             state = state * state
    ...         return state
    ...     def tape(self, state, step):
    ...         raise NotImplementedError  # a state is its own tape
    ...     def reverse(self, tape, adjoint, step):
    ...         return 2 * tape * adjoint
    >>> with Reversal(Squares(), n_steps=3, memory="2 slots") as run:
    ...     last = run.forward(np.array(2.0))
    ...     gradient = run.reverse(np.array(1.0))
    >>> float(last), float(gradient)
    (256.0, 1024.0)
    """

    @property
    def in_place(self) -> bool: ...

    @property
    def state_is_tape(self) -> bool: ...

    @property
    def one_tape(self) -> bool: ...

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps start..stop-1 from `state`, keeping nothing; return the state after them."""
        ...

    def tape(self, state: State, step: int) -> tuple[State, object]:
        """Run one step keeping its tape; return the next state and the tape."""
        ...

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        """Return the adjoint of the state before `step` from the one after it and its tape.

        For a type checker a tape is an object: assert its type, or annotate the parameter
        as Any.
        """
        ...


class FunctionChain(Generic[State, Adjoint]):
    """A functional chain made of plain functions.

    Parameters
    ----------
    step : callable
        `step(state, i) -> state`: step i, leaving its argument unchanged.
    adjoint_step : callable
        `adjoint_step(tape, adjoint, i) -> adjoint`; the tape is the state
        before step i unless `tape_step` is given.
    tape_step : callable, optional
        `tape_step(state, i) -> (state, tape)`: step i keeping what
        `adjoint_step` needs.
    one_tape : bool
        Whether `tape_step` leaves the tape in arrays of its own, which the
        next call overwrites: then one tape is held at a time.

    Raises
    ------
    ArgumentError
        If a function is not callable, or `one_tape` is set without a tape.

    Examples
    --------
    >>> chain = FunctionChain(lambda x, i: x * x, lambda x, a, i: 2 * x * a)
    >>> chain.advance(3.0, 0, 2), chain.reverse(3.0, 1.0, 0)
    (81.0, 6.0)
    """

    in_place = False
    one_tape = False

    def __init__(
        self,
        step: Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint],
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
        *,
        one_tape: bool = False,
    ) -> None:
        for name, function in (("step", step), ("adjoint_step", adjoint_step)):
            if not callable(function):
                raise ArgumentError(f"{name}={function!r} must be callable")
        if tape_step is not None and not callable(tape_step):
            raise ArgumentError(f"tape_step={tape_step!r} must be callable or None")
        self._step = step
        self._adjoint_step = adjoint_step
        self._tape_step = tape_step
        if one_tape:
            _needs_a_tape(tape_step, "tape_step")
            self.one_tape = True

    @property
    def state_is_tape(self) -> bool:
        return self._tape_step is None

    def advance(self, state: State, start: int, stop: int) -> State:
        step = self._step
        if stop - start == 1:  # the commonest, and half as long as the loop
            return step(state, start)
        for i in range(start, stop):
            state = step(state, i)
        return state

    def tape(self, state: State, step: int) -> tuple[State, object]:
        if self._tape_step is None:
            return self._step(state, step), state
        return self._tape_step(state, step)

    @property
    def reverse(self) -> Callable[[object, Adjoint, int], Adjoint]:
        return self._adjoint_step  # itself: a call around it would be paid at every step


class InPlaceChain(Generic[State, Adjoint]):
    """A chain whose operators overwrite the arrays of the live state.

    Parameters
    ----------
    forward : callable
        `forward(state, start, stop)`: run steps start..stop-1, overwriting
        the arrays in `state`; its return value is ignored.
    reverse : callable
        `reverse(tape, adjoint, i) -> adjoint`: adjoint of step i; it may
        overwrite `adjoint` and return it.  The tape is the state before step
        i, to be left alone, unless `tape` is given.
    tape : callable, optional
        `tape(state, i) -> tape`: run step i, overwriting the arrays in
        `state`, and return what `reverse` needs: copies of some fields only,
        or something else altogether.  Restart data and adjoint data then
        differ (mixed checkpointing).  Arrays of the tape that share memory
        with the state are copied when it is kept; buffers of the
        operator's own must not be written to again, since several tapes are
        held at once.
    one_tape : bool
        Whether `tape` leaves what `reverse` needs in arrays of the operator's
        own, which the next call overwrites: then one tape is held at a time.

    Raises
    ------
    ArgumentError
        If a function is not callable, or `one_tape` is set without a tape.

    Notes
    -----
    `forward` and `tape` find the state in the tree that they are given.  They
    may also swap its arrays between leaves, put NumPy scalars in place of 0-d
    arrays, or new arrays that nothing else refers to in place of others; any
    other exchange, and a changed shape, dtype or structure, is a StateError.

    Examples
    --------
    >>> import numpy as np
    >>> def forward(x, start, stop):
    ...     for _ in range(start, stop):
    ...         np.multiply(x, x, out=x)
    >>> chain = InPlaceChain(forward, lambda x, a, i: 2 * x * a)
    >>> chain.advance(np.array([3.0]), 0, 2)
    array([81.])

    The adjoint of u <- u + sin(v), v <- v / 2 needs the field v alone:

    >>> def forward(state, start, stop):
    ...     for _ in range(start, stop):
    ...         state["u"] += np.sin(state["v"])
    ...         state["v"] /= 2
    >>> def tape(state, i):
    ...     kept = state["v"].copy()
    ...     forward(state, i, i + 1)
    ...     return kept
    >>> def reverse(v, adjoint, i):
    ...     return {"u": adjoint["u"], "v": adjoint["v"] / 2 + np.cos(v) * adjoint["u"]}
    >>> chain = InPlaceChain(forward, reverse, tape)
    >>> chain.tape({"u": np.ones(1), "v": np.zeros(1)}, 0)
    ({'u': array([1.]), 'v': array([0.])}, array([0.]))
    """

    in_place = True
    one_tape = False

    def __init__(
        self,
        forward: Callable[[State, int, int], object],
        reverse: Callable[..., Adjoint],
        tape: Callable[[State, int], object] | None = None,
        *,
        one_tape: bool = False,
    ) -> None:
        for name, function in (("forward", forward), ("reverse", reverse)):
            if not callable(function):
                raise ArgumentError(f"{name}={function!r} must be callable")
        if tape is not None and not callable(tape):
            raise ArgumentError(f"tape={tape!r} must be callable or None")
        self._forward = forward
        self._reverse = reverse
        self._tape = tape
        if one_tape:
            _needs_a_tape(tape, "tape")
            self.one_tape = True

    @property
    def state_is_tape(self) -> bool:
        return self._tape is None

    def advance(self, state: State, start: int, stop: int) -> State:
        self._forward(state, start, stop)
        return state

    def tape(self, state: State, step: int) -> tuple[State, object]:
        if self._tape is None:
            raise AssertionError("an in-place chain tapes by copying its state")
        return state, self._tape(state, step)

    @property
    def reverse(self) -> Callable[[object, Adjoint, int], Adjoint]:
        return self._reverse


def _needs_a_tape(tape: object, name: str) -> None:
    if tape is None:
        raise ArgumentError(f"one_tape=True needs {name}=; a state as tape is one of many")
