"""Seeded faults: one in each planner, each store and what runs them; tests must catch every one.

    python tests/mutants.py            # all, some seconds each
    python tests/mutants.py sweep io   # those whose file's name has one of these words

Each fault is one line of the package replaced in a copy of it, on which the
tests named are run; they must fail, within two minutes.  Before that they must
pass on an unharmed copy.  C sources are built again.  Exit 1 if a fault goes unseen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from multistage import native
from multistage.native.header import sum_of_sources

ROOT = Path(__file__).parent.parent
LIMIT_S = 120


@dataclass(frozen=True)
class Mutant:
    """A line of a file, what stands there instead, and the tests to run."""

    path: str
    line: str
    instead: str
    tests: tuple[str, ...]


def _of(path: str, line: str, instead: str, *tests: str) -> Mutant:
    return Mutant(path, line, instead, tests)


PLANNERS = "planners/test_planners.py"
EXECUTE = "execute/test_executor.py"
OWNERSHIP = "test_ownership.py"
CONTRACT = "backends/test_contract.py"
STREAMED = "backends/test_streamed.py"

MUTANTS = (
    # planners
    _of(
        "planners/single/store_all.py",
        "(n - 1) * costs.tape_slots",
        "(n - 2) * costs.tape_slots",
        PLANNERS,
    ),
    _of(
        "planners/single/binomial.py",
        "return r * length - beta(slots + 1, r - 1)",
        "return r * length - beta(slots + 1, r)",
        "planners/test_binomial.py",
    ),
    _of(
        "planners/single/revolve.py",
        "reverse_actions(0, n_steps, slots)",
        "reverse_actions(0, n_steps, max(1, slots - 1))",
        PLANNERS,
    ),
    _of(
        "planners/single/revolve.py",
        "            yield Load(live)\n        elif kind in (kinds.firstrun",
        "            yield Load(saved[0])\n        elif kind in (kinds.firstrun",
        PLANNERS,
    ),
    _of(
        "planners/streaming/interval.py",
        "ahead[start - interval] = int(token)\n            free -= 1",
        "ahead[start - interval] = int(token)",
        PLANNERS,
    ),
    _of(
        "planners/streaming/interval.py",
        "if (yield Await(token)) is False:\n            lost.add(start)",
        "if (yield Await(token)) is None:\n            lost.add(start)",
        EXECUTE,
    ),
    _of(
        "planners/single/periodic.py",
        "part = -(-(stop - start) // (branch + 1))",
        "part = (stop - start) // (branch + 1) or 1",
        PLANNERS,
    ),
    _of(
        "planners/single/periodic.py",
        "free - k, branch, weight)",
        "free - k + 1, branch, weight)",
        PLANNERS,
    ),
    _of(
        "planners/streaming/online.py",
        "if self.levels[k] < highest:",
        "if self.levels[k] <= highest:",
        PLANNERS,
    ),
    _of(
        "planners/streaming/streaming.py",
        "(tier.read_s + step_s) / (step_s + turn_s)",
        "tier.read_s / (step_s + turn_s)",
        PLANNERS,
    ),
    _of(
        "planners/streaming/streaming.py",
        "if min(predicted.makespan_s, paper.makespan_s) >= fallback.makespan_s:",
        "if False:",
        PLANNERS,
    ),
    _of(
        "planners/streaming/sweep.py",
        "while len(self.writing) > self.sweep.queue_depth:",
        "while len(self.writing) > self.sweep.queue_depth + 1:",
        PLANNERS,
    ),
    _of(
        "planners/streaming/sweep.py",
        "        if (yield Await(token)) is False:\n            self.stored.discard(step)",
        "        if (yield Await(token)) is None:\n            self.stored.discard(step)",
        EXECUTE,
    ),
    _of(
        "planners/streaming/reserve.py",
        "max(one_less[k], read_s)",
        "min(one_less[k], read_s)",
        PLANNERS,
    ),
    _of(
        "planners/synchronous/hierarchy.py",
        "min(solved, key=lambda pair: pair[0].seconds)",
        "max(solved, key=lambda pair: pair[0].seconds)",
        "planners/test_hierarchy.py",
    ),
    _of(
        "planners/synchronous/periodic_disk.py",
        "each = periods + transfers_in_steps",
        "each = periods + transfers_in_steps / 2",
        "planners/test_hierarchy.py",
    ),
    _of(
        "planners/synchronous/stumm_walther.py",
        "order = np.argsort(priced",
        "order = np.argsort(-priced",
        "planners/test_hierarchy.py",
    ),
    _of(
        "planners/synchronous/stumm_walther.py",
        "yield Drop(step)\n            return step",
        "pass\n            return step",
        "planners/test_hierarchy.py",
        PLANNERS,
    ),
    _of(
        "planners/synchronous/mixed.py",
        "s // tape + 2",
        "s // tape + 3",
        "planners/test_hierarchy.py",
        PLANNERS,
    ),
    _of(
        "planners/streaming/overlap.py",
        "staged = step not in held",
        "staged = False",
        "planners/test_overlap.py",
    ),
    _of(
        "planners/streaming/resumed.py",
        "self.stored.discard(step)\n                continue",
        "continue",
        "planners/test_resumed.py",
    ),
    _of(
        "planners/chain/table.py",
        "stack.append((k, t, m - int(self.sizes.state[k])))",
        "stack.append((k, t, m))",
        "planners/test_heterogeneous.py",
    ),
    _of("planners/predict.py", "a + repeats * (a - b)", "a + (repeats - 1) * (a - b)", PLANNERS),
    _of(
        "planners/bound.py",
        "cheapest - room * max(keep_1, read) - write_2",
        "cheapest - write_2",
        "planners/test_bound.py",
    ),
    _of(
        "native/revolve.c",
        "return low + (high - low) / 2;",
        "return high + 1;",
        "planners/test_binomial.py",
    ),
    _of(
        "native/chain_kernel.h",
        "const int shift = (int)(m - plane * PLANE);",
        "const int shift = (int)(m - plane * PLANE) & ~1;",
        "planners/test_heterogeneous.py",
    ),
    _of(
        "native/hierarchy_kernel.h",
        "if (a[far] + b[stop - 1] >= least)",
        "if (a[far] + b[stop - 1] >= 0.99 * least)",
        "planners/test_hierarchy.py",
    ),
    # what judges and runs schedules
    _of(
        "schedule/machine.py",
        "elif step != self.adjoint - 1:",
        "elif step > self.adjoint - 1:",
        "test_actions.py",
    ),
    _of(
        "schedule/channels.py",
        "start = max(now, self.read_free, self.stored[item])",
        "start = max(now, self.read_free)",
        "schedule/test_simulation.py",
    ),
    _of(
        "schedule/channels.py",
        "            self.read_free = stop",
        "            pass",
        "schedule/test_simulation_of_stages.py",
    ),
    _of(
        "schedule/machine.py",
        "if self.pins and ~step in self.pins:",
        "if False:",
        "schedule/test_accounting.py",
    ),
    _of(
        "schedule/machine.py", "if self.pins[item] > 1:", "if False:", "schedule/test_accounting.py"
    ),
    _of(
        "schedule/accounting.py",
        "before = left + self.state[i + 1]",
        "before = left",
        "schedule/test_accounting.py",
    ),
    _of(
        "schedule/accounting.py",
        "if self.starts.get(state) is gone:",
        "if False:",
        "schedule/test_accounting.py",
    ),
    _of(
        "planners/chain/plan.py",
        "memory_bytes=limit, checked=False)",
        "checked=False)",
        "planners/test_chain_plan.py",
    ),
    _of(
        "execute/recovery.py",
        "if other is not None and best < start < step:",
        "if other is not None and best < start:",
        EXECUTE,
    ),
    _of(
        "states/references.py",
        "            if not flags.owndata:",
        "            if False:",
        OWNERSHIP,
    ),
    # what keeps states, tapes and adjoints apart, and budgets and runs from each other
    _of("states/references.py", "return made.copy() if type", "return made if type", OWNERSHIP),
    _of("states/sharing.py", 'return "shares memory with the state"', 'return ""', OWNERSHIP),
    _of(
        "execute/executor.py",
        "adjoint = sweep.slots.adopt_adjoint(adjoint, sweep.live)",
        "pass",
        OWNERSHIP,
    ),
    _of("execute/loop.py", "if adjoint is None and sweep.wanted:", "if False:", OWNERSHIP),
    _of("execute/loop.py", "if sweep.one_tape and tapes:", "if False:", "test_one_tape.py"),
    _of(
        "schedule/machine.py",
        "if self.tapes and not self.state_is_tape:",
        "if False:",
        "schedule/test_rules.py",
    ),
    _of("model/blocks.py", 'bool(getattr(chain, "one_tape", False))', "False", OWNERSHIP),
    _of("reversing/uniform.py", "not self.plan.sealed", "False", "measurement/test_given.py"),
    _of(
        "measurement/given.py",
        "if theirs.state_is_tape != costs.state_is_tape:",
        "if False:",
        "measurement/test_given.py",
    ),
    _of(
        "backends/streamed.py",
        "self._hold.take()\n        try:\n            self._open(layout)",
        "try:\n            self._open(layout)",
        "backends/test_lifetimes.py",
    ),
    _of(
        "support/free_memory.py", "yield from inner.parents", "pass", "support/test_free_memory.py"
    ),
    _of(
        "errors.py", "functools.partial(_without_user, _USER), text", "str, text", "test_secrets.py"
    ),
    # stores
    _of(
        "backends/staging.py",
        "before.buffer = None",
        "pass",
        CONTRACT,
        STREAMED,
    ),
    _of(
        "backends/traffic.py",
        "capacity_bytes // extent_bytes)",
        "capacity_bytes // extent_bytes + 1)",
        CONTRACT,
        "backends/test_files.py",
    ),
    _of(
        "backends/carrier.py",
        "if self._verify and found != flight.checksum:",
        "if self._verify and found == 0:",
        "backends/test_files.py",
        CONTRACT,
    ),
    _of("backends/carrier.py", "if flight.behind is not None:", "if False:", STREAMED, CONTRACT),
    _of(
        "backends/arena.py",
        "self._lent[number] = weakref.ref(buffer, back)",
        "back(weakref.ref(buffer))",
        "backends/test_arena.py",
        CONTRACT,
    ),
    _of(
        "backends/medium.py",
        "np.copyto(extent[offset : offset + len(data)], data)",
        "np.copyto(extent[: len(data)], data)",
        CONTRACT,
    ),
    _of(
        "backends/direct.py",
        "position = slot * self._extent_bytes\n",
        "position = slot * self._extent_bytes // 2\n",
        CONTRACT,
    ),
    _of("backends/aio.py", "await file.seek(offset)", "await file.seek(0)", CONTRACT),
    _of(
        "backends/private.py",
        "if found.st_mode & stat.S_IWOTH:",
        "if False:",
        "backends/test_private.py",
    ),
    _of("backends/native.py", "sum=extent.checksum,", "sum=0,", CONTRACT),
    _of("native/io.c", "job->error = error;", "job->error = 0;", "backends/test_native.py"),
    _of("native/io.c", "done -= done % PAGE;", ";", "backends/test_native.py"),
    _of("backends/numa.py", "if self._node not in there:", "if False:", "backends/test_numa.py"),
    _of(
        "backends/remote.py",
        "    wait(jobs)\n        for job in jobs:\n            job.result()",
        "    wait(jobs)",
        "backends/test_remote.py",
    ),
    _of(
        "backends/compressed.py",
        "if not error <= self._tolerance:",
        "if error > 10 * self._tolerance:",
        "backends/test_compressed.py",
    ),
    _of(
        "backends/cascade.py",
        "self.capacity_bytes = (upper + lower) * extent_bytes",
        "self.capacity_bytes = upper * extent_bytes",
        CONTRACT,
    ),
    _of(
        "backends/levels.py",
        "self._changed.wait_for(lambda: not place.moving)",
        "pass",
        "backends/test_cascade.py",
    ),
    _of(
        "backends/levels.py",
        "self._above.move_to_end(place, last=False)",
        "self._above.move_to_end(place)",
        "backends/test_cascade.py",
    ),
    _of("durable/store.py", "if batch.least < needed_below or", "if", "durable/test_store.py"),
    _of(
        "durable/new_file.py",
        "self._temporary, self._name, src_dir_fd",
        "self._temporary, self._name + '-', src_dir_fd",
        "durable/test_folder.py",
    ),
    _of(
        "durable/adjoints.py",
        "if newest is not None and newest.given != given:",
        "if False:",
        "durable/test_run.py",
    ),
    _of(
        "torch/tiers/shuttle.py",
        "entry = self._order.popleft()",
        "entry = self._order.pop()",
        "torch/test_pinned.py",
    ),
    _of(
        "torch/tiers/pinned.py",
        "Entry(key, slot, written, sources)",
        "Entry(key, slot, written)",
        "torch/test_pinned.py",
    ),
    _of(
        "torch/tiers/pinned_memory.py",
        "left -= nbytes",
        "left -= count * size",
        "torch/test_pinned.py",
    ),
)


# An editable install finds the package by a hook of its own, wherever the path leads.
RUN = """
import os
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
import multistage, pytest
assert multistage.__file__.startswith(os.getcwd()), multistage.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def copy(to: Path) -> None:
    """Copy the package, its C core, its tests and their configuration."""
    for name in ("multistage", "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to)
    if native.LIBRARY is not None:
        shutil.copy(native.LIBRARY._name, to / "multistage" / "native" / "_native.so")


def harm(mutant: Mutant, folder: Path) -> None:
    """Put the fault into a copy, built again where it is in C."""
    path = folder / "multistage" / mutant.path
    text = path.read_text()
    assert text.count(mutant.line) == 1, f"{mutant.path} has {mutant.line!r} not once"
    path.write_text(text.replace(mutant.line, mutant.instead))
    if mutant.path.startswith("native/") and path.suffix in (".c", ".h"):
        sources = [str(source) for source in sorted(path.parent.glob("*.c"))]
        number = f"-DMULTISTAGE_SOURCES={sum_of_sources(path.parent)}"
        command = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", number, *sources]
        command += ["-pthread", "-lm"]
        subprocess.run([*command, "-o", path.parent / "_native.so"], check=True)


def passes(folder: Path, tests: tuple[str, ...]) -> bool:
    """Run tests on a copy; a run that does not end fails."""
    command = [sys.executable, "-c", RUN, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/{name}" for name in tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT_S, text=True
        )
    except subprocess.TimeoutExpired:
        return False
    # 1: tests failed.  All else is no verdict.
    assert done.returncode in (0, 1, 2), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode == 0


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(word in m.path for word in words)]
    unseen = 0
    with tempfile.TemporaryDirectory() as scratch:
        sound = Path(scratch, "sound")
        copy(sound)
        for name in sorted({name for mutant in chosen for name in mutant.tests}):
            if not passes(sound, (name,)):
                print(f"tests/{name} does not pass on the package as it is")
                return 1
        for number, mutant in enumerate(chosen):
            folder = Path(scratch, str(number))
            copy(folder)
            harm(mutant, folder)
            began = time.perf_counter()
            seen = not passes(folder, mutant.tests)
            unseen += not seen
            shutil.rmtree(folder)
            print(
                f"{'caught' if seen else 'UNSEEN'}  {mutant.path}: {mutant.instead.strip()!r} "
                f"({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - unseen} of {len(chosen)} faults caught")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
