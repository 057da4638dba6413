"""How much memory there is: the default budget."""

from __future__ import annotations

from pathlib import Path

import psutil

# With no budget given, checkpoints may take this share of what is free.
DEFAULT_SHARE = 0.25

_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes this process may still take, honouring a cgroup limit.

    Examples
    --------
    >>> free_bytes() > 0
    True
    """
    free = int(psutil.virtual_memory().available)
    for limit_name, usage_name in _CGROUP_FILES:
        try:
            limit = (cgroup / limit_name).read_text().strip()
            usage = int((cgroup / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdecimal():
            free = min(free, max(0, int(limit) - usage))
    return free


def default_budget_bytes() -> int:
    """Return a quarter of the memory that is free."""
    return int(DEFAULT_SHARE * free_bytes())
