"""What the largest operator of a model takes by itself: no cut into stages needs less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from multistage.torch.measurement.saved import Saved
from multistage.torch.tensors.meter import Meter, storages_of


def largest_operator(
    module: nn.Module, called: Callable[[Any], Any], held_bytes: int
) -> tuple[int, str]:
    """Return the bytes that a step takes at least, and the operator that decides.

    Each operator of the captured graph runs alone, forward and backward: counted are what it
    saves, gradients of its outputs and inputs, of parameters too while they are on their way,
    and what it makes meanwhile.

    Parameters
    ----------
    module : nn.Module
    called : callable
        Calls what it is given on the model's inputs.
    held_bytes : int
        What the caller holds all the time: inputs and outputs.
    """
    found: list[tuple[int, str]] = []

    def backend(graph: fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            each = _EachAlone(graph)
            result = each.run(*arguments)
            found.append(max(each.needs, default=(0, "none")))
            return result

        return run

    called(torch.compile(module, backend=backend, fullgraph=True, dynamic=False))
    nbytes, name = max(found)
    return held_bytes + nbytes, name


class _EachAlone(fx.Interpreter):
    """Runs a graph, and each of its operators once more by itself.

    Attributes
    ----------
    needs : list of (int, str)
        Bytes of each operator at its peak, and its name.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.needs: list[tuple[int, str]] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        if n.op in ("call_function", "call_method"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            run: Callable[..., Any] = getattr(self, n.op)
            try:
                given = pytree.tree_map_only(Tensor, _alone, (args, kwargs))
                nbytes = _backward_bytes(lambda: run(n.target, *given), given)
            except RuntimeError:  # such as a write to an expanded tensor, or one of torch.func's
                nbytes = 0
            self.needs.append((nbytes, f"{n.name} ({getattr(n.target, '__name__', n.target)})"))
        return super().run_node(n)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor of the same wishes, which may be written to."""
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    return leaf if isinstance(tensor, nn.Parameter) else leaf.clone()


def _backward_bytes(run: Callable[[], Any], given: object) -> int:
    """Return the bytes of an operator at the peak of its backward, what it saves included."""
    inputs = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    own = {key for t in inputs if t.is_leaf for key in storages_of(t)}
    states = {key for t in inputs for key in storages_of(t)} - own
    saved: dict[int, int] = {}

    def see(tensor: Tensor) -> None:
        kept = storages_of(tensor)
        saved.update({key: s.nbytes() for key, s in kept.items() if key in states})

    with torch.enable_grad(), Meter(torch.device("cpu")) as meter:
        meter.ignore(inputs)
        with Saved(see):
            outputs = [t for t in pytree.tree_leaves(run()) if isinstance(t, Tensor)]
        outputs = [t for t in outputs if t.requires_grad]
        gradients = [torch.ones_like(t) for t in outputs]
        wanted = [t for t in inputs if t.requires_grad]
        if not outputs or not wanted:
            return 0
        nodes = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
        del outputs
        meter.reset_peak()
        torch.autograd.grad(nodes, wanted, gradients, allow_unused=True)
        return meter.peak_bytes + sum(saved.values())
