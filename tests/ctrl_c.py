"""Ctrl-C at random moments while stores open, are measured and close: nothing may be left.

`python tests/ctrl_c.py --signals 1000`; each kind of store in a process of its own, which prints
what was left.  `tests/support/test_interrupts.py` sends some tens.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from leaks import descriptors, native_threads

from multistage import Costs, Reversal, Tier
from multistage.backends import open_store
from multistage.measurement.store import probe_store
from multistage.states.layout import Layout

SIZE, N = 1024, 60
LAYOUT = Layout.of(np.zeros(SIZE))
GIVEN = Costs(2e-5, 4e-5, state_bytes=8 * SIZE, tiers=(Tier("tier", 4e-5, 4e-5),))
TIERS = {
    "memory": "memory:",
    "native": "file:{0}?engine=native",
    "native, large": "file:{0}?engine=native&buffers=0",
    "direct": "file:{0}?engine=direct",
    "aiofiles": "file:{0}?engine=aiofiles&buffers=0",
    "objects": "fsspec:memory://ctrl-c",
    "blosc": "file:{0}?engine=direct&compress=blosc",
    "zfp": "file:{0}?engine=direct&compress=zfp&tolerance=1e-6",
    "cascade": "memory:?capacity=1MiB > file:{0}?engine=direct",
    "durable": "",
}


def stored(tier: str) -> None:
    """Open, use and close a store as its documentation says."""
    store, state = open_store(tier), np.ones(SIZE)
    try:
        store.open(LAYOUT)
        for key in range(5):
            store.put(key, [state], block=True)
        store.get(2)
    finally:
        store.close()


def dropped(tier: str) -> None:
    """Leave an open store to its finalizers."""
    store = open_store(tier)
    store.open(LAYOUT)
    store.put(0, [np.ones(SIZE)], block=True)


def measured(tier: str) -> None:
    """Measure a store."""
    probe_store(open_store(tier), LAYOUT, seconds=0.004)


def run(folder: Path, tier: str, costs: Costs | None) -> None:
    """Run a sweep, in a durable folder if no tier is named; measure it without costs."""
    place = {"tiers": tier} if tier else {"durable": folder / "run"}
    with Reversal(
        lambda x, i: np.sin(x),
        lambda x, a, i: np.cos(x) * a,
        N,
        memory="6 slots",
        costs=costs,
        planner="streaming",
        **place,
    ) as reversal:
        reversal.forward(np.linspace(0, 1, SIZE))
        assert reversal.reverse(np.ones(SIZE)).tobytes() == exact()


@functools.cache
def exact() -> bytes:
    """Return the bits of the gradient, every state kept."""
    states, adjoint = [np.linspace(0, 1, SIZE)], np.ones(SIZE)
    for _ in range(N):
        states.append(np.sin(states[-1]))
    for state in reversed(states[:-1]):
        adjoint = np.cos(state) * adjoint
    return adjoint.tobytes()


def works(name: str, folder: Path) -> list[Callable[[], None]]:
    """Return what is interrupted."""
    tier = TIERS[name].format(folder)
    found: list[Callable[[], None]] = [
        lambda: run(folder, tier, GIVEN),
        lambda: run(folder, tier, None),
    ]
    if tier:
        found += [lambda: stored(tier), lambda: measured(tier), lambda: dropped(tier)]
    return found


def left(folder: Path) -> list[object]:
    """Return the threads, descriptors and files of ours that are there."""
    found: list[object] = [each.name for each in threading.enumerate() if each.name != "presser"]
    return [*found, native_threads(), *sorted(descriptors()), *sorted(folder.iterdir())]


def interrupted(work: Callable[[], None], delay_s: float) -> None:
    """Do something again and again until Ctrl-C comes."""
    caught = threading.Event()

    def press(again_s: float = delay_s) -> None:
        # Again after a while: Python drops a Ctrl-C that meets a finalizer, as design.md says.
        while not caught.wait(again_s):
            os.kill(os.getpid(), signal.SIGINT)
            again_s = 5.0

    presser = threading.Thread(target=press, name="presser")
    try:
        presser.start()
        while True:
            work()
    except KeyboardInterrupt:
        caught.set()
        presser.join()


def child(name: str, signals: int, seed: int) -> None:
    """Interrupt one kind of store so many times."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.dump_traceback_later(250, exit=True)  # it hangs
    draw, folder = random.Random(f"{name} {seed}"), Path(tempfile.mkdtemp(prefix="ctrl-c-"))
    try:
        lengths_s = {}
        for work in works(name, folder):
            work()  # what is made once in a process is made
            began = time.perf_counter()
            work()
            lengths_s[work] = time.perf_counter() - began
        gc.collect()
        before, wrong = left(folder), []
        for number in range(signals):
            work = draw.choice([*lengths_s])
            with contextlib.suppress(KeyboardInterrupt):
                interrupted(work, draw.uniform(0, 1.2 * lengths_s[work]))
            if name == "durable":  # which can be resumed: not locked
                run(folder, "", GIVEN)
            elif threading.active_count() > 1:  # Ctrl-C met a finalizer: the next one does the rest
                stored(TIERS[name].format(folder))
            for _ in range(200):
                if left(folder) == before:
                    break
                gc.collect()
                time.sleep(0.01)  # a thread of the core that was joined is listed for a moment
            else:
                wrong.append([number, str(set(left(folder)) ^ set(before))])
                before = left(folder)
        print(json.dumps([name, signals, wrong]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(signals: int, seed: int, names: list[str]) -> int:
    """Interrupt every kind of store; return how often something was left."""
    failures = 0
    for name in names:
        done = subprocess.run(
            [sys.executable, __file__, "--child", name, str(-(-signals // len(names))), str(seed)],
            capture_output=True,
            text=True,
            check=False,
        )
        wrong = json.loads(done.stdout)[2] if not done.returncode else [done.stderr[-4000:]]
        failures += len(wrong)
        print(f"{name}: {wrong or 'nothing left'}", flush=True)
    return failures


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*TIERS], action="append")
    options = parser.parse_args()
    sys.exit(main(options.signals, options.seed, options.only or [*TIERS]) > 0)
