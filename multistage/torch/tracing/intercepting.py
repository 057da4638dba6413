"""What the recorder sees besides calls of torch, which torch reports to no mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .recorder import Recorder

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
