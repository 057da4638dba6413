"""What a step does, found by running it a few times; everything is put back."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ...errors import StateError
from ..environment.captured import Environment
from ..environment.randomness import Generators
from ..environment.states import tensors_in
from ..measurement.checking import Check, complain
from ..measurement.saved import nodes_made
from ..tensors.checksums import checksum
from ..tensors.graphs import Used, Walked, graph_begins, graph_weight, held_elsewhere, leaves_below
from ..tensors.meter import storages_of
from ..tensors.states import Kind, copied, kind_of, said
from .cells import Cell
from .facts import Buffers
from .hooks import (
    hooks_on,
    refuse_hooks_on_inputs,
    refuse_hooks_on_nodes,
    refuse_hooks_on_parameters,
)
from .inputs import ELEMENT, Taken
from .surroundings import refuse_changes, refuse_graph


class StateVaries(StateError):
    """A cell returned a state of another shape than it was given."""


@dataclass(slots=True)
class Look:
    """What one run of a step has shown.

    Attributes
    ----------
    spec : TreeSpec
        Of the state after it.
    leaves, ys : lists of Tensor
        Of that state and of y, without their graph.
    differentiable, wants : tuples of bool
        Which of these outputs, and of the leaves, take part in the gradient.
    draws : tuple of bool
        By generator.
    found : list of Tensor
        Leaves of the graph that were not known.
    weight : (int, int, int)
    made : int
        See `StepKind`.
    hooked : bool
        Whether the step set hooks on its state.
    used : set
        For `uses`, which tells the parameters that the step's graph leads to.
    """

    spec: pytree.TreeSpec
    leaves: list[Tensor]
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    ys: list[Tensor]
    differentiable: tuple[bool, ...]
    wants: tuple[bool, ...]
    draws: tuple[bool, ...]
    buffers: Buffers
    found: list[Tensor]
    weight: tuple[int, int, int]
    made: int
    x_kinds: tuple[Kind, ...]
    hooked: bool
    used: Used

    @property
    def results(self) -> list[Tensor]:
        """All that the step returned."""
        return [*self.leaves, *self.ys]


class Explorer:
    """Runs a step a few times.

    Parameters
    ----------
    cell : Cell
    leaves, spec
        Of the state before it.
    x : callable
        `x(taken)` returns x_t; `taken` gets what stands for inputs that require gradients.
    generators : Generators
    known : list of Tensor
        Parameters; those found are added.
    check : {"error", "warn", "off"}
    alike : bool
        Whether the state must keep its structure and shapes.
    """

    def __init__(
        self,
        cell: Cell,
        leaves: Sequence[Tensor],
        spec: pytree.TreeSpec,
        x: Callable[[Taken], object],
        generators: Generators,
        known: list[Tensor],
        check: Check,
        *,
        alike: bool = True,
    ) -> None:
        self._check, self._alike = check, alike
        self._unhooked = False  # whether the step allows no hooks on saved tensors
        self._cell, self._leaves, self._spec = cell, leaves, spec
        self._x, self._generators, self._known = x, generators, known
        self._random = generators.capture()
        self._buffers = [(module, key) for module, key, _ in cell.scope.buffers()]
        self._around = Environment(cell.scope, cell.name, self._buffers)

    def look(self) -> Look:
        """Run the step once, with a graph but in inference mode; return what was seen."""
        if torch.is_inference_mode_enabled():
            return self._inferred()
        parameters = [p for p in self._cell.scope.parameters() if p.is_leaf]
        hooks = hooks_on(parameters)
        try:
            looked = self._looked_once(parameters)
        except RuntimeError as error:  # as `torch.func` has it
            if self._unhooked or "saved tensor hooks" not in str(error):
                raise
            self._unhooked = True
            looked = self._looked_once(parameters)
        if hooks_on(parameters) != hooks:
            refuse_hooks_on_parameters(self._cell.name, "in its first step")
        self._known += held_elsewhere(looked.found)
        return looked

    def _inferred(self) -> Look:
        copies = [copied(leaf) for leaf in self._leaves]
        with self.untouched():
            result: Any = self._cell.call(pytree.tree_unflatten(copies, self._spec), self._x([]))
        spec, leaves, returns_y, y_spec, ys = self._results_of(result)
        return Look(
            spec=spec,
            leaves=leaves,
            returns_y=returns_y,
            y_spec=y_spec,
            ys=ys,
            differentiable=(False,) * len(ys),
            wants=(False,) * len(leaves),
            draws=(False,) * len(self._random),
            buffers=(),
            found=[],
            weight=(0, 0, 0),
            made=0,
            x_kinds=(),
            hooked=False,
            used=set(),
        )

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Run the cell as it is now; put everything back."""
        try:
            with self._around.again(random=False):
                yield
        finally:
            now = self._generators.capture()
            drawn = self._generators.only_drawn(self._random, now)
            if drawn is not None:
                self._generators.restore(drawn)

    def graded(self, looked: Look) -> bool:
        """Whether a step returns other bits without a graph, from its state or the one after it.

        State 0 is often zeros, from which many kernels round alike.  The compiler
        makes other kernels for either, which may differ only later.  A step may also fail
        without a graph: a hook on its state needs one.
        """
        if torch.is_inference_mode_enabled():
            return False
        cell, spec = self._cell, self._spec
        wants = [leaf.requires_grad for leaf in self._leaves]

        def step(state: Sequence[Tensor], wants: Sequence[bool] | None) -> int | None:
            given = [t.detach() for t in state]
            if wants is not None:
                given = [t.requires_grad_(w) for t, w in zip(given, wants, strict=True)]
            try:
                with self.untouched(), torch.set_grad_enabled(wants is not None):
                    result = cell.call(pytree.tree_unflatten(given, spec), self._x([]))
            except Exception:  # whatever follows from a gradient that is not required
                if wants is None and torch.is_grad_enabled():
                    return None
                raise
            return checksum([t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)])

        seen = checksum(looked.results)
        if cell.is_compiled() or looked.hooked:  # which state 0 has from the forward sweep on
            return True
        if step(self._leaves, None) != seen:
            if self._check != "off" and step(self._leaves, wants) != seen:
                complain(
                    self._check,
                    f"{cell.name} returned other numbers when its first step was run again: it "
                    "must depend on its state, inputs, parameters and buffers alone; return what "
                    "it remembers in the state, and choose deterministic operators "
                    "(torch.use_deterministic_algorithms)",
                )
            return True
        if not _are_alike(looked.leaves, self._leaves):
            return False
        return step(looked.leaves, None) != step(looked.leaves, looked.wants)

    def _looked_once(self, parameters: Sequence[Tensor]) -> Look:
        with self._no_backward(parameters), self.untouched(), torch.enable_grad():
            return self._looked()

    @contextlib.contextmanager
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

    def _looked(self) -> Look:
        cell, spec = self._cell, self._spec
        given = [t.detach().requires_grad_(t.requires_grad) for t in self._leaves]
        before = [(m, k, b, b._version, b.detach().clone()) for m, k, b in self._owned()]
        begun = graph_begins()
        taken: Taken = []
        x = self._x(taken)
        # Copies, so that a cell that writes to its state is found out, not stopped by autograd.
        copies: list[Tensor] = [_Copy.apply(t) for t in given]
        versions = [t._version for t in copies]
        saved = Saved([*copies, *self._known, *tensors_in(x)])
        made = nodes_made()
        with contextlib.nullcontext() if self._unhooked else saved:
            result: Any = cell.call(pytree.tree_unflatten(copies, spec), x)
        made = nodes_made() - made
        for tensor, version in zip(copies, versions, strict=True):
            if tensor._version != version:
                raise StateError(
                    f"{cell.name} writes to the state it is given (a {tuple(tensor.shape)} "
                    "tensor); it must return new tensors"
                )
        refuse_hooks_on_nodes(cell.name, copies)
        refuse_hooks_on_inputs(cell.name, [leaf for place, leaf in taken if place == ELEMENT])
        drawn = self._generators.drawn(self._random, self._generators.capture())
        refuse_changes(cell.name, self._around, "in its first step")
        changed = tuple(
            (m, k)
            for m, k, b, version, value in before
            if m._buffers[k] is not b or b._version != version or not torch.equal(b, value)
        )
        for module, key in changed:
            refuse_graph(cell.name, module, key, "in its first step")
        new_spec, new_leaves, returns_y, y_spec, ys = self._results_of(result)
        exchanged = {id(module._buffers[key]) for module, key in changed}
        if any(id(leaf) in exchanged for leaf in ys):
            raise StateError(
                f"{cell.name} returns a buffer that it changes in y; it must return tensors that "
                "it leaves alone: a copy"
            )
        own = {id(t) for t in [*given, *(leaf for _, leaf in taken)]}
        roots = [t for t in [*new_leaves, *ys] if t.requires_grad]
        walked = Walked()
        found = list(leaves_below(roots, own, self._known, begun, cell.name, walked))
        return Look(
            spec=new_spec,
            leaves=[t.detach() for t in new_leaves],
            returns_y=returns_y,
            y_spec=y_spec,
            ys=[t.detach() for t in ys],
            differentiable=tuple(t.requires_grad for t in ys),
            wants=tuple(t.requires_grad for t in new_leaves),
            draws=tuple([name in drawn for name in self._generators.names]),
            buffers=changed,
            found=found,
            weight=(*graph_weight(roots, begun, [t.grad_fn for t in copies]), saved.nbytes),
            made=made,
            x_kinds=tuple(kind_of(t) for t in tensors_in(x)),
            hooked=any(t._backward_hooks for t in copies),
            used=walked.used,
        )

    def _results_of(
        self, result: Any
    ) -> tuple[pytree.TreeSpec, list[Tensor], bool, pytree.TreeSpec | None, list[Tensor]]:
        """Return structure and leaves of the state, whether there is a y, and those of y."""
        returns_y = self._returns_y(result)
        leaves, spec = self._state_of(result[0] if returns_y else result)
        ys, y_spec = self._outputs(result[1]) if returns_y else ([], None)
        return spec, leaves, returns_y, y_spec, ys

    def _state_of(self, state: object) -> tuple[list[Tensor], pytree.TreeSpec]:
        """Return the leaves and structure of a state that was returned.  Raises StateError."""
        leaves, spec = pytree.tree_flatten(state)
        for number, new in enumerate(leaves):
            if not isinstance(new, Tensor):
                raise StateError(
                    f"{self._cell.name} returned {type(new).__name__} as leaf {number} of its "
                    "state; it must be a pytree of tensors"
                )
        if not self._alike:
            return leaves, spec
        for number, (old, new) in enumerate(zip(self._leaves, leaves, strict=True)):
            if kind_of(old) != kind_of(new):
                raise StateVaries(
                    f"{self._cell.name} changed leaf {number} of its state from "
                    f"{said(kind_of(old))} to {said(kind_of(new))}; it must return a state like "
                    "the one it got"
                )
        return leaves, spec

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
            if pytree.tree_structure(result[0]) == spec or not self._alike:
                return True
            result = result[0]
        if not self._alike:
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

    def _outputs(self, y: object) -> tuple[list[Tensor], pytree.TreeSpec | None]:
        """Return the leaves and structure of y, which may be None."""
        if y is None:
            return [], None
        ys, spec = pytree.tree_flatten(y)
        for leaf in ys:
            if not isinstance(leaf, Tensor):
                raise StateError(
                    f"{self._cell.name} returns {type(leaf).__name__} in y; tensors only"
                )
        return ys, spec

    def _owned(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module, key in self._buffers:
            buffer = module._buffers[key]
            if buffer is not None:
                yield module, key, buffer


class Saved:
    """A context that counts the bytes of what graphs save that live at its end, each storage once.

    Inside a checkpoint nothing is saved for the graph, though it has the same nodes.

    Parameters
    ----------
    known : sequence of Tensor
        Not counted.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.nbytes = 0
        self._known = {key for tensor in known for key in storages_of(tensor)}
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _note(self, tensor: Tensor) -> Tensor:
        self._seen |= {key: weakref.ref(each) for key, each in storages_of(tensor).items()}
        # Not itself: an output that its own node keeps is a cycle that nothing collects.
        return tensor.detach()

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self._note, _same)

    def __exit__(self, *error: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        for key in self._seen.keys() - self._known:
            storage = self._seen[key]()
            self.nbytes += 0 if storage is None else storage.nbytes()


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Copy(torch.autograd.Function):
    """A copy of a tensor, with its strides and its alignment."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return [kind_of(t) for t in some] == [kind_of(t) for t in others]
