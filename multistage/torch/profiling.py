"""`profile`: what the stages of a chain cost, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..model.stages import StageCosts
from .measurement.measure import measure_stages
from .planning.limited import names_of, stages_of
from .sequential import Sequential


def profile(
    model: nn.Sequential | Sequence[Callable[..., object]] | Sequential,
    sample_input: object,
    *,
    seconds: float = 2.0,
) -> StageCosts:
    """Return the costs of each stage on a sample input.

    On the CPU bytes are an exact accounting of the storages that operations
    make and that graphs save; on CUDA they are the caching allocator's.  The
    input counts what it takes to run stages again besides (copies of the buffers
    they change, states of random generators).
    Stages of which one writes to its input are measured as one.

    Parameters
    ----------
    model : nn.Sequential, multistage.torch.Sequential, or sequence of stages
    sample_input : pytree
        What the chain is called with; tensors that require gradients are
        differentiated.
    seconds : float
        About how long to time; every stage is timed at least twice.

    Raises
    ------
    StateError
        If a stage changes state that could not be put back; it is named.

    Examples
    --------
    >>> import torch
    >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    >>> costs = profile(layers, torch.ones(4, 8))
    >>> [(stage.name, stage.output_bytes) for stage in costs.stages]
    [('0 Linear', 128), ('1 Tanh', 128)]
    """
    chain = model if isinstance(model, Sequential) else Sequential(model)
    found = measure_stages(stages_of(chain), names_of(chain), sample_input, seconds=seconds)
    return found.costs
