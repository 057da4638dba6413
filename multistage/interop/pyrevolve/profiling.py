"""Where the time went, by section and action, as pyrevolve counts it."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Self


class Timer:
    """Adds the time of a block to a profiler.

    Attributes
    ----------
    elapsed : float
        Milliseconds, once the block is left.
    """

    def __init__(self, profiler: Profiler, section: str, action: str) -> None:
        self._profiler, self._section, self._action = profiler, section, action
        self._began = self.elapsed = 0.0

    def __enter__(self) -> Self:
        self._began = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.elapsed = (perf_counter() - self._began) * 1000
        self._profiler.increment(self._section, self._action, self.elapsed)

    @property
    def elapsed_secs(self) -> float:
        """Seconds."""
        return self.elapsed / 1000


class Profiler:
    """Sums milliseconds and counts.

    Attributes
    ----------
    timings : dict
        Section -> action -> milliseconds.
    counts : dict
        Section -> action -> times.

    Examples
    --------
    >>> profiler = Profiler()
    >>> with profiler.get_timer("forward", "advance"):
    ...     pass
    >>> profiler.counts
    {'forward': {'advance': 1}}
    """

    def __init__(self) -> None:
        self.timings: dict[str, dict[str, float]] = {}
        self.counts: dict[str, dict[str, int]] = {}

    def get_timer(self, section: str, action: str) -> Timer:
        """Return a context manager that times its block."""
        return Timer(self, section, action)

    def increment(self, section: str, action: str, elapsed: float, times: int = 1) -> None:
        """Add `times` calls that took `elapsed` milliseconds together."""
        timings = self.timings.setdefault(section, {})
        timings[action] = timings.get(action, 0.0) + elapsed
        counts = self.counts.setdefault(section, {})
        counts[action] = counts.get(action, 0) + times

    def summary(self) -> str:
        """Return a text of all sums, in milliseconds, and counts."""
        lines = ["****************"]
        for section, timings in self.timings.items():
            lines.append(f"In section {section}:")
            lines += [
                f"\tAction {action}: {elapsed:f} ({self.counts[section][action]})"
                for action, elapsed in timings.items()
            ]
        return "\n".join([*lines, "****************"])

    def get_dict(self) -> dict[str, str | int]:
        """Return everything flat: `SECTION_ACTION_timing` and `SECTION_ACTION_counts`."""
        flat: dict[str, str | int] = {
            f"{section}_{action}_timing": f"{elapsed:.2f}"
            for section, timings in self.timings.items()
            for action, elapsed in timings.items()
        }
        for section, counts in self.counts.items():
            flat.update({f"{section}_{action}_counts": n for action, n in counts.items()})
        return flat


class Meter:
    """Seconds and calls of one kind, gathered where a profiler would be too slow."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def flush(self, profiler: Profiler, section: str, action: str) -> None:
        """Hand over what was gathered, and start again."""
        if self.calls:
            profiler.increment(section, action, self.seconds * 1e3, self.calls)
            self.seconds, self.calls = 0.0, 0
