"""The command line: probe | plan | simulate | demo | status | clean.

One module for each command, or two, with `add` (its options) and what runs it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..errors import MultistageError, redacted
from ..version import __version__
from . import demo, folders, plan, probe, simulate


class _Parser(argparse.ArgumentParser):
    """A parser that tells what is wrong with its arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {redacted(message)}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _Parser(
        prog="multistage",
        description="Reverse long computations beyond memory: measure tiers, plan, simulate, see.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Start with `multistage demo lstm`, or `multistage plan --help`.",
    )
    parser.add_argument("--version", action="version", version=f"multistage {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (probe, plan, simulate, folders, demo):
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0 on success, 2 for bad input, 130 after Ctrl-C, 141 where the reader of a pipe has gone.
    """
    try:
        args = parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()  # or a broken pipe would show at exit only
        return status
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough.  What is still buffered goes nowhere,
        # or the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except (MultistageError, OSError) as error:
        print(f"multistage: error: {redacted(str(error))}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"multistage: error: {str(error) or 'out of memory'}; ask for less", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("multistage: interrupted", file=sys.stderr)
        return 130
