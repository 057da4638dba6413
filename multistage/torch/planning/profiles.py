"""Profiles made of others: of a larger input, and of lengths that lie on a line.

Inputs whose shapes lie on a line with those of two measured kinds, as sequences of several
lengths do, cost what lies on the line through theirs.  Bytes grow no slower than linearly and no
faster than quadratically (attention), so that between two measured lengths the line is too high
rather than too low, and beyond them so is the steepest parabola through both that has no negative
part.  The estimate is verified as the chain runs: what stages save and return is compared with
it, and the first iteration is metered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from typing import NamedTuple, TypeAlias, TypeVar

from ...model.stages import Stage, StageCosts
from ..measurement.measure import Profile
from ..measurement.traits import LargerError, Sizes, Traits
from .limited import Kind, Planned

_BYTES = (
    "output_bytes",
    "tape_bytes",
    "gradient_bytes",
    "forward_overhead_bytes",
    "tape_overhead_bytes",
    "backward_overhead_bytes",
)
_NEAR = 2  # times a measured length, or a part of it: what is estimated is not further away
_Value = TypeVar("_Value", int, float)
Measured: TypeAlias = tuple[Kind, Planned]


class _At(NamedTuple):
    """Where lengths lie between two others (0 and 1), and how far above the line values may."""

    share: float
    bend: float


def with_sizes(profile: Profile, sizes: Sequence[Sizes | None]) -> Profile:
    """Return a profile with these sizes of its stages."""
    traits = [replace(t, sizes=each) for t, each in zip(profile.traits, sizes, strict=True)]
    return replace(profile, traits=tuple(traits))


def with_more(profile: Profile, more_bytes: int) -> Profile:
    """Return a profile by which so many more bytes are held all the time, as the input is."""
    costs = profile.costs
    return replace(profile, costs=replace(costs, input_bytes=costs.input_bytes + more_bytes))


def at_least(now: Profile, before: Profile, larger: LargerError) -> Profile:
    """Return a profile with the larger bytes of two, those of one stage larger than before."""
    if len(now.traits) != len(before.traits):
        return now
    stages, sizes = list(now.costs.stages), [t.sizes or Sizes() for t in now.traits]
    for i, (a, b) in enumerate(zip(stages, before.costs.stages, strict=True)):
        larger_of = {n: max(getattr(a, n), getattr(b, n)) for n in _BYTES}
        stages[i] = replace(
            a,
            **larger_of,
            spared_bytes=min(a.spared_bytes, b.spared_bytes),
            saves_input=a.saves_input or b.saves_input,
            ways=(),
        )
        sizes[i] = sizes[i].both(before.traits[i].sizes or Sizes(), max)
    at, returns = larger.stage, larger.does == "returns"
    known = (sizes[at].output_bytes if returns else sizes[at].saved_bytes) or 0
    if known < larger.seen:
        # By chance it was small when it was measured: its largest size is not known.
        more = max(larger.seen - larger.planned, larger.planned // 4)
        returned = more if returns else 0
        stages[at] = replace(
            stages[at],
            output_bytes=stages[at].output_bytes + returned,
            tape_bytes=stages[at].tape_bytes + more,
        )
        grown, most = replace(sizes[at], varies=True), known + more
        sizes[at] = (
            replace(grown, output_bytes=most) if returns else replace(grown, saved_bytes=most)
        )
    input_bytes = max(now.costs.input_bytes, before.costs.input_bytes)
    costs = replace(now.costs, stages=tuple(stages), input_bytes=input_bytes)
    return with_sizes(replace(now, costs=costs), sizes)


def estimate(kind: Kind, known: Sequence[Measured]) -> tuple[Measured, Measured, Profile] | None:
    """Return two measured kinds of input and the costs on the line through theirs, if there are.

    Parameters
    ----------
    kind : Kind
    known : sequence of (Kind, Planned)
        Measured, of the chain's present stages.
    """
    pairs: list[tuple[bool, float, int, _At, Measured, Measured]] = []
    for one, other in combinations([k for k in known if k[0].family == kind.family], 2):
        share = _share(one[0].lengths, other[0].lengths, kind.lengths)
        if share is not None and _are_alike(one[1].measured, other[1].measured):
            away = abs(share - 0.5) * math.dist(one[0].lengths, other[0].lengths)
            at = _At(share, _bend(one[0].lengths, other[0].lengths, share))
            pairs.append((abs(share - 0.5) > 0.5, away, len(pairs), at, one, other))
    if not pairs:
        return None
    *_, at, one, other = min(pairs, key=lambda pair: pair[:3])
    return one, other, _on_line(one[1].measured, other[1].measured, at)


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


def _bend(one: Sequence[int], other: Sequence[int], share: float) -> float:
    """Return by how much of a difference values may lie above the line.

    Of c n^2 + d n + e, which is f at lengths a and b, c is at most (f(b) - f(a)) / (b^2 - a^2), and
    the value at n lies c (n - a) (n - b) above the line.
    """
    steepest = max(abs(b - a) / (a + b) for a, b in zip(one, other, strict=True) if a != b)
    return max(0.0, share * (share - 1)) * steepest


def _are_alike(one: Profile, other: Profile) -> bool:
    """Whether stages do the same, whatever it costs."""

    def but_measured(traits: Traits) -> Traits:
        return replace(traits, sizes=None, scope=None, ways=())

    pairs = zip(one.traits, other.traits, strict=True)
    return one.groups == other.groups and all(but_measured(a) == but_measured(b) for a, b in pairs)


def _on_line(one: Profile, other: Profile, at: _At) -> Profile:
    value = partial(_value, at=at)
    a, b = one.costs, other.costs
    costs = StageCosts(
        tuple([_stage(x, y, at) for x, y in zip(a.stages, b.stages, strict=True)]),
        value(a.input_bytes, b.input_bytes),
        value(a.input_gradient_bytes, b.input_gradient_bytes),
    )
    traits = tuple(
        replace(x, sizes=x.sizes and y.sizes and x.sizes.both(y.sizes, value))
        for x, y in zip(one.traits, other.traits, strict=True)
    )
    return replace(one, costs=costs, traits=traits)


def _stage(one: Stage, other: Stage, at: _At) -> Stage:
    others = ("name", "ways", "way", "saves_input")
    numbers = [f.name for f in fields(Stage) if f.name not in others]
    values = {n: _value(getattr(one, n), getattr(other, n), at) for n in numbers}
    values["tape_bytes"] = max(values["tape_bytes"], values["output_bytes"])
    # Rounded down, and not above the line: it makes a plan take less.
    spared = one.spared_bytes + (other.spared_bytes - one.spared_bytes) * at.share
    values["spared_bytes"] = min(max(0, math.floor(round(spared, 6))), values["output_bytes"])
    values["spared_s"] = min(values["spared_s"], values["forward_s"])
    values["overhead_s"] = min(values["overhead_s"], values["forward_s"] + values["backward_s"])
    saves = one.saves_input or other.saves_input
    # Ways are known of the measured kinds alone.
    return replace(one, **values, saves_input=saves, ways=())


def _value(one: _Value, other: _Value, at: _At) -> _Value:
    """Return a value on the line through two, or above; of bytes a whole number, rounded up."""
    value = max(0.0, one + (other - one) * at.share + abs(other - one) * at.bend)
    return math.ceil(round(value, 6)) if isinstance(one, int) else value
