"""What a model's `forward` reads and leaves behind in Python, besides tensors.

A graph holds the calls of torch alone.  Attributes that `forward` reads are
constants in it, so they are compared before it is used again; attributes that
`forward` changes, and numbers drawn from Python's or NumPy's generators, cannot
be in it, so they are looked for when it is recorded.
"""

from __future__ import annotations

import copy
import enum
import random
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
_OPAQUE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, type)
# Of every module; forward reads them through its children, parameters and buffers.
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_DEPTH = 3
_MISSING = object()


def fingerprint(value: object, depth: int = _DEPTH) -> object:
    """Return a value that differs after plain contents changed, at some depth."""
    if isinstance(value, (*_PLAIN, enum.Enum)):
        return type(value), value
    if isinstance(value, Tensor) or depth == 0:
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), *(fingerprint(x, depth - 1) for x in value)
    if isinstance(value, dict):
        return type(value), *((k, fingerprint(x, depth - 1)) for k, x in value.items())
    state = _state_of_generator(value)
    if state is not None:
        return state
    if not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
        inner = vars(value)
        return id(value), *((k, fingerprint(x, depth - 1)) for k, x in inner.items())
    return id(value)


def _state_of_generator(value: object) -> object:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, numpy.random.RandomState):
            return repr(value.get_state())
        if isinstance(value, numpy.ndarray):
            return id(value), value.tobytes() if value.nbytes < 4096 else value.shape
        if isinstance(value, numpy.generic):
            return type(value), value.item()
    return None


def has_hooks(module: nn.Module) -> bool:
    """Whether a module's call does more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def backends_settings() -> tuple[object, ...]:
    """Return settings of torch that calls depend on, and graphs do not hold."""
    backends = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
    )


class Attributes:
    """Attributes that were read, with what they held, and tensors of the model with their kinds."""

    def __init__(self) -> None:
        self._seen: list[tuple[nn.Module, str, str, object]] = []  # module, its path, name, value
        self._tensors: list[tuple[nn.Module, str, str, object]] = []
        self._known: set[tuple[int, str]] = set()
        self._whole: set[int] = set()  # objects with a fingerprint, wherever they are read

    def saw(self, path: str, module: nn.Module, name: str, value: object) -> None:
        """Remember an attribute that `forward` reads for the first time."""
        if (id(module), name) in self._known:
            return
        self._known.add((id(module), name))
        if isinstance(value, Tensor):
            self._tensors.append((module, path, name, _kind(value)))
        elif isinstance(value, _PLAIN):
            self._seen.append((module, path, name, value))
        elif not isinstance(value, _OPAQUE) and id(value) not in self._whole:
            self._whole.add(id(value))
            self._seen.append((module, path, name, _Whole(value)))

    def differences(self) -> Iterator[tuple[str, str, str]]:
        """Yield path, name and description of attributes that hold something else now."""
        for module, path, name, known in self._seen:
            value = vars(module).get(name, _MISSING)
            if value is known:
                continue
            if value is _MISSING:
                value = getattr(module, name, _MISSING)
            if isinstance(known, _Whole):
                if known.differs_from(value):
                    yield path, name, f"attribute {_joined(path, name)!r} holds something else"
            elif type(value) is not type(known) or value != known:
                said = f"attribute {_joined(path, name)!r} is {value!r} and was {known!r}"
                yield path, name, said
        for module, path, name, known in self._tensors:
            value = getattr(module, name, None)
            if not isinstance(value, Tensor) or _kind(value) != known:
                said = "is of another shape, dtype or device, or requires_grad was changed"
                yield path, name, f"{_joined(path, name)!r} {said}"

    def forget_identities(self) -> None:
        """Release what is of use while recording only."""
        self._known, self._whole = set(), set()


def _kind(tensor: Tensor) -> object:
    return tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad


class _Whole:
    """The fingerprint of an object."""

    __slots__ = ("known",)

    def __init__(self, value: object) -> None:
        self.known = fingerprint(value)

    def differs_from(self, value: object) -> bool:
        """Whether an object's contents are others now."""
        now = fingerprint(value)
        if self.known is _MISSING:  # in a copy, whose objects have identities of their own
            self.known = now
        return now != self.known

    def __reduce__(self) -> tuple[Callable[[], _Whole], tuple[()]]:
        return _unknown, ()


def _unknown() -> _Whole:
    whole = _Whole(None)
    whole.known = _MISSING
    return whole


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Snapshot:
    """The attributes of all modules of a model; of containers their elements too."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (path, module, dict(vars(module)), [dict(s) for s in _spaces(module)])
            for path, module in model.named_modules()
        ]
        self._contents = {
            id(value): (value, copy.copy(value))
            for _, _, attributes, _ in self._modules
            for name, value in attributes.items()
            if name not in INTERNAL and type(value) in (list, dict, set)
        }
        self._objects = {
            id(value): (value, dict(vars(value)))
            for _, _, attributes, _ in self._modules
            for name, value in attributes.items()
            if name not in INTERNAL
            and not isinstance(value, (Tensor, *_PLAIN, *_OPAQUE))
            and hasattr(value, "__dict__")
        }

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield path and name of each attribute, parameter or buffer that was set since."""
        for path, module, attributes, spaces in self._modules:
            now = vars(module)
            for name in attributes.keys() | now.keys():
                if name not in INTERNAL and not _same(
                    attributes.get(name, _MISSING), now.get(name, _MISSING)
                ):
                    yield path, name
            for before, after in zip(spaces, _spaces(module), strict=True):
                for name in before.keys() | after.keys():
                    if before.get(name, _MISSING) is not after.get(name, _MISSING):
                        yield path, name
            for name, value in attributes.items():
                if id(value) in self._contents and not _same_elements(*self._contents[id(value)]):
                    yield path, name
                elif id(value) in self._objects:
                    kept = self._objects[id(value)][1]
                    inner = vars(value)
                    if kept.keys() != inner.keys() or not all(
                        _same(kept[k], inner[k]) for k in kept
                    ):
                        yield path, name


def _spaces(module: nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers, module._modules]


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b)


def _same_elements(value: Any, kept: Any) -> bool:
    if len(value) != len(kept):
        return False
    if isinstance(value, set):
        return bool(value == kept)
    if isinstance(value, dict):
        return all(k in kept and _same(v, kept[k]) for k, v in value.items())
    return all(_same(a, b) for a, b in zip(value, kept, strict=True))
