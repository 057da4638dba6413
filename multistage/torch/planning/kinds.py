"""Kinds of input: what a plan depends on besides the stages."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..environment.randomness import device_types
from ..environment.scope import Found
from ..environment.settings import Settings
from ..measurement.exploring import tensors_of
from .choosing import is_collective
from .limited import Facts, Kind, LimitedModule, of_functions


def kind_of_call(model: LimitedModule, state: object, found: Found) -> Kind:
    """Return what a plan depends on: shapes, strides, dtypes, devices, wishes and modes.

    Those of parameters too: numbers of words have one dtype, whatever the model's.
    """
    leaves, spec = pytree.tree_flatten(state)
    of_leaves = tuple(
        (x.ndim, _gaps(x), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else type(x)
        for x in leaves
    )
    settings = Settings.capture(device_types(tensors_of(state)))
    facts = facts_of(model, found)
    wishes = tuple([p.requires_grad for p in facts.wanting])
    # Of tensors that are no parameters shapes may change at every call.
    of_parameters = tuple([(p.shape, p.dtype, p.device) for p in facts.parameters])
    family = str(spec), of_leaves, settings, facts.modes, hash(wishes), hash(of_parameters)
    return Kind(family, tuple([n for x in leaves if isinstance(x, torch.Tensor) for n in x.shape]))


def _gaps(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not contiguous: stages may copy it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    return tensor.stride()


def facts_of(model: LimitedModule, found: Found) -> Facts:
    """Return what is known of the model, renewed after a change of mode or number."""
    chain = model._multistage
    if chain.facts is not None and chain.facts[0] == found.number:
        return chain.facts[1]
    functions = of_functions(model)
    modes = hash(tuple(m.training for m in (*model.modules(), *functions.modules)))
    wanting = [*model.parameters(), *functions.tensors]
    parameters = [p for p in wanting if isinstance(p, nn.Parameter) and not is_lazy(p)]
    facts = Facts(modes, wanting, parameters, is_collective(model))
    # Neither modes of scripted modules nor results of runs are remembered.
    if not found.scripted and len(parameters) == len(wanting):
        chain.facts = found.number, facts
    return facts
