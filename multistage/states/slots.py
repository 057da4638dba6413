"""What an executor asks of states: their layout, and slots of fast memory that keep them.

The fast tier needs no store: a checkpoint there is a reference to arrays that
nothing overwrites (`references.py`), or a copy (`in_place.py`).
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar, cast

from ..errors import StateError
from .layout import Array
from .sharing import Unseen, arrays_in

State = TypeVar("State")
State_contra = TypeVar("State_contra", contravariant=True)
Adjoint = TypeVar("Adjoint")
# What the arrays of a state are: NumPy's, or tensors.
ArrayT = TypeVar("ArrayT")
PackingT = TypeVar("PackingT")
LayoutT = TypeVar("LayoutT")


class Kept(NamedTuple):
    """One kept state or tape; give it back with `release`.

    Attributes
    ----------
    state : object
        The tape.  Of a state what the slots that keep it load it from: the state itself where
        slots are `shared`.
    arrays : sequence of arrays
        Those of the state, as its layout gives them; what of a tape is to be released.
    """

    state: object
    arrays: Sequence[object]


def no_adjoint(step: int) -> StateError:
    """Return the error for an adjoint step that returned None."""
    return StateError(
        f"the adjoint of step {step} returned None; an adjoint step returns the adjoint of the "
        "state before it, also where it has overwritten its argument"
    )


def guarded(
    slots: object, reverse: Callable[[object, Adjoint, int], Adjoint]
) -> Callable[[object, Adjoint, int], Adjoint]:
    """Return an adjoint step that is watched, if slots lend it arrays that they use again."""
    by = getattr(slots, "guarded", None)
    return reverse if by is None else cast(Callable[[object, Adjoint, int], Adjoint], by(reverse))


def overwritten(error: BaseException, slots: object) -> BaseException:
    """Return a StateError for an operator that wrote to a kept array, or the error itself.

    NumPy's error does not tell the array: those are looked at that the frame refers to.
    Where some are read-only for another reason the error stays, with a note.
    """
    frozen, trace = getattr(slots, "frozen", None), error.__traceback__
    if type(error) is not ValueError or "read-only" not in str(error) or frozen is None:
        return error
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or _raises(trace):
        return error
    locked = [array for array in _named_in(trace.tb_frame) if not array.flags.writeable]
    ours = [array for array in locked if frozen.holds(array)]
    told = (
        f"an operator wrote to a state that a checkpoint refers to, or to a tape that is held "
        f"({error}); return new arrays, or use InPlaceChain for operators that overwrite"
    )
    if ours and len(ours) == len(locked):
        return StateError(told)
    if locked:  # perhaps a state from a store, whose arrays are read-only from the beginning
        error.add_note(f"If this is not an array of your own that is read-only: {told}.")
    return error


@contextlib.contextmanager
def told_of(slots: object) -> Iterator[None]:
    """Raise the StateError of `overwritten` in place of an operator's error."""
    try:
        yield
    except ValueError as error:
        if (told := overwritten(error, slots)) is not error:
            raise told from error
        raise


def _raises(trace: TracebackType) -> bool:
    """Whether a frame ended in a `raise` of its own: the error is not NumPy's."""
    code = trace.tb_frame.f_code.co_code
    return dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _named_in(frame: FrameType) -> Iterator[Array]:
    """Yield the arrays that the variables of a frame refer to, and the globals that it names."""
    named = (frame.f_globals.get(name) for name in frame.f_code.co_names)
    for value in (*frame.f_locals.values(), *named):
        with contextlib.suppress(Unseen):
            yield from arrays_in(value)


class Packs(Protocol[ArrayT, PackingT]):
    """What turns the arrays of one state into a store's, and back."""

    def pack(self, arrays: Sequence[ArrayT]) -> tuple[Sequence[Array], PackingT]:
        """Return what a store takes, and what `unpack` needs besides."""
        ...

    def unpack(self, arrays: Sequence[Array], packing: PackingT) -> list[ArrayT]:
        """Return the arrays that `pack` was given, from the store's copies."""
        ...


class StateLayout(Protocol[State_contra, ArrayT, PackingT]):
    """What an executor asks of a layout; `states.layout.Layout` is that of NumPy states."""

    @property
    def nbytes(self) -> int: ...

    def arrays(self, state: State_contra, where: int | str = ...) -> list[ArrayT]:
        """Return the arrays of a state.  Raises StateError if it is of another layout."""
        ...

    def at(self, step: int) -> Packs[ArrayT, PackingT]:
        """Return the layout of a state that has been seen: of equal ones, this."""
        ...

    def same_as(self, other: Self) -> bool:
        """Whether both describe the same states."""
        ...


class States(Protocol[State, ArrayT, LayoutT]):
    """What states are made of: how an executor describes and keeps them.

    `LayoutT` is the class of their layouts, a `StateLayout`.
    """

    def layout(self, state: State) -> LayoutT:
        """Return the layout of a state.  Raises StateError."""
        ...

    def slots(self, layout: LayoutT) -> Slots[State, ArrayT]:
        """Return fast slots for states of that layout."""
        ...


class Weighed(States[State, ArrayT, LayoutT], Protocol):
    """States that differ from step to step."""

    def weigh(self, state: State, step: int) -> int:
        """Return the bytes of the live state `step`.  Raises StateError."""
        ...


class Slots(Protocol[State, ArrayT]):
    """Keeps states of one layout, and tapes beside them.

    What has a body here is that of slots which keep references: nothing is copied or reused.
    """

    @property
    def shared(self) -> bool:
        """Whether a kept state is its `state`: it need not be loaded."""
        ...

    def keep(self, state: State, where: int | str) -> Kept:
        """Keep a state.  Raises StateError if it is not of the layout."""
        ...

    def adopt(self, arrays: list[ArrayT], step: int) -> Kept:
        """Wrap arrays of state `step` to which nothing else writes, such as those from a store."""
        ...

    def load(self, kept: Kept, live: State) -> State:
        """Return the live state equal to `kept`; copies overwrite `live`."""
        ...

    def check(self, live: State, where: int | str) -> None:
        """Raise StateError if the live state is of another layout, or could not be restored."""
        ...

    def keep_tape(self, tape: object, states: tuple[State, State], step: int) -> Kept:
        """Keep the tape of a step; `states` are those before and after it.  Raises StateError."""
        return Kept(tape, ())

    def adopt_adjoint(self, adjoint: Adjoint, live: State) -> Adjoint:
        """Return a user's adjoint, copied where it shares memory with what a sweep holds."""
        return adjoint

    def apart(self, adjoint: Adjoint, live: State) -> Adjoint:
        """Return what an adjoint step returned, copied where later steps would change it.

        `live` is the state it was given, which is done with.
        """
        return adjoint

    def release(self, kept: Kept) -> None:
        """Give a kept state or tape back."""
        return

    def trim(self) -> None:
        """Let memory go that is only kept to be reused: something else takes its place."""
        return

    def release_all(self) -> None:
        """Give everything back, after an error or at the end of a run."""
        return
