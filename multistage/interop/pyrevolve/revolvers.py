"""The revolvers: pyrevolve's front ends, each a plan and places for a `Reversal`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

from ...backends.urls import Tiers
from ...errors import ArgumentError
from ...model.budget import Budget
from ...model.costs import Costs
from ...planners import PLANNERS, Planner, UniformPlan
from ...planners.synchronous.levels import Level
from ...planners.uniform import sealing
from ...support.values import whole
from ..ranks import Communicator
from .base import TRANSIT, BaseRevolver, defaults
from .compression import Params, init_compression
from .operators import CheckpointLike, Compression, OperatorLike, Profiler
from .planners import adjust, h_revolve_on_storages, revolve_on_disk
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
    planner : str, UniformPlan or callable, optional
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
        checkpoint: CheckpointLike,
        fwd_operator: OperatorLike,
        rev_operator: OperatorLike,
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
        planner: str | UniformPlan | Planner | None = None,
        costs: Costs | None = None,
        progress: bool | None = None,
        comm: Communicator | None = None,
    ) -> None:
        three = checkpoint, fwd_operator, rev_operator
        super().__init__(
            *three, n_checkpoints, n_timesteps, timings=timings, profiler=profiler, comm=comm
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
        if chosen and diskstorage and tiers is not None and filedir != "./":
            raise ArgumentError(f"filedir={filedir!r} and tiers={tiers!r}: give one of them")
        self.filedir, self.singlefile = filedir, singlefile
        self.compression_params = compression_params
        if chosen:
            if diskstorage and tiers is None:
                tiers = open_folder(filedir)
            self._run_on(
                memory=f"{n_checkpoints} slots" if memory is None else memory,
                tiers=tiers,
                planner="auto" if planner is None else planner,
                costs=costs,
                compression=compression,
                progress=progress,
            )
        else:
            self._run_revolve(n_checkpoints, diskstorage, compression, progress)

    def _run_revolve(
        self,
        n_checkpoints: int,
        on_disk: bool,
        compression: Compression | None,
        progress: bool | None,
    ) -> None:
        """Run as pyrevolve does, by Revolve, in memory or on disk."""
        self._slots = TRANSIT if on_disk else n_checkpoints
        self._run_on(
            memory=Budget(slots=self._slots),
            tiers=open_folder(self.filedir) if on_disk else None,
            planner=sealing(partial(revolve_on_disk, n_checkpoints))
            if on_disk
            else PLANNERS["revolve"],
            compression=compression,
            progress=progress,
            assumed=(1.0, 1.0),
        )


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
        checkpoint: CheckpointLike,
        fwd_operator: OperatorLike,
        rev_operator: OperatorLike,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        filedir: str | None = "./",
        singlefile: bool = True,
        *,
        memory: Budget | int | str | None = None,
        tiers: Tiers | None = None,
        planner: str | UniformPlan | Planner | None = None,
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
        checkpoint: CheckpointLike,
        fwd_operator: OperatorLike,
        rev_operator: OperatorLike,
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
        fast = type(self.storage_list[0]) is NumpyStorage
        slow = self.storage_list[1:] if fast else self.storage_list
        capacity = min(levels[0].capacity or 0, self.n_timesteps) if fast else 0
        self._slots = capacity + (TRANSIT if slow else 0)
        self._run_on(
            memory=Budget(slots=max(1, self._slots)),
            tiers=[storage.tier() for storage in slow] or None,
            planner=sealing(partial(h_revolve_on_storages, levels, fast, float(uf))),
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
