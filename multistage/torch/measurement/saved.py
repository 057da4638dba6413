"""Tensors that a stage saves for its gradient: told apart without looking at values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

# Of a tensor that a stage saves: shape, dtype, strides, which parameter or buffer it is
# (None: none of them), and how many nodes the stage's graph had by then.
Kind: TypeAlias = tuple[torch.Size, torch.dtype, tuple[int, ...], int | None, int]


class Complete(BaseException):
    """All that a stage saves is caught: the rest of it need not run.

    No Exception, which a stage may catch for reasons of its own.
    """


@dataclass(slots=True)
class Caught:
    """What a stage saved when it ran again.

    Attributes
    ----------
    sums : list of int or None
        Checksums of it; empty if nothing is compared.
    parts : list of int
        Of stages run as one: how much was saved by the end of each but the last.
    """

    tape: list[Tensor | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    sums: list[int | None] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def part(self, number: int, state: object) -> None:
        """Note that one of several stages is through."""
        self.parts.append(len(self.tape))


_sequence_nr: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


def nodes_made() -> int:
    """Return how many nodes of graphs this thread has made."""
    return _sequence_nr()


def kind_of(tensor: Tensor, places: dict[int, int], begun: int) -> Kind:
    """Return what identifies a saved tensor: form, place and node."""
    nodes = _sequence_nr() - begun
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return torch.Size(), tensor.dtype, (), None, nodes
    place = places.get(tensor.data_ptr()) if type(tensor) in _PLAIN_TENSORS else None
    return tensor.shape, tensor.dtype, tensor.stride(), place, nodes


_STRIDED = torch.strided
_PLAIN_TENSORS = {Tensor, nn.Parameter}


def difference(first: Sequence[Kind], again: Sequence[Kind]) -> str:
    """Say where two lists of saved tensors differ."""
    if len(first) != len(again):
        return f"{len(again)} in place of {len(first)}"
    for number, (a, b) in enumerate(zip(first, again, strict=True)):
        if a[:3] != b[:3]:
            kinds = [f"{tuple(k[0])} {k[1]} with strides {k[2]}" for k in (a, b)]
            return f"number {number} is {kinds[1]} in place of {kinds[0]}"
        if a[3] != b[3]:
            return f"number {number} is a parameter or buffer in one run and not in the other"
    return "the same"
