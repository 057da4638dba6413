"""Cells: one step of a computation in time, and what must be known of it beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, StateError
from ..environment.scope import Scope
from ..tensors.states import Kind

Buffers: TypeAlias = tuple[tuple[nn.Module, str], ...]
Step: TypeAlias = Callable[..., object]  # of a state and x_t


class Cell:
    """A cell by one way of calling it: `call(state, x) -> result`.

    Parameters
    ----------
    given : callable
        `cell(state, x)`; or a recurrent module of `torch.nn`, called its own way.
    fused : bool
        Whether it takes several steps at once, time first.
    inputs : object
        What x_t is made by, if it is made by code.

    Attributes
    ----------
    scope : Scope
        All that it refers to.
    """

    def __init__(self, given: Step, fused: bool, inputs: object = None) -> None:
        if not callable(given):
            raise ArgumentError(f"the cell is {type(given).__name__}; it must be callable")
        self.scope = Scope.of(given, inputs)
        self.given = given
        self.fused = fused
        self.name = f"cell {getattr(given, '__name__', type(given).__name__)}"
        self.call: Step = given
        if isinstance(given, nn.RNNBase | nn.RNNCellBase):
            _takes_input_first(given, self.name)
        if isinstance(given, nn.RNNBase):
            if given.batch_first:
                raise ArgumentError(f"{self.name} has batch_first=True; time must come first")
            if given.bidirectional:
                raise ArgumentError(
                    f"{self.name} has bidirectional=True: the direction back begins at the end of "
                    "the sequence, and would start again in each chunk; unroll one module for each "
                    "direction, the second on inputs.flip(0), flip its outputs back, and join them "
                    "with torch.cat([forth, back.flip(0)], -1)"
                )
            self.fused = True

            def whole(state: object, x: Tensor) -> object:
                outputs, state = given(x, state)
                return state, outputs

            self.call = whole
        elif isinstance(given, nn.RNNCellBase):

            def single(state: object, x: Tensor) -> object:
                state = given(x, state)
                return state, state[0] if isinstance(state, tuple) else state

            self.call = single

    def parts(self) -> Sequence[Cell]:
        """Return the cells that it consists of."""
        return (self,)

    def is_compiled(self) -> bool:
        """Whether `torch.compile` made it, or a part of it."""
        return hasattr(self.given, "_torchdynamo_orig_callable") or any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            for module in self.scope.modules
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What a cell does, seen in a few steps.

    Attributes
    ----------
    spec : TreeSpec
        Of the state.
    returns_y : bool
        Whether it returns `(state, y)`.
    y_spec : TreeSpec or None
    summed : tuple of bool
        For each leaf of y whether it is one number, a loss, and summed.
    differentiable : tuple of bool
        For each leaf of y.
    wants : tuple of tuple of bool
        Which leaves of state 0, 1, ... take part in the gradient; the last
        holds for all later ones.
    draws : tuple of bool
        For each generator whether it draws from it.
    graded : bool
        Whether it must be run with a graph to give the same bits, as some kernels
        are others under `no_grad`, or to set its hooks on the state.
    buffers : tuple of (module, name)
        Buffers it changes.
    parameters : tuple of Tensor
        Those whose gradients are required.
    weight : (int, int, int)
        Nodes of a step's graph, bytes of what they return, and bytes of what they save:
        cells that differ in neither code nor parameters may differ here.
    x_kinds : tuple of (shape, dtype, device)
        Of the tensors of the inputs looked at.
    """

    spec: pytree.TreeSpec
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    summed: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    wants: tuple[tuple[bool, ...], ...]
    draws: tuple[bool, ...]
    graded: bool
    buffers: Buffers
    parameters: tuple[Tensor, ...]
    weight: tuple[int, int, int]
    x_kinds: tuple[Kind, ...]

    def wants_at(self, chunk: int) -> tuple[bool, ...]:
        """Return which leaves of the state before a chunk take part in the gradient."""
        return self.wants[min(chunk, len(self.wants) - 1)]

    def split(self, result: object, name: str, t: int) -> tuple[object, object]:
        """Return the state and y of what a cell returned at step t."""
        return split(result, self.y_spec, name, t) if self.returns_y else (result, None)

    def leaves(self, state: object, name: str, t: int) -> list[Tensor]:
        """Return the leaves of a state.  Raises StateError if it has another structure."""
        return leaves_of(state, self.spec, f"{name} returned a state", t)

    def y_leaves(self, y: object, name: str, t: int) -> list[Tensor]:
        """Return the leaves of y.  Raises StateError if it has another structure."""
        assert self.y_spec is not None
        return leaves_of(y, self.y_spec, f"{name} returned an output y", t)


def split(
    result: object, y_spec: pytree.TreeSpec | None, name: str, t: int
) -> tuple[object, object]:
    """Return the state and y of a pair; `y_spec` is None where y was None at first."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StateError(
            f"{name} returned (state, y) at first and {type(result).__name__} at step {t}"
        )
    state, y = result
    if (y is None) != (y_spec is None):
        first, now = ("None", "a y") if y_spec is None else ("a y", "None")
        raise StateError(
            f"{name} returned (state, y) with {first} for y at first, and {now} at step {t}; "
            "it must be the same at every step"
        )
    return state, y


def _takes_input_first(given: nn.RNNBase | nn.RNNCellBase, name: str) -> None:
    """Raise ArgumentError if it is not certain that `forward` takes (input, state)."""
    forward = type(given).forward
    if forward.__module__ == nn.RNNBase.__module__:
        return
    names = list(inspect.signature(forward).parameters)[1:3]
    if names == ["input", "hx"]:
        return
    raise ArgumentError(
        f"{name} is a subclass of torch's whose forward takes ({', '.join(names)}), in an order "
        "that is not known here: give lambda state, x: cell(x, state), or lambda state, x: "
        "cell(state, x), with fused=True if it takes several steps at once"
    )


def leaves_of(tree: object, spec: pytree.TreeSpec, what: str, t: int) -> list[Tensor]:
    """Return the leaves of a tree in the order of a structure: dicts may have any order."""
    try:
        leaves: list[Any] = [tree] if spec.is_leaf() else spec.flatten_up_to(tree)
        fits = all(isinstance(leaf, Tensor) for leaf in leaves)
    except ValueError:
        fits = False
    if not fits:
        raise StateError(
            f"{what} of structure {pytree.tree_structure(tree)} at step {t}, and at first one of "
            f"{spec} with tensors for leaves; it must be the same at every step"
        )
    return leaves
