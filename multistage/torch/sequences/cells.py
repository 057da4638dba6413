"""Several cells along one sequence, and steps that differ in kind.

A step's *kind* is the cell that runs it, and the structure, shapes, dtypes and devices
of the state before it and of x_t, with which of these tensors require gradients.  What
holds of one step holds of all of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, StateError
from ..environment.scope import Scope
from ..tensors.states import Kind, kind_of, said
from .cell import Cell, Facts, Step, leaves_of, split
from .inputs import value_of

# What distinguishes the tensors of a tree: structure, kinds, whether gradients are required.
# Of what has no exact shape, the number of dimensions.
Form: TypeAlias = tuple[int, torch.dtype, torch.device]
XKind: TypeAlias = tuple[pytree.TreeSpec, tuple[tuple[Kind | Form, bool] | str, ...]]


class Cells(Cell):
    """The cells of a sequence.

    Parameters
    ----------
    given : sequence of callables
        One for each step.
    inputs : object
        What x_t is made by, if it is made by code.

    Attributes
    ----------
    each : tuple of Cell
        Those that differ.
    at : sequence of int
        By step, the number of its cell.

    Raises
    ------
    ArgumentError
        If one is not callable, or takes several steps at once.
    """

    def __init__(self, given: Sequence[Step], inputs: object = None) -> None:
        numbers: dict[object, int] = {}
        self.at = [numbers.setdefault(identity_of(one), len(numbers)) for one in given]
        distinct = list({identity_of(one): one for one in given}.values())
        for one in distinct:
            if isinstance(one, nn.RNNBase):
                raise ArgumentError(
                    f"{type(one).__name__} takes several steps at once, and steps that differ are "
                    f"run one by one; give an nn.{type(one).__name__}Cell for each layer"
                )
        self.each = tuple([Cell(one, False, inputs) for one in distinct])
        self.scope = Scope.of(*distinct, inputs)
        self.given = distinct[0]
        self.fused = False
        names = list(dict.fromkeys(one.name.removeprefix("cell ") for one in self.each))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        self.name = self.each[0].name if len(names) == 1 else f"one of the cells {shown}"
        self.call = self._together

    @staticmethod
    def _together(state: object, x: object) -> object:
        raise AssertionError("each step has a cell of its own")

    def parts(self) -> Sequence[Cell]:
        """Return those that differ."""
        return self.each

    def is_compiled(self) -> bool:
        """Whether `torch.compile` made one of them, or a part of it."""
        return any(one.is_compiled() for one in self.each)


def identity_of(cell: object) -> object:
    """Return what distinguishes the cells of a sequence.

    A bound method is a new object each time: its object and function identify it.
    """
    if isinstance(cell, MethodType):
        return id(cell.__self__), id(cell.__func__)
    return id(cell)


@dataclass(frozen=True, slots=True)
class StateKind:
    """What a state is but for its values.

    Attributes
    ----------
    spec : TreeSpec
    leaves : tuple of (shape, dtype, device)
    wants : tuple of bool
        Which leaves take part in the gradient.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Kind, ...]
    wants: tuple[bool, ...]

    def __str__(self) -> str:
        return ", ".join(str(tuple(size)) for size, _, _ in self.leaves) or "nothing"


@dataclass(frozen=True, slots=True)
class StepKind:
    """What steps of one kind do.

    Attributes
    ----------
    cell : int
    before, after : int
        Numbers of the kinds of the states.
    x : XKind or None
        None where x_t of any kind will do.
    returns_y : bool
    y_spec : TreeSpec or None
    ys : tuple of (shape, dtype, device)
        Of the leaves of y.
    differentiable : tuple of bool
        Of those.
    draws : tuple of bool
        By generator.
    graded : bool
        See `Facts`.
    buffers : tuple of (module, name)
    weight : (int, int, int)
        See `Facts`.
    parameters : tuple of int
        Those that its graph leads to.
    first : int
        The first step of this kind.
    name : str
        For messages and tables.
    """

    cell: int
    before: int
    after: int
    x: XKind | None
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    ys: tuple[Kind, ...]
    differentiable: tuple[bool, ...]
    draws: tuple[bool, ...]
    graded: bool
    buffers: tuple[tuple[nn.Module, str], ...]
    weight: tuple[int, int, int]
    parameters: tuple[int, ...]
    first: int
    name: str


@dataclass(frozen=True, slots=True)
class VariedFacts(Facts):
    """What the steps of a sequence do, by their kinds.

    Attributes
    ----------
    kinds : tuple of StepKind
    states : tuple of StateKind
    steps : sequence of int
        By step, the number of its kind.
    exact : bool
        Whether shapes are known, and held to.
    """

    kinds: tuple[StepKind, ...] = ()
    states: tuple[StateKind, ...] = ()
    steps: Sequence[int] = ()
    exact: bool = True

    def kind(self, t: int) -> StepKind:
        """Return the kind of step t."""
        return self.kinds[self.steps[t]]

    def state(self, t: int) -> StateKind:
        """Return the kind of state t, that before step t or the last."""
        if t < len(self.steps):
            return self.states[self.kinds[self.steps[t]].before]
        return self.states[self.kinds[self.steps[-1]].after]


def kind_of_tree(tree: object, *, exact: bool = True, values: bool = False) -> XKind:
    """Return what distinguishes the inputs of a cell.

    Of leaves that are no tensors it is the type, with `values` the value too.

    Examples
    --------
    >>> import torch
    >>> kind_of_tree((torch.zeros(2), 3)) == kind_of_tree((torch.ones(2), 4))
    True
    """
    leaves, spec = ([tree], _LEAF) if isinstance(tree, Tensor) else pytree.tree_flatten(tree)
    return spec, tuple(
        [
            (kind_of(leaf) if exact else _formless(leaf), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (value_of(leaf) if values else type(leaf).__name__)
            for leaf in leaves
        ]
    )


def _formless(tensor: Tensor) -> Form:
    return len(tensor.shape), tensor.dtype, tensor.device


_LEAF = pytree.tree_structure(0)


def run_varied(
    cells: Cells,
    facts: VariedFacts,
    state: object,
    steps: tuple[int, int],
    x: Callable[..., object],
    take: Callable[[tuple[int, list[Tensor]]], None],
) -> list[Tensor]:
    """Run time steps, each by its cell; as `run_steps`.

    Raises
    ------
    StateError
        If a step is not of the kind it was found to be.
    """
    leaves: list[Tensor] = []
    for t in range(*steps):
        kind, cell = facts.kind(t), cells.each[cells.at[t]]
        given = x(t)
        if kind.x is not None:
            _require_x(given, kind.x, t)
        result = cell.call(state, given)
        after = facts.states[kind.after]
        if kind.returns_y:
            state, y = split(result, kind.y_spec, cell.name, t)
        else:
            state, y = result, None
        leaves = _leaves_of(state, after, cell.name, t, exact=facts.exact)
        if kind.returns_y and kind.y_spec is not None:
            take((t, _outputs_of(y, kind, cell.name, t, exact=facts.exact)))
    return leaves


def _require_x(given: object, expected: XKind, t: int) -> None:
    found = kind_of_tree(given)
    if found[0] == expected[0] and [_plain(a) for a in found[1]] == [
        _plain(a) for a in expected[1]
    ]:
        return
    raise StateError(
        f"x_{t} is {_said_tree(found)}, and was {_said_tree(expected)} when the steps were looked "
        "at; inputs must return the same each time"
    )


def _plain(leaf: tuple[Kind | Form, bool] | str) -> object:
    return leaf if isinstance(leaf, str) else leaf[0]


def _said_tree(kind: XKind) -> str:
    return ", ".join(map(_said_leaf, kind[1])) or "empty"


def _said_leaf(leaf: tuple[Kind | Form, bool] | str) -> str:
    if isinstance(leaf, str):
        return leaf
    size, dtype, device = leaf[0]
    assert not isinstance(size, int)  # steps are held to exact shapes alone
    return said((size, dtype, device))


def _leaves_of(state: object, after: StateKind, name: str, t: int, *, exact: bool) -> list[Tensor]:
    leaves = leaves_of(state, after.spec, f"{name} returned a state", t)
    for number, (leaf, expected) in enumerate(zip(leaves, after.leaves, strict=True)):
        if kind_of(leaf) != expected and (exact or _formless(leaf) != _form(expected)):
            raise StateError(
                f"{name} returned a state at step {t} whose leaf {number} is "
                f"{said(kind_of(leaf))}; other steps of this kind return {said(expected)}. Shapes "
                "must follow from the cell, the shapes of its state and those of x_t"
            )
    return leaves


def _form(kind: Kind) -> Form:
    return len(kind[0]), kind[1], kind[2]


def _outputs_of(y: object, kind: StepKind, name: str, t: int, *, exact: bool) -> list[Tensor]:
    assert kind.y_spec is not None
    leaves = leaves_of(y, kind.y_spec, f"{name} returned an output y", t)
    if exact:
        for number, (leaf, expected) in enumerate(zip(leaves, kind.ys, strict=True)):
            if kind_of(leaf) != expected:
                raise StateError(
                    f"{name} returned an output at step {t} whose leaf {number} is "
                    f"{said(kind_of(leaf))}; other steps of this kind return {said(expected)}"
                )
    return leaves
