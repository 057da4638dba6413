"""kill -9 at random moments of durable runs, each resumed to the exact gradient.

    python tests/durable_kills.py --kills 200 --seed 0
    python tests/durable_kills.py --calls 1

A child begins a run, is killed after a random share of the time a run takes,
and is resumed, killed again or not, until a child ends by itself: its last
state and its gradient must be those of a run without checkpoints, to the last
bit.  With --calls they are killed at every call that touches the disk instead
(or at every third, say), in the middle of it where it writes.  Children are
forked before this process has any thread.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from multistage import Costs, FunctionChain, InPlaceChain, Reversal, Stage, StageCosts, Tier
from multistage.durable import folder as durable_folder
from multistage.durable.status import inspect
from multistage.reversing import unequal

# A step that takes some work, so that a run lasts long enough to be killed in.
REPEATS = 16
# Measuring would take most of the time.  About what it says on one machine.
COSTS = Costs(2e-4, 1e-4, tiers=(Tier("durable", 1e-3, 1e-3),))


def _advance(x: Any, i: int) -> Any:
    y = x
    for _ in range(REPEATS):
        y = np.cos(y) + i / 7
    return y


def _forward(state: Any, start: int, stop: int) -> None:
    for i in range(start, stop):
        state[...] = _advance(state, i)


def _reverse(state: Any, adjoint: Any, i: int) -> Any:
    """Digest every bit of the state, the step and the adjoint after it; and add to a sum."""
    for _ in range(REPEATS // 2):
        seen = zlib.crc32(np.ascontiguousarray(state).tobytes(), int(adjoint["digest"]) ^ i)
    return {"digest": np.array(seen), "sum": adjoint["sum"] * 0.999 + np.sin(state.ravel()[:50])}


def _refined(x: Any, i: int) -> Any:
    """Return the state after a step that differs from the one before, on another mesh."""
    y = np.resize(_advance(x[0] if type(x) is tuple else x, i), (2, _half(x, i)))
    return (y, y[0, :3].copy()) if i % 4 == 3 else y


def _half(x: Any, i: int) -> int:
    """Return the columns of state i + 1: a third more, or back to the first."""
    columns: int = x[0].shape[1] if type(x) is tuple else x.shape[1]
    return columns + columns // 3 if (i + 1) % 5 else columns // 3 + 25


def _reverse_refined(state: Any, adjoint: Any, i: int) -> Any:
    """Do what `_reverse` does; the adjoint, too, has other arrays from step to step."""
    fields = state if type(state) is tuple else (state,)
    found = _reverse(fields[0], adjoint, i)
    return found | {"more": [field.ravel()[: i % 9].copy() for field in fields]}


def _costs(name: str, size: int, n: int) -> Costs | StageCosts:
    """Return what the steps of a case cost."""
    if name not in UNEQUAL:
        return replace(COSTS, state_bytes=8 * size)
    states = [_start(size)]
    for i in range(n):
        states.append(_refined(states[-1], i))
    sizes = [sum(x.nbytes for x in (s if type(s) is tuple else (s,))) for s in states]
    stages = [Stage("", 2e-4, 1e-4, nbytes, nbytes, gradient_bytes=0) for nbytes in sizes[1:]]
    return StageCosts(tuple(stages), sizes[0])


def _start(leaves: int) -> Any:
    return np.asfortranarray(np.linspace(0, 1, leaves).reshape(2, -1))


def _given() -> Any:
    return {"digest": np.array(1), "sum": np.zeros(50)}


# Cases whose end `until` finds.
FOUND = ("found", "short-found", "ranks-found")
# Cases whose steps differ in cost and size.
UNEQUAL = ("unequal", "short-unequal", "ranks-unequal", "short-ranks-unequal")
# Cases of several ranks, each with a folder of its own.
TOGETHER = ("ranks", "ranks-found", "short-ranks", "ranks-unequal", "short-ranks-unequal")
RANKS = 3
# Name -> chain, array elements of a state, steps, slots.
CASES: dict[str, tuple[Any, int, int, int]] = {
    "small": (lambda: FunctionChain(_advance, _reverse), 400, 3000, 12),
    "large": (lambda: FunctionChain(_advance, _reverse), 60_000, 40, 6),
    "in-place": (lambda: InPlaceChain(_forward, _reverse), 3000, 600, 8),
    "short": (lambda: FunctionChain(_advance, _reverse), 60, 12, 3),
    "ranks": (lambda: FunctionChain(_advance, _reverse), 400, 400, 9),
    "ranks-found": (lambda: FunctionChain(_advance, _reverse), 400, 400, 9),
    "short-ranks": (lambda: FunctionChain(_advance, _reverse), 60, 12, 3),
    "found": (lambda: FunctionChain(_advance, _reverse), 2000, 800, 9),
    "short-found": (lambda: FunctionChain(_advance, _reverse), 60, 12, 3),
    "roomy": (lambda: FunctionChain(_advance, _reverse), 2000, 600, 10_000),
    "unequal": (lambda: FunctionChain(_refined, _reverse_refined), 20_000, 60, 6),
    "short-unequal": (lambda: FunctionChain(_refined, _reverse_refined), 120, 12, 3),
    "ranks-unequal": (lambda: FunctionChain(_refined, _reverse_refined), 2000, 60, 6),
    "short-ranks-unequal": (lambda: FunctionChain(_refined, _reverse_refined), 120, 12, 3),
}


def answer(name: str) -> list[str]:
    """Return the bits of the last state and of the gradient, every state kept."""
    if name in TOGETHER:
        each = [_answer(name, rank) for rank in range(RANKS)]
        return [json.dumps([one[k] for one in each]) for k in range(2)]
    return _answer(name, 0)


def _answer(name: str, rank: int) -> list[str]:
    size, n = _size(name, rank), CASES[name][2]
    step, adjoint_step = (_refined, _reverse_refined) if name in UNEQUAL else (_advance, _reverse)
    states = [_start(size) + rank]
    for i in range(n):
        states.append(step(states[-1], i))
    adjoint = _given()
    for i in reversed(range(n)):
        adjoint = adjoint_step(states[i], adjoint, i)
    return _facts(states[-1], adjoint)


def _size(name: str, rank: int) -> int:
    """Return the elements of state 0, more on every rank where states differ."""
    return CASES[name][1] * (1 + rank if name in UNEQUAL else 1)


def _facts(last: Any, adjoint: Any) -> list[str]:
    """Return the bits of both, few enough to fit a pipe that nobody reads."""
    last = last[0] if type(last) is tuple else last
    seen = hashlib.sha256(last.tobytes()).hexdigest()
    return [seen, adjoint["digest"].tobytes().hex() + adjoint["sum"].tobytes().hex()]


class Deadly:
    """The module `os`, whose call number `last` that touches the disk is the last."""

    TOUCHING = (
        "open",
        "write",
        "fdatasync",
        "link",
        "rename",
        "fsync",
        "unlink",
        "pwrite",
        "rmdir",
    )

    def __init__(self, last: int) -> None:
        self._left = last

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.TOUCHING:
            return real

        def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call


def run_ranks(name: str, folder: Path) -> list[Any]:
    """Run or resume a case on ranks that are threads; return what came of it, and what it took.

    All are killed together, each wherever it is.  Each rank has states of its
    own, and adjoints that digest them.
    """
    sys.path.insert(0, str(Path(__file__).parent / "interop"))
    import fake_mpi

    from multistage.interop.mpi import MPIReversal

    sys.modules["mpi4py.MPI"] = fake_mpi.MPI
    make, _, n, slots = CASES[name]
    vars(unequal)["measured_rates"] = lambda *_: Tier.of_rates(1e8, 1e8, tapes=False)

    def work(comm: Any) -> Any:
        size = _size(name, comm.rank)
        until = (lambda _, i: i == n) if name in FOUND else None
        with MPIReversal(
            make(),
            n_steps=None if name in FOUND else n,
            comm=comm,
            memory=f"{slots} slots",
            durable=folder,
            durable_every_s=0 if name.startswith("short") else 0.01,
            costs=_costs(name, size, n),
        ) as reversal:
            last = reversal.forward(_start(size) + comm.rank, until)
            adjoint = reversal.reverse(_given())
            counts = reversal.report().counts
        return _facts(last, adjoint), counts

    found = fake_mpi.succeed(fake_mpi.run_ranks(RANKS, work))
    counts = [each for _, each in found]
    facts = [json.dumps([one[k] for one, _ in found]) for k in range(2)]
    return [
        *facts,
        max(one.forward_steps for one in counts),
        max(one.reverse_steps for one in counts),
        max(one.elapsed_s for one in counts),
    ]


def run(name: str, folder: Path, report: int, measured: bool) -> None:
    """Run or resume one case; write what came of it to a descriptor."""
    if name in TOGETHER:
        text = json.dumps(run_ranks(name, folder))
        with os.fdopen(report, "w") as pipe:
            pipe.write(text)
        return
    make, size, n, slots = CASES[name]
    found = name in FOUND
    vars(unequal)["measured_rates"] = lambda *_: Tier.of_rates(1e8, 1e8, tapes=False)
    with Reversal(
        make(),
        n_steps=None if found else n,
        memory=f"{slots} slots",
        durable=folder,
        durable_every_s=0 if name.startswith("short") else 0.01,
        durable_label=name,
        costs=None if measured and name not in UNEQUAL else _costs(name, size, n),
    ) as reversal:
        until = (lambda _, i: i == n) if found else None
        last = copy.deepcopy(reversal.forward(_start(size), until))
        adjoint = reversal.reverse(_given())
        counts = reversal.report().counts
        done = [counts.forward_steps, counts.reverse_steps, counts.elapsed_s]
        text = json.dumps([*_facts(last, adjoint), *done])
        with os.fdopen(report, "w") as pipe:
            pipe.write(text)


def child(
    name: str,
    folder: Path,
    kill_s: float | None,
    measured: bool = False,
    begun: bool = True,
    last_call: int | None = None,
) -> list[Any] | None:
    """Fork a child; kill it after a time, if one is given; return its report."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        code = 1
        try:
            if last_call is not None:
                vars(durable_folder)["os"] = Deadly(last_call)
            run(name, folder, writer, measured)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    if kill_s is not None:
        # Measuring and planning come first and are soon killed enough.
        first = folder / "rank-0000/run" if name in TOGETHER else folder / "run"
        while begun and not first.exists() and not _ended(pid):
            time.sleep(1e-4)
        time.sleep(kill_s)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status and not os.WIFSIGNALED(status):
        raise SystemExit(f"{name}: a child failed; its folder is {folder}")
    return json.loads(text) if text and not status else None


def at_every_call(name: str, stride: int) -> int | str:
    """Kill a short run at each call of its to the disk, and resume it."""
    expected, kills = answer(name), 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        for last_call in range(0, 10**6, stride):
            result = child(name, folder, None, last_call=last_call)
            if result is not None:
                break
            kills += 1
            result = child(name, folder, None)
            if result[:2] != expected or folder.exists():
                return f"killed at call {last_call}: another gradient, or its folder is left"
    sys.stdout.write(f"{kills} kills, each at another call to the disk, every gradient exact\n")
    return 0


def _ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=list(CASES), help="one case alone")
    parser.add_argument("--calls", type=int, help="kill at every so many calls to the disk")
    args = parser.parse_args()
    if args.calls is not None:
        return at_every_call(args.case or "short", args.calls)
    rng = random.Random(args.seed)
    names = [args.case] if args.case else [each for each in CASES if "short" not in each]
    answers = {name: answer(name) for name in names}
    lasts: dict[str, float] = {}
    seen: Counter[str] = Counter()
    kills = runs = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            whole = child(name, Path(scratch, "run"), None)
            lasts[name] = whole[4]
        while kills < args.kills:
            name = names[runs % len(names)]
            folder = Path(scratch, "run")
            runs += 1
            result = None
            measured, begun = rng.random() < 0.1, rng.random() < 0.9
            for _ in range(rng.choice((1, 1, 2, 4))):
                if kills == args.kills:
                    break
                wait_s = rng.uniform(0, 1.1) * lasts[name]
                result = child(name, folder, wait_s, measured, begun)
                kills += result is None
                if result is not None:
                    break
                seen[_phase(folder)] += 1
            if result is None:
                result = child(name, folder, None)
            n = CASES[name][2]
            seen["runs that computed less than all"] += result[3] < n
            if result[:2] != answers[name]:
                return f"{name}, run {runs}, seed {args.seed}: another gradient"
            if folder.exists():
                return f"{name}, run {runs}, seed {args.seed}: its folder is left"
    told = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
    sys.stdout.write(f"{kills} kills in {runs} runs, every gradient exact: {told}\n")
    return 0


def _phase(folder: Path) -> str:
    """Say what the killed child had reached."""
    if not folder.exists():
        return "before or after the folder"
    found = inspect(min(folder.glob("rank-*"), default=folder))
    if not found.begun:
        return "before the run began"
    if found.adjoint_step is not None:
        return "complete" if found.complete else "in the reverse sweep"
    return (
        "after the forward sweep"
        if found.forward_step == found.n_steps
        else ("in the forward sweep, with states" if found.states else "in the forward sweep")
    )


if __name__ == "__main__":
    sys.exit(main())
