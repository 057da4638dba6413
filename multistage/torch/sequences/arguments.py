"""What `unroll` takes: types of its arguments, and checks of those that are not typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypedDict, TypeVar

from torch import Tensor, nn

from ...backends.urls import TierName, Tiers
from ...errors import ArgumentError
from ...model.budget import Budget
from ...model.stages import StageCosts
from ..measurement.checking import Check
from .cells import Step, identity_of
from .inputs import Given, Inputs, length_of
from .unroll_plan import UNROLL_PLANNERS, UnrollPlanner

Reduction: TypeAlias = Literal["stack", "sum", "last"]
_REDUCTIONS = ("stack", "sum", "last")
_Cell_co = TypeVar("_Cell_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of `unroll` on memory and plans; equal only if the plans are, as their keys."""

    memory: Budget | None
    tiers: tuple[TierName, ...]
    chunk: int | None
    planner: UnrollPlanner
    progress: bool | None
    check: Check = "error"
    costs: StageCosts | None = None

    @property
    def offloads(self) -> bool:
        """Whether tapes may travel."""
        return bool(self.tiers) and self.planner in ("auto", "offload")


class CellPerStep(Protocol[_Cell_co]):
    """A list or tuple of cells, or an `nn.ModuleList`."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[_Cell_co]: ...


class Options(TypedDict, total=False):
    """Arguments of `unroll` that do not decide the type of its result."""

    n_steps: int | None
    memory: int | str | float | None
    tiers: Tiers
    chunk: int | None
    fused: bool
    parameters: Sequence[Tensor] | None
    planner: UnrollPlanner
    random: bool | None
    progress: bool | None
    check: Check
    unequal: bool | None
    costs: StageCosts | None


def require_known(planner: object, outputs: object, chunk: object) -> None:
    """Raise ArgumentError for a choice that there is not."""
    if planner not in UNROLL_PLANNERS:
        raise ArgumentError(f"planner {planner!r} is not known; choose one of {UNROLL_PLANNERS}")
    if not (outputs is None or callable(outputs) or outputs in _REDUCTIONS):
        raise ArgumentError(
            f"outputs={outputs!r} is not known; choose one of {_REDUCTIONS}, None, f"
        )
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ArgumentError(f"chunk={chunk!r} must be an int, at least 1")


def cells_of(cell: object) -> list[Step] | None:
    """Return the cells of a sequence of cells, None for one cell.  Raises ArgumentError."""
    if not isinstance(cell, list | tuple | nn.ModuleList):
        if not callable(cell):
            raise ArgumentError(
                f"cell is {type(cell).__name__}; it must be callable, or a list of callables"
            )
        return None
    if not len(cell):
        raise ArgumentError("cell is an empty sequence; give one cell for each step")
    for t, one in enumerate(cell):
        if not callable(one):
            raise ArgumentError(f"cell {t} is {type(one).__name__}; it must be callable")
    return list(cell)


def steps_of(several: Sequence[object] | None, inputs: Given, steps: int | None) -> int | None:
    """Return the number of steps, if it is given or the cells determine it.

    Raises
    ------
    ArgumentError
        If it is not that of the inputs.
    """
    known = length_of(inputs)
    if steps is not None and known is not None and steps < known:
        raise ArgumentError(
            f"n_steps={steps}, but inputs has {known}, and the rest would be left out; leave "
            f"n_steps out, or give inputs[:{steps}], or a function of the step"
        )
    if several is None:
        return steps
    length = known if steps is None else steps
    if length is not None and length != len(several):
        raise ArgumentError(
            f"there are {len(several)} cells and {length} steps; give one cell for each step"
        )
    return len(several)


def is_varied(several: Sequence[object] | None, sequence: Inputs, costs: StageCosts | None) -> bool:
    """Whether steps differ, as far as the arguments show."""
    if costs is not None or sequence.differs():
        return True
    return several is not None and len({identity_of(one) for one in several}) > 1


def require_one_by_one(cells: Sequence[Step], *, fused: bool) -> None:
    """Raise ArgumentError if a cell takes several steps at once."""
    for one in cells:
        if isinstance(one, nn.RNNBase):
            raise ArgumentError(
                f"{type(one).__name__} takes several steps at once, and steps that differ are "
                f"run one by one; give an nn.{type(one).__name__}Cell for each layer"
            )
    if fused:
        raise ArgumentError(
            "fused=True is for cells that take several steps at once, and steps that differ are "
            "run one by one; leave it out"
        )
