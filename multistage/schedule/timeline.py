"""The record of a run, real or simulated: spans in lanes, memory over time, totals.

Its size is bounded however long the run: when a lane is full, the spans within
one grain of time are merged, each kind for itself, so the picture gets coarser
everywhere alike while the totals, and the time each kind takes, stay exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["compute", "write", "read"]
Kind = Literal["forward", "reverse", "stall", "write", "read"]


@dataclass(slots=True)
class Span:
    """An activity in one lane.

    Attributes
    ----------
    kind : str
        What it was.  Merged spans of several kinds become one span for each
        kind, one after the other.
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
            spans[:] = _coarser(spans, self.max_spans)

    def sample(self, curve: str, time_s: float, nbytes: float) -> None:
        """Record that `curve` (a tier's name) holds `nbytes` from `time_s` on."""
        samples = self.memory.setdefault(curve, [])
        samples.append((time_s, nbytes))
        if len(samples) >= 2 * self.max_spans:
            samples[:] = _thinner(samples, self.max_spans)

    def spans(self) -> Iterator[tuple[Lane, Span]]:
        """Yield every span with its lane."""
        for lane, spans in self.lanes.items():
            for span in spans:
                yield lane, span

    def peak(self, curve: str) -> float:
        """Return the largest sample of a memory curve, 0 if it has none."""
        return max((value for _, value in self.memory.get(curve, ())), default=0.0)


def _grain_s(extent_s: float, parts: float) -> float:
    """Return the power of two, in seconds, that cuts the time into at most `parts` and one.

    Powers of two nest: what was merged before stays within one coarser grain.
    """
    return 2.0 ** math.ceil(math.log2(extent_s / parts)) if extent_s > 0 else math.inf


def _coarser(spans: list[Span], most: int) -> list[Span]:
    """Merge the spans that begin in one grain of time, leaving about `most` or fewer.

    Merging pairs instead would merge the oldest spans again each time the lane
    fills: the first half of a long run would end up as one span.
    """
    extent_s = spans[-1].stop_s - spans[0].start_s
    grain_s = _grain_s(extent_s, most)
    while True:
        groups = itertools.groupby(spans, key=lambda span: span.start_s // grain_s)
        merged = [part for _, group in groups for part in _by_kind(list(group))]
        if len(merged) <= most or grain_s > extent_s:
            return merged
        grain_s *= 2


def _by_kind(spans: list[Span]) -> list[Span]:
    """Return one span per kind, one after the other in the time that `spans` took."""
    if len(spans) == 1:
        return spans
    kinds: dict[Kind, list[Span]] = {}
    for span in spans:
        kinds.setdefault(span.kind, []).append(span)
    merged: list[Span] = []
    start_s, end_s = spans[0].start_s, spans[-1].stop_s
    for group in kinds.values():
        busy_s = sum(span.busy_s for span in group)
        is_last = len(merged) == len(kinds) - 1
        stop_s = end_s if is_last else min(start_s + busy_s, end_s)
        merged.append(
            Span(
                group[0].kind,
                start_s,
                stop_s,
                busy_s,
                group[0].first,
                sum(span.count for span in group),
                sum(span.nbytes for span in group),
            )
        )
        start_s = stop_s
    return merged


def _thinner(samples: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return the largest and the last sample of each grain of time, `most` or fewer.

    Peaks must survive, and the value with which the next grain begins.
    """
    extent_s = samples[-1][0] - samples[0][0]
    grain_s = _grain_s(extent_s, most / 2)
    while True:
        kept: list[tuple[float, float]] = []
        for _, grouped in itertools.groupby(samples, key=lambda sample: sample[0] // grain_s):
            group = list(grouped)
            largest = max(range(len(group)), key=lambda i: group[i][1])
            kept += [group[i] for i in sorted({largest, len(group) - 1})]
        if len(kept) <= most or grain_s > extent_s:
            return kept
        grain_s *= 2
