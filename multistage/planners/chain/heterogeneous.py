"""Schedules of a chain whose stages differ in time and size, within a memory limit.

optimal
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, *Optimal
    checkpointing for heterogeneous chains* (RR-9302), theorem 1: the best
    schedule that keeps every checkpoint until it is used ("persistent"), and
    that may keep tapes from the forward sweep on.  O(L^3 S) for L stages and
    S slots of memory.
revolve
    The same without tapes kept: every stage is taped right before its adjoint
    (Griewank & Walther 2000; Gruslys et al. 2016, appendix C).
periodic
    Chen et al. 2016, as `torch.utils.checkpoint.checkpoint_sequential` does
    it: equal segments, each but the last run twice.
store-all
    Every tape is kept.

Differences from the printed algorithm: m_all counts the gradient of the
stage's output where it is larger and that of its input beside it; pairs are
solved by growing length; F_none runs to s'-1; the checkpoint branch is guarded.
Without the first of these, plans exceed the limit in a fifth of all chains.

Memory is cut into slots for the dynamic program alone.  Sizes are rounded to
the *nearest* slot, the program is solved for 15 % more slots than the limit
has, and every schedule of the table is judged with its true sizes: the fastest
that fits is taken.  So the limit is never exceeded, and rounding costs next to
nothing.  The slots' sizes come from a fixed ladder, of which all rungs below
the limit are considered; a schedule that one limit finds is therefore found by
every larger one, and more memory never makes a plan slower.  Rungs that cannot
be better, by a bound from sizes rounded down, are not solved.  Where one tape is so huge
that states are less than a slot, `planners.chain.nested` plans the chain too, whose
schedules do depend on the limit.

A chain of more than some 1000 stages, whose table would take more than 1.25 GiB, is planned
in pieces; see `planners.chain.pieces`.

Known gap: persistency.  Schedules that drop a checkpoint before its use can
be faster (the paper's figure 2: 2n + 2 instead of 3n + 1); where a tape pins
its input, as in autograd, they gain 0 to 0.25 % on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from ...errors import ArgumentError
from ...model.budget import Memory, memory_bytes
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.units import format_bytes
from ...support.values import shown
from ...support.values import whole as whole_number
from ..base import Plan, plain_use
from .at_once import CHAIN_PLANNERS as CHAIN_PLANNERS
from .at_once import SLOTS as SLOTS
from .at_once import ChainPlanner as ChainPlanner
from .at_once import least_memory, most_stages, plan_at_once, table_bytes
from .grouped import in_groups
from .joint_core import require_core
from .pieces import least_in_pieces, plan_in_pieces
from .sizes import Sizes
from .table import MORE, Table, default_threads, judge, smallest

_MOST_SLOTS, _MOST_THREADS = 1 << 20, 1024
_GROUPS = 600  # of stages, for the curve of more than one table takes


def plan_chain(
    costs: StageCosts,
    memory: Memory | None = None,
    planner: ChainPlanner = "optimal",
    *,
    tiers: Tier | str | Sequence[Tier | str] | None = None,
    segments: int | None = None,
    resolution: int = SLOTS,
    threads: int | None = None,
    progress: bool | None = None,
) -> Plan:
    """Return the fastest schedule of a chain within a memory limit.

    Parameters
    ----------
    costs : StageCosts
    memory : int, str, float, Budget or None
        Bytes for activations and their gradients, the chain's input included:
        a number, a string such as `"4 GiB"`, or a fraction (a float up to 1, `"50 %"`)
        of what keeping every tape takes.  None for no limit.
    planner : {"optimal", "auto", "revolve", "periodic", "store-all"}
        "auto", the name of the choice in all front doors, is "optimal" here.
    tiers : Tier, str or sequence, optional
        A slow tier for states and tapes (the first, if several), as `Tier` or
        as a text such as `"write=2GB/s,read=1GB/s"`; with planner "optimal".  The
        plan is never slower than without it.  See `planners.chain.joint`.
    segments : int, optional
        For `periodic`: how many; the fastest number that fits, if None.
    resolution : int
        Parts that the dynamic program divides memory in, at least 16.  Its table may take
        1.25 GiB.
    threads : int, optional
        For the dynamic program of a long chain.
    progress : bool or None
        Show a bar while it is solved; None: on a terminal or in a notebook.

    Raises
    ------
    BudgetError
        If no schedule of this planner fits; the message names the smallest
        limit that works.
    ArgumentError
        For arguments out of range; for a tier without the C core.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    >>> plan = plan_chain(costs, 0.5)
    >>> plan.peak_bytes <= plan.memory_bytes, plan.makespan_s / plan.plain_s < 1.3
    (True, True)
    """
    _require_chain(costs)
    planner = _known(planner)
    resolution = whole_number(resolution, "resolution", 16, _MOST_SLOTS)
    if segments is not None:
        segments = whole_number(segments, "segments", 1)
        if planner != "periodic":
            raise ArgumentError("segments, at least 1, goes with planner 'periodic'")
    if threads is not None:
        threads = whole_number(threads, "threads", 0, _MOST_THREADS)
    rates = _tier_for(planner, tiers)
    limit = memory_bytes(memory, lambda: plain_use(costs).peak_bytes)
    long = len(costs.stages) > most_stages(resolution)
    if long and (planner == "optimal" or planner == "revolve"):  # they need a table
        _require_default(costs, resolution)
        return plan_in_pieces(costs, limit, planner, rates)
    return plan_at_once(
        costs,
        limit,
        planner,
        rates,
        segments=segments,
        resolution=resolution,
        threads=threads,
        progress=progress,
    )


def _require_default(costs: StageCosts, resolution: int) -> None:
    """Raise ArgumentError for a resolution of which the table would take too much memory."""
    if resolution == SLOTS:
        return
    stages = len(costs.stages)
    raise ArgumentError(
        f"resolution={resolution} takes a table of "
        f"{format_bytes(table_bytes(stages, resolution))} for {stages} stages, of which at most "
        f"{most_stages(resolution)} are planned with it; leave resolution out"
    )


def _tier_for(planner: str, tiers: Tier | str | Sequence[Tier | str] | None) -> Tier | None:
    if tiers is None:
        return None
    if not isinstance(tiers, Tier | str):
        if not isinstance(tiers, Sequence) or not tiers:
            raise ArgumentError(
                f"tiers={shown(tiers)} must be a Tier, a text such as 'write=2GB/s,read=1GB/s', "
                "or a sequence of them, the fastest first"
            )
        tiers = tiers[0]
    rates = Tier.parse(tiers).in_bytes()
    if planner != "optimal":
        raise ArgumentError(f"tiers go with planner 'optimal', not {planner!r}")
    require_core()
    return rates


def smallest_memory(
    costs: StageCosts, planner: Literal["auto", "optimal", "revolve"] = "optimal"
) -> int:
    """Return the smallest limit, in bytes, within which the chain can be reversed.

    Of more than some 1000 stages one in which each is reversed by itself, from state 0.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> smallest_memory(StageCosts.uniform(4, Stage("layer", 1.0, 2.0, 10, 30), 10))
    70
    """
    _require_chain(costs)
    planner = _either(planner)
    if len(costs.stages) > most_stages():
        return least_in_pieces(costs)
    return least_memory(costs, planner)


def _require_chain(costs: StageCosts) -> None:
    if not isinstance(costs, StageCosts):
        raise ArgumentError(
            f"costs={shown(costs)} must be multistage.StageCosts; for uniform steps there is plan"
        )


def _known(planner: ChainPlanner) -> ChainPlanner:
    if not isinstance(planner, str) or planner not in CHAIN_PLANNERS:
        raise ArgumentError(
            f"planner {shown(planner)} is not known; choose one of {CHAIN_PLANNERS}"
        )
    return "optimal" if planner == "auto" else planner


def _either(planner: str) -> Literal["optimal", "revolve"]:
    if isinstance(planner, str) and planner in ("auto", "optimal", "revolve"):
        return "revolve" if planner == "revolve" else "optimal"
    raise ArgumentError(f"planner {shown(planner)} must be 'auto', 'optimal' or 'revolve'")


def memory_curve(
    costs: StageCosts,
    planner: Literal["auto", "optimal", "revolve"] = "optimal",
    *,
    resolution: int = SLOTS,
    threads: int | None = None,
) -> list[tuple[int, float]]:
    """Return the time-memory trade-off: (peak bytes, seconds), memory ascending, time falling.

    All points come from one table, whose slots divide what plain training
    takes, and from the schedule of the smallest memory.  Chains of more than some 1000
    stages are divided into blocks, which are taped as a whole or not at all.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> curve = memory_curve(StageCosts.uniform(4, Stage("layer", 1.0, 2.0, 10, 30), 10))
    >>> curve[0][0], curve[-1]
    (70, (150, 12.0))
    """
    _require_chain(costs)
    planner = _either(planner)
    resolution = whole_number(resolution, "resolution", 16, _MOST_SLOTS)
    if threads is not None:
        threads = whole_number(threads, "threads", 0, _MOST_THREADS)
    plain = plain_use(costs)
    if len(costs.stages) > most_stages(resolution):
        _require_default(costs, resolution)
        costs, _ = in_groups(costs, _GROUPS)
    true = Sizes.of(costs)
    _, trace = smallest(true, tapes=planner == "optimal")
    seconds, peak = judge(true, trace)
    points = [(peak + costs.input_bytes, seconds)]
    if planner == "optimal":
        points.append((plain.peak_bytes, plain.makespan_s))
    unit = max(1.0, plain.peak_bytes - costs.input_bytes) / resolution
    table = Table(
        true.in_slots(unit),
        int(resolution * MORE),
        tapes=planner == "optimal",
        threads=threads or default_threads(),
    )
    for seconds_there, peak_there in zip(*table.curve(true), strict=True):
        if math.isfinite(seconds_there):
            points.append((int(peak_there) + costs.input_bytes, float(seconds_there)))
    curve: list[tuple[int, float]] = []
    for peak, seconds in sorted(points):
        if not curve or seconds < curve[-1][1]:
            curve.append((peak, seconds))
    return curve
