"""The adjoint of a 2-D acoustic wave: ours beside pyrevolve and checkpoint_schedules.

Every contender runs the same two NumPy operators, in pyrevolve's way (the
adjoint operator follows a forward step), with memory for the same number of
states; ours pays its I/O buffers out of it, its peers have none.  Their disks
may hold every state.  Timed is one gradient, both sweeps; making a revolver and
its schedule is not, and neither is our first sweep, which measures.  The
gradients are equal bit for bit before anything is timed.

ratios:
    best_peer_over_ours       least over all settings: fastest peer / ours, streaming
    best_peer_over_memory     the same against ours in memory alone
    pyrevolve_disk_over_ours  least over states of 8 MB and more: DiskRevolver / ours
    functionals_over_steps    processor time of four gradients from one sweep, over that of
                              its plan without adjoint steps and four of each in a plain loop
    devito_outside_share      share of a Devito gradient's time outside its operators
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import finish, interleaved, options
from benchmarks.acoustic import Acoustic2D, build
from benchmarks.devito_share import devito_share
from multistage import InPlaceChain, Reversal
from multistage.interop import pyrevolve as ours

MEMORY_STATES = 16
# Megabytes of a state (two levels of float64) -> lengths.
FULL = {1: (200, 1000), 4: (200, 600), 8: (200, 400), 16: (100, 300), 64: (60, 120)}
QUICK = {1: (200,), 8: (100,)}
# H-Revolve's table is filled in Python; longer ones do not finish in reasonable time.
HREVOLVE_STEPS = 200


class Shot:
    """A shot as pyrevolve's users write it: operators on arrays of their own."""

    dtype = np.float64

    def __init__(self, megabytes: int, n_steps: int) -> None:
        side = int(np.sqrt(megabytes * 1e6 / 16))
        self.model: Acoustic2D = build(side, side, n_steps, sponge=min(20, side // 8))
        self.n_steps = n_steps
        self.state = self.model.start()
        self.size = self.state.size
        self.nbytes = self.state.nbytes
        self.reset()

    def reset(self) -> None:
        self.state[...] = 0
        self.adjoint = self.model.start_adjoint()

    def get_data(self, timestep: int) -> list[Any]:
        return [self.state]

    get_data_location = get_data

    def forward(self, t_start: int, t_end: int) -> None:
        self.model.forward(self.state, t_start, t_end)

    def backward(self, t_start: int, t_end: int) -> None:
        self.model.reverse(self.state, self.adjoint, t_start)

    def operators(self) -> tuple[Any, Any, Any]:
        return self, _Applied(self.forward), _Applied(self.backward)

    def gradient(self) -> Any:
        return self.model.gradient(self.adjoint)


class _Applied:
    def __init__(self, apply: Callable[..., None]) -> None:
        self.apply = apply


def timed(shot: Shot, sweep: Callable[[], None]) -> float:
    """Return the seconds of one gradient."""
    shot.reset()
    began = time.perf_counter()
    sweep()
    return time.perf_counter() - began


def both(revolver: Any) -> Callable[[], None]:
    """Return a function that runs both sweeps of a revolver."""

    def sweep() -> None:
        revolver.apply_forward()
        revolver.apply_reverse()

    return sweep


def by_hand(shot: Shot, schedule: Any, folder: Path) -> Callable[[], None]:
    """Return a plain loop over a schedule of checkpoint_schedules: copies, and np.save."""
    import checkpoint_schedules as cs

    kept: dict[int, Any] = {}
    state = shot.state

    def path(step: int) -> Path:
        return folder / f"{step}.npy"

    def sweep() -> None:
        for action in schedule:
            if isinstance(action, cs.Forward):
                if action.write_ics and action.storage == cs.StorageType.RAM:
                    kept[action.n0] = state.copy()
                elif action.write_ics:
                    np.save(path(action.n0), state)
                shot.forward(action.n0, action.n1)
            elif isinstance(action, cs.Reverse):
                shot.backward(action.n0, action.n1)
            elif isinstance(action, cs.Copy | cs.Move):
                moved = isinstance(action, cs.Move)
                if action.from_storage == cs.StorageType.RAM:
                    state[...] = kept.pop(action.n) if moved else kept[action.n]
                else:
                    state[...] = np.load(path(action.n))
                    if moved:
                        path(action.n).unlink()
            elif isinstance(action, cs.EndReverse):
                break

    return sweep


def contenders(shot: Shot, folder: Path) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return, by name, functions that make a sweep; ours keep their revolver."""
    import checkpoint_schedules as cs
    import pyrevolve

    n, three = shot.n_steps, shot.operators()
    memory = MEMORY_STATES * shot.nbytes
    streaming = ours.Revolver(*three, None, n, memory=memory, tiers=f"file://{folder}")
    in_memory = ours.Revolver(*three, MEMORY_STATES, n)
    on_disk = ours.DiskRevolver(*three, n, n, filedir=str(folder))

    def their_disk() -> Callable[[], None]:
        return both(pyrevolve.DiskRevolver(*three, n, n, filedir=f"{folder}/"))

    def their_levels() -> Callable[[], None]:
        size, dtype = shot.size, shot.dtype
        levels = [
            pyrevolve.NumpyStorage(size, MEMORY_STATES, dtype),
            pyrevolve.DiskStorage(size, n, dtype, filedir=f"{folder}/", wd=1, rd=1),
        ]
        return both(pyrevolve.MultiLevelRevolver(*three, n, levels))

    made: dict[str, Callable[[], Callable[[], None]]] = {
        "ours, streaming": lambda: both(streaming),
        "ours, memory": lambda: both(in_memory),
        "ours, disk": lambda: both(on_disk),
        "pyrevolve memory": lambda: both(pyrevolve.MemoryRevolver(*three, MEMORY_STATES, n)),
        "pyrevolve disk": their_disk,
        "cs multistage, memory": lambda: by_hand(
            shot, cs.MultistageCheckpointSchedule(n, MEMORY_STATES, 0), folder
        ),
        "cs multistage, disk": lambda: by_hand(
            shot, cs.MultistageCheckpointSchedule(n, MEMORY_STATES, n), folder
        ),
    }
    if n <= HREVOLVE_STEPS:
        made["pyrevolve levels"] = their_levels
        made["cs H-Revolve"] = lambda: by_hand(
            shot, cs.HRevolve(n, MEMORY_STATES, n, wd=1, rd=1), folder
        )
    return made


def setting(megabytes: int, n_steps: int, repeats: int) -> dict[str, Any]:
    """Check, then time all contenders at one size and length."""
    shot = Shot(megabytes, n_steps)
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        runs: dict[str, Callable[[], float]] = {}
        reference: Any = None
        for contender, make in contenders(shot, folder).items():
            # The first sweep of each: ours measures, all must agree.
            try:
                timed(shot, make())
            except Exception as error:
                if contender.startswith("ours"):
                    raise
                left_out.append(f"{contender}, {megabytes} MB x {n_steps}: {error!r:.80}")
                continue
            if reference is None:
                reference = shot.gradient()
            assert np.array_equal(shot.gradient(), reference), contender
            runs[contender] = lambda make=make: timed(shot, make())  # type: ignore[misc]
        samples = interleaved(runs, repeats)
    best = {contender: min(times) for contender, times in samples.items()}
    peers = {name: took for name, took in best.items() if not name.startswith("ours")}
    peer = min(peers, key=peers.__getitem__)
    print(
        f"{megabytes:3d} MB x {n_steps:5d} steps: "
        + ", ".join(f"{name} {took:.2f}" for name, took in best.items())
        + f"; best peer {peer}"
    )
    return {
        "megabytes": megabytes,
        "n_steps": n_steps,
        "samples": samples,
        "best_peer": peer,
        "best_peer_over_ours": peers[peer] / best["ours, streaming"],
        "best_peer_over_memory": peers[peer] / best["ours, memory"],
        "pyrevolve_disk_over_ours": (
            best["pyrevolve disk"] / best["ours, streaming"] if "pyrevolve disk" in best else None
        ),
        "left_out": left_out,
    }


def functionals(repeats: int, n_steps: int = 60, count: int = 4) -> float:
    """Return the time of some gradients from one sweep, over that of its plan and their steps."""
    model = build(300, 300, n_steps, sponge=20)
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal(model.start().shape) for _ in range(count)]
    plain: InPlaceChain[Any, Any] = InPlaceChain(model.forward, lambda state, adjoint, i: adjoint)

    def seeds() -> list[Any]:
        return [(source.copy(), model.start_adjoint()[1]) for source in sources]

    def swept(run: Reversal[Any, Any], given: Any) -> Callable[[], float]:
        def both() -> float:
            adjoint, began = given(), time.process_time()
            run.forward(model.start())
            found[:] = run.reverse(adjoint)
            return time.process_time() - began

        return both

    def steps() -> float:
        given, state = seeds(), model.start()
        model.forward(state, 0, n_steps)
        began = time.process_time()
        for i in reversed(range(n_steps)):
            for each in given:
                model.reverse(state, each, i)
        return time.process_time() - began

    found: list[Any] = []
    words: dict[str, Any] = {"n_steps": n_steps, "memory": f"{MEMORY_STATES} slots"}
    with (
        Reversal(model.chain(), functionals=count, **words) as several,
        Reversal(model.chain(), **words) as alone,
        Reversal(plain, **words) as plan,
    ):
        ours, planned = swept(several, seeds), swept(plan, lambda: seeds()[0])
        ours()
        for seed, (levels, gradient) in zip(seeds(), list(found), strict=True):
            swept(alone, lambda seed=seed: seed)()  # type: ignore[misc]
            assert np.array_equal(found[0], levels) and np.array_equal(found[1], gradient)
        samples = interleaved({"ours": ours, "plan": planned, "steps": steps}, repeats)
    best = {name: min(times) for name, times in samples.items()}
    return float(best["ours"] / (best["plan"] + best["steps"]))


def main() -> None:
    """Measure every setting, print the table and write the results."""
    args = options(__doc__).parse_args()
    sizes, repeats = (QUICK, 2) if args.quick else (FULL, 3)
    results = [
        setting(megabytes, n_steps, repeats)
        for megabytes, lengths in sizes.items()
        for n_steps in lengths
    ]
    disk = [
        result["pyrevolve_disk_over_ours"]
        for result in results
        if result["megabytes"] >= 8 and result["pyrevolve_disk_over_ours"] is not None
    ]
    ratios = {
        "best_peer_over_ours": min(result["best_peer_over_ours"] for result in results),
        "best_peer_over_memory": min(result["best_peer_over_memory"] for result in results),
    }
    if disk:
        ratios["pyrevolve_disk_over_ours"] = min(disk)
    left_out = [what for result in results for what in result["left_out"]]
    ratios["functionals_over_steps"] = functionals(3 * repeats)
    shares, _ = devito_share(args.quick)
    if shares is None:
        left_out.append("Devito is not installed")
    else:
        ratios.update(shares)
    finish(args, "pde_adjoint", results, ratios, left_out)


if __name__ == "__main__":
    main()
