"""Timelines as Chrome trace events, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..schedule.timeline import Timeline


def trace_events(timeline: Timeline) -> dict[str, object]:
    """Return the timeline in the Trace Event Format: a thread per lane, a counter per memory curve.

    Examples
    --------
    >>> timeline = Timeline()
    >>> timeline.add("compute", "forward", 0.0, 2e-3, first=0, count=4)
    >>> [event["ph"] for event in trace_events(timeline)["traceEvents"]]
    ['M', 'M', 'M', 'M', 'X']
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "multistage"}}
    ]
    for thread, lane in enumerate(timeline.lanes, start=1):
        name = {"name": lane}
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": name})
    timed: list[dict[str, Any]] = [
        {
            "ph": "X",
            "pid": 1,
            "tid": thread,
            "name": span.kind,
            "ts": round(1e6 * span.start_s, 3),
            "dur": round(1e6 * max(0.0, span.stop_s - span.start_s), 3),
            "args": {
                "first": span.first,
                "count": span.count,
                "bytes": span.nbytes,
                "busy_us": round(1e6 * span.busy_s, 3),
            },
        }
        for thread, spans in enumerate(timeline.lanes.values(), start=1)
        for span in spans
    ]
    for curve, samples in timeline.memory.items():
        for time_s, nbytes in samples:
            timed.append(
                {
                    "ph": "C",
                    "pid": 1,
                    "name": f"{curve} memory",
                    "ts": round(1e6 * time_s, 3),
                    "args": {"bytes": nbytes},
                }
            )
    timed.sort(key=lambda event: event["ts"])
    return {"displayTimeUnit": "ms", "traceEvents": events + timed}


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the timeline to a JSON file that ui.perfetto.dev opens."""
    Path(path).write_text(json.dumps(trace_events(timeline), allow_nan=False) + "\n")
