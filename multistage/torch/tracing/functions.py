"""Autograd functions of a model, as a captured graph calls them.

TorchDynamo captures an `autograd.Function` as two graphs and a call that makes a class of its own
at each run.  What that class saves for backward lies in a closure, where no hook sees it and
where it stays until the garbage collector looks, as classes lie in cycles of references.  One
class for all calls saves it as functions do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.autograd_function import autograd_function_apply

_FACTS = {"non_differentiable_idx", "saved_for_backward_idx"}  # given from torch 2.12 on


def saving_as_functions_do(graph: fx.GraphModule) -> None:
    """Let a captured graph call autograd functions by the class below."""
    calls = [n for n in graph.graph.nodes if n.target is autograd_function_apply]
    for node in calls:
        if node.kwargs.keys() >= _FACTS and "args_tensor_mask" not in node.kwargs:
            node.target = _apply
    if calls:
        graph.recompile()


def _apply(fwd: fx.GraphModule, bwd: fx.GraphModule, *args: Any, **facts: Any) -> Any:
    if torch._C._are_functorch_transforms_active():
        return autograd_function_apply(fwd, bwd, *args, **facts)
    return _Function.apply(fwd, bwd, facts, *args)


class _Function(torch.autograd.Function):
    """Runs the captured graphs of a function's forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, fwd: fx.GraphModule, bwd: fx.GraphModule, facts: dict[str, Any], *args: Any
    ) -> Any:
        output, values = fwd.forward(*args)
        at = facts["saved_for_backward_idx"]
        ctx.save_for_backward(*[v if k in at else None for k, v in enumerate(values)])
        ctx.bwd, ctx.values = bwd, [None if k in at else v for k, v in enumerate(values)]
        dirty = _those(output, facts.get("dirty_idx", ()))
        if dirty:
            ctx.mark_dirty(*dirty)
        fixed = _those(output, facts["non_differentiable_idx"])
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.values, strict=True)
        values = [other if tensor is None else tensor for tensor, other in pairs]
        found = ctx.bwd.forward(*gradients, *values)
        found = found if isinstance(found, (tuple, list)) else (found,)
        return None, None, None, *found


def _those(output: Tensor | tuple[Tensor, ...], places: Collection[int]) -> list[Tensor]:
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    return [x for place, x in enumerate(outputs) if place in places]
