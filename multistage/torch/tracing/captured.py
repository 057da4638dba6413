"""The stages of a graph that TorchDynamo captured.

A stage is a pure function: it runs some nodes of the graph on what passes the cut before it,
and on parameters and buffers, which it holds and which are put in their place at each call.
Autocast and modes of gradients that are open at a cut are entered again after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.nn import functional

from ..environment.settings import Autocast
from ..measurement.measure import Profile
from ..measurement.traits import OfGraph, Remade
from .cutting import Cut, Staying, cuts, is_huge, ways_to_count
from .observing import ENTER, GRADED, LEAVE, Observed, observe
from .remaking import Remaking, is_batch_norm


class GraphStage(OfGraph):
    """One stage of a captured graph.

    Its parameters and buffers are arguments of the graph, by name.

    Parameters
    ----------
    name : str
    graph : fx.Graph
        Takes what modes are opened, and the state.
    places : dict
        Places of arguments of the whole graph, by the names of attributes.
    constants : dict
        Attributes of the whole graph.
    """

    def __init__(
        self, name: str, graph: fx.Graph, places: dict[str, int], constants: dict[str, object]
    ) -> None:
        super().__init__()
        self.name = name
        self.signature = _signature(graph)
        own = [n for n in graph.nodes if n.op == "get_attr"]
        self.names = tuple([str(n.target) for n in own])
        self.unread = frozenset([str(n.target) for n in own if all(_writes(u, n) for u in n.users)])
        self.is_pure = all(map(_is_of_torch, graph.nodes))
        self._places = places
        self._has_modes = any(n.target in (_enter, _set_graded) for n in graph.nodes)
        for key, value in constants.items():
            if isinstance(value, Tensor):
                self._buffers[key] = value
            else:
                self.__dict__[key] = value
        self._graph = graph
        code = graph.python_code("self")
        space = dict(code.globals)
        exec(code.src, space)  # what torch.fx itself does to run a graph
        self._function: Callable[..., object] = space["forward"]

    def bind(self, arguments: Sequence[object]) -> None:
        """Put the parameters and buffers of a call of the graph in their places."""
        for key, place in self._places.items():
            value: Any = arguments[place]
            if isinstance(value, nn.Parameter):
                self._parameters[key] = value
            else:
                self._buffers[key] = value

    def _multistage_ways(
        self,
        fresh: Callable[[], object],
        device: torch.device,
        tape_bytes: int,
        forward_s: float,
        *,
        draws: bool,
    ) -> list[Remade]:
        """Return ways to keep its tape beside the whole of it; see `remaking`."""
        if self._has_modes:
            return []
        run = Remaking(self, self._graph, fresh, device, draws=draws)
        return run.ways(tape_bytes, forward_s)

    def forward(self, state: object) -> object:
        """Run the stage on a state."""
        if not self._has_modes:
            return self._function(self, None, state)
        opened = _Opened()
        try:
            return self._function(self, opened, state)
        finally:  # whatever ends it, such as the last tensor that it was run again for
            opened.close()


def _signature(graph: fx.Graph) -> object:
    """Return what two graphs have in common that perform the same operations, by any chance.

    What is drawn, and what writes to it, is never made again from the graph of another stage.
    """
    numbers = {node: _Number(number) for number, node in enumerate(graph.nodes)}
    dropping: set[object] = set()  # of what is made by chance: with another chance in each block
    found = []
    for node in graph.nodes:
        given: Any = node.args
        goes_on = node.target in ("div_", "mul_") and given[0] in dropping
        if node.op == "call_method" and (node.target == "bernoulli_" or goes_on):
            dropping.add(node)
            given = tuple([_share(value) for value in given])
        found.append(
            (
                node.op,
                node.target if node.op in ("call_function", "call_method") else None,
                repr(fx.node.map_arg((given, node.kwargs), numbers.__getitem__)),
            )
        )
    return tuple(found)


def _share(value: object) -> object:
    """Return a number, or that it is a share: what is done by chance costs the same by another."""
    return "share" if isinstance(value, float) and 0 < value < 1 else value


class _Number(int):
    """Stands for a node of a graph, by its place."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _writes(user: fx.Node, n: fx.Node) -> bool:
    """Whether a node does nothing with the value of another but to write to it."""
    others = list(user.kwargs.values())
    if is_batch_norm(user):
        return n not in (user.args[0], *user.args[3:], *others)
    return user.target == "add_" and not user.users and n not in (*user.args[1:], *others)


# What adds numbers in whichever order threads come; what lets a write leave no version.
_UNSTEADY = {"index_put", "index_put_", "put", "put_", "_get_data_attr"}


def _is_of_torch(node: fx.Node) -> bool:
    """Whether a node calls nothing but operations of torch, of numbers and of tuples."""
    target: Any = node.target
    if getattr(target, "__name__", target) in _UNSTEADY:
        return False
    if node.op != "call_function" or target in (_enter, _leave, _set_graded):
        return node.op != "call_module"
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return str(target).startswith("aten.")
    if isinstance(target, HigherOrderOperator):
        return False
    module = getattr(target, "__module__", None)
    if module is None:
        return getattr(torch, target.__name__, None) is target
    own = module.partition(".")[0] in ("torch", "_operator", "math", "builtins")
    return own and not module.startswith("torch.distributed")


class _Opened:
    """Modes that a run of a stage has entered."""

    def __init__(self) -> None:
        self.graded = torch.is_grad_enabled()
        self.autocasts: list[Any] = []

    def close(self) -> None:
        """Leave what is left open."""
        while self.autocasts:
            LEAVE(self.autocasts.pop())
        torch._C._set_grad_enabled(self.graded)


def _enter(opened: _Opened, *settings: object) -> object:
    mode = ENTER(*settings)
    opened.autocasts.append(mode)
    return mode


def _leave(opened: _Opened, mode: object) -> None:
    opened.autocasts.remove(mode)
    LEAVE(mode)


def _set_graded(opened: _Opened, graded: bool) -> None:
    # A stage that runs again without gradients has none outside of no_grad either.
    torch._C._set_grad_enabled(graded and opened.graded)


# In place these save a copy of what they write to, which nothing else sees of a result of these:
# not in place they take no more memory, have the same bits, and may be parted from it by a cut.
_COPYING = {functional.hardswish, functional.silu, functional.mish, functional.hardsigmoid}
_FRESH = {
    *(functional.batch_norm, functional.group_norm, functional.layer_norm, functional.linear),
    *(torch.conv1d, torch.conv2d, torch.conv3d),
}


class GraphStages(list[GraphStage]):
    """The stages of a captured graph.

    Parameters
    ----------
    graph : fx.GraphModule
    arguments : sequence
        Of its first call.
    own : tuple of bool
        Which of them are the model's, parameters and buffers.
    finely : bool
        Whether to part what decides the least limit, though each part counts its output.

    Attributes
    ----------
    is_finest : bool
        Whether nothing is left to be parted.
    parted : set of int
        Stages whose output is that of a norm, parted from its ReLU.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        arguments: Sequence[object],
        own: tuple[bool, ...],
        *,
        finely: bool = False,
    ) -> None:
        graph = _copy_of(graph)
        observed = observe(graph, arguments, own)
        made = dict.fromkeys(
            filter(None, [_huge_before_relu(observed, n) for n in observed.values])
        )
        self.is_finest = finely or not made
        if finely and made:
            observed = _parted(graph, made, arguments, own, observed.returned)
        found = cuts(observed)
        ends = [number for number, cut in enumerate(found) if finely and cut.node in made]
        self.parted = frozenset(ends)
        super().__init__(_Building.stages(graph, observed, found, own))
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if any(type(x) not in (Tensor, nn.Parameter, nn.Buffer) for x in tensors):
            for stage in self:  # as subclasses run code of their own
                stage.is_pure = False
        self._graph, self._returned = graph, observed.returned
        self._inputs = [place for place, is_own in enumerate(own) if not is_own]
        self._staying = ways_to_count(observed, found)
        entered = [node for node in graph.graph.nodes if node.target is ENTER]
        self._casts = sorted({str(node.args[0]) for node in entered})
        modes = [bool(node.args[0]) for node in graph.graph.nodes if node.target is GRADED]
        self.leaves_graded = modes[-1] if modes else None  # as it was
        self._bound: list[object] = []

    def bind(self, arguments: Sequence[object]) -> object:
        """Take the arguments of a call; return those that are the chain's input."""
        bound = self._bound
        if len(bound) != len(arguments) or any(
            a is not b for a, b in zip(bound, arguments, strict=True) if b is not None
        ):
            for stage in self:
                stage.bind(arguments)
            self._bound = list(arguments)
            for place in self._inputs:
                self._bound[place] = None
        given = tuple([arguments[place] for place in self._inputs])
        return given[0] if len(given) == 1 else given

    def result(self, arguments: Sequence[object], output: Sequence[object]) -> object:
        """Return what the graph returns, from the chain's output."""
        if not self._returned:
            return output
        left = iter(output)
        count = len(output) + len(self._returned)
        places = [self._returned.get(place) for place in range(count)]
        return tuple([next(left) if place is None else arguments[place] for place in places])

    def plainly(self, state: object) -> object:
        """Run the whole graph as it was captured."""
        arguments = list(self._bound)
        given: Any = (state,) if len(self._inputs) == 1 else state
        for place, value in zip(self._inputs, given, strict=True):
            arguments[place] = value
        graded, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        casts = Autocast.capture(self._casts)
        depth = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        try:
            return self._graph.forward(*arguments)
        except BaseException:  # the check, too, ends a run in the middle of an autocast region
            for _ in range(torch.autocast_increment_nesting() - depth + 1):
                if not torch.autocast_decrement_nesting():
                    torch.clear_autocast_cache()
            for cast in casts:
                torch.set_autocast_enabled(cast.device_type, cast.enabled)
                torch.set_autocast_dtype(cast.device_type, cast.dtype)
            torch.set_autocast_cache_enabled(cached)
            raise
        finally:
            torch._C._set_grad_enabled(graded)

    def counted(self, profile: Profile) -> list[Profile]:
        """Return a profile by all ways to count what passes several cuts."""
        return [_counted(profile, way) for way in self._staying]


def _counted(profile: Profile, way: Staying) -> Profile:
    """Return a profile in which what stays is counted once, with the input."""
    stages = []
    for group, stage in zip(profile.groups, profile.costs.stages, strict=True):
        here = way.at[group[-1]] if group[-1] < len(way.at) else 0
        here = min(here, stage.output_bytes)
        stages.append(stage.without(here))
    costs = profile.costs
    input_bytes = costs.input_bytes + way.nbytes
    return replace(profile, costs=replace(costs, stages=tuple(stages), input_bytes=input_bytes))


def _copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.nodes:
        if node.target in _COPYING and _maker(node) is not None:
            node.args, node.kwargs = node.args[:1], {}
    return fx.GraphModule(graph, copied)


def _maker(node: fx.Node) -> fx.Node | None:
    """Return what has made a node's input, if for it alone and in memory of its own."""
    made = node.args[0] if node.args else None
    if isinstance(made, fx.Node) and made.target in _FRESH and len(made.users) == 1:
        return made
    return None


def _huge_before_relu(observed: Observed, node: fx.Node) -> fx.Node | None:
    """Return what a ReLU is written to, if it is made for that alone, and large in the model."""
    if node.target is not functional.relu or True not in (*node.args[1:], *node.kwargs.values()):
        return None
    made = _maker(node)
    return made if made is not None and is_huge(observed, made) else None


def _parted(
    graph: fx.GraphModule,
    made: Iterable[fx.Node],
    arguments: Sequence[object],
    own: tuple[bool, ...],
    returned: dict[int, int],
) -> Observed:
    """Have ReLUs write to memory of their own, so that a cut may part them from their input.

    They save what they make, and nothing of what they take.
    """
    for node in [user for each in made for user in each.users]:
        node.args, node.kwargs = node.args[:1], {}
    graph.recompile()
    observed = observe(graph, arguments, own)
    observed.returned = returned
    for node in made:
        observed.values[node].is_saved = True  # to be cut after, though nothing saves it
    return observed


class _Building:
    """The graph of one stage, as it grows."""

    def __init__(self, whole: fx.GraphModule, observed: Observed, own: dict[fx.Node, int]) -> None:
        self.graph = fx.Graph()
        self._whole, self._observed, self._own = whole, observed, own
        self._copies: dict[fx.Node, fx.Node] = {}
        self._opened = self.graph.placeholder("opened")
        self._state = self.graph.placeholder("state")
        self.places: dict[str, int] = {}
        self.constants: dict[str, object] = {}

    @classmethod
    def stages(
        cls,
        whole: fx.GraphModule,
        observed: Observed,
        found: Sequence[Cut],
        own: Sequence[bool],
    ) -> list[GraphStage]:
        """Return the stages between cuts."""
        placeholders = [n for n in observed.graph.nodes if n.op == "placeholder"]
        of_model = {n: k for k, n in enumerate(placeholders) if own[k]}
        fixed = ("placeholder", "get_attr", "output")
        nodes = [n for n in observed.graph.nodes if n.op not in fixed]
        output = next(n for n in observed.graph.nodes if n.op == "output")
        places = {node: number for number, node in enumerate(nodes)}
        stages: list[GraphStage] = []
        start, passing = 0, tuple(observed.inputs)
        modes: tuple[bool, tuple[fx.Node, ...]] = True, ()
        for cut in [*found, None]:
            building = cls(whole, observed, of_model)
            building.begin(passing, modes)
            stop = len(nodes) if cut is None else places[cut.node] + 1
            for node in nodes[start:stop]:
                building.add(node)
            if cut is None:
                building.graph.output(building.mapped(output.args[0]))
            else:
                passing, modes = cut.passing, observed.modes[cut.node]
                building.end(passing, modes)
            last = nodes[stop - 1] if nodes else output
            stages.append(
                GraphStage(_name_of(last), building.graph, building.places, building.constants)
            )
            start = stop
        return stages

    def begin(self, passing: Sequence[fx.Node], modes: tuple[bool, tuple[fx.Node, ...]]) -> None:
        """Unpack the state, and enter the modes that are open."""
        for place, node in enumerate(passing):
            self._copies[node] = (
                self._state
                if len(passing) == 1
                else self.graph.call_function(operator.getitem, (self._state, place))
            )
        graded, autocasts = modes
        for node in autocasts:
            self.add(node)
        if not graded:
            self.graph.call_function(_set_graded, (self._opened, False))

    def end(self, passing: Sequence[fx.Node], modes: tuple[bool, tuple[fx.Node, ...]]) -> None:
        """Leave the modes that are open, and pack the state."""
        graded, autocasts = modes
        if not graded:
            self.graph.call_function(_set_graded, (self._opened, True))
        for node in reversed(autocasts):
            self.graph.call_function(_leave, (self._opened, self._copies[node]))
        kept = [self._copy(node) for node in passing]
        self.graph.output(kept[0] if len(kept) == 1 else tuple(kept))

    def add(self, node: fx.Node) -> None:
        """Add a node."""
        for special, ours in ((ENTER, _enter), (LEAVE, _leave), (GRADED, _set_graded)):
            if node.target is special:
                given = (self._opened, *self.mapped(node.args))
                self._copies[node] = self.graph.call_function(ours, given)
                return
        self._copies[node] = self.graph.node_copy(node, self._copy)

    def mapped(self, value: Any) -> Any:
        """Return an argument with the nodes of this graph."""
        return fx.node.map_arg(value, self._copy)

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:  # a parameter, a buffer, or a constant
            name = f"own_{node.name}"
            if node.op == "get_attr":
                self.constants[name] = operator.attrgetter(str(node.target))(self._whole)
            else:
                self.places[name] = self._own[node]
            self._copies[node] = self.graph.get_attr(name)
        return self._copies[node]


def _name_of(node: fx.Node) -> str:
    """Return a stage's name: of the module and the call that it ends with."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    return f"{path.rpartition(']')[2].lstrip('.') or path}:{node.name}"
