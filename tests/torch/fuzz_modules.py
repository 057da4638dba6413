"""Random modules trained by `Sequential`, `compile`, `unroll` and `offload`, and plainly.

    python tests/torch/fuzz_modules.py --seconds 600 --seed 0
    python tests/torch/fuzz_modules.py --count 2000 --only unroll
    python tests/torch/fuzz_modules.py --case 12345

A case follows from one integer: a program that trains a model of random ingredients for a
few steps.  Outputs, gradients, buffers, attributes and generators must be those of plain
training bit for bit, or the front end refuses the program with an error of this package.
Each other case is made as simple as it goes and printed as a program that runs by itself;
the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from typing import Any

import torch
from modulefuzz.programs import FRONTS, Case, describe, draw, simpler, text

from multistage.errors import MultistageError

SHRINK_S = 40.0
_numbers = itertools.count()
# Autograd's own refusal, which the front ends repeat.
INPLACE = "modified by an inplace operation"


class Finding(Exception):
    """A program that ended in another way than it may."""


def play(case: Case) -> str:
    """Run a program both ways; return what became of it.

    Raises
    ------
    Finding
        If the results differ, or an error that is not ours ended it.
    """
    program = types.ModuleType(f"program_{next(_numbers)}")
    sys.modules[program.__name__] = program  # where pickling and guards look
    exec(compile(text(case), f"<case {case.seed}>", "exec"), program.__dict__)
    space: dict[str, Any] = program.__dict__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = space["train"](None)
            again = space["train"](None)
        except Exception as error:  # whatever a mix of modules does not take
            return f"plain training: {type(error).__name__} {_kind(str(error))}"
        if space["differing"](plain, again):
            return "not deterministic"
        try:
            ours = space["train"](space["wrap"])
        except MultistageError as error:
            return f"refused: {_kind(str(error))}"
        except RuntimeError as error:
            if INPLACE in str(error):
                return "refused: modified by an inplace operation"
            raise Finding(_told(error)) from error
        except Exception as error:
            raise Finding(_told(error)) from error
        finally:
            torch.set_default_dtype(torch.float32)
            del sys.modules[program.__name__]
            if case.front == "compile":
                torch.compiler.reset()
    found = space["differing"](plain, ours)
    if found:
        raise Finding(f"differ: {', '.join(found[:6])}")
    return "equal"


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = [f for f in frames if "multistage" in f.filename]
    place = f" at {where[-1].filename.rpartition('/')[2]}:{where[-1].lineno}" if where else ""
    return f"raised {type(error).__name__}{place}: {str(error).partition(chr(10))[0][:200]}"


def _kind(message: str) -> str:
    words = [w for w in message.split() if w.isalpha()]
    return " ".join(words[:9])


def _sort(finding: Finding) -> str:
    """Return what must stay the same while a case is made simpler."""
    message = str(finding)
    return message.partition(":")[0] if message.startswith("raised") else "differ"


def simplest(case: Case, finding: Finding) -> tuple[Case, Finding]:
    """Return the simplest case that ends alike."""
    until = time.monotonic() + SHRINK_S
    found = True
    while found and time.monotonic() < until:
        found = False
        for other in simpler(case):
            if time.monotonic() > until:
                break
            try:
                play(other)
            except Finding as error:
                if _sort(error) == _sort(finding):
                    case, finding, found = other, error, True
                    break
            except Exception:
                continue
    return case, finding


def run(
    seconds: float,
    seed: int,
    count: int | None = None,
    only: str | None = None,
    *,
    shrink: bool = True,
) -> tuple[Counter[str], list[str]]:
    """Run cases from a seed on; return counts, and what was found."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    found: list[str] = []
    number = 0
    while time.monotonic() - began < seconds and number != count:
        case = draw(seed + number, only)
        number += 1
        try:
            counts[f"{case.front}: {play(case)}"] += 1
        except Finding as finding:
            counts[f"{case.front}: FOUND {_sort(finding)}"] += 1
            if shrink:
                case, finding = simplest(case, finding)
            found.append(f"{finding}\n    {describe(case)}")
            print(found[-1], flush=True)
        if number % 50 == 0:
            gc.collect()
    return counts, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int)
    parser.add_argument("--only", choices=FRONTS)
    parser.add_argument("--fast", action="store_true", help="do not make findings simpler")
    parser.add_argument("--case", type=int, help="run one case, print its program made simple")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.case is not None:
        case = draw(given.case, given.only)
        with contextlib.suppress(Finding):
            print(play(case), describe(case), sep="\n")
            return 0
        try:
            play(case)
        except Finding as finding:
            case, finding = simplest(case, finding)
            print(text(case), f"# {finding}", f"# {describe(case)}", sep="\n")
        return 1
    began = time.monotonic()
    counts, found = run(given.seconds, given.seed, given.count, given.only, shrink=not given.fast)
    for name, number in counts.most_common():
        print(f"{number:6} {name}")
    total = sum(counts.values())
    print(f"{total} modules in {time.monotonic() - began:.0f} s: {len(found)} findings")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
