"""What one rank does with a tape: `mpiexec -n 2 python tape_worker.py CASE FOLDER`."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tapes

from multistage.backends import FileStore
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning, MultistageError
from multistage.interop.pyadjoint import enable
from multistage.model.costs import Costs
from multistage.model.tier import Tier

N = 12
COSTS = Costs(1e-3, 2e-3, tiers=(Tier("slow", 1e-3, 1e-3),), state_bytes=64)
FAULTS: dict[str, Any] = {"lose_write": {0, 3}, "lose_read": {1, 4}}


def ring(comm: Any) -> None:
    """Let the arrays of all ranks be one ring."""
    rank, size = comm.Get_rank(), comm.Get_size()

    def roll(values: Any, by: int) -> Any:
        to, source = (rank + by) % size, (rank - by) % size
        end, here = (-1, 0) if by == 1 else (0, -1)
        rolled = np.roll(values, by)
        rolled[here] = comm.sendrecv(values[end], dest=to, source=source)
        return rolled

    tapes.roll = roll
    tapes.total = lambda values: float(comm.allreduce(float(values.sum())))
    # Each rank has another part, and one of another size.
    tapes.SIZE += rank


def told(work: Any) -> str:
    """Return what an error says that all ranks raise."""
    try:
        work()
    except MultistageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def taped(n: int, **options: Any) -> Any:
    """Return the reduced functional of n timesteps that exchange nothing."""
    tapes.roll = np.roll
    return tapes.reduced(tapes.fresh, n, partial(enable, **options))[0]


def uneven(steps: Any) -> Any:
    """In step 5 the arrays of one rank become larger."""
    u = m = tapes.wave(0)
    for i in steps:
        if i == 5 and tapes.SIZE > 40:
            tapes.SIZE += 1
            u = tapes.wave(0)
        u = tapes.stepped(u)
    return tapes.run(tapes.Energy(u)), [m]


def main(case: str, folder: Path) -> None:
    from mpi4py import MPI

    comm: Any = MPI.COMM_WORLD
    rank, last = comm.Get_rank(), comm.Get_rank() == comm.Get_size() - 1
    ring(comm)
    if case == "longer":
        taped(N + last, memory="4 slots", n_steps=N, costs=COSTS, comm=comm)
    if case == "fails":
        tapes.reduced(uneven, N, partial(enable, memory="4 slots", costs=COSTS, comm=comm))
    warnings.simplefilter("ignore", CheckpointWarning)
    for built in ("overwritten", "leapfrog", "source_in_each_step"):
        alone, _ = tapes.reduced(tapes.BUILT[built], N)
        expected = tapes.answers(alone)
        for n_steps, costs, faults in ((N, COSTS, {}), (None, COSTS, FAULTS), (None, None, FAULTS)):
            store = FaultyStore(FileStore(folder / str(rank)), **(faults if last else {}))
            enabled = partial(
                enable,
                memory="4 slots",
                tiers=store,
                n_steps=n_steps,
                costs=costs,  # None: each rank measures others
                comm=comm,
            )
            ours, run = tapes.reduced(tapes.BUILT[built], N, enabled)
            assert tapes.answers(ours) == expected, (built, n_steps, costs, rank)
            counts = run.report().counts
            every = comm.allgather((counts.forward_steps, counts.writes, counts.reads, counts.lost))
            assert len(set(every)) == 1, f"{built}: {every}"
            # Measured steps may be too fast for the tier to be used at all, and a loaded machine
            # too slow: late transfers leave it.
            _, writes, _, lost = every[0]
            assert lost > 0 or writes < 2 or not (costs and faults), f"{built}: nothing was lost"
            run.close()

    tape = tapes.pyadjoint.Tape()
    said = told(lambda: enable(tape, memory="4 slots"))
    assert f"MPI started {comm.Get_size()} ranks" in said and "give comm=" in said, said
    said = told(lambda: enable(tape, memory="0 slots" if last else "4 slots", comm=comm))
    assert said.startswith(f"BudgetError: rank {comm.Get_size() - 1}: "), said
    said = told(lambda: enable(tape, memory="4 slots", history=1 + last, comm=comm))
    assert "disagree on history: 1 on rank 0" in said, said
    options: dict[str, Any] = {"memory": "4 slots", "costs": COSTS, "comm": comm}
    said = told(taped(N - last, n_steps=N, **options).derivative)
    assert said.startswith(f"ArgumentError: rank {comm.Get_size() - 1}: {N - 1} timesteps"), said
    said = told(taped(N - last, **options).derivative)
    assert f"disagree on the number of timesteps: {N} on rank 0, {N - 1}" in said, said
    sys.stdout.write("is exact\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
