"""What recorded graphs call besides torch, and hooks under which modules are recorded."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function

from ...errors import StateError
from .vocabulary import (
    tensors_in,
)


def apply_function(cls: type[Function], *args: object) -> object:
    """Apply an autograd Function."""
    return cls.apply(*args)


def same_value(value: object, expected: object, said: str) -> None:
    """Raise StateError if a value that `forward` read is another than when it was recorded."""
    if value != expected:
        raise StateError(
            f"forward reads a value of a tensor ({said}), which was {expected!r} when to_chain "
            f"recorded the model and is {value!r} now, and what it does may depend on it; make the "
            "branch a module of its own, which is called whole"
        )


def shapes_of(value: object) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a value."""
    return [tuple(t.shape) for t in tensors_in(value)]


def never(number: int) -> Tensor:
    """Raise: what is saved may not be asked for."""
    raise RuntimeError("it differentiates what it computes")


def boxed_in(boxes: list[list[Tensor]]) -> Callable[[Tensor], list[Tensor]]:
    """Return a hook that puts each saved tensor into a box of its own, in order."""

    def pack(tensor: Tensor) -> list[Tensor]:
        boxes.append([tensor])
        return boxes[-1]

    return pack


def unboxed(box: list[Tensor]) -> Tensor:
    """Return the tensor in a box."""
    return box[0]


def cut_off(value: object) -> object:
    """Return a tensor without its graph, which requires a gradient all the same."""
    if not isinstance(value, Tensor) or not value.requires_grad or value.is_leaf:
        return value
    return value.detach().requires_grad_().clone()
