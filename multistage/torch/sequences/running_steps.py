"""Time steps run one after the other, and hooks that see a whole gradient once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..environment.turns import TURN
from .cell import Cell, Facts
from .cell_rules import require_like


def run_steps(
    cell: Cell,
    facts: Facts,
    state: object,
    steps: tuple[int, int],
    x: Callable[..., object],
    take: Callable[[tuple[int, list[Tensor]]], None],
) -> list[Tensor]:
    """Run time steps; hand t and the leaves of y of each to `take`; return the state's leaves.

    Raises
    ------
    StateError
        If a step returns a larger state than it was given, or something of other structure:
        at that step, before the next ones run, which would exceed the memory limit.
    """
    call, name = cell.call, cell.name
    start, stop = steps
    nbytes = _bytes_of(state)
    if cell.fused:
        state, y = facts.split(call(state, x(start, stop)), name, start)
        if facts.y_spec is not None:
            take((start, facts.y_leaves(y, name, start)))
    elif not facts.returns_y:
        for t in range(start, stop):
            before, state = state, call(state, x(t))
            if _bytes_of(state) > nbytes:
                _refuse_larger(facts, name, before, state, t)
    else:
        for t in range(start, stop):
            before = state
            state, y = facts.split(call(state, x(t)), name, t)
            if _bytes_of(state) > nbytes:
                _refuse_larger(facts, name, before, state, t)
            if facts.y_spec is not None:
                take((t, facts.y_leaves(y, name, t)))
    return facts.leaves(state, name, stop - 1)


def _bytes_of(state: object) -> int:
    """Return the bytes of a tensor or a tuple of tensors; 0 for other trees, which cost time."""
    if isinstance(state, Tensor):
        return state.nbytes
    total = 0
    for leaf in state if type(state) is tuple else ():
        total += leaf.nbytes if isinstance(leaf, Tensor) else 0
    return total


def _refuse_larger(facts: Facts, name: str, before: object, state: object, t: int) -> None:
    given, leaves = facts.leaves(before, name, t - 1), facts.leaves(state, name, t)
    require_like(name, given, leaves, (t, t + 1))


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
