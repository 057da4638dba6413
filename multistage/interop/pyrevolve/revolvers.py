"""The revolvers: pyrevolve's front ends, each a plan and places for a `Reversal`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...backends.urls import Tiers
from ...costs import Budget, Costs
from ...errors import ArgumentError
from ...plan import PLANNERS, Plan, Planner
from ...plan.base import sealing
from ...plan.levels import Level
from .base import TRANSIT, BaseRevolver, defaults
from .compression import init_compression
from .crevolve import adjust
from .operators import Compression
from .planners import h_revolve_on_storages, revolve_on_disk
from .profiling import Profiler
from .schedulers import Architecture
from .storage import BytesStorage, DiskStorage, NumpyStorage, Storage, open_folder


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
        As for `multistage.Reversal`; `"auto"` if `memory` or `tiers` is given.
    costs : Costs, optional
        Assumed costs; measured in a few extra steps if not given.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook.

    Notes
    -----
    The first parameters, and errors, are those of `BaseRevolver`.
    """

    def __init__(
        self,
        checkpoint: Any,
        fwd_operator: Any,
        rev_operator: Any,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        compression_params: Mapping[str, Any] | None = None,
        diskstorage: bool = False,
        filedir: str | None = "./",
        singlefile: bool = True,
        *,
        memory: Budget | int | str | None = None,
        tiers: Tiers | None = None,
        planner: str | Plan | Planner | None = None,
        costs: Costs | None = None,
        progress: bool | None = None,
    ) -> None:
        super().__init__(
            checkpoint,
            fwd_operator,
            rev_operator,
            n_checkpoints,
            n_timesteps,
            timings=timings,
            profiler=profiler,
        )
        n = self.n_timesteps
        if n_checkpoints is None:
            if defaults and not diskstorage and memory is tiers is planner is None:
                memory, tiers, planner = map(defaults.get, ("memory", "tiers", "planner"))
                costs = costs or defaults.get("costs")
                progress = defaults.get("progress") if progress is None else progress
            n_checkpoints = adjust(n)
        elif n_checkpoints < 1:
            raise ArgumentError(f"n_checkpoints={n_checkpoints} must be at least 1")
        self.n_checkpoints = n_checkpoints
        compression = None
        if compression_params is not None and compression_params.get("scheme") is not None:
            if diskstorage or tiers is not None:
                raise ArgumentError("compression_params are for checkpoints in memory alone")
            compression = init_compression(compression_params)
        chosen = not (memory is None and tiers is None and planner is None)
        self.filedir, self.singlefile = filedir, singlefile
        self._on_disk = diskstorage and not chosen
        self._add_description(compression)
        if chosen:
            if diskstorage and tiers is None:
                tiers = open_folder(filedir)
            self._run_on(
                budget=f"{n_checkpoints} slots" if memory is None else memory,
                tier=tiers,
                planner="auto" if planner is None else planner,
                costs=costs,
                compression=compression,
                progress=progress,
            )
            return
        self._slots = TRANSIT if diskstorage else n_checkpoints
        self._run_on(
            budget=Budget(slots=self._slots),
            tier=open_folder(filedir) if diskstorage else None,
            planner=sealing(partial(revolve_on_disk, n_checkpoints))
            if diskstorage
            else PLANNERS["revolve"],
            compression=compression,
            progress=progress,
            assumed=(1.0, 1.0),
        )

    def _add_description(self, compression: Compression | None) -> None:
        checkpoint, profiler = self.checkpoint, self.profiler
        assert self.n_checkpoints is not None
        size, count, dtype = checkpoint.size, self.n_checkpoints, checkpoint.dtype
        self.storage_list = [
            DiskStorage(size, count, dtype, profiler, self.filedir)
            if self._on_disk
            else NumpyStorage(size, count, dtype, profiler)
            if compression is None
            else BytesStorage(checkpoint.nbytes, count, dtype, compression, profiler=profiler)
        ]

    def _is_fast(self, level: int) -> bool:
        return level == 0 and not self._on_disk


class MemoryRevolver(SingleLevelRevolver):
    """Revolve in memory; with `tiers`, streaming beyond it.

    Parameters are those of `SingleLevelRevolver`.
    """

    def __init__(
        self,
        checkpoint: Any,
        fwd_operator: Any,
        rev_operator: Any,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        compression_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            checkpoint,
            fwd_operator,
            rev_operator,
            n_checkpoints,
            n_timesteps,
            timings,
            profiler,
            compression_params,
            **options,
        )


class DiskRevolver(SingleLevelRevolver):
    """Revolve on disk, transfers beside the operators; with `memory`, streaming.

    Parameters are those of `SingleLevelRevolver`.
    """

    def __init__(
        self,
        checkpoint: Any,
        fwd_operator: Any,
        rev_operator: Any,
        n_checkpoints: int | None,
        n_timesteps: int,
        timings: object = None,
        profiler: Profiler | None = None,
        filedir: str | None = "./",
        singlefile: bool = True,
        **options: Any,
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
            **options,
        )


Revolver = MemoryRevolver


class MultiLevelRevolver(BaseRevolver):
    """H-Revolve over a list of storages, fastest first.

    Parameters
    ----------
    storage_list : sequence of Storage
        Their `n_ckp`, `wd` and `rd` decide what is kept where.
    uf, ub, up : float
        Cost of a forward step, of an adjoint step and of the turn.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook.

    Notes
    -----
    The choice is H-Revolve's, optimal where transfers stop the computing; they
    then run beside the operators as far as four states of memory allow.  The
    first parameters, and errors, are those of `BaseRevolver`.
    """

    def __init__(
        self,
        checkpoint: Any,
        fwd_operator: Any,
        rev_operator: Any,
        n_timesteps: int,
        storage_list: Sequence[Storage],
        timings: object = None,
        profiler: Profiler | None = None,
        uf: float = 1,
        ub: float = 1,
        up: float = 1,
        *,
        progress: bool | None = None,
    ) -> None:
        if storage_list is None:
            raise ArgumentError("storage_list must be a list of storages, fastest first")
        super().__init__(
            checkpoint,
            fwd_operator,
            rev_operator,
            n_timesteps,
            n_timesteps,
            storage_list=storage_list,
            timings=timings,
            profiler=profiler,
        )
        self._progress = progress
        self.arch: Architecture | None = None
        self.uf, self.ub, self.up = uf, ub, up
        if self.storage_list:
            self.reload_scheduler(uf, ub, up)

    def reload_scheduler(self, uf: float = 1, ub: float = 1, up: float = 1) -> None:
        """Plan anew, for the storages as they are in `storage_list` now."""
        for name, cost in (("uf", uf), ("ub", ub), ("up", up)):
            if not 0 <= cost < float("inf") or (name == "uf" and cost == 0):
                raise ArgumentError(f"{name}={cost} must be finite, and not negative (uf above 0)")
        self.uf, self.ub, self.up = uf, ub, up
        for storage in self.storage_list:
            storage.profiler = self.profiler
        self.arch = Architecture(self.storage_list)
        levels = tuple(
            Level(int(size), float(write), float(read))
            for size, write, read in zip(self.arch.sizes, self.arch.wd, self.arch.rd, strict=True)
        )
        if self.arch.wd != sorted(self.arch.wd) or self.arch.rd != sorted(self.arch.rd):
            warnings.warn(
                "H-Revolve is optimal only for costs that grow with the level", stacklevel=3
            )
        fast = type(self.storage_list[0]) is NumpyStorage
        slow = self.storage_list[1:] if fast else self.storage_list
        capacity = min(levels[0].capacity or 0, self.n_timesteps) if fast else 0
        self._slots = capacity + (TRANSIT if slow else 0)
        self._run_on(
            budget=Budget(slots=max(1, self._slots)),
            tier=[storage.tier() for storage in slow] or None,
            planner=sealing(partial(h_revolve_on_storages, levels, fast, float(uf))),
            progress=self._progress,
            assumed=(float(uf), float(ub)),
        )

    def addStorage(self, new_storage: Storage) -> None:
        """Append a storage; `reload_scheduler` plans with it."""
        self.storage_list.append(new_storage)

    def removeStorage(self, st_idx: int) -> None:
        """Remove the storage of that index, if there is one."""
        if st_idx < len(self.storage_list):
            del self.storage_list[st_idx]

    def resetStorageList(self) -> None:
        """Remove all storages."""
        self.storage_list.clear()

    def addDiskStorage(
        self, filedir: str = "./", singlefile: bool = False, wd: float = 0, rd: float = 0
    ) -> int:
        """Append a `DiskStorage` for all time steps; return its index."""
        size, dtype = self.checkpoint.size, self.checkpoint.dtype
        self.addStorage(
            DiskStorage(
                size, self.n_timesteps, dtype, self.profiler, filedir, singlefile, wd=wd, rd=rd
            )
        )
        return len(self.storage_list) - 1

    def addNumpyStorage(self, compression_params: Mapping[str, Any] | None = None) -> int:
        """Append a `NumpyStorage`, or a `BytesStorage` if it compresses; return its index."""
        if compression_params is not None and compression_params.get("scheme") is not None:
            return self.addByteStorage(compression_params)
        size, dtype = self.checkpoint.size, self.checkpoint.dtype
        self.addStorage(NumpyStorage(size, self.n_timesteps, dtype, self.profiler))
        return len(self.storage_list) - 1

    def addByteStorage(self, compression_params: Mapping[str, Any]) -> int:
        """Append a `BytesStorage`; return its index."""
        compression = init_compression(compression_params)
        nbytes, dtype = self.checkpoint.nbytes, self.checkpoint.dtype
        self.addStorage(
            BytesStorage(nbytes, self.n_timesteps, dtype, compression, profiler=self.profiler)
        )
        return len(self.storage_list) - 1

    def _is_fast(self, level: int) -> bool:
        return level == 0 and type(self.storage_list[0]) is NumpyStorage
