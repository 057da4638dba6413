"""A graph that TorchDynamo captured, run once to see what cuts depend on.

The graph is a pure function: parameters, buffers and inputs are its arguments.  It runs on
copies of the inputs and buffers, under hooks that forget what is saved for gradients, so that
the run takes the memory of a run without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.amp import autocast_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ...errors import ArgumentError
from ..environment.captured import Snapshot
from ..environment.copies import cloned
from ..environment.scope import Scope
from ..measurement.saved import Saved
from ..tensors.meter import bytes_held

ENTER: Callable[..., object] = autocast_mode._enter_autocast
LEAVE: Callable[..., object] = autocast_mode._exit_autocast
GRADED: Callable[..., object] = torch._C._set_grad_enabled
# What changes nothing but what torch knows of itself, and nothing the second time.
_PREPARING = ("_log_api_usage_once", "lazy_load_decompositions")  # the latter for torch.vmap
_PLAIN = (
    *(bool, int, float, complex, str, type(None)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(slots=True)
class Value:
    """What is known of the value of a node.

    Attributes
    ----------
    wants : bool
        Whether it takes part in the gradient.
    nbytes : int
        Of its storage.
    storage : StorageWeakRef or None
    is_new : bool
        Whether nothing before it lies in that storage.
    is_opaque : bool
        Whether it is no plain tensor or number, which no state holds.
    is_mode : bool
        Whether it is a context that was entered, and is entered again in each stage.
    is_effect : bool
        Whether its call changes something that is no tensor.
    closed : bool
        Whether no cut may follow.
    is_saved : bool
        Whether an operation saves what lies in its storage for its gradient.
    """

    wants: bool = False
    nbytes: int = 0
    storage: StorageWeakRef | None = None
    is_new: bool = False
    is_opaque: bool = False
    is_mode: bool = False
    is_effect: bool = False
    closed: bool = False
    is_saved: bool = True


@dataclass(slots=True)
class Observed:
    """A captured graph, and what a run of it showed.

    Attributes
    ----------
    graph : fx.Graph
    inputs : list of fx.Node
        The placeholders that are no parameters and buffers.
    values : dict
        What is known of each node.
    made : set
        Storages that the graph makes.
    written : dict
        The last node that writes to a storage.
    modes : dict
        What is entered after a node: whether gradients are on, and calls of autocast.
    returned : dict
        Places of arguments that the captured graph returned, by their places in its result;
        the graph that was observed no longer does.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    values: dict[fx.Node, Value]
    made: set[object]
    written: dict[object, fx.Node]
    modes: dict[fx.Node, tuple[bool, tuple[fx.Node, ...]]] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)


def observe(graph: fx.GraphModule, arguments: Sequence[object], own: Sequence[bool]) -> Observed:
    """Run a captured graph; return what is known of its values.

    Parameters
    ----------
    graph : fx.GraphModule
    arguments : sequence
        Of its placeholders.
    own : sequence of bool
        Which of them are the model's: parameters and buffers, that no state holds.

    Raises
    ------
    ArgumentError
        If it writes to a parameter.
    """
    parameters = [
        x
        for x, is_own in zip(arguments, own, strict=True)
        if is_own and isinstance(x, nn.Parameter)
    ]
    versions = [p._version for p in parameters]
    with Snapshot(Scope(()), [x for x in arguments if isinstance(x, Tensor)]):
        observer = _observed(graph, arguments, own)
    if versions != [p._version for p in parameters]:
        raise ArgumentError(
            "the model writes to a parameter in place; keep what forward changes in a buffer"
        )
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [node for node, is_own in zip(placeholders, own, strict=True) if not is_own]
    observed = Observed(graph.graph, inputs, observer.values, observer.made, observer.written)
    observed.returned = _taken_out(graph, observer.same)
    _close(observed)
    return observed


def _taken_out(graph: fx.GraphModule, same: Mapping[fx.Node, int]) -> dict[int, int]:
    """Let a graph no longer return its own arguments, as one does that writes to buffers.

    Returns the places of those arguments, by their places among the outputs.
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    own = {place: same[node] for place, node in enumerate(returned) if node in same}
    output.args = (tuple([node for place, node in enumerate(returned) if place not in own]),)
    graph.recompile()
    return own


def _observed(graph: fx.GraphModule, arguments: Sequence[object], own: Sequence[bool]) -> _Observer:
    def missing(number: int) -> Tensor:
        raise _MissingError

    observer = _Observer(graph)
    try:
        with Saved(observer.see, missing, missing), torch.enable_grad():
            observer.observe(arguments, own)
    except _MissingError:
        pass
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # which torch.func does not support
            raise
    else:
        observer.close()
        return observer
    observer = _Observer(graph)
    with torch.enable_grad():
        observer.observe(arguments, own)
    return observer


class _MissingError(BaseException):
    """A graph differentiates what it computes."""


def _copies(arguments: Sequence[object]) -> list[object]:
    """Return arguments that may be written to, parameters without their hooks."""
    tensors = [x for x in arguments if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
    written = [x for x in tensors if x.is_leaf]
    known = {id(x): copy for x, copy in zip(written, cloned(written), strict=True)}

    def copy(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        fresh = known[id(value)] if id(value) in known else value.detach()
        if fresh.requires_grad != value.requires_grad:
            fresh.requires_grad_(value.requires_grad)
        return fresh if value.is_leaf else fresh.clone()  # no leaf either

    return [copy(value) for value in arguments]


class _Observer(fx.Interpreter):
    """Runs a graph node by node, and remembers what each makes and writes to."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, Value] = {}
        self.made: set[object] = set()
        self.written: dict[object, fx.Node] = {}
        self.same: dict[fx.Node, int] = {}  # what is an argument of the model's own: its place
        self._known: dict[int, object] = {}
        self._own: dict[int, int] = {}
        self._saved: dict[int, StorageWeakRef] = {}  # or their addresses might be used again

    def see(self, tensor: Tensor) -> None:
        """Note what is saved for a gradient."""
        storage = storage_of(tensor)
        if storage is not None:
            self._saved[storage.cdata] = storage

    def close(self) -> None:
        """Note which values nothing has saved."""
        for known in self.values.values():
            known.is_saved = known.storage is None or known.storage.cdata in self._saved

    def observe(self, arguments: Sequence[object], own: Sequence[bool]) -> None:
        """Run the graph on copies of its arguments."""
        copies = _copies(arguments)
        self._own = {id(copies[k]): k for k in reversed(range(len(own))) if own[k]}
        self.run(*copies)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        given = self._given(n)
        before = [t._version for t in given]
        result = super().run_node(n)
        if n.op == "output":
            return result
        writes = False
        for tensor, version in zip(given, before, strict=True):
            if tensor._version != version and (storage := storage_of(tensor)) is not None:
                self.written[storage.cdata] = n
                writes = True
        self._note(n, result, writes)
        return result

    def _given(self, n: fx.Node) -> list[Tensor]:
        found = [self.env[node] for node in n.all_input_nodes if node in self.env]
        return [t for t in pytree.tree_leaves(found) if isinstance(t, Tensor) and not _wrapped(t)]

    def _note(self, n: fx.Node, result: object, writes: bool) -> None:
        leaves = pytree.tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.values[n] = known = Value(
            wants=any(t.requires_grad for t in tensors),
            nbytes=0 if any(_wrapped(t) for t in tensors) else bytes_held(tensors),
        )
        known.is_opaque = not isinstance(result, (Tensor, *_PLAIN)) or any(
            _wrapped(t) for t in tensors
        )
        plain = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
        acts = n.op in ("call_function", "call_method") and not writes
        acts = acts and getattr(n.target, "__name__", "") not in _PREPARING
        known.is_effect = acts and (not plain or not any(leaf is not None for leaf in leaves))
        if id(result) in self._own:
            self.same[n] = self._own[id(result)]
        if isinstance(result, Tensor) and not known.is_opaque:
            known.storage = storage = storage_of(result)
            if storage is not None and storage.cdata not in self._known:
                known.is_new = True
                self._known[storage.cdata] = storage  # or its address might be used again
                if n.op not in ("placeholder", "get_attr"):
                    self.made.add(storage.cdata)


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage, None if it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse
        return None


_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _close(observed: Observed) -> None:
    """Note after which nodes no cut may fall, and which modes are open there."""
    nodes = [n for n in observed.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    place = {node: number for number, node in enumerate(nodes)}
    opened: dict[fx.Node, int] = {}
    levels, graded = 0, True
    effects: list[int] = []
    for number, node in enumerate(nodes):
        known = observed.values[node]
        if node.target is ENTER:
            known.is_mode = True
            opened[node] = number
        elif node.target is LEAVE:
            begun = opened.pop(node.args[0])
            _close_region(observed, nodes, place, begun, number)
        elif node.target is GRADED:
            graded = bool(node.args[0])
        elif (name := getattr(node.target, "__name__", "")).endswith("increment_nesting"):
            levels += 1
        elif name.endswith("decrement_nesting"):
            levels -= 1
        elif known.is_effect:
            effects.append(number)
        known.closed = known.closed or levels > 0
        observed.modes[node] = graded, tuple(opened)
    kept = _written_storages(observed)
    for node in nodes:
        storage = observed.values[node].storage
        if storage is not None and storage.cdata in kept:
            _close_between(observed, nodes, [place.get(u, len(nodes)) for u in (node, *node.users)])
    for number in range(effects[0], effects[-1]) if effects else ():
        observed.values[nodes[number]].closed = True


def _close_region(
    observed: Observed,
    nodes: Sequence[fx.Node],
    place: dict[fx.Node, int],
    begun: int,
    done: int,
) -> None:
    """Close an autocast region between uses of a weight, which is cast once in it."""
    for holder in observed.graph.nodes:
        if holder.op not in ("placeholder", "get_attr") or not observed.values[holder].wants:
            continue
        uses = [place[user] for user in holder.users if begun < place.get(user, -1) < done]
        _close_between(observed, nodes, uses)


def _close_between(observed: Observed, nodes: Sequence[fx.Node], places: Sequence[int]) -> None:
    for number in range(min(places), max(places)) if places else ():
        observed.values[nodes[number]].closed = True


def _written_storages(observed: Observed) -> set[object]:
    """Return the storages of buffers that are written to.

    What lies in one is no state between stages, as another call writes to it too.
    """
    inputs = {*observed.inputs}
    own = [n for n in observed.graph.nodes if n.op in ("placeholder", "get_attr")]
    storages = [observed.values[n].storage for n in own if n not in inputs]
    return {s.cdata for s in storages if s is not None and s.cdata in observed.written}
