"""Cells: the steps of a computation in time, and what is known of them before one is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ...errors import ArgumentError
from ..environment.scope import Scope
from ..measurement.measure import compiled_among
from .inputs import Inputs

Step: TypeAlias = Callable[..., object]  # of a state and x_t


class Cell:
    """A cell by one way of calling it: `call(state, x) -> result`.

    A recurrent module of `torch.nn` is called its own way.  A fused cell takes several steps at
    once, time first; `inputs` is what x_t is made by, if it is made by code.  The scope is all
    that these refer to.
    """

    def __init__(self, given: Step, fused: bool, inputs: object = None) -> None:
        self.scope = Scope([given, inputs])
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

    def is_compiled(self) -> bool:
        """Whether `torch.compile` made it, or a part of it."""
        own = hasattr(self.given, "_torchdynamo_orig_callable")
        return own or compiled_among(self.scope.modules)


class Cells:
    """The cells of a sequence: one for all steps, or one for each.

    Raises
    ------
    ArgumentError
        If one is a module of `torch.nn` that cannot be run on parts of a sequence.
    """

    def __init__(self, given: Sequence[Step], fused: bool = False, inputs: object = None) -> None:
        distinct = {identity_of(one): one for one in given}
        numbers = {key: number for number, key in enumerate(distinct)}
        # None if all steps have the same.
        self._at = [numbers[identity_of(one)] for one in given] if len(distinct) > 1 else None
        # Those that differ.
        self.each = tuple([Cell(one, fused, inputs) for one in distinct.values()])
        self.fused = self.each[0].fused
        self.callables = [*(one.given for one in self.each), inputs]
        alike = self._at is None
        self.scope = self.each[0].scope if alike else Scope([*distinct.values(), inputs])
        names = list(dict.fromkeys(one.name.removeprefix("cell ") for one in self.each))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        self.name = self.each[0].name if len(names) == 1 else f"one of the cells {shown}"

    def number(self, t: int) -> int:
        """Return the number of the cell of step t."""
        return 0 if self._at is None else self._at[t]

    def at(self, t: int) -> Cell:
        """Return the cell of step t."""
        return self.each[self.number(t)]

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


def state_leaves(state: object) -> tuple[list[Tensor], pytree.TreeSpec]:
    """Return the leaves and the structure of a state.  Raises ArgumentError."""
    leaves, spec = pytree.tree_flatten(state)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ArgumentError(
                f"the state holds {type(leaf).__name__}; it must be a pytree of tensors"
            )
    return leaves, spec


def known_parameters(
    cells: Cells, inputs: Inputs, parameters: Sequence[Tensor] | None
) -> list[Tensor]:
    """Return the parameters known before a step is run, each once.  Raises ArgumentError."""
    if parametrize._cache_enabled and torch.is_grad_enabled():
        names = [type(m).__name__ for m in cells.scope.modules if parametrize.is_parametrized(m)]
        if names:
            raise ArgumentError(
                f"{cells.name} has parametrized tensors ({names[0]}), and unroll is called within "
                "parametrize.cached(): what that keeps is gone when steps run again in the "
                "backward pass; enter it within the cell instead"
            )
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in cells.scope.modules):
        raise ArgumentError(
            f"{cells.name} has a DistributedDataParallel in it, which would reduce gradients at "
            "each step; put the module that calls unroll into DistributedDataParallel instead"
        )
    own = [p for m in cells.scope.modules for p in m._parameters.values() if p is not None]
    given = own if parameters is None else parameters
    known = list({id(p): p for p in given if p.requires_grad}.values())
    known += [t for t in inputs.repeated if not any(t is p for p in known)]
    if any(hasattr(p, "full_tensor") for p in known):
        raise ArgumentError(
            f"the parameters of {cells.name} are sharded; shard the module that calls unroll "
            "(fully_shard on it gathers them around the whole sequence), not the cell"
        )
    return known
