"""How much of the transfers hides behind compute of equal length.

Overlap is (compute + io - wall) / min(compute, io): 1 when the shorter of the
two is hidden entirely, 0 when one follows the other (pyrevolve's disk).
Forward: states are written while steps run; reverse: states are read back
while steps run.  Both are measured twice: with compute held to one core, so
that the transfers have another, and with BLAS free to take every core
(`*_all_cores`), where transfers and compute share them.  Then the price paid
by compute while a store streams at full speed beside it: a BLAS loop, on every
core, and a loop of small NumPy calls.

    python -m benchmarks.overlap [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import child, finish, options
from multistage.backends import FileStore
from multistage.backends.files import available_engines
from multistage.states.layout import Layout

STATE_BYTES = 8 << 20
ONE_CORE = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
AHEAD = 3  # reads in flight, as the streaming schedule has them


class Work:
    """Compute that takes about a given time, on as many cores as BLAS takes."""

    def __init__(self) -> None:
        self._a = np.full((256, 256), 1e-3)
        self.calls = 1

    def run(self, calls: int | None = None) -> None:
        """Multiply matrices so many times."""
        a = self._a
        for _ in range(self.calls if calls is None else calls):
            np.dot(a, a)

    def calibrate(self, seconds: float) -> None:
        """Choose the calls that take `seconds`."""
        self.run(50)
        began = time.perf_counter()
        self.run(200)
        self.calls = max(1, round(seconds * 200 / (time.perf_counter() - began)))


def put_all(store: FileStore, states: list[list[Any]], between: Callable[[], None]) -> float:
    """Write states with something between them; return the seconds until all are written."""
    began = time.perf_counter()
    for key, arrays in enumerate(states):
        assert store.put(key, arrays, block=True)
        between()
    for key in range(len(states)):
        assert store.wait_written(key)
    return time.perf_counter() - began


def get_all(store: FileStore, states: list[list[Any]], between: Callable[[], None]) -> float:
    """Read states back in descending order with something between; return the seconds."""
    began = time.perf_counter()
    last = len(states) - 1
    for key in range(last, -1, -1):
        for ahead in range(key, max(-1, key - AHEAD), -1):
            store.prefetch(ahead)
        arrays = store.get(key)
        assert arrays[0][0] == states[key][0][0], "a state came back changed"
        between()
    return time.perf_counter() - began


def assert_same(store: FileStore, states: list[list[Any]]) -> None:
    """Assert that every byte of every state comes back, before anything is timed."""
    for key in range(len(states) - 1, -1, -1):
        assert np.array_equal(store.get(key)[0], states[key][0]), f"state {key} came back changed"


def overlaps(folder: str, count: int, repeats: int, engine: Any = "auto") -> dict[str, list[float]]:
    """Return samples of compute, io, wall and overlap, forward and reverse."""
    samples: dict[str, list[float]] = {}
    base = np.random.default_rng(0).random(STATE_BYTES // 8)
    states = [[base + key] for key in range(4)] * (count // 4)
    layout, work = Layout.of(base), Work()

    def nothing() -> None:
        return

    for _ in range(repeats + 1):
        store = FileStore(folder, engine)
        store.open(layout)
        io = {"forward": put_all(store, states, nothing)}
        assert_same(store, states)
        io["reverse"] = get_all(store, states, nothing)
        store.close()
        for phase, transfer in (("forward", put_all), ("reverse", get_all)):
            store = FileStore(folder, engine)
            store.open(layout)
            if phase == "reverse":
                put_all(store, states, nothing)
            work.calibrate(io[phase] / count)
            began = time.perf_counter()
            for _ in range(count):
                work.run()
            compute = time.perf_counter() - began
            wall = transfer(store, states, work.run)
            store.close()
            hidden = (compute + io[phase] - wall) / min(compute, io[phase])
            for what, value in (
                ("compute", compute),
                ("io", io[phase]),
                ("wall", wall),
                ("overlap", hidden),
            ):
                samples.setdefault(f"{phase} {what}", []).append(value)
    return {name: values[1:] for name, values in samples.items()}  # the first warms up


def slowdowns(folder: str, engine: str, repeats: int) -> dict[str, list[float]]:
    """Return how much slower compute runs while a store streams at full speed."""
    samples: dict[str, list[float]] = {}
    base = np.zeros((1 << 20) // 8)
    layout, work, small = Layout.of(base), Work(), np.ones((1, 100))
    weights = np.full((100, 400), 1e-3)
    work.calibrate(0.25)

    def python_heavy() -> None:
        for _ in range(8_000):
            np.tanh(small @ weights)

    for _ in range(repeats):
        for name, loop in (("blas", work.run), ("python", python_heavy)):
            began = time.perf_counter()
            loop()
            alone = time.perf_counter() - began
            store: Any = FileStore(folder, engine, capacity_bytes=1 << 30)  # type: ignore[arg-type]
            store.open(layout)
            stop = threading.Event()
            streamer = threading.Thread(target=_stream, args=(store, base, stop))
            streamer.start()
            began = time.perf_counter()
            loop()
            beside = time.perf_counter() - began
            stop.set()
            streamer.join()
            moved = store.stats.bytes_written
            store.close()
            samples.setdefault(name, []).append(beside / alone - 1)
            samples.setdefault(f"{name} bytes/s", []).append(moved / beside)
    return samples


def _stream(store: Any, base: Any, stop: threading.Event) -> None:
    key = 0
    while not stop.is_set():
        store.put(key, [base], block=True)
        key += 1
        if key >= 64:
            store.wait_written(key - 64)
            store.drop(key - 64)
    for left in range(max(0, key - 64), key):
        store.wait_written(left)


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        with tempfile.TemporaryDirectory(prefix="overlap-", dir=".") as folder:
            print(json.dumps(overlaps(folder, **args.child)))
        return
    repeats, count = (3, 16) if args.quick else (9, 48)
    with tempfile.TemporaryDirectory(prefix="overlap-", dir=".") as folder:
        samples: dict[str, Any] = {}
        # Turn about, so that drifts of a shared machine fall on both alike; in
        # processes of their own, since BLAS reads its threads when it is loaded.
        for _ in range(3):
            for suffix, environment in (("", ONE_CORE), (" all cores", {})):
                task = {"count": count, "repeats": max(1, repeats // 3)}
                for name, values in child("benchmarks.overlap", task, environment).items():
                    samples.setdefault(name + suffix, []).extend(values)
        for engine in available_engines():
            for name, values in slowdowns(folder, engine, repeats).items():
                samples[f"{engine} {name}"] = values

    def middle(name: str) -> float:
        return float(statistics.median(samples[name]))

    ratios = {
        "forward": middle("forward overlap"),
        "reverse": middle("reverse overlap"),
        "forward_all_cores": middle("forward overlap all cores"),
        "reverse_all_cores": middle("reverse overlap all cores"),
        **{f"slowdown_{engine}": middle(f"{engine} blas") for engine in available_engines()},
        **{
            f"slowdown_{engine}_python": middle(f"{engine} python")
            for engine in available_engines()
        },
    }
    finish(args, "overlap", samples, ratios)
    if args.plot:
        _plot(samples, args.plot)


def _plot(samples: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.boxplot(
        [samples["forward overlap"], samples["reverse overlap"]],
        tick_labels=["forward", "reverse"],
    )
    left.axhline(0.85, color="gray", ls=":")
    left.set_ylim(0, 1.1)
    left.set_ylabel("overlap")
    left.set_title("Compute and transfers of equal length")
    names = [f"{engine} {loop}" for engine in available_engines() for loop in ("blas", "python")]
    right.boxplot([[100 * v for v in samples[n]] for n in names], tick_labels=names)
    right.tick_params(axis="x", labelrotation=30)
    right.set_ylabel("slowdown (%)")
    right.set_title("Compute beside a store at full speed")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
