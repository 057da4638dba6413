"""Random chains, budgets, tiers, planners and faults; every gradient compared with store-all.

    python tests/fuzz_gradients.py --seconds 600 --seed 0
    python tests/fuzz_gradients.py --seconds 600 --only durable
    python tests/fuzz_gradients.py --case 12345

A case follows from one integer.  It must end with the bits of store-all, with
a documented error, or with the exception that an operator raised, and leave
nothing behind; it may take 60 s.  Each other case is told, made as simple as
it goes, and the exit status is 1.  Cases run in processes of their own, some
thousand each, so that one that kills its process is told too.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzzing.cases import PLAYS, Case, draw, simpler
from fuzzing.oracle import NotRunnable
from fuzzing.plays import PLAYED, Play, Seen
from fuzzing.watch import Watch, recorded

LIMIT_S = 60
PER_PROCESS = 2000
SIMPLER = 5  # findings of a kind that are made simpler, in a process


def run_case(case: Case, scratch: Path | None = None) -> Seen:
    """Run one case; return what came of it."""
    folder = Path(tempfile.mkdtemp(prefix="case-", dir=scratch))
    seen = Seen()
    try:
        try:
            watch = Watch(folder)
            with recorded(watch):
                play = Play(case, folder, watch, seen)
                PLAYED[case.play](play)
                del play
        except NotRunnable:
            return Seen(Counter({"void": 1}))
        if (folder / "other").exists() and not any((folder / "other").iterdir()):
            (folder / "other").rmdir()
        seen.findings += watch.differences()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return seen


def simplest(case: Case, seen: Seen) -> tuple[Case, Seen]:
    """Return the simplest case found that fails alike, and what came of it."""
    until = time.monotonic() + 20
    kind = _kind(seen)
    tried: set[Case] = set()
    found = True
    while found and time.monotonic() < until:
        found = False
        for other in simpler(case):
            if other in tried or time.monotonic() > until:
                continue
            tried.add(other)
            try:
                again = run_case(other)
            except Exception:
                continue
            if again.findings and _kind(again) == kind:
                case, seen, found = other, again, True
                break
    return case, seen


def _kind(seen: Seen) -> str:
    return "".join(letter for letter in seen.findings[0][:40] if not letter.isdigit())


# ------------------------------------------------------------------------- processes


def worker(seeds: list[int], only: str | None) -> None:
    """Run cases, and write a line of JSON about each."""
    faulthandler.enable()
    shrunk: Counter[str] = Counter()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print does not belong among the lines
    for seed in seeds:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        case = draw(seed, only)
        out.write(json.dumps({"case": seed, "began": True}) + "\n")
        seen = run_case(case)
        if seen.findings and shrunk[_kind(seen)] < SIMPLER:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            shrunk[_kind(seen)] += 1
            case, seen = simplest(case, seen)
        out.write(
            json.dumps(
                {
                    "case": seed,
                    "told": str(case),
                    "findings": seen.findings,
                    "outcomes": seen.outcomes,
                }
            )
            + "\n"
        )
    faulthandler.cancel_dump_traceback_later()


class Told:
    """What all processes told."""

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self.began = time.monotonic()
        self.cases = 0
        self.outcomes: Counter[str] = Counter()
        self.findings: list[tuple[int, str, str]] = []
        self.kinds: Counter[str] = Counter()

    def take(self, line: dict[str, Any]) -> None:
        self.cases += 1
        self.outcomes.update(line["outcomes"])
        if line["findings"]:
            self.finding(line["case"], line["told"], line["findings"])

    def finding(self, seed: int, told: str, findings: list[str]) -> None:
        self.findings.append((seed, told, findings[0]))
        kind = "".join(letter for letter in findings[0][:60] if not letter.isdigit())
        self.kinds[kind] += 1
        elapsed = time.monotonic() - self.began
        if self.log is not None:
            line = {"s": round(elapsed, 1), "cases": self.cases, "case": told, "what": findings}
            with self.log.open("a") as out:
                out.write(json.dumps(line) + "\n")
        if self.kinds[kind] <= 20:
            print(f"[{elapsed:.0f} s, {self.cases} cases] {told}", flush=True)
            for each in findings[:5]:
                print(f"    {each[:500]}", flush=True)


def run(
    seconds: float,
    first: int,
    only: str | None,
    most: int | None = None,
    log: Path | None = None,
) -> Told:
    """Run cases in other processes until the time is up."""
    told = Told(log)
    seed = first
    while time.monotonic() - told.began < seconds and (most is None or told.cases < most):
        count = PER_PROCESS if most is None else min(PER_PROCESS, most - told.cases)
        seed = _process(told, seed, seed + count, seconds, only)
    return told


def _process(told: Told, first: int, stop: int, seconds: float, only: str | None) -> int:
    """Run the cases first..stop-1 in one process; return the next."""
    command = [sys.executable, __file__, "--worker", str(first), str(stop)]
    command += ["--only", only] if only else []
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        at, ended = first, True
        try:
            while time.monotonic() - told.began < seconds:
                try:
                    line = lines.get(timeout=2 * LIMIT_S)
                except queue.Empty:
                    line = None
                if line is None:
                    break
                found = json.loads(line)
                at = found["case"]
                ended = "began" not in found
                if ended:
                    told.take(found)
                    if at == stop - 1:
                        return stop
            else:
                return stop
        finally:
            child.kill()
            child.wait()
        errors.seek(0)
        last = errors.read()[-3000:]
    told.finding(at, str(draw(at, only)), [f"the process ended or hung: {child.returncode}", last])
    if not ended:
        told.cases += 1
    return at + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--only", choices=PLAYS, help="one kind of play")
    parser.add_argument("--case", type=int, help="run one case, and make it simpler if it fails")
    parser.add_argument("--log", type=Path, help="a file for all findings, a line of JSON each")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(list(range(*given.worker)), given.only)
        return 0
    if given.case is not None:
        case = draw(given.case, given.only)
        print(case)
        seen = run_case(case)
        print(dict(seen.outcomes), *seen.findings, sep="\n")
        if seen.findings:
            print(simplest(case, seen)[0])
        return bool(seen.findings)
    seconds = given.seconds if given.cases is None else 1e9
    told = run(seconds, given.seed, given.only, given.cases, given.log)
    elapsed = time.monotonic() - told.began
    print(f"{told.cases} cases in {elapsed:.0f} s: {len(told.findings)} findings")
    for name, count in told.outcomes.most_common():
        print(f"    {count:7} {name}")
    for name, count in told.kinds.most_common():
        print(f"    {count:7} FOUND {name}")
    return bool(told.findings)


if __name__ == "__main__":
    sys.exit(main())
