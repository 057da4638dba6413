"""`Recorder`: makes a node of every call of torch while a model's `forward` runs."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..environment.holders import is_same
from ..environment.randomness import Generators
from ..environment.scope import Scope
from ..measurement.exploring import untouched
from .called import apply_function, boxed_in, cut_off, drop, never, same_value, shapes_of, unboxed
from .calling import Given, Structure
from .intercepting import intercepted
from .recorded import (
    FIXED,
    INPUT,
    MODEL,
    RANDOM,
    Modes,
    Reading,
    Recorded,
    UnrecordableError,
    Value,
)
from .storages import (
    Mutations,
    behind,
    copies_of,
    items,
    paths_of_tensors,
    registered_in,
    storage_of,
    vars_of,
)
from .vocabulary import (
    LITERALS,
    PROPERTIES,
    QUERIES,
    REFUSED,
    is_method,
    said,
    shaped_by_values,
    tensors_in,
)
from .watching import (
    INTERNAL,
    Attributes,
    Snapshot,
    backends_settings,
    has_hooks,
)

# Containers of other layers whose forward is a loop over them.
_OPENED = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)


@dataclass(slots=True)
class _Frame:
    """A module whose forward is running."""

    path: str
    settings: tuple[object, ...] = ()


class Recorder(TorchFunctionMode):
    """Records every call of torch as a node of a graph."""

    def __init__(self, model: nn.Module, closed: dict[str, str], kinds: set[type]) -> None:
        super().__init__()
        self._model, self._closed, self._kinds = model, closed, kinds
        self._paths = {module: path for path, module in model.named_modules()}
        self._own, self._alive = paths_of_tensors(model)
        self._registered = {module: registered_in(module) for module in self._paths}
        self._graph = fx.Graph()
        self._extras: dict[str, Any] = {}
        self._values: dict[fx.Node, Value] = {}
        self._nodes: Any = WeakTensorKeyDictionary()
        self._mutations = Mutations()
        self._writing: list[Tensor] = []  # what the call that is being recorded wrote to
        self._written: dict[object, fx.Node] = {}
        known = [s for t in self._alive if (s := storage_of(t)) is not None]
        self._storages: dict[int, StorageWeakRef] = {s.cdata: s for s in known}
        self._readings: list[Reading] = []
        self._attributes = Attributes()
        self._opened: dict[str, None] = {}
        self._called_whole: set[str] = set()
        self._frames: list[_Frame] = []
        self._autocasts: list[tuple[int, dict[str, Any]]] = []
        self._autocasts_made = 0
        self._generators = Generators()
        self._states = self._generators.capture()
        self._random = torch.get_rng_state()
        self._thread = threading.get_ident()
        self._paused = 0

    # ------------------------------------------------------------------ a run

    def run(self, sample: Any) -> Recorded:
        """Run the model's forward on copies of a sample."""
        given = Given(self._model, sample)
        leaves = given(sample)
        snapshot = Snapshot(self._model)
        with (
            torch.enable_grad(),
            untouched(Scope.of(self._model), leaves),
            torch.autograd.graph.saved_tensors_hooks(drop, never),
        ):
            copies = copies_of(leaves)
            for number, leaf in enumerate(copies):
                node = self._graph.placeholder(f"given_{number}")
                if isinstance(leaf, Tensor):
                    self._note(node, leaf, INPUT)
            positional, named = given.call(copies)
            result = self._forward(positional, named)
            self._end(result, snapshot)
            leaves, spec = pytree.tree_flatten(result)
        return Recorded(
            self._graph,
            self._values,
            {
                v.storage.cdata
                for node, v in self._values.items()
                if v.is_new and v.storage is not None and node.op != "placeholder"
            },
            self._written,
            self._extras,
            given,
            Structure(spec),
            self._readings,
            self._attributes,
            list(self._opened),
            dict(self._closed),
        )

    def _forward(self, positional: list[Any], named: dict[str, Any]) -> Any:
        self._frames.append(_Frame("", backends_settings()))
        try:
            with intercepted(self), self:
                result = self._model.forward(*positional, **named)
                self._check_generators()
        except UnrecordableError:
            raise
        except Exception as error:  # whatever the model's code raises
            path = getattr(error, "_multistage_path", "")
            raise UnrecordableError(path, f"raises {_first_line(error)}") from error
        return result

    def _end(self, result: Any, snapshot: Snapshot) -> None:
        """Make the output; refuse what forward has left behind."""
        leaves = pytree.tree_leaves(result)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *LITERALS)):
                raise UnrecordableError(
                    "",
                    f"returns a value of type {type(leaf).__name__}, not tensors alone "
                    "(models of transformers: use_cache=False)",
                )
        self._graph.output([self._argument(leaf) for leaf in leaves])
        for path, name in snapshot.changes():
            if any(f"{path}.".startswith(f"{whole}.") for whole in self._called_whole):
                continue  # as its call in the graph will
            raise UnrecordableError(
                path,
                f"sets its attribute {name!r} (write to a buffer in place instead; if its first "
                "call alone does so, call the model once before)",
            )
        for path, name, _ in self._attributes.differences():
            raise UnrecordableError(path, f"changes what its attribute {name!r} holds")
        self._attributes.forget_identities()

    # ---------------------------------------------------------------- modules

    def _whole(self, module: nn.Module, path: str) -> bool:
        """Whether a module is called whole."""
        if path in self._closed or type(module) in self._kinds:
            self._closed.setdefault(path, "as others of its class")
            return True
        if has_hooks(module) or isinstance(module, torch.jit.ScriptModule):
            return True
        home = type(module).__module__
        return home.startswith(("torch.nn.", "torch.ao.", "torch._dynamo.")) and not isinstance(
            module, _OPENED
        )

    def call(self, plain: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `nn.Module.__call__`."""
        path = self._paths.get(module)
        if path is None or not self.recording():
            return plain(module, *args, **kwargs)
        self._check_generators()
        if self._whole(module, path):
            with self._pause():
                return self._call_whole(plain, module, path, args, kwargs)
        self._opened[path] = None
        self._frames.append(_Frame(path, backends_settings()))
        try:
            result = plain(module, *args, **kwargs)
            self._check_generators()
        except Exception as error:
            if not hasattr(error, "_multistage_path"):
                error._multistage_path = path  # type: ignore[attr-defined]
            raise
        finally:
            self._frames.pop()
        return result

    def _call_whole(
        self,
        plain: Callable[..., Any],
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._refuse_substitutes(module, path)
        self._called_whole.add(path)
        modes = self._modes()
        given = tuple(self._argument(x) for x in args)
        named = {key: self._argument(value) for key, value in kwargs.items()}
        tensors = tensors_in((args, kwargs))
        versions = [t._version for t in tensors]
        if path in self._closed:  # it may differentiate what it computes, and needs what it saved
            kept = [(p, p._version, p.detach().clone()) for p in module.parameters()]
            boxes: list[list[Tensor]] = []
            with torch.autograd.graph.saved_tensors_hooks(boxed_in(boxes), unboxed):
                result = plain(module, *args, **kwargs)
            for box in boxes:  # or an output that its own node keeps is never freed
                box.clear()
            result = pytree.tree_map(cut_off, result)
            self._refuse_changed(kept)
        else:
            result = plain(module, *args, **kwargs)
        self._registered |= {each: registered_in(each) for each in module.modules()}
        self._states, self._random = self._generators.capture(), torch.get_rng_state()
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                self._mutations.note(tensor, MODEL | RANDOM)
                self._writing.append(tensor)
        for leaf in pytree.tree_leaves(result):
            if leaf is not None and not isinstance(leaf, Tensor):
                raise UnrecordableError(
                    path, f"returns a value of type {type(leaf).__name__}, not tensors alone"
                )
        node = self._graph.create_node("call_module", path, given, named)
        self._note(node, result, MODEL | RANDOM, modes)
        return result

    def _refuse_substitutes(self, module: nn.Module, path: str) -> None:
        """Refuse tensors in place of a module's own, with which the graph would call it."""
        for each in module.modules():
            known = self._registered.get(each)
            if known is not None and not is_same(known, registered_in(each)):
                raise self._refused(
                    f"calls {path} with other parameters or buffers than its own, as "
                    "torch.func.functional_call does"
                )

    def _refuse_changed(self, kept: Sequence[tuple[Tensor, int, Tensor]]) -> None:
        """Put parameters back that a module wrote to; refuse the model if there are any."""
        changed = [(p, value) for p, version, value in kept if p._version != version]
        for parameter, value in changed:
            with torch.no_grad():
                parameter.copy_(value)
        if changed:
            raise self._writes_to(changed[0][0])

    def _writes_to(self, parameter: Tensor) -> UnrecordableError:
        path = self._own.get(id(parameter), "a parameter")
        return UnrecordableError(
            "", f"writes to parameter {path} in place (keep what forward changes in a buffer)"
        )

    # ---------------------------------------------------------- calls of torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.recording():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = func.__self__.__name__
            if attribute in PROPERTIES:
                return func(*args, **kwargs)
            return self._call("call_function", getattr, func, args, {}, (args[0], attribute))
        if name in QUERIES or (name == "type" and len(args) == 1 and not kwargs):
            return func(*args, **kwargs)
        if name in REFUSED:
            raise self._refused(f"calls {said(func)}")
        if is_method(func):
            return self._call("call_method", name, func, args, kwargs)
        return self._call("call_function", func, func, args, kwargs)

    def _call(
        self,
        kind: str,
        target: Any,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: tuple[Any, ...] | None = None,
    ) -> Any:
        """Call a function of torch, and record it as a node."""
        if not torch.equal(torch.get_rng_state(), self._random):
            raise self._refused("draws random numbers, or seeds a generator, unseen by torch")
        modes = self._modes()
        nodes = tuple(self._argument(x) for x in (args if given is None else given))
        named = {key: self._argument(value) for key, value in kwargs.items()}
        tensors = tensors_in((args, kwargs))
        versions = [t._version for t in tensors]
        source = FIXED
        for tensor in tensors:
            source |= self._source(tensor)
        in_place = kind == "call_method" and target.endswith("_") and not target.endswith("__")
        if in_place and isinstance(args[0], nn.Parameter):
            raise self._writes_to(args[0])
        result = func(*args, **kwargs)
        state = torch.get_rng_state()
        if not torch.equal(state, self._random) or any(t.device.type == "cuda" for t in tensors):
            # A draw; on devices, whose generators are not looked at, anything may be one.
            source, self._random = source | RANDOM, state
        written = [t for t, v in zip(tensors, versions, strict=True) if t._version != v]
        for tensor in written:
            self._mutations.note(tensor, source)
        self._writing = written
        leaves = pytree.tree_leaves(result)
        if not any(isinstance(x, Tensor) for x in leaves):
            if result is None:
                node = self._graph.create_node(kind, target, nodes, named)
                self._note(node, None, source, modes)
                return None
            self._read(kind, target, nodes, named, source, result, func)
            return result
        if not all(isinstance(x, (Tensor, *LITERALS)) for x in leaves):
            raise self._refused(f"calls {said(func)}, for a value of type {type(result).__name__}")
        node = self._graph.create_node(kind, target, nodes, named)
        self._note(node, result, source, modes)
        if source != FIXED and shaped_by_values(func, args, kwargs):
            if source != INPUT:
                raise self._refused(f"calls {said(func)}, whose shape follows from values,")
            shapes = [tuple(t.shape) for t in tensors_in(result)]
            read = self._graph.call_function(shapes_of, (node,))
            self._readings.append(self._reading(read, shapes, func))
        return result

    def _read(
        self,
        kind: str,
        target: Any,
        nodes: tuple[Any, ...],
        named: dict[str, Any],
        source: int,
        result: object,
        func: Any,
    ) -> None:
        """Take note of a value that Python gets."""
        if source == FIXED:
            return
        plain = isinstance(result, (bool, int, float, str)) or (
            isinstance(result, list) and len(result) < 1000
        )
        if not plain:
            raise self._refused(f"calls {said(func)}, for a value of type {type(result).__name__}")
        if source == RANDOM:
            raise self._refused(f"decides by a random number ({said(func)})")
        if source != INPUT:
            if self._frames[-1].path or not isinstance(result, bool):
                raise self._refused(
                    f"reads a value of a tensor ({said(func)}) that depends on parameters, buffers "
                    "or random numbers"
                )
            # Such as a look for NaNs, which is nearly always the same: compared in every run.
            read = self._graph.create_node(kind, target, nodes, named)
            self._values[read] = Value(source)
            same = self._graph.call_function(same_value, (read, result, said(func)))
            self._values[same] = Value(source)
            return
        read = self._graph.create_node(kind, target, nodes, named)
        self._readings.append(self._reading(read, result, func))

    def _reading(self, node: fx.Node, value: object, func: Any) -> Reading:
        """Return a reading by a graph of its own, taken out of the model's."""
        wanted = behind(node)
        for inner in wanted:
            known = self._values.get(inner)
            if known is not None and known.modes is not None and known.modes.autocasts:
                raise self._refused(f"reads a value of a tensor ({said(func)}) under autocast")
            if known is not None and self._mutations.source(known.storage) is not None:
                raise self._refused(
                    f"reads a value of a tensor ({said(func)}) that was written to in place"
                )
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for inner in self._graph.nodes:
            if inner.op == "placeholder" or inner in wanted:
                copies[inner] = graph.node_copy(inner, lambda n: copies[n])
        graph.output(copies[node])
        self._graph.erase_node(node)
        return Reading(graph, value)

    def function(self, call: Callable[..., Any], cls: type, *args: Any) -> Any:
        """Record `cls.apply(*args)` of an autograd Function."""
        if not self.recording():
            return call(*args)
        for value in args:
            if isinstance(value, nn.Module) or (callable(value) and not isinstance(value, Tensor)):
                raise self._refused(f"gives {cls.__name__}.apply a function")

        def applied(_cls: type, *given: Any) -> Any:
            return call(*given)

        with self._pause():
            return self._call("call_function", apply_function, applied, (cls, *args), {})

    # ------------------------------------------------------------------ values

    def _argument(self, value: Any) -> Any:
        """Return what a value is in the graph."""
        if isinstance(value, Tensor):
            return self._node(value)
        kind = type(value)
        if kind is list:
            return [self._argument(x) for x in value]
        if kind is tuple or kind is torch.Size:
            return tuple(self._argument(x) for x in value)
        if kind is dict:
            return {key: self._argument(x) for key, x in value.items()}
        if kind is slice:
            return slice(*(self._argument(x) for x in (value.start, value.stop, value.step)))
        return value if kind in LITERALS else self._extra(value)

    def _node(self, tensor: Tensor) -> fx.Node:
        path = self._own.get(id(tensor))
        if path is not None:
            return self._attribute(path, tensor)
        node = self._nodes.get(tensor)
        if node is None:
            raise self._refused("uses a tensor that no call of torch has made")
        if tensor._backward_hooks:
            raise self._refused("sets hooks on gradients")
        return node  # type: ignore[no-any-return]

    def _attribute(self, path: str, tensor: Tensor) -> fx.Node:
        node = self._graph.get_attr(path)
        self._values[node] = Value(MODEL, tensor.requires_grad)
        return node

    def _extra(self, value: Any) -> fx.Node:
        """Return a node for a value that code cannot spell."""
        if isinstance(value, (nn.Module, torch.Generator)) or tensors_in(vars_of(value)):
            raise self._refused(f"gives a call of torch a value of type {type(value).__name__}")
        name = next((name for name, extra in self._extras.items() if extra is value), None)
        if name is None:
            name = f"_extra_{len(self._extras)}"
            self._extras[name] = value
        node = self._graph.get_attr(name)
        self._values[node] = Value()
        return node

    def _note(
        self, node: fx.Node, result: Any, source: int = FIXED, modes: Modes | None = None
    ) -> None:
        """Remember the node of a value; make nodes for its parts."""
        tensors = tensors_in(result)
        for tensor in self._writing:
            if (storage := storage_of(tensor)) is not None:
                self._written[storage.cdata] = node
        self._writing = []
        self._values[node] = known = Value(
            source,
            any(t.requires_grad for t in tensors),
            sum(
                {
                    s.cdata: t.untyped_storage().nbytes() for t in tensors if (s := storage_of(t))
                }.values()
            ),
            modes=modes,
        )
        if isinstance(result, Tensor):
            known.storage = storage = storage_of(result)
            if storage is not None and storage.cdata not in self._storages:
                known.is_new = True
                self._storages[storage.cdata] = storage  # or its address might be used again
            if id(result) not in self._own:
                self._nodes[result] = node
            return
        known.in_parts = bool(tensors)
        for key, part in items(result):
            if tensors_in(part):
                fetch = getattr if isinstance(key, str) and not isinstance(result, dict) else None
                item = self._graph.call_function(fetch or operator.getitem, (node, key))
                self._note(item, part, source, modes)

    def _source(self, tensor: Tensor) -> int:
        if id(tensor) in self._own:
            return MODEL
        node = self._nodes.get(tensor)
        known = self._values.get(node) if node is not None else None
        if known is None:
            return MODEL
        return known.source | (self._mutations.source(storage_of(tensor)) or FIXED)

    # ------------------------------------------------------------ surroundings

    def recording(self) -> bool:
        """Return whether this thread records, and is not paused."""
        return not self._paused and threading.get_ident() == self._thread

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused += 1
        try:
            if torch._C._is_torch_function_mode_enabled():
                with _pop_mode_temporarily():
                    yield
            else:
                yield
        finally:
            self._paused -= 1

    def _refused(self, cause: str) -> UnrecordableError:
        return UnrecordableError(self._frames[-1].path, cause)

    def _check_generators(self) -> None:
        """Refuse draws from Python's and NumPy's generators since the last look."""
        with self._pause():
            now = self._generators.capture()
        if now[1:] != self._states[1:]:  # the first is torch's
            self._states = now
            raise self._refused("draws from Python's or NumPy's random numbers")

    def _modes(self) -> Modes | None:
        """Return the modes that a call runs in, None if they are those around the model."""
        settings = backends_settings()
        if settings != self._frames[0].settings:
            for outer, inner in zip(self._frames, [*self._frames[1:], None], strict=True):
                if (inner.settings if inner else settings) != outer.settings:
                    raise UnrecordableError(outer.path, "changes settings of torch's backends")
        graded = torch.is_grad_enabled()
        if graded and not self._autocasts:
            return None
        return Modes(graded, tuple(self._autocasts))

    def read(self, module: nn.Module, name: str, value: Any) -> None:
        """Take note of an attribute that is read."""
        if name.startswith("__") or name in INTERNAL or not self.recording():
            return
        path = self._paths.get(module)
        if path is None:
            return
        if isinstance(value, Tensor):
            if id(value) not in self._own:
                return  # made by forward
            self._own[id(value)] = f"{path}.{name}" if path else name
        with self._pause():
            self._attributes.saw(path, module, name, value)

    def autocast_left(self) -> None:
        """Take note that the innermost autocast has ended."""
        if self._autocasts:
            self._autocasts.pop()

    def autocast_entered(self, context: Any) -> None:
        """Take note of an autocast and its settings."""
        self._autocasts_made += 1
        arguments = {
            "device_type": context.device,
            "dtype": context.fast_dtype,
            "enabled": context._enabled,
            "cache_enabled": context._cache_enabled,
        }
        self._autocasts.append((self._autocasts_made, arguments))


# ------------------------------------------------------- what graphs call


# ---------------------------------------------------------------------- helpers


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
