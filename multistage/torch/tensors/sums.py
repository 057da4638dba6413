"""Gradients, and those of parameters added up over the chunks of a sequence.

Plain autograd adds the contributions to a parameter's gradient one after the other, last
step first.  Here each chunk has a graph of its own; the sum so far enters it as the
gradient that one more root sends to the parameter.  The root is made last and therefore
served first, so that the additions happen in the same order, with the same bits.

The sum is handed over: nothing here holds it any more when autograd adds to it, so that it
is added to in place, or freed with the first addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def differentiate(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor | None],
    targets: Sequence[Tensor | GradientEdge] | None,
    *,
    keep: bool = False,
    accumulate: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of targets by those of roots; None for targets that are not used.

    With `keep` the graph can be differentiated again; with `accumulate` gradients are added to
    `.grad` instead, of all leaves where targets are None.

    It asks autograd's engine itself: to compare shapes of given gradients, `torch.autograd.grad`
    imports sympy, for a third of a second, and takes 10 us for each.
    """
    if targets is not None and not targets:
        return ()  # the engine takes none for all
    run = torch.autograd.graph._engine_run_backward
    given = tuple(roots), tuple(gradients), keep, False, tuple(targets or ())
    return run(*given, allow_unreachable=True, accumulate_grad=accumulate)


class Sums:
    """The place in a graph at which sums so far enter it.

    To be made after the graph, and by the same thread.
    """

    __slots__ = ("_groups",)

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # Each device serves its own nodes in the order of their making.
        numbers: dict[torch.device, list[int]] = {}
        for number, parameter in enumerate(parameters):
            numbers.setdefault(parameter.device, []).append(number)
        self._groups: list[tuple[list[int], list[Tensor | None], Tensor]] = []
        for group in numbers.values():
            box: list[Tensor | None] = []
            root: Tensor = _Entry.apply(box, *[parameters[i] for i in group])
            self._groups.append((group, box, root))

    def roots(self, sums: list[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        """Take the sums out of a list; return the roots by which they enter, with gradients."""
        found: list[tuple[Tensor, Tensor | None]] = []
        for group, box, root in self._groups:
            box[:] = [sums[i] for i in group]
            for i in group:
                sums[i] = None
            if any(total is not None for total in box):
                found.append((root, torch.zeros_like(root)))
        return found


class _Entry(torch.autograd.Function):
    """Hands gradients that lie in a box to tensors."""

    @staticmethod
    def forward(ctx: Any, box: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.box = box
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        found = (None, *ctx.box)
        ctx.box.clear()
        return found
