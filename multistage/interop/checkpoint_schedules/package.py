"""The package itself, imported when it is needed."""

from __future__ import annotations

from typing import Any

from ...errors import ArgumentError


def theirs() -> Any:
    """Return checkpoint_schedules.  Raises ArgumentError if it is not installed."""
    try:
        import checkpoint_schedules
    except ImportError as error:
        raise ArgumentError(
            "checkpoint_schedules is not installed; "
            "pip install 'multistage-checkpointing[checkpoint-schedules]'"
        ) from error
    return checkpoint_schedules
