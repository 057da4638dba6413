"""`multistage status` and `multistage clean`: what a durable run left in its folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from .options import Commands


def add(commands: Commands) -> None:
    """Add the commands to a parser."""
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
    status.set_defaults(run=show)
    cleaning = commands.add_parser(
        "clean",
        help="remove what a durable run left in its folder",
        description="Remove the files that a durable run wrote in its folder, and the folder if "
        "it is empty then. All other files stay, whatever their names.",
        epilog="example:\n  multistage clean --dry-run /scratch/run42\n"
        "  multistage clean --force /scratch/run42",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cleaning.add_argument("folder", type=Path, help="what was given as durable=")
    cleaning.add_argument("--force", action="store_true", help="even a run that can be resumed")
    cleaning.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    cleaning.set_defaults(run=remove)


def show(args: argparse.Namespace) -> int:
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


def remove(args: argparse.Namespace) -> int:
    """Remove the files of one run, or of every rank of it."""
    from ..durable.status import clean_ranks

    for each in clean_ranks(args.folder, force=args.force, dry_run=args.dry_run):
        print(each)
    return 0
