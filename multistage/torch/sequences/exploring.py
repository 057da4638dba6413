"""What a step does, found by running it a few times; everything is put back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from ...errors import StateError
from ..environment.captured import Environment
from ..environment.randomness import Generators, State
from ..environment.states import tensors_in
from ..measurement.checking import Check, complain
from ..measurement.saved import Saved, nodes_made
from ..tensors.checksums import checksum
from ..tensors.graphs import Used, Walked, graph_begins, graph_weight, held_elsewhere, leaves_below
from ..tensors.meter import storages_of
from ..tensors.states import Kind, copied, kind_of, said
from .cells import Cell
from .facts import Buffers, StepKind
from .hooks import (
    hooks_on,
    refuse_hooks_on_inputs,
    refuse_hooks_on_nodes,
    refuse_hooks_on_parameters,
)
from .inputs import ELEMENT, Taken
from .surroundings import refuse_changed, refuse_graph


class StateVaries(StateError):
    """A cell returned a state of another shape than it was given."""


@contextlib.contextmanager
def put_back(
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

    Attributes
    ----------
    after : list of Tensor
        The leaves of the state that `look` has returned, without their graph.
    after_spec : TreeSpec
    wants : tuple of bool
        Which of these take part in the gradient.
    ys : list of Tensor
    used : set
        For `uses`, which tells the parameters that the step's graph leads to.
    """

    after: list[Tensor]
    after_spec: pytree.TreeSpec
    wants: tuple[bool, ...]
    ys: list[Tensor]
    used: Used

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
        self._hooked = False  # whether the step set hooks on its state
        self._unhooked = False  # whether the step allows no hooks on saved tensors
        self._cell, self._leaves, self._spec = cell, leaves, spec
        self._x, self._generators, self._known = x, generators, known
        self._random = generators.capture()
        self._buffers = [(module, key) for module, key, _ in cell.scope.buffers()]
        self._around = Environment(cell.scope, cell.name, self._buffers)

    def look(self) -> StepKind:
        """Run the step once, with a graph but in inference mode; return what it does."""
        if torch.is_inference_mode_enabled():
            return self._inferred()
        parameters = [p for p in self._cell.scope.parameters() if p.is_leaf]
        hooks = hooks_on(parameters)
        try:
            kind, found = self._looked_once(parameters)
        except RuntimeError as error:  # as `torch.func` has it
            if self._unhooked or "saved tensor hooks" not in str(error):
                raise
            self._unhooked = True
            kind, found = self._looked_once(parameters)
        if hooks_on(parameters) != hooks:
            refuse_hooks_on_parameters(self._cell.name, "in its first step")
        self._known += held_elsewhere(found)
        return kind

    def _inferred(self) -> StepKind:
        copies = [copied(leaf) for leaf in self._leaves]
        with self._untouched():
            result: Any = self._cell.call(pytree.tree_unflatten(copies, self._spec), self._x([]))
        self.used = set()
        return self._kind(*self._results_of(result), draws=(False,) * len(self._random))

    def _kind(
        self,
        leaves: Sequence[Tensor],
        returns_y: bool,
        ys: Sequence[Tensor],
        y_spec: pytree.TreeSpec | None,
        *,
        draws: tuple[bool, ...],
        x_kinds: tuple[Kind, ...] = (),
        buffers: Buffers = (),
        weight: tuple[int, int, int] = (0, 0, 0),
        made: int = 0,
    ) -> StepKind:
        """Return what the step does, by what it has returned, which is kept without its graph."""
        self.wants = tuple(t.requires_grad for t in leaves)
        self.after, self.ys = [t.detach() for t in leaves], [t.detach() for t in ys]
        return StepKind(
            x_kinds=x_kinds,
            returns_y=returns_y,
            y_spec=y_spec,
            ys=tuple(kind_of(t) for t in ys),
            differentiable=tuple(t.requires_grad for t in ys),
            draws=draws,
            buffers=buffers,
            weight=weight,
            made=made,
        )

    def _untouched(self) -> AbstractContextManager[None]:
        """Run the cell as it is now; put everything back."""
        return put_back(self._around, self._generators, self._random)

    def graded(self) -> bool:
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
                with self._untouched(), torch.set_grad_enabled(wants is not None):
                    result = cell.call(pytree.tree_unflatten(given, spec), self._x([]))
            except Exception:  # whatever follows from a gradient that is not required
                if wants is None and torch.is_grad_enabled():
                    return None
                raise
            return checksum([t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)])

        seen = checksum([*self.after, *self.ys])
        if cell.is_compiled() or self._hooked:  # which state 0 has from the forward sweep on
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
        if [kind_of(t) for t in self.after] != [kind_of(t) for t in self._leaves]:
            return False
        return step(self.after, None) != step(self.after, self.wants)

    def _looked_once(self, parameters: Sequence[Tensor]) -> tuple[StepKind, list[Tensor]]:
        """Return what the step does, and leaves of its graph that were not known."""
        with self._no_backward(parameters), self._untouched(), torch.enable_grad():
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

    def _looked(self) -> tuple[StepKind, list[Tensor]]:
        cell, spec = self._cell, self._spec
        given = [t.detach().requires_grad_(t.requires_grad) for t in self._leaves]
        buffers = [(m, k, m._buffers[k]) for m, k in self._buffers]
        before = [(m, k, b, b._version, b.detach().clone()) for m, k, b in buffers if b is not None]
        begun = graph_begins()
        taken: Taken = []
        x = self._x(taken)
        # Copies, so that a cell that writes to its state is found out, not stopped by autograd.
        copies: list[Tensor] = [_Copy.apply(t) for t in given]
        versions = [t._version for t in copies]
        saved, made = Saved(), nodes_made()
        with contextlib.nullcontext() if self._unhooked else saved:
            result: Any = cell.call(pytree.tree_unflatten(copies, spec), x)
        made = nodes_made() - made
        beside = {key for t in [*copies, *self._known, *tensors_in(x)] for key in storages_of(t)}
        kept = {key: each for t in saved.held() for key, each in storages_of(t).items()}
        saved_bytes = sum(each.nbytes() for key, each in kept.items() if key not in beside)
        del kept
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
        exchanged = {id(module._buffers[key]) for module, key in changed}
        if any(id(leaf) in exchanged for leaf in ys):
            raise StateError(
                f"{cell.name} returns a buffer that it changes in y; it must return tensors that "
                "it leaves alone: a copy"
            )
        own = {id(t) for t in [*given, *(leaf for _, leaf in taken)]}
        roots = [t for t in [*leaves, *ys] if t.requires_grad]
        walked = Walked()
        found = list(leaves_below(roots, own, self._known, begun, cell.name, walked))
        self._hooked = any(t._backward_hooks for t in copies)
        self.used = walked.used
        return self._kind(
            leaves,
            returns_y,
            ys,
            y_spec,
            draws=tuple([name in drawn for name in self._generators.names]),
            x_kinds=tuple(kind_of(t) for t in tensors_in(x)),
            buffers=changed,
            weight=(*graph_weight(roots, begun, [t.grad_fn for t in copies]), saved_bytes),
            made=made,
        ), found

    def _results_of(
        self, result: Any
    ) -> tuple[list[Tensor], bool, list[Tensor], pytree.TreeSpec | None]:
        """Return the leaves of the state, whether there is a y, its leaves and structure."""
        returns_y = self._returns_y(result)
        leaves, self.after_spec = self._state_of(result[0] if returns_y else result)
        return leaves, returns_y, *(self._outputs(result[1]) if returns_y else ([], None))

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


class _Copy(torch.autograd.Function):
    """A copy of a tensor, with its strides and its alignment."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
