"""What one rank does in `test_mpi.py`: `mpiexec -n 4 python mpi_worker.py CASE FOLDER`."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi_part import Part, swept
from mpi_wave import Wave

from multistage import Reversal
from multistage.backends import FileStore, Store
from multistage.backends.medium import Medium
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning, MultistageError
from multistage.execute.executor import Executor
from multistage.interop import mpi, pyrevolve
from multistage.interop.mpi import MPIReversal
from multistage.measurement import chain, store
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.reversing import uniform
from multistage.states.layout import Layout

N = 60
# What measures, opens, starts and plans.
CALLS: list[tuple[Any, str]] = [
    (uniform, "FirstSteps"),
    (chain, "probe_store"),
    (mpi, "measure"),
    (uniform, "measure"),
    (uniform, "plan"),
    (FileStore, "open"),
    (threading.Thread, "start"),
]
DIFFERING = [(i, 1.0 + i % 7) for i in range(N)]  # seconds of each step
COSTS = Costs(1e-4, 2e-4, state_bytes=10, tiers=(Tier("file", 2.5e-4, 2.5e-4),))


class Jittery(FileStore):
    """A disk on which one write in three is slow, each rank's at other times."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, "direct", buffer_bytes=0)  # whose medium is Python's
        self._rank = rank

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        medium, rank = super().medium(layout, extent_bytes), self._rank
        write, chance, never = medium.write, random.Random(rank), threading.Event()

        def slow(slot: int, offset: int, data: Any) -> None:
            if chance.random() < 1 / 3:
                never.wait(0.002 * (1 + rank))
            write(slot, offset, data)

        medium.write = slow  # type: ignore[method-assign]
        return medium


def stores(rank: int, size: int, folder: Path) -> dict[str, str | Store | None]:
    """Return the tiers to try; faults are those of the last rank alone."""

    def faulty(**faults: Any) -> Store:
        return FaultyStore(
            FileStore(folder, buffer_bytes=0), **(faults if rank == size - 1 else {})
        )

    return {
        "no tier": None,
        "file": f"file:{folder}",
        "measured": f"file:{folder}?buffers=0",
        "jittery": Jittery(folder, rank),
        "lost writes": faulty(lose_write={0, 3, 4}),
        "lost reads": faulty(lose_read={0, 2, 3}),
        "refused": faulty(refuse=range(7, 999)),
        "all lost": faulty(lose_read=range(999)),
    }


def gradients(comm: Any, folder: Path) -> dict[str, Any]:
    log: list[str] = []
    forward = Executor.forward

    def recorded(self: Any, schedule: Any, state: Any, *rest: Any, **options: Any) -> Any:
        def passed() -> Any:
            answer = None
            try:
                while True:
                    action = schedule.send(answer)
                    answer = yield action
                    log.append(f"{action} {answer}")
            except StopIteration:
                return

        return forward(self, passed(), state, *rest, **options)

    Executor.forward = recorded  # type: ignore[method-assign]
    warnings.simplefilter("ignore", CheckpointWarning)
    found = {}
    for name, tier in stores(comm.Get_rank(), comm.Get_size(), folder).items():
        log.clear()
        wave = Wave(comm)
        costs = None if name == "measured" else COSTS
        with MPIReversal(
            wave.step, wave.adjoint_step, N, memory="6 slots", tiers=tier, costs=costs
        ) as run:
            adjoints, figures = [], [0, 0, 0, 0]
            for _ in range(2):
                run.forward(wave.start)
                adjoints.append(run.reverse(wave.seed))
                counts = run.report().counts
                for k, what in enumerate(("writes", "reads", "lost", "recovered_steps")):
                    figures[k] += getattr(counts, what)
        found[name] = adjoints, list(log), wave.steps, tuple(figures)
        assert not any(folder.iterdir()), f"{name} leaves files"
    return found


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except MultistageError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fails(comm: Any, folder: Path) -> str:
    wave, rank = Wave(comm), comm.Get_rank()

    def adjoint_step(state: Any, adjoint: Any, i: int) -> Any:
        if rank == 1 and i == N // 2:
            raise FloatingPointError(f"rank {rank} went wrong in step {i}")
        return wave.adjoint_step(state, adjoint, i)

    with MPIReversal(
        wave.step, adjoint_step, N, memory="6 slots", tiers=f"file:{folder}", costs=COSTS
    ) as run:
        run.forward(wave.start)
        run.reverse(wave.seed)
    return "nothing was raised"


def killed(comm: Any, folder: Path) -> Any:
    """Die on rank 1 in each sweep of a durable run, once; return the gradient, forward's steps."""
    wave, deaths = Wave(comm), [folder / f"died in {sweep}" for sweep in ("step", "adjoint_step")]

    def die(death: Path, i: int) -> None:
        if comm.Get_rank() == 1 and i == N // 2 and not death.exists():
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def step(state: Any, i: int) -> Any:
        die(deaths[0], i)
        return wave.step(state, i)

    def adjoint_step(state: Any, adjoint: Any, i: int) -> Any:
        die(deaths[1], i)
        return wave.adjoint_step(state, adjoint, i)

    durable = {"durable": folder.parent / "run", "durable_every_s": 0}
    with MPIReversal(step, adjoint_step, N, memory="6 slots", costs=COSTS, **durable) as run:
        run.forward(wave.start)
        forward_steps = wave.steps
        return run.reverse(wave.seed), forward_steps


def killed_unequal(comm: Any, folder: Path) -> Any:
    """Die four times on one rank or the other, of steps that differ; tell whether it is exact."""
    rank = comm.Get_rank()
    part = Part(7, rank, comm, 30, most=60 * (1 + 9 * rank))
    exact = part.store_all()
    part.ran.clear()

    def die(sweep: str, i: int) -> None:
        for k, at in enumerate([("step", 9), ("step", 22), ("back", 24), ("back", 8)]):
            death = folder / f"died {k}"
            if (sweep, i) == at and rank == k % 2 and not death.exists():
                death.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def step(u: Any, i: int) -> Any:
        die("step", i)
        return part.step(u, i)

    def adjoint_step(u: Any, adjoint: Any, i: int) -> Any:
        die("back", i)
        return part.adjoint_step(u, adjoint, i)

    durable: dict[str, Any] = {"durable": folder.parent / "run", "durable_every_s": 0}
    with MPIReversal(step, adjoint_step, costs=part.costs(), memory="3 slots", **durable) as run:
        last = run.forward(part.start())
        forward_steps = len(part.ran)
        return run.reverse(np.ones_like(last)).tobytes() == exact, forward_steps


def unequal(comm: Any, folder: Path) -> dict[str, Any]:
    """Steps that differ, by given costs and by a survey; the last rank's disk loses reads."""
    warnings.simplefilter("ignore", CheckpointWarning)
    found, rank = {}, comm.Get_rank()
    for n, name in ((30, "file"), (30, "jittery"), (30, "lost reads"), (400, "file")):
        part = Part(n, rank, comm, n, most=60 * (1 + 20 * rank))
        exact, tier = part.store_all(), stores(rank, comm.Get_size(), folder)[name]
        for known in (True, False):
            costs: Any = {"costs": part.costs()} if known else {"planner": "survey"}
            with MPIReversal(
                part.step,
                part.adjoint_step,
                comm=comm,
                memory="4 slots",
                tiers=tier,
                n_steps=n,
                **costs,
            ) as run:
                right = [swept(run, part) == exact for _ in range(2)]
                counts = run.report().counts
                assert run.plan is not None
                figures = counts.forward_steps, counts.writes, counts.lost, run.plan.writes
            found[f"{n} {name} {known}"] = right, figures
            assert not any(folder.iterdir()), f"{name} leaves files"
    return found


class Drop:
    """The wave as pyrevolve's users write it: operators that overwrite their arrays."""

    dtype = np.dtype(np.float64)

    def __init__(self, comm: Any) -> None:
        self.wave = Wave(comm)
        self.state = [array.copy() for array in self.wave.start]
        self.before = [array.copy() for array in self.state]
        self.adjoint: Any = tuple(array.copy() for array in self.wave.seed)
        self.size = sum(array.size for array in self.state)
        self.nbytes = 8 * self.size

    def get_data(self, timestep: int) -> list[Any]:
        return self.state

    get_data_location = get_data

    def forward(self, t_start: int, t_end: int) -> None:
        for i in range(t_start, t_end):
            self._into(self.before, self.state)
            self._into(self.state, self.wave.step(tuple(self.before), i))

    def backward(self, t_start: int, t_end: int) -> None:
        self.adjoint = self.wave.adjoint_step(tuple(self.before), self.adjoint, t_start)

    def _into(self, targets: Any, arrays: Any) -> None:
        for target, array in zip(targets, list(map(np.copy, arrays)), strict=True):
            target[:] = array

    def operators(self) -> tuple[Any, Any, Any]:
        forward, backward = SimpleNamespace(), SimpleNamespace()
        forward.apply, backward.apply = self.forward, self.backward
        return self, forward, backward

    def gradient(self, revolver: Any) -> Any:
        self._into(self.state, self.wave.start)
        self.adjoint = tuple(array.copy() for array in self.wave.seed)
        revolver.apply_forward()
        revolver.apply_reverse()
        return self.adjoint


def dropin(comm: Any, folder: Path) -> dict[str, Any]:
    """Revolvers of the drop-in, two sweeps each, faults on the last rank alone."""
    warnings.simplefilter("ignore", CheckpointWarning)
    found: dict[str, Any] = {}
    for name, tier in stores(comm.Get_rank(), comm.Get_size(), folder).items():
        drop = Drop(comm)
        costs = replace(COSTS, tape_step_s=1e-4)
        revolver = pyrevolve.Revolver(
            *drop.operators(),
            None,
            N,
            memory="6 slots",
            tiers=tier,
            planner="auto" if tier is None else "streaming",
            costs=None if name == "measured" else costs,
            comm=comm,
        )
        found[name] = [drop.gradient(revolver) for _ in range(2)], drop.wave.steps
        if comm.Get_rank():  # its threads and files go at another moment than those of others
            del revolver
        else:
            revolver.close()
        assert not any(folder.iterdir()), f"{name} leaves files"
    drop = Drop(comm)
    with pyrevolve.DiskRevolver(
        *drop.operators(), 5, N, filedir=str(folder), comm=comm
    ) as revolver:
        found["on disk"] = [drop.gradient(revolver) for _ in range(2)], drop.wave.steps
    stages = [Stage(f"{i}", s, 2 * s, drop.nbytes, drop.nbytes, 0) for i, s in DIFFERING]
    kinds: tuple[dict[str, Any], ...] = (
        {"costs": StageCosts(tuple(stages), drop.nbytes)},
        {"planner": "survey"},
    )
    for options in kinds:
        drop, tier = Drop(comm), f"file:{folder}"
        three = drop.operators()
        with pyrevolve.Revolver(
            *three, None, N, memory="3 slots", tiers=tier, comm=comm, **options
        ) as revolver:
            gradients = [drop.gradient(revolver) for _ in range(2)]
            assert revolver.plan.writes or "planner" in options
            assert revolver.report().counts.writes == revolver.plan.writes
        found[f"steps that differ, {min(options)}"] = gradients, drop.wave.steps
    return found


def shots(comm: Any, folder: Path) -> list[Any]:
    """Shots of all ranks together, of one rank each, and of each rank by itself, some one more."""
    from mpi4py import MPI

    called: Counter[str] = Counter()

    def counted(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            called[name] += 1
            return plain(*given, **options)

        return call

    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name), name))
    found = []
    tiers, alone = f"file:{folder}?buffers=0", MPI.COMM_SELF
    group = comm.Split(comm.Get_rank())
    for of, make in (
        (comm, partial(MPIReversal, comm=comm)),
        (group, partial(MPIReversal, comm=group)),
        (alone, Reversal),
    ):
        wave, counts, gradients = Wave(of), [], []
        with make(wave.step, wave.adjoint_step, N, memory="6 slots", tiers=tiers) as run:
            for _ in range(3 if of is comm else 3 + comm.Get_rank()):
                before, wave = called.copy(), Wave(of)
                run.use(wave.step, wave.adjoint_step)
                run.forward(wave.start)
                gradients.append(run.reverse(wave.seed))
                counts.append(called - before)
                assert wave.steps == run.report().counts.forward_steps
        found.append((gradients, counts))
    return found


def shares(comm: Any, folder: Path) -> list[tuple[float, float]]:
    """Two ranks measure at once; of six that share it, four are others."""
    store._write = lambda *_: (comm.Barrier() or 0.25, 0.0, 4)  # type: ignore[assignment]
    store._read = lambda *_: (comm.Barrier() or 0.5, 0.0)  # type: ignore[assignment]
    found = []
    for share in ("", "&share=2", "&share=6"):
        wave = Wave(comm)
        tier = f"file:{folder}?buffers=0{share}"
        with MPIReversal(wave.step, wave.adjoint_step, N, memory="6 slots", tiers=tier) as run:
            run.prepare(wave.start)
            (rates,) = run.costs.tiers
            found.append((rates.write_s, rates.read_s))
    return found


def unknown(comm: Any, folder: Path) -> list[Any]:
    """Nothing tells which ranks share the steps."""
    from mpi4py import MPI

    drop = Drop(MPI.COMM_SELF)
    three = drop.operators()
    said = [
        error_of(partial(pyrevolve.Revolver, *three, None, N, memory="6 slots", **options))
        for options in ({}, {"tiers": f"file:{folder}"}, {"costs": COSTS})
    ]
    pyrevolve.install(memory="6 slots", tiers=f"file:{folder}")
    said.append(error_of(lambda: pyrevolve.Revolver(*three, None, N)))
    pyrevolve.install(memory="6 slots", tiers=f"file:{folder}", comm=MPI.COMM_SELF)
    # Each by itself, and at its own pace; in memory alone nothing is decided by clocks.
    gradients = [drop.gradient(pyrevolve.Revolver(*three, None, N))]
    pyrevolve.uninstall()
    gradients.append(drop.gradient(pyrevolve.Revolver(*three, 5, N)))
    return [said, gradients]


def main(case: str, parent: str) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    folder = Path(parent) / str(comm.Get_rank())
    folder.mkdir(exist_ok=True)  # that of a rank that was killed
    cases: dict[str, Callable[[Any, Path], object]] = {
        "gradients": gradients,
        "fails": fails,
        "killed": killed,
        "killed_unequal": killed_unequal,
        "unequal": unequal,
        "dropin": dropin,
        "unknown": unknown,
        "shots": shots,
        "shares": shares,
    }
    (folder / "result").write_bytes(pickle.dumps(cases[case](comm, folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
