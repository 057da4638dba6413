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
    that streams as fast as it can, one core left to it
`kernel_blas_slowdown`, `kernel_python_slowdown`
    of the same loops beside processes that write as many bytes a second past
    the page cache, without a copy, a checksum or a store: what no engine avoids
`blas_gbs`, `kernel_blas_gbs`, `python_gbs`, `kernel_python_gbs`
    what was written meanwhile, GB/s
`kept_rate`
    the streaming rate beside such a loop over that alone, the lesser

A slowdown is the median over many pairs of slices of 0.15 s: the loop beside
the writes over the mean of the slices alone just before and after. A disk may
interrupt one CPU only, and a loop there pays for it: the loop is bound to the
first CPU and to the last in turn (writers go where they like), a figure is the
mean over both, and `_apart` that of the CPU on which the bare writes cost less.
Pairs count where other programs left the slices *alone* in peace, whatever
happened beside the store; all pairs, if those are few.

The names are the native engine's; the others' carry the engine as a suffix.

    python -m benchmarks.store_engine [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
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
SLICE_S = 0.15  # of a loop, beside writes or alone
REQUEST_BYTES = 2 << 20  # of the bare writer
# A shared machine: cores that others may use in a quiet pair, and how many on a CPU are enough.
QUIET, ENOUGH = 0.2, 4
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


class Bare:
    """Two processes that write past the page cache at a given rate, and do nothing else."""

    def __init__(self, folder: str) -> None:
        spawn = multiprocessing.get_context("spawn")  # threads run here
        self._each = spawn.RawValue("d")
        self._told, self._processes = [], []
        for number in range(2):  # the engine, too, has up to two writes in flight
            ours, theirs = spawn.Pipe()
            task = (f"{folder}/bare{number}", theirs, self._each)
            self._processes.append(spawn.Process(target=_write, args=task))
            self._processes[-1].start()
            self._told.append(ours)
        for ours in self._told:
            ours.recv()

    def start(self, rate: float) -> None:
        """Write `rate` bytes per second, or as many as the disk takes."""
        self._each.value = rate / len(self._told)
        for ours in self._told:
            ours.send(True)

    def stop(self) -> float:
        """Stop; return the bytes written."""
        self._each.value = 0.0
        return float(sum(ours.recv() for ours in self._told))

    def close(self) -> None:
        """End the processes."""
        for ours, process in zip(self._told, self._processes, strict=True):
            ours.send(False)
            process.join()


def _write(path: str, told: Connection, asked: Any) -> None:
    os.nice(5)  # as the threads of the native engine
    total, at = KEPT * STREAMED_BYTES // 2, 0
    buffer = mmap.mmap(-1, REQUEST_BYTES * 2)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(buffer, np.uint8).ctypes.data % REQUEST_BYTES
    request = memoryview(buffer)[start : start + REQUEST_BYTES]
    request[:] = b"1" * REQUEST_BYTES
    disk = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(disk, 0, total)
    for offset in range(0, total, REQUEST_BYTES):  # later writes find all in place
        os.pwrite(disk, request, offset)
    told.send(None)
    while told.recv():
        began, moved = time.perf_counter(), 0
        while rate := asked.value:
            ahead = moved / rate - (time.perf_counter() - began)
            if ahead > 0:
                time.sleep(min(ahead, SLICE_S / 10))
                continue
            moved += os.pwrite(disk, request, at)
            at = (at + REQUEST_BYTES) % total
        told.send(moved)
    os.close(disk)
    Path(path).unlink()


class _Others:
    """How many cores other programs use between `start` and `stop`, over all such times."""

    def __init__(self) -> None:
        self._began = self._used = self._seconds = 0.0

    @staticmethod
    def _now() -> float:
        fields = [float(f) for f in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        # Without idle and iowait; in ticks.
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:2])

    def start(self) -> None:
        """Count from now on."""
        self._used -= self._now()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Count no more."""
        self._seconds += time.perf_counter() - self._began
        self._used += self._now()

    def cores(self) -> float:
        """Return the cores."""
        return self._used / self._seconds


def _slices(step: Callable[[], None]) -> Callable[[Callable[[], None]], float]:
    """Return a function that runs a slice, offering the store states, and returns its seconds."""
    for _ in range(20):
        step()
    began = time.perf_counter()
    for _ in range(200):
        step()
    each = (time.perf_counter() - began) / 200
    # Asked often enough that the store always has work.
    asked = math.ceil(ASK_S / each)
    rounds = math.ceil(SLICE_S / (asked * each))

    def run(offer: Callable[[], None]) -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            offer()
            for _ in range(asked):
                step()
        return time.perf_counter() - began

    return run


def _pair(
    run: Callable[[Callable[[], None]], float], stream: Stream, bare: Bare, rate: float
) -> dict[str, float]:
    """Return a loop's slowdowns beside the store and beside bare writes, and the rates of both.

    The bare writes come first where their `rate` is given, else they have the store's.
    """
    others = _Others()
    found: dict[str, float] = {}

    def alone() -> float:
        others.start()
        took = run(lambda: None)
        others.stop()
        return took

    began = time.perf_counter()
    while time.perf_counter() - began < SLICE_S:
        stream.offer(block=True)
    full = stream.drain() / (time.perf_counter() - began)
    before = alone()
    for bared in (True, False) if rate else (False, True):
        began = time.perf_counter()
        if bared:
            bare.start(rate or found["rate"])
            both = run(lambda: None)
            moved = bare.stop()
        else:
            both = run(stream.offer)
            moved = stream.drain()
        seen = moved / (time.perf_counter() - began)
        after = alone()
        name = "kernel_" if bared else ""
        found[f"{name}slowdown"] = 2 * both / (before + after) - 1
        found[f"{name}rate"] = seen
        before = after
    return {**found, "kept": found["rate"] / full, "others": others.cores()}


def beside(
    folder: str, engine: Any, step: Callable[[], None], pairs: int
) -> list[dict[str, float]]:
    """Return how much longer a loop takes while it keeps a store busy, and what the store does."""
    run = _slices(step)
    everywhere = os.sched_getaffinity(0)
    cpus = sorted({min(everywhere), max(everywhere)})
    bare, stream = Bare(folder), Stream(folder, engine)
    samples: list[dict[str, float]] = []
    try:
        for _ in range(2 * KEPT):
            stream.offer(block=True)
        stream.drain()
        for pair in range(pairs):
            cpu = cpus[pair % len(cpus)]
            os.sched_setaffinity(0, {cpu})  # this thread only
            same = [s["rate"] for s in samples if s["cpu"] == cpu]
            # By turns the store and the bare writes come first.
            rate = same[-1] if len(same) % 2 else 0.0
            samples.append({"cpu": cpu, **_pair(run, stream, bare, rate)})
    finally:
        os.sched_setaffinity(0, everywhere)
        stream.close()
        bare.close()
    return samples


def by_cpu(samples: list[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Return the pairs of each CPU that count: those in peace if they are enough, else all."""
    found = []
    for cpu in sorted({s["cpu"] for s in samples}):
        every = [s for s in samples if s["cpu"] == cpu]
        quiet = [s for s in every if s["others"] < QUIET]
        found.append(quiet if len(quiet) >= ENOUGH else every)
    return found


def run_child(folder: str, turns: int, total: int, pairs: int) -> dict[str, Any]:
    """Return what every engine did in each turn, and in the pairs of each loop."""
    results = []
    for _ in range(turns):
        turn: dict[str, Any] = {engine: {} for engine in available_engines()}
        for state_bytes in SIZES:
            # Close together, so that the disk is the same for all.
            disk = fio(folder, total) if shutil.which("fio") and state_bytes >= LARGE else {}
            for engine in available_engines():
                sample = rates(folder, engine, state_bytes, total)
                turn[engine][str(state_bytes)] = {**sample, "fio": disk}
        results.append(turn)
    loops = {name: make() for name, make in LOOPS.items()}
    found: dict[str, Any] = {
        engine: {name: beside(folder, engine, step, pairs) for name, step in loops.items()}
        for engine in available_engines()
    }
    return {"turns": results, "beside": found}


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
    return ratios


def loop_ratios(loops: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return what is named in the module's docstring of the loops beside an engine."""
    ratios: dict[str, float] = {}
    kept = []
    for loop, samples in loops.items():
        middles = [
            {name: statistics.median(s[name] for s in pairs) for name in samples[0]}
            for pairs in by_cpu(samples)
        ]
        apart = min(middles, key=lambda m: m["kernel_slowdown"])
        for kind in ("", "kernel_"):
            slowdowns = [m[f"{kind}slowdown"] for m in middles]
            ratios[f"{kind}{loop}_slowdown"] = statistics.mean(slowdowns)
            ratios[f"{kind}{loop}_slowdown_apart"] = apart[f"{kind}slowdown"]
            ratios[f"{kind}{loop}_gbs"] = statistics.mean(m[f"{kind}rate"] for m in middles) / 1e9
        kept.append(statistics.mean(m["kept"] for m in middles))
    return {**ratios, "kept_rate": min(kept)}


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (.)")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run_child(**args.child)))
        return
    turns, total, pairs = (3, 128 << 20, 16) if args.quick else (9, 512 << 20, 60)
    with tempfile.TemporaryDirectory(prefix="store-engine-", dir=args.folder) as folder:
        task = {"folder": folder, "turns": turns, "total": total, "pairs": pairs}
        result = child("benchmarks.store_engine", task, ONE_CORE)
    samples, loops = result["turns"], result["beside"]
    ratios, engines = {}, available_engines()
    for engine in engines:
        found_ratios = {**engine_ratios(samples, engine), **loop_ratios(loops[engine])}
        for name, value in found_ratios.items():
            ratios[name if engine == engines[0] else f"{name}_{engine}"] = value
    left_out = [] if shutil.which("fio") else ["fio, which is not installed, and ratios over it"]
    if engines[0] != "native":
        left_out.append("the native engine: the C core was not built")
    counted = [s for e in engines for loop in LOOPS for c in by_cpu(loops[e][loop]) for s in c]
    busy = max(sample["others"] for sample in counted)
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
    finish(args, "store_engine", result, ratios, left_out)
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
