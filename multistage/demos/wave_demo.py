"""The command `multistage demo wave`: the gradient of a shot, beyond the memory for its wavefield.

One gradient of full waveform inversion: a Ricker source in a smooth velocity
model, data made with a layered one, and the derivative of their misfit by the
velocity at every point, by the discrete adjoint of `wave.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from ..backends.urls import open_store
from ..errors import ArgumentError, redacted
from ..measurement.chain import measure
from ..model.budget import Budget
from ..model.costs import Costs
from ..planners import PLANNERS, UniformPlan
from ..report import Report
from ..reversal import Reversal
from ..states.layout import Layout
from ..support.arrays import Reals
from ..support.command_line import add_progress, shown
from ..support.free_memory import free_bytes
from ..support.units import format_bytes, format_seconds
from ..view import save_chart
from ..view.chart import Chart, Panel, Point
from ..view.fields import Palette, image_of
from .watching import told_if_stopped, written
from .wave import Acoustic2D, build, layered, taylor_test

_COLUMNS = 79


def add(demos: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the demo to a command-line parser."""
    parser = demos.add_parser(
        "wave",
        help="differentiate a 2-D acoustic wave simulation, as seismic inversion does",
        description="Compute the gradient of a shot's misfit by the velocity at every point of a "
        "2-D acoustic model (NumPy), within a limit that its wavefield exceeds; test it, "
        "draw it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  multistage demo wave --rows 300 --columns 500 --n-steps 3000 "
        "--memory '64 MiB' \\\n      --tiers file:///scratch",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--rows", type=int, default=220, help="grid points in depth (220)")
    parser.add_argument("--columns", type=int, default=320, help="grid points across (320)")
    parser.add_argument("--n-steps", type=int, default=1_600, help="time steps (1600)")
    parser.add_argument(
        "--memory",
        default="32 MiB",
        help="fast memory for checkpoints: bytes, '32 MiB' or '32 slots' (32 MiB)",
    )
    parser.add_argument(
        "--tiers",
        default=None,
        help="slow tier: file:///scratch or memory: (a folder under --output)",
    )
    parser.add_argument(
        "--planner", default="auto", choices=["auto", *PLANNERS], help="planner (auto)"
    )
    parser.add_argument(
        "--tapes",
        action="store_true",
        help="adjoint steps start from tapes of one field, not from states of two",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for page, pictures and trace",
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo: measure, plan, differentiate, test, report, compare."""

    def say(text: str = "") -> None:
        if not args.json:
            print(_wrapped(text), flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    model = build(args.rows, args.columns, args.n_steps)
    layout = Layout.of(model.start())
    say(_problem(args, model, layout.nbytes))
    with tempfile.TemporaryDirectory(prefix="tier-", dir=args.output) as scratch:
        tier = args.tiers or f"file:{Path(scratch).resolve()}"
        store = open_store(tier)
        slots = Budget.parse(args.memory).slots_for(layout.nbytes, store.buffer_bytes(layout))
        results = _differentiate(args, model, tier, slots, say)
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    return 0


def _problem(args: argparse.Namespace, model: Acoustic2D, state_bytes: int) -> str:
    rows, columns = model.shape
    seconds = model.n_steps * model.step_s
    return (
        f"Wave: 2-D acoustic, {rows} x {columns} points of {model.spacing_m:g} m, "
        f"{model.n_steps} steps of {model.step_s * 1e3:.2f} ms = {seconds:.2f} s, Ricker source "
        f"of {model.frequency_hz:.0f} Hz, {model.recorded.shape[1]} receivers.\n"
        f"One state (two time levels) is {format_bytes(state_bytes)}, the whole wavefield "
        f"{format_bytes(model.n_steps * state_bytes)}; memory for checkpoints: {args.memory}."
    )


def _measured(model: Acoustic2D, taped: bool, tier: str, progress: bool | None) -> Costs:
    return measure(
        model.chain(taped),
        model.start(),
        model.n_steps,
        open_store(tier),
        adjoint=model.start_adjoint(),
        seconds=2.0,
        progress=progress,
    )


def _say_costs(costs: Costs, say: Callable[[str], None]) -> None:
    say("\n== Measure")
    assert costs.tier is not None
    measured = [
        ("forward step      T_A", costs.forward_step_s),
        ("adjoint step      T_B", costs.turn_s),
        ("write of a state  T_W", costs.tier.write_s),
        ("read of a state   T_R", costs.tier.read_s),
    ]
    if costs.tape_step_s is not None:
        measured.insert(1, (f"keeping a tape of {format_bytes(costs.tape_bytes)}", costs.taping_s))
    for what, seconds in measured:
        say(f"{what:<32}{format_seconds(seconds):>10}")


def _differentiate(
    args: argparse.Namespace, model: Acoustic2D, tier: str, slots: int, say: Callable[[str], None]
) -> dict[str, Any]:
    costs = _measured(model, args.tapes, tier, shown(args))
    _say_costs(costs, say)
    say("\n== Plan")
    before = _begin_peak()
    with (
        Reversal(
            model.chain(args.tapes),
            n_steps=model.n_steps,
            planner=args.planner,
            memory=f"{slots} slots",
            tiers=tier,
            costs=costs,
            progress=shown(args),
        ) as reversal,
        told_if_stopped(reversal),
    ):
        say(_plan_table(reversal.prepare(model.start())))
        reversal.forward(model.start())
        misfit = model.misfit()
        adjoint = reversal.reverse(model.start_adjoint())
        report = reversal.report()
    peak = _peak_bytes()
    gradient = model.gradient(adjoint)

    say("\n== Predicted and measured")
    slow = redacted(args.tiers or "file")
    say(f"misfit {misfit:.6g}; {gradient.size:,} derivatives; slow tier {slow}\n")
    say(str(report))
    if before is not None and peak is not None:
        whole = format_bytes(model.n_steps * costs.state_bytes)
        say(
            f"\nThe peak of the process's memory rose by {format_bytes(max(0, peak - before))}, "
            f"buffers included; the whole wavefield would take {whole}."
        )

    say("\n== Taylor test: c the model, J its misfit, d towards the layered model")
    true, _ = layered(model.shape)
    rows = taylor_test(model, gradient, (true - model.velocity) / 32, misfit)
    say(_taylor_table(rows))
    names = _drawn(args.output, model, gradient, true, report)
    say(f"\nWritten: {', '.join(names)}")

    say("\n== The same gradient by other means")
    others, equal = _others(args, model, gradient, report, say)
    say("\nThe gradients are equal to the last bit." if equal else "\nTHE GRADIENTS DIFFER.")
    if not equal:
        raise ArgumentError("gradients differ between planners: please report this")
    return {
        "misfit": misfit,
        "taylor": [{"eps": e, "difference": d, "remainder": r} for e, d, r in rows],
        "report": report.to_dict(),
        "others": others,
        "gradients_equal": equal,
    }


def _plan_table(plan: UniformPlan) -> str:
    """Return a plan as text of 80 columns: the candidates and the choice."""
    shown = ("planner", "makespan", "above bound", "recompute", "writes", "peak bytes")
    candidates = sorted(plan.candidates or (plan,), key=lambda other: other.makespan_s)
    table = tabulate(
        [[other.row()[name] for name in shown] for other in candidates],
        headers=shown,
        disable_numparse=True,
        stralign="right",
    )
    bound = f"\n\nlower bound {format_seconds(plan.lower_bound_s)}; {plan.slots} fast slots"
    return "\n".join(text for text in (table + bound, plan.note, plan.why) if text)


def _taylor_table(rows: list[tuple[float, float, float]]) -> str:
    table = []
    for k, (eps, difference, remainder) in enumerate(rows):
        orders = ("", "")
        if k:
            _, last, left = rows[k - 1]
            orders = (f"{np.log2(last / difference):.2f}", f"{np.log2(left / remainder):.2f}")
        table.append((f"{eps:g}", f"{difference:.3e}", orders[0], f"{remainder:.3e}", orders[1]))
    return tabulate(
        table,
        headers=("eps", "|J(c+eps d) - J(c)|", "order", "... - eps <g, d>|", "order"),
        disable_numparse=True,
        stralign="right",
    )


def _others(
    args: argparse.Namespace,
    model: Acoustic2D,
    gradient: Reals,
    report: Report,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], bool]:
    """Run the sweep under other planners and with the other kind of tape; return their reports."""
    costs = report.plan.costs
    state_is_tape = costs.without_tiers() if costs.state_is_tape else None
    slots = report.plan.slots
    ways: list[tuple[str, str, int, bool, Costs | None]] = [
        ("revolve", "revolve", slots, False, state_is_tape),
        ("revolve, tapes of one field", "revolve", slots, True, None),
    ]
    if 2 * model.n_steps * costs.state_bytes < free_bytes():
        ways.insert(0, ("store-all", "store-all", model.n_steps, False, state_is_tape))
    rows = [_row(f"{report.plan.planner} (above)", report, True)]
    results: dict[str, Any] = {}
    equal = True
    for name, planner, room, taped, known in ways:
        with Reversal(
            model.chain(taped),
            n_steps=model.n_steps,
            planner=planner,
            memory=f"{room} slots",
            costs=known,
        ) as reversal:
            reversal.forward(model.start())
            other = model.gradient(reversal.reverse(model.start_adjoint()))
            seen = reversal.report()
        same = bool(np.array_equal(other, gradient))
        equal &= same
        rows.append(_row(name, seen, same))
        results[name] = seen.to_dict()
    say(
        tabulate(
            rows,
            headers=("way", "seconds", "recompute", "fast memory", "gradient"),
            disable_numparse=True,
            colalign=("left", *["right"] * 4),
        )
    )
    return results, equal


def _row(way: str, report: Report, same: bool) -> tuple[str, ...]:
    return (
        way,
        f"{report.makespan_s:.2f}",
        f"{report.recompute_factor:.2f}",
        format_bytes(report.peak_fast_bytes),
        "equal" if same else "DIFFERS",
    )


def _drawn(
    folder: Path, model: Acoustic2D, gradient: Reals, true: Reals, report: Report
) -> list[str]:
    """Write page, trace and pictures; return their names."""
    picture = folder / "gradient.svg"
    save_chart(gradient_chart(model, gradient, true), picture)
    return [str(picture), *written(report, folder)]


def gradient_chart(model: Acoustic2D, gradient: Reals, true: Reals) -> Chart:
    """Return the true velocity, the model's, the residual and the gradient, one below the other."""
    km, edge = model.spacing_m / 1e3, model.columns.start
    inside = (slice(edge, -edge), slice(edge, -edge))  # without the sponge
    width, depth = (km * (count - 2 * edge) for count in (model.shape[1], model.shape[0]))
    source = ((model.source[1] - edge + 0.5) * km, (model.source[0] - edge + 0.5) * km)
    end_s = model.n_steps * model.step_s
    residual = model.recorded - model.observed
    # The gradient along the surface is far larger than below, where the structure is.
    below = gradient[inside]
    below = below[min(gradient.shape[0] // 8, len(below) // 2) :]

    def panel(title: str, field: Reals, palette: Palette, values: tuple[float, float]) -> Panel:
        image = image_of(field, palette, values, (0.0, width, 0.0, depth), title)
        point = Point("source", "chosen", *source)
        return Panel((image, point), "depth (km)", depth, 0.0, title=title, share=depth / width)

    velocities = float(true.min()), float(true.max())
    span = f"{velocities[0]:.0f} to {velocities[1]:.0f} m/s"
    most_residual, most_gradient = (_most(each) for each in (residual, below))
    seen = image_of(
        residual, "gray", (-most_residual, most_residual), (0.0, width, 0.0, end_s), "residual"
    )
    return Chart(
        title="gradient of a misfit by the velocity",
        panels=(
            panel(f"velocity of the data, {span}", true[inside], "heat", velocities),
            panel("velocity of the model", model.velocity[inside], "heat", velocities),
            Panel(
                (seen,),
                "time (s)",
                end_s,
                0.0,
                title=f"residual at the receivers, within {most_residual:.2g}",
                share=depth / width,
            ),
            panel(
                f"gradient, within {most_gradient:.2g} per m/s (blue is negative)",
                gradient[inside],
                "difference",
                (-most_gradient, most_gradient),
            ),
        ),
        label="distance (km)",
        low=0.0,
        high=width,
        height=200.0 + 4 * min(300.0, 762.0 * depth / width),
    )


def _most(field: Reals) -> float:
    """Return a value that 1 % of a field exceeds."""
    return float(np.quantile(np.abs(field), 0.99)) or 1.0


def _begin_peak() -> int | None:
    """Reset the peak of the process's memory; return the bytes held, None if unknown."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def _peak_bytes() -> int | None:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), None)


def _wrapped(text: str) -> str:
    """Return text whose lines of prose fit a screen of 80 columns."""
    return "\n".join(
        line if len(line) <= _COLUMNS else textwrap.fill(line, _COLUMNS)
        for line in text.split("\n")
    )
