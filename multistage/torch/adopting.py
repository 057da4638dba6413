"""How a module stands in front of a model without taking names of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from torch import Tensor, nn

_T = TypeVar("_T")
_SPACES = ("_modules", "_parameters", "_buffers")
# Where `nn.Module` keeps what is registered.
_SHARED = (
    *_SPACES,
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def adopt(module: nn.Module, model: nn.Module) -> None:
    """Let a module have what a model has registered, and all that either registers from now on.

    The dictionaries are the model's own: a parameter that is replaced in one
    is replaced in the other.
    """
    for name in _SHARED:
        if name in vars(model):
            vars(module)[name] = vars(model)[name]
    vars(module)["_is_full_backward_hook"] = vars(model).get("_is_full_backward_hook")


class _Yielding:
    """A member of a class that gives way to a child, parameter or buffer of its name."""

    def __init__(self, member: Any) -> None:
        self._member = member
        self.__doc__ = member.__doc__
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._member
        for space in _SPACES:
            registered = vars(instance).get(space, {})
            if self._name in registered:
                return registered[self._name]
        return self._member.__get__(instance, owner)

    def __set__(self, instance: Any, value: object) -> None:
        raise AttributeError(f"{self._name} of a chain cannot be set; make another chain")


if TYPE_CHECKING:
    YieldingProperty = property
else:

    def YieldingProperty(getter: Callable[..., object]) -> _Yielding:  # noqa: N802
        """Return a property that gives way to a child, parameter or buffer of its name."""
        return _Yielding(property(getter))


def yielding(member: _T) -> _T:
    """Return a method that gives way to a child, parameter or buffer of its name."""
    return cast(_T, _Yielding(member))


class InFront(nn.Module):
    """A module that stands in front of a model, whose mode, attributes and state it has.

    Parameters
    ----------
    model : nn.Module
        Not a child.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        vars(self)["_multistage_front"] = model
        adopt(self, model)

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = vars(self)["_multistage_front"]
        return model

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_multistage_front" in vars(self):  # else it is being made
            self._model.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model."""
        self._model.train(mode)
        return self

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            found: Tensor | nn.Module = getattr(self._model, name)  # or what else the model has
            return found

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self._model) and name not in vars(self):
            setattr(self._model, name, value)  # such as a temperature that is annealed
        else:
            plain: Callable[..., None] = super().__setattr__  # which takes any value
            plain(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._model._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._model._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._model._load_from_state_dict(*args)
