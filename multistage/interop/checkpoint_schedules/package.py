"""The package itself, imported when it is needed."""

from __future__ import annotations

from types import ModuleType

from ...errors import ArgumentError


def theirs() -> ModuleType:
    """Return checkpoint_schedules.  Raises ArgumentError if it is not installed."""
    try:
        import checkpoint_schedules
    except ImportError as error:
        raise ArgumentError(
            "checkpoint_schedules is not installed; "
            "pip install 'multistage-checkpointing[checkpoint-schedules]'"
        ) from error
    module: ModuleType = checkpoint_schedules
    return module
