"""`multistage probe`: measure tiers, list memory nodes."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from ..errors import ArgumentError
from ..support.units import format_bytes, format_seconds, parse_bytes
from .options import Commands, add_progress, leave_out, shown

_SIZES = "64KiB,1MiB,16MiB"


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    probe = commands.add_parser(
        "probe",
        help="measure what a folder or another tier can do; list memory nodes",
        description="Write and read states in a tier, a folder with every engine, and show what "
        "it costs. Without a tier: list the memory nodes (MCDRAM, HBM, CXL, sockets), and "
        "propose where to compute and which tier to use.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  multistage probe\n"
        "  multistage probe /scratch --sizes 64KiB,1MiB,16MiB\n"
        "  multistage probe 'file:///scratch?engine=direct'\n"
        "  multistage probe numa:1",
    )
    probe.add_argument(
        "tier", nargs="?", help="a folder, or a tier as programs name it: file:///scratch, numa:1"
    )
    probe.add_argument("--sizes", help="state sizes (64KiB,1MiB,16MiB)")
    probe.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(probe)
    probe.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure a tier with every engine it has, and print what it costs."""
    from ..measurement.store import probe_tier

    if args.tier is None:
        leave_out(args, ("sizes",), "without a tier memory nodes are listed")
        return _probe_nodes(args)
    is_tier = re.match(r"[a-z][a-z0-9+.-]*:", args.tier) and not Path(args.tier).exists()
    tier = args.tier if is_tier else Path(args.tier)
    sizes = [parse_bytes(size, "--sizes") for size in (args.sizes or _SIZES).split(",")]
    for size in sizes:
        if size < 1:
            raise ArgumentError(f"state size {size} must be at least one byte")
    rows = probe_tier(tier, sizes, progress=shown(args))
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    table = [
        {
            "engine": row.engine,
            "state": format_bytes(row.state_bytes),
            "write": f"{format_bytes(row.write_bytes_per_s)}/s",
            "read": f"{format_bytes(row.read_bytes_per_s)}/s",
            "round trip": format_seconds(row.latency_s),
            "put costs": format_seconds(row.put_s),
            "get costs": format_seconds(row.get_s),
        }
        for row in rows
    ]
    print(tabulate(table, headers="keys", disable_numparse=True, stralign="right"))
    print(
        "\nround trip: one state put and read back, small ones from the buffer they wait in.\n"
        "put and get costs: what the computing thread spends per state."
    )
    if any(row.engine == "aiofiles" for row in rows):
        print(
            "aiofiles reads may come from the page cache; reads of the other engines come from\n"
            "the disk where the filesystem takes O_DIRECT."
        )
    return 0


def _probe_nodes(args: argparse.Namespace) -> int:
    from ..backends.nodes import advice, fast_node, memory_nodes

    nodes = memory_nodes(measure=True)
    fast = fast_node(nodes)
    if args.json:
        rows = [{**asdict(node), "fast": node is fast} for node in nodes]
        print(json.dumps({"nodes": rows, "advice": advice(nodes)}, indent=2))
        return 0
    table = [
        {
            "node": f"{node.node}{' (fast)' if node is fast else ''}",
            "processors": node.cpus or "none: memory alone",
            "memory": format_bytes(node.total_bytes),
            "free": format_bytes(node.free_bytes),
            "bandwidth": "not known"
            if node.bandwidth_bytes_per_s is None
            else f"{format_bytes(node.bandwidth_bytes_per_s)}/s",
            "known from": "copying"
            if node.measured
            else "firmware"
            if node.bandwidth_bytes_per_s
            else "",
            "distances": " ".join(map(str, node.distances)),
        }
        for node in nodes
    ]
    if table:
        print(tabulate(table, headers="keys", disable_numparse=True, stralign="right"), end="\n\n")
    print("\n".join(advice(nodes)))
    return 0
