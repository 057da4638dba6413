"""What the demos do with a report: files of it, and printing it when Ctrl-C ends them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import ArgumentError
from ..report import Report
from ..reversal import Reversal

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


@contextlib.contextmanager
def told_if_stopped(reversal: Reversal[State, Adjoint]) -> Iterator[None]:
    """Report on standard error how far the sweeps came if Ctrl-C ends them."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(ArgumentError):  # before the first step
            report = reversal.report()
            if not report.complete:
                print(f"\n{report}\n", file=sys.stderr)
        raise


def written(report: Report, folder: Path) -> list[str]:
    """Write a report's page, trace and picture to a folder; return what was written."""
    page, trace, picture = (folder / n for n in ("report.html", "trace.json", "timeline.svg"))
    report.trace(trace)
    report.save(page)
    report.picture(picture)
    return [str(picture), str(page), f"{trace} (open it at ui.perfetto.dev)"]
