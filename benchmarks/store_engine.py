"""How close each engine of the file store comes to the disk, and what it costs compute.

Every engine, and fio where it is installed, in turn on one filesystem; each
figure is the median over the turns of a ratio taken within one turn, since the
rates of a shared disk drift by factors.

`write_over_fio`, `read_over_fio`
    rates for states of 1 MB and more over fio's direct sequential rates (one
    request at a time, the best of 1 and 4 MiB), the least over the sizes
`small_over_large`
    64 KB states over 16 MB states, the lesser of writing and reading
`put_over_memcpy`
    (seconds of a put - 5 us) / seconds of a copy of the state, the largest
    over the sizes: what the computing thread pays
`blas_slowdown`, `python_slowdown`
    of a loop of matrix products and of a narrow LSTM's steps beside a store
    that streams at full speed, one core left to it
`kept_rate`
    the streaming rate beside such a loop over that alone, the lesser

The names are the native engine's; the others' carry the engine as a suffix.

    python -m benchmarks.store_engine [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import child, finish, options
from multistage.backends import FileStore
from multistage.backends.files import available_engines
from multistage.states.layout import Layout

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)
LARGE = 1 << 20  # from here on compared with fio
AHEAD = 3  # reads in flight, as the streaming schedule has them
PUT_S = 5e-6
FIO_BLOCKS = ("1m", "4m")
STREAMED_BYTES = 4 << 20
DEPTH = 4  # writes waiting or in flight while the store streams
KEPT = 32  # states held at a time meanwhile
ASK_S = 0.25e-3  # how often the store is offered a state: less than a write takes
# A shared machine: cores that others may use in a quiet sample, samples wanted and tried.
QUIET, ENOUGH, MOST = 0.2, 5, 20
ONE_CORE = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")


def fio(folder: str, nbytes: int) -> dict[str, float]:
    """Return the bytes per second of fio's sequential writes and reads past the page cache."""
    best: dict[str, float] = {}
    for block in FIO_BLOCKS:
        for kind in ("write", "read"):
            done = subprocess.run(
                [
                    "fio",
                    "--name=engine",
                    f"--filename={folder}/fio",
                    f"--size={nbytes}",
                    f"--rw={kind}",
                    f"--bs={block}",
                    "--direct=1",
                    "--ioengine=psync",
                    "--fallocate=posix",
                    "--loops=4",  # the first grows the file, as the first turn of `rates`
                    "--output-format=json",
                ],
                # Huge pages under its buffers, as under ours: half as fast again.
                env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
            rate = json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"]
            best[kind] = max(best.get(kind, 0.0), float(rate))
        Path(folder, "fio").unlink()
    return best


def rates(folder: str, engine: Any, state_bytes: int, total: int) -> dict[str, float]:
    """Return bytes per second written and read back in descending order, and a put's price."""
    count = max(8, total // state_bytes)
    base = np.random.default_rng(0).integers(0, 256, state_bytes, np.uint8)
    states = [base ^ np.uint8(key) for key in range(8)]
    store = FileStore(folder, engine)
    store.open(Layout.of(base))
    puts = []
    try:
        for turn in range(2):  # the first grows the file, the second finds all in place
            began = time.perf_counter()
            for key in range(count):
                if store.put(key, [states[key % 8]]):
                    continue
                assert store.put(key, [states[key % 8]], block=True)
            for key in range(count):
                assert store.wait_written(key)
            # Some states still lie in a buffer, but no more than that.
            written = time.perf_counter() - began
            began = time.perf_counter()
            for key in range(count - 1, -1, -1):
                for ahead in range(key, max(-1, key - AHEAD), -1):
                    store.prefetch(ahead)
                array = store.get(key)[0]
                if turn == 0:
                    assert np.array_equal(array, states[key % 8]), f"state {key} came back changed"
                store.drop(key)
            read = time.perf_counter() - began
        for key in range(64):  # puts one at a time, as between the steps of a computation
            began = time.perf_counter()
            assert store.put(key, [states[key % 8]], block=True)
            puts.append(time.perf_counter() - began)
            assert store.wait_written(key)
    finally:
        store.close()
    place, copies = np.zeros((8, state_bytes), np.uint8), []
    for key in range(64):
        began = time.perf_counter()
        place[key % 8] = states[key % 8]
        copies.append(time.perf_counter() - began)
    moved = count * state_bytes
    return {
        "write": moved / written,
        "read": moved / read,
        "put_s": statistics.median(puts),
        "memcpy_s": statistics.median(copies),
    }


class Stream:
    """Keeps a store busy with writes of large states, without ever waiting for it."""

    def __init__(self, folder: str, engine: Any) -> None:
        self._state = np.ones(STREAMED_BYTES // 8)
        self._store = FileStore(folder, engine, queue_depth=DEPTH)
        self._store.open(Layout.of(self._state))
        self._key = self._written = 0

    def offer(self, *, block: bool = False) -> None:
        """Put states until one is refused; with `block`, one that is taken."""
        while self._store.put(self._key, [self._state], block=block):
            self._key += 1
            if self._key >= KEPT:
                self._store.drop(self._key - KEPT)
            if block:
                return

    def drain(self) -> float:
        """Wait until all is written; return the bytes since the last drain."""
        for key in range(max(0, self._key - DEPTH), self._key):
            assert self._store.wait_written(key)
        before, self._written = self._written, self._store.stats.bytes_written
        return self._written - before

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def lstm_loop() -> Callable[[], None]:
    """Return a step of the LSTM of width 100: Python and small NumPy calls."""
    from multistage.demos.lstm import build

    model = build(1_000, 100, 1, np.float64, 0)
    state, at = model.start(), 0

    def step() -> None:
        nonlocal state, at
        state = model.step(state, at % 1_000)
        at += 1

    return step


def blas_loop() -> Callable[[], None]:
    """Return a product of two matrices."""
    a, product = np.full((256, 256), 1e-3), np.empty((256, 256))

    def step() -> None:
        np.dot(a, a, out=product)

    return step


LOOPS = {"blas": blas_loop, "python": lstm_loop}


class _Others:
    """How many cores other programs use, from now on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), *self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        fields = [float(f) for f in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        own = os.times()
        # Without idle and iowait; in ticks.
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK"), own[0] + own[1]

    def busy(self) -> float:
        """Return the cores."""
        busy, own = self._now()
        return (busy - self._busy - (own - self._own)) / (time.perf_counter() - self._began)


def beside(folder: str, engine: Any, step: Callable[[], None], seconds: float) -> dict[str, float]:
    """Return how much longer a loop takes while it keeps a store busy, and what the store does."""
    for _ in range(20):
        step()
    began = time.perf_counter()
    for _ in range(50):
        step()
    each = (time.perf_counter() - began) / 50
    # Asked often enough that the store always has work.
    rounds, asked = math.ceil(seconds / ASK_S), math.ceil(ASK_S / each)
    stream = Stream(folder, engine)
    try:
        for _ in range(2 * KEPT):
            stream.offer(block=True)
        stream.drain()
        samples: list[dict[str, float]] = []
        # Until there are enough in which no other program was busy.
        while len(samples) < MOST and sum(s["others"] < QUIET for s in samples) < ENOUGH:
            others = _Others()
            began = time.perf_counter()
            for _ in range(rounds):
                for _ in range(asked):
                    step()
            alone = time.perf_counter() - began
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                stream.offer(block=True)
            moved = stream.drain()
            rate = moved / (time.perf_counter() - began)
            began = time.perf_counter()
            for _ in range(rounds):
                stream.offer()
                for _ in range(asked):
                    step()
            both = time.perf_counter() - began
            moved = stream.drain()
            kept = moved / (time.perf_counter() - began) / rate
            samples.append(
                {"slowdown": both / alone - 1, "kept": kept, "rate": rate, "others": others.busy()}
            )
    finally:
        stream.close()
    quiet = [s for s in samples if s["others"] < QUIET]
    used = quiet if len(quiet) >= ENOUGH else samples
    return {name: statistics.median(s[name] for s in used) for name in samples[0]}


def run_child(folder: str, turns: int, total: int, seconds: float) -> list[dict[str, Any]]:
    """Return what every engine did in each turn."""
    results = []
    loops = {name: make() for name, make in LOOPS.items()}
    for _ in range(turns):
        turn: dict[str, Any] = {engine: {} for engine in available_engines()}
        for state_bytes in SIZES:
            # Close together, so that the disk is the same for all.
            disk = fio(folder, total) if shutil.which("fio") and state_bytes >= LARGE else {}
            for engine in available_engines():
                sample = rates(folder, engine, state_bytes, total)
                turn[engine][str(state_bytes)] = {**sample, "fio": disk}
        for engine in available_engines():
            for name, step in loops.items():
                turn[engine][name] = beside(folder, engine, step, seconds)
        results.append(turn)
    return results


def engine_ratios(turns: list[dict[str, Any]], engine: str) -> dict[str, float]:
    """Return the medians over the turns of the ratios named in the module's docstring."""

    def middle(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(turn[engine]) for turn in turns)

    ratios: dict[str, float] = {}
    large = [str(size) for size in SIZES if size >= LARGE]
    if turns[0][engine][large[0]]["fio"]:
        for kind in ("write", "read"):
            ratios[f"{kind}_over_fio"] = min(
                middle(lambda t, s=size, k=kind: t[s][k] / t[s]["fio"][k])  # type: ignore[misc]
                for size in large
            )
    small, largest = str(SIZES[0]), str(SIZES[-1])
    ratios["small_over_large"] = min(
        middle(lambda t, k=kind: t[small][k] / t[largest][k])  # type: ignore[misc]
        for kind in ("write", "read")
    )
    ratios["put_over_memcpy"] = max(
        middle(
            lambda t, s=str(size): max(0.0, t[s]["put_s"] - PUT_S) / t[s]["memcpy_s"]  # type: ignore[misc]
        )
        for size in SIZES
    )
    for name in ("blas", "python"):
        ratios[f"{name}_slowdown"] = middle(lambda t, n=name: t[n]["slowdown"])  # type: ignore[misc]
    ratios["kept_rate"] = min(
        middle(lambda t, n=name: t[n]["kept"])  # type: ignore[misc]
        for name in ("blas", "python")
    )
    return ratios


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (.)")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_child(**args.child)))
        return
    turns, total, seconds = (3, 128 << 20, 0.1) if args.quick else (9, 512 << 20, 0.3)
    with tempfile.TemporaryDirectory(prefix="store-engine-", dir=args.folder) as folder:
        task = {"folder": folder, "turns": turns, "total": total, "seconds": seconds}
        samples = child("benchmarks.store_engine", task, ONE_CORE)
    ratios, engines = {}, available_engines()
    for engine in engines:
        for name, value in engine_ratios(samples, engine).items():
            ratios[name if engine == engines[0] else f"{name}_{engine}"] = value
    left_out = [] if shutil.which("fio") else ["fio, which is not installed, and ratios over it"]
    if engines[0] != "native":
        left_out.append("the native engine: the C core was not built")
    busy = max(turn[e][loop]["others"] for turn in samples for e in engines for loop in LOOPS)
    if busy >= QUIET:
        left_out.append(f"a quiet machine: others used up to {busy:.1f} cores beside the loops")
    for engine in engines:
        for size in SIZES:
            found = [turn[engine][str(size)] for turn in samples]
            print(
                f"{engine:<9}{size >> 10:>6} KiB"
                + "".join(
                    f"{what:>7}{statistics.median(s[what] for s in found) / 1e6:>6.0f} MB/s"
                    for what in ("write", "read")
                )
                + f"{1e6 * statistics.median(s['put_s'] for s in found):>8.1f} us a put"
                + f"{1e6 * statistics.median(s['memcpy_s'] for s in found):>8.1f} us a copy"
            )
    finish(args, "store_engine", samples, ratios, left_out)
    if args.plot:
        _plot(samples, args.plot)


def _plot(samples: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for side, kind in zip(axes, ("write", "read"), strict=True):
        for engine in available_engines():
            rate = [
                statistics.median(turn[engine][str(size)][kind] for turn in samples) / 1e6
                for size in SIZES
            ]
            side.plot([size / 2**20 for size in SIZES], rate, marker="o", label=engine)
        disk = [
            turn[engine][str(size)]["fio"][kind] / 1e6
            for turn in samples
            for engine in available_engines()
            for size in SIZES
            if turn[engine][str(size)]["fio"]
        ]
        if disk:
            side.axhline(statistics.median(disk), color="gray", ls=":", label="fio")
        side.set_xscale("log")
        side.set_xlabel("state (MiB)")
        side.set_title(kind)
        side.grid(alpha=0.3)
    axes[0].set_ylabel("MB/s")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
