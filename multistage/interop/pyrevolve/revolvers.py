"""The revolvers: pyrevolve's front ends, each a plan and places for a `Reversal`."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ...actions import Schedule
from ...backends.urls import Tiers
from ...errors import ArgumentError
from ...model.budget import Budget
from ...model.costs import NOT_KEPT, Costs
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...planners import PLANNERS, Plan, Planner
from ...planners.base import require_steps
from ...planners.predict import sealing
from ...planners.single.binomial import beta, forward_and_reverse, reverse_actions
from ...planners.single.revolve import revolve
from ...planners.streaming.overlap import on_tier, overlap
from ...planners.synchronous.hierarchy import Level, count_actions, solve
from ...report import Report
from ...reversal import Reversal
from ...reversing.arguments import SURVEY
from ...support.values import whole
from ..mpi import MPIReversal
from ..ranks import Communicator, Ranks, shared_ranks, world_size
from .compression import Compression, Params, init_compression
from .operators import (
    Checkpoint,
    Operator,
    OperatorChain,
    OperatorStates,
    Profiler,
    devito_checkpoint,
)
from .storage import NumpyStorage, Storage, open_folder

# States in memory on their way to or from a disk: two each way.
TRANSIT = 4


@dataclass(frozen=True, slots=True)
class Options:
    """What `install` gives: for single-level revolvers in memory made with `n_checkpoints=None`.

    `comm` is for all that are given none.
    """

    memory: Budget | int | str | None = None
    tiers: Tiers | None = None
    planner: str | Plan | Planner | None = None
    costs: Costs | StageCosts | None = None
    progress: bool | None = None
    comm: Communicator | None = None


defaults = Options()  # replaced by `install`


class BaseRevolver:
    """What all revolvers share.

    Parameters
    ----------
    checkpoint : Checkpoint
        Or any object with `dtype`, `size`, `get_data` and `get_data_location`.
    fwd_operator, rev_operator : Operator
        Or any objects with `apply(t_start=, t_end=)`.
    n_checkpoints : int or None
    n_timesteps : int
    timings : object
        Kept as an attribute, as pyrevolve does.
    profiler : Profiler, optional
        Gets the milliseconds spent in operators and copies; without it they are not counted.
    comm : mpi4py.MPI.Comm, optional
        The ranks whose operators exchange data: they run the same steps in the
        same order, as `MPIReversal` documents, and every rank makes the same
        revolvers and calls the same methods.  That of the grid for Devito's own
        checkpoint object.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        Before any operator runs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fwd_operator: Operator,
        rev_operator: Operator,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        comm: Communicator | None = None,
    ) -> None:
        self.n_timesteps = require_steps(n_timesteps, "revolve")
        self.n_checkpoints = n_checkpoints
        self.checkpoint = checkpoint
        self.fwd_operator = fwd_operator
        self.rev_operator = rev_operator
        self.timings = timings
        self.profiler = profiler
        for name in ("save_checkpoint", "load_checkpoint", "remove_checkpoint"):
            if hasattr(self, name):
                raise ArgumentError(
                    f"{type(self).__name__} defines {name}, which is never called; "
                    "checkpoints are copied by get_data and get_data_location of the "
                    "checkpoint, or by save and load of a storage of your own"
                )
        for name, operator in (("fwd_operator", fwd_operator), ("rev_operator", rev_operator)):
            if not callable(getattr(operator, "apply", None)):
                raise ArgumentError(f"{name}={operator!r} must have apply(t_start, t_end)")
        self._chain = OperatorChain(fwd_operator, rev_operator, profiler)
        self._comm = defaults.comm if comm is None else comm
        self._assumed: Planner | None = None  # plans by costs in steps
        self._first_plan: Callable[[], Plan] | None = None  # before a sweep

    # -------------------------------------------------------------------- life

    def _run_on(
        self,
        *,
        memory: Budget | int | str,
        tiers: Tiers | None,
        planner: str | Plan | Planner,
        costs: Costs | StageCosts | None = None,
        compression: Compression | None = None,
        progress: bool | None = None,
        assumed: tuple[float, float] | None = None,
    ) -> None:
        """Set up the sweeps.

        `assumed` are the costs of a forward and of an adjoint step: then a `planner` for
        them makes the plan of every sweep, whatever seconds the sweep before has shown.
        """
        if assumed is not None:
            assert callable(planner) and not isinstance(planner, Plan)
            assert isinstance(memory, Budget) and memory.slots is not None
            self._assumed = own = planner
            costs = in_steps = Costs(
                forward_step_s=assumed[0],
                reverse_step_s=assumed[1],
                tape_step_s=0.0,  # part of the adjoint step, as pyrevolve counts
                state_bytes=max(1, int(self.checkpoint.nbytes)),
                tape_bytes=NOT_KEPT,
                tiers=() if tiers is None else (Tier("disk"),),
            )

            def planner(costs: Costs, slots: int, n_steps: int | None) -> Plan:
                if costs.state_bytes != in_steps.state_bytes:
                    return own(replace(in_steps, state_bytes=costs.state_bytes), slots, n_steps)
                return own(in_steps, slots, n_steps)

            self._first_plan = partial(own, costs, memory.slots, self.n_timesteps)
        elif isinstance(costs, Costs) and costs.tape_bytes < NOT_KEPT:
            costs = replace(costs, tape_bytes=NOT_KEPT)  # of these operators one tape exists
        restored = self.n_timesteps > 1 or assumed is None  # measuring puts state 0 back
        self._states = OperatorStates(
            self.checkpoint,
            compression,
            self.profiler,
            restored=restored,
            varied=isinstance(costs, StageCosts) or planner == SURVEY,
        )
        decides = tiers is not None or assumed is None
        ranks = ranks_of(self.checkpoint, self._comm, decides=decides)
        make: Callable[..., Reversal[Checkpoint, None] | MPIReversal[Checkpoint, None]] = Reversal
        if ranks is not None:
            make = partial(MPIReversal, comm=ranks)
        made = make(
            self._chain,
            n_steps=self.n_timesteps,
            memory=memory,
            tiers=tiers,
            planner=planner,
            costs=costs,
            progress=progress,
            states=self._states,
        )
        self._reversal = made
        # Ranks collect it at other moments: nothing that they would have to do together.
        self._close = made.let_go if isinstance(made, MPIReversal) else made.close
        self._finalize()

    def _finalize(self) -> None:
        """Have threads and files go when the revolver does: its users never close it."""
        self._closer = weakref.finalize(self, self._close)

    def close(self) -> None:
        """Stop threads and give memory and disk back; another sweep opens them again."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ sweeps

    def apply_forward(self) -> None:
        """Run the forward operator over all time steps, keeping checkpoints.

        May be called again for another sweep, after the operators' arrays were
        set to the initial state.  With `memory`, `tiers` or `planner` and no
        `costs`, the first steps of the first call are timed, and the rest is
        planned.

        Raises
        ------
        StateError
            If the arrays change their number, shape or dtype.
        """
        self._states.begin()
        self._ready("forward").forward(self.checkpoint)

    def apply_reverse(self) -> None:
        """Run the adjoint operator over all time steps, from the last to the first.

        Raises
        ------
        ArgumentError
            Without an `apply_forward` before it: each serves one.
        """
        self._ready("reverse").reverse(None)

    def _ready(self, sweep: str) -> Reversal[Checkpoint, None] | MPIReversal[Checkpoint, None]:
        """Return what runs a sweep, which is closed when this revolver goes."""
        if not self._closer.alive:
            self._finalize()
        if self.profiler is not None:
            self.profiler.section = sweep
        return self._reversal

    def report(self) -> Report:
        """Return what the last complete sweep did.

        Where costs were not measured, the prediction is made in hindsight,
        from those that the sweep has shown.
        """
        report = self._reversal.report()
        if self._assumed is None:
            return report
        plan = self._assumed(report.seen, report.plan.slots, self.n_timesteps)
        return replace(report, plan=plan)

    @property
    def plan(self) -> Plan:
        """The plan of the sweeps; made at the first `apply_forward` if costs are measured."""
        if self._reversal.plan is not None:
            return self._reversal.plan
        if self._first_plan is None:
            raise ArgumentError(
                "the plan is made by the first apply_forward(), from measured costs"
            )
        return self._first_plan()


def ranks_of(checkpoint: object, comm: Communicator | None, *, decides: bool) -> Ranks | None:
    """Return the ranks that run the same steps together; None if this process runs them alone.

    Parameters
    ----------
    checkpoint : Checkpoint
        Devito's own knows its grid, and so the communicator.
    comm : mpi4py.MPI.Comm or None
        As the user has given it.
    decides : bool
        Whether this process would decide by its own clock or its own disk what to run.

    Raises
    ------
    ArgumentError
        If it would, several ranks were started, and nothing tells whether they share the steps.
    """
    if comm is None:
        if world_size() == 1:
            return None
        known = devito_checkpoint()
        if known is not None and isinstance(checkpoint, known):
            devitos: Any = checkpoint
            comm = devitos.objects[0].grid.distributor.comm
            mpi: Any = sys.modules["mpi4py.MPI"]
            if comm == mpi.COMM_NULL:  # Devito runs without MPI: each rank its own grid
                return None
        elif decides:
            raise ArgumentError(
                f"MPI started {world_size()} ranks, and with tiers or measured costs "
                "each would run other steps than the others; give comm=, the communicator of the "
                "ranks whose operators exchange data (MPI.COMM_SELF if none do), to the revolver "
                "or to install()"
            )
        else:
            return None
    assert comm is not None
    return shared_ranks(comm)


class SingleLevelRevolver(BaseRevolver):
    """Revolve over one storage, in memory or on disk.

    Parameters
    ----------
    n_checkpoints : int or None
        Checkpoints; by `adjust(n_timesteps)` if None.
    compression_params : mapping, optional
        For `init_compression`; in memory only.
    diskstorage : bool
        Keep all checkpoints on disk; transfers run beside the operators
        through four states of memory.
    filedir, singlefile
        Folder on the disk; there is always one file.
    memory : int, str or Budget, optional
        Memory for checkpoints, such as `"2 GiB"`, in place of `n_checkpoints`.
    tiers : str, Store or sequence of them, optional
        Slow tiers such as `"file:///scratch"`, to which states are streamed.
    planner : str, Plan or callable, optional
        As for `multistage.Reversal`; `"auto"` if another of these options is given;
        `"survey"` for time steps that differ, which the first sweep then measures.
    costs : Costs or StageCosts, optional
        Assumed costs, such as `report().seen` of a revolver before; where any of
        these options is given without them, the first steps of the sweep are timed.
        StageCosts are for time steps that differ in cost, or in the arrays of their
        checkpoints: one Stage for each time step.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook.
    comm : mpi4py.MPI.Comm, optional
        See `BaseRevolver`.

    Notes
    -----
    The first parameters, and errors, are those of `BaseRevolver`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fwd_operator: Operator,
        rev_operator: Operator,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        compression_params: Params | None = None,
        diskstorage: bool = False,
        filedir: str | None = "./",
        singlefile: bool = True,
        *,
        memory: Budget | int | str | None = None,
        tiers: Tiers | None = None,
        planner: str | Plan | Planner | None = None,
        costs: Costs | StageCosts | None = None,
        progress: bool | None = None,
        comm: Communicator | None = None,
    ) -> None:
        three = checkpoint, fwd_operator, rev_operator
        super().__init__(*three, n_checkpoints, n_timesteps, timings, profiler, comm)
        if n_checkpoints is None:
            if not diskstorage and memory is tiers is planner is None:
                memory, tiers, planner = defaults.memory, defaults.tiers, defaults.planner
                costs = costs or defaults.costs
                progress = defaults.progress if progress is None else progress
            n_checkpoints = adjust(self.n_timesteps)
        elif memory is not None:
            raise ArgumentError(
                f"n_checkpoints={n_checkpoints} and memory={memory!r}: give one, and None "
                "in place of n_checkpoints"
            )
        else:
            n_checkpoints = whole(n_checkpoints, "n_checkpoints", 1)
        self.n_checkpoints = n_checkpoints
        compression = _compression_of(compression_params, diskstorage or tiers is not None)
        chosen = any(x is not None for x in (memory, tiers, planner, costs))
        if diskstorage:
            if tiers is not None and filedir != "./":
                raise ArgumentError(f"filedir={filedir!r} and tiers={tiers!r}: give one of them")
            tiers = open_folder(filedir) if tiers is None else tiers
        if not chosen:
            memory = Budget(slots=TRANSIT if diskstorage else n_checkpoints)
            on_disk = sealing(partial(revolve_on_disk, n_checkpoints))
            planner = on_disk if diskstorage else PLANNERS["revolve"]
        self._run_on(
            memory=f"{n_checkpoints} slots" if memory is None else memory,
            tiers=tiers,
            planner="auto" if planner is None else planner,
            costs=costs,
            compression=compression,
            progress=progress,
            assumed=None if chosen else (1.0, 1.0),
        )


def _compression_of(params: Params | None, is_slow: bool) -> Compression | None:
    """Return the compression of checkpoints in memory; those in a slow tier have none."""
    compression = None if params is None else init_compression(params)
    if params is None or params.get("scheme") is None:
        return None
    if is_slow:
        raise ArgumentError("compression_params are for checkpoints in memory alone")
    return compression


class MemoryRevolver(SingleLevelRevolver):
    """Revolve in memory; with `tiers`, streaming beyond it.

    Parameters are those of `SingleLevelRevolver`.
    """


class DiskRevolver(SingleLevelRevolver):
    """Revolve on disk, transfers beside the operators; with `memory`, streaming.

    Parameters are those of `SingleLevelRevolver`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fwd_operator: Operator,
        rev_operator: Operator,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        filedir: str | None = "./",
        singlefile: bool = True,
        *,
        memory: Budget | int | str | None = None,
        tiers: Tiers | None = None,
        planner: str | Plan | Planner | None = None,
        costs: Costs | StageCosts | None = None,
        progress: bool | None = None,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(
            checkpoint,
            fwd_operator,
            rev_operator,
            n_checkpoints,
            n_timesteps,
            timings,
            profiler,
            None,
            True,
            filedir,
            singlefile,
            memory=memory,
            tiers=tiers,
            planner=planner,
            costs=costs,
            progress=progress,
            comm=comm,
        )


Revolver = MemoryRevolver


class MultiLevelRevolver(BaseRevolver):
    """H-Revolve over a list of storages, fastest first.

    Parameters
    ----------
    storage_list : sequence of Storage
        Their `n_ckp`, `wd` and `rd` decide what is kept where.
    uf, ub, up : float
        Cost of a forward step, of an adjoint step and, without effect as in
        pyrevolve, of the turn.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook.
    comm : mpi4py.MPI.Comm, optional
        See `BaseRevolver`.

    Notes
    -----
    The choice is H-Revolve's, optimal where transfers stop the computing; they
    then run beside the operators as far as four states of memory allow.  The
    first parameters, and errors, are those of `BaseRevolver`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fwd_operator: Operator,
        rev_operator: Operator,
        n_timesteps: int,
        storage_list: Sequence[Storage],
        timings: object = None,
        profiler: Profiler | None = None,
        uf: float = 1,
        ub: float = 1,
        up: float = 1,
        *,
        progress: bool | None = None,
        comm: Communicator | None = None,
    ) -> None:
        self.storage_list = list(storage_list or ())
        if not self.storage_list:
            raise ArgumentError("storage_list must be a list of storages, fastest first")
        for name, cost in (("uf", uf), ("ub", ub), ("up", up)):
            if not 0 <= cost < float("inf") or (name == "uf" and cost == 0):
                raise ArgumentError(f"{name}={cost} must be finite, and not negative (uf above 0)")
        super().__init__(
            checkpoint,
            fwd_operator,
            rev_operator,
            n_timesteps,
            n_timesteps,
            timings=timings,
            profiler=profiler,
            comm=comm,
        )
        levels = tuple(_level(k, storage) for k, storage in enumerate(self.storage_list))
        writes, reads = [level.write_s for level in levels], [level.read_s for level in levels]
        if writes != sorted(writes) or reads != sorted(reads):
            warnings.warn(
                "H-Revolve is optimal only for costs that grow with the level", stacklevel=2
            )
        slow, first = self.storage_list, levels[0]
        if type(slow[0]) is NumpyStorage and (len(slow) == 1 or first == Level(first.capacity)):
            slow = slow[1:]
        else:  # one state in fast memory, from which steps begin
            levels = (Level(1), *levels)
        slots = min(levels[0].capacity or 1, self.n_timesteps) + (TRANSIT if slow else 0)
        self._run_on(
            memory=Budget(slots=slots),
            tiers=[storage.tier() for storage in slow] or None,
            planner=sealing(partial(h_revolve_on_storages, levels, float(uf)))
            if slow
            else PLANNERS["revolve"],
            progress=progress,
            assumed=(float(uf), float(ub)),
        )


def _level(number: int, storage: Storage) -> Level:
    size, write, read = int(storage.n_ckp), float(storage.wd), float(storage.rd)
    if size < 1 or not (0 <= write < float("inf") and 0 <= read < float("inf")):
        raise ArgumentError(
            f"level {number} has size {size}, wd={write}, rd={read}; "
            "a size is at least 1, costs are finite and not negative"
        )
    return Level(size, write, read)


# ------------------------------------------------------------------------- planners


def adjust(timesteps: int) -> int:
    """Return a number of snapshots that keeps memory and recomputation both logarithmic.

    About as many snapshots as runs of a step: the least such pair that
    reaches `timesteps`.

    Examples
    --------
    >>> adjust(20), adjust(21), adjust(1000)
    (3, 4, 7)
    """
    n = require_steps(timesteps, "revolve")
    snapshots = repeats = 1
    while beta(snapshots, repeats) < n:
        snapshots, repeats = snapshots + 1, repeats + 1
    while True:
        fewer = (snapshots - 1, repeats) if snapshots > repeats else (snapshots, repeats - 1)
        if min(fewer) < 1 or beta(*fewer) < n:
            return snapshots
        snapshots, repeats = fewer


def revolve_on_disk(n_checkpoints: int, costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Plan Revolve with its checkpoints on the tier, transfers beside the steps."""
    n = require_steps(n_steps, "revolve")

    def make() -> Schedule:
        plain = forward_and_reverse(reverse_actions(0, n, n_checkpoints))
        return overlap(on_tier(plain), slots, tape_slots=costs.tape_slots)

    plain = revolve(costs, n_checkpoints, n)
    return replace(
        plain,
        planner="revolve on disk",
        memory_bytes=slots * costs.state_bytes,
        make=make,
        peak_bytes=min(slots, n) * costs.state_bytes,
        note="Revolve with all checkpoints on disk; transfers are taken to hide behind steps.",
    )


def h_revolve_on_storages(
    levels: tuple[Level, ...], uf: float, costs: Costs, slots: int, n_steps: int | None
) -> Plan:
    """Plan H-Revolve over storages, the first of them fast memory."""
    n = require_steps(n_steps, "h-revolve")
    solved = solve(levels, n, uf)

    def make() -> Schedule:
        return overlap(solved.schedule(), slots, tape_slots=costs.tape_slots)

    return Plan(
        planner="h-revolve",
        costs=costs,
        n_steps=n,
        memory_bytes=slots * costs.state_bytes,
        make=make,
        makespan_s=solved.seconds / uf * costs.forward_step_s + n * costs.turn_s,
        forward_steps=count_actions(solved.schedule(), len(levels) - 1).forward_steps,
        peak_bytes=min(slots, n) * costs.state_bytes,
        tiers=costs.tiers,
        note="H-Revolve over the storages, by their wd and rd; no transfer is taken to hide.",
    )
