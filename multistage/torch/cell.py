"""Cells: one step of a computation in time, and what must be known of it beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, StateError
from .checksums import checksum
from .exploring import attributes_of, check_attributes, tensors_of, untouched
from .graphs import graph_begins, graph_weight, held_elsewhere, leaves_below
from .inputs import Inputs
from .replay import Autocast, RandomState, autocast, device_types, random_devices

Buffers: TypeAlias = tuple[tuple[nn.Module, str], ...]
Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]
_FEW = 8  # steps of a fused cell to look at


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
            if given.bidirectional:
                raise ArgumentError(
                    f"{self.name} has bidirectional=True: the direction back begins at the end of "
                    "the sequence, and would begin anew in each chunk; unroll one module for each "
                    "direction, the second on inputs.flip(0), flip its outputs back, and join them "
                    "with torch.cat([forth, back.flip(0)], -1)"
                )
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
    x_kinds : tuple of (shape, dtype, device)
        Of the tensors of the inputs looked at.
    """

    spec: pytree.TreeSpec
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    summed: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    wants: tuple[tuple[bool, ...], ...]
    draws: bool
    graded: bool
    buffers: Buffers
    parameters: tuple[Tensor, ...]
    weight: tuple[int, int]
    x_kinds: tuple[Kind, ...]

    def wants_at(self, chunk: int) -> tuple[bool, ...]:
        """Return which leaves of the state before a chunk take part in the gradient."""
        return self.wants[min(chunk, len(self.wants) - 1)]

    def split(self, result: Any, name: str, t: int) -> tuple[Any, Any]:
        """Return the state and y of what a cell returned at step t."""
        if not self.returns_y:
            return result, None
        if type(result) is not tuple or len(result) != 2:
            raise StateError(
                f"{name} returned (state, y) at first and {type(result).__name__} at step {t}"
            )
        return result

    def leaves(self, state: Any, name: str, t: int) -> list[Tensor]:
        """Return the leaves of a state.  Raises StateError if it has another structure."""
        return _leaves(state, self.spec, f"{name} returned a state", t)

    def y_leaves(self, y: Any, name: str, t: int) -> list[Tensor]:
        """Return the leaves of y.  Raises StateError if it has another structure."""
        assert self.y_spec is not None
        return _leaves(y, self.y_spec, f"{name} returned an output y", t)


def _leaves(tree: Any, spec: pytree.TreeSpec, what: str, t: int) -> list[Tensor]:
    """Return the leaves of a tree in the order of a structure: dicts may have any order."""
    try:
        leaves = [tree] if spec.is_leaf() else spec.flatten_up_to(tree)
        fits = all(isinstance(leaf, Tensor) for leaf in leaves)
    except ValueError:
        fits = False
    if not fits:
        raise StateError(
            f"{what} of structure {pytree.tree_structure(tree)} at step {t}, and at first one of "
            f"{spec} with tensors for leaves; it must be the same at every step"
        )
    return leaves


def explore(
    cell: Cell,
    state: Any,
    inputs: Inputs,
    parameters: Sequence[Tensor] | None,
    draws: bool | None,
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
    known += [t for t in inputs.repeated if not any(t is p for p in known)]
    if any(hasattr(p, "full_tensor") for p in known):
        raise ArgumentError(
            f"the parameters of {cell.name} are sharded; shard the module that calls unroll "
            "(fully_shard on it gathers them around the whole sequence), not the cell"
        )
    with autocast(Autocast.capture(device_types([*leaves, *known, *inputs.held()]))):
        return _explored(cell, leaves, spec, inputs, known, draws)


def _explored(
    cell: Cell,
    leaves: Sequence[Tensor],
    spec: pytree.TreeSpec,
    inputs: Inputs,
    known: list[Tensor],
    draws: bool | None,
) -> Facts:
    modules = [] if cell.module is None else [cell.module]
    involved = [*leaves, *known, *inputs.held()]

    def look(wants: Sequence[bool]) -> _Look:
        with untouched(modules, involved), torch.enable_grad():
            return _look(cell, leaves, spec, inputs, wants, known)

    wants = [tuple(leaf.requires_grad for leaf in leaves)]
    looked = look(wants[0])
    known += held_elsewhere(looked.found)
    after = tuple(a or b for a, b in zip(looked.wants, wants[0], strict=True))
    while after != wants[-1]:
        wants.append(after)
        looked = look(after)
        after = tuple(a or b for a, b in zip(looked.wants, after, strict=True))
    return Facts(
        spec=spec,
        returns_y=looked.returns_y,
        y_spec=looked.y_spec,
        summed=tuple(y.dim() == 0 and y.is_floating_point() for y in looked.ys),
        differentiable=looked.differentiable,
        wants=tuple(wants),
        draws=looked.draws if draws is None else draws,
        graded=_graded(cell, leaves, spec, inputs, looked, involved),
        buffers=looked.buffers,
        parameters=tuple(known),
        weight=looked.weight,
        x_kinds=looked.x_kinds,
    )


def _graded(
    cell: Cell,
    leaves: Sequence[Tensor],
    spec: pytree.TreeSpec,
    inputs: Inputs,
    looked: _Look,
    involved: Sequence[Tensor],
) -> bool:
    """Whether a step returns other bits without a graph, from state 0 or the one after it.

    State 0 is often zeros, from which many kernels round alike.  The compiler makes
    other kernels for either, which may differ only later.
    """
    if is_compiled(cell):
        return True
    modules = [] if cell.module is None else [cell.module]

    def step(state: Sequence[Tensor], wants: Sequence[bool] | None) -> list[Tensor]:
        given = [t.detach() for t in state]
        if wants is not None:
            given = [t.requires_grad_(w) for t, w in zip(given, wants, strict=True)]
        x = inputs.sample(_FEW, fused=cell.fused, leaves=[])
        with untouched(modules, involved), torch.set_grad_enabled(wants is not None):
            result = cell.call(pytree.tree_unflatten(given, spec), x)
        return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]

    if checksum(step(leaves, None)) != checksum(looked.results):
        return True
    after = looked.results[: len(leaves)]
    return checksum(step(after, None)) != checksum(step(after, looked.wants))


def is_compiled(cell: Cell) -> bool:
    """Whether `torch.compile` made the cell, or a part of its module."""
    modules = [] if cell.module is None else list(cell.module.modules())
    return hasattr(cell.given, "_torchdynamo_orig_callable") or any(
        type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in modules
    )


@dataclass(slots=True)
class _Look:
    returns_y: bool
    y_spec: pytree.TreeSpec | None
    ys: list[Tensor]  # without their graph, as `results`
    differentiable: tuple[bool, ...]
    wants: tuple[bool, ...]
    draws: bool
    buffers: Buffers
    found: list[Tensor]
    results: list[Tensor]
    weight: tuple[int, int]
    x_kinds: tuple[Kind, ...]


def _look(
    cell: Cell,
    leaves: Sequence[Tensor],
    spec: pytree.TreeSpec,
    inputs: Inputs,
    wants: Sequence[bool],
    known: Sequence[Tensor],
) -> _Look:
    given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wants, strict=True)]
    devices = random_devices([*given, *known, *inputs.held()])
    random = RandomState.capture(devices)
    module = cell.module
    attributes = {} if module is None else attributes_of(module)
    owned = [] if module is None else list(_owned(module))
    before = [(m, k, b, b._version, b.detach().clone()) for m, k, b in owned]
    begun = graph_begins()
    taken: list[Any] = []
    x = inputs.sample(_FEW, fused=cell.fused, leaves=taken)
    # Copies, so that a cell that writes to its state is found out, not stopped by autograd.
    copies = [t.clone() for t in given]
    versions = [t._version for t in copies]
    result = cell.call(pytree.tree_unflatten(copies, spec), x)
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
    own = {id(t) for t in [*given, *(leaf for _, leaf in taken)]}
    roots = [t for t in [*new_leaves, *ys] if t.requires_grad]
    found = list(leaves_below(roots, own, known, begun, cell.name))
    return _Look(
        returns_y,
        y_spec,
        [t.detach() for t in ys],
        tuple(t.requires_grad for t in ys),
        tuple(t.requires_grad for t in new_leaves),
        not random.same_as(RandomState.capture(devices)),
        changed,
        found,
        [t.detach() for t in [*new_leaves, *ys]],
        graph_weight(roots, begun),
        tuple((t.shape, t.dtype, t.device) for t in tensors_of(x)),
    )


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
