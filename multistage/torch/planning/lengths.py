"""Costs of inputs of other lengths, estimated from two that were measured.

Inputs whose shapes lie on a line with those of two measured kinds, as sequences of several
lengths do, cost what lies on the line through theirs.  Bytes grow no slower than linearly,
so that between two measured lengths they are estimated too high rather than too low.  The
estimate is verified as the chain runs: what stages save and return is compared with it, and
the first iteration is metered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import combinations
from typing import TypeAlias, TypeVar

from ...model.stages import Stage, StageCosts
from ..measurement.measure import Profile
from ..measurement.traits import Sizes
from .limited import Kind, Planned

_NEAR = 2  # times a measured length, or a part of it: what is estimated is not further away
_Value = TypeVar("_Value", int, float)
Measured: TypeAlias = tuple[Kind, Planned]


def estimated(kind: Kind, known: Sequence[Measured]) -> tuple[Measured, Measured, Profile] | None:
    """Return two measured kinds of input and the costs on the line through theirs, if there are.

    Parameters
    ----------
    kind : Kind
    known : sequence of (Kind, Planned)
        Measured, of the chain's present stages.
    """
    pairs: list[tuple[bool, float, int, float, Measured, Measured]] = []
    for one, other in combinations([k for k in known if k[0].family == kind.family], 2):
        share = _share(one[0].lengths, other[0].lengths, kind.lengths)
        if share is not None and _are_alike(one[1].measured, other[1].measured):
            away = abs(share - 0.5) * math.dist(one[0].lengths, other[0].lengths)
            pairs.append((abs(share - 0.5) > 0.5, away, len(pairs), share, one, other))
    if not pairs:
        return None
    *_, share, one, other = min(pairs)
    return one, other, _on_line(one[1].measured, other[1].measured, share)


def _share(one: Sequence[int], other: Sequence[int], new: Sequence[int]) -> float | None:
    """Return where some lengths lie on the way from one to another: 0 and 1 are these.

    None if they do not, if they lie further outside than the two lie apart, or if none of
    the two is near.
    """
    shares = {(c - a) / (b - a) for a, b, c in zip(one, other, new, strict=True) if a != b}
    fixed = all(a == c for a, b, c in zip(one, other, new, strict=True) if a == b)
    if len(shares) != 1 or not fixed:
        return None
    share = shares.pop()
    nearest = one if share < 0.5 else other
    near = all(a <= _NEAR * b and b <= _NEAR * a for a, b in zip(nearest, new, strict=True))
    return share if -1 <= share <= 2 and near else None


def _are_alike(one: Profile, other: Profile) -> bool:
    """Whether stages do the same, whatever it costs."""
    return one.groups == other.groups and all(
        replace(a, sizes=None, scope=None) == replace(b, sizes=None, scope=None)
        for a, b in zip(one.traits, other.traits, strict=True)
    )


def _on_line(one: Profile, other: Profile, share: float) -> Profile:
    stages = tuple(
        _stage(a, b, share) for a, b in zip(one.costs.stages, other.costs.stages, strict=True)
    )
    costs = StageCosts(
        stages,
        _value(one.costs.input_bytes, other.costs.input_bytes, share),
        _value(one.costs.input_gradient_bytes, other.costs.input_gradient_bytes, share),
    )
    traits = tuple(
        replace(a, sizes=_sizes(a.sizes, b.sizes, share))
        for a, b in zip(one.traits, other.traits, strict=True)
    )
    return replace(one, costs=costs, traits=traits)


def _stage(one: Stage, other: Stage, share: float) -> Stage:
    numbers = [f.name for f in fields(Stage) if f.name != "name"]
    values = {n: _value(getattr(one, n), getattr(other, n), share) for n in numbers}
    values["tape_bytes"] = max(values["tape_bytes"], values["output_bytes"])
    values["spared_s"] = min(values["spared_s"], values["forward_s"])
    return replace(one, **values)


def _sizes(one: Sizes | None, other: Sizes | None, share: float) -> Sizes | None:
    if one is None or other is None:
        return None
    output, saved = (
        None if a is None or b is None else _value(a, b, share)
        for a, b in (
            (one.output_bytes, other.output_bytes),
            (one.saved_bytes, other.saved_bytes),
        )
    )
    return Sizes(output, saved, one.varies or other.varies)


def _value(one: _Value, other: _Value, share: float) -> _Value:
    """Return a value on the line through two; of bytes a whole number, rounded up."""
    value = max(0.0, one + (other - one) * share)
    return math.ceil(round(value, 6)) if isinstance(one, int) else value
