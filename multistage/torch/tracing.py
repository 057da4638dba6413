"""The graph of a model: by `torch.fx`, or by `torch.export` where that fails.

`torch.fx` keeps the model's modules and serves every shape; `torch.export`
knows more Python (keyword arguments, decorators, branches on shapes), and its
graph holds for the shapes and the mode of the sample alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError


@dataclass(slots=True)
class Traced:
    """A graph whose attributes are the model's, and what is known of its values.

    Attributes
    ----------
    graph : fx.Graph
        Its placeholders are the model's arguments, or with `given` the leaves
        of them.
    training : bool or None
        The mode it was traced in, if it depends on it.
    tensors, floats : set of fx.Node
        Nodes that yield tensors; of floating point.
    extras : dict
        Attributes that are not the model's.
    given : Given, optional
        Flattens what the model is called with.
    result : Structure, optional
        Of what it returns, where the graph returns leaves.
    """

    graph: fx.Graph
    training: bool | None
    tensors: set[fx.Node]
    floats: set[fx.Node]
    extras: dict[str, Any] = field(default_factory=dict)
    given: Given | None = None
    result: Structure | None = None

    def note(self, node: fx.Node, value: Any) -> None:
        """Remember what a node yields."""
        leaves = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
        if leaves:
            self.tensors.add(node)
        if any(x.is_floating_point() or x.is_complex() for x in leaves):
            self.floats.add(node)


def arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a sample stands for."""
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}


# -------------------------------------------------------------------- torch.fx


def by_fx(model: nn.Module, sample: Any) -> Traced:
    """Trace with `torch.fx`.  Raises ArgumentError."""
    constants = _constants(model, sample)
    graph = _symbolic(model, constants)
    traced = Traced(graph, _depends_on_mode(model, graph, constants), set(), set())
    values = _placeholder_values(graph, sample)

    class Look(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            traced.note(n, result)
            return result

    from .exploring import untouched

    with torch.no_grad(), untouched([model], values):
        Look(fx.GraphModule(model, graph)).run(*values)
    return traced


def _symbolic(model: nn.Module, constants: dict[str, Any]) -> fx.Graph:
    try:
        # Dead code stays: an operation in place may be wanted for what it writes.
        return fx.Tracer().trace(model, constants)
    except Exception as error:  # whatever the model's code raises on proxies
        raise ArgumentError(f"torch.fx: {_first_line(error)}") from error


def _depends_on_mode(model: nn.Module, graph: fx.Graph, constants: dict[str, Any]) -> bool | None:
    """Return the training mode if the graph is another one in the other mode."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, flag in flags:
            module.training = not flag
        other = _symbolic(model, constants)
    except ArgumentError:
        return model.training
    finally:
        for module, flag in flags:
            module.training = flag
    same = graph.python_code("self").src == other.python_code("self").src
    return None if same else model.training


def _constants(model: nn.Module, sample: Any) -> dict[str, Any]:
    """Return the arguments of forward that the sample leaves at their defaults."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if isinstance(sample, dict):
        given = set(sample)
    else:
        count = len(sample) if isinstance(sample, tuple) else 1
        given = {p.name for p in parameters[:count]}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: p.default
        for p in parameters
        if p.name not in given and p.kind in kinds and p.default is not p.empty
    }


def _placeholder_values(graph: fx.Graph, sample: Any) -> list[Any]:
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    if isinstance(sample, dict):
        return [sample.get(name) for name in names]
    values = list(sample) if isinstance(sample, tuple) else [sample]
    return values + [None] * (len(names) - len(values))


# ---------------------------------------------------------------- torch.export


class Structure:
    """A pytree's structure that can be copied and pickled, as its specification cannot.

    Parameters
    ----------
    spec : pytree.TreeSpec
    """

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._numbered = pytree.tree_unflatten(range(spec.num_leaves), spec)

    def spec(self) -> pytree.TreeSpec:
        """Return the specification."""
        return pytree.tree_structure(self._numbered)

    def __call__(self, leaves: list[Any]) -> Any:
        """Return the pytree of some leaves."""
        return pytree.tree_unflatten(leaves, self.spec())


class Given:
    """Flattens what an exported model is called with, if it is what it was exported for.

    Parameters
    ----------
    sample : pytree
    """

    def __init__(self, sample: Any) -> None:
        self._keys = list(sample) if isinstance(sample, dict) else None
        leaves, spec = pytree.tree_flatten(arguments(sample))
        self._structure = Structure(spec)
        self._kinds = [_kind(leaf) for leaf in leaves]

    def __call__(self, state: Any) -> list[Any]:
        """Return the leaves.  Raises ArgumentError for another kind of input."""
        if self._keys is not None and isinstance(state, dict) and state.keys() == {*self._keys}:
            state = {key: state[key] for key in self._keys}
        leaves, spec = pytree.tree_flatten(arguments(state))
        kinds = [_kind(leaf) for leaf in leaves]
        if spec != self._structure.spec() or kinds != self._kinds:
            raise ArgumentError(
                f"the model was exported for inputs {self._kinds}, and is called with {kinds}; "
                "call to_chain again with a sample of these"
            )
        return leaves


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device}"
    return repr(leaf)


def by_export(model: nn.Module, sample: Any) -> Traced:
    """Trace with `torch.export`, for the sample's shapes and the present mode.

    Raises ArgumentError.
    """
    positional, named = arguments(sample)
    try:
        with torch.enable_grad():
            program = torch.export.export(model, positional, named, strict=False)
            module = program.module()
    except Exception as error:  # whatever the model's code raises on fake tensors
        raise ArgumentError(f"torch.export: {_first_line(error)}") from error
    graph = module.graph
    traced = Traced(
        graph,
        model.training,
        set(),
        set(),
        given=Given(sample),
        result=Structure(program.call_spec.out_spec),
    )
    for node in list(graph.nodes):
        if node.op == "call_module":  # checks of the input, which Given does
            graph.erase_node(node)
            continue
        if node.op == "get_attr" and attribute_of(model, node.target) is None:
            name = f"extra_{len(traced.extras)}"
            traced.extras[name] = attribute_of(module, node.target)
            node.target = name
        known = _MODES.get(str(node.target))
        if known is not None:
            node.target = known
        traced.note(node, node.meta.get("val"))
        node.meta = {}
    return traced


def attribute_of(model: nn.Module, path: str) -> Any:
    """Return what a path such as `layer.0.weight` names, or None."""
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _with_grad_mode(enabled: bool, inner: Callable[..., Any], *given: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return inner(*given)


def _with_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    inner: Callable[..., Any],
    *given: Any,
) -> Any:
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return inner(*given)


# In place of the exporter's own, which not every dispatch mode can run.
_MODES: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": _with_grad_mode,
    "wrap_with_autocast": _with_autocast,
}


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
