"""Measure a node for a colleague: what it is, its tiers, plans for it, short benchmarks.

Writes `node.json` and `node.html` (one file, no network).  Neither holds names
of users, hosts or folders unless `--names` is given.  On a node with memory of
two kinds run it once bound to each, as in `numactl --membind=1 scripts/bench-node`.

    scripts/bench-node [--scratch FOLDER] [--torch] [--full] [--tiers-only]
    python -m benchmarks.node               # in an environment of one's own
"""

from __future__ import annotations

import argparse
import getpass
import importlib.util
import json
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks._common import child, require_core
from benchmarks.all import load_average, run, write
from benchmarks.catalog import CATALOG, ONE_THREAD, cuda, missing
from benchmarks.facts import Scrubber, facts
from benchmarks.node_page import node_page
from benchmarks.overlap import Work, get_all, put_all
from multistage import Costs, Tier, open_store, plan
from multistage.backends.files import available_engines
from multistage.errors import MultistageError
from multistage.measurement.driver import action_seconds
from multistage.measurement.store import probe_store
from multistage.states.layout import Layout

FORMAT = "multistage-node-1"
SIZES = (64 << 10, 1 << 20, 16 << 20)
# Beside compute: states of this size, so many of them.
BESIDE_BYTES, BESIDE_COUNT = 8 << 20, 16
# Above this share of all processors a machine is told to be busy.
BUSY = 0.1


def tiers(scratch: Path, nodes: Sequence[int]) -> dict[str, str]:
    """Return the tiers to try, by the name they are told by, as `open_store` takes them."""
    found = {"memory": "memory:"}
    found |= {f"node {node}": f"numa:{node}" for node in nodes}
    if Path("/dev/shm").is_dir():
        found["shared memory"] = "file:/dev/shm"
    found |= {
        f"scratch, {engine}": f"file:{scratch}?engine={engine}" for engine in available_engines()
    }
    return found


def probed(tier: str, seconds: float, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Return what a tier does with states of each size."""
    rows = []
    for size in sizes:
        measured = probe_store(
            open_store(tier), Layout.of(np.zeros(size, np.uint8)), seconds=seconds, most=64
        )
        rows.append({"state_bytes": size, **_rates(measured, size)})
    return rows


def _rates(tier: Tier, size: int) -> dict[str, Any]:
    names = ("write_s", "read_s", "write_overhead_s", "read_overhead_s", "capacity_states")
    return {
        **{name: getattr(tier, name) for name in (*names, "queue_depth")},
        "write_bytes_per_s": size / tier.write_s if tier.write_s else 0.0,
        "read_bytes_per_s": size / tier.read_s if tier.read_s else 0.0,
    }


def pinned(seconds: float, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Return the same of pinned memory beside a device; run in a process of its own."""
    import torch

    from multistage.torch.tiers.pinned import PinnedStore

    device, rows = torch.device("cuda"), []
    for size in sizes:
        layout = Layout.of((np.broadcast_to(np.uint8(0), (size,)),))
        state = torch.zeros(size, dtype=torch.uint8, device=device)
        store: Any = PinnedStore(None, device)
        measured = probe_store(store, layout, seconds=seconds, most=64, arrays=[state])
        rows.append({"state_bytes": size, **_rates(measured, size)})
    return rows


def beside(tier: str, count: int = BESIDE_COUNT) -> dict[str, float]:
    """Return how much of a tier's transfers hides behind compute of equal length.

    (compute + transfers - wall) / the lesser: 1 when all of it does.
    """
    base = np.random.default_rng(0).random(BESIDE_BYTES // 8)
    states = [[base + key] for key in range(4)] * (count // 4)
    layout, work = Layout.of(base), Work()

    def nothing() -> None:
        return

    def timed(phase: str, between: Callable[[], None]) -> float:
        store: Any = open_store(tier)
        store.open(layout)
        try:
            out = put_all(store, states, between if phase == "forward" else nothing)
            return out if phase == "forward" else get_all(store, states, between)
        finally:
            store.close()

    timed("reverse", nothing)  # memory touched for the first time is slow
    samples: dict[str, list[float]] = {"forward": [], "reverse": []}
    for _ in range(3):
        for phase, found in samples.items():
            moving = timed(phase, nothing)
            work.calibrate(moving / count)
            began = time.perf_counter()
            for _ in range(count):
                work.run()
            computing = time.perf_counter() - began
            wall = timed(phase, work.run)
            found.append((computing + moving - wall) / min(computing, moving))
    return {phase: statistics.median(found) for phase, found in samples.items()}


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of all processors' time that others take, over some seconds."""
    return float(psutil.cpu_percent(interval=seconds)) / 100


def copy_rate(nbytes: int = 256 << 20) -> float:
    """Return the bytes per second that one thread of NumPy copies."""
    source = np.ones(nbytes // 8)
    target = np.empty_like(source)
    best = np.inf
    for _ in range(4):
        began = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - began)
    return float(nbytes / best)


def problems(rate: float) -> list[dict[str, Any]]:
    """Return typical problems; a step of a wave passes over its state ten times at `rate`."""
    found: list[dict[str, Any]] = [
        {
            "name": "narrow LSTM",
            "state_bytes": 64 << 10,
            "steps": 100_000,
            "slots": 64,
            "step_s": 1e-4,
        },
        {
            "name": "wide LSTM",
            "state_bytes": 1 << 20,
            "steps": 10_000,
            "slots": 64,
            "step_s": 2e-3,
        },
    ]
    for name, size, steps, slots in (
        ("2-D wave", 64 << 20, 2_000, 32),
        ("3-D wave", 2 << 30, 5_000, 16),
    ):
        found.append(
            {
                "name": name,
                "state_bytes": size,
                "steps": steps,
                "slots": slots,
                "step_s": 10 * size / rate,
            }
        )
    return found


def rooms(about: dict[str, Any]) -> dict[str, float]:
    """Return the bytes that checkpoints may take in each kind of tier: half of free memory."""
    free, filesystems = about["memory"]["free_bytes"], about["filesystems"]
    found = {"memory": free / 2, "pinned": free / 2}
    found |= {f"node {n['node']}": min(free, n["free_bytes"]) / 2 for n in about["nodes"]}
    if "shared memory" in filesystems:
        found["shared memory"] = min(free, filesystems["shared memory"]["free_bytes"]) / 2
    found["scratch"] = filesystems["scratch"]["free_bytes"]
    return found


def plans(probes: dict[str, Any], rate: float, room: dict[str, float]) -> list[dict[str, Any]]:
    """Return a plan for each problem with each tier, from the nearest size measured."""
    rows, action_s = [], action_seconds()
    for problem in problems(rate):
        size = problem["state_bytes"]
        costs = Costs(problem["step_s"], 2 * problem["step_s"], state_bytes=size, action_s=action_s)
        alone = plan(costs, f"{problem['slots']} slots", problem["steps"], "revolve")
        rows.append({**problem, "tier": "none", **_plan_row(alone, alone.makespan_s)})
        for name, probe in probes.items():
            if probe["status"] != "done":
                continue
            near = min(probe["sizes"], key=lambda row: abs(np.log(row["state_bytes"] / size)))
            grow = size / near["state_bytes"]
            tier = Tier(
                name,
                near["write_s"] * grow,
                near["read_s"] * grow,
                near["write_overhead_s"] * grow,
                near["read_overhead_s"] * grow,
                capacity_states=int(room[name.partition(",")[0]] // size),
                queue_depth=near["queue_depth"],
            )
            with_tier = Costs(
                costs.forward_step_s,
                costs.reverse_step_s,
                state_bytes=size,
                tiers=(tier,),
                action_s=action_s,
            )
            chosen = plan(with_tier, f"{problem['slots']} slots", problem["steps"])
            rows.append({**problem, "tier": name, **_plan_row(chosen, alone.makespan_s)})
    return rows


def _plan_row(chosen: Any, revolve_s: float) -> dict[str, Any]:
    return {
        "planner": chosen.planner,
        "rho": chosen.costs.rho if chosen.costs.tier else None,
        "makespan_s": chosen.makespan_s,
        "recompute_factor": chosen.recompute_factor,
        "gap": chosen.gap,
        "revolve_over": revolve_s / chosen.makespan_s,
    }


# ------------------------------------------------------------------------- all


class _Heard(logging.Handler):
    """Keeps what the package warns about, for the page instead of the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.add(record.getMessage())


def attempted(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of some work, or why there is none; warnings are part of it."""
    heard, logger = _Heard(), logging.getLogger("multistage")
    logger.addHandler(heard)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found: dict[str, Any] = {"status": "done", "result": work()}
        except (MultistageError, OSError, MemoryError, AssertionError) as error:
            found = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        finally:
            logger.removeHandler(heard)
    if told := sorted(heard.said | {str(warning.message) for warning in said}):
        found["warnings"] = told
    return found


def measure(scratch: Path, full: bool, folder: Path, benchmarks: bool) -> dict[str, Any]:
    """Measure everything; pictures go to `folder`."""
    began = time.monotonic()
    data: dict[str, Any] = {
        "format": FORMAT,
        "mode": "full" if full else "quick",
        "busy_before": busy_share(),  # first: all that follows makes the machine busy
        "facts": facts(scratch),
        "load_before": load_average(),
    }
    if data["busy_before"] > BUSY:
        data["warning"] = (
            f"the machine was busy: {100 * data['busy_before']:.0f} % of its processors before "
            "anything was measured; rates are too low and scatter. Run it again when it is idle"
        )
        print(f"bench-node: warning: {data['warning']}.", file=sys.stderr, flush=True)
    seconds = 3.0 if full else 0.6
    data["tiers"] = _tiers(scratch, data["facts"]["nodes"], seconds, full)
    data["copy_bytes_per_s"] = copy_rate()
    print("plans ...", flush=True)
    data["plans"] = plans(data["tiers"], data["copy_bytes_per_s"], rooms(data["facts"]))
    data["benchmarks"] = {}
    for entry in CATALOG:
        if not (entry.short and benchmarks):
            continue
        if lacking := missing(entry):
            data["benchmarks"][entry.name] = {"status": "skipped", "reason": lacking}
        else:
            print(f"{entry.name} ...", flush=True)
            mode = "full" if full else "quick"
            data["benchmarks"][entry.name] = run(entry, mode, folder, 0, cwd=scratch)
    data["seconds"] = round(time.monotonic() - began, 1)
    data["load_after"] = load_average()
    return data


def _tiers(
    scratch: Path, nodes: list[dict[str, Any]], seconds: float, full: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tier in tiers(scratch, [node["node"] for node in nodes]).items():
        print(f"{name} ...", flush=True)
        probe = attempted(lambda: probed(tier, seconds))  # noqa: B023
        found[name] = {k: v for k, v in probe.items() if k != "result"}
        if probe["status"] == "done":
            found[name]["sizes"] = probe["result"]
            # With one thread of compute, so that the transfers have a core.
            task = {"what": "beside", "tier": tier, "count": BESIDE_COUNT * (4 if full else 1)}
            found[name]["hidden"] = _in_child(task)
    if not cuda():
        there = importlib.util.find_spec("torch") is not None
        reason = "no CUDA device is here" if there else "torch is not installed (--torch)"
        found["pinned"] = {"status": "skipped", "reason": reason}
        return found
    print("pinned ...", flush=True)
    probe = _in_child({"what": "pinned", "seconds": seconds})
    found["pinned"] = probe if isinstance(probe, dict) else {"status": "done", "sizes": probe}
    return found


def _in_child(task: dict[str, Any]) -> Any:
    """Run `_child` in a process of its own; a failure is a result, too."""
    try:
        return child("benchmarks.node", task, ONE_THREAD)
    except (OSError, ValueError, IndexError) as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    except subprocess.CalledProcessError as error:  # its own words are on the terminal
        return {"status": "failed", "reason": f"exit status {error.returncode}"}


def _child(task: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")  # told by the probe already
    logging.disable()
    if task["what"] == "pinned":
        return pinned(task["seconds"])
    return beside(task["tier"], task["count"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status, 1 where a benchmark failed."""
    parser = argparse.ArgumentParser(
        prog="bench-node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure (the current)")
    parser.add_argument("--out", type=Path, default=Path("node-output"), help="where the files go")
    parser.add_argument("--full", action="store_true", help="longer: half an hour or more")
    parser.add_argument("--tiers-only", action="store_true", help="no benchmarks: a minute")
    parser.add_argument("--names", action="store_true", help="keep names of host, user, folders")
    parser.add_argument("--from", dest="start", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    require_core()
    if args.child:
        print(json.dumps(_child(args.child)))
        return 0
    scratch, out = (args.start / (args.scratch or Path())).resolve(), args.start / args.out
    if not scratch.is_dir():
        parser.error(f"--scratch {scratch}: no such folder")
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as pictures,
        tempfile.TemporaryDirectory(prefix="bench-node-", dir=scratch) as work,
    ):
        data = measure(Path(work), args.full, Path(pictures), not args.tiers_only)
        if args.names:
            data["names"] = {
                "host": socket.gethostname(),
                "user": getpass.getuser(),
                "scratch": str(scratch),
            }
        else:
            data = Scrubber(Path(work), scratch, Path(pictures), out).scrubbed(data)
        write(out / "node.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        write(out / "node.html", node_page(data, Path(pictures)))
    print(f"written: {out / 'node.html'}, {out / 'node.json'}")
    return int(any(r["status"] == "failed" for r in data["benchmarks"].values()))


if __name__ == "__main__":
    sys.exit(main())
