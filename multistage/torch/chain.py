"""`to_chain`: the stages of a model that was not written as a chain."""

from __future__ import annotations

from typing import overload

from torch import nn

from ..backends.urls import Tiers
from ..errors import ArgumentError
from .sequential import Sequential
from .tracing.traced import Stages as Stages
from .tracing.traced import stages_of_model


@overload
def to_chain(model: nn.Module, sample_input: object) -> Stages: ...


@overload
def to_chain(
    model: nn.Module,
    sample_input: object,
    *,
    memory: int | str | float,
    tiers: Tiers | None = None,
) -> Sequential: ...


def to_chain(
    model: nn.Module,
    sample_input: object,
    *,
    memory: int | str | float | None = None,
    tiers: Tiers | None = None,
) -> Stages | Sequential:
    """Return the stages of a model, found in what its `forward` does, or a chain of them.

    Its `forward` runs once on the sample, as in training, and the calls of torch
    that it makes are recorded.  The model, its buffers and all random generators
    are left as they were.  Modules that a graph cannot hold are called whole;
    `called_whole` of the result names them.

    Parameters
    ----------
    model : nn.Module
    sample_input : tensor, tuple or mapping
        What the model is called with: one argument, positional arguments, or
        keyword arguments.  The stages take the same, for inputs of the same
        shapes, modes and attributes; `Sequential` records again for others.
    memory, tiers
        As for `Sequential`: with a limit the result is
        `Sequential(to_chain(model, sample_input), sample_input, memory, tiers=tiers)`.

    Raises
    ------
    ArgumentError
        If the model cannot be recorded or cut; the message says why.  For tiers without
        a limit.

    Examples
    --------
    >>> import torch
    >>> class Residual(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = torch.nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return x + torch.tanh(self.linear(x))
    >>> model = torch.nn.Sequential(Residual(), Residual())
    >>> [stage.name for stage in to_chain(model, torch.ones(2, 4, requires_grad=True))]
    ['add', 'add_1']
    """
    if tiers is not None and memory is None:
        raise ArgumentError("tiers=... goes with memory=...: where all fits nothing travels")
    stages = stages_of_model(model, sample_input)
    if memory is None:
        return stages
    return Sequential(stages, sample_input, memory, tiers=tiers)
