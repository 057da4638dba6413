"""What a model is called with and returns, as lists of leaves."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import ArgumentError


def arguments(sample: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the positional and keyword arguments that a sample stands for.

    A tuple holds positional arguments, a mapping (a dict, or what tokenizers return)
    keyword arguments; anything else is the only argument.
    """
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def sample_of(args: tuple[object, ...], kwargs: dict[str, object], model: nn.Module) -> object:
    """Return what stands for the arguments of a call; see `arguments`."""
    if not kwargs:
        if len(args) != 1:
            return args
        return dict(args[0]) if isinstance(args[0], Mapping) else args[0]
    if not args:
        return kwargs
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named: dict[str, object] = {}
    for name, value in bound.arguments.items():
        match bound.signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.POSITIONAL_ONLY:
                raise ArgumentError(
                    f"{type(model).__name__} takes {name!r} by position only; give a traced chain "
                    "either positional or keyword arguments, not both"
                )
            case inspect.Parameter.VAR_KEYWORD:
                named |= value
            case _:
                named[name] = value
    return named


class Structure:
    """A pytree's structure that can be copied and pickled, as its specification cannot.

    Parameters
    ----------
    spec : pytree.TreeSpec
    """

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._numbered = pytree.tree_unflatten(range(spec.num_leaves), spec)

    def spec(self) -> pytree.TreeSpec:
        """Return the specification."""
        return pytree.tree_structure(self._numbered)

    def __call__(self, leaves: list[object]) -> object:
        """Return the pytree of some leaves."""
        return pytree.tree_unflatten(leaves, self.spec())


class Given:
    """Flattens what a model is called with, if it is like the sample it was traced on.

    Parameters
    ----------
    model : nn.Module
        For the signature of its `forward`: however arguments are passed, the
        leaves come in one order.
    sample : pytree
    """

    def __init__(self, model: nn.Module, sample: object) -> None:
        self._signature = inspect.signature(model.forward)
        leaves, spec = self._flat(sample)
        self._structure = Structure(spec)
        self._kinds = [_kind(leaf) for leaf in leaves]

    def _flat(self, state: object) -> tuple[list[object], pytree.TreeSpec]:
        positional, named = arguments(state)
        bound = self._signature.bind(*positional, **named)
        return pytree.tree_flatten((list(bound.args), dict(sorted(bound.kwargs.items()))))

    def __call__(self, state: object) -> list[object]:
        """Return the leaves.  Raises ArgumentError for another kind of input."""
        leaves, spec = self._flat(state)
        kinds = [_kind(leaf) for leaf in leaves]
        if kinds != self._kinds or spec != self._structure.spec():
            raise ArgumentError(
                f"the model was traced for inputs {_said(self._kinds)} and is called with "
                f"{_said(kinds)}; call to_chain again with a sample of these, or let Sequential "
                "do it"
            )
        return leaves

    def call(self, leaves: list[object]) -> tuple[list[object], dict[str, object]]:
        """Return the positional and keyword arguments of some leaves."""
        positional, named = pytree.tree_unflatten(leaves, self._structure.spec())
        return positional, named


def _kind(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.device
    return type(leaf), leaf


def _said(kinds: list[Any]) -> str:
    return "[" + ", ".join(_said_of(kind) for kind in kinds) + "]"


def _said_of(kind: tuple[Any, ...]) -> str:
    if len(kind) == 3:
        dtype, shape, device = kind
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    return repr(kind[1])


def aliases(leaves: list[object]) -> tuple[int, ...]:
    """Return for each leaf the place of the first that is the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else place
        for place, leaf in enumerate(leaves)
    )


def layouts(leaves: list[object]) -> tuple[object, ...]:
    """Return what a graph may depend on of tensors besides their kinds."""
    return tuple(
        (leaf.requires_grad, leaf.stride() if leaf.layout == torch.strided else leaf.layout)
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )
