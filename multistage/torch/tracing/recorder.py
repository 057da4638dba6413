"""`Recorder`: makes a node of every call of torch while a model's `forward` runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import Target
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..environment.scope import Scope
from ..measurement.exploring import untouched
from ..measurement.saved import Saved
from .called import apply_function, never
from .calling import Given, Structure
from .frames import Frames
from .nodes import Nodes
from .readings import Readings
from .recorded import FIXED, RANDOM, Recorded, UnrecordableError
from .storages import copies_of
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
from .watching import INTERNAL, Attributes, Snapshot
from .whole_modules import WholeModules

_PATCHING = threading.RLock()


@contextlib.contextmanager
def intercepted(recorder: Recorder) -> Iterator[None]:
    """See calls of modules, reads of attributes, autograd Functions and autocast."""
    base, cast = nn.Module, torch.autocast
    plain_call = base.__call__
    plain_getattr = base.__getattr__
    plain_apply = torch.autograd.Function.__dict__["apply"]
    plain_enter, plain_exit = cast.__enter__, cast.__exit__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call(plain_call, module, *args, **kwargs)

    def getattribute(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        recorder.read(module, name, value)
        return value

    def getattr_(module: nn.Module, name: str) -> Any:
        value = plain_getattr(module, name)
        recorder.read(module, name, value)
        return value

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = plain_apply.__get__(None, cls)
        if kwargs or not recorder.recording():
            return bound(*args, **kwargs)
        return recorder.function(bound, cls, *args)

    def enter(context: Any) -> Any:
        result = plain_enter(context)
        if recorder.recording():
            recorder.autocast_entered(context)
        return result

    def leave(context: Any, *error: Any) -> Any:
        if recorder.recording():
            recorder.autocast_left()
        return plain_exit(context, *error)

    with _PATCHING:
        base.__call__ = call  # type: ignore[method-assign]
        base.__getattribute__ = getattribute  # type: ignore[method-assign, assignment]
        base.__getattr__ = getattr_  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        cast.__enter__, cast.__exit__ = enter, leave  # type: ignore[method-assign]
        try:
            yield
        finally:
            base.__call__ = plain_call  # type: ignore[method-assign]
            del base.__getattribute__
            base.__getattr__ = plain_getattr  # type: ignore[method-assign]
            torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]
            cast.__enter__, cast.__exit__ = plain_enter, plain_exit  # type: ignore[method-assign]


class Recorder(TorchFunctionMode):
    """Records every call of torch as a node of a graph."""

    def __init__(self, model: nn.Module, closed: dict[str, str], kinds: set[type]) -> None:
        super().__init__()
        self._model, self._closed = model, closed
        self._paths = {module: path for path, module in model.named_modules()}
        self._frames = Frames()
        self._nodes = Nodes(model, self._frames)
        self._whole = WholeModules(self._nodes, self._frames, list(self._paths), closed, kinds)
        self._readings = Readings(self._nodes, self._frames)
        self._attributes = Attributes()
        self._opened: dict[str, None] = {}

    # ------------------------------------------------------------------ a run

    def run(self, sample: object) -> Recorded:
        """Run the model's forward on copies of a sample."""
        given = Given(self._model, sample)
        leaves = given(sample)
        snapshot = Snapshot(self._model)
        with (
            torch.enable_grad(),
            untouched(Scope.of(self._model), leaves),
            Saved(None, never, never),
        ):
            copies = copies_of(leaves)
            for number, leaf in enumerate(copies):
                self._nodes.give(number, leaf)
            positional, named = given.call(copies)
            result = self._forward(positional, named)
            self._end(result, snapshot)
            leaves, spec = pytree.tree_flatten(result)
        return Recorded(
            self._nodes.graph,
            self._nodes.values,
            self._nodes.made(),
            self._nodes.written,
            self._nodes.extras,
            given,
            Structure(spec),
            self._readings.found,
            self._attributes,
            list(self._opened),
            dict(self._closed),
        )

    def _forward(self, positional: list[object], named: dict[str, object]) -> object:
        self._frames.enter("")
        try:
            with intercepted(self), self:
                result = self._model.forward(*positional, **named)
                self._frames.check_generators()
        except UnrecordableError:
            raise
        except Exception as error:  # whatever the model's code raises
            path = getattr(error, "_multistage_path", "")
            raise UnrecordableError(path, f"raises {_first_line(error)}") from error
        return result

    def _end(self, result: object, snapshot: Snapshot) -> None:
        """Make the output; refuse what forward has left behind."""
        leaves = pytree.tree_leaves(result)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *LITERALS)):
                raise UnrecordableError(
                    "",
                    f"returns a value of type {type(leaf).__name__}, not tensors alone "
                    "(models of transformers: use_cache=False)",
                )
        self._nodes.graph.output([self._nodes.argument(leaf) for leaf in leaves])
        for path, name in snapshot.changes():
            if any(f"{path}.".startswith(f"{whole}.") for whole in self._whole.called):
                continue  # as its call in the graph will
            raise UnrecordableError(
                path,
                f"sets its attribute {name!r} (write to a buffer in place instead; if its first "
                "call alone does so, call the model once before)",
            )
        for path, name, _ in self._attributes.differences():
            raise UnrecordableError(path, f"changes what its attribute {name!r} holds")
        self._attributes.forget_identities()

    # ------------------------------------------------------- calls of modules

    def call(
        self,
        plain: Callable[..., object],
        module: nn.Module,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Stand in for `nn.Module.__call__`."""
        path = self._paths.get(module)
        if path is None or not self.recording():
            return plain(module, *args, **kwargs)
        self._frames.check_generators()
        if self._whole.wants(module, path):
            with self._frames.pause():
                return self._whole.call(plain, module, path, args, kwargs)
        self._opened[path] = None
        self._frames.enter(path)
        try:
            result = plain(module, *args, **kwargs)
            self._frames.check_generators()
        except Exception as error:
            if not hasattr(error, "_multistage_path"):
                error._multistage_path = path  # type: ignore[attr-defined]
            raise
        finally:
            self._frames.leave()
        return result

    # ---------------------------------------------------------- calls of torch

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not self.recording():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = _name_of_property(func)
            if attribute in PROPERTIES:
                return func(*args, **kwargs)
            return self._call("call_function", getattr, func, args, {}, (args[0], attribute))
        if name in QUERIES or (name == "type" and len(args) == 1 and not kwargs):
            return func(*args, **kwargs)
        if name in REFUSED:
            raise self._frames.refused(f"calls {said(func)}")
        if is_method(func):
            return self._call("call_method", name, func, args, kwargs)
        return self._call("call_function", func, func, args, kwargs)

    def _call(
        self,
        kind: str,
        target: Target,
        func: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        given: tuple[object, ...] | None = None,
    ) -> object:
        """Call a function of torch, and record it as a node."""
        nodes, frames = self._nodes, self._frames
        frames.check_torch_generator()
        modes = frames.modes()
        positional = tuple(nodes.argument(x) for x in (args if given is None else given))
        named = {key: nodes.argument(value) for key, value in kwargs.items()}
        tensors = tensors_in((args, kwargs))
        versions = [t._version for t in tensors]
        source = FIXED
        for tensor in tensors:
            source |= nodes.source(tensor)
        in_place = isinstance(target, str) and target.endswith("_") and not target.endswith("__")
        if in_place and isinstance(args[0], nn.Parameter):
            raise nodes.writes_to(args[0])
        result = func(*args, **kwargs)
        if frames.drew(tensors):
            source |= RANDOM
        nodes.wrote([t for t, v in zip(tensors, versions, strict=True) if t._version != v], source)
        leaves = pytree.tree_leaves(result)
        if not any(isinstance(x, Tensor) for x in leaves):
            if result is None:
                node = nodes.graph.create_node(kind, target, positional, named)
                nodes.note(node, None, source, modes)
                return None
            self._readings.read(kind, target, positional, named, source, result, func)
            return result
        if not all(isinstance(x, (Tensor, *LITERALS)) for x in leaves):
            raise frames.refused(f"calls {said(func)}, for a value of type {type(result).__name__}")
        node = nodes.graph.create_node(kind, target, positional, named)
        nodes.note(node, result, source, modes)
        if source != FIXED and shaped_by_values(func, args, kwargs):
            self._readings.read_shapes(node, result, source, func)
        return result

    def function(self, call: Callable[..., object], cls: type, *args: object) -> object:
        """Record `cls.apply(*args)` of an autograd Function."""
        if not self.recording():
            return call(*args)
        for value in args:
            if isinstance(value, nn.Module) or (callable(value) and not isinstance(value, Tensor)):
                raise self._frames.refused(f"gives {cls.__name__}.apply a function")

        def applied(_cls: type, *given: object) -> object:
            return call(*given)

        with self._frames.pause():
            return self._call("call_function", apply_function, applied, (cls, *args), {})

    # -------------------------------------------------- besides calls of torch

    def recording(self) -> bool:
        """Return whether this thread records, and is not paused."""
        return self._frames.recording()

    def read(self, module: nn.Module, name: str, value: object) -> None:
        """Take note of an attribute that is read."""
        if name.startswith("__") or name in INTERNAL or not self.recording():
            return
        path = self._paths.get(module)
        if path is None:
            return
        if isinstance(value, Tensor):
            where = f"{path}.{name}" if path else name
            if not self._nodes.found_at(value, where):
                return  # made by forward
        with self._frames.pause():
            self._attributes.saw(path, module, name, value)

    def autocast_left(self) -> None:
        """Take note that the innermost autocast has ended."""
        self._frames.autocast_left()

    def autocast_entered(self, context: torch.autocast) -> None:
        """Take note of an autocast and its settings."""
        self._frames.autocast_entered(context)


def _name_of_property(getter: Any) -> str:
    name: str = getter.__self__.__name__
    return name


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
