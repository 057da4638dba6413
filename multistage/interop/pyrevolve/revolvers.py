"""The revolvers: pyrevolve's front ends, each a plan and places for a `Reversal`."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from ...actions import Advance, Answer, Await, Drop, Free, Get, Load, Put, Save, Schedule
from ...backends import Store
from ...costs import NOT_KEPT, Budget, Costs, Tier
from ...errors import ArgumentError
from ...plan import Plan, Planner
from ...plan.base import require_steps
from ...plan.binomial import forward_and_reverse, nu, reverse_actions
from ...plan.bound import lower_bound
from ...plan.levels import ADVANCE, DROP, ORIGIN, READ, REVERSE, WRITE, Hierarchy, Level, solve
from ...plan.overlap import on_tier, overlap
from ...plan.revolve import revolve
from ...report import Report
from ...reversal import Reversal
from .compression import init_compression
from .crevolve import adjust
from .operators import Compression, OperatorChain, OperatorStates
from .profiling import Profiler
from .schedulers import Architecture
from .storage import BytesStorage, DiskStorage, NumpyStorage, Storage, open_folder

# States in memory on their way to or from a disk: two each way.
_TRANSIT = 4

Tiers = str | Store | Sequence[str | Store]

# What `install` gave for revolvers whose maker leaves the memory open.
_defaults: dict[str, Any] = {}


def set_defaults(**options: Any) -> None:
    """Set `memory`, `tiers`, `planner`, `costs` and `progress` of revolvers that are given none.

    They hold for single-level revolvers in memory made with `n_checkpoints=None`.
    """
    unknown = set(options) - {"memory", "tiers", "planner", "costs", "progress"}
    if unknown:
        raise ArgumentError(f"{sorted(unknown)} are no options of a revolver")
    _defaults.clear()
    _defaults.update({name: value for name, value in options.items() if value is not None})


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
        Gets the milliseconds spent in operators and copies.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        Before any operator runs.
    """

    def __init__(
        self,
        checkpoint: Any,
        fwd_operator: Any,
        rev_operator: Any,
        n_checkpoints: int | None,
        n_timesteps: int,
        storage_list: Sequence[Storage] | None = None,
        scheduler: object = None,
        timings: object = None,
        profiler: Profiler | None = None,
    ) -> None:
        if scheduler is not None:
            raise ArgumentError("scheduler= is not supported; give planner= or use a subclass")
        self.n_timesteps = require_steps(n_timesteps, "revolve")
        self.n_checkpoints = n_checkpoints
        self.checkpoint = checkpoint
        self.fwd_operator = fwd_operator
        self.rev_operator = rev_operator
        self.timings = timings
        self.profiler = Profiler() if profiler is None else profiler
        self.storage_list = list(storage_list or ())
        for name, operator in (("fwd_operator", fwd_operator), ("rev_operator", rev_operator)):
            if not callable(getattr(operator, "apply", None)):
                raise ArgumentError(f"{name}={operator!r} must have apply(t_start, t_end)")
        self._chain = OperatorChain(fwd_operator, rev_operator)
        self._states: OperatorStates | None = None
        self._reversal: Reversal[Any, Any] | None = None
        self._assumed: Planner | None = None  # plans on costs that nobody measured
        self._closer: Callable[[], object] | None = None

    # -------------------------------------------------------------------- life

    def _run_on(
        self,
        *,
        budget: Budget | int | str,
        tier: Tiers | None,
        planner: str | Plan | Planner,
        costs: Costs | None = None,
        compression: Compression | None = None,
        progress: bool | None = None,
        assumed: tuple[float, float] | None = None,
    ) -> None:
        """Set up the sweeps.

        `assumed` are the costs of a forward and of an adjoint step for a
        `planner` that needs no others.
        """
        self.close()
        self._assumed = None
        if assumed is not None:
            assert callable(planner) and not isinstance(planner, Plan)
            self._assumed = planner
            costs = Costs(
                forward_step_s=assumed[0],
                reverse_step_s=assumed[1],
                tape_step_s=0.0,  # part of the adjoint step, as pyrevolve counts
                state_bytes=max(1, int(self.checkpoint.nbytes)),
                tape_bytes=NOT_KEPT,
                tiers=() if tier is None else (Tier("disk"),),
            )
        restored = self.n_timesteps > 1 or assumed is None  # measuring puts state 0 back
        self._states = OperatorStates(self.checkpoint, compression, restored=restored)
        self._reversal = Reversal(
            self._chain,
            n_steps=self.n_timesteps,
            budget=budget,
            tier=tier,
            planner=planner,
            costs=costs,
            progress=progress,
            states=self._states,
        )
        # Threads and files go when the revolver does: its users never close it.
        self._closer = weakref.finalize(self, self._reversal.close)

    def close(self) -> None:
        """Stop threads and give memory and disk back; another sweep opens them again."""
        if self._closer is not None:
            self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ sweeps

    def apply_forward(self) -> None:
        """Run the forward operator over all time steps, keeping checkpoints.

        May be called again for another sweep, after the operators' arrays were
        set to the initial state.  With `memory`, `tiers` or `planner` and no
        `costs`, the first call runs a few steps more, to measure them, and
        puts the arrays back.

        Raises
        ------
        StateError
            If the arrays change their number, shape or dtype.
        """
        reversal = self._ready()
        assert self._states is not None
        self._states.forget()
        try:
            reversal.forward(self.checkpoint)
        finally:
            self._flush("forward", taped="lastfw")

    def apply_reverse(self) -> None:
        """Run the adjoint operator over all time steps, from the last to the first.

        Raises
        ------
        ArgumentError
            Without an `apply_forward` before it: each serves one.
        """
        try:
            self._ready().reverse(None)
        finally:
            self._flush("reverse", taped="reverse")

    def _flush(self, section: str, *, taped: str) -> None:
        """Hand what a sweep's operators and copies took to the profiler."""
        chain, states, profiler = self._chain, self._states, self.profiler
        chain.advanced.flush(profiler, section, "advance")
        chain.taped.flush(profiler, section, taped)
        chain.reversed.flush(profiler, section, "reverse")
        if states is not None:
            states.saved.flush(profiler, "storage", "copy_save")
            states.loaded.flush(profiler, "storage", "copy_load")

    def _ready(self) -> Reversal[Any, Any]:
        if self._reversal is None:
            raise ArgumentError("the revolver has no storage; add one and call reload_scheduler()")
        if self._closer is not None and not getattr(self._closer, "alive", True):
            self._closer = weakref.finalize(self, self._reversal.close)
        return self._reversal

    def report(self) -> Report:
        """Return what the last complete sweep did.

        Where costs were not measured, the prediction is made in hindsight,
        from those that the sweep has shown.
        """
        report = self._ready().report()
        if self._assumed is None:
            return report
        plan = self._assumed(report.seen, report.plan.slots, self.n_timesteps)
        return replace(report, plan=plan)

    @property
    def plan(self) -> Plan:
        """The plan of the sweeps; made at the first `apply_forward` if costs are measured."""
        reversal = self._ready()
        if reversal.plan is not None:
            return reversal.plan
        if self._assumed is None:
            raise ArgumentError(
                "the plan is made by the first apply_forward(), from measured costs"
            )
        assert reversal.costs is not None
        return self._assumed(reversal.costs, self._slots, self.n_timesteps)

    _slots = 0

    @property
    def makespan(self) -> float:
        """The predicted cost of both sweeps, in forward steps where costs are assumed."""
        return self.plan.makespan_s

    @property
    def ratio(self) -> float:
        """Forward steps over time steps, those right before their adjoint not counted."""
        return (self.plan.forward_steps - 1) / self.n_timesteps

    def storage_ckps(self, k: int = 0) -> list[int]:
        """Return the time steps of all checkpoints written to level k, in order."""
        kind = Save if self._is_fast(k) else Put
        first = not self._is_fast(0)
        found: list[int] = []
        token = 0
        schedule = self.plan.schedule()
        answer: Answer = None
        while True:
            try:
                action = schedule.send(answer)
            except StopIteration:
                return found
            answer = None
            if isinstance(action, Put | Get):
                answer, token = token, token + 1
            elif isinstance(action, Await):
                answer = True
            at = k if first else k - 1
            if isinstance(action, kind) and (kind is Save or getattr(action, "tier", 0) == at):
                found.append(action.step)

    def _is_fast(self, level: int) -> bool:
        return level == 0


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
            if _defaults and not diskstorage and memory is tiers is planner is None:
                memory, tiers, planner = map(_defaults.get, ("memory", "tiers", "planner"))
                costs = costs or _defaults.get("costs")
                progress = _defaults.get("progress") if progress is None else progress
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
        self._slots = _TRANSIT if diskstorage else n_checkpoints
        self._run_on(
            budget=Budget(slots=self._slots),
            tier=open_folder(filedir) if diskstorage else None,
            planner=partial(_revolve_on_disk, n_checkpoints) if diskstorage else revolve,
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
        self._slots = capacity + (_TRANSIT if slow else 0)
        self._run_on(
            budget=Budget(slots=max(1, self._slots)),
            tier=[storage.tier() for storage in slow] or None,
            planner=partial(_h_revolve, levels, fast, float(uf)),
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


# --------------------------------------------------------------------- planners


def _revolve_on_disk(n_checkpoints: int, costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Plan Revolve with its checkpoints on the tier, transfers beside the steps."""
    n = require_steps(n_steps, "revolve")

    def make() -> Schedule:
        plain = forward_and_reverse(reverse_actions(0, n, n_checkpoints))
        return overlap(on_tier(plain), slots, tape_slots=costs.tape_slots)

    plain = revolve(costs, n_checkpoints, n)
    return replace(
        plain,
        planner="revolve on disk",
        slots=slots,
        make=make,
        lower_bound_s=lower_bound(costs, slots, n),
        peak_slots=min(slots, n),
        note="Revolve with all checkpoints on disk; transfers are taken to hide behind steps.",
    )


def _h_revolve(
    levels: tuple[Level, ...], fast: bool, uf: float, costs: Costs, slots: int, n_steps: int | None
) -> Plan:
    """Plan H-Revolve over storages, level 0 in fast memory or on the first tier."""
    n = require_steps(n_steps, "h-revolve")
    solved = solve(levels, n, uf)
    capacity = levels[0].capacity or 1

    def make() -> Schedule:
        schedule = _on_storages(solved, capacity, first_tier=1 if fast else 0)
        return overlap(schedule if fast else on_tier(schedule), slots, tape_slots=costs.tape_slots)

    steps = 0
    for code, a, b in solved.operations():
        if code == REVERSE:
            steps += nu(b - a, capacity)
        elif code == ADVANCE:
            steps += b - a
    # What is not steps are transfers, in units of uf.
    transfers_s = (solved.seconds / uf - steps) * costs.forward_step_s
    return Plan(
        planner="h-revolve",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=make,
        makespan_s=steps * costs.forward_step_s + transfers_s + n * costs.turn_s,
        lower_bound_s=n * (costs.forward_step_s + costs.turn_s),
        forward_steps=steps + 1,
        peak_slots=min(slots, n),
        note="H-Revolve over the storages, by their wd and rd; no transfer is taken to hide.",
    )


def _on_storages(solved: Hierarchy, capacity: int, first_tier: int) -> Schedule:
    """Yield a hierarchy's actions: level 0 in slots, level k on tier k - `first_tier`."""
    operations = solved.operations()
    answer: bool | None = None
    ended = False
    while True:
        try:
            code, a, b = operations.send(answer)
        except StopIteration:
            return
        answer, tier = None, a - first_tier
        if code == REVERSE:
            piece = reverse_actions(a, b, capacity)
            yield from piece if ended else forward_and_reverse(piece)
            ended = True
        elif code == ADVANCE:
            yield Advance(a, b)
        elif code == ORIGIN:
            yield Load(0)
        elif code == WRITE:
            if a == 0:
                yield Save(b)
            else:
                yield Await((yield Put(b, tier)))  # type: ignore[arg-type]
        elif code == READ:
            if a:
                yield Await((yield Get(b, tier)))  # type: ignore[arg-type]
            yield Load(b)
            if a:
                yield Free(b)
        else:
            assert code == DROP
            yield Drop(b, tier) if a else Free(b)
