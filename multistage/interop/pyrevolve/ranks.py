"""The ranks that share the computation of a pair of operators."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from ...errors import ArgumentError
from ..ranks import Communicator, Ranks
from .operators import devito_checkpoint


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
