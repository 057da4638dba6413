"""Costs of a chain whose stages differ in time and size.

The model of Beaumont et al. 2019 (RR-9302), table 1.  Stage i turns state i
into state i + 1; a run of L stages ends with the loss, which costs nothing
here.

=======================  =====================================================
here                     there
=======================  =====================================================
`forward_s`              u_f
`backward_s`             u_b
`output_bytes`           omega_a, of the state that the stage makes
`tape_bytes`             omega_a-bar: what the adjoint of the stage needs, its
                         output included, its input not
`gradient_bytes`         omega_delta, of the stage's output
`forward_overhead_bytes`,
`tape_overhead_bytes`    o_f: beyond input and output while the stage runs and
                         keeps nothing, or keeps its tape
`backward_overhead_bytes`  o_b: beyond input, tape and both gradients
`spared_bytes`           not there: the part of `output_bytes` that the tape does not save,
                         gone when the adjoint of the stage begins
`saves_input`            not there: whether its tape needs the input; where it does not, what the
                         stage before does not save of it is gone during the adjoint as well
`spared_s`               not there: the part of `forward_s` after the last tensor
                         it saves, not run where its tape alone is needed
`overhead_s`             not there: the part of both times that the executor takes,
                         and plain training does not
`ways`                   not there: what else its tape may be kept as
=======================  =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from tabulate import tabulate

from ..errors import ArgumentError
from ..support.units import format_bytes, format_seconds
from ..support.values import seconds, shown, whole, whole_or_none
from .costs import CostModel, Costs
from .tier import Tier

MAX_BYTES = 1 << 60
_MOST_STAGES = 1 << 24


@dataclass(frozen=True, slots=True)
class Way:
    """Another way to keep a stage's tape: without some of it, which is made again from the rest.

    The bytes are in place of the stage's of these names; `again_s` is beside its `backward_s`.
    """

    tape_bytes: int
    tape_overhead_bytes: int
    backward_overhead_bytes: int
    again_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_bytes"):
                value = _size(getattr(self, field.name), f"a way to keep a tape: {field.name}")
                object.__setattr__(self, field.name, value)
        if not math.isfinite(self.again_s):
            raise ArgumentError(f"a way to keep a tape: again_s={self.again_s} must be finite")


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage costs; sizes in bytes, up to 2^60.

    `ways` are other ways to keep its tape, which a planner may choose; in the costs of a
    plan `way` is the number of the one it has, 0 for the whole tape, which is left in `ways`.

    Raises
    ------
    ArgumentError
        For a name that is no string, a negative, infinite or missing number, a size
        beyond 2^60, a tape smaller than the output it includes, more of the output
        spared than there is, or a `saves_input` that is no bool.

    Examples
    --------
    >>> Stage("conv", forward_s=1e-3, backward_s=2e-3, output_bytes=400, tape_bytes=900)
    ... # doctest: +ELLIPSIS
    Stage(name='conv', forward_s=0.001, ..., gradient_bytes=400, ...)
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    tape_bytes: int
    gradient_bytes: int = -1  # as many as the output
    forward_overhead_bytes: int = 0
    tape_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0
    spared_s: float = 0.0
    overhead_s: float = 0.0
    ways: tuple[Way, ...] = ()
    way: int = 0
    spared_bytes: int = 0
    saves_input: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentError(f"name={shown(self.name)} of a stage must be a string")
        if isinstance(self.gradient_bytes, int) and self.gradient_bytes == -1:
            object.__setattr__(self, "gradient_bytes", self.output_bytes)
        for name in ("forward_s", "backward_s", "spared_s", "overhead_s"):
            value = getattr(self, name)
            object.__setattr__(self, name, seconds(value, f"stage {shown(self.name)}: {name}"))
        for field in fields(self):
            if field.name.endswith("_bytes"):
                value = _size(getattr(self, field.name), f"stage {self.name!r}: {field.name}")
                object.__setattr__(self, field.name, value)
        if self.spared_bytes > self.output_bytes:
            raise ArgumentError(
                f"stage {self.name!r}: spared_bytes={self.spared_bytes} is a part of "
                f"output_bytes={self.output_bytes} and cannot be more"
            )
        if not isinstance(self.saves_input, bool):
            raise ArgumentError(
                f"stage {self.name!r}: saves_input={shown(self.saves_input)} must be True or False"
            )
        if self.spared_s > self.forward_s:
            raise ArgumentError(
                f"stage {self.name!r}: spared_s={self.spared_s} is a part of "
                f"forward_s={self.forward_s} and cannot be more"
            )
        if self.overhead_s > self.forward_s + self.backward_s:
            raise ArgumentError(
                f"stage {self.name!r}: overhead_s={self.overhead_s} is a part of forward_s="
                f"{self.forward_s} and backward_s={self.backward_s} and cannot be more"
            )
        if self.tape_bytes < self.output_bytes:
            raise ArgumentError(
                f"stage {self.name!r}: tape_bytes={self.tape_bytes} < "
                f"output_bytes={self.output_bytes}; the tape includes the output"
            )
        try:  # as JSON has them
            ways = tuple(way if isinstance(way, Way) else Way(**way) for way in self.ways)
        except TypeError as error:
            what = f"stage {self.name!r}: ways={shown(self.ways)}"
            raise ArgumentError(f"{what} must be a tuple of Way") from error
        object.__setattr__(self, "ways", ways)
        whole(self.way, f"stage {self.name!r}: way", 0)
        for way in ways:
            if way.tape_bytes < self.output_bytes:
                raise ArgumentError(
                    f"stage {self.name!r}: a way to keep its tape has tape_bytes={way.tape_bytes} "
                    f"< output_bytes={self.output_bytes}; the tape includes the output"
                )

    def by(self, number: int) -> Stage:
        """Return the stage with its tape kept one of its ways, and none other."""
        way = self.ways[number - 1]
        return replace(
            self,
            backward_s=self.backward_s + way.again_s,
            tape_bytes=way.tape_bytes,
            tape_overhead_bytes=way.tape_overhead_bytes,
            backward_overhead_bytes=way.backward_overhead_bytes,
            ways=(
                Way(
                    self.tape_bytes,
                    self.tape_overhead_bytes,
                    self.backward_overhead_bytes,
                    -way.again_s,
                ),
            ),
            way=number,
        )

    @property
    def whole(self) -> Stage:
        """The stage with its whole tape kept, and no other way."""
        return replace(self.by(1) if self.way else self, ways=(), way=0)

    def without(self, nbytes: int) -> Stage:
        """Return the stage with so many bytes of its output counted elsewhere."""
        return replace(
            self,
            output_bytes=self.output_bytes - nbytes,
            tape_bytes=self.tape_bytes - nbytes,
            gradient_bytes=self.gradient_bytes,
            spared_bytes=max(0, self.spared_bytes - nbytes),
            ways=tuple([replace(w, tape_bytes=w.tape_bytes - nbytes) for w in self.ways]),
        )


@dataclass(frozen=True, slots=True)
class StageCosts(CostModel):
    """A chain of stages, and the size of what goes into it.

    Attributes
    ----------
    stages : tuple of Stage
        At least one.
    input_bytes : int
        State 0, held by the caller all the time.
    input_gradient_bytes : int
        Its gradient, 0 if none is needed.

    Examples
    --------
    >>> costs = StageCosts((Stage("a", 1.0, 2.0, 10, 30), Stage("b", 1.0, 2.0, 10, 30)), 10)
    >>> len(costs.stages), StageCosts.from_json(costs.to_json()) == costs
    (2, True)
    """

    FORMAT: ClassVar[str] = "multistage-stages-1"
    WHAT: ClassVar[str] = "costs of a chain"
    UNIT: ClassVar[str] = "stages"

    stages: tuple[Stage, ...]
    input_bytes: int = 0
    input_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.stages, list | tuple):
            raise ArgumentError(f"stages={shown(self.stages)} must be a tuple of Stage")
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise ArgumentError(f"stages hold {shown(stage)}, which must be a Stage")
        object.__setattr__(self, "stages", tuple(self.stages))
        if not self.stages:
            raise ArgumentError("a chain needs at least one stage")
        for name in ("input_bytes", "input_gradient_bytes"):
            object.__setattr__(self, name, _size(getattr(self, name), name))

    def by(self, ways: Sequence[int]) -> Self:
        """Return the costs with each tape kept one of its stage's ways, whole if 0."""
        pairs = zip(self.stages, ways, strict=True)
        return replace(self, stages=tuple([s.by(way) if way else s.whole for s, way in pairs]))

    @property
    def whole(self) -> Self:
        """The costs with whole tapes kept, and no other way."""
        if not any(stage.ways for stage in self.stages):
            return self
        return self.by([0] * len(self.stages))

    @classmethod
    def uniform(cls, count: int, stage: Stage, input_bytes: int = 0) -> Self:
        """Return a chain of `count` equal stages.

        Examples
        --------
        >>> len(StageCosts.uniform(5, Stage("layer", 1.0, 2.0, 10, 30), 10).stages)
        5
        """
        return cls((stage,) * whole(count, "count", 1, _MOST_STAGES), input_bytes)

    def mean(self, tiers: tuple[Tier, ...] = ()) -> Costs:
        """Return the means over the stages, as costs of steps that are alike.

        Examples
        --------
        >>> StageCosts((Stage("a", 1.0, 2.0, 10, 30), Stage("b", 3.0, 4.0, 20, 30)), 30).mean()
        ... # doctest: +ELLIPSIS
        Costs(forward_step_s=2.0, reverse_step_s=3.0, tape_step_s=None, state_bytes=20, ...)
        """
        n = len(self.stages)
        sizes = [self.input_bytes, *(stage.output_bytes for stage in self.stages)]
        return Costs(
            forward_step_s=max(1e-12, sum(stage.forward_s for stage in self.stages) / n),
            reverse_step_s=sum(stage.backward_s for stage in self.stages) / n,
            state_bytes=max(1, round(sum(sizes) / len(sizes))),
            tiers=tiers,
        )

    @property
    def largest_state_bytes(self) -> int:
        """The bytes of the largest state that may be kept: any but the last."""
        return max(1, self.input_bytes, *(stage.output_bytes for stage in self.stages[:-1]))

    @property
    def spared_input_bytes(self) -> list[int]:
        """The part of each stage's input that is gone during its adjoint, as no tape saves it.

        None of state 0, which the caller holds, and of inputs that tapes are made again from.
        """
        before = [0, *(stage.spared_bytes for stage in self.stages)]
        return [
            0 if stage.saves_input or stage.way else nbytes
            for stage, nbytes in zip(self.stages, before, strict=False)
        ]

    @property
    def reverse_bytes(self) -> list[int]:
        """What each adjoint takes beside input, tape and both gradients.

        It is negative where more of them is gone by then.
        """
        return [
            stage.backward_overhead_bytes - stage.spared_bytes - nbytes
            for stage, nbytes in zip(self.stages, self.spared_input_bytes, strict=True)
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the costs as plain data, with their format; read back by `from_dict`."""
        data = asdict(self)
        stages = [{**stage, "ways": list(stage["ways"])} for stage in data["stages"]]
        return {"format": self.FORMAT, **data, "stages": stages}

    @classmethod
    def _read(cls, data: dict[str, Any]) -> Self:
        stages: Sequence[Any] = data["stages"]
        return cls(
            tuple(Stage(**stage) for stage in stages),
            data["input_bytes"],
            data.get("input_gradient_bytes", 0),
        )

    def __str__(self) -> str:
        rows = [
            (
                number,
                stage.name,
                format_seconds(stage.forward_s),
                format_seconds(stage.backward_s),
                format_bytes(stage.output_bytes),
                format_bytes(stage.tape_bytes),
                format_bytes(stage.forward_overhead_bytes),
                format_bytes(stage.backward_overhead_bytes),
            )
            for number, stage in enumerate(self.stages)
        ]
        headers = ("", "stage", "forward", "backward", "output", "tape", "+ forward", "+ backward")
        return tabulate(rows, headers=headers, disable_numparse=True, colalign=("right", "left"))


def _size(value: object, name: str) -> int:
    size = whole_or_none(value)
    if size is None:
        raise ArgumentError(f"{name}={shown(value)} must be a number of bytes")
    if not 0 <= size <= MAX_BYTES:
        raise ArgumentError(f"{name}={shown(size)} must be from 0 to 2^60 bytes")
    return size
