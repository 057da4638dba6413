"""What becomes of the outputs of all steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import StateError
from .cell import Facts

# What becomes of y: for the last, of t and y_t.
Outputs: TypeAlias = Literal["stack", "sum", "last"] | Callable[..., object] | None


class Collector:
    """Reduces what the cell returns at each step besides its state.

    Parameters
    ----------
    facts : Facts
    steps : int
    mode : {"stack", "sum", "last"}, None or callable
        For what is no loss; see `multistage.torch.unroll`.
    fused : bool
    graph : bool
        Whether the results are to carry a graph.
    order : mapping of int to int, optional
        The place of step t among those that return y, of which there are `steps`; by
        default all steps do.

    Attributes
    ----------
    steps : int
    """

    def __init__(
        self,
        facts: Facts,
        steps: int,
        mode: Outputs,
        fused: bool,
        *,
        graph: bool = False,
        order: Mapping[int, int] | None = None,
    ) -> None:
        self._facts = facts
        self.steps, self._order = steps, order
        self._fused = fused
        self._graph = graph
        self._callback = mode if callable(mode) else None
        kept = "none" if mode is None or callable(mode) else mode
        self.kinds = ["sum" if summed else kept for summed in facts.summed]
        self.clear()

    def clear(self) -> None:
        """Start again."""
        self._values: list[Tensor | None] = [None] * len(self.kinds)
        self._lists: list[list[Tensor]] = [[] for _ in self.kinds]

    def values(self) -> list[Tensor | None]:
        """Return the reduced leaves of y."""
        join = torch.cat if self._fused else torch.stack
        return [
            value if not parts else sum(parts[1:], parts[0]) if kind == "sum" else join(parts)
            for kind, value, parts in zip(self.kinds, self._values, self._lists, strict=True)
        ]

    def add(self, t: int, leaves: Sequence[Tensor]) -> None:
        """Take the leaves of y of the steps from t on."""
        if not self._graph:
            leaves = [leaf.detach() for leaf in leaves]
        if self._callback is not None:
            assert self._facts.y_spec is not None
            y = pytree.tree_unflatten([leaf.detach() for leaf in leaves], self._facts.y_spec)
            self._callback(t, y)
        for j, (kind, leaf) in enumerate(zip(self.kinds, leaves, strict=True)):
            before = self._values[j]
            if self._graph and (kind == "stack" or (kind == "sum" and not self._facts.summed[j])):
                self._lists[j].append(leaf)
            elif kind == "sum":
                first = leaf if self._graph else leaf.clone()
                self._values[j] = first if before is None else before + leaf
            elif kind == "last":
                last = leaf[-1] if self._fused else leaf
                self._values[j] = last if self._graph else last.clone()
            elif kind == "stack":
                if before is None:
                    size = leaf.shape[1:] if self._fused else leaf.shape
                    before = self._values[j] = leaf.new_empty((self.steps, *size))
                place = before[t : t + leaf.shape[0]] if self._fused else before[self._place(t)]
                if place.shape != leaf.shape or place.dtype != leaf.dtype:
                    raise StateError(
                        f"step {t} returned an output of {tuple(leaf.shape)} {leaf.dtype} where "
                        f"{tuple(place.shape)} {place.dtype} came before; outputs that are stacked "
                        "must all be alike"
                    )
                place.copy_(leaf)

    def _place(self, t: int) -> int:
        return t if self._order is None else self._order[t]

    def gradient(self, j: int, t: int, leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of leaf j of y of the steps from t on, from that of its reduction."""
        kind = self.kinds[j]
        if gradient is None or kind == "none":
            return None
        if kind == "sum":
            return gradient
        if kind == "stack":
            return gradient[t : t + leaf.shape[0]] if self._fused else gradient[self._place(t)]
        last = t + leaf.shape[0] == self.steps if self._fused else self._place(t) + 1 == self.steps
        if not last:
            return None
        if not self._fused:
            return gradient
        whole = torch.zeros_like(leaf)
        whole[-1] = gradient
        return whole
