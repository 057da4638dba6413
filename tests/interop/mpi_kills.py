"""kill -9 of one real rank at random moments; the same program resumes to the exact gradient.

    python tests/interop/mpi_kills.py --kills 20 --seed 0 [--shared]

Needs mpi4py and mpiexec.  Each rank keeps a folder of its own, in one that all
share or in one for each, as on disks of their nodes.  mpiexec ends the other
ranks when one is killed, each wherever it is by then.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mpi_wave import Wave, store_all, whole
from test_mpi import LENIENT, MPIEXEC, ROOT

from multistage.durable.status import inspect

N = 400
RANKS = 3


def rank_of_a_program(scratch: Path, shared: bool, until: bool) -> None:
    from mpi4py import MPI

    from multistage.interop.mpi import MPIReversal
    from multistage.model.costs import Costs
    from multistage.model.tier import Tier

    comm = MPI.COMM_WORLD
    wave = Wave(comm)
    (scratch / f"pid-{comm.rank}").write_text(str(os.getpid()))
    own = scratch / ("run" if shared else f"run-{comm.rank}")
    with MPIReversal(
        wave.step,
        wave.adjoint_step,
        None if until else N,
        memory="6 slots",
        durable=own,
        durable_every_s=0.02,
        costs=Costs(1e-3, 1e-3, tiers=(Tier("durable", 2e-3, 2e-3),)),
    ) as run:
        run.forward(wave.start, (lambda _, i: i == N) if until else None)
        gradient = run.reverse(wave.seed)
        with (scratch / f"gradient-{comm.rank}").open("wb") as file:
            for part in gradient:
                file.write(part.tobytes())


def start(scratch: Path, *options: str) -> subprocess.Popen[str]:
    assert MPIEXEC is not None
    for path in scratch.glob("pid-*"):
        path.unlink()
    command = [MPIEXEC, "-n", str(RANKS), sys.executable, __file__, "--rank", str(scratch)]
    environment = os.environ | LENIENT | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def expected() -> list[bytes]:
    """Return the bytes of each rank's part of the gradient."""
    import numpy as np

    full: Any = np.split(store_all(N), 3)
    rows = np.array_split(np.arange(len(full[0])), RANKS)
    parts = [[piece[mine] for piece in full] for mine in rows]
    assert whole(parts).tobytes() == store_all(N).tobytes()
    return [b"".join(piece.tobytes() for piece in each) for each in parts]


def _phase(scratch: Path) -> str:
    """Say what the killed ranks had reached."""
    found = [inspect(path) for path in scratch.glob("run*/rank-*")]
    if not all(one.begun for one in found) or len(found) < RANKS:
        return "before all had begun"
    steps = {one.adjoint_step for one in found}
    if steps != {None}:
        return "in the reverse sweep" + (", unequal" if len(steps) > 1 else "")
    return "in the forward sweep" + (", unequal" if len({one.states for one in found}) > 1 else "")


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared", action="store_true", help="one folder for all ranks")
    parser.add_argument("--until", action="store_true", help="the end is found")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_of_a_program(args.rank, args.shared, args.until)
        return 0
    options = [f"--{name}" for name in ("shared", "until") if getattr(args, name)]
    rng, answer, kills, runs = random.Random(args.seed), expected(), 0, 0
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        while kills < args.kills:
            runs += 1
            for _ in range(rng.choice((1, 2, 4))):
                program = start(scratch, *options)
                victim = scratch / f"pid-{rng.randrange(RANKS)}"
                while program.poll() is None and not victim.exists():
                    time.sleep(0.001)
                time.sleep(rng.uniform(0.0, 2.5))
                if program.poll() is None and (text := victim.read_text()):
                    os.kill(int(text), signal.SIGKILL)
                    kills += 1
                program.communicate()
                seen[_phase(scratch)] += 1
            program = start(scratch, *options)
            _, told = program.communicate()
            found = [(scratch / f"gradient-{k}").read_bytes() for k in range(RANKS)]
            if program.returncode or found != answer:
                return f"run {runs}, seed {args.seed}: another gradient\n{told}"
            if left := list(scratch.glob("run*")):
                return f"run {runs}, seed {args.seed}: left are {left}"
            for path in scratch.glob("gradient-*"):
                path.unlink()
    told = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    sys.stdout.write(
        f"{kills} kills of one of {RANKS} ranks in {runs} runs, every gradient exact: {told}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
