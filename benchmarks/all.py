"""Reproduce the papers: run every benchmark, judge the papers' claims, write one page.

Each benchmark is a process of its own.  One that fails is reported and the rest
run on; one that needs what is not installed is skipped with the reason.  The
folder then holds `all.json` (results, verdicts, machine, load), `index.html`
(one file, no network), and each benchmark's raw JSON and picture.

    python -m benchmarks.all --quick            # under ten minutes on two quiet cores
    python -m benchmarks.all --full             # hours
    python -m benchmarks.all --quick --resume   # keeps what an interrupted run finished
    python -m benchmarks.all --report --docs    # no run: page and docs/reproduce.md from all.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._common import machine, require_core
from benchmarks.catalog import CATALOG, Entry, missing
from benchmarks.claims import judge_all
from benchmarks.docs import rewrite
from benchmarks.page import page

FORMAT = "multistage-benchmarks-1"
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "reproduce.md"
QUICK_S = 570  # of --quick in all
TAIL = 4_000  # characters of a failed benchmark's output that are kept


def load_average() -> list[float]:
    """Return the load of the last 1, 5 and 15 minutes; empty where it is not told."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return []


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def run(entry: Entry, mode: str, out: Path, seed: int, cwd: Path | None = None) -> dict[str, Any]:
    """Run one benchmark; return its record, whatever becomes of it.

    Its own files are in `cwd` (here) for as long as it runs, so that is the disk measured.
    """
    result_file, picture = out / f"{entry.name}.json", out / f"{entry.name}.png"
    for stale in (result_file, picture):
        stale.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{entry.name}", "--seed", str(seed)]
    command += ["--json", str(result_file.resolve())]
    limit_s = entry.full_s
    if mode == "quick":
        command += ["--quick", *entry.quick]
        limit_s = entry.quick_s
    command += ["--plot", str(picture.resolve())]
    record: dict[str, Any] = {"status": "failed", "load_before": load_average()}
    began = time.monotonic()
    try:
        code, output = _run_child(command, entry, limit_s, cwd or ROOT)
    except subprocess.TimeoutExpired as error:
        stopped = error.output.decode(errors="replace") if error.output else ""
        code, output = None, stopped
        record["reason"] = f"stopped after {limit_s} s"
    record |= {"seconds": round(time.monotonic() - began, 1), "load_after": load_average()}
    if code == 0:
        try:
            found = json.loads(result_file.read_text(encoding="utf-8"))
            record |= {k: found[k] for k in ("left_out", "machine", "seed")}
            record["ratios"] = {name: _told(value) for name, value in found["ratios"].items()}
            record["status"] = "done"
            return record
        except (OSError, ValueError, KeyError) as error:
            record["reason"] = f"no result: {type(error).__name__}: {error}"
    elif code is not None:
        record["reason"] = f"exit status {code}"
    record["output"] = output[-TAIL:]
    return record


def _told(value: float) -> float | str:
    """Return a number that JSON knows: what is infinite or none is told in words."""
    return value if math.isfinite(value) else str(value)


def _run_child(command: Sequence[str], entry: Entry, limit_s: float, cwd: Path) -> tuple[int, str]:
    """Run a command in a process group of its own, which goes with it; return status and output."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **entry.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Matplotlib must not look for a display.
    environment.setdefault("MPLBACKEND", "Agg")
    environment["PYTHONUNBUFFERED"] = "1"  # what one that is stopped has said
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        try:
            output, _ = child.communicate(timeout=limit_s)
            return child.returncode, output.decode(errors="replace")
        finally:
            # Benchmarks have children of their own, which a timeout or Ctrl-C must not leave.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)


def finished(path: Path, mode: str) -> dict[str, Any]:
    """Return the records of an earlier run that `--resume` keeps: done, and of the same mode."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if data.get("format") != FORMAT or data.get("mode") != mode:
        return {}
    return {k: v for k, v in data["benchmarks"].items() if v.get("status") == "done"}


class _Budget:
    """Keeps `--quick` under ten minutes: ours start only while there is time for them.

    How slow this machine is, is seen from what has run.
    """

    def __init__(self) -> None:
        self._expected_s = self._took_s = 0.0

    def ran(self, entry: Entry, seconds: float) -> None:
        self._expected_s += entry.expected_s
        self._took_s += seconds

    def room_for(self, entry: Entry) -> bool:
        slower = self._took_s / self._expected_s if self._expected_s else 1.0
        return bool(entry.items) or self._took_s + slower * entry.expected_s <= QUICK_S


def summary(mode: str, records: dict[str, Any]) -> dict[str, Any]:
    """Return what `all.json` holds."""
    judged = judge_all(records)
    return {
        "format": FORMAT,
        "mode": mode,
        "machine": machine(),
        "load": load_average(),
        "benchmarks": records,
        "claims": [claim.to_dict() for claim in judged],
    }


def report(data: dict[str, Any], out: Path) -> None:
    """Write `all.json` and `index.html`."""
    write(out / "all.json", json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write(out / "index.html", page(data, out))


def run_all(entries: Sequence[Entry], mode: str, out: Path, seed: int, kept: dict[str, Any]) -> int:
    """Run the benchmarks but those kept; return the exit status.

    1 where one failed, 130 where interrupted.
    """
    records = dict(kept)
    # A batch system tells the end of a job by SIGTERM; SIGINT is set too, since shells have
    # what runs in the background ignore it.
    before = {kind: signal.signal(kind, _interrupt) for kind in (signal.SIGINT, signal.SIGTERM)}
    status = 0
    try:
        _run_each(entries, mode, out, seed, records)
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from here", flush=True)
        status = 130
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    data = summary(mode, records)
    report(data, out)
    _print(data, out)
    failed = [name for name, record in records.items() if record["status"] == "failed"]
    return status or int(bool(failed))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _run_each(
    entries: Sequence[Entry], mode: str, out: Path, seed: int, records: dict[str, Any]
) -> None:
    """Run the benchmarks that `records` lacks into it, and write what there is after each."""
    clock = _Budget() if mode == "quick" else None
    for number, entry in enumerate(entries, start=1):
        head = f"[{number}/{len(entries)}] {entry.name}"
        if entry.name in records:
            print(f"{head}: kept from the run before", flush=True)
            continue
        lacking = missing(entry)
        if not lacking and clock is not None and not clock.room_for(entry):
            lacking = "the minutes of --quick are used up; --quick --resume runs it"
        if lacking:
            records[entry.name] = {"status": "skipped", "reason": lacking}
        else:
            print(f"{head} ...", flush=True)
            records[entry.name] = run(entry, mode, out, seed)
            if clock is not None:
                clock.ran(entry, records[entry.name]["seconds"])
        record = records[entry.name]
        took = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
        reason = f": {record['reason']}" if "reason" in record else ""
        print(f"{head}: {record['status']}{took}{reason}", flush=True)
        report(summary(mode, records), out)


def _print(data: dict[str, Any], out: Path) -> None:
    verdicts = [claim["verdict"] for claim in data["claims"]]
    for claim in data["claims"]:
        if claim["verdict"] == "differs":
            print(f"differs: {claim['paper']}, {claim['item']}: {claim['claim']}")
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    print(f"claims of the papers: {counts}")
    print(f"written: {out / 'index.html'}, {out / 'all.json'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", dest="mode", action="store_const", const="quick")
    modes.add_argument("--full", dest="mode", action="store_const", const="full")
    modes.add_argument("--report", action="store_true", help="run nothing: write page and docs")
    parser.add_argument("--out", type=Path, default=Path("benchmark-output"), help="folder")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run finished")
    parser.add_argument("--papers", action="store_true", help="only those of the papers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these benchmarks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--docs",
        nargs="?",
        type=Path,
        const=DOCS,
        metavar="FILE",
        help="rewrite the tables of this page (docs/reproduce.md)",
    )
    args = parser.parse_args(argv)
    require_core()
    known = [entry.name for entry in CATALOG]
    if unknown := sorted(set(args.only or ()) - set(known)):
        parser.error(f"--only {' '.join(unknown)}: choose from {', '.join(known)}")
    if not args.report and args.mode is None:
        parser.error("choose --quick, --full or --report")
    entries = [e for e in CATALOG if e.name in (args.only or known)]
    entries = [e for e in entries if e.items or not args.papers]
    args.out.mkdir(parents=True, exist_ok=True)
    status = 0
    if args.report:
        try:
            data = json.loads((args.out / "all.json").read_text(encoding="utf-8"))
        except OSError:
            parser.error(f"--report: {args.out / 'all.json'} is not there; run --quick first")
        # Judged again: the published numbers may have been mended since.
        data["claims"] = [claim.to_dict() for claim in judge_all(data["benchmarks"])]
        report(data, args.out)
        _print(data, args.out)
    else:
        kept = finished(args.out / "all.json", args.mode) if args.resume or args.only else {}
        if args.only and not args.resume:  # what is named runs again
            kept = {name: record for name, record in kept.items() if name not in args.only}
        status = run_all(entries, args.mode, args.out, args.seed, kept)
    if args.docs is not None:
        data = json.loads((args.out / "all.json").read_text(encoding="utf-8"))
        rewrite(args.docs, data)
        print(f"rewritten: {args.docs}")
    return status


if __name__ == "__main__":
    sys.exit(main())
