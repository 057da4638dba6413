"""Hooks that a cell sets on the tensors it is given, and hooks that see no parts.

Plain autograd calls a hook on a state with its whole gradient: of the steps after, and of
the outputs of the step that made it.  A chunk is given a leaf in place of that tensor, whose
gradient lacks the contributions of the chunk below.  Hooks on such a leaf are therefore
handed down: to the tensor that the chunk below has returned, and from state 0 to the
tensor of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...errors import StateError
from ..measurement.exploring import Hook, hooks_of, users


class HandedDown:
    """The hooks on the states before the chunks of one sequence."""

    def __init__(self) -> None:
        # Of the caller; None in measuring, whose hooks are not to reach it.
        self.state_0: Sequence[Tensor] | None = None
        self._waiting: dict[tuple[int, int], list[Hook]] = {}  # by chunk below, and leaf
        self._reached: set[tuple[int, bool]] = set()  # leaves of state 0 that have theirs

    def first(self, given: Sequence[Tensor], own: Iterable[int], name: str) -> None:
        """Hand those of the first chunk to state 0, in the forward sweep as plain autograd does.

        Other backward passes through that tensor may come before the one of this sequence.
        """
        for number in own:
            self._reach(number, _taken(given[number], name), handed=False)

    def enter(self, k: int, leaves: Sequence[Tensor]) -> None:
        """Set those from the chunk above on the state that chunk k has returned."""
        for number, leaf in enumerate(leaves):
            hooks = self._waiting.pop((k, number), ())
            if leaf.requires_grad:
                for hook in hooks:
                    leaf.register_hook(hook)

    def leave(self, k: int, given: Sequence[Tensor], own: Iterable[int], name: str) -> None:
        """Take the hooks on the state before chunk k, on those of its leaves that are its own."""
        for number in own:
            hooks = _taken(given[number], name)
            if not k:  # of later chunks, where the first one returns the tensor as it is
                self._reach(number, hooks, handed=True)
            elif hooks and self.state_0 is not None:
                self._waiting[k - 1, number] = hooks

    def _reach(self, number: int, hooks: Sequence[Hook], *, handed: bool) -> None:
        if not hooks or self.state_0 is None or (number, handed) in self._reached:
            return  # or it has them: the first chunk was run before
        self._reached.add((number, handed))
        for hook in hooks:
            self.state_0[number].register_hook(hook)


def refuse_hooks_on_inputs(name: str, leaves: Iterable[Tensor]) -> None:
    """Raise StateError if a cell has set hooks on leaves that stand for elements of a list."""
    if any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves):
        raise StateError(
            f"{name} sets a hook on x_t, a tensor of the list inputs, and would once more when it "
            "is run again; set it outside of the cell, or give inputs as a tensor with time first"
        )


def _taken(leaf: Tensor, name: str) -> list[Hook]:
    """Return the hooks on a leaf, and remove them.  Raises StateError for others."""
    if leaf._post_accumulate_grad_hooks:
        raise StateError(f"{name} calls register_post_accumulate_grad_hook on {_OTHERS}")
    if not leaf._backward_hooks:
        return []
    hooks: list[Hook] = [users(hook) for hook in leaf._backward_hooks.values()]
    if any(getattr(hook, "__module__", None) == torch.autograd.graph.__name__ for hook in hooks):
        raise StateError(f"{name} calls register_multi_grad_hook on {_OTHERS}")
    leaf._backward_hooks.clear()
    return hooks


_OTHERS = (
    "the state that it is given, which is a leaf with a part of its gradient where a chunk begins; "
    "call register_hook on the state, whose hooks see its whole gradient"
)


def refuse_hooks_on_nodes(name: str, given: Iterable[Tensor]) -> None:
    """Raise StateError if a cell has set hooks on the nodes that made its state."""
    for tensor in given:
        if tensor.grad_fn is not None and _has_hooks(tensor.grad_fn):
            raise StateError(
                f"{name} sets a hook on the grad_fn of the state that it is given, which has none "
                "where a chunk begins; call register_hook on the state itself"
            )


def _has_hooks(node: Node) -> bool:
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()  # of all; there is no other way to see them
        handle.remove()
        if hooks:
            return True
    return False


def hooks_on(parameters: Iterable[Tensor]) -> list[int]:
    """Return how many hooks each parameter has."""
    return [len(hooks_of(p)) + len(p._post_accumulate_grad_hooks or ()) for p in parameters]


def refuse_hooks_on_parameters(name: str, when: str) -> NoReturn:
    """Raise StateError: a cell sets hooks on its parameters."""
    raise StateError(
        f"{name} sets a hook on one of its parameters when it runs ({when}), and would once more "
        "when it is run again; set it outside of the cell"
    )
