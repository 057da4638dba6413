"""The record of a run, real or simulated: spans in lanes, memory over time, totals.

Its size is bounded however long the run: when a lane is full, neighbouring
spans are merged, so the picture gets coarser while the totals stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["compute", "write", "read"]
Kind = Literal["forward", "reverse", "stall", "write", "read"]


@dataclass(slots=True)
class Span:
    """Something that went on in one lane.

    Attributes
    ----------
    kind : str
        What it was; of merged spans, the kind that was busy longest.
    start_s, stop_s : float
        Seconds since the run began.
    busy_s : float
        Seconds of work inside the span; less than its length when merged
        across gaps.
    first : int
        Step or key it began with.
    count : int
        Steps run or states moved.
    nbytes : int
    """

    kind: Kind
    start_s: float
    stop_s: float
    busy_s: float
    first: int = 0
    count: int = 1
    nbytes: int = 0


@dataclass(slots=True)
class Timeline:
    """Spans, memory samples and totals of one run.

    Attributes
    ----------
    max_spans : int
        Spans kept per lane, and samples kept per memory curve.
    totals_s : dict of kind to seconds
    counts : dict of kind to steps or states
    bytes : dict of kind to bytes

    Examples
    --------
    >>> timeline = Timeline()
    >>> timeline.add("compute", "forward", 0.0, 2.0, first=0, count=4)
    >>> timeline.totals_s["forward"], timeline.counts["forward"]
    (2.0, 4)
    """

    max_spans: int = 1_000
    lanes: dict[Lane, list[Span]] = field(
        default_factory=lambda: {"compute": [], "write": [], "read": []}
    )
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    totals_s: dict[Kind, float] = field(
        default_factory=lambda: {
            "forward": 0.0,
            "reverse": 0.0,
            "stall": 0.0,
            "write": 0.0,
            "read": 0.0,
        }
    )
    counts: dict[Kind, int] = field(
        default_factory=lambda: {"forward": 0, "reverse": 0, "stall": 0, "write": 0, "read": 0}
    )
    bytes: dict[Kind, int] = field(
        default_factory=lambda: {"forward": 0, "reverse": 0, "stall": 0, "write": 0, "read": 0}
    )
    end_forward_s: float = 0.0
    end_s: float = 0.0

    def add(
        self,
        lane: Lane,
        kind: Kind,
        start_s: float,
        stop_s: float,
        *,
        first: int = 0,
        count: int = 1,
        nbytes: int = 0,
    ) -> None:
        """Record one span; spans of a lane come in order of time."""
        self.totals_s[kind] += stop_s - start_s
        self.counts[kind] += count
        self.bytes[kind] += nbytes
        self.end_s = max(self.end_s, stop_s)
        spans = self.lanes[lane]
        spans.append(Span(kind, start_s, stop_s, stop_s - start_s, first, count, nbytes))
        if len(spans) >= 2 * self.max_spans:
            spans[:] = _coarser(spans)

    def sample(self, curve: str, time_s: float, nbytes: float) -> None:
        """Record that `curve` (a tier's name) holds `nbytes` from `time_s` on."""
        samples = self.memory.setdefault(curve, [])
        samples.append((time_s, nbytes))
        if len(samples) >= 2 * self.max_spans:
            # Keep the larger of each pair: peaks must survive.
            samples[:] = [
                max(pair, key=lambda s: s[1])
                for pair in zip(samples[::2], samples[1::2], strict=False)
            ]

    def spans(self) -> Iterator[tuple[Lane, Span]]:
        """Yield every span with its lane."""
        for lane, spans in self.lanes.items():
            for span in spans:
                yield lane, span

    def peak(self, curve: str) -> float:
        """Return the largest sample of a memory curve, 0 if it has none."""
        return max((value for _, value in self.memory.get(curve, ())), default=0.0)


def _coarser(spans: list[Span]) -> list[Span]:
    merged = []
    for a, b in zip(spans[::2], spans[1::2], strict=False):
        longest = a if a.busy_s >= b.busy_s else b
        merged.append(
            Span(
                longest.kind,
                a.start_s,
                b.stop_s,
                a.busy_s + b.busy_s,
                a.first,
                a.count + b.count,
                a.nbytes + b.nbytes,
            )
        )
    if len(spans) % 2:
        merged.append(spans[-1])
    return merged
