"""A gradient and a Hessian of pyadjoint within a limit, beside pyadjoint's own ways.

Burgers' equation, periodic and explicit; the control is the initial state, and every step
overwrites one array.  A *sweep* is the functional and its gradient at a new control.  The sweeps
of four ways are interleaved in one process:

`plain`
    the tape alone, which keeps every state;
`memory`
    pyadjoint's `SingleMemoryStorageSchedule`;
`disk`
    pyadjoint's `SingleDiskStorageSchedule`, a file for each checkpoint, as Firedrake has it;
`ours`
    `multistage.interop.pyadjoint.enable` with eight slots and a file tier.

Every gradient is compared bit for bit with that of `plain`.  Ratios are of wall times, medians of
paired sweeps:

- `speed_over_memory`: `memory` over `ours`;
- `sync_disk_over_ours`: `disk` over `ours`;
- `over_bound`: the makespan that the plan of a sweep predicts, over that of the sweep;
- `taylor_order`, `hessian_order`: the least of two controls;
- `bits_equal`: 1 if all gradients are equal, and the Hessian.

    python -m benchmarks.pyadjoint_tiers [--quick] [--json FILE]
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import child, finish, options
from multistage import testing

SLOTS = 8
# Without it every mode that frees states pays for page faults that `plain` does not.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
_A, _B = 0.2, 0.15  # dt / (2 dx), nu dt / dx^2


def _slope(v: Any) -> Any:
    return np.roll(v, -1) - np.roll(v, 1)


def _curvature(v: Any) -> Any:
    return np.roll(v, -1) + np.roll(v, 1) - 2 * v


def _step(u: Any) -> Any:
    return u - _A * u * _slope(u) + _B * _curvature(u)


def _tangent(u: Any, v: Any) -> Any:
    return v - _A * (v * _slope(u) + u * _slope(v)) + _B * _curvature(v)


def _adjoint(u: Any, a: Any) -> Any:
    return a - _A * (a * _slope(u) - _slope(a * u)) + _B * _curvature(a)


def _second(v: Any, a: Any) -> Any:
    """Return the derivative of `_adjoint` by the state, in direction v."""
    return -_A * (a * _slope(v) - _slope(a * v))


class Problem:
    """Blocks and tapes of the equation, with pyadjoint imported."""

    def __init__(self, size: int, steps: int) -> None:
        import numpy_adjoint
        import pyadjoint

        self.size, self.steps, self.pa, self._array = size, steps, pyadjoint, numpy_adjoint.ndarray
        problem = self

        class Step(pyadjoint.Block):  # type: ignore[misc]
            def __init__(self, u: Any) -> None:
                super().__init__()
                self.add_dependency(u)

            def recompute_component(self, inputs: Any, *_: Any) -> Any:
                return problem.vector(_step(plain(inputs[0])))

            def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
                return _adjoint(plain(inputs[0]), adjoints[0])

            def evaluate_tlm_component(self, inputs: Any, tangents: Any, *_: Any) -> Any:
                return _tangent(plain(inputs[0]), plain(tangents[0]))

            def evaluate_hessian_component(
                self, inputs: Any, seconds: Any, adjoints: Any, *_: Any
            ) -> Any:
                v = plain(self.get_dependencies()[0].tlm_value)
                return _adjoint(plain(inputs[0]), seconds[0]) + _second(v, adjoints[0])

        class Energy(Step):
            def recompute_component(self, inputs: Any, *_: Any) -> Any:
                u = plain(inputs[0])
                return pyadjoint.AdjFloat(0.5 * float(u @ u) / problem.size)

            def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
                return float(adjoints[0]) / problem.size * plain(inputs[0])

            def evaluate_tlm_component(self, inputs: Any, tangents: Any, *_: Any) -> Any:
                found = float(plain(inputs[0]) @ plain(tangents[0])) / problem.size
                return pyadjoint.AdjFloat(found)

            def evaluate_hessian_component(
                self, inputs: Any, seconds: Any, adjoints: Any, *_: Any
            ) -> Any:
                v = plain(self.get_dependencies()[0].tlm_value)
                found = float(seconds[0]) * plain(inputs[0]) + float(adjoints[0]) * v
                return found / problem.size

        class Copy(Step):
            def recompute_component(self, inputs: Any, *_: Any) -> Any:
                return problem.vector(plain(inputs[0]).copy())

            def evaluate_adj_component(self, inputs: Any, adjoints: Any, *_: Any) -> Any:
                return adjoints[0]

            def evaluate_tlm_component(self, inputs: Any, tangents: Any, *_: Any) -> Any:
                return plain(tangents[0])

            def evaluate_hessian_component(
                self, inputs: Any, seconds: Any, adjoints: Any, *_: Any
            ) -> Any:
                return seconds[0]

        self._step, self._energy, self._copy = Step, Energy, Copy

    def vector(self, values: Any) -> Any:
        """Return values as pyadjoint's array."""
        values = np.ascontiguousarray(values)
        return self._array(values.shape, values.dtype, buffer=values)

    def initial(self, phase: float = 0.0) -> Any:
        """Return an initial state."""
        x = np.linspace(0, 2 * np.pi, self.size, endpoint=False)
        return self.vector(0.5 + 0.4 * np.sin(x + phase) + 0.1 * np.cos(7 * x))

    def reduced(self, enable: Callable[[Any], Any]) -> Any:
        """Tape the steps; return the reduced functional."""
        tape = self.pa.Tape()
        self.pa.set_working_tape(tape)
        self.pa.continue_annotation()
        enable(tape)
        m, u = self.initial(), self.vector(np.zeros(self.size))
        for i in tape.timestepper(iter(range(self.steps))):
            if i == 0:
                self._taped(tape, self._copy(m), u)
            self._taped(tape, self._step(u), u)
        functional = self._taped(tape, self._energy(u), None)
        self.pa.pause_annotation()
        return self.pa.ReducedFunctional(functional, self.pa.Control(m), tape=tape)

    def _taped(self, tape: Any, block: Any, into: Any) -> Any:
        tape.add_block(block)
        with self.pa.stop_annotating():
            made = block.recompute_component([v.saved_output for v in block.get_dependencies()])
            if into is not None:
                np.ndarray.__setitem__(into, Ellipsis, plain(made))
                made = into
        block.add_output(made.create_block_variable())
        return made


def plain(value: Any) -> Any:
    """Return the array of a value."""
    return np.asarray(value).view(np.ndarray)


class Disk:
    """pyadjoint's disk, as Firedrake has it: a file for each checkpoint, which is waited for."""

    def __init__(self, tape: Any, folder: str, problem: Problem) -> None:
        import checkpoint_schedules as cs
        from pyadjoint.tape import TapePackageData

        array, numbers = problem._array, itertools.count()
        memory = array._ad_create_checkpoint
        state = self

        class Stored(problem.pa.OverloadedType):  # type: ignore[misc]
            def __init__(self, values: Any) -> None:
                self.path = Path(folder, f"{next(numbers)}.npy")
                np.save(self.path, plain(values))

            def _ad_restore_at_checkpoint(self, checkpoint: Any) -> Any:
                return problem.vector(np.load(checkpoint.path))

            def __del__(self) -> None:
                self.path.unlink()

        class Data(TapePackageData):  # type: ignore[misc]
            clear = reset = checkpoint = copy = lambda self: None

            def restore_from_checkpoint(self, state: Any) -> None: ...

            def continue_checkpointing(self) -> None:
                state.on = True

            def pause_checkpointing(self) -> None:
                state.on = False

        self.on = False
        self.create = lambda values: Stored(values) if state.on else memory(values)
        tape._package_data["disk"] = Data()
        tape.enable_checkpointing(cs.SingleDiskStorageSchedule(move_data=True))


def orders(problem: Problem, functional: Any, phase: float) -> tuple[float, float]:
    """Return the orders of a Taylor test, by the gradient alone and with the Hessian."""
    m = plain(problem.initial(phase))
    direction = np.sin(5 * np.linspace(0, 2 * np.pi, problem.size)) + 0.5
    functional(problem.vector(m))
    gradient = plain(functional.derivative())
    product = plain(functional.hessian(problem.vector(direction)))
    # Below 0.02 remainders of the third order are rounding errors of the sum over all points.
    first, second = (
        testing.taylor(
            lambda v: functional(problem.vector(v)),
            m,
            gradient,
            direction,
            hessian=hessian,
            size=0.2,
            sizes=4,
        )
        for hessian in (None, product)
    )
    return first.order, second.order


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the sweeps of all modes, and what else is asked of them."""
    import checkpoint_schedules as cs

    from multistage.interop.pyadjoint import enable

    problem = Problem(task["size"], task["steps"])
    with tempfile.TemporaryDirectory(dir=task["folder"]) as folder:
        runs, disks = [], []
        modes: dict[str, Callable[[Any], Any]] = {
            "plain": lambda tape: None,
            "memory": lambda tape: tape.enable_checkpointing(cs.SingleMemoryStorageSchedule()),
            "disk": lambda tape: disks.append(Disk(tape, folder, problem)),
            "ours": lambda tape: runs.append(
                enable(
                    tape, memory=f"{SLOTS} slots", tiers=f"file://{folder}", n_steps=problem.steps
                )
            ),
        }
        create = problem._array._ad_create_checkpoint
        functionals: dict[str, Any] = {}
        for name, setup in modes.items():
            functionals[name] = problem.reduced(setup)
            functionals[name].derivative()
        problem._array._ad_create_checkpoint = lambda values: (
            disks[0].create(values) if disks[0].on else create(values)
        )
        found: dict[str, list[float]] = {name: [] for name in modes}
        equal, predicted = True, []
        for k in range(task["sweeps"]):
            gradients = {}
            for name, functional in functionals.items():
                control = problem.initial(0.3 + k)
                began = time.perf_counter()
                functional(control)
                gradients[name] = plain(functional.derivative()).tobytes()
                found[name].append(time.perf_counter() - began)
            equal = equal and len(set(gradients.values())) == 1
            report = runs[0].report()
            predicted.append(report.plan.makespan_s / report.makespan_s)
        direction = problem.vector(np.cos(np.arange(problem.size)))
        hessians = {
            plain(functionals[name].hessian(direction)).tobytes() for name in ("plain", "ours")
        }
        tests = [orders(problem, functionals["ours"], phase) for phase in (0.0, 0.9)]
        plan = str(runs[0].plan.planner)
        runs[0].close()
    return {
        "seconds": found,
        "equal": equal and len(hessians) == 1,
        "over_bound": predicted,
        "orders": tests,
        "planner": plan,
        "write_over_step": report.seen.tier.write_s / report.seen.forward_step_s
        if report.seen.tier
        else 0.0,
    }


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=json.dumps("what a child process is to do"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(json.loads(args.child))))
        return
    task = {
        "size": 200_000 if args.quick else 1_000_000,
        "steps": 20 if args.quick else 30,
        "sweeps": 3 if args.quick else 9,
        "folder": str(args.folder),
    }
    samples = child("benchmarks.pyadjoint_tiers", task, ENVIRONMENT)
    assert samples["equal"], "a gradient or the Hessian differs from that of the tape alone"
    seconds = samples["seconds"]

    def over(one: str, other: str) -> float:
        pairs = zip(seconds[one], seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    ratios = {
        "bits_equal": float(samples["equal"]),
        "speed_over_plain": over("plain", "ours"),
        "speed_over_memory": over("memory", "ours"),
        "sync_disk_over_ours": over("disk", "ours"),
        "over_bound": statistics.median(samples["over_bound"][1:]),
        "write_over_step": samples["write_over_step"],
        "taylor_order": min(first for first, _ in samples["orders"]),
        "hessian_order": min(second for _, second in samples["orders"]),
    }
    finish(args, "pyadjoint_tiers", samples, ratios)


if __name__ == "__main__":
    main()
