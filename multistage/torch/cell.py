"""Cells: one step of a computation in time, and what must be known of it beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, StateError
from .exploring import attributes_of, check_attributes, tensors_of, untouched
from .replay import Autocast, RandomState, autocast, device_types, random_devices

Buffers: TypeAlias = tuple[tuple[nn.Module, str], ...]


class Cell:
    """A cell by one way of calling it: `call(state, x) -> result`.

    Parameters
    ----------
    given : callable
        `cell(state, x)`; or a recurrent module of `torch.nn`, called its own way.
    fused : bool
        Whether it takes several steps at once, time first.

    Attributes
    ----------
    module : nn.Module or None
        Whose parameters, buffers and modes it depends on.
    """

    def __init__(self, given: Callable[..., Any], fused: bool) -> None:
        if not callable(given):
            raise ArgumentError(f"the cell is {type(given).__name__}; it must be callable")
        owner = given if isinstance(given, nn.Module) else getattr(given, "__self__", None)
        self.module = owner if isinstance(owner, nn.Module) else None
        self.given = given
        self.fused = fused
        self.name = f"cell {getattr(given, '__name__', type(given).__name__)}"
        self.call = given
        if isinstance(given, nn.RNNBase):
            if given.batch_first:
                raise ArgumentError(f"{self.name} has batch_first=True; time must come first")
            self.fused = True

            def whole(state: Any, x: Tensor) -> Any:
                outputs, state = given(x, state)
                return state, outputs

            self.call = whole
        elif isinstance(given, nn.RNNCellBase):

            def single(state: Any, x: Tensor) -> Any:
                state = given(x, state)
                return state, state[0] if isinstance(state, tuple) else state

            self.call = single


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
    same : tuple of (int, int)
        Leaves of y that are leaves of the state, the same tensors.
    draws : bool
        Whether it draws random numbers.
    graded : bool
        Whether it must be run with a graph to give the same bits: some kernels
        are others under `no_grad`.
    buffers : tuple of (module, name)
        Buffers it changes.
    parameters : tuple of Tensor
        That the gradient is wanted of.
    weight : (int, int)
        Nodes of a step's graph, and bytes of what they return: cells that differ
        in neither code nor parameters may differ here.
    """

    spec: pytree.TreeSpec
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    summed: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    wants: tuple[tuple[bool, ...], ...]
    same: tuple[tuple[int, int], ...]
    draws: bool
    graded: bool
    buffers: Buffers
    parameters: tuple[Tensor, ...]
    weight: tuple[int, int]

    def wants_at(self, chunk: int) -> tuple[bool, ...]:
        """Return which leaves of the state before a chunk take part in the gradient."""
        return self.wants[min(chunk, len(self.wants) - 1)]

    def split(self, result: Any) -> tuple[Any, Any]:
        """Return the state and y of what the cell returned."""
        return result if self.returns_y else (result, None)


def explore(
    cell: Cell, state: Any, x: Any, parameters: Sequence[Tensor] | None, draws: bool | None
) -> Facts:
    """Run a cell a few times and return what it does; everything is put back.

    Raises
    ------
    StateError
        If it returns another kind of state than it gets, writes to the state
        it gets, or changes attributes of its module.
    ArgumentError
        If the state is no pytree of tensors, or it uses tensors of a graph that
        were not given as parameters.
    """
    leaves, spec = pytree.tree_flatten(state)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ArgumentError(
                f"the state holds {type(leaf).__name__}; it must be a pytree of tensors"
            )
    own = () if cell.module is None else cell.module.parameters()
    known = list(parameters if parameters is not None else (p for p in own if p.requires_grad))
    if any(hasattr(p, "full_tensor") for p in known):
        raise ArgumentError(
            f"the parameters of {cell.name} are sharded; shard the module that calls unroll "
            "(fully_shard on it gathers them around the whole sequence), not the cell"
        )
    with autocast(Autocast.capture(device_types([*leaves, *known]))):
        return _explored(cell, leaves, spec, x, known, draws)


def _explored(
    cell: Cell,
    leaves: Sequence[Tensor],
    spec: pytree.TreeSpec,
    x: Any,
    known: list[Tensor],
    draws: bool | None,
) -> Facts:
    modules = [] if cell.module is None else [cell.module]
    state = list(leaves)
    wants = [tuple(leaf.requires_grad for leaf in leaves)]
    with untouched(modules, [state, x, *known]), torch.enable_grad():
        looked = _look(cell, leaves, spec, x, wants[0], known)
        known += [p for p in looked.found if not any(p is k for k in known)]
        after = tuple(a or b for a, b in zip(looked.wants, wants[0], strict=True))
    while after != wants[-1]:
        wants.append(after)
        with untouched(modules, [state, x, *known]), torch.enable_grad():
            looked = _look(cell, leaves, spec, x, after, known)
        after = tuple(a or b for a, b in zip(looked.wants, after, strict=True))
    with untouched(modules, [state, x, *known]), torch.no_grad():
        result = cell.call(pytree.tree_unflatten([t.detach() for t in leaves], spec), x)
        graded = not _same_bits(pytree.tree_leaves(result), looked.results)
    return Facts(
        spec=spec,
        returns_y=looked.returns_y,
        y_spec=looked.y_spec,
        summed=tuple(y.dim() == 0 and y.is_floating_point() for y in looked.ys),
        differentiable=tuple(y.requires_grad for y in looked.ys),
        wants=tuple(wants),
        same=looked.same,
        draws=looked.draws if draws is None else draws,
        graded=graded,
        buffers=looked.buffers,
        parameters=tuple(known),
        weight=looked.weight,
    )


@dataclass(slots=True)
class _Look:
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    ys: list[Tensor]
    wants: tuple[bool, ...]
    same: tuple[tuple[int, int], ...]
    draws: bool
    buffers: Buffers
    found: list[Tensor]
    results: list[Tensor]
    weight: tuple[int, int]


def _look(
    cell: Cell,
    leaves: Sequence[Tensor],
    spec: pytree.TreeSpec,
    x: Any,
    wants: Sequence[bool],
    known: Sequence[Tensor],
) -> _Look:
    given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wants, strict=True)]
    x_leaf = pytree.tree_map(_leaf, x)
    devices = random_devices([*given, *tensors_of(x), *known])
    random = RandomState.capture(devices)
    module = cell.module
    attributes = {} if module is None else attributes_of(module)
    owned = [] if module is None else list(_owned(module))
    before = [(m, k, b, b._version, b.detach().clone()) for m, k, b in owned]
    marker = torch.ones(1, requires_grad=True).clone().grad_fn
    assert marker is not None
    # Copies, so that a cell that writes to its state is found out, not stopped by autograd.
    copies = [t.clone() for t in given]
    versions = [t._version for t in copies]
    result = cell.call(pytree.tree_unflatten(copies, spec), x_leaf)
    for tensor, version in zip(copies, versions, strict=True):
        if tensor._version != version:
            raise StateError(
                f"{cell.name} writes to the state it is given (a {tuple(tensor.shape)} tensor); "
                "it must return new tensors"
            )
    if module is not None:
        check_attributes(cell.name, attributes, attributes_of(module))
    changed = tuple(
        (m, k)
        for m, k, b, version, value in before
        if m._buffers[k] is not b or b._version != version or not torch.equal(b, value)
    )
    returns_y = _returns_y(cell, result, spec)
    new_state, y = result if returns_y else (result, None)
    new_leaves = pytree.tree_leaves(new_state)
    for number, (old, new) in enumerate(zip(leaves, new_leaves, strict=True)):
        is_tensor = isinstance(new, Tensor)
        if not is_tensor or (new.shape, new.dtype, new.device) != (
            old.shape,
            old.dtype,
            old.device,
        ):
            what = f"{tuple(new.shape)} {new.dtype} on {new.device}" if is_tensor else type(new)
            raise StateError(
                f"{cell.name} changed leaf {number} of its state from {tuple(old.shape)} "
                f"{old.dtype} on {old.device} to {what}; it must return a state like the one "
                "it got"
            )
    ys, y_spec = pytree.tree_flatten(y) if returns_y else ([], None)
    for leaf in ys:
        if not isinstance(leaf, Tensor):
            raise StateError(f"{cell.name} returns {type(leaf).__name__} in y; tensors only")
    inputs = {id(t) for t in [*given, *tensors_of(x_leaf)]}
    roots = [t for t in [*new_leaves, *ys] if t.requires_grad]
    found = list(leaves_below(roots, inputs, known, marker._sequence_nr(), cell.name))
    return _Look(
        returns_y,
        y_spec,
        ys,
        tuple(t.requires_grad for t in new_leaves),
        tuple((j, k) for j, y in enumerate(ys) for k, t in enumerate(new_leaves) if y is t),
        not random.same_as(RandomState.capture(devices)),
        changed,
        found,
        [t.detach() for t in [*new_leaves, *ys]],
        graph_weight(roots, marker._sequence_nr()),
    )


def _same_bits(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are equal, NaN to NaN."""
    return all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(ones, others, strict=True)
    )


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _owned(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for inner in module.modules():
        for key, buffer in inner._buffers.items():
            if buffer is not None:
                yield inner, key, buffer


def _returns_y(cell: Cell, result: Any, spec: pytree.TreeSpec) -> bool:
    if pytree.tree_structure(result) == spec:
        return False
    if isinstance(result, tuple) and len(result) == 2:
        if pytree.tree_structure(result[0]) == spec:
            return True
        result = result[0]
    raise StateError(
        f"{cell.name} got a state of structure {spec} and returned "
        f"{pytree.tree_structure(result)}; it must return a state like it, or (state, y)"
    )


def leaves_below(
    roots: Sequence[Tensor],
    inputs: set[int],
    known: Sequence[Tensor],
    begun: int,
    name: str,
) -> Iterator[Tensor]:
    """Yield the leaves of a graph that are neither inputs nor known.

    Parameters
    ----------
    roots : sequence of Tensor
        Of the graph.
    inputs : set of int
        Identities of tensors that belong to it.
    known : sequence of Tensor
        Parameters; where they are no leaves, the graph ends at them.
    begun : int
        Sequence number of autograd nodes from which on they are the cell's.

    Raises
    ------
    ArgumentError
        If the cell uses a tensor that was computed before, with a graph.
    """
    ends = {p.grad_fn for p in known}
    passed = inputs | {id(p) for p in known}
    stack = [t.grad_fn for t in roots]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in passed:
                passed.add(id(variable))
                yield variable
            continue
        if node._sequence_nr() < begun:
            raise ArgumentError(
                f"{name} uses a tensor that was computed outside of it ({node.name()}) and takes "
                "part in the gradient; give it in parameters=[...]"
            )
        stack += [below for below, _ in node.next_functions]


def graph_weight(roots: Sequence[Tensor], begun: int) -> tuple[int, int]:
    """Return how many nodes a graph has from a sequence number on, and the bytes they return."""
    stack = [t.grad_fn for t in roots]
    seen: set[Any] = set()
    nbytes = 0
    while stack:
        node = stack.pop()
        if node is None or node in seen or node._sequence_nr() < begun:
            continue
        seen.add(node)
        for result in node._input_metadata:
            if not result.is_nested_tensor:
                nbytes += prod(result.shape) * result.dtype.itemsize
        stack += [below for below, _ in node.next_functions]
    return len(seen), nbytes
