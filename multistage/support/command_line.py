"""The options of progress bars, which commands and demos share."""

from __future__ import annotations

import argparse


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Add `--progress` and `--no-progress`."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show progress bars (on a terminal, unless with --json)",
    )


def shown(args: argparse.Namespace) -> bool | None:
    """Return what the options say of progress bars: None for the default.

    Examples
    --------
    >>> shown(argparse.Namespace(progress=None, json=True))
    False
    """
    given: bool | None = args.progress
    return False if given is None and args.json else given
