"""The graph of a chunk of time steps, and the gradients that autograd finds in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import StateError
from .inputs import Place
from .samples import Watch

Ys: TypeAlias = list[tuple[int, list[Tensor]]]  # of steps: t, leaves
Gradients: TypeAlias = tuple[Tensor | None, ...]


@dataclass(slots=True)
class ChunkGraph:
    """A chunk that was run with a graph.

    Attributes
    ----------
    given, leaves : list of Tensor
        The states before and after it.
    xs : list of (place, Tensor)
        The leaves that stand for inputs that require gradients.
    ys : list of (t, leaves of y)
    begun : int
        Sequence number of autograd's first node in it.
    watch : Watch or None
        Of what it has written to.
    repeated : bool
        Whether it was run before.
    """

    given: list[Tensor]
    leaves: list[Tensor]
    xs: list[tuple[Place, Tensor]]
    ys: Ys
    begun: int
    watch: Watch | None = None
    repeated: bool = False


def gradients_of(
    name: str, roots: Sequence[tuple[Tensor, Tensor | None]], targets: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of targets by roots and theirs; `name` is the cell's.

    Raises
    ------
    StateError
        If the graph holds a reentrant checkpoint, or a gradient is sparse.
    """
    try:
        found = torch.autograd.grad(
            [t for t, _ in roots], targets, [g for _, g in roots], allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise StateError(
            f"{name} uses reentrant checkpoint, whose gradients autograd computes only "
            "together with .grad; give torch.utils.checkpoint use_reentrant=False"
        ) from error
    for target, gradient in zip(targets, found, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise StateError(
                f"{name} has a sparse gradient (of a parameter of shape "
                f"{tuple(target.shape)}), and chunks' gradients are added up densely; use "
                "nn.Embedding(sparse=False)"
            )
    return found
