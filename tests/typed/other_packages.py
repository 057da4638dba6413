"""Programs of users of other packages who check their types: mypy reads this, nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from multistage import Costs, Plan, plan, reverse
from multistage.interop.checkpoint_schedules import actions_of, as_planner, as_schedule
from multistage.interop.dask import ShotWorker, map_shots
from multistage.interop.mpi import MPIReversal

if TYPE_CHECKING:
    from checkpoint_schedules import CheckpointSchedule
    from distributed import Client
    from mpi4py.MPI import Comm

Vector = npt.NDArray[np.float64]


def step(x: Vector, i: int) -> Vector:
    """Run step i."""
    return np.sin(x)


def adjoint_step(x: Vector, adjoint: Vector, i: int) -> Vector:
    """Return the adjoint before step i."""
    return np.cos(x) * adjoint


def by_their_schedule(make: type[CheckpointSchedule], x: Vector) -> CheckpointSchedule:
    """Take a schedule of checkpoint_schedules, and make one."""
    theirs = as_planner(lambda: make(100))
    result = reverse(step, adjoint_step, x, x, 100, planner=theirs, memory="5 slots")
    actions = list(actions_of(make(100), 100))
    made: Plan = plan(Costs(1.0, 2.0), "2 slots", n_steps=len(actions))
    assert result.last_state.size
    return as_schedule(made, replayable=True)


def on_ranks(comm: Comm, x: Vector) -> Vector:
    """Reverse steps that communicate."""
    with MPIReversal(step, adjoint_step, n_steps=100, comm=comm, memory="1 MiB") as run:
        last = run.forward(x)
        return run.reverse(last)


def shot(item: float, worker: ShotWorker) -> tuple[float, Vector]:
    """Run one shot."""
    x = np.full(3, item)
    with worker.reversal(step, adjoint_step, 100) as run:
        run.forward(x)
        return item, run.reverse(x)


def on_a_cluster(client: Client) -> float:
    """Sum shots."""
    misfit, gradient = map_shots(client, shot, [1.0, 2.0], memory="1 MiB")
    return misfit + float(gradient.sum())
