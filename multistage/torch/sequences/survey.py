"""The kinds of steps of a sequence, found by running one step of each kind.

The walk knows the kind of state t from the kind of step t - 1, so that only the first
step of each kind is run: 10 000 steps of three kinds cost three runs.  Steps of a kind
run on a state that some step returned: one that is held, or else the one that the steps
before it lead to, from state 0.

Equal steps need no walk: all are of the kind of the last one that was looked at, once no
more leaves of the state take part in the gradient.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, StateError
from ..environment.captured import Environment, generators_of
from ..environment.randomness import device_types
from ..environment.settings import Autocast, autocast, leave_hooks_alone
from ..tensors.graphs import Used, uses
from ..tensors.states import Kind, kind_of
from .arguments import Settings
from .cells import Cells, known_parameters, state_leaves
from .exploring import Explorer, StateVaries, put_back
from .facts import Facts, StateKind, StepKind, XKind, form_of, kind_of_tree
from .hooks import looking
from .inputs import Inputs, Taken

MOST_KINDS = 64
_SHARE = 8  # of the limit, what states held while kinds are found may take
FEW = 8  # steps that a fused cell is looked at on
# Errors by which a cell refuses a state or an input of another shape.
_MISFITS = (RuntimeError, TypeError, ValueError)


def surveyed(
    cells: Cells,
    state: object,
    inputs: Inputs,
    parameters: Sequence[Tensor] | None,
    draws: bool | None,
    settings: Settings,
    *,
    equal: bool,
    either: bool,
) -> tuple[Survey, Facts]:
    """Look at steps of each kind; return what does so, and what they do.

    With `either` those that are taken to be `equal` may turn out to differ.
    """
    with looking():
        try:
            survey = Survey(cells, state, inputs, parameters, settings, equal=equal)
            return survey, survey.facts(draws)
        except StateVaries:
            if not either:
                raise
        survey = Survey(cells, state, inputs, parameters, settings, equal=False)
        return survey, survey.facts(draws)


class Survey:
    """Finds the kinds of the steps of a sequence; everything is put back.

    Parameters
    ----------
    cells : Cells
    state : pytree of Tensor
        State 0.
    inputs : Inputs
    parameters : sequence of Tensor, optional
        Those whose gradients are required.
    settings : Settings
        Of a part of the limit states may be held, beside the latest and state 0.  Without
        given costs steps of other shapes are of other kinds.
    equal : bool
        Whether steps are taken to be equal: `StateVaries` is raised if they are not.

    Attributes
    ----------
    generators : Generators
        That steps may draw from.

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
        parameters: Sequence[Tensor] | None,
        settings: Settings,
        *,
        equal: bool,
    ) -> None:
        leave_hooks_alone()
        self.cells, self.inputs = cells, inputs
        exact, memory = settings.costs is None, settings.memory
        self._check, self._equal, self._exact = settings.check, equal, exact
        self._room = 0 if memory is None or memory.bytes is None else memory.bytes // _SHARE
        leaves, spec = state_leaves(state)
        self.generators = generators_of([cells.scope], [*leaves, *inputs.held()])
        # Whether steps with other values beside the tensors of x_t are of other kinds.
        count = 0 if equal else inputs.few_values() * len(cells.each)
        self._values = exact and 0 < count <= MOST_KINDS // 2
        self.known = known_parameters(cells, inputs, parameters)
        self._involved = [*leaves, *self.known, *inputs.held()]
        self.kinds: list[StepKind] = []
        self.states: list[StateKind] = []
        self._first = _as_found(leaves, [t.requires_grad for t in leaves])
        self._numbers: dict[StateKind, int] = {}
        self._number_of(StateKind(spec, *_kinds_of(leaves)))
        self._steps = array("L")
        # By the state's number: of which step, and its leaves.
        self._held: OrderedDict[int, tuple[int, list[Tensor]]] = OrderedDict()
        self._xs: dict[int, XKind] = {}
        self._used: list[Used] = []  # by kind

    def facts(self, draws: bool | None) -> Facts:
        """Look at a step of each kind; return what steps do.

        Raises
        ------
        ArgumentError
            If there are more than `MOST_KINDS` kinds; if a step uses tensors of a graph that
            were not given as parameters.
        StateVaries
            If steps are to be equal, and a state differs from the one before it.
        StateError
            If a step writes to the state it gets, changes what it refers to, returns other
            numbers each time, or refuses the state that it is to be given.
        """
        with autocast(Autocast.capture(device_types(self._involved))):
            self._alike() if self._equal else self._walk()
        return self._joined(draws)

    def _alike(self) -> None:
        """Look at the first step until no more leaves of the state take part in the gradient."""
        while True:
            number, before = len(self.kinds), self.states[len(self.kinds)]
            leaves = _as_found(self._first, before.wants)
            explorer = self._explorer(0, 0, before, leaves)
            kind = explorer.look()
            wants = [a or b for a, b in zip(explorer.wants, before.wants, strict=True)]
            after = self._number_of(StateKind(before.spec, *_kinds_of(self._first, wants)))
            last = after == number or number + 1 == self.inputs.steps
            kind = replace(kind, before=number, after=after, graded=last and explorer.graded())
            self._add(replace(kind, first=number, name=self._name(0, before, 0)), explorer.used)
            self._steps.append(number)
            if last:
                return

    def _walk(self) -> None:
        known: dict[tuple[int, int, XKind | None], int] = {}
        state = 0
        for t in range(self.inputs.steps):
            key = self.cells.number(t), state, self._x_kind(t)
            number = known.get(key)
            if number is None:
                if self._exact and len(self.kinds) == MOST_KINDS:
                    raise self._too_many(t)
                number = known[key] = len(self.kinds)
                self._explored(t, *key)
            self._steps.append(number)
            state = self.kinds[number].after

    def state_before(self, kind: StepKind) -> list[Tensor]:
        """Return the leaves of a state that steps of a kind may be run on."""
        return self._state(kind.before, kind.first)

    def close(self) -> None:
        """Release the states it holds; hold one at a time from now on."""
        self._held.clear()
        self._room = 0

    def x_kind_of(self, kind: StepKind) -> XKind | None:
        """Return the kind of x_t at steps of a kind."""
        return self._x_kind(kind.first)

    # ------------------------------------------------------------------- kinds

    def _x_kind(self, t: int) -> XKind | None:
        """Return the kind of x_t."""
        inputs = self.inputs
        if self._equal:
            return None
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
        key = state if self._exact else replace(state, leaves=tuple(map(form_of, state.leaves)))
        number = self._numbers.setdefault(key, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def _explored(self, t: int, cell_number: int, before: int, x: XKind | None) -> None:
        kind, leaves = self.states[before], self._state(before, t)
        try:
            explorer = self._explorer(t, cell_number, kind, leaves)
            looked, graded = explorer.look(), explorer.graded()
        except _MISFITS as error:
            if t == 0 or isinstance(error, (StateError, ArgumentError, torch.OutOfMemoryError)):
                raise
            name, said = self.cells.each[cell_number].name, str(error) or type(error).__name__
            raise StateError(
                f"{name} does not run at step {t}, on a state of shapes {kind}: "
                f"{said.splitlines()[0]}; a cell must take the state that the step before it "
                "returns"
            ) from error
        found, flags = _kinds_of(explorer.after, explorer.wants)
        after = self._number_of(StateKind(explorer.after_spec, found, flags))
        self._hold(after, t + 1, _as_found(explorer.after, flags))
        looked = replace(
            looked,
            cell=cell_number,
            before=before,
            after=after,
            x=x if self._exact and self.inputs.made else None,
            graded=graded,
            first=t,
            name=self._name(cell_number, kind, t),
        )
        self._add(looked, explorer.used)

    def _explorer(
        self, t: int, cell_number: int, kind: StateKind, leaves: Sequence[Tensor]
    ) -> Explorer:
        """Return what runs step t on a state."""
        inputs, fused = self.inputs, self.cells.fused

        def sample(taken: Taken) -> object:
            return (
                inputs.sample(FEW, fused=fused, leaves=taken)
                if self._equal
                else inputs.at(t, taken)
            )

        return Explorer(
            self.cells.each[cell_number],
            leaves,
            kind.spec,
            sample,
            self.generators,
            self.known,
            self._check,
            alike=self._equal,
        )

    def _add(self, kind: StepKind, used: Used) -> None:
        self.kinds.append(kind)  # its parameters are known when all kinds are
        self._used.append(used)

    def _name(self, cell_number: int, before: StateKind, t: int) -> str:
        cells, given = self.cells.each, self.inputs.at(t) if not self.inputs.made else None
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

    def _joined(self, draws: bool | None) -> Facts:
        self.kinds = [
            replace(kind, parameters=tuple(i for i, p in enumerate(self.known) if uses(used, p)))
            for kind, used in zip(self.kinds, self._used, strict=True)
        ]
        kinds = self.kinds
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
        fused = self.cells.fused
        return Facts(
            kinds=tuple(kinds),
            states=tuple(self.states),
            steps=self._steps,
            equal=self._equal,
            exact=self._exact,
            looked_at=min(FEW, self.inputs.steps) if fused else 1,
            y_spec=speaking[0].y_spec if speaking else None,
            summed=_losses(speaking[0]) if speaking else (),
            differentiable=tuple(any(column) for column in columns),
            draws=drawn if draws is None else (draws,) * len(drawn),
            graded=any(kind.graded for kind in kinds),
            buffers=tuple(dict.fromkeys(buffer for kind in kinds for buffer in kind.buffers)),
            parameters=tuple(self.known),
        )

    # ------------------------------------------------------------------ states

    def _state(self, number: int, t: int) -> list[Tensor]:
        """Return the leaves of state t, or of another one of its kind."""
        if t == 0:
            return self._first
        if number not in self._held:
            self._hold(number, t, _as_found(self._walked(t), self.states[number].wants))
        return self._held[number][1]

    def _hold(self, number: int, step: int, leaves: list[Tensor]) -> None:
        """Hold a state of a kind; let the oldest go, but for the latest, where there is no room."""
        held = self._held
        held[number] = step, leaves
        held.move_to_end(number)
        sizes = {
            k: sum(t.untyped_storage().nbytes() for t in each) for k, (_, each) in held.items()
        }
        while len(held) > 1 and sum(sizes[k] for k in held) > self._room:
            held.popitem(last=False)

    def _walked(self, t: int) -> list[Tensor]:
        """Return state t, by running the steps that lead to it from the last one before."""
        before = [each for each in self._held.values() if each[0] <= t]
        step, leaves = max(before, key=lambda each: each[0], default=(0, self._first))
        kind = self.states[self.kinds[self._steps[step - 1]].after if step else 0]
        with self._untouched(), torch.no_grad():
            state = pytree.tree_unflatten([leaf.detach() for leaf in leaves], kind.spec)
            for i in range(step, t):
                result: Any = self.cells.at(i).call(state, self.inputs.at(i))
                state = result[0] if self.kinds[self._steps[i]].returns_y else result
        return pytree.tree_leaves(state)

    def _untouched(self) -> AbstractContextManager[None]:
        """Run steps as things are now; put everything back."""
        scope, name = self.cells.scope, self.cells.name
        around = Environment(scope, name, [(module, key) for module, key, _ in scope.buffers()])
        return put_back(around, self.generators, self.generators.capture())


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
