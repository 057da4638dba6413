"""What runs of a model leave behind in it: buffers, generators, attributes; put back, compared."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.checksums import fingerprint, is_helper, same_bits
from .captured import undo_of
from .copies import put_back, version_of
from .randomness import RandomState
from .scope import Scope

_DEEPEST = 3
_LIBRARIES = {"torch", "builtins", "typing", "abc", "multistage"}
_OWN = frozenset(vars(nn.Module())) - {"training"}


def modules_of(calls: Iterable[object]) -> dict[str, nn.Module]:
    """Return the modules that callables consist of, functions' closures included, by name."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for number, call in enumerate(calls):
        for owner in _owners(call, 0):
            for path, module in owner.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    name = path if path not in found else f"{number}.{path}"
                    found[name if name not in found else f"{name} ({len(found)})"] = module
    return found


def _owners(call: object, depth: int) -> Iterator[nn.Module]:
    if isinstance(call, nn.Module):
        yield call
        return
    if depth == _DEEPEST:
        return
    inner: list[object] = []
    if isinstance(call, functools.partial):
        inner += [call.func, *call.args, *call.keywords.values()]
    elif isinstance(call, (list, tuple)):
        inner += call[:100]
    else:
        inner += [
            cell.cell_contents for cell in getattr(call, "__closure__", None) or () if _full(cell)
        ]
        inner += [getattr(call, "__self__", None), *(getattr(call, "__defaults__", None) or ())]
    for each in inner:
        yield from _owners(each, depth + 1)


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not filled yet
        return False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Buffers, attributes and generators of some modules, as they were.

    Tensors are put back by value, those that changed: code that shares them sees it.

    Attributes
    ----------
    random : RandomState
        Of the CPU and the devices.
    buffers : list
        Modules, names, buffers, and what puts back their values.
    attributes : list of callable
        What puts back the rest: the generators of Python and NumPy and those of the scope,
        what it holds, and attributes of modules and classes.
    """

    random: RandomState
    buffers: list[tuple[nn.Module, str, Tensor | None, Callable[[], None]]]
    attributes: list[Callable[[], object]]

    @classmethod
    def capture(
        cls, modules: Iterable[nn.Module], devices: Sequence[torch.device], scope: Scope
    ) -> Snapshot:
        """Return what there is now in modules, and in all that a scope finds."""
        modules = list({id(m): m for m in (*modules, *scope.modules)}.values())
        undo: list[Callable[[], object]] = [undo_of(scope, ())]
        seen: set[int] = set()
        undo += [
            functools.partial(_put_back_class, kind, _class_attributes(kind))
            for kind in _kinds_of(modules)
        ]
        for module in modules:
            kept = {key: value for key, value in vars(module).items() if key not in _OWN}
            undo.append(functools.partial(_put_back, vars(module), kept, _OWN))
            for value in kept.values():
                _remember(value, undo, seen, 1)
        return cls(
            RandomState.capture(devices),
            [(m, key, b, _undo_of_writes(b)) for m in modules for key, b in m._buffers.items()],
            undo,
        )

    def restore(self) -> None:
        """Make it so again."""
        self.random.restore()
        for undo in self.attributes:
            undo()
        for module, key, buffer, undo_writes in self.buffers:
            module._buffers[key] = buffer
            undo_writes()


def _kinds_of(modules: Iterable[nn.Module]) -> list[type]:
    """Return the users' classes of some modules."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    own = [k for k in kinds if k.__module__.partition(".")[0] not in _LIBRARIES]
    return sorted(own, key=lambda kind: (kind.__module__, kind.__qualname__))


def _class_attributes(kind: type) -> dict[str, Any]:
    """Return the plain values that a class holds."""
    return {
        key: value
        for key, value in vars(kind).items()
        if isinstance(value, (bool, int, float, list, dict, Tensor)) and not key.startswith("__")
    }


def _put_back_class(kind: type, kept: dict[str, Any]) -> None:
    now = _class_attributes(kind)
    for key, value in kept.items():
        if now.get(key, _put_back) is not value:
            setattr(kind, key, value)


def _put_back(target: dict[str, Any], kept: dict[str, Any], ours: frozenset[str]) -> None:
    for key in [key for key in target if key not in kept and key not in ours]:
        del target[key]
    for key, value in kept.items():
        if target.get(key, _put_back) is not value:
            target[key] = value


def _undo_of_writes(tensor: Tensor | None) -> Callable[[], None]:
    """Return a function that gives a tensor back the bits and the version it has now."""
    if tensor is None or tensor.device.type == "meta":
        return lambda: None
    value, version = tensor.detach().clone(), version_of(tensor)

    def undo() -> None:
        if version_of(tensor) != version or not same_bits(tensor, value):
            put_back(tensor, value, version)

    return undo


def _remember(value: Any, undo: list[Callable[[], object]], seen: set[int], depth: int) -> None:
    """Note how to put back what an attribute holds."""
    if id(value) in seen or isinstance(value, (nn.Module, nn.Parameter, type)):
        return
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))) or callable(value):
        return
    seen.add(id(value))
    match value:
        case Tensor():
            undo.append(_undo_of_writes(value))
        case torch.Generator():
            undo.append(functools.partial(value.set_state, value.get_state()))
        case random.Random():
            undo.append(functools.partial(value.setstate, value.getstate()))
        case list():
            undo.append(functools.partial(value.__setitem__, slice(None), list(value)))
        case dict():
            undo.append(functools.partial(_put_back, value, dict(value), frozenset()))
        case set():
            undo.append(functools.partial(_refill, value, set(value)))
        case _ if hasattr(value, "bit_generator"):  # NumPy's generators
            bits = value.bit_generator
            undo.append(functools.partial(setattr, bits, "state", bits.state))
        case _ if is_helper(value):
            undo.append(functools.partial(_put_back, vars(value), dict(vars(value)), frozenset()))
    if depth < _DEEPEST:
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(value, (list, tuple, set, dict)):
            for item in list(inner)[:1000]:
                _remember(item, undo, seen, depth + 1)
        elif is_helper(value):
            for item in list(vars(value).values()):
                _remember(item, undo, seen, depth + 1)


def _refill(target: set[Any], kept: set[Any]) -> None:
    target.clear()
    target.update(kept)


def left_behind(
    modules: dict[str, nn.Module], devices: Sequence[torch.device]
) -> dict[str, object]:
    """Return fingerprints of buffers, generators and attributes, by name."""
    found: dict[str, object] = {}
    for kind in _kinds_of(modules.values()):
        for key, value in _class_attributes(kind).items():
            found[f"attribute {key} of class {kind.__qualname__}"] = fingerprint(value)
    state = RandomState.capture(devices)
    found["the generator of cpu"] = fingerprint(state.cpu)
    found |= {f"the generator of {d}": fingerprint(t) for d, t in state.devices}
    found["Python's random"] = hash(random.getstate())
    if "numpy" in sys.modules:
        kept = sys.modules["numpy"].random.get_state()
        found["NumPy's random"] = (kept[1].tobytes(), *kept[2:])
    for path, module in modules.items():
        dot = f"{path}." if path else ""
        for key, buffer in module._buffers.items():
            found[f"buffer {dot}{key!s}"] = fingerprint(buffer)
        for key, value in vars(module).items():
            if key not in _OWN and not isinstance(value, nn.Parameter):
                found[f"attribute {dot}{key!s}"] = _attribute(value)
    return found


def _attribute(value: object) -> object:
    if isinstance(value, (list, tuple)) and any(isinstance(v, nn.Parameter) for v in value):
        return len(value)  # the weights of nn.LSTM, once more
    return fingerprint(value)
