"""The kinds of steps of a sequence, found by running one step of each kind.

The walk knows the kind of state t from the kind of step t - 1, so that only the first
step of each kind is run: 10 000 steps of three kinds cost three runs.  Steps of a kind
run on a state that some step returned: one that is held, or else the one that the steps
before it lead to, from state 0.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, StateError
from ..environment.captured import Environment
from ..environment.randomness import Generators, device_types
from ..environment.settings import Autocast, autocast
from ..measurement.checking import Check
from ..tensors.graphs import Used, uses
from ..tensors.states import Kind, kind_of
from .cells import Cells, StateKind, StepKind, VariedFacts, XKind, kind_of_tree
from .exploring_cells import Explorer
from .inputs import Inputs, Taken
from .states_given import known_parameters, state_leaves

MOST_KINDS = 64
# Errors by which a cell refuses a state or an input of another shape.
_MISFITS = (RuntimeError, TypeError, ValueError)


@dataclass(slots=True)
class _Held:
    step: int
    leaves: list[Tensor]
    nbytes: int


class Survey:
    """Finds the kinds of the steps of a sequence; everything is put back.

    Parameters
    ----------
    cells : Cells
    state : pytree of Tensor
        State 0.
    inputs : Inputs
    generators : Generators
    parameters : sequence of Tensor, optional
        Those whose gradients are required.
    check : {"error", "warn", "off"}
    exact : bool
        Whether steps of other shapes are of other kinds.
    room_bytes : int
        States that may be held at once, beside the latest and state 0.

    Raises
    ------
    ArgumentError
        If the state is no pytree of tensors, or there are too many kinds.
    """

    def __init__(
        self,
        cells: Cells,
        state: object,
        inputs: Inputs,
        generators: Generators,
        parameters: Sequence[Tensor] | None,
        check: Check,
        *,
        exact: bool,
        room_bytes: int,
    ) -> None:
        self._cells, self.inputs, self._generators = cells, inputs, generators
        self._check, self._exact, self._room = check, exact, room_bytes
        # Whether steps with other values beside the tensors of x_t are of other kinds.
        count = inputs.few_values() * len(cells.each)
        self._values = exact and 0 < count <= MOST_KINDS // 2
        leaves, spec = state_leaves(state)
        self.known = known_parameters(cells, inputs, parameters)
        self._involved = [*leaves, *self.known, *inputs.held()]
        self.kinds: list[StepKind] = []
        self.states: list[StateKind] = []
        self._first = _as_found(leaves, [t.requires_grad for t in leaves])
        self._numbers: dict[object, int] = {}
        self._number_of(StateKind(spec, *_kinds_of(leaves)))
        self._steps = array("L")
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by the state's number
        self._cursor = _Held(0, self._first, 0)
        self._xs: dict[int, XKind] = {}
        self._used: list[Used] = []  # by kind

    def facts(self, draws: bool | None) -> VariedFacts:
        """Walk the sequence; return what its steps do.

        Raises
        ------
        ArgumentError
            If there are more than `MOST_KINDS` kinds.
        StateError
            As `explore_cell`; and if a cell refuses the state that it is to be given.
        """
        known: dict[tuple[int, int, XKind | None], int] = {}
        state = 0
        with autocast(Autocast.capture(device_types(self._involved))):
            for t in range(self.inputs.steps):
                key = self._cells.at[t], state, self._x_kind(t)
                number = known.get(key)
                if number is None:
                    if self._exact and len(self.kinds) == MOST_KINDS:
                        raise self._too_many(t)
                    number = known[key] = len(self.kinds)
                    self.kinds.append(self._explored(t, *key))
                self._steps.append(number)
                state = self.kinds[number].after
        return self._joined(draws)

    def state_before(self, kind: StepKind) -> list[Tensor]:
        """Return the leaves of a state that steps of a kind may be run on."""
        held = self._held.get(kind.before)
        if held is not None:
            return held.leaves
        leaves = self._walked(kind.first)
        return _as_found(leaves, self.states[kind.before].wants)

    def close(self) -> None:
        """Release the states it holds."""
        self._held.clear()
        self._cursor = _Held(0, self._first, 0)

    def x_kind_of(self, kind: StepKind) -> XKind | None:
        """Return the kind of x_t at steps of a kind."""
        return self._x_kind(kind.first)

    # ------------------------------------------------------------------- kinds

    def _x_kind(self, t: int) -> XKind | None:
        """Return the kind of x_t."""
        inputs = self.inputs
        if isinstance(inputs.given, Tensor) or (inputs.made and not self._exact):
            t = 0  # all alike, or taken to be
        found = self._xs.get(t)
        if found is None:
            if inputs.made:
                with self._untouched(), torch.no_grad():
                    x = inputs.at(t)
            else:
                x = inputs.at(t)
            found = kind_of_tree(x, exact=self._exact, values=self._values)
            if t == 0:
                self._xs[0] = found
        return found

    def _number_of(self, state: StateKind) -> int:
        key: object = state if self._exact else _formless(state)
        number = self._numbers.setdefault(key, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def _explored(self, t: int, cell_number: int, before: int, x: XKind | None) -> StepKind:
        cell, kind = self._cells.each[cell_number], self.states[before]
        held = self._held.get(before)
        leaves = self._first if t == 0 else None
        if leaves is None and held is not None:
            leaves = held.leaves
        if leaves is None:
            leaves = _as_found(self._walked(t), kind.wants)

        def sample(taken: Taken) -> object:
            return self.inputs.at(t, taken)

        explorer = Explorer(
            cell, leaves, kind.spec, sample, self._generators, self.known, self._check, alike=False
        )
        try:
            looked, graded = explorer.look()
        except _MISFITS as error:
            if t == 0 or isinstance(error, (StateError, ArgumentError, torch.OutOfMemoryError)):
                raise
            raise StateError(
                f"{cell.name} does not run at step {t}, on a state of shapes {kind}: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}; a cell "
                "must take the state that the step before it returns"
            ) from error
        self._used.append(looked.used)
        found, flags = _kinds_of(looked.leaves, looked.wants)
        after = self._number_of(StateKind(looked.spec, found, flags))
        self._hold(after, t + 1, _as_found(looked.leaves, flags))
        return StepKind(
            cell=cell_number,
            before=before,
            after=after,
            x=x if self._exact and self.inputs.made else None,
            returns_y=looked.returns_y,
            y_spec=looked.y_spec if looked.ys else None,
            ys=tuple(kind_of(y) for y in looked.ys),
            differentiable=looked.differentiable,
            draws=looked.draws,
            graded=graded,
            buffers=looked.buffers,
            weight=looked.weight,
            parameters=(),  # known when all are
            first=t,
            name=self._name(cell_number, kind, t),
        )

    def _name(self, cell_number: int, before: StateKind, t: int) -> str:
        cells, given = self._cells.each, self.inputs.at(t) if not self.inputs.made else None
        name = cells[cell_number].name.removeprefix("cell ")
        leaves = pytree.tree_leaves(given)
        shapes: list[object] = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
        what = f"{cell_number} {name}" if len(cells) > 1 else name
        if self._values:
            shapes += [x for x in leaves if not isinstance(x, Tensor)]
        return f"{what} on {before}" + (f", x {', '.join(map(str, shapes))}" if shapes else "")

    def _too_many(self, t: int) -> ArgumentError:
        return ArgumentError(
            f"the steps up to {t} are of more than {MOST_KINDS} kinds (cells, shapes of state and "
            "of x_t), each of which would be run and measured; pad states or inputs to a few "
            "shapes, or give costs=StageCosts(...), one Stage for each step"
        )

    def _joined(self, draws: bool | None) -> VariedFacts:
        self.kinds = [
            replace(kind, parameters=tuple(i for i, p in enumerate(self.known) if uses(used, p)))
            for kind, used in zip(self.kinds, self._used, strict=True)
        ]
        kinds, first = self.kinds, self.states[0]
        speaking = [kind for kind in kinds if kind.y_spec is not None]
        for kind in speaking[1:]:
            if (kind.y_spec, _losses(kind)) != (speaking[0].y_spec, _losses(speaking[0])):
                raise StateError(
                    f"{kind.name} (step {kind.first}) returns y of structure {kind.y_spec}, and "
                    f"{speaking[0].name} (step {speaking[0].first}) one of {speaking[0].y_spec}; "
                    "steps that return y must all return the same tree, losses in the same places"
                )
        columns = zip(*(kind.differentiable for kind in speaking), strict=True)
        by_generator = zip(*(kind.draws for kind in kinds), strict=True)
        drawn = tuple(any(column) for column in by_generator)
        buffers = dict.fromkeys(buffer for kind in kinds for buffer in kind.buffers)
        return VariedFacts(
            spec=first.spec,
            returns_y=bool(speaking),
            y_spec=speaking[0].y_spec if speaking else None,
            summed=_losses(speaking[0]) if speaking else (),
            differentiable=tuple(any(column) for column in columns),
            wants=(first.wants,),
            draws=drawn if draws is None else (draws,) * len(drawn),
            graded=any(kind.graded for kind in kinds),
            buffers=tuple(buffers),
            parameters=tuple(self.known),
            weight=tuple([sum(column) for column in zip(*[k.weight for k in kinds], strict=True)]),
            x_kinds=(),
            kinds=tuple(kinds),
            states=tuple(self.states),
            steps=self._steps,
            exact=self._exact,
        )

    # ------------------------------------------------------------------ states

    def _hold(self, number: int, step: int, leaves: list[Tensor]) -> None:
        """Hold a state of a kind; let the oldest go, but for the latest, where there is no room."""
        nbytes = sum(t.untyped_storage().nbytes() for t in leaves)
        self._held[number] = _Held(step, leaves, nbytes)
        self._held.move_to_end(number)
        while len(self._held) > 1 and sum(h.nbytes for h in self._held.values()) > self._room:
            self._held.popitem(last=False)

    def _walked(self, t: int) -> list[Tensor]:
        """Return state t, by running the steps that lead to it."""
        if self._cursor.step > t:
            self._cursor = _Held(0, self._first, 0)
        step, leaves = self._cursor.step, [leaf.detach() for leaf in self._cursor.leaves]
        with self._untouched(), torch.no_grad():
            kind = self.states[0] if step == 0 else self.states[self._kind(step - 1).after]
            state = pytree.tree_unflatten(leaves, kind.spec)
            for i in range(step, t):
                result: Any = self._cells.each[self._cells.at[i]].call(state, self.inputs.at(i))
                state = result[0] if self._kind(i).returns_y else result
            leaves = pytree.tree_leaves(state)
        self._cursor = _Held(t, leaves, 0)
        return leaves

    def _kind(self, t: int) -> StepKind:
        return self.kinds[self._steps[t]]

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Run steps as things are now; put everything back."""
        cells, random = self._cells, self._generators.capture()
        buffers = [(module, key) for module, key, _ in cells.scope.buffers()]
        try:
            with Environment(cells.scope, cells.name, buffers).again(random=False):
                yield
        finally:
            self._generators.restore(random)


def _losses(kind: StepKind) -> tuple[bool, ...]:
    """Return which leaves of y are one number, a loss."""
    return tuple(not shape and dtype.is_floating_point for shape, dtype, _ in kind.ys)


def _kinds_of(
    leaves: Sequence[Tensor], wants: Sequence[bool] | None = None
) -> tuple[tuple[Kind, ...], tuple[bool, ...]]:
    flags = [t.requires_grad for t in leaves] if wants is None else wants
    return tuple(kind_of(t) for t in leaves), tuple(flags)


def _as_found(leaves: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor]:
    """Return detached leaves with wishes for gradients; one tensor twice stays one."""
    if torch.is_inference_mode_enabled():
        return list(leaves)
    once: dict[int, Tensor] = {}
    return [
        once.setdefault(id(t), t.detach().requires_grad_(w))
        for t, w in zip(leaves, wants, strict=True)
    ]


def _formless(state: StateKind) -> object:
    forms = tuple((len(size), dtype, device) for size, dtype, device in state.leaves)
    return state.spec, forms, state.wants
