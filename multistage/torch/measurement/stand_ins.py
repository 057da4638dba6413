"""Stages run and differentiated without a trace: what a profile must not leave behind.

Parameters have stand-ins, so that no `.grad` is written and no hook on a
gradient fires; backward hooks of modules, and hooks that stages set on their
tensors, are silent.  Forward hooks run: they may be part of the computation.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.utils.hooks import RemovableHandle

from ..environment.places import Held, Place, replacing
from ..environment.scope import Scope

_silent: dict[int, int] = {}  # threads whose tensors take no hooks, with the depth of nesting
_silencing = threading.Lock()


@contextlib.contextmanager
def standing_in(scope: Scope) -> Iterator[list[Tensor]]:
    """Put stand-ins in the place of all that requires gradients; yield them.

    They share the parameters' memory.
    """
    stand_ins = {
        id(p): nn.Parameter(p.detach()) if type(p) is nn.Parameter else _detached(p)
        for p in scope.parameters()
        if p.requires_grad and p.is_leaf
    }
    put: list[tuple[Place, Held]] = []
    try:
        for place in scope.look().places:
            if any(id(value) in stand_ins for value in place.values()):
                put.append((place, place.read()))
                other = replacing(place.read(), lambda value: stand_ins.get(id(value), value))
                place.put_back(other)
        yield list(stand_ins.values())
    finally:
        for place, held in reversed(put):
            place.put_back(held)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


@contextlib.contextmanager
def hooks_silent(modules: Iterable[nn.Module], *, on_tensors: bool = True) -> Iterator[None]:
    """Run without the backward hooks of some modules, and without hooks set on tensors.

    The latter only if `on_tensors`: they may be part of what `forward` computes.
    """
    modules = list(modules)
    own = {id(module) for module in modules}
    tables: list[dict[Any, Any]] = [
        table for m in modules for table in (m._backward_hooks, m._backward_pre_hooks)
    ]
    tables += [modules_of_torch._global_backward_hooks, modules_of_torch._global_backward_pre_hooks]
    before = [(table, dict(table)) for table in tables if table]
    for table, hooks in before:
        for key, hook in hooks.items():
            table[key] = _but_of(own, hook)
    try:
        with _no_hooks_on_tensors() if on_tensors else contextlib.nullcontext():
            yield
    finally:
        for table, hooks in before:
            for key, hook in hooks.items():
                if key in table:
                    table[key] = hook


def _but_of(modules: set[int], hook: Callable[..., Any]) -> Callable[..., Any]:
    def called(module: nn.Module, *given: Any) -> Any:
        return None if id(module) in modules else hook(module, *given)

    return called


@contextlib.contextmanager
def _no_hooks_on_tensors() -> Iterator[None]:
    """Ignore hooks that this thread sets on tensors."""
    thread = threading.get_ident()
    with _silencing:
        if not _silent:
            torch.Tensor.register_hook = _register_hook  # type: ignore[method-assign]
        _silent[thread] = _silent.get(thread, 0) + 1
    try:
        yield
    finally:
        with _silencing:
            _silent[thread] -= 1
            if not _silent[thread]:
                del _silent[thread]
            if not _silent:
                torch.Tensor.register_hook = _plain_register_hook  # type: ignore[method-assign]


_plain_register_hook = torch.Tensor.register_hook


def _register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    if threading.get_ident() in _silent:
        return RemovableHandle(OrderedDict())
    return _plain_register_hook(tensor, hook)
