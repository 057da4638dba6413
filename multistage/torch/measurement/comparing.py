"""What two runs left behind, compared bit for bit or to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.checksums import fingerprint
from .both_ways import Seen

_ABSENT = object()
# Of two runs of operators that are not deterministic, relative: sums in another order.  Those of
# a processor hardly ever are; a hidden counter behind a norm may be felt no more than 1e-3.
_ROUNDING, _ROUNDING_ON_CPU = 1e-3, 1e-5


def differences(ones: Mapping[str, object], others: Mapping[str, object]) -> list[str]:
    """Return the names of what differs; gradients last, from the output backwards."""
    names = [n for n in {**ones, **others} if ones.get(n, _ABSENT) != others.get(n, _ABSENT)]
    gradients = [n for n in names if n.startswith("the gradient")]
    outputs = [n for n in names if n.startswith(("output", "the structure"))]
    rest = [n for n in names if n not in gradients and n not in outputs]
    return [*outputs, *rest, *gradients]


def listed(names: Sequence[str]) -> str:
    """Return at most three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def bits(tensor: Tensor) -> object:
    """Return what equal tensors have in common, to the bit."""
    return fingerprint(tensor)


def projected(tensor: Tensor) -> object:
    """Return a sum with fixed random weights, and what its size would be: for rounding."""
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return fingerprint(tensor)
    generator = torch.Generator(tensor.device).manual_seed(0)
    values = tensor.abs().double() if tensor.is_complex() else tensor.double()
    weights = torch.empty_like(values).normal_(generator=generator)
    share = _ROUNDING_ON_CPU if tensor.device.type == "cpu" else _ROUNDING
    if tensor.is_floating_point():
        share = max(share, torch.finfo(tensor.dtype).eps)
    return _Rounded(float((values * weights).sum()), float(values.norm()), share)


@dataclass(frozen=True, slots=True)
class _Rounded:
    projection: float
    norm: float
    share: float  # of the norm, by which two runs may differ

    def close(self, other: object) -> bool:
        if not isinstance(other, _Rounded):
            return False
        scale = max(self.norm, other.norm, 1e-30)
        return abs(self.projection - other.projection) <= self.share * scale


def agree(ones: Seen, others: Seen) -> bool:
    """Return whether two runs have the same values, up to rounding where that is compared."""
    if ones.keys() != others.keys():
        return False
    for name, one in ones.items():
        other = others[name]
        if one == other:
            continue
        inner, outer = (v[0] if isinstance(v, tuple) and v else v for v in (one, other))
        if not (isinstance(inner, _Rounded) and inner.close(outer)):
            return False
    return True
