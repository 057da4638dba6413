"""What becomes of the outputs of all steps, and what `unroll` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import StateError
from ..tensors.states import copied
from .facts import Facts
from .unroll_plan import UnrollPlan

State_co = TypeVar("State_co", covariant=True)
Outputs_co = TypeVar("Outputs_co", covariant=True)
# What becomes of y: for the last, of t and y_t.
Outputs: TypeAlias = Literal["stack", "sum", "last"] | Callable[..., object] | None


@dataclass(frozen=True, slots=True)
class Unrolled(Generic[State_co, Outputs_co]):
    """What `unroll` returns.

    Attributes
    ----------
    state : pytree of Tensor
        The state after the last step.
    loss : Tensor or None
        Sum of the losses of all steps, if the cell returns any.
    outputs : pytree of Tensor or None
        y of all steps, reduced as asked for; None if y is one number, a loss.
    plan : UnrollPlan or None
        How it was run; None where no gradient is required.

    Examples
    --------
    >>> import torch
    >>> import multistage.torch as mst
    >>> cell = torch.nn.GRUCell(3, 4)
    >>> out = mst.unroll(cell, torch.zeros(2, 4), torch.randn(6, 2, 3))
    >>> out.outputs.shape, out.state.shape
    (torch.Size([6, 2, 4]), torch.Size([2, 4]))
    """

    state: State_co
    loss: Tensor | None
    outputs: Outputs_co
    plan: UnrollPlan | None


class Collector:
    """Reduces what the cell returns at each step of a window besides its state.

    What is no loss is reduced by the mode; see `multistage.torch.unroll`.  With `graph` the
    results carry a graph.
    """

    def __init__(
        self,
        facts: Facts,
        window: tuple[int, int],
        mode: Outputs,
        fused: bool,
        *,
        graph: bool = False,
    ) -> None:
        self._facts, self._start = facts, window[0]
        self.steps = window[1] - window[0]  # those that return y
        self._order: dict[int, int] | None = None  # steps that return y, where not all do
        if facts.y_spec is not None and any(kind.y_spec is None for kind in facts.kinds):
            speaking = [t for t in range(*window) if facts.kind(t).y_spec is not None]
            self._order = {t: place for place, t in enumerate(speaking)}
            self.steps = len(speaking)
        self._fused = fused
        self._graph = graph
        self._callback = mode if callable(mode) else None
        kept = "none" if mode is None or callable(mode) else mode
        self.kinds = ["sum" if summed else kept for summed in facts.summed]
        self._adds = [fused and kept == "sum" and not summed for summed in facts.summed]  # steps
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
            # One after the other: their sum must not depend on the chunks that the steps are in.
            parts = leaf.unbind() if self._adds[j] else (leaf,)
            if self._graph and (kind == "stack" or (kind == "sum" and not self._facts.summed[j])):
                self._lists[j] += parts
            elif kind == "sum":
                for part in parts:
                    first = part if self._graph else copied(part)
                    before = self._values[j] = first if before is None else before + part
            elif kind == "last":
                last = leaf[-1] if self._fused else leaf
                if self._graph:
                    self._values[j] = last
                elif self._is_last(t, leaf):
                    self._values[j] = copied(last)
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
        return t - self._start if self._order is None else self._order[t]

    def _is_last(self, t: int, leaf: Tensor) -> bool:
        return (t + leaf.shape[0] if self._fused else self._place(t) + 1) == self.steps

    def gradient(self, j: int, t: int, leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of leaf j of y of the steps from t on, from that of its reduction.

        With the strides that it has in plain autograd: sums over it are rounded by them.
        """
        kind = self.kinds[j]
        if gradient is None or kind == "none":
            return None
        if kind == "sum":
            return torch.stack([gradient] * leaf.shape[0]) if self._adds[j] else gradient
        if kind == "stack":
            return gradient[t : t + leaf.shape[0]] if self._fused else gradient[self._place(t)]
        if not self._is_last(t, leaf):
            return None
        if not self._fused:
            return gradient
        whole = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        whole[-1] = gradient
        return whole

    def results(
        self, last: Sequence[Tensor], pattern: Sequence[int], wants: Sequence[bool]
    ) -> tuple[list[Tensor], list[bool], list[int | None]]:
        """Return the results of a sequence, each once, which take part in the gradient, and places.

        The places are those of the state's leaves and y's among the results.  One
        tensor in several places is one result, so that its gradient is added up
        as plain autograd does it.

        Parameters
        ----------
        last : sequence of Tensor
            The leaves of the last state.
        pattern : sequence of int
            Which of these, and of the leaves of y of the last step, are one; see `Boundary`.
        wants : sequence of bool
            Which leaves of the last state take part in the gradient.
        """
        count = len(last)
        results: list[Tensor] = []
        flags: list[bool] = []
        places: list[int | None] = []
        for i, leaf in enumerate(last):
            if pattern[i] < i:
                places.append(places[pattern[i]])
                continue
            places.append(len(results))
            results.append(leaf.view_as(leaf))
            flags.append(wants[i])
        # The sum of one is that one.
        one = ("last", "sum") if self.steps == 1 else ("last",)
        kept = [kind in one and not self._fused for kind in self.kinds]
        for j, value in enumerate(self.values()):
            known = kept[j] and count + j < len(pattern)  # else no y came in the last chunk
            same = pattern[count + j] if known else count + j
            if value is None:
                places.append(None)
            elif same < count or (same < count + j and kept[same - count]):
                places.append(places[same])
            else:
                places.append(len(results))
                results.append(value)
                flags.append(self._facts.differentiable[j])
        return results, flags, places


def results_of(facts: Facts, values: Sequence[Tensor | None]) -> tuple[Tensor | None, object]:
    """Return the loss and the outputs from the reduced leaves of y."""
    if facts.y_spec is None:
        return None, None
    whole = pytree.tree_unflatten(list(values), facts.y_spec)
    if facts.y_spec.is_leaf():
        return (whole, None) if facts.summed[0] else (None, whole)
    loss = whole.get("loss") if isinstance(whole, dict) else None
    return (loss if isinstance(loss, Tensor) and loss.dim() == 0 else None), whole
