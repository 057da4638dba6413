"""One gradient of full-waveform inversion in Devito, within a memory budget.

    python examples/devito_fwi.py --quick
    python examples/devito_fwi.py --shape 201 201 --memory "4 MiB" --scratch /scratch

Devito's acoustic solver computes the gradient of a data misfit by the velocity.
The forward wavefield is larger than --memory; its states stream to a file in
--scratch while the operators run.  Done twice, by Devito's own
`jacobian_adjoint(checkpointing=True)`, unchanged, and with a `Revolver` written
out, and compared with the gradient of the whole wavefield in memory: both must
be equal to the last bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multistage.interop.pyrevolve import Revolver, install
from multistage.support.units import format_bytes, format_seconds, parse_bytes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A checkpointed gradient of Devito.")
    parser.add_argument("--shape", type=int, nargs=2, default=(400, 400), help="grid (400 400)")
    parser.add_argument("--tn", type=float, default=1500.0, help="milliseconds modelled (1500)")
    parser.add_argument("--space-order", type=int, default=8, help="order in space (8)")
    parser.add_argument("--memory", default="32 MiB", help="budget for checkpoints (32 MiB)")
    parser.add_argument("--scratch", default=".", help="folder on a fast disk (here)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--quick", action="store_true", help="a small grid, a few seconds")
    args = parser.parse_args()
    if args.quick:
        args.shape, args.tn, args.memory = (120, 120), 600.0, "6 MiB"
    return args


class Timed:
    """An operator whose time is summed."""

    def __init__(self, operator: Any) -> None:
        self._apply = operator.apply
        self.seconds = 0.0

    def apply(self, t_start: int, t_end: int) -> None:
        began = time.perf_counter()
        self._apply(t_start, t_end)
        self.seconds += time.perf_counter() - began


@dataclass
class Problem:
    """A model to be inverted, and the misfit of its data.

    `start` is the velocity at which the gradient is wanted, `residual` predicted less
    observed data, `whole` the wavefield of all steps.
    """

    wave: Any
    start: Any
    residual: Any
    whole: Any


def make_problem(args: argparse.Namespace) -> Problem:
    from devito import Function, smooth
    from examples.seismic import Receiver  # of Devito
    from examples.seismic.acoustic import acoustic_setup

    dtype = np.dtype(args.dtype).type
    wave = acoustic_setup(
        shape=tuple(args.shape),
        spacing=(10.0, 10.0),
        nbl=40,
        tn=args.tn,
        space_order=args.space_order,
        dtype=dtype,
    )
    model, geometry = wave.model, wave.geometry
    start = Function(name="start", grid=model.grid, space_order=args.space_order)
    smooth(start, model.vp)
    observed = wave.forward()[0]
    predicted, whole = wave.forward(vp=start, save=True)[:2]
    residual = Receiver(
        name="rec",
        grid=model.grid,
        data=predicted.data - observed.data,
        time_range=geometry.time_axis,
        coordinates=geometry.rec_positions,
        dtype=dtype,
    )
    return Problem(wave, start, residual, whole)


def written_out(problem: Problem, args: argparse.Namespace, tier: str, full: Any) -> None:
    """Compute the gradient by a `Revolver`: what one writes for operators of one's own."""
    from devito import CheckpointOperator, DevitoCheckpoint, Function, TimeFunction

    wave, start = problem.wave, problem.start
    model, geometry = wave.model, wave.geometry

    def field(name: str) -> Any:
        return TimeFunction(name=name, grid=model.grid, time_order=2, space_order=args.space_order)

    u, v = field("u"), field("v")
    grad = Function(name="grad", grid=model.grid)
    options = {"u": u, "dt": wave.dt, **model.physical_params(vp=start)}
    wrap_fw = Timed(CheckpointOperator(wave.op_fwd(save=False), src=geometry.src, **options))
    gradient = wave.op_grad(save=False)
    wrap_rev = Timed(CheckpointOperator(gradient, v=v, rec=problem.residual, grad=grad, **options))
    cp, steps = DevitoCheckpoint([u]), geometry.nt - 2
    with Revolver(cp, wrap_fw, wrap_rev, None, steps, memory=args.memory, tiers=tier) as revolver:
        for sweep in ("first sweep, measuring costs", "second sweep"):
            for each in (u, v, grad):
                each.data_with_halo[:] = 0
            wrap_fw.seconds = wrap_rev.seconds = 0.0
            began = time.perf_counter()
            revolver.apply_forward()
            revolver.apply_reverse()
            seconds = time.perf_counter() - began
            outside = 1 - (wrap_fw.seconds + wrap_rev.seconds) / seconds
            print(f"{sweep}: {format_seconds(seconds)}, outside the operators {outside:.1%}")
            if not np.array_equal(grad.data, full):
                raise SystemExit("the gradients differ")
        print(revolver.plan)
        print(revolver.report())


def main() -> None:
    args = arguments()
    if importlib.util.find_spec("devito") is None:
        raise SystemExit(
            "this example needs Devito; pip install 'multistage-checkpointing[devito]'"
        )
    os.environ.setdefault("DEVITO_LOGGING", "WARNING")
    tier = f"file://{Path(args.scratch).resolve()}"
    install(memory=args.memory, tiers=tier)  # before anything of Devito is imported

    problem = make_problem(args)
    wave, start, residual = problem.wave, problem.start, problem.residual
    history = problem.whole.size_allocated * np.dtype(args.dtype).itemsize
    budget = parse_bytes(args.memory)
    rows, columns = wave.model.grid.shape
    print(
        f"{rows} x {columns} points, {wave.geometry.nt - 2} steps; the wavefield takes "
        f"{format_bytes(history)}, the budget is {format_bytes(budget)}: "
        f"{history / budget:.1f} times less"
    )

    began = time.perf_counter()
    full = wave.jacobian_adjoint(residual, problem.whole, vp=start)[0]
    print(f"adjoint with the whole wavefield: {format_seconds(time.perf_counter() - began)}")
    full = np.array(full.data)
    problem.whole = None  # its memory is needed no more

    began = time.perf_counter()
    ours = wave.jacobian_adjoint(residual, None, vp=start, checkpointing=True)[0]
    print(f"jacobian_adjoint(checkpointing=True): {format_seconds(time.perf_counter() - began)}")
    written_out(problem, args, tier, full)
    if not np.array_equal(ours.data, full):
        raise SystemExit("the gradients differ")
    print("The gradients are equal to the last bit.")


if __name__ == "__main__":
    main()
