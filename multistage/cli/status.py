"""`multistage status`: what the folder of a durable run holds."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from .options import Commands


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    status = commands.add_parser(
        "status",
        help="show what the folder of a durable run holds",
        description="Show what the folder of a durable run holds, how far the run is and whether "
        "it can be resumed. Nothing is changed.",
        epilog="example:\n  multistage status /scratch/run42",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("folder", type=Path, help="what was given as durable=")
    status.add_argument("--json", action="store_true", help="print only JSON")
    status.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what the folder holds, or those of all ranks in it."""
    from ..durable.status import inspect, rank_folders

    ranks = rank_folders(args.folder)
    found = [inspect(folder) for folder in ranks or [args.folder]]
    if args.json:
        shown = [asdict(each) for each in found]
        print(json.dumps(shown if ranks else shown[0], indent=2))
    else:
        print("\n\n".join(map(str, found)))
    return 0
