"""Models of timm and transformers and recurrent cells of the literature, trained within limits.

Each model goes through `mst.compile`, each cell through `mst.unroll`, as a user would
write it, in a fresh process of its own.  Asked of each:

* does it train within 0.7, 0.5 and 0.3 of what plain training takes, and if not, why;
* are outputs, gradients, buffers and generators bit-identical over two steps with an
  update between: to those of the same graph run eagerly (`torch.compile(backend="eager")`),
  and to plain training's, unless the model computes otherwise where it is compiled;
* its peak over the limit, storage by storage;
* seconds (of one processor; the least of several steps of each, in turns) of a step
  over plain training's;
* the same of other means: the library's own checkpointing of blocks (of cells, chunks
  of sqrt(T) steps), and `checkpoint_sequential` with sqrt(n) segments in each `nn.Sequential`;
  and our seconds over theirs with their peak as our limit;
* seconds until the first step can run: capture, profiling, checking, planning.

A limit that is too small for the model is a refusal that names the smallest; beside it stands
what the model's largest operator takes by itself, which no cut into stages can undercut.
`works` counts the models that train at 0.7; `faster_than_checkpoint` counts a
limit that is refused against us.  Nothing is downloaded: weights are random.
`--exact` looks at bits and peaks alone, at the least of the limits that works.

    pip install -c constraints.txt -e ".[zoo]"
    pip install -c constraints.txt --no-deps timm
    python -m benchmarks.zoo [--quick] [--only NAME ...] [--exact] [--records FOLDER]
                             [--json FILE] [--page FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _zoo_cells, _zoo_models
from benchmarks._common import KEEP, child, finish, machine, options
from benchmarks.docs import fill, markdown

LIMITS = (0.7, 0.5, 0.3)
REPEATS = 5
STOP_S = 900.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **KEEP}
QUICK = (
    "timm resnet18",
    "timm mobilenetv3_small_050",
    "timm vit_tiny_patch16_224",
    "transformers GPT2",
    "transformers Llama",
    "cell GRU stack",
    "cell selective scan",
    "cell LIF neurons",
)


def names() -> list[str]:
    """Return the names of all models and cells."""
    return [*_zoo_models.names(), *(f"cell {name}" for name in _zoo_cells.CELLS)]


def _record(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return what became of one model or cell: of an earlier run, if it is there."""
    path = args.records and args.records / f"{name.replace(' ', '_').replace(',', '')}.json"
    if path and path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    task = {
        "name": name,
        "seed": args.seed,
        "repeats": 0 if args.exact else args.repeats or (1 if args.quick else REPEATS),
        "limits": LIMITS[::-1] if args.exact else LIMITS,
    }
    began = time.perf_counter()
    try:
        found: dict[str, Any] = child("benchmarks._zoo_run", task, ENVIRONMENT, STOP_S)
    except subprocess.TimeoutExpired:
        found = {"name": name, "points": [], "reason": f"stopped after {STOP_S:g} s"}
    except subprocess.CalledProcessError as error:
        found = {"name": name, "points": [], "reason": f"exit status {error.returncode}"}
    found["took_s"], found["load"] = time.perf_counter() - began, os.getloadavg()[1]
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


# -------------------------------------------------------------------------- figures


def works(record: dict[str, Any]) -> bool:
    """Whether a model trains at the largest of the limits."""
    return fits(record, LIMITS[0])


def fits(record: dict[str, Any], limit: float) -> bool:
    """Whether a model trains at a limit, or at a smaller one."""
    return any(p["limit"] <= limit and "over_limit" in p for p in record["points"])


def differs(record: dict[str, Any]) -> str:
    """Return what was other than in the same graph run eagerly; "" if nothing was."""
    return next((p["differs"] for p in record["points"] if p.get("differs")), "")


def ratios(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of all records.

    Examples
    --------
    >>> point = {"limit": 0.7, "over_limit": 0.9, "over_plain": 1.2}
    >>> record = {"points": [point], "prepare_s": 1.0, "plain_s": 0.2, "others": {}}
    >>> found = ratios([record, {"points": [], "reason": "cannot be captured"}])
    >>> found["works"], found["equal"], found["limit_exceeded"], found["prepare_over_plain"]
    (0.5, 1.0, 0.0, 5.0)
    """
    working = [r for r in records if works(r)]
    points = [p for r in records for p in r["points"] if "over_limit" in p]
    found = {
        "works": len(working) / len(records),
        "equal": _share(not differs(r) for r in working),
        "equal_to_plain": _share(not differs(r) for r in working if not r.get("asks")),
        "limit_exceeded": float(sum(p["over_limit"] > 1 for p in points)),
        "prepare_over_plain": _median(
            r["prepare_s"] / r["plain_s"] for r in working if "prepare_s" in r
        ),
    }
    for limit in LIMITS:
        tried = [
            r for r in records if not r["points"] or any(p["limit"] <= limit for p in r["points"])
        ]
        found[f"fits_{limit}"] = _share(fits(r, limit) for r in tried)
        found[f"possible_{limit}"] = _share(
            fits(r, limit) or r.get("operator_over_plain", 0.0) <= limit for r in tried
        )
        found[f"seconds_over_plain_{limit}"] = _median(
            p["over_plain"] for p in points if p["limit"] == limit and "over_plain" in p
        )
    for kind, short in (("checkpoint", "checkpoint"), ("checkpoint_sequential", "sequential")):
        beside = [r["others"][kind] for r in working if kind in r["others"]]
        ran = [c for c in beside if "peak_over_plain" in c]
        found[f"faster_than_{short}"] = _share(c.get("over_it", math.inf) < 1 for c in ran)
        found[f"seconds_over_{short}"] = _median(c["over_it"] for c in ran if "over_it" in c)
    return found


def _at(record: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return what became of a record at a limit; nothing if it was not tried."""
    points: list[dict[str, Any]] = record["points"]
    return next((p for p in points if p["limit"] == limit), {})


def _share(hits: Any) -> float:
    found = list(hits)
    return sum(found) / len(found) if found else float("nan")


def _median(values: Any) -> float:
    found = list(values)
    return statistics.median(found) if found else float("nan")


def least_of(message: str) -> int | None:
    """Return the smallest limit that a refusal names.

    Examples
    --------
    >>> least_of("memory=5 < 14 bytes needed; raise it")
    14
    """
    found = re.search(r"< ([\d_]+) bytes", message)
    return None if found is None else int(found[1].replace("_", ""))


# ---------------------------------------------------------------------------- pages


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as a Markdown table, failures with their reason."""
    beside = "peak, s over plain; our s over its"
    rows = [
        (
            "what",
            "bits",
            "peak over limit at 0.7, 0.5, 0.3",
            "s over plain",
            f"checkpoint: {beside}",
            f"checkpoint_sequential: {beside}",
            "prepare s / plain s",
        )
    ]
    return markdown([*rows, *map(_row, records)])


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    if not record["points"]:
        return record["name"], "-", record["reason"], "", "", "", ""
    points = [_at(record, limit) for limit in LIMITS]
    ran = any("over_limit" in p for p in points)
    bits = "equal" if ran else "-"
    if record.get("asks"):
        bits += " to its graph"
    if said := differs(record):
        bits = f"**differ**: {said}"
    others = record["others"]
    prepare = ""
    if "prepare_s" in record:
        prepare = f"{record['prepare_s']:.2f} / {record['plain_s']:.3f}"
    return (
        record["name"],
        bits,
        _joined([_peak(p) for p in points]) + _alone(record),
        _joined([f"{p['over_plain']:.2f}" if "over_plain" in p else "-" for p in points]),
        *(_beside(others.get(kind, {})) for kind in ("checkpoint", "checkpoint_sequential")),
        prepare,
    )


def _joined(texts: Sequence[str]) -> str:
    same = len(set(texts)) == 1 and not texts[0][:1].isdigit()
    return texts[0] if same else ", ".join(texts)


def _peak(point: dict[str, Any]) -> str:
    if not point:
        return "-"
    if "over_limit" in point:
        return f"{point['over_limit']:.2f}"
    return f"refused: at least {point['least']:.2f}" if "least" in point else str(point["reason"])


def _alone(record: dict[str, Any]) -> str:
    if "operator_over_plain" not in record:
        return ""
    kind = record["operator"].rpartition("(")[2].rstrip(")")
    return f" (one {kind} takes {record['operator_over_plain']:.2f})"


def _beside(other: dict[str, Any]) -> str:
    if "peak_over_plain" not in other:
        return str(other.get("reason", ""))
    ours = f"{other['over_it']:.2f}" if "over_it" in other else str(other["refused"])
    return f"{other['peak_over_plain']:.2f}, {other['over_plain']:.2f}; {ours}"


def page(path: Path, records: Sequence[dict[str, Any]], found: dict[str, float]) -> None:
    """Rewrite the tables of a page: `run`, `ratios`, `models` and `cells`."""
    here = machine()
    cells = [{**r, "name": r["name"][5:]} for r in records if r["name"].startswith("cell ")]
    timed = sum("plain_s" in r for r in records)
    versions = ", ".join(f"{n} {here['versions'][n]}" for n in ("torch", "timm", "transformers"))
    parts = {
        "run": f"{here['processor']}, one thread; python {here['versions']['python']}, "
        f"{versions}. {len(records)} of {len(names())} subjects, {timed} of them timed; "
        f"load average {_range(records)} on {os.cpu_count()} processors.\n",
        "ratios": markdown(
            [("figure", "value"), *((f"`{k}`", f"{v:.3g}") for k, v in found.items())]
        ),
        "models": table([r for r in records if not r["name"].startswith("cell ")]),
        "cells": table(cells) if cells else "None in this run.\n",
    }
    fill(path, lambda name: parts[name])


def _range(records: Sequence[dict[str, Any]]) -> str:
    loads = [r["load"] for r in records if "load" in r]
    return f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", help="names, or parts of them")
    parser.add_argument("--exact", action="store_true", help="bits and peaks alone, in less time")
    parser.add_argument("--page", type=Path, help="rewrite the tables of this page")
    parser.add_argument("--repeats", type=int, help="of each pair of timed steps")
    parser.add_argument(
        "--records", type=Path, help="folder of a file for each, which are not run again"
    )
    args = parser.parse_args()
    if args.records:
        args.records.mkdir(parents=True, exist_ok=True)
    chosen = [n for n in names() if n in QUICK] if args.quick else names()
    if args.only:
        chosen = [n for n in names() if any(part in n for part in args.only)]
    records = []
    for name in chosen:
        records.append(_record(name, args))
        print(*table(records[-1:]).splitlines()[2:], flush=True)
    found = ratios(records)
    finish(args, "zoo", records, found)
    if args.page:
        page(args.page, records, found)


if __name__ == "__main__":
    main()
