"""The kinds of steps of a sequence, found by running one step of each kind a few times.

The walk knows the kind of state t from the kind of step t - 1, so that only the first
step of each kind is run: 10 000 steps of three kinds cost three runs.  Steps of a kind
run on a state that some step returned: one that is held, or else the one that the steps
before it lead to, from state 0.

Equal steps end the walk early: all are of the kind of the last one that was looked at, once
no more leaves of the state take part in the gradient.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, StateError
from ..environment.captured import Environment, generators_of
from ..environment.randomness import Generators, State
from ..environment.settings import casting_anew, leave_hooks_alone
from ..environment.states import tensors_in
from ..measurement.checking import complain
from ..measurement.saved import Saved, nodes_made
from ..tensors.checksums import checksum
from ..tensors.graphs import (
    Used,
    Walked,
    graph_begins,
    graph_weight,
    held_elsewhere,
    leaves_below,
    uses,
)
from ..tensors.meter import storages_among
from ..tensors.states import copied, kind_of, said
from .arguments import Settings
from .cells import Cell, Cells, known_parameters, state_leaves
from .facts import Facts, StateKind, StepKind, XKind, form_of, kind_of_tree
from .hooks import (
    hooks_on,
    refuse_hooks_on_inputs,
    refuse_hooks_on_nodes,
    refuse_hooks_on_parameters,
)
from .inputs import ELEMENT, Inputs, Taken
from .surroundings import refuse_changed, refuse_graph

MOST_KINDS = 64
_SHARE = 8  # of the limit, what states held while kinds are found may take
FEW = 8  # steps that a fused cell is looked at on
# Errors by which a cell refuses a state or an input of another shape.
_MISFITS = (RuntimeError, TypeError, ValueError)


class StateVaries(StateError):
    """A cell returned a state of another shape than it was given."""


class Survey:
    """Finds the kinds of the steps of a sequence; everything is put back.

    Of a part of the limit states may be held, beside the latest and state 0.  Without given
    costs steps of other shapes are of other kinds.  Steps that are taken to be equal and are
    not raise `StateVaries`.

    Attributes
    ----------
    generators : Generators
        That steps may draw from.
    known : list of Tensor
        Parameters; those that steps are found to use are added.

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
        equal: bool,
    ) -> None:
        leave_hooks_alone()
        self.cells, self.inputs = cells, inputs
        exact, memory = settings.costs is None, settings.memory
        self.check, self.equal, self._exact = settings.check, equal, exact
        self._room = 0 if memory is None or memory.bytes is None else memory.bytes // _SHARE
        leaves, spec = state_leaves(state)
        self.generators = generators_of([cells.scope], [*leaves, *inputs.held()])
        # Whether steps with other values beside the tensors of x_t are of other kinds.
        count = 0 if equal else inputs.few_values() * len(cells.each)
        self._values = exact and 0 < count <= MOST_KINDS // 2
        self.known = known_parameters(cells, inputs, parameters)
        self._kinds: list[tuple[StepKind, Used]] = []
        self._states: list[StateKind] = []
        self._first = _as_found(leaves, [t.requires_grad for t in leaves])
        self._numbers: dict[StateKind, int] = {}
        self._number_of(spec, leaves, [t.requires_grad for t in leaves])
        self._steps = array("L")
        # By the state's number: of which step, and its leaves.
        self._held: OrderedDict[int, tuple[int, list[Tensor]]] = OrderedDict()
        self._xs: dict[int, XKind] = {}

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
        known: dict[tuple[int, int, XKind | None], int] = {}
        before = 0
        with casting_anew():
            for t in range(self.inputs.steps):
                key = self.cells.number(t), before, self.x_kind(t)
                number = known.setdefault(key, len(self._kinds))
                if number == len(self._kinds):
                    self._look(t, *key)
                self._steps.append(number)
                after = self._kinds[number][0].after
                if self.equal and after == before:  # so are all steps to come
                    break
                before = after
        return self._joined(draws)

    def state_before(self, kind: StepKind) -> list[Tensor]:
        """Return the leaves of a state that steps of a kind may be run on."""
        return self._state(kind.before, kind.first)

    def close(self) -> None:
        """Release the states it holds; hold one at a time from now on."""
        self._held.clear()
        self._room = 0

    # ------------------------------------------------------------------- kinds

    def x_kind(self, t: int) -> XKind | None:
        """Return the kind of x_t."""
        inputs = self.inputs
        if self.equal:
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

    def _number_of(
        self, spec: pytree.TreeSpec, leaves: Sequence[Tensor], wants: Sequence[bool]
    ) -> int:
        """Return the number of the kind of a state, which is noted if it is new."""
        state = StateKind(spec, tuple(kind_of(t) for t in leaves), tuple(wants))
        key = state if self._exact else replace(state, leaves=tuple(map(form_of, state.leaves)))
        number = self._numbers.setdefault(key, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number

    def _look(self, t: int, cell: int, before: int, x: XKind | None) -> None:
        """Look at step t, the first of its kind."""
        if self._exact and not self.equal and len(self._kinds) == MOST_KINDS:
            raise ArgumentError(
                f"the steps up to {t} are of more than {MOST_KINDS} kinds (cells, shapes of state "
                "and of x_t), each of which would be run and measured; pad states or inputs to a "
                "few shapes, or give costs=StageCosts(...), one Stage for each step"
            )
        state = self._states[before]
        try:
            look = _Look(self, t, self.cells.each[cell], state.spec, self._state(before, t))
            kind, wants = look.found(), look.wants
            if self.equal:  # once a leaf takes part in the gradient it does so in later steps
                wants = [a or b for a, b in zip(wants, state.wants, strict=True)]
            after = self._number_of(look.after_spec, look.after, wants)
            last = not self.equal or after == before or t + 1 == self.inputs.steps
            graded = last and look.graded()
            if not last and any(kind.draws):  # what it remembers may be a draw, as of a cache
                look.require_repeats()
        except _MISFITS as error:
            refused = isinstance(error, (StateError, ArgumentError, torch.OutOfMemoryError))
            if t == 0 or self.equal or refused:
                raise
            name, what = self.cells.each[cell].name, str(error) or type(error).__name__
            raise StateError(
                f"{name} does not run at step {t}, on a state of shapes {state}: "
                f"{what.splitlines()[0]}; a cell must take the state that the step before it "
                "returns"
            ) from error
        if not self.equal:
            self._hold(after, t + 1, _as_found(look.after, wants))
        kind = replace(
            kind,
            cell=cell,
            before=before,
            after=after,
            x=x if self._exact and self.inputs.made else None,
            graded=graded,
            first=t,
            name=self._name(cell, state, t),
        )
        self._kinds.append((kind, look.used))  # its parameters are known when all kinds are

    def _name(self, cell: int, before: StateKind, t: int) -> str:
        cells, given = self.cells.each, self.inputs.at(t) if not self.inputs.made else None
        name = cells[cell].name.removeprefix("cell ")
        leaves = pytree.tree_leaves(given)
        shapes: list[object] = [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]
        what = f"{cell} {name}" if len(cells) > 1 else name
        if self._values:
            shapes += [x for x in leaves if not isinstance(x, Tensor)]
        return f"{what} on {before}" + (f", x {', '.join(map(str, shapes))}" if shapes else "")

    def _joined(self, draws: bool | None) -> Facts:
        kinds = [
            replace(kind, parameters=tuple(i for i, p in enumerate(self.known) if uses(used, p)))
            for kind, used in self._kinds
        ]
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
        return Facts(
            kinds=tuple(kinds),
            states=tuple(self._states),
            steps=self._steps,
            equal=self.equal,
            exact=self._exact,
            looked_at=min(FEW, self.inputs.steps) if self.cells.fused else 1,
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
        if self.equal:
            return _as_found(self._first, self._states[number].wants)
        if t == 0:
            return self._first
        if number not in self._held:
            self._hold(number, t, _as_found(self._walked(t), self._states[number].wants))
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
        kinds = [self._kinds[number][0] for number in self._steps[:t]]
        spec = self._states[kinds[step - 1].after if step else 0].spec
        with self._untouched(), torch.set_grad_enabled(any(kind.graded for kind in kinds)):
            for i in range(step, t):
                given = _as_found(leaves, [leaf.requires_grad for leaf in leaves])
                result: Any = self.cells.at(i).call(spec.unflatten(given), self.inputs.at(i))
                leaves, spec = pytree.tree_flatten(result[0] if kinds[i].returns_y else result)
        return leaves

    def _untouched(self) -> AbstractContextManager[None]:
        """Run steps as things are now; put everything back."""
        scope, name = self.cells.scope, self.cells.name
        around = Environment(scope, name, [(module, key) for module, key, _ in scope.buffers()])
        return _put_back(around, self.generators, self.generators.capture())


def _losses(kind: StepKind) -> tuple[bool, ...]:
    """Return which leaves of y are one number, a loss."""
    return tuple(not shape and dtype.is_floating_point for shape, dtype, _ in kind.ys)


def _as_found(leaves: Sequence[Tensor], wants: Sequence[bool]) -> list[Tensor]:
    """Return detached leaves with wishes for gradients; one tensor twice stays one."""
    if torch.is_inference_mode_enabled():
        return list(leaves)
    once: dict[int, Tensor] = {}
    return [
        once.setdefault(id(t), t.detach().requires_grad_(w))
        for t, w in zip(leaves, wants, strict=True)
    ]


# --------------------------------------------------------------------- one step


@contextmanager
def _put_back(
    around: Environment, generators: Generators, random: Sequence[State]
) -> Iterator[None]:
    """Run steps as things are now; put everything back, and generators that were drawn from."""
    try:
        with around.again(random=False):
            yield
    finally:
        drawn = generators.only_drawn(random, generators.capture())
        if drawn is not None:
            generators.restore(drawn)


class _Look:
    """A step that is run a few times; everything is put back.

    Attributes
    ----------
    after : list of Tensor
        The leaves of the state that it has returned, without their graph; its structure.
    wants : sequence of bool
        Which of these take part in the gradient.
    used : set
        For `uses`, which tells the parameters that the step's graph leads to.
    """

    after: list[Tensor]
    after_spec: pytree.TreeSpec
    wants: Sequence[bool]
    used: Used

    def __init__(
        self, survey: Survey, t: int, cell: Cell, spec: pytree.TreeSpec, leaves: list[Tensor]
    ) -> None:
        self._survey, self._t, self._cell = survey, t, cell
        self._spec, self._leaves = spec, leaves
        self._generators, self._random = survey.generators, survey.generators.capture()
        self._buffers = [(module, key) for module, key, _ in cell.scope.buffers()]
        self._around = Environment(cell.scope, cell.name, self._buffers)
        self._ys: list[Tensor] = []
        self._hooked = False  # whether the step set hooks on its state

    def _untouched(self) -> AbstractContextManager[None]:
        """Run the cell as it is now; put everything back."""
        return _put_back(self._around, self._generators, self._random)

    def _x(self, taken: Taken) -> object:
        """Return x_t; `taken` gets what stands for inputs that require gradients."""
        inputs = self._survey.inputs
        if self._survey.equal:
            return inputs.sample(FEW, fused=self._survey.cells.fused, leaves=taken)
        return inputs.at(self._t, taken)

    def found(self) -> StepKind:
        """Run the step once, with a graph but in inference mode; return what it does."""
        cell, unknown = self._cell, list[Tensor]()
        if torch.is_inference_mode_enabled():
            with self._untouched():
                state = pytree.tree_unflatten([copied(t) for t in self._leaves], self._spec)
                result: Any = cell.call(state, self._x([]))
            self.used = set()
            return self._kind(*self._results_of(result))
        parameters = [p for p in cell.scope.parameters() if p.is_leaf]
        hooks = hooks_on(parameters)

        def once(saved: Saved | None) -> StepKind:
            with self._no_backward(parameters), self._untouched(), torch.enable_grad():
                return self._looked(saved, unknown)

        try:
            kind = once(Saved())
        except RuntimeError as error:  # as `torch.func` has it
            if "saved tensor hooks" not in str(error):
                raise
            kind = once(None)
        if hooks_on(parameters) != hooks:
            refuse_hooks_on_parameters(cell.name, "in its first step")
        self._survey.known += held_elsewhere(unknown)
        return kind

    def _kind(
        self,
        leaves: Sequence[Tensor],
        returns_y: bool,
        ys: Sequence[Tensor],
        y_spec: pytree.TreeSpec | None,
    ) -> StepKind:
        """Return what the step has returned, which is kept without its graph."""
        self.wants = [t.requires_grad for t in leaves]
        self.after, self._ys = [t.detach() for t in leaves], [t.detach() for t in ys]
        return StepKind(
            returns_y=returns_y,
            y_spec=y_spec,
            ys=tuple(kind_of(t) for t in ys),
            differentiable=tuple(t.requires_grad for t in ys),
            draws=(False,) * len(self._random),
        )

    def graded(self) -> bool:
        """Whether a step returns other bits without a graph, from its state or the one after it.

        State 0 is often zeros, from which many kernels round alike.  The compiler
        makes other kernels for either, which may differ only later.  A step may also fail
        without a graph: a hook on its state needs one.
        """
        if torch.is_inference_mode_enabled():
            return False
        if self._cell.is_compiled() or self._hooked:  # which state 0 has from the forward sweep on
            return True
        if self._again(self._leaves, None) != checksum([*self.after, *self._ys]):
            self.require_repeats()
            return True
        if [kind_of(t) for t in self.after] != [kind_of(t) for t in self._leaves]:
            return False
        return self._again(self.after, None) != self._again(self.after, self.wants)

    def require_repeats(self) -> None:
        """Complain of a step that returns other numbers when it is run again."""
        if self._survey.check == "off" or torch.is_inference_mode_enabled():
            return
        wants = [leaf.requires_grad for leaf in self._leaves]
        if self._again(self._leaves, wants) != checksum([*self.after, *self._ys]):
            complain(
                self._survey.check,
                f"{self._cell.name} returned other numbers when its first step was run again: it "
                "must depend on its state, inputs, parameters and buffers alone; return what "
                "it remembers in the state, and choose deterministic operators "
                "(torch.use_deterministic_algorithms)",
            )

    def _again(self, state: Sequence[Tensor], wants: Sequence[bool] | None) -> int | None:
        """Return a checksum of what the step returns from a state; without a graph for None."""
        given = [t.detach() for t in state]
        if wants is not None:
            given = [t.requires_grad_(w) for t, w in zip(given, wants, strict=True)]
        try:
            with self._untouched(), torch.set_grad_enabled(wants is not None):
                result = self._cell.call(pytree.tree_unflatten(given, self._spec), self._x([]))
        except Exception:  # whatever follows from a gradient that is not required
            if wants is None and torch.is_grad_enabled():
                return None
            raise
        return checksum(tensors_in(result))

    @contextmanager
    def _no_backward(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Refuse additions to .grad of parameters, but those of other threads."""
        here = threading.get_ident()

        def refuse(*_: object) -> None:
            # On a device it is autograd's own thread.
            if here == threading.get_ident() or not on_cpu:
                raise StateError(
                    f"{self._cell.name} calls backward, which adds to .grad of its parameters, and "
                    "would once more when it is run again; call torch.autograd.grad"
                )

        on_cpu = all(p.device.type == "cpu" for p in parameters)
        nodes = [get_gradient_edge(p).node for p in parameters if p.requires_grad]
        handles = [node.register_prehook(refuse) for node in nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _looked(self, saved: Saved | None, unknown: list[Tensor]) -> StepKind:
        """Return what the step does; leaves of its graph that were not known go to `unknown`."""
        cell, known = self._cell, self._survey.known
        given = [t.detach().requires_grad_(t.requires_grad) for t in self._leaves]
        buffers = [(m, k, m._buffers[k]) for m, k in self._buffers]
        before = [(m, k, b, b._version, b.detach().clone()) for m, k, b in buffers if b is not None]
        begun, taken = graph_begins(), Taken()
        x = self._x(taken)
        # Copies, so that a cell that writes to its state is found out, not stopped by autograd.
        copies: list[Tensor] = [_Copy.apply(t) for t in given]
        versions = [t._version for t in copies]
        made = nodes_made()
        with nullcontext() if saved is None else saved:
            result: Any = cell.call(pytree.tree_unflatten(copies, self._spec), x)
        made = nodes_made() - made
        beside = storages_among([*copies, *known, *tensors_in(x)]).keys()
        kept = {} if saved is None else storages_among(saved.held())
        saved_bytes = sum(each.nbytes() for key, each in kept.items() if key not in beside)
        del kept, beside
        for tensor, version in zip(copies, versions, strict=True):
            if tensor._version != version:
                raise StateError(
                    f"{cell.name} writes to the state it is given (a {tuple(tensor.shape)} "
                    "tensor); it must return new tensors"
                )
        refuse_hooks_on_nodes(cell.name, copies)
        refuse_hooks_on_inputs(cell.name, [leaf for place, leaf in taken if place == ELEMENT])
        drawn = self._generators.drawn(self._random, self._generators.capture())
        refuse_changed(cell.name, self._around.differences(), "in its first step")
        changed = tuple(
            (m, k)
            for m, k, b, version, value in before
            if m._buffers[k] is not b or b._version != version or not torch.equal(b, value)
        )
        for module, key in changed:
            refuse_graph(cell.name, module, key, "in its first step")
        leaves, returns_y, ys, y_spec = self._results_of(result)
        written = [b for m, k, b, *_ in before if (m, k) in changed and m._buffers[k] is b]
        self._refuse_buffers(changed, written, leaves, ys)
        own = {id(t) for t in [*given, *(leaf for _, leaf in taken)]}
        roots = [t for t in [*leaves, *ys] if t.requires_grad]
        walked = Walked()
        unknown[:] = leaves_below(roots, own, known, begun, cell.name, walked)
        self._hooked = any(t._backward_hooks for t in copies)
        self.used = walked.used
        return replace(
            self._kind(leaves, returns_y, ys, y_spec),
            draws=tuple([name in drawn for name in self._generators.names]),
            x_kinds=tuple(kind_of(t) for t in tensors_in(x)),
            buffers=changed,
            weight=(*graph_weight(roots, begun, [t.grad_fn for t in copies]), saved_bytes),
            made=made,
        )

    def _refuse_buffers(
        self,
        changed: Sequence[tuple[torch.nn.Module, str]],
        written: Sequence[Tensor],
        leaves: Sequence[Tensor],
        ys: Sequence[Tensor],
    ) -> None:
        """Raise StateError if a step returns a buffer to which it, or the next one, writes."""
        exchanged = {id(module._buffers[key]) for module, key in changed}
        memory = storages_among(written).keys()
        if any(id(y) in exchanged for y in ys):
            where = "y"
        elif not memory.isdisjoint(storages_among(leaves)):
            where = "its state"
        else:
            return
        raise StateError(
            f"{self._cell.name} returns a buffer that it changes in {where}; it must return "
            "tensors that it leaves alone: a copy"
        )

    def _results_of(
        self, result: Any
    ) -> tuple[list[Tensor], bool, list[Tensor], pytree.TreeSpec | None]:
        """Return the leaves of the state, whether there is a y, its leaves and structure."""
        returns_y = self._returns_y(result)
        state, y = result if returns_y else (result, None)
        leaves, self.after_spec = pytree.tree_flatten(state)
        for number, new in enumerate(leaves):
            if not isinstance(new, Tensor):
                raise StateError(
                    f"{self._cell.name} returned {type(new).__name__} as leaf {number} of its "
                    "state; it must be a pytree of tensors"
                )
        if self._survey.equal:
            for number, (old, new) in enumerate(zip(self._leaves, leaves, strict=True)):
                if kind_of(old) != kind_of(new):
                    raise StateVaries(
                        f"{self._cell.name} changed leaf {number} of its state from "
                        f"{said(kind_of(old))} to {said(kind_of(new))}; it must return a state "
                        "like the one it got"
                    )
        if y is None:
            return leaves, returns_y, [], None
        ys, y_spec = pytree.tree_flatten(y)
        for leaf in ys:
            if not isinstance(leaf, Tensor):
                raise StateError(
                    f"{self._cell.name} returns {type(leaf).__name__} in y; tensors only"
                )
        return leaves, returns_y, ys, y_spec

    def _returns_y(self, result: object) -> bool:
        """Whether a step returned (state, y).

        Where states may be of another structure each, a pair that is not like the state it
        was given is (state, y).
        """
        spec = self._spec
        if pytree.tree_structure(result) == spec:
            return False
        self._refuse_two_meanings(result)
        if isinstance(result, tuple) and len(result) == 2:
            if pytree.tree_structure(result[0]) == spec or not self._survey.equal:
                return True
            result = result[0]
        if not self._survey.equal:
            return False
        raise StateVaries(
            f"{self._cell.name} got a state of structure {spec} and returned "
            f"{pytree.tree_structure(result)}; it must return a state like it, or (state, y)"
        )

    def _refuse_two_meanings(self, result: object) -> None:
        """Raise StateError for a pair that is the state in another container, or (state, y)."""
        state = pytree.tree_unflatten(self._leaves, self._spec)
        if not (isinstance(result, tuple) and len(result) == 2):
            return
        if not (isinstance(state, list | tuple | dict) and len(state) == 2):
            return
        inner = state.values() if isinstance(state, dict) else state
        if [pytree.tree_structure(x) for x in inner] == [pytree.tree_structure(x) for x in result]:
            given, returned = type(state).__name__, type(result).__name__
            raise StateError(
                f"{self._cell.name} got a {given} of two as its state and returned a {returned} "
                "of two like them, which may be the next state or (state, y): if it is the next "
                f"state, let state= be a {returned} too; if it is (state, y), let its first be a "
                f"{given} like the state"
            )


class _Copy(torch.autograd.Function):
    """A copy of a tensor, with its strides and its alignment."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
