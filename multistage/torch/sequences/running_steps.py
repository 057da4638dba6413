"""Time steps run one after the other, and hooks that see a whole gradient once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..environment.turns import TURN
from .cell import Cell, Facts


def run_steps(
    cell: Cell,
    facts: Facts,
    state: object,
    steps: tuple[int, int],
    x: Callable[..., object],
    take: Callable[[tuple[int, list[Tensor]]], None],
) -> list[Tensor]:
    """Run time steps; hand t and the leaves of y of each to `take`; return the state's leaves."""
    call, name = cell.call, cell.name
    start, stop = steps
    if cell.fused:
        state, y = facts.split(call(state, x(start, stop)), name, start)
        if facts.y_spec is not None:
            take((start, facts.y_leaves(y, name, start)))
    elif not facts.returns_y:
        for t in range(start, stop):
            state = call(state, x(t))
    else:
        for t in range(start, stop):
            state, y = facts.split(call(state, x(t)), name, t)
            if facts.y_spec is not None:
                take((t, facts.y_leaves(y, name, t)))
    return facts.leaves(state, name, stop - 1)


@contextlib.contextmanager
def without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep the users' hooks from seeing the gradient of a part: they see the whole, once.

    So does `.grad` of a tensor that is no leaf and retains its gradient.
    """
    aside = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    retained = [(p, p.grad) for p in parameters if p.retains_grad]
    for hooks, _ in aside:
        hooks.clear()
    for parameter, _ in retained:
        parameter.grad = None
    try:
        yield
    finally:
        for hooks, kept in aside:
            hooks.update(kept)
        for parameter, gradient in retained:
            parameter.grad = gradient


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Run steps to look at them: in this thread's turn, and unseen by hooks on saved tensors.

    Buffers and generators are put back, which other threads must not use meanwhile.
    """
    with unseen(), TURN.taken():
        yield


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Run steps whose graph is no part of the computation unseen by hooks on saved tensors.

    A checkpoint or a chain around would count the tensors that are saved, which are others when
    it runs again.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
