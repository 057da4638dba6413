"""Random chains, budgets, tiers, planners and faults; every gradient compared with store-all.

    python tests/fuzz_gradients.py --seconds 600 --seed 0
    python tests/fuzz_gradients.py --seconds 600 --only durable
    python tests/fuzz_gradients.py --case 12345

A case follows from one integer.  It must end with the bits of store-all, with
a documented error, or with the exception that an operator raised, and leave
nothing behind; it may take 60 s.  Each other case is told, made as simple as
it goes, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TextIO

from fuzzing.cases import PLAYS, Case, draw, simpler
from fuzzing.oracle import NotRunnable
from fuzzing.plays import PLAYED, Play, Seen
from fuzzing.watch import Watch, recorded

LIMIT_S = 60
SIMPLER = 5  # findings of a kind that are told, made simpler


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


def run(
    seconds: float, first: int, only: str | None, most: int | None, log: TextIO
) -> tuple[int, Counter[str], Counter[str]]:
    """Run cases until the time is up; return their number, what came of them, and findings."""
    began = time.monotonic()
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    count = 0
    while time.monotonic() - began < seconds and count != most:
        # The last line says which case a process was at that died or took too long.
        log.write(f"\rcase {first + count} ")
        log.flush()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        case = draw(first + count, only)
        seen = run_case(case)
        count += 1
        outcomes += seen.outcomes
        if not seen.findings:
            continue
        kinds[_kind(seen)] += 1
        if kinds[_kind(seen)] <= SIMPLER:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            case, seen = simplest(case, seen)
            print(f"[{time.monotonic() - began:.0f} s, {count} cases] {case}", flush=True)
            for each in seen.findings[:5]:
                print(f"    {each[:500]}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return count, outcomes, kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--only", choices=PLAYS, help="one kind of play")
    parser.add_argument("--case", type=int, help="run one case, and make it simpler if it fails")
    given = parser.parse_args()
    faulthandler.enable()
    if given.case is not None:
        case = draw(given.case, given.only)
        print(case)
        seen = run_case(case)
        print(dict(seen.outcomes), *seen.findings, sep="\n")
        if seen.findings:
            print(simplest(case, seen)[0])
        return bool(seen.findings)
    seconds, began = given.seconds if given.cases is None else 1e9, time.monotonic()
    count, outcomes, kinds = run(seconds, given.seed, given.only, given.cases, sys.stderr)
    found = sum(kinds.values())
    print(f"{count} cases in {time.monotonic() - began:.0f} s: {found} findings")
    for name, number in outcomes.most_common():
        print(f"    {number:7} {name}")
    for name, number in kinds.most_common():
        print(f"    {number:7} FOUND {name}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
