"""The revolvers: pyrevolve's front ends, each a plan and places for a `Reversal`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...actions import Schedule
from ...backends.urls import Tiers
from ...errors import ArgumentError
from ...model.budget import Budget
from ...model.costs import Costs
from ...planners import PLANNERS, Plan, Planner
from ...planners.base import require_steps
from ...planners.ranking import sealing
from ...planners.single.binomial import beta, forward_and_reverse, reverse_actions
from ...planners.single.revolve import revolve
from ...planners.streaming.overlap import on_tier, overlap
from ...planners.synchronous.hierarchy import count_operations, hierarchy_schedule
from ...planners.synchronous.levels import Level, solve
from ...support.values import whole
from ..ranks import Communicator
from .base import TRANSIT, BaseRevolver, defaults
from .compression import Params, init_compression
from .operators import Checkpoint, Compression, Operator, Profiler
from .storage import NumpyStorage, Storage, open_folder


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
        As for `multistage.Reversal`; `"auto"` if another of these options is given.
    costs : Costs, optional
        Assumed costs, such as `report().seen` of a revolver before; where any of
        these options is given without them, the first steps of the sweep are timed.
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
        costs: Costs | None = None,
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
            comm,
        )
        if n_checkpoints is None:
            if defaults.given and not diskstorage and memory is tiers is planner is None:
                memory, tiers, planner = defaults.memory, defaults.tiers, defaults.planner
                costs = costs or defaults.costs
                progress = defaults.progress if progress is None else progress
            n_checkpoints = adjust(self.n_timesteps)
        else:
            n_checkpoints = _number_given(n_checkpoints, memory)
        self.n_checkpoints = n_checkpoints
        compression = _compression_of(compression_params, diskstorage or tiers is not None)
        chosen = any(x is not None for x in (memory, tiers, planner, costs))
        self.filedir, self.singlefile = filedir, singlefile
        self.compression_params = compression_params
        if diskstorage:
            if tiers is not None and filedir != "./":
                raise ArgumentError(f"filedir={filedir!r} and tiers={tiers!r}: give one of them")
            tiers = open_folder(filedir) if tiers is None else tiers
        self._slots = TRANSIT if diskstorage else n_checkpoints
        if not chosen:
            memory, planner = Budget(slots=self._slots), _revolve_in(n_checkpoints, diskstorage)
        self._run_on(
            memory=f"{n_checkpoints} slots" if memory is None else memory,
            tiers=tiers,
            planner="auto" if planner is None else planner,
            costs=costs,
            compression=compression,
            progress=progress,
            assumed=None if chosen else (1.0, 1.0),
        )


def _revolve_in(n_checkpoints: int, on_disk: bool) -> Planner:
    """Return the planner that is pyrevolve's, in memory or on disk."""
    return sealing(partial(revolve_on_disk, n_checkpoints)) if on_disk else PLANNERS["revolve"]


def _number_given(n_checkpoints: int, memory: object) -> int:
    if memory is not None:
        raise ArgumentError(
            f"n_checkpoints={n_checkpoints} and memory={memory!r}: give one, and None "
            "in place of n_checkpoints"
        )
    return whole(n_checkpoints, "n_checkpoints", 1)


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
        costs: Costs | None = None,
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
        self.uf, self.ub, self.up = uf, ub, up
        levels = tuple(_level(k, storage) for k, storage in enumerate(self.storage_list))
        writes, reads = [level.write_s for level in levels], [level.read_s for level in levels]
        if writes != sorted(writes) or reads != sorted(reads):
            warnings.warn(
                "H-Revolve is optimal only for costs that grow with the level", stacklevel=2
            )
        slow = self.storage_list
        if type(slow[0]) is NumpyStorage:
            slow = slow[1:]
        else:  # one state in fast memory, from which steps begin
            levels = (Level(1), *levels)
        self._slots = min(levels[0].capacity or 1, self.n_timesteps) + (TRANSIT if slow else 0)
        self._run_on(
            memory=Budget(slots=self._slots),
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
    capacity, tiers = levels[0].capacity or 1, tuple(range(len(levels) - 1))

    def make() -> Schedule:
        schedule = hierarchy_schedule(solved, capacity, tiers)
        return overlap(schedule, slots, tape_slots=costs.tape_slots)

    return Plan(
        planner="h-revolve",
        costs=costs,
        n_steps=n,
        memory_bytes=slots * costs.state_bytes,
        make=make,
        makespan_s=solved.seconds / uf * costs.forward_step_s + n * costs.turn_s,
        forward_steps=count_operations(solved, capacity, tiers).forward_steps,
        peak_bytes=min(slots, n) * costs.state_bytes,
        tiers=costs.tiers,
        note="H-Revolve over the storages, by their wd and rd; no transfer is taken to hide.",
    )
