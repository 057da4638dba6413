"""`to_chain`: the stages of a model that was not written as a chain.

The graph of the model is traced and cut wherever a single tensor passes: at
the articulation points of the undirected graph that lie on the way from input
to output, as OpenAI's gradient-checkpointing found them for TensorFlow.  What
else may pass a cut: inputs of the model but the first, such as masks, and
values that are no tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import ArgumentError


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

    def __init__(self, name: str, model: nn.Module, graph: fx.Graph, training: bool | None) -> None:
        super().__init__()
        self.name = name
        self._model = (model,)  # in a tuple: a part of it must not own all of it
        self._graph = graph
        self._training = training
        used = {
            str(node.target): model.get_submodule(str(node.target))
            for node in graph.nodes
            if node.op == "call_module"
        }
        for number, module in enumerate(used.values()):
            self.add_module(str(number), module)
        self._function = _compiled(graph)

    def forward(self, state: Any) -> Any:
        model = self._model[0]
        if self._training is not None and self._training != model.training:
            raise ArgumentError(
                f"stage {self.name} was traced with training={self._training}, which its code "
                "depends on; call to_chain again in the other mode"
            )
        return self._function(model, state)

    def set_mode(self, training: bool) -> None:
        """Say what mode the model is in: not being a child of the chain, it is not told."""
        self._model[0].training = training

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._function = _compiled(self._graph)

    def extra_repr(self) -> str:
        return self.name


def _compiled(graph: fx.Graph) -> Callable[[nn.Module, Any], Any]:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # what torch.fx itself does to run a graph
    function: Callable[[nn.Module, Any], Any] = names["forward"]
    return function


def to_chain(model: nn.Module, sample_input: Any) -> Stages:
    """Return the stages between the articulation points of a model's graph.

    Parameters
    ----------
    model : nn.Module
        Traced by `torch.fx` in the mode (train or eval) it is in.
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
    graph, baked = _trace(model, sample_input)
    values = _values(model, graph, sample_input)
    cuts = _cuts(graph, values)
    if not cuts:
        raise ArgumentError(f"{type(model).__name__} cannot be cut: {_reason(graph, values)}")
    return Stages(model, _parts(model, graph, values, cuts, sample_input, baked))


# -------------------------------------------------------------------- tracing


def _trace(model: nn.Module, sample: Any) -> tuple[fx.Graph, bool | None]:
    """Return the graph and the training mode it depends on, None if on none."""
    constants = _constants(model, sample)
    graph = _traced(model, constants)
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module, flag in flags:
            module.training = not flag
        other = _traced(model, constants)
    except ArgumentError:
        return graph, model.training
    finally:
        for module, flag in flags:
            module.training = flag
    same = graph.python_code("self").src == other.python_code("self").src
    return graph, None if same else model.training


def _traced(model: nn.Module, constants: dict[str, Any]) -> fx.Graph:
    try:
        graph = fx.Tracer().trace(model, constants)
    except Exception as error:  # whatever the model's code raises on proxies
        raise ArgumentError(
            f"{type(model).__name__} cannot be traced by torch.fx ({error}); control flow that "
            "depends on tensors has no fixed graph: write the model as a list of stages instead"
        ) from error
    # Dead code stays: an operation in place may be wanted for what it writes.
    return graph


def _constants(model: nn.Module, sample: Any) -> dict[str, Any]:
    """Return the arguments of forward that the sample leaves at their defaults."""
    import inspect

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


def _values(model: nn.Module, graph: fx.Graph, sample: Any) -> dict[fx.Node, bool]:
    """Run the graph on the sample; return for each node whether it yields a tensor."""
    found: dict[fx.Node, bool] = {}

    class Look(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            found[n] = not _is_plain(result)
            return result

    arguments = _arguments(graph, sample)
    from .measure import untouched

    with torch.no_grad(), untouched([model], arguments):
        Look(fx.GraphModule(model, graph)).run(*arguments)
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensor, such as a size."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return not isinstance(value, dict) or all(_is_plain(part) for part in value.values())


def _arguments(graph: fx.Graph, sample: Any) -> list[Any]:
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    if isinstance(sample, dict):
        return [sample.get(name) for name in names]
    values = list(sample) if isinstance(sample, tuple) else [sample]
    return values + [None] * (len(names) - len(values))


# -------------------------------------------------------------------- cutting


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


def _crossing(live: list[fx.Node], tensors: dict[fx.Node, bool]) -> list[fx.Node]:
    """Return the tensors that pass; of the model's inputs, the first alone counts."""
    return [
        node
        for node in live
        if tensors[node] and (node.op != "placeholder" or node.prev.op == "root")
    ]


def _cuts(graph: fx.Graph, tensors: dict[fx.Node, bool]) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the nodes after which a single tensor passes, and all that passes there."""
    cuts = []
    for node, live in _live_after(graph):
        made = node.op not in ("placeholder", "get_attr") and tensors[node]
        if made and _crossing(live, tensors) == [node]:
            cuts.append((node, live))
    return cuts[:-1] if cuts and _is_last(cuts[-1][0], graph) else cuts


def _is_last(node: fx.Node, graph: fx.Graph) -> bool:
    """Whether only the output comes after a node."""
    return all(user.op == "output" for user in node.users) and node.next.op == "output"


def _reason(graph: fx.Graph, tensors: dict[fx.Node, bool]) -> str:
    found = [
        (len(crossing), node, crossing)
        for node, live in _live_after(graph)
        if node.op not in ("placeholder", "get_attr") and (crossing := _crossing(live, tensors))
    ]
    inner = [entry for entry in found if not _is_last(entry[1], graph)]
    if not inner:
        return "it has a single operation"
    fewest, node, crossing = min(inner, key=lambda entry: entry[0])
    names = ", ".join(n.name for n in crossing[:6])
    return (
        f"at least {fewest} tensors pass at every point of its graph "
        f"(after {node.name!r}: {names}), and a cut needs a point that one tensor passes"
    )


def _parts(
    model: nn.Module,
    graph: fx.Graph,
    tensors: dict[fx.Node, bool],
    cuts: list[tuple[fx.Node, list[fx.Node]]],
    sample: Any,
    baked: bool | None,
) -> list[Part]:
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    output = next(node for node in graph.nodes if node.op == "output")
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    ends = [node for node, _ in cuts] + [nodes[-1]]
    passing: list[list[fx.Node]] = [live for _, live in cuts]
    parts = []
    start = 0
    for number, end in enumerate(ends):
        stop = nodes.index(end) + 1
        part = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        state = part.placeholder("state")
        if number == 0:
            _unpack_first(part, state, placeholders, sample, copies)
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
            part.output(fx.node.map_arg(output.args[0], lambda n: copies[n]))  # noqa: B023
        part.lint()
        parts.append(Part(end.name, model, part, baked))
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
    placeholders: list[fx.Node],
    sample: Any,
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Give the first stage the model's arguments out of what it is called with."""
    for k, node in enumerate(placeholders):
        if isinstance(sample, dict):
            if node.target in sample:
                copies[node] = _item(part, state, str(node.target))
        elif isinstance(sample, tuple):
            if k < len(sample):
                copies[node] = _item(part, state, k)
        elif k == 0:
            copies[node] = state
