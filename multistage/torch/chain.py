"""`to_chain`: the stages of a model that was not written as a chain.

The graph of the model is traced and cut wherever a single tensor passes that
takes part in the gradient: at the articulation points of the undirected graph
that lie on the way from input to output, as OpenAI's gradient-checkpointing
found them for TensorFlow.  What else may pass a cut: inputs of the model but
the first, what depends on no parameter (masks, tables of positions), and
values that are no tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn

from ..errors import ArgumentError
from .recording import by_recording
from .tracing import Traced, attribute_of, by_export, by_fx


class Stages(list["Part"]):
    """The stages of a model, in order.

    Attributes
    ----------
    model : nn.Module
        Whose parameters and buffers they use.
    """

    def __init__(self, model: nn.Module, parts: Iterable[Part]) -> None:
        super().__init__(parts)
        self.model = model


class Part(nn.Module):
    """One stage: some nodes of a traced graph, run on the model they came from.

    Its modules are the model's own; the state goes in and out as one value, or
    as a tuple of those that pass the cut.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        graph: fx.Graph,
        training: bool | None,
        extras: dict[str, Any],
    ) -> None:
        super().__init__()
        self.name = name
        self._host = _Host(model, extras)
        code = graph.python_code("self")
        self._source, self._names = code.src, dict(code.globals)
        self._training = training
        for number, path in enumerate(_modules_used(graph, extras)):
            self.add_module(str(number), model.get_submodule(path))
        self._function = _compiled(self._source, self._names)

    def forward(self, state: Any) -> Any:
        training = self._host.model.training
        if self._training is not None and self._training != training:
            raise ArgumentError(
                f"stage {self.name} was traced with training={self._training}, which its code "
                "depends on; call to_chain again in the other mode"
            )
        return self._function(self._host, state)

    @property
    def model(self) -> nn.Module:
        """The model it is a part of; not one of its modules."""
        return self._host.model

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key != "_function"}
        state["_names"] = {
            name: _Imported(value.__name__) if isinstance(value, ModuleType) else value
            for name, value in self._names.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._names = {
            name: import_module(value.name) if isinstance(value, _Imported) else value
            for name, value in self._names.items()
        }
        self._function = _compiled(self._source, self._names)

    def extra_repr(self) -> str:
        return self.name


class _Host:
    """What a graph takes its attributes from: a model, and what the tracer added."""

    def __init__(self, model: nn.Module, extras: dict[str, Any]) -> None:
        self.model = model
        self.extras = extras

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "extras" not in self.__dict__:  # being copied
            raise AttributeError(name)
        return self.extras[name] if name in self.extras else getattr(self.model, name)


def _modules_used(graph: fx.Graph, extras: dict[str, Any]) -> list[str]:
    """Return the paths of modules a graph calls, or takes parameters and buffers of."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            found[str(node.target)] = None
        elif node.op == "get_attr" and node.target not in extras:
            owner, _, _ = str(node.target).rpartition(".")
            if owner:  # not the model itself: a part must not own all of it
                found[owner] = None
    return list(found)


@dataclass(frozen=True, slots=True)
class _Imported:
    """Stands for a Python module, which cannot be copied."""

    name: str


def _compiled(source: str, names: dict[str, Any]) -> Callable[[Any, Any], Any]:
    space = dict(names)
    exec(source, space)  # what torch.fx itself does to run a graph
    function: Callable[[Any, Any], Any] = space["forward"]
    return function


def to_chain(model: nn.Module, sample_input: Any) -> Stages:
    """Return the stages between the articulation points of a model's graph.

    Traced by `torch.fx`, in the mode (train or eval) the model is in.  Where
    that fails or finds no cut, a run of the model on the sample is recorded
    (and if that fails, `torch.export` is used): the stages then take inputs of
    the sample's shapes only.

    Parameters
    ----------
    model : nn.Module
    sample_input : tensor, tuple or dict
        What the model is called with: one argument, positional arguments, or
        keyword arguments.  The stages take the same.

    Raises
    ------
    ArgumentError
        If the model cannot be traced, or if no single tensor passes anywhere;
        the message says why.

    Examples
    --------
    >>> class Residual(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = torch.nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return x + torch.tanh(self.linear(x))
    >>> model = torch.nn.Sequential(Residual(), Residual())
    >>> [stage.name for stage in to_chain(model, torch.ones(2, 4))]
    ['add', 'add_1']
    """
    reasons: list[str] = []
    uncut = ""
    for trace in (by_fx, by_recording, by_export):
        try:
            traced = trace(model, sample_input)
        except ArgumentError as error:
            reasons.append(str(error))
            continue
        cuts = _cuts(model, traced)
        if cuts:
            return Stages(model, _parts(model, traced, cuts, sample_input))
        uncut = uncut or _reason(model, traced)
    if uncut:
        raise ArgumentError(f"{type(model).__name__} cannot be cut: {uncut}")
    raise ArgumentError(
        f"{type(model).__name__} cannot be traced ({'; '.join(reasons)}); control flow that "
        "depends on tensors has no fixed graph: write the model as a list of stages instead"
    )


# -------------------------------------------------------------------- cutting


def _differentiated(model: nn.Module, traced: Traced) -> set[fx.Node]:
    """Return the nodes that gradients pass: of the first input, or of parameters that want them."""
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            wants = node.prev.op == "root"
        elif node.op == "get_attr":
            value = attribute_of(model, str(node.target))
            wants = isinstance(value, torch.Tensor) and value.requires_grad
        else:
            wants = any(given in found for given in node.all_input_nodes)
            if node.op == "call_module":
                module = model.get_submodule(str(node.target))
                wants = wants or any(p.requires_grad for p in module.parameters())
            wants = wants and node in traced.floats
        if wants:
            found.add(node)
    return found


def _live_after(graph: fx.Graph) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return each node with the values made up to it that are used beyond it."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    place = {node: number for number, node in enumerate(graph.nodes)}
    last_use = {
        node: max((place[user] for user in node.users), default=-1)
        for node in nodes
        if node.op != "get_attr"
    }
    return [
        (node, [n for n in last_use if place[n] <= place[node] < last_use[n]]) for node in nodes
    ]


def _cuts(model: nn.Module, traced: Traced) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the nodes after which a single tensor passes, and all that passes there."""
    counting = _differentiated(model, traced)
    cuts = []
    for node, live in _live_after(traced.graph):
        made = node.op not in ("placeholder", "get_attr") and node in counting
        if made and [n for n in live if n in counting] == [node]:
            cuts.append((node, live))
    return cuts[:-1] if cuts and _is_last(cuts[-1][0]) else cuts


def _is_last(node: fx.Node) -> bool:
    """Whether only the output comes after a node."""
    return all(user.op == "output" for user in node.users) and node.next.op == "output"


def _reason(model: nn.Module, traced: Traced) -> str:
    counting = _differentiated(model, traced)
    found = [
        (len(crossing), node, crossing)
        for node, live in _live_after(traced.graph)
        if node.op not in ("placeholder", "get_attr")
        and (crossing := [n for n in live if n in counting])
    ]
    inner = [entry for entry in found if not _is_last(entry[1])]
    if not inner:
        return "it has a single operation"
    fewest, node, crossing = min(inner, key=lambda entry: entry[0])
    names = ", ".join(n.name for n in crossing[:6])
    return (
        f"at least {fewest} tensors pass at every point of its graph "
        f"(after {node.name!r}: {names}), and a cut needs a point that one tensor passes"
    )


# -------------------------------------------------------------------- the parts


def _parts(
    model: nn.Module,
    traced: Traced,
    cuts: list[tuple[fx.Node, list[fx.Node]]],
    sample: Any,
) -> list[Part]:
    graph = traced.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    output = next(node for node in graph.nodes if node.op == "output")
    ends = [node for node, _ in cuts] + [nodes[-1]]
    passing: list[list[fx.Node]] = [live for _, live in cuts]
    parts = []
    start = 0
    for number, end in enumerate(ends):
        stop = nodes.index(end) + 1
        part = fx.Graph()
        extras: dict[str, Any] = {}
        copies: dict[fx.Node, fx.Node] = {}
        state = part.placeholder("state")
        if number == 0:
            _unpack_first(part, state, traced, sample, copies, extras)
        else:
            given = passing[number - 1]
            for k, node in enumerate(given):
                single = len(given) == 1
                copies[node] = state if single else _item(part, state, k)
        for node in _with_attributes(nodes[start:stop], nodes):
            if node not in copies:
                copies[node] = part.node_copy(node, lambda n: copies[n])  # noqa: B023
        if number < len(passing):
            kept = [copies[node] for node in passing[number]]
            part.output(kept[0] if len(kept) == 1 else tuple(kept))
        else:
            for node in output.all_input_nodes:
                if node.op == "get_attr" and node not in copies:
                    copies[node] = part.node_copy(node)
            result = fx.node.map_arg(output.args[0], lambda n: copies[n])  # noqa: B023
            if traced.result is not None:
                extras["result"] = traced.result
                result = part.call_function(_call, (part.get_attr("result"), result))
            part.output(result)
        fetched = {str(n.target) for n in part.nodes if n.op == "get_attr"}
        extras |= {k: v for k, v in traced.extras.items() if k in fetched}
        parts.append(Part(end.name, model, part, traced.training, extras))
        start = stop
    return parts


def _item(part: fx.Graph, state: fx.Node, key: int | str) -> fx.Node:
    return part.call_function(operator.getitem, (state, key))


def _with_attributes(part: list[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
    """Return nodes of a part with the attributes they fetch, which each part fetches itself."""
    wanted = {n for node in part for n in node.all_input_nodes if n.op == "get_attr"}
    inside = wanted | {node for node in part if node.op != "get_attr"}
    return [node for node in nodes if node in inside]


def _unpack_first(
    part: fx.Graph,
    state: fx.Node,
    traced: Traced,
    sample: Any,
    copies: dict[fx.Node, fx.Node],
    extras: dict[str, Any],
) -> None:
    """Give the first stage the model's arguments out of what it is called with."""
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if traced.given is not None:
        extras["given"] = traced.given
        state = part.call_function(_call, (part.get_attr("given"), state))
    for k, node in enumerate(placeholders):
        if traced.given is None and isinstance(sample, dict):
            if node.target in sample:
                copies[node] = _item(part, state, str(node.target))
        elif traced.given is not None or isinstance(sample, tuple):
            if traced.given is not None or k < len(sample):
                copies[node] = _item(part, state, k)
        elif k == 0:
            copies[node] = state


def _call(function: Callable[[Any], Any], value: Any) -> Any:
    return function(value)
