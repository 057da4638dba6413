"""Totals stay exact and memory stays bounded however many spans are added."""

from __future__ import annotations

import itertools

from multistage.schedule.timeline import Timeline


def test_spans_merge_but_totals_stay_exact() -> None:
    timeline = Timeline(max_spans=50)
    for i in range(1001):
        kind = "forward" if i % 3 else "stall"
        timeline.add("compute", kind, 2.0 * i, 2.0 * i + 1, first=i, nbytes=8)
    spans = timeline.lanes["compute"]
    assert len(spans) < 100
    assert timeline.totals_s["forward"] + timeline.totals_s["stall"] == 1001
    assert timeline.counts["stall"] == 334
    assert sum(span.count for span in spans) == 1001
    assert sum(span.busy_s for span in spans) == 1001
    assert sum(span.nbytes for span in spans) == 8 * 1001
    assert spans[0].start_s == 0
    assert spans[-1].stop_s == timeline.end_s == 2001
    assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(spans))


def test_peaks_survive_thinning() -> None:
    timeline = Timeline(max_spans=10)
    for i in range(1000):
        timeline.sample("fast", float(i), 99.0 if i == 501 else float(i % 7))
    assert timeline.peak("fast") == 99.0
    assert timeline.peak("none") == 0
    assert len(timeline.memory["fast"]) < 20


def test_a_long_run_is_resolved_everywhere_alike() -> None:
    timeline = Timeline(max_spans=100)
    n = 20_000
    for i in range(n):
        timeline.add("compute", "forward", i, i + 1.0, first=i)
        timeline.sample("file", float(i), float(i))
    for i in range(n):  # one step recomputed before each adjoint step of three times its length
        start_s = n + 4.0 * i
        timeline.add("compute", "forward", start_s, start_s + 1)
        timeline.add("compute", "reverse", start_s + 1, start_s + 4)
        timeline.sample("file", start_s, float(n - i))
    spans = timeline.lanes["compute"]
    assert max(span.stop_s - span.start_s for span in spans) < 0.1 * 5 * n
    shown = {"forward": 0.0, "reverse": 0.0}
    for span in spans:
        shown[span.kind] += span.stop_s - span.start_s
        if span.kind == "reverse":
            assert span.start_s >= n - 0.1 * 5 * n
    assert shown == {"forward": 2.0 * n, "reverse": 3.0 * n}
    samples = timeline.memory["file"]
    assert len(samples) < 200
    for time_s in (0.2 * n, 0.7 * n, 2 * n, 4 * n):
        value = [v for t, v in samples if t <= time_s][-1]
        true = time_s if time_s < n else n - (time_s - n) / 4
        assert abs(value - true) < 0.15 * n


def test_every_span_comes_with_its_lane() -> None:
    timeline = Timeline()
    timeline.add("read", "read", 0.0, 1.0, first=3)
    assert [(lane, span.kind, span.first) for lane, span in timeline.spans()] == [
        ("read", "read", 3)
    ]
