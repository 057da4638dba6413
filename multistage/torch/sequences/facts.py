"""What is known of the steps of a sequence by their kinds, and steps run as they are known.

A step's *kind* is the cell that runs it, and the structure, shapes, dtypes and devices
of the state before it and of x_t, with which of these tensors require gradients.  What
holds of one step holds of all of its kind.  Equal steps differ at most in which leaves of
the state take part in the gradient: those of state 0 may not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import StateError
from ..tensors.states import Kind, kind_of, said
from .cells import Cells
from .inputs import value_of

Buffers: TypeAlias = tuple[tuple[nn.Module, str], ...]
Ys: TypeAlias = list[tuple[int, list[Tensor]]]  # of steps: t, leaves of y
# What distinguishes the leaves of a tree: structure, kinds, whether gradients are required.
XKind: TypeAlias = tuple[pytree.TreeSpec, tuple[tuple[Kind, bool] | str, ...]]
_LEAF = pytree.tree_structure(0)


@dataclass(frozen=True, slots=True)
class StateKind:
    """What a state is but for its values."""

    spec: pytree.TreeSpec
    leaves: tuple[Kind, ...]
    wants: tuple[bool, ...]  # which leaves take part in the gradient

    def __str__(self) -> str:
        return ", ".join(str(tuple(size)) for size, _, _ in self.leaves) or "nothing"


@dataclass(frozen=True, slots=True)
class StepKind:
    """What steps of one kind do.

    The weight is the nodes of a step's graph, the bytes of what they return, and those of what
    they save: cells that differ in neither code nor parameters may differ here.  To plan by, it
    has a fourth part, see `planned`.
    """

    returns_y: bool
    y_spec: pytree.TreeSpec | None
    ys: tuple[Kind, ...]  # of the leaves of y
    differentiable: tuple[bool, ...]  # of those
    draws: tuple[bool, ...]  # by generator
    x_kinds: tuple[Kind, ...] = ()  # of the tensors of x_t that were looked at
    buffers: Buffers = ()
    weight: tuple[int, ...] = (0, 0, 0)
    made: int = 0  # nodes that a step makes, those included that are dropped at once
    graded: bool = False  # see `Facts`
    parameters: tuple[int, ...] = ()  # those that its graph leads to
    cell: int = 0
    before: int = 0  # the kinds of the states
    after: int = 0
    x: XKind | None = None  # None where x_t of any kind will do
    first: int = 0  # step of this kind
    name: str = ""  # for messages and tables


@dataclass(frozen=True, slots=True)
class Facts:
    """What the steps of a sequence do, seen in a step of each kind.

    Steps are `graded` that must be run with a graph to give the same bits, as some kernels are
    others under `no_grad`, or to set their hooks on the state.
    """

    kinds: tuple[StepKind, ...]
    states: tuple[StateKind, ...]
    steps: Sequence[int]  # the number of each one's kind; the last holds for all later ones
    equal: bool  # whether all steps are of one cell and all states of one shape
    exact: bool  # whether shapes are known, and held to
    looked_at: int  # steps that the weight of a kind is of, where one call runs several
    y_spec: pytree.TreeSpec | None
    summed: tuple[bool, ...]  # whether a leaf of y is one number, a loss
    differentiable: tuple[bool, ...]  # by leaf of y
    draws: tuple[bool, ...]  # by generator
    graded: bool
    buffers: Buffers  # those that steps change
    parameters: tuple[Tensor, ...]  # those whose gradients are required

    def kind(self, t: int) -> StepKind:
        """Return the kind of step t."""
        steps = self.steps
        return self.kinds[steps[t] if t < len(steps) else steps[-1]]

    def state(self, t: int) -> StateKind:
        """Return the kind of state t, that before step t or the last."""
        return self.states[self.kind(t - 1).after if t else 0]

    def weight(self, start: int, stop: int) -> tuple[int, int, int]:
        """Return the nodes of the graph of some steps, the bytes of what they return, nodes made.

        More nodes are made than a graph holds where a step computes what it does not return.
        """
        if not self.equal:
            kinds = [self.kind(t) for t in range(start, stop)]
            nodes, nbytes = (sum(kind.weight[i] for kind in kinds) for i in (0, 1))
            return nodes, nbytes, sum(kind.made for kind in kinds)
        count, kind = -(-(stop - start) // self.looked_at), self.kinds[-1]
        return count * kind.weight[0], count * kind.weight[1], count * kind.made


def run_steps(
    cells: Cells,
    facts: Facts,
    state: object,
    steps: tuple[int, int],
    x: Callable[[int], object],
    take: Callable[[tuple[int, list[Tensor]]], None],
) -> list[Tensor]:
    """Run time steps; hand t and the leaves of y of each to `take`; return the state's leaves.

    A fused cell takes all of them at once, and `x(t)` returns their inputs.

    Raises
    ------
    StateError
        If a step is not of the kind it was found to be: at that step, before the next ones
        run, which would exceed the memory limit.
    """
    leaves: list[Tensor] = []
    equal, settled, last = facts.equal, len(facts.steps) - 1, steps[1] - 1
    kind, cell, nbytes = facts.kind(steps[0]), cells.at(steps[0]), _bytes_of(state)
    for t in steps[:1] if cells.fused else range(*steps):
        if not equal or t <= settled:
            kind, cell = facts.kind(t), cells.at(t)
        given = x(t)
        if kind.x is not None:
            _require_x(given, kind.x, t)
        result = cell.call(state, given)
        if kind.returns_y:
            state, y = _split(result, kind, cell.name, t)
        else:
            state, y = result, None
        # Equal states within a chunk are looked at closely where their bytes are others.
        if not equal or t == last or cells.fused or _bytes_of(state) != nbytes:
            after = facts.states[kind.after]
            leaves = _state_leaves(state, after, cell.name, t, exact=facts.exact)
        if kind.y_spec is not None:
            take((t, _y_leaves(y, kind, cell.name, t, exact=facts.exact and not equal)))
    return leaves


def _bytes_of(state: object) -> int:
    """Return the bytes of a tensor or a tuple of tensors; 0 for other trees, which cost time."""
    if isinstance(state, Tensor):
        return state.nbytes
    total = 0
    for leaf in state if type(state) is tuple else ():
        total += leaf.nbytes if isinstance(leaf, Tensor) else 0
    return total


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
            (kind_of(leaf) if exact else form_of(kind_of(leaf)), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else (value_of(leaf) if values else type(leaf).__name__)
            for leaf in leaves
        ]
    )


def form_of(kind: Kind) -> Kind:
    """Return the kind of a tensor whose sizes are not known, but for how many there are."""
    return torch.Size([0] * len(kind[0])), kind[1], kind[2]


def _require_x(given: object, expected: XKind, t: int) -> None:
    found = kind_of_tree(given)
    # Whether gradients are required is another matter: x_t was looked at without a graph.
    plain = [[x if isinstance(x, str) else x[0] for x in kind] for _, kind in (found, expected)]
    if found[0] != expected[0] or plain[0] != plain[1]:
        raise StateError(
            f"x_{t} is {_said_tree(found)}, and was {_said_tree(expected)} when the steps were "
            "looked at; inputs must return the same each time"
        )


def _said_tree(kind: XKind) -> str:
    return ", ".join([x if isinstance(x, str) else said(x[0]) for x in kind[1]]) or "empty"


def _split(result: object, kind: StepKind, name: str, t: int) -> tuple[object, object]:
    """Return the state and y of a pair."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StateError(
            f"{name} returned (state, y) at first and {type(result).__name__} at step {t}"
        )
    state, y = result
    if (y is None) != (kind.y_spec is None):
        first, now = ("None", "a y") if kind.y_spec is None else ("a y", "None")
        raise StateError(
            f"{name} returned (state, y) with {first} for y at first, and {now} at step {t}; "
            "it must be the same at every step"
        )
    return state, y


def _state_leaves(
    state: object, after: StateKind, name: str, t: int, *, exact: bool
) -> list[Tensor]:
    """Return the leaves of a state that a step has returned.  Raises StateError for others."""
    leaves = _leaves_of(state, after.spec, f"{name} returned a state", t)
    for number, (leaf, expected) in enumerate(zip(leaves, after.leaves, strict=True)):
        found = kind_of(leaf)
        if found != expected and (exact or form_of(found) != form_of(expected)):
            raise StateError(
                f"{name} returned a state at step {t} whose leaf {number} is {said(found)}; other "
                f"steps of this kind return {said(expected)}. Shapes must follow from the cell, "
                "the shapes of its state and those of x_t; where they differ give inputs as a "
                "list, or else say unequal=True"
            )
    return leaves


def _y_leaves(y: object, kind: StepKind, name: str, t: int, *, exact: bool) -> list[Tensor]:
    """Return the leaves of an output.  Raises StateError if it is not as it was found to be."""
    assert kind.y_spec is not None
    leaves = _leaves_of(y, kind.y_spec, f"{name} returned an output y", t)
    if exact:
        for number, (leaf, expected) in enumerate(zip(leaves, kind.ys, strict=True)):
            if kind_of(leaf) != expected:
                raise StateError(
                    f"{name} returned an output at step {t} whose leaf {number} is "
                    f"{said(kind_of(leaf))}; other steps of this kind return {said(expected)}"
                )
    return leaves


def _leaves_of(tree: object, spec: pytree.TreeSpec, what: str, t: int) -> list[Tensor]:
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
