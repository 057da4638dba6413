"""`multistage clean`: remove the files that a durable run left."""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import Commands


def add(commands: Commands) -> None:
    """Add the command to a parser."""
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
    cleaning.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Remove the files of one run, or of every rank of it."""
    from ..durable.status import clean, clean_ranks, rank_folders

    if rank_folders(args.folder):
        for each in clean_ranks(args.folder, force=args.force, dry_run=args.dry_run):
            print(each)
    else:
        print(clean(args.folder, force=args.force, dry_run=args.dry_run))
    return 0
