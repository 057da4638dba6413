"""What `unroll` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

from .cell import Facts
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
        y of all steps, reduced as asked for.
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
