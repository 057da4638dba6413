"""What a timestep of a tape starts from, as arrays for slots and stores.

A *state* holds the values of some variables, and their tangents where there are
such.  Arrays are described by a `Codec` for each type; numbers stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from pyadjoint.block_variable import BlockVariable

from ...errors import StateError
from ...states.layout import Array, Layout, Packing
from ...states.slots import Kept, Slots

Value = TypeVar("Value")
Kind = tuple[tuple[int, ...], "np.dtype[np.generic]"]


class Codec(NamedTuple):
    """How a type of value becomes an array, and an array a value for an output of a block."""

    to_array: Callable[[object], Array]
    from_array: Callable[[Array, object], object]


_codecs: dict[str, Codec] = {}


def register(
    kind: type[Value] | str,
    to_array: Callable[[Value], Array],
    from_array: Callable[[Array, Value], object],
) -> None:
    """Teach multistage to store the checkpoints of a type.

    Parameters
    ----------
    kind : type or str
        The type of what `_ad_create_checkpoint` returns, or its name, `"package.module.Class"`.
    to_array : callable
        `to_array(value)` returns its array, without a copy if possible.
    from_array : callable
        `from_array(array, output)` returns a value made of an array that nobody else writes to;
        `output` is the object that the value belongs to.  It may use the array's memory.

    Examples
    --------
    >>> class Field:
    ...     def __init__(self, values): self.values = values
    >>> register(Field, lambda field: field.values, lambda array, output: Field(array))
    """
    name = kind if isinstance(kind, str) else _name_of(kind)
    _codecs[name] = Codec(cast(Any, to_array), cast(Any, from_array))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def codec_of(value: object) -> Codec | None:
    """Return the codec of a value, by its type; None if there is none."""
    return _codecs.get(_name_of(type(value)))


def _view(array: Any) -> Array:
    return cast(Array, array.view(np.ndarray))


def _numpy_adjoint(array: Array, output: Any) -> object:
    return array.view(type(output))  # in the order of its memory, on which sums depend


def _firedrake(array: Array, output: Any) -> object:
    return type(output)(output.function_space(), val=array)


def _dolfinx(array: Array, output: Any) -> object:
    made = type(output)(output.function_space)
    made.x.array[:] = array
    return made


def _same(array: Array, output: object) -> Array:
    return array


register(np.ndarray, _view, _same)  # a tangent
register("numpy_adjoint.array.ndarray", _view, _numpy_adjoint)
register("firedrake.function.Function", lambda f: f.dat.data_ro_with_halos, _firedrake)
register("dolfinx_adjoint.types.function.Function", lambda f: f.x.array, _dolfinx)


@dataclass(frozen=True, slots=True)
class Part:
    """One value or tangent of a state: where its array is in the layout, or itself if it is small.

    Attributes
    ----------
    variable : BlockVariable
    is_tangent : bool
    place : int
        -1 for what stays in memory.
    value : object
        What stays in memory, or the codec of the array.
    """

    variable: BlockVariable
    is_tangent: bool
    place: int
    value: object


class State(NamedTuple):
    """What a step starts from."""

    step: int
    values: Mapping[BlockVariable, object]
    tangents: Mapping[BlockVariable, object]

    def items(self) -> Iterator[tuple[BlockVariable, bool, object]]:
        """Yield variables, whether it is their tangent, and values."""
        for variable, value in self.values.items():
            yield variable, False, value
        for variable, value in self.tangents.items():
            yield variable, True, value

    def kinds(self) -> list[Kind]:
        """Return shapes and dtypes of its arrays, one for each array."""
        found = {}
        for _, _, value in self.items():
            codec = codec_of(value)
            if codec is not None:
                array = codec.to_array(value)
                found[id(value)] = (array.shape, array.dtype)
        return list(found.values())


class Placed(list[Array]):
    """The arrays of a state, and what it is made of."""

    def __init__(self, arrays: Iterable[Array], parts: Sequence[Part]) -> None:
        super().__init__(arrays)
        self.parts = parts


Packed = tuple[Packing | None, Sequence[Part]]


class TapeLayout(Layout):
    """The arrays that states of a tape are made of; a state may lack some of them.

    Attributes
    ----------
    kinds : list of (shape, dtype)
    """

    kinds: list[Kind]
    _nothing: list[Array]

    @classmethod
    def for_kinds(cls, kinds: Iterable[Kind]) -> TapeLayout:
        """Return the layout of states that have at most these arrays."""
        found = sorted(kinds, key=lambda kind: (kind[0], kind[1].str)) or [((1,), np.dtype("u1"))]
        nothing = [np.zeros(*kind) for kind in found]
        layout = cls.of(tuple(nothing))
        layout.kinds, layout._nothing = found, nothing
        return layout

    def arrays(self, state: object, where: int | str = "the state") -> Placed:
        """Return the arrays of a state, zeros for those it lacks.  Raises StateError."""
        assert isinstance(state, State)
        found, places, parts = list(self._nothing), dict[int, int](), list[Part]()
        for variable, is_tangent, value in state.items():
            codec = codec_of(value)
            if codec is None:
                parts.append(Part(variable, is_tangent, -1, value))
                continue
            place = places.get(id(value))
            if place is None:
                array = codec.to_array(value)
                place = self._place(state.step, (array.shape, array.dtype), places)
                places[id(value)], found[place] = place, array
            parts.append(Part(variable, is_tangent, place, codec))
        return Placed(found, parts)

    def pack(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], Packed]:  # type: ignore[override]
        """Return what a store takes; what the state is made of goes with the record."""
        assert isinstance(arrays, Placed)
        flat, packing = super().pack(arrays)
        return flat, (packing, arrays.parts)

    def unpack(self, arrays: Sequence[Array], packing: Packed) -> Placed:  # type: ignore[override]
        """Return the arrays of a state from the store's copies."""
        strides, parts = packing
        return Placed(super().unpack(arrays, strides), parts)

    def _place(self, step: int, kind: Kind, places: Mapping[int, int]) -> int:
        """Return the first place of a kind that is not taken."""
        taken = set(places.values())
        for place, each in enumerate(self.kinds):
            if each == kind and place not in taken:
                return place
        shape, dtype = kind
        raise StateError(
            f"state {step} has an array of shape {shape} and {dtype} that earlier states have not; "
            "every timestep has to start from arrays as the first ones do"
        )


def made(arrays: Placed, step: int) -> State:
    """Return a state from its arrays."""
    values: dict[BlockVariable, object] = {}
    tangents: dict[BlockVariable, object] = {}
    known: dict[int, object] = {}
    for part in arrays.parts:
        value = part.value
        if isinstance(value, Codec):
            if part.place not in known:
                known[part.place] = value.from_array(arrays[part.place], part.variable.output)
            value = known[part.place]
        (tangents if part.is_tangent else values)[part.variable] = value
    return State(step, values, tangents)


class TapeStates(Slots[State, Array]):
    """Slots of states whose values nothing writes to: a slot is a reference."""

    shared = True

    def __init__(self, layout: TapeLayout) -> None:
        self._layout = layout

    def layout(self, state: State) -> TapeLayout:
        """Return the layout of all states."""
        return self._layout

    def slots(self, layout: Layout) -> TapeStates:
        """Return slots for them."""
        return self

    def keep(self, state: State, where: int | str) -> Kept:
        """Keep a state.  Raises StateError if it is not of the layout."""
        return Kept(state, self._layout.arrays(state, where))

    def adopt(self, arrays: list[Array], step: int) -> Kept:
        """Return a state from a store."""
        assert isinstance(arrays, Placed)
        return Kept(made(arrays, step), arrays)

    def load(self, kept: Kept, live: State) -> State:
        """Return a kept state."""
        state = kept.state
        assert isinstance(state, State)
        return state

    def check(self, live: State, where: int | str) -> None:
        """Raise StateError if a state is not of the layout."""
        self._layout.arrays(live, where)


def copied(value: object) -> object:
    """Return a copy of an adjoint or a tangent: blocks add to what variables have."""
    if value is None or isinstance(value, float):
        return value
    other: Any = value
    return other.copy() if isinstance(value, np.ndarray) else other._ad_copy()


def require_kept(step: int, value: object) -> None:
    """Raise StateError for a value that can neither be stored nor stay in memory."""
    if codec_of(value) is None and not isinstance(value, float | int | complex | None):
        raise StateError(
            f"state {step} holds a {_name_of(type(value))}, and what arrays that is made of is not "
            "known; tell it by multistage.interop.pyadjoint.register(type, to_array, from_array)"
        )
