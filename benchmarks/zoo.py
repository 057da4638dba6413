"""Models of timm and transformers and recurrent cells of the literature, trained within limits.

Each model goes through `mst.compile`, each cell through `mst.unroll`, as a user would
write it, in a process of its own.  Asked of each:

* does it train within 0.7 of what plain training takes, and if not, why;
* are outputs, gradients, buffers and generators those of plain training (of models:
  of `torch.compile(backend="eager")`, as some compute otherwise where they see that
  they are compiled) bit for bit, over two steps with an update between;
* its peak over the limit at 0.7, 0.5 and 0.3 of plain, storage by storage;
* seconds (of one processor; the least of several steps of each, in turns) of a step
  over plain training's, and over those of `torch.utils.checkpoint` at the peak that
  this takes: the library's own checkpointing of blocks where it has any; of cells
  chunks of sqrt(T) steps;
* seconds until the first step can run: capture, profiling, checking, planning.

A limit that is too small for the model is a refusal that names the smallest.
`works` counts the models that train at 0.7; `faster_than_checkpoint` counts a
limit that is refused against us.  Nothing is downloaded: weights are random.

    pip install -c constraints.txt -e ".[zoo]"
    pip install -c constraints.txt --no-deps timm
    python -m benchmarks.zoo [--quick] [--only NAME ...] [--resume FILE] [--json FILE]
                             [--page FILE]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import finish, machine, options
from benchmarks._timm import load_timm
from benchmarks.docs import fill, markdown

LIMITS = (0.7, 0.5, 0.3)
REPEATS = 5
STOP_S = 300.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
    from benchmarks import _zoo_cells, _zoo_models

    return [*_zoo_models.names(), *(f"cell {name}" for name in _zoo_cells.CELLS)]


def _record(name: str, seed: int, repeats: int) -> dict[str, Any]:
    """Return what became of one model or cell, run in a process of its own.

    A fork of this one, which has imported the libraries and run nothing.
    """
    began = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, name, seed, repeats))
    process.start()
    sending.close()
    try:
        if receiving.poll(STOP_S):
            found: dict[str, Any] = receiving.recv()
        else:
            found = {"name": name, "reason": f"stopped after {STOP_S:g} s", "points": []}
            process.kill()
    except EOFError:
        process.join()
        found = {"name": name, "reason": f"exit status {process.exitcode}", "points": []}
    process.join()
    found["took_s"] = time.perf_counter() - began
    return found


def _work(sending: Any, name: str, seed: int, repeats: int) -> None:
    sending.send(_imported().run(name, seed, repeats))


def _imported() -> Any:
    from benchmarks import _zoo_run

    return _zoo_run


def works(record: dict[str, Any]) -> bool:
    """Whether a model trains at the largest of the limits."""
    return any(p["limit"] == LIMITS[0] and "over_limit" in p for p in record["points"])


def equal(record: dict[str, Any]) -> bool:
    """Whether its numbers were those of plain training wherever it ran."""
    return not any(p.get("differs") for p in record["points"])


def ratios(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of all records.

    Examples
    --------
    >>> point = {"limit": 0.7, "over_limit": 0.9, "over_plain": 1.2}
    >>> record = {"points": [point], "prepare_s": 1.0, "plain_s": 0.2}
    >>> found = ratios([record, {"points": [], "reason": "cannot be traced"}])
    >>> found["works"], found["equal"], found["limit_exceeded"], found["prepare_in_time"]
    (0.5, 1.0, 0.0, 1.0)
    """
    working = [r for r in records if works(r)]
    points = [p for r in records for p in r["points"] if "over_limit" in p]
    beside = [r["checkpoint"] for r in working if "peak_over_plain" in r.get("checkpoint", {})]
    faster = [c.get("over_checkpoint", 2.0) < 1 for c in beside]
    prepared = [r for r in working if "prepare_s" in r]
    in_time = [r["prepare_s"] <= max(2.0, 10 * r["plain_s"]) for r in prepared]
    found = {
        "works": len(working) / len(records),
        "equal": _share([equal(r) for r in working]),
        "limit_exceeded": float(sum(p["over_limit"] > 1 for p in points)),
        "faster_than_checkpoint": _share(faster),
        "seconds_over_checkpoint": _median(c["over_checkpoint"] for c in beside if "seconds" in c),
        "prepare_in_time": _share(in_time),
        "prepare_over_plain": _median(r["prepare_s"] / r["plain_s"] for r in prepared),
    }
    for limit in LIMITS:
        here = [p for p in points if p["limit"] == limit]
        found[f"fits_{limit}"] = len(here) / len(records)
        found[f"seconds_over_plain_{limit}"] = _median(p["over_plain"] for p in here)
    return found


def kept(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the records of an earlier run that work and have equal bits, by name."""
    if path is None:
        return {}
    samples = json.loads(path.read_text())["samples"]
    return {r["name"]: r for r in samples if works(r) and equal(r)}


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def _median(values: Any) -> float:
    found = list(values)
    return statistics.median(found) if found else float("nan")


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as a Markdown table, failures with their reason."""
    rows = [
        (
            "what",
            "bits",
            "peak over limit at 0.7, 0.5, 0.3",
            "s over plain",
            "checkpoint: peak, s over plain",
            "our s over its, at its peak",
            "prepare s / plain s",
        )
    ]
    for record in records:
        if not record["points"]:
            rows.append((record["name"], "-", record["reason"], "", "", "", ""))
            continue
        runs = record["points"]
        beside = record.get("checkpoint", {})
        ran = any("over_limit" in p for p in runs)
        bits = ("equal" if equal(record) else "**differ**") if ran else "-"
        if not equal(record):
            bits += ": " + next(p["differs"] for p in runs if p.get("differs"))
        peer = beside.get("reason", "")
        if "peak_over_plain" in beside:
            peer = f"{beside['peak_over_plain']:.2f}, {beside['over_plain']:.2f}"
        seconds = beside.get("refused", "")
        if "over_checkpoint" in beside:
            seconds = f"{beside['over_checkpoint']:.2f}"
        prepare = ""
        if "prepare_s" in record:
            prepare = f"{record['prepare_s']:.2f} / {record['plain_s']:.3f}"
        rows.append(
            (
                record["name"],
                bits,
                _joined([_said(p) for p in runs]),
                _joined([f"{p['over_plain']:.2f}" if "over_plain" in p else "-" for p in runs]),
                peer,
                seconds,
                prepare,
            )
        )
    return markdown(rows)


def _joined(texts: Sequence[str]) -> str:
    same = len(set(texts)) == 1 and not texts[0][:1].isdigit()
    return texts[0] if same else ", ".join(texts)


def _said(point: dict[str, Any]) -> str:
    if "over_limit" in point:
        return f"{point['over_limit']:.2f}"
    if "least" in point:
        return f"refused: at least {point['least']:.2f}"
    return str(point["reason"])


def page(path: Path, records: Sequence[dict[str, Any]], found: dict[str, float]) -> None:
    """Rewrite the tables of a page: `run`, `ratios`, `models` and `cells`."""
    here = machine()
    cells = [{**r, "name": r["name"][5:]} for r in records if r["name"].startswith("cell ")]
    versions = ", ".join(f"{n} {here['versions'][n]}" for n in ("torch", "timm", "transformers"))
    parts = {
        "run": f"{here['processor']}, one thread; python {here['versions']['python']}, "
        f"{versions}. {len(records)} subjects.\n",
        "ratios": markdown(
            [("figure", "value"), *((f"`{k}`", f"{v:.3g}") for k, v in found.items())]
        ),
        "models": table([r for r in records if not r["name"].startswith("cell ")]),
        "cells": table(cells),
    }
    fill(path, lambda name: parts[name])


def least_of(message: str) -> int | None:
    """Return the smallest limit that a refusal names.

    Examples
    --------
    >>> least_of("memory=5 < 14 bytes needed; raise it")
    14
    """
    found = re.search(r"< ([\d_]+) bytes", message)
    return None if found is None else int(found[1].replace("_", ""))


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", help="names, or parts of them")
    parser.add_argument("--page", type=Path, help="rewrite the tables of this page")
    parser.add_argument("--repeats", type=int, help="of each pair of timed steps")
    parser.add_argument("--partial", type=Path, help="write what is done to this file, each time")
    parser.add_argument("--resume", type=Path, help="keep what works in such a file, or --json's")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # before torch is imported
    chosen = [n for n in names() if n in QUICK] if args.quick else names()
    if args.only:
        chosen = [n for n in names() if any(part in n for part in args.only)]
    repeats = args.repeats or (1 if args.quick else REPEATS)
    _imported()
    if any(name.startswith("timm ") for name in chosen):
        load_timm()
    known = kept(args.resume)
    records = []
    for name in chosen:
        records.append(known.get(name) or _record(name, args.seed, repeats))
        print(*table(records[-1:]).splitlines()[2:], flush=True)
        if args.partial:
            args.partial.write_text(json.dumps({"samples": [*known.values(), *records]}))
    found = ratios(records)
    finish(args, "zoo", records, found)
    if args.page:
        page(args.page, records, found)


if __name__ == "__main__":
    main()
