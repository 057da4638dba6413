"""Seconds to plan a synchronous hierarchy, and what the plans cost, beside the peers.

Ours: plan and make every action of the schedule.  checkpoint_schedules and
pyrevolve: construct and iterate, each in a process of its own that is stopped
after a few seconds, so that they are left out at the lengths they do not
manage.  Both get the same slots and the same costs; every schedule, theirs
too, is translated to our actions and judged by our simulator, legality
included.

checkpoint_schedules' H-Revolve calls its dynamic program with forward and
backward costs swapped.  Half of the points have equal costs, where that
changes nothing; the other half show what it costs them.  Its split keeps no
slot free for a transfer to pass through; ours gets as many slots as theirs
then takes.  pyrevolve's H-Revolve solves for unit costs whatever is given; its
makespan is its own figure.

    python -m benchmarks.planner_speed [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._common import finish, options
from multistage import PLANNERS, Costs, Tier
from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.schedule.simulation import simulate

LENGTHS = (30, 100, 300, 1_000, 3_000, 10_000)
SLOTS, DISK = 10, 100
WIDE_SLOTS = 100  # ours alone, at the longest length
WRITE_S, READ_S = 3.0, 2.0
REVERSE_S = (1.0, 3.0)  # of forward steps of 1 s: equal, and not
PEERS = {
    "h-revolve": "HRevolve",
    "disk-revolve": "DiskRevolve",
    "periodic-disk": "PeriodicDiskRevolve",
    "stumm-walther": "MultistageCheckpointSchedule",
    "mixed": "MixedCheckpointSchedule",
    "revolve": "Revolve",
}


def costs_of(planner: str, reverse_s: float) -> Costs:
    """Return the costs that a planner and its peer are given."""
    capacity = DISK if planner in ("h-revolve", "stumm-walther") else None
    tiers = (Tier("disk", WRITE_S, READ_S, capacity_states=capacity),)
    tape_step_s = 1.0 if planner == "mixed" else None
    return Costs(1.0, reverse_s, tape_step_s, tiers=tiers)


# ----------------------------------------------------------------------- the peers


def their_schedule(planner: str, n: int, reverse_s: float) -> Any:
    """Return checkpoint_schedules' counterpart of a planner."""
    import checkpoint_schedules as peer

    named: dict[str, Any] = {"uf": 1.0, "ub": reverse_s, "wd": WRITE_S, "rd": READ_S}
    if planner == "h-revolve":
        return peer.HRevolve(n, SLOTS, DISK, **named)
    if planner == "stumm-walther":
        return peer.MultistageCheckpointSchedule(n, SLOTS, DISK)
    if planner == "mixed":
        ram = peer.StorageType.RAM
        return peer.MixedCheckpointSchedule(n, SLOTS, storage=ram)
    return getattr(peer, PEERS[planner])(n, SLOTS, **named)


def iterated(schedule: Any) -> Iterator[Any]:
    """Yield the actions of a schedule of checkpoint_schedules up to its end."""
    for action in schedule:
        yield action
        if type(action).__name__ == "EndReverse":
            return


def _restarted(step: int, moved: bool, token: int | None) -> Iterator[Action]:
    """Yield what makes a checkpoint live; `token` of its read, None for one in fast memory."""
    if token is not None:
        yield Get(step)
        yield Await(token)
        yield Load(step)
        yield Free(step)
        if moved:
            yield Drop(step)
        return
    yield Load(step)
    if moved:
        yield Free(step)


def translated(theirs: list[Any]) -> Iterator[Action]:
    """Yield our actions for those of checkpoint_schedules; what they leave behind is dropped."""
    from checkpoint_schedules import Copy, Forward, Move, StorageType
    from checkpoint_schedules import EndForward as TheirEndForward
    from checkpoint_schedules import Reverse as TheirReverse

    ram: set[int] = set()
    disk: set[int] = set()
    tapes: set[int] = set()
    tokens, ended = 0, False
    for action in theirs:
        if isinstance(action, Forward):
            start = action.n0
            if action.write_ics and action.storage == StorageType.RAM and start not in ram:
                ram.add(start)
                yield Save(start)
            elif action.write_ics and action.storage == StorageType.DISK:
                disk.add(start)
                yield Put(start)
                yield Await(tokens)
                tokens += 1
            if action.write_adj_deps and action.storage != StorageType.WORK:
                tapes.add(start)
                yield Tape(start)
            elif action.write_adj_deps:
                if not ended:  # the turn's tape; later ones are made by Reverse itself
                    yield Tape(start)
            else:
                yield Advance(start, action.n1)
        elif isinstance(action, TheirEndForward):
            ended = True
            yield EndForward()
        elif isinstance(action, TheirReverse):
            yield Reverse(action.n0)
        elif isinstance(action, Copy | Move) and action.n not in tapes:
            moved, on_disk = isinstance(action, Move), action.from_storage == StorageType.DISK
            yield from _restarted(action.n, moved, tokens if on_disk else None)
            tokens += on_disk
            if moved:
                (disk if on_disk else ram).remove(action.n)
    for step in ram:
        yield Free(step)
    for step in disk:
        yield Drop(step)


def with_checkpoint_schedules(planner: str, n: int, reverse_s: float) -> dict[str, Any]:
    """Return seconds, makespan and slots of checkpoint_schedules' schedule."""
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = list(iterated(their_schedule(planner, n, reverse_s)))
    seconds = time.perf_counter() - began
    run = simulate(translated(theirs), n, costs_of(planner, reverse_s), 2 * SLOTS)
    return {"seconds": seconds, "makespan_s": run.makespan_s, "slots": run.peak_slots}


def with_pyrevolve(planner: str, n: int, reverse_s: float) -> dict[str, Any]:
    """Return seconds and makespan of pyrevolve's H-Revolve or of its C++ core."""
    costs = costs_of(planner, reverse_s)
    if planner == "revolve":
        began = time.perf_counter()
        made = PLANNERS["pyrevolve"](costs, SLOTS, n)
        actions = list(made.schedule())
        seconds = time.perf_counter() - began
        run = simulate(iter(actions), n, costs, SLOTS)
        return {"seconds": seconds, "makespan_s": run.makespan_s, "slots": run.peak_slots}
    from pyrevolve.schedulers import HRevolve

    class Architecture:
        nblevels = 2
        sizes, wd, rd = (SLOTS, DISK), (0.0, WRITE_S), (0.0, READ_S)

    began = time.perf_counter()
    # Theirs counts the steps before the last one.
    schedule = HRevolve(n - 1, n - 1, Architecture(), uf=1.0, ub=reverse_s)
    seconds = time.perf_counter() - began
    last = costs.forward_step_s  # ours makes state n as well
    return {"seconds": seconds, "makespan_s": schedule.makespan + last, "slots": SLOTS}


def child_main(task: dict[str, Any]) -> None:
    """Run one peer at one point and print what it took."""
    run = with_pyrevolve if task.pop("who") == "pyrevolve" else with_checkpoint_schedules
    print(json.dumps(run(**task)))


def limited(task: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
    """Run a peer in a process of its own; None when it takes more than `limit_s` seconds."""
    command = [sys.executable, "-m", "benchmarks.planner_speed", "--child", json.dumps(task)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---------------------------------------------------------------------------- ours


def ours(planner: str, n: int, reverse_s: float, slots: int, repeats: int) -> dict[str, Any]:
    """Return the seconds to plan, and to make all actions too, and the makespan; judged first."""
    costs = costs_of(planner, reverse_s)
    made = PLANNERS[planner](costs, slots, n)
    run = simulate(made.schedule(), n, costs, slots)
    assert abs(run.makespan_s - made.makespan_s) <= 1e-9 * run.makespan_s, (planner, n)
    plan_s, whole_s = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        made = PLANNERS[planner](costs, slots, n)
        plan_s.append(time.perf_counter() - began)
        simulate(made.schedule(), n, costs, slots, checked=False)
        whole_s.append(time.perf_counter() - began)
    return {
        "seconds": min(whole_s),
        "plan_s": min(plan_s),
        "samples": {"plan_s": plan_s, "whole_s": whole_s},
        "makespan_s": run.makespan_s,
        "slots": slots,
    }


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child_main(json.loads(args.child))
        return
    limit_s, repeats = (3.0, 3) if args.quick else (15.0, 5)
    lengths = (30, 300, 10_000) if args.quick else LENGTHS
    rows: list[dict[str, Any]] = []
    left_out = []
    for reverse_s in REVERSE_S:
        stopped: set[tuple[str, str]] = set()
        for n in lengths:
            for planner in PEERS:
                row = compared(planner, n, reverse_s, limit_s, repeats, stopped, left_out)
                rows.append(row)
                print(_line(row), flush=True)
    for planner in PEERS:
        own = ours(planner, 10_000, 1.0, WIDE_SLOTS, repeats)
        row = {"planner": planner, "n": 10_000, "reverse_s": 1.0, "ours": own, "peers": {}}
        rows.append(row)
        print(_line(row), f"  {WIDE_SLOTS} slots", flush=True)
    long = [row for row in rows if row["n"] == 10_000]
    pairs = [(row, peer) for row in rows for peer in row["peers"].values()]
    ratios = {
        "slowest_1e4_s": max(row["ours"]["seconds"] for row in long),
        "slowest_plan_1e4_s": max(row["ours"]["plan_s"] for row in long),
        "worst_makespan_over_theirs": max(
            row["ours"]["makespan_s"] / peer["makespan_s"] for row, peer in pairs
        ),
        "best_makespan_over_theirs": min(
            row["ours"]["makespan_s"] / peer["makespan_s"] for row, peer in pairs
        ),
    }
    assert ratios["worst_makespan_over_theirs"] <= 1 + 1e-9
    finish(args, "planner_speed", rows, ratios, left_out)
    if args.plot:
        _plot(rows, args.plot)


def compared(
    planner: str,
    n: int,
    reverse_s: float,
    limit_s: float,
    repeats: int,
    stopped: set[tuple[str, str]],
    left_out: list[str],
) -> dict[str, Any]:
    """Return one point: the peers that manage it, and ours in the slots they take."""
    packages = ["checkpoint_schedules"]
    if planner in ("h-revolve", "revolve") and (reverse_s == 1.0 or planner == "revolve"):
        packages.append("pyrevolve")
    peers: dict[str, dict[str, Any]] = {}
    for package in packages:
        if (package, planner) in stopped:
            continue
        task = {"who": package, "planner": planner, "n": n, "reverse_s": reverse_s}
        found = limited(task, limit_s)
        if found is None:
            stopped.add((package, planner))
            left_out.append(
                f"{package}'s {planner} from n = {n} on, reverse_s = {reverse_s:g}: "
                f"more than {limit_s:g} s"
            )
        else:
            peers[package] = found
    slots = SLOTS
    if planner == "stumm-walther" and peers:  # its transfers pass through a slot of ours
        slots = max(slots, *(int(peer["slots"]) for peer in peers.values()))
    own = ours(planner, n, reverse_s, slots, repeats)
    return {"planner": planner, "n": n, "reverse_s": reverse_s, "ours": own, "peers": peers}


def _line(row: dict[str, Any]) -> str:
    own = row["ours"]
    text = f"n={row['n']:>6} T_B={row['reverse_s']:g} {row['planner']:<14}"
    text += f" {1e3 * own['seconds']:>8.2f} ms (plan {1e3 * own['plan_s']:.2f})"
    for name, peer in row["peers"].items():
        ratio = own["makespan_s"] / peer["makespan_s"]
        text += f"   {name} {1e3 * peer['seconds']:.1f} ms, makespan x {ratio:.4f}"
    return text


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for k, planner in enumerate(PEERS):
        mine = [row for row in rows if row["planner"] == planner and row["reverse_s"] == 1.0]
        mine = [row for row in mine if row["ours"]["slots"] < WIDE_SLOTS]
        colour = f"C{k}"
        axes.plot(
            [row["n"] for row in mine],
            [row["ours"]["seconds"] for row in mine],
            "o-",
            color=colour,
            label=planner,
        )
        theirs = [row for row in mine if "checkpoint_schedules" in row["peers"]]
        axes.plot(
            [row["n"] for row in theirs],
            [row["peers"]["checkpoint_schedules"]["seconds"] for row in theirs],
            "x--",
            color=colour,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("number of steps n")
    axes.set_ylabel("seconds to plan and make the schedule")
    axes.set_title("solid: ours; dashed: checkpoint_schedules")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
