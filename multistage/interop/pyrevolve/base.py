"""What all revolvers share: operators, options, ranks, and the `Reversal` that runs them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from types import TracebackType
from typing import Any, Self

from ...backends.base import Store
from ...backends.urls import Tiers, open_store, tier_names
from ...errors import ArgumentError
from ...model.budget import Budget
from ...model.costs import NOT_KEPT, Costs
from ...model.tier import Tier
from ...planners import Plan, Planner
from ...planners.base import require_steps
from ...report import Report
from ...reversal import Reversal
from ..mpi import MPIReversal
from ..ranks import Communicator, Ranks
from .operators import (
    Checkpoint,
    Compression,
    Operator,
    OperatorChain,
    OperatorStates,
    Profiler,
    devito_checkpoint,
)

# States in memory on their way to or from a disk: two each way.
TRANSIT = 4


@dataclass(slots=True)
class Options:
    """What `install` gave for revolvers whose maker leaves the memory open."""

    memory: Budget | int | str | None = None
    tiers: Tiers | None = None
    planner: str | Plan | Planner | None = None
    costs: Costs | None = None
    progress: bool | None = None
    comm: Communicator | None = None

    @property
    def given(self) -> bool:
        """Whether it gave any."""
        every = (self.memory, self.tiers, self.planner, self.costs, self.progress)
        return any(value is not None for value in every)


defaults = Options()


def set_defaults(given: Options) -> None:
    """Set the options of revolvers that are given none.

    They hold for single-level revolvers in memory made with `n_checkpoints=None`; `comm` for all.
    """
    for option in fields(Options):
        setattr(defaults, option.name, getattr(given, option.name))


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
        self.profiler = Profiler() if profiler is None else profiler
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
        self._chain = OperatorChain(fwd_operator, rev_operator)
        self._states: OperatorStates | None = None
        self._comm = defaults.comm if comm is None else comm
        self._reversal: Reversal[Checkpoint, None] | MPIReversal[Checkpoint, None] | None = None
        self._assumed: Planner | None = None  # plans on costs that were not measured
        self._costs: Costs | None = None
        self._closer: Callable[[], object] | None = None

    # -------------------------------------------------------------------- life

    def _run_on(
        self,
        *,
        memory: Budget | int | str,
        tiers: Tiers | None,
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
        if assumed is not None:
            assert callable(planner) and not isinstance(planner, Plan)
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
                """Plan in steps, whatever seconds the sweep before has shown."""
                return own(replace(in_steps, state_bytes=costs.state_bytes), slots, n_steps)

        elif costs is not None and costs.tape_bytes < NOT_KEPT:
            costs = replace(costs, tape_bytes=NOT_KEPT)  # of these operators one tape exists
        restored = self.n_timesteps > 1 or assumed is None  # measuring puts state 0 back
        self._states = OperatorStates(self.checkpoint, compression, restored=restored)
        self._costs = costs
        decides = tiers is not None or assumed is None
        ranks = ranks_of(self.checkpoint, self._comm, decides=decides)
        if ranks is None:
            self._reversal = Reversal(
                self._chain,
                n_steps=self.n_timesteps,
                memory=memory,
                tiers=tiers,
                planner=planner,
                costs=costs,
                progress=progress,
                states=self._states,
            )
        else:
            self._reversal = MPIReversal(
                self._chain,
                n_steps=self.n_timesteps,
                comm=ranks,
                memory=memory,
                tiers=_only(tiers),
                planner=planner,
                costs=costs,
                progress=progress,
                states=self._states,
            )
        self._finalize()

    def _finalize(self) -> None:
        """Have threads and files go when the revolver does: its users never close it."""
        made = self._reversal
        assert made is not None
        # Ranks collect it at other moments: nothing that they would have to do together.
        close = made.let_go if isinstance(made, MPIReversal) else made.close
        self._closer = weakref.finalize(self, close)

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
        `costs`, the first steps of the first call are timed, and the rest is
        planned.

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

    def _ready(
        self,
    ) -> Reversal[Checkpoint, None] | MPIReversal[Checkpoint, None]:
        assert self._reversal is not None
        if self._closer is not None and not getattr(self._closer, "alive", True):
            self._finalize()
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
        assert self._costs is not None
        return self._assumed(self._costs, self._slots, self.n_timesteps)

    _slots = 0


def _only(tiers: Tiers | None) -> Store | None:
    """Return the only tier, if there is one: ranks agree on one.  Raises ArgumentError."""
    names = tier_names(tiers)
    if len(names) > 1:
        raise ArgumentError(
            f"{len(names)} slow tiers on several ranks; ranks agree on one, such as a cascade "
            "'memory:8GiB > file:///scratch'"
        )
    return open_store(names[0]) if names else None


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
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if comm is None:
        if mpi is None or not mpi.Is_initialized() or mpi.COMM_WORLD.Get_size() == 1:
            return None
        known = devito_checkpoint()
        if known is not None and isinstance(checkpoint, known):
            devitos: Any = checkpoint
            comm = devitos.objects[0].grid.distributor.comm
            if comm == mpi.COMM_NULL:  # Devito runs without MPI: each rank its own grid
                return None
        elif decides:
            raise ArgumentError(
                f"MPI started {mpi.COMM_WORLD.Get_size()} ranks, and with tiers or measured costs "
                "each would run other steps than the others; give comm=, the communicator of the "
                "ranks whose operators exchange data (MPI.COMM_SELF if none do), to the revolver "
                "or to install()"
            )
        else:
            return None
    assert comm is not None
    return None if comm.Get_size() == 1 else _shared(comm)


def _shared(comm: Any) -> Ranks:
    """Return the ranks of a communicator, one duplicate of it for all revolvers.

    Freeing one is collective, and revolvers are dropped when the interpreter collects them,
    at other moments on every rank.  It is kept with the communicator, whose handle may be
    another's once it is freed.
    """
    found = comm.Get_attr(_key())
    if found is None:
        found = Ranks(comm)
        comm.Set_attr(_key(), found)
    assert isinstance(found, Ranks)
    return found


@cache
def _key() -> Any:
    mpi: Any = sys.modules["mpi4py.MPI"]
    return mpi.Comm.Create_keyval()
