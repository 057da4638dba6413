"""The page of a node: its facts, tiers, plans and short benchmarks; one file, no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.catalog import CATALOG
from benchmarks.page import Cell, rendered, shown
from multistage.support.units import format_bytes, format_seconds

KEYS = {
    "format": "version of this file's layout",
    "mode": "quick, or full with --full",
    "names": "host, user and folder; only with --names",
    "busy_before": "share of all processors that other work took before anything was measured",
    "warning": "why the figures are not to be trusted, if so",
    "load_before, load_after": "load of the last 1, 5 and 15 minutes; afterwards mostly our own",
    "seconds": "how long all of it, or one benchmark, took",
    "facts": "the machine: processor, memory, memory nodes, GPUs, disks, filesystems, versions",
    "facts.nodes": "memory nodes; cpus is empty for memory alone (MCDRAM, HBM, CXL); measured "
    "tells whether the bandwidth was measured by copying or told by the firmware",
    "copy_bytes_per_s": "bytes that one thread of NumPy copies per second",
    "tiers": "what each slow tier does: memory, node K (memory node), shared memory (/dev/shm), "
    "scratch with each engine, pinned (beside a GPU)",
    "sizes": "one entry for each state size that was tried",
    "state_bytes, state": "size of one state",
    "write_s, read_s (T_W, T_R)": "seconds to write, read one state, one after the other at full "
    "speed",
    "write_bytes_per_s, read_bytes_per_s (write, read)": "the same as a rate",
    "write_overhead_s, read_overhead_s (put, get)": "seconds that the computing thread itself "
    "spends per state written, read",
    "capacity_states": "states the tier holds; null if unbounded",
    "queue_depth": "writes that may wait or be under way before an offer is refused",
    "hidden": "share of transfers of 8 MiB that passes behind compute of equal length, 1 at best; "
    "forward while writing, reverse while reading back",
    "plans": "predictions for typical problems",
    "name, tier": "the problem; the tier its states go to (none: fast memory alone)",
    "steps, slots, step_s (T_A)": "steps of the problem, states that fit fast memory, seconds of a "
    "forward step",
    "planner": "the schedule with the shortest prediction",
    "rho (T_W / T_A)": "seconds to write a state over seconds of a step: every rho-th state can be "
    "streamed",
    "makespan_s": "seconds from the first step to the last adjoint",
    "recompute_factor": "forward steps run, recomputed ones included, over steps",
    "gap (above the bound)": "how far the makespan lies above a lower bound for any schedule",
    "revolve_over (Revolve over it)": "makespan of Revolve, without a tier, over this one's",
    "benchmarks": "short benchmarks: ratios, or why one failed or was skipped",
    "status, reason, warnings, output": "done, failed or skipped; why; what was warned of; the "
    "end of what a failed benchmark printed",
    "left_out, machine, seed": "of a benchmark: what --quick leaves out, where it ran, its seed",
}


def node_page(data: dict[str, Any], folder: Path) -> str:
    """Return the page of a node; plots are taken from `folder`."""
    about = data["facts"]
    cpu = about["processor"]
    load = ", ".join(map(str, data["load_before"])) or "not known"
    return rendered(
        "node.html",
        f"A node: {cpu['model']}",
        about=f"--{data['mode']}, {data['seconds']:.0f} s; load before {load}; {about['system']}; "
        f"C core {'there' if about['c_core'] else 'not built'}",
        warning=data.get("warning", ""),
        counts=[
            (cpu["threads"], f"threads, {cpu['cores']} cores"),
            (format_bytes(about["memory"]["total_bytes"]), "memory"),
            (len(about["nodes"]), "memory nodes"),
            (len(about["gpus"]), "GPUs"),
            (f"{data['copy_bytes_per_s'] / 1e9:.1f} GB/s", "copy, one thread"),
        ],
        facts=_facts(about),
        tiers=_tier_rows(data["tiers"]),
        plans=_plan_rows(data["plans"]),
        benchmarks=[
            shown(entry, data, folder) for entry in CATALOG if entry.name in data["benchmarks"]
        ],
        keys=KEYS.items(),
    )


def _facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, mem = about["processor"], about["memory"]
    rows = [
        ("processor", f"{cpu['model']}, {cpu['architecture']}, {', '.join(cpu['vectors'])}"),
        (
            "memory",
            f"{format_bytes(mem['total_bytes'])}, {format_bytes(mem['free_bytes'])} free, "
            f"huge pages: {mem['huge_pages']}",
        ),
    ]
    for node in about["nodes"]:
        cpus = f"processors {node['cpus']}" if node["cpus"] else "no processors: memory alone"
        rows.append(
            (
                f"node {node['node']}",
                f"{format_bytes(node['total_bytes'])}, {cpus}, distances {node['distances']}",
            )
        )
    rows += [(f"GPU {k}", ", ".join(gpu.values())) for k, gpu in enumerate(about["gpus"])]
    for disk in about["disks"]:
        turns = "turning" if disk["turns"] else "not turning"
        text = f"{disk['model']} {format_bytes(disk['bytes'])}, said to be {turns}"
        rows.append((f"disk {disk['kind']}", text.strip()))
    for name, fs in about["filesystems"].items():
        rows.append((name, f"{fs['kind']}, {format_bytes(fs['free_bytes'])} free"))
    rows.append(("versions", ", ".join(f"{k} {v}" for k, v in about["versions"].items())))
    return rows


def _tier_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, probe in found.items():
        if probe["status"] != "done":
            rows.append(
                (name, "", "", "", "", "", "", Cell(probe.get("reason", ""), probe["status"]))
            )
            continue
        hidden = probe.get("hidden", {})
        text = ""
        if "forward" in hidden:
            text = f"{100 * hidden['forward']:.0f} %, {100 * hidden['reverse']:.0f} %"
        for k, row in enumerate(probe["sizes"]):
            rows.append(
                (
                    name if not k else "",
                    format_bytes(row["state_bytes"]),
                    f"{row['write_bytes_per_s'] / 1e9:.2f} GB/s",
                    f"{row['read_bytes_per_s'] / 1e9:.2f} GB/s",
                    format_seconds(row["write_overhead_s"]),
                    format_seconds(row["read_overhead_s"]),
                    text if not k else "",
                    "; ".join(probe.get("warnings", ())) if not k else "",
                )
            )
    return rows


def _plan_rows(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    shown = []
    for row in rows:
        first = row["tier"] == "none"
        problem = (
            f"{row['name']}: {row['steps']} steps of {format_seconds(row['step_s'])}, states of "
            f"{format_bytes(row['state_bytes'])}, {row['slots']} slots"
        )
        shown.append(
            (
                problem if first else "",
                row["tier"],
                "" if row["rho"] is None else f"{row['rho']:.3g}",
                row["planner"],
                _duration(row["makespan_s"]),
                f"{row['recompute_factor']:.2f}",
                f"{100 * row['gap']:.1f} %",
                f"{row['revolve_over']:.2f} x",
            )
        )
    return shown


def _duration(seconds: float) -> str:
    """Return a time, long ones in hours."""
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else format_seconds(seconds)
