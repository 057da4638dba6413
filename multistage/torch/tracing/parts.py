"""`Part`: one stage of a model that was not written as a chain."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, TypedDict

import torch
from torch import fx, nn

from .cutting import Cut
from .recorded import Modes, Recorded, Value

_OPENED = "_multistage_opened"


class Part(nn.Module):
    """One stage: some nodes of a recorded graph, run on the model they came from.

    The modules it calls are the model's own, and its children.  Parameters and
    buffers of modules that it does not call are read from where the model has
    them registered; so they are found among the part's own, and what is set
    there is set in the model.  The state goes in and out as one value, or as a
    tuple of those that pass the cut.
    """

    def __init__(
        self, name: str, model: nn.Module, graph: fx.Graph, extras: dict[str, object]
    ) -> None:
        super().__init__()
        self.name = name
        self.before: Callable[[object], None] | None = None
        self._host = _Host(model, extras)
        self._code = Code(graph)
        self._has_modes = any(node.target == _OPENED for node in graph.nodes)
        called, owned = _modules_used(graph, extras)
        for number, path in enumerate(called):
            self.add_module(str(number), model.get_submodule(path))
        self._owners: list[nn.Module] = []
        for number, (path, names) in enumerate(owned.items()):
            owner = model.get_submodule(path)
            self.add_module(f"own_{number}", _Owned(owner, names))
            if any(name in vars(owner) for name in names):
                self._owners.append(owner)

    def forward(self, state: object) -> object:
        """Run the part on a state."""
        if self.before is not None:
            self.before(state)
        return self.run(state)

    def run(self, state: object) -> object:
        """Run the stage without a look at what its graph depends on."""
        if not self._has_modes:
            return self._code(self._host, state)
        host = copy(self._host)
        host._multistage_opened = opened = _Opened()
        try:
            return self._code(host, state)
        finally:
            opened.close()

    @property
    def model(self) -> nn.Module:
        """The model it is a part of; not one of its modules."""
        return self._host._multistage_model

    def refers_to(self) -> Sequence[nn.Module]:
        """Return modules of which it reads attributes that are not registered; see `Scope`."""
        return self._owners

    def extra_repr(self) -> str:
        """Return the part's name."""
        return self.name


class _Host:
    """What a graph takes its attributes from: a model, and what recording added.

    Its own names are none that a model has.
    """

    def __init__(self, model: nn.Module, extras: dict[str, object]) -> None:
        self._multistage_model = model
        self._multistage_extras = extras
        self._multistage_opened = _NONE

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_multistage_extras" not in self.__dict__:  # being copied
            raise AttributeError(name)
        extras = self._multistage_extras
        return extras[name] if name in extras else getattr(self._multistage_model, name)


class _Opened:
    """Modes that a run has entered."""

    def __init__(self) -> None:
        self.graded: list[torch.set_grad_enabled] = []
        self.autocasts: list[torch.autocast] = []

    def close(self) -> None:
        """Leave modes that an exception has left open."""
        while self.autocasts:
            self.autocasts.pop().__exit__(None, None, None)
        while self.graded:
            self.graded.pop().__exit__(None, None, None)


_NONE = _Opened()


def _set_graded(opened: _Opened, graded: bool) -> None:
    if graded:
        opened.graded.pop().__exit__(None, None, None)
    else:
        opened.graded.append(torch.set_grad_enabled(False))


def _enter_autocast(opened: _Opened, settings: dict[str, Any]) -> None:
    context = torch.autocast(**settings)
    context.__enter__()
    opened.autocasts.append(context)


def _leave_autocast(opened: _Opened) -> None:
    opened.autocasts.pop().__exit__(None, None, None)


class _Owned(nn.Module):
    """Some parameters and buffers of a module, wherever they are registered by now."""

    def __init__(self, owner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        for space in ("_parameters", "_buffers"):
            of_space = [name for name in names if name in getattr(owner, space)]
            self.__dict__[space] = _Selection(owner, space, of_space)


class _Selection(MutableMapping[str, Any]):
    """Some entries of a module's parameters or buffers."""

    def __init__(self, owner: nn.Module, space: str, names: Sequence[str]) -> None:
        self._owner, self._space, self._chosen = owner, space, dict.fromkeys(names)

    def _all(self) -> dict[str, Any]:
        found: dict[str, Any] = self._owner.__dict__[self._space]
        return found

    def __getitem__(self, name: str) -> Any:
        if name not in self._chosen:
            raise KeyError(name)
        return self._all()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._chosen[name] = None
        self._all()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._chosen[name], self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._chosen if name in self._all())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def values(self) -> list[Any]:  # type: ignore[override]  # read at every run: not a view
        if not self._chosen:
            return []
        space = self._all()
        return [space[name] for name in self._chosen if name in space]

    def copy(self) -> dict[str, Any]:
        return dict(self)


def _modules_used(
    graph: fx.Graph, extras: dict[str, object]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the paths of modules a graph calls, and of those it takes tensors of, with names."""
    called: dict[str, None] = {}
    owned: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            called[str(node.target)] = None
        elif node.op == "get_attr" and node.target not in extras and node.target != _OPENED:
            owner, _, name = str(node.target).rpartition(".")
            if name not in (names := owned.setdefault(owner, [])):
                names.append(name)
    return list(called), owned


class _CodeState(TypedDict):
    """A `Code`, pickled."""

    _source: str
    _names: dict[str, object]


class Code:
    """A graph as a function that can be copied and pickled.

    Called with what holds its attributes, and its arguments.
    """

    def __init__(self, graph: fx.Graph) -> None:
        code = graph.python_code("self")
        self._source, self._names = code.src, dict(code.globals)
        self._compile()

    def _compile(self) -> None:
        space = dict(self._names)
        exec(self._source, space)  # what torch.fx itself does to run a graph
        self._function: Callable[..., object] = space["forward"]

    def __call__(self, host: object, *given: object) -> object:
        """Run the code with the host's attributes."""
        return self._function(host, *given)

    def __getstate__(self) -> _CodeState:
        names = {name: _Imported.of(value) for name, value in self._names.items()}
        return {"_source": self._source, "_names": names}

    def __setstate__(self, state: _CodeState) -> None:
        self._source = state["_source"]
        self._names = {
            name: value.found() if isinstance(value, _Imported) else value
            for name, value in state["_names"].items()
        }
        self._compile()


@dataclass(frozen=True, slots=True)
class _Imported:
    """Stands for a Python module, or a function of torch that cannot be pickled."""

    module: str
    name: str | None = None

    @classmethod
    def of(cls, value: object) -> object:
        """Return a stand-in for a value, or the value if it needs none."""
        if isinstance(value, ModuleType):
            return cls(value.__name__)
        home, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
        if (
            isinstance(home, str)
            and home.startswith("torch")
            and getattr(sys.modules.get(home), name, None) is value
        ):
            return cls(home, name)
        return value

    def found(self) -> object:
        module = import_module(self.module)
        return module if self.name is None else getattr(module, self.name)


# --------------------------------------------------------------------- making


def parts_of(model: nn.Module, recorded: Recorded, cuts: Sequence[Cut]) -> list[Part]:
    """Return the parts of a model between cuts of its graph."""
    nodes = [n for n in recorded.graph.nodes if n.op not in ("placeholder", "output")]
    output = next(n for n in recorded.graph.nodes if n.op == "output")
    places = {node: number for number, node in enumerate(nodes)}
    parts: list[Part] = []
    start = 0
    for number in range(len(cuts) + 1):
        last = number == len(cuts)
        stop = len(nodes) if last else places[cuts[number].node] + 1
        building = _Building(recorded)
        if number == 0:
            building.unpack_arguments()
        else:
            building.unpack(cuts[number - 1].passing)
        for node in nodes[start:stop]:
            building.add(node)
        if last:
            building.finish(output)
            name = nodes[-1].name
        else:
            building.pack(cuts[number].passing)
            name = cuts[number].node.name
        parts.append(Part(name, model, building.graph, building.extras))
        start = stop
    return parts


class _Building:
    """The graph of one part, as it grows."""

    def __init__(self, recorded: Recorded) -> None:
        self.graph = fx.Graph()
        self.extras: dict[str, object] = {}
        self._recorded = recorded
        self._copies: dict[fx.Node, fx.Node] = {}
        self._state = self.graph.placeholder("state")
        self._modes = Modes(True, ())

    def _fetched(self, name: str, value: object) -> fx.Node:
        self.extras[name] = value
        return self.graph.get_attr(name)

    def unpack_arguments(self) -> None:
        given = self._fetched("_given", self._recorded.given)
        leaves = self.graph.call_function(_call, (given, self._state))
        holders = [n for n in self._recorded.graph.nodes if n.op == "placeholder"]
        for place, node in enumerate(holders):
            self._copies[node] = self.graph.call_function(operator.getitem, (leaves, place))

    def unpack(self, passing: Sequence[fx.Node]) -> None:
        for place, node in enumerate(passing):
            self._copies[node] = (
                self._state
                if len(passing) == 1
                else self.graph.call_function(operator.getitem, (self._state, place))
            )

    def add(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            name = str(node.target)
            if name in self._recorded.extras:
                self.extras[name] = self._recorded.extras[name]
        else:
            known = self._recorded.values.get(node, Value())
            self._enter(known.modes or Modes(True, ()))
        self._copies[node] = self.graph.node_copy(node, lambda n: self._copies[n])

    def _enter(self, modes: Modes) -> None:
        """Change from the modes of the call before to those of the next."""
        now, then = self._modes, modes
        if now == then:
            return
        common = 0
        while now.autocasts[: common + 1] == then.autocasts[: common + 1] != ():
            common += 1
            if common >= min(len(now.autocasts), len(then.autocasts)):
                break
        opened = self.graph.get_attr(_OPENED)
        if now.graded != then.graded:
            self.graph.call_function(_set_graded, (opened, then.graded))
        for _ in now.autocasts[common:]:
            self.graph.call_function(_leave_autocast, (opened,))
        for number, arguments in then.autocasts[common:]:
            settings = self._fetched(f"_autocast_{number}", arguments)
            self.graph.call_function(_enter_autocast, (opened, settings))
        self._modes = modes

    def pack(self, passing: Sequence[fx.Node]) -> None:
        self._enter(Modes(True, ()))
        kept = [self._copies[node] for node in passing]
        self.graph.output(kept[0] if len(kept) == 1 else tuple(kept))

    def finish(self, output: fx.Node) -> None:
        self._enter(Modes(True, ()))
        result = fx.node.map_arg(output.args[0], lambda n: self._copies[n])
        rebuild = self._fetched("_result", self._recorded.result)
        self.graph.output(self.graph.call_function(_call, (rebuild, result)))


def _call(function: Callable[[object], object], value: object) -> object:
    return function(value)
