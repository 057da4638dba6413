"""What one rank does in `test_mpi.py` with Devito: `mpiexec -n 2 python devito_worker.py FOLDER`.

In a folder of its own: beside our examples, Devito's would not be found.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
from mpi4py import MPI

from multistage.backends import FileStore
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning
from multistage.interop import pyrevolve as ours


def main() -> None:
    """Compare the gradients of the drop-in with those of one rank that stores all states."""
    warnings.simplefilter("ignore")
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    folder = Path(sys.argv[1]) / str(rank)
    folder.mkdir()
    ours.install()

    from devito import Function, smooth
    from examples.seismic.acoustic import acoustic_setup

    wave = acoustic_setup(
        shape=(50, 60), spacing=(10.0, 10.0), nbl=10, tn=200.0, space_order=4, dtype=np.float32
    )
    start = Function(name="start", grid=wave.model.grid, space_order=4, dtype=np.float32)
    smooth(start, wave.model.vp)
    residual, whole = wave.forward(vp=start, save=True)[:2]
    full = np.array(wave.jacobian_adjoint(residual, whole, vp=start)[0].data)
    assert full.size and abs(full).max() > 0
    reports = []
    plain = ours.BaseRevolver.apply_reverse

    def recorded(self: ours.BaseRevolver) -> None:
        plain(self)
        reports.append(self.report())

    ours.BaseRevolver.apply_reverse = recorded  # type: ignore[method-assign]
    odd = range(0, 99, 2 + (rank == size - 1))
    file, last = f"file:{folder}?buffers=0", rank == size - 1
    warnings.simplefilter("ignore", CheckpointWarning)
    for options in (
        {},
        {"tiers": file},  # costs measured, of all ranks
        {"tiers": file + ("&capacity=96kB" if last else ""), "planner": "streaming"},
        {
            "tiers": FaultyStore(FileStore(folder, buffer_bytes=0), lose_read=odd),
            "planner": "streaming",
        },
    ):
        ours.install(memory="6 slots", **options)  # type: ignore[arg-type]
        for _ in range(2):
            found = wave.jacobian_adjoint(residual, None, vp=start, checkpointing=True)[0]
            assert np.array_equal(np.array(found.data), full), (rank, options)
        steps = [report.counts.forward_steps for report in reports[-2:]]
        assert MPI.COMM_WORLD.allgather(steps) == size * [steps], (rank, options)
    full_disk, lost = reports[4:6], reports[6:]
    assert MPI.COMM_WORLD.allreduce(sum(report.counts.lost for report in full_disk + lost)) > 0
    assert not any(folder.iterdir())
    sys.stdout.write(f"rank {rank} of {size} is exact\n")


if __name__ == "__main__":
    main()
