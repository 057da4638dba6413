"""The graph of a model, recorded while its `forward` runs on the sample.

`torch.export` traces with fake tensors; libraries ask whether they are exported
and then run other code: transformers builds masks and repeats key-value heads
that plain training leaves to the kernel, whose gradients are rounded
differently.  Here `forward` runs as in training, on the sample itself, and
every call of torch is recorded with its arguments: the graph is that of plain
training.  It holds for the sample's shapes and the present mode.  Values of
tensors that `forward` reads, for a branch say, are compared on every run.

Tensors saved for gradients are dropped at once: recording takes no more memory
than a forward pass without gradients.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError, StateError
from .exploring import fresh_copy, parameters_of, tensors_of, untouched
from .replay import Autocast, autocast, device_types
from .tracing import Given, Structure, Traced, arguments

_LITERALS = (
    *(bool, int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Their results follow from shapes, types and places, for which alone the graph holds.
_QUERIES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("is_contiguous", "element_size", "get_device", "is_floating_point", "is_complex", "type"),
    *("is_signed", "is_same_size", "result_type", "__hash__", "is_inference", "is_pinned"),
}
# They change the graph of gradients, or lead to values that no call of torch makes.
_REFUSED = {
    *("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    *("requires_grad_", "numpy", "__array__", "data_ptr", "untyped_storage", "storage"),
    *("__set__", "__delete__", "set_", "__dlpack__"),
}

_APPLYING = threading.Lock()  # while `Function.apply` is another


class _RefusedError(Exception):
    """The model does what cannot be recorded."""


def by_recording(model: nn.Module, sample: Any) -> Traced:
    """Record a run of the model on the sample, for its shapes and the present mode.

    It runs twice: what depends on Python's or NumPy's random numbers, or on
    counters of its own, may differ.

    Raises ArgumentError.
    """
    # Not put back in between, or both would draw the same.
    with untouched([model], sample):
        first, again = _recorded(model, sample), _recorded(model, sample)
    if _identity(first) != _identity(again):
        raise ArgumentError(
            "recording: forward did something else when it ran again on the same input"
        )
    return first


def _identity(traced: Traced) -> object:
    """Return what tells two recordings apart."""
    code = traced.graph.python_code("self").src
    return code, [id(x) if isinstance(x, Tensor) else repr(x) for x in traced.extras.values()]


def _recorded(model: nn.Module, sample: Any) -> Traced:
    leaves, spec = pytree.tree_flatten(arguments(sample))
    recorder = _Recorder(model, leaves)
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(_drop, _never),
        ):
            # With gradients, so that Functions are found; no leaves, which must not be written to.
            copies = [
                x.clone() if isinstance(x, Tensor) else x for x in fresh_copy(leaves, wants=True)
            ]
            recorder.begin(copies)
            positional, named = pytree.tree_unflatten(copies, spec)
            with _with_functions(recorder), recorder:
                result = model(*positional, **named)
        return recorder.finish(result, Given(sample))
    except Exception as error:  # whatever the model's code raises
        raise ArgumentError(f"recording: {type(error).__name__}: {error}") from error


def _drop(_tensor: Tensor) -> None:
    return None


def _never(_packed: object) -> Tensor:
    raise _RefusedError("forward differentiates what it computes")


@contextmanager
def _with_functions(recorder: _Recorder) -> Iterator[None]:
    """Let a recorder see autograd Functions, which pass by every mode."""
    plain = vars(torch.autograd.Function)["apply"]
    thread = threading.get_ident()

    def apply(cls: Any, *given: Any, **named: Any) -> Any:
        if threading.get_ident() != thread or recorder.busy:
            return plain.__get__(None, cls)(*given, **named)
        with torch._C.DisableTorchFunction():
            return recorder.call(apply_function, (cls, *given), named)

    with _APPLYING:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = plain  # type: ignore[method-assign]


def apply_function(function: type[torch.autograd.Function], *given: Any, **named: Any) -> Any:
    """Apply an autograd Function."""
    return function.apply(*given, **named)


class _Recorder(TorchFunctionMode):
    """Records every call of torch as a node of a graph."""

    def __init__(self, model: nn.Module, leaves: list[Any]) -> None:
        super().__init__()
        self._paths = _paths(model)
        self._types = device_types([*tensors_of(leaves), *parameters_of([model])])
        self._ambient = _Modes.now(self._types)
        self._nodes: Any = WeakTensorKeyDictionary()
        self._applied: dict[int, Any] = {}  # nodes of autograd that Functions were seen to make
        self.busy = True  # outside of forward, or inside a call
        self._graph = fx.Graph()
        self._traced = Traced(self._graph, model.training, set(), set())

    def begin(self, leaves: list[Any]) -> None:
        """Make placeholders of the input's leaves."""
        for number, leaf in enumerate(leaves):
            self._note(self._graph.placeholder(f"given_{number}"), leaf)
        self.busy = False

    def finish(self, result: Any, given: Given) -> Traced:
        """Return the graph of all calls, whose output is what forward returned."""
        self.busy = True
        leaves, spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_LITERALS)):
                raise _RefusedError(f"forward returns a value of type {type(leaf).__name__}")
        self._graph.output(tuple(self._argument(leaf) for leaf in leaves))
        self._traced.given, self._traced.result = given, Structure(spec)
        return self._traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, and record it."""
        name = getattr(func, "__name__", "")
        if name in _REFUSED:
            raise _RefusedError(f"forward calls {_said(func)}")
        modes = _Modes.now(self._types)
        given = [self._argument(x) for x in args]
        named = {key: self._argument(value) for key, value in kwargs.items()}
        self.busy = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.busy = False
        outputs = pytree.tree_leaves(result)
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        if not tensors and (
            name in _QUERIES or name == "__get__" or not tensors_of((args, kwargs))
        ):
            return result  # a change of the grad mode comes here too
        if not all(isinstance(x, (Tensor, *_LITERALS)) for x in outputs):
            raise _RefusedError(f"forward calls {_said(func)}, for a {type(result).__name__}")
        kind, target = "call_function", func
        if name == "__get__":
            target, given = getattr, [given[0], func.__self__.__name__]
        elif not tensors and result is not None:  # may decide what forward does
            target, given = same_value, [self._extra(func), self._extra(result), *given]
        elif _is_method(func):
            kind, target = "call_method", name
        if modes != self._ambient:
            inner = func if kind == "call_method" else target
            given = [self._extra(modes), self._extra(inner), *given]
            kind, target = "call_function", in_modes
        node = self._graph.create_node(kind, target, tuple(given), named)
        self._note(node, result, modes.graded)
        return result

    def _note(self, node: fx.Node, value: Any, graded: bool = True) -> None:
        """Remember the node of a value; make nodes for its parts."""
        self._traced.note(node, value)
        if not graded:
            self._traced.floats.discard(node)
        if isinstance(value, Tensor):
            if _is_function(value.grad_fn):
                self._applied[id(value.grad_fn)] = value.grad_fn
            if id(value) not in self._paths:  # a buffer written to is still fetched by its name
                self._nodes[value] = node
        elif isinstance(value, (tuple, list)):
            for number, part in enumerate(value):
                if tensors_of(part):
                    item = self._graph.call_function(operator.getitem, (node, number))
                    self._note(item, part, graded)

    def _argument(self, value: Any) -> Any:
        """Return what a value is in the graph."""
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, list):
            return [self._argument(x) for x in value]
        if isinstance(value, tuple):
            return tuple(self._argument(x) for x in value)
        if isinstance(value, dict):
            return {key: self._argument(x) for key, x in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(x) for x in (value.start, value.stop, value.step)))
        return value if isinstance(value, _LITERALS) else self._extra(value)

    def _node(self, tensor: Tensor) -> fx.Node:
        _require_plain(tensor)
        if _is_function(tensor.grad_fn) and id(tensor.grad_fn) not in self._applied:
            raise _RefusedError(f"forward applies a Function ({type(tensor.grad_fn).__name__})")
        node: fx.Node | None = self._nodes.get(tensor)
        if node is None:
            path = self._paths.get(id(tensor))
            if path is None and tensor.grad_fn is not None:
                raise _RefusedError("forward uses a tensor that no call of torch has made")
            node = self._extra(tensor) if path is None else self._graph.get_attr(path)
            self._nodes[tensor] = node
            self._traced.note(node, tensor)
        return node

    def _extra(self, value: Any) -> fx.Node:
        """Return a node for a value that code cannot spell."""
        extras = self._traced.extras
        name = next((name for name, extra in extras.items() if extra is value), None)
        if name is None:
            name = f"extra_{len(extras)}"
            extras[name] = value
        return self._graph.get_attr(name)


def _paths(model: nn.Module) -> dict[int, str]:
    """Return where the model keeps tensors, by their identity."""
    found: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for space in (vars(module), module._buffers, module._parameters):
            for name, value in space.items():
                if isinstance(value, Tensor):
                    found[id(value)] = f"{prefix}.{name}" if prefix else name
    return found


def _require_plain(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise _RefusedError(f"forward uses a tensor of type {type(tensor).__name__}")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _RefusedError("forward uses transforms of torch.func")
    if tensor._backward_hooks and tensor.grad_fn is not None:
        raise _RefusedError("forward sets hooks on gradients")


def _is_function(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _is_method(func: Any) -> bool:
    method = getattr(torch.Tensor, getattr(func, "__name__", ""), None)
    return method is not None and inspect.unwrap(method) is inspect.unwrap(func)


def _said(func: Any) -> str:
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return f"Tensor.{func.__self__.__name__}.{func.__name__}"
    return f"Tensor.{func.__name__}" if _is_method(func) else str(func.__name__)


@dataclass(frozen=True, slots=True)
class _Modes:
    """The modes that a call of torch runs in."""

    graded: bool
    autocast: tuple[Autocast, ...]

    @classmethod
    def now(cls, device_types: list[str]) -> _Modes:
        return cls(torch.is_grad_enabled(), Autocast.capture(device_types))


def in_modes(modes: _Modes, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function in the modes it was recorded in, other than those around the model."""
    graded = modes.graded and torch.is_grad_enabled()
    with torch.set_grad_enabled(graded), autocast(modes.autocast):
        return function(*given, **named)


def same_value(function: Callable[..., Any], expected: Any, *given: Any, **named: Any) -> Any:
    """Read a value of a tensor.

    Raises
    ------
    StateError
        If it is another than was read when the model was recorded.
    """
    value = function(*given, **named)
    if value != expected and repr(value) != repr(expected):
        raise StateError(
            f"forward reads a value of a tensor ({_said(function)}), which was {expected!r} when "
            f"to_chain recorded the model and is {value!r} now; what forward does may depend on "
            "it: call to_chain with a sample of this input, or write the model as a list of stages"
        )
    return value
