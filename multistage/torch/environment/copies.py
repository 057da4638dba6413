"""Tensors copied and put back with their strides, aliases and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def address(tensor: Tensor) -> int:
    """Return where a tensor's elements lie, 0 if it has none in memory."""
    if type(tensor) not in _ADDRESSED or tensor.layout is not torch.strided:
        return 0
    return tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the elements of tensors lie; see `address`."""
    strided = torch.strided
    return [t.data_ptr() if type(t) in _ADDRESSED and t.layout is strided else 0 for t in tensors]


_ADDRESSED = {Tensor, nn.Parameter, nn.Buffer}


def cloned(tensors: Sequence[MaybeTensor]) -> list[MaybeTensor]:
    """Return copies that are one object, or share memory, where the given tensors do.

    They have the strides of the given tensors too.
    """
    if not tensors:
        return []
    if _lie_apart(tensors):
        return [None if t is None else t.detach().clone() for t in tensors]
    once = {id(t): t for t in tensors if t is not None}
    strided = {k: t for k, t in once.items() if address(t) and not (t.is_conj() or t.is_neg())}
    sharing = Counter(t.untyped_storage()._cdata for t in strided.values())
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Tensor] = {}
    for key, tensor in once.items():
        at = tensor.untyped_storage()._cdata if key in strided else 0
        if sharing[at] <= 1:
            copy = tensor.detach().clone()
            if key not in strided or copy.stride() == tensor.stride():
                copies[key] = copy
                continue
        if at not in storages:
            storages[at] = tensor.untyped_storage().clone()
        blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies[key] = blank.set_(
            storages[at], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return [None if t is None else copies[id(t)] for t in tensors]


def _lie_apart(tensors: Sequence[Tensor | None]) -> bool:
    """Whether tensors share no memory for certain, and their copies have their strides."""
    storages = set()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _ADDRESSED or tensor.layout is not torch.strided:
            return False
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return False
        storages.add(tensor.untyped_storage()._cdata)
    return len(storages) == sum([t is not None for t in tensors])


def put_back(tensor: Tensor, value: Tensor, version: int) -> None:
    """Give a tensor the numbers and the version it had: nothing shows that it was written to.

    Graphs that saved it before stay valid, which check the version.
    """
    with torch.no_grad():
        tensor.detach().copy_(value)
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version; those made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
