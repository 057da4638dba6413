"""What the demos share with those who watch them: bars, and a word after Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import ArgumentError
from ..reversal import Reversal


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Add `--progress` and `--no-progress`."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show progress bars (on a terminal, unless with --json)",
    )


def shown(args: argparse.Namespace) -> bool | None:
    """Return what the options say of progress bars."""
    given: bool | None = args.progress
    return False if given is None and args.json else given


@contextlib.contextmanager
def told_if_stopped(reversal: Reversal[Any, Any]) -> Iterator[None]:
    """Tell on standard error how far the sweeps came if Ctrl-C ends them."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(ArgumentError):  # before the first step
            report = reversal.report()
            if not report.complete:
                print(f"\n{report}\n", file=sys.stderr)
        raise
