"""The state that a sequence begins with, and the parameters known before a step is run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from ...errors import ArgumentError
from .cell import Cell
from .inputs import Inputs


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
    cell: Cell, inputs: Inputs, parameters: Sequence[Tensor] | None
) -> list[Tensor]:
    """Return the parameters known before a step is run, each once.  Raises ArgumentError."""
    if parametrize._cache_enabled and torch.is_grad_enabled():
        names = [type(m).__name__ for m in cell.scope.modules if parametrize.is_parametrized(m)]
        if names:
            raise ArgumentError(
                f"{cell.name} has parametrized tensors ({names[0]}), and unroll is called within "
                "parametrize.cached(): what that keeps is gone when steps run again in the "
                "backward pass; enter it within the cell instead"
            )
    own = [p for m in cell.scope.modules for p in m._parameters.values() if p is not None]
    given = own if parameters is None else parameters
    known = list({id(p): p for p in given if p.requires_grad}.values())
    known += [t for t in inputs.repeated if not any(t is p for p in known)]
    if any(hasattr(p, "full_tensor") for p in known):
        raise ArgumentError(
            f"the parameters of {cell.name} are sharded; shard the module that calls unroll "
            "(fully_shard on it gathers them around the whole sequence), not the cell"
        )
    return known
