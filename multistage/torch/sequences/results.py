"""What `unroll` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from .cell import Facts
from .collector import Collector
from .unroll_plan import UnrollPlan

State_co = TypeVar("State_co", covariant=True)
Outputs_co = TypeVar("Outputs_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Unrolled(Generic[State_co, Outputs_co]):
    """What `unroll` returns.

    Attributes
    ----------
    state : pytree of Tensor
        The state after the last step.
    loss : Tensor or None
        Sum of the losses of all steps, if the cell returns any.
    outputs : pytree of Tensor or None
        y of all steps, reduced as asked for; None if y is one number, a loss.
    plan : UnrollPlan or None
        How it was run; None where no gradient is required.

    Examples
    --------
    >>> import torch
    >>> import multistage.torch as mst
    >>> cell = torch.nn.GRUCell(3, 4)
    >>> out = mst.unroll(cell, torch.zeros(2, 4), torch.randn(6, 2, 3))
    >>> out.outputs.shape, out.state.shape
    (torch.Size([6, 2, 4]), torch.Size([2, 4]))
    """

    state: State_co
    loss: Tensor | None
    outputs: Outputs_co
    plan: UnrollPlan | None


def results_of(facts: Facts, values: Sequence[Tensor | None]) -> tuple[Tensor | None, object]:
    """Return the loss and the outputs from the reduced leaves of y."""
    if facts.y_spec is None:
        return None, None
    whole = pytree.tree_unflatten(list(values), facts.y_spec)
    if facts.y_spec.is_leaf():
        return (whole, None) if facts.summed[0] else (None, whole)
    loss = whole.get("loss") if isinstance(whole, dict) else None
    return (loss if isinstance(loss, Tensor) and loss.dim() == 0 else None), whole


def single_results(
    last: Sequence[Tensor],
    pattern: Sequence[int],
    wants: Sequence[bool],
    collector: Collector,
    facts: Facts,
    *,
    fused: bool,
) -> tuple[list[Tensor], list[bool], list[int | None]]:
    """Return the results of a sequence, each once, whether each takes part in the gradient, places.

    The places are those of the state's leaves and y's among the results.  One
    tensor in several places is one result, so that its gradient is added up
    as plain autograd does it.

    Parameters
    ----------
    last : sequence of Tensor
        The leaves of the last state.
    pattern : sequence of int
        Which of these, and of the leaves of y of the last step, are one; see `Boundary`.
    wants : sequence of bool
        Which leaves of the last state take part in the gradient.
    collector, facts
    fused : bool
        Whether the cell takes several steps at once.
    """
    count = len(last)
    results: list[Tensor] = []
    flags: list[bool] = []
    places: list[int | None] = []
    for i, leaf in enumerate(last):
        if pattern[i] < i:
            places.append(places[pattern[i]])
            continue
        places.append(len(results))
        results.append(leaf.view_as(leaf))
        flags.append(wants[i])
    # The sum of one is that one.
    one = ("last", "sum") if collector.steps == 1 else ("last",)
    kept = [kind in one and not fused for kind in collector.kinds]
    for j, value in enumerate(collector.values()):
        known = kept[j] and count + j < len(pattern)  # else no y came in the last chunk
        same = pattern[count + j] if known else count + j
        if value is None:
            places.append(None)
        elif same < count or (same < count + j and kept[same - count]):
            places.append(places[same])
        else:
            places.append(len(results))
            results.append(value)
            flags.append(facts.differentiable[j])
    return results, flags, places
