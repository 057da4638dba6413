"""Copies between a CUDA device and pinned memory: how fast, and what they cost computing.

States go out while matrix products run, then come back in reverse.  The
ceiling is a plain copy to and from pinned memory, measured in the same run.
With little computing per state the copies are the bottleneck, and their rate is
compared with the ceiling; with much, the products are, and their slowdown is.
What comes back is asserted to be what went out.

Without a CUDA device the same code runs on threads and host memory, which says
nothing of a device; the ratios are printed all the same.

    python -m benchmarks.device_overlap [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks._common import finish, options
from multistage.backends.base import TransferRecord
from multistage.states.layout import Layout
from multistage.torch.tiers.pinned import PinnedStore

_AHEAD = 3


class Machine:
    """A device, states on it, and something to compute."""

    def __init__(self, device: torch.device, nbytes: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.nbytes = nbytes
        side = 2048
        self._a, self._b = torch.randn(2, side, side, device=device).unbind()
        self._out = torch.empty_like(self._a)
        self.states = [
            torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device) for _ in range(4)
        ]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def compute(self, times: int) -> None:
        """Queue some matrix products."""
        for _ in range(times):
            torch.mm(self._a, self._b, out=self._out)

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Return the shortest time of some work."""
        found = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return min(found)

    def ceilings(self) -> tuple[float, float]:
        """Return bytes per second out and in, by plain copies of a state."""
        pinned = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
        state = self.states[0]
        out = self.seconds(lambda: pinned.copy_(state, non_blocking=True))
        back = self.seconds(lambda: state.copy_(pinned, non_blocking=True))
        return self.nbytes / out, self.nbytes / back

    def products_for(self, seconds: float) -> int:
        """Return how many products take about so long."""
        one = self.seconds(lambda: self.compute(10)) / 10
        return max(1, round(seconds / one))


def stream(
    machine: Machine, count: int, products: int
) -> tuple[float, float, list[TransferRecord]]:
    """Return seconds out and back for `count` states, with so many products per state."""
    store = PinnedStore(None, machine.device)
    layout = Layout.of((np.broadcast_to(np.uint8(0), (machine.nbytes,)),))
    store.open(layout)
    try:
        for _ in range(2):  # pinned memory is taken the first time
            forward = _out(machine, store, count, products)
            reverse = _back(machine, store, count, products)
        return forward, reverse, list(store.transfers)
    finally:
        store.close()


def _out(machine: Machine, store: PinnedStore, count: int, products: int) -> float:
    machine.synchronize()
    began = time.perf_counter()
    for key in range(count):
        machine.compute(products)
        assert store.put(key, [machine.states[key % 4]])
        if key >= 2:
            store.wait_written(key - 2)
    for key in range(max(0, count - 2), count):
        store.wait_written(key)
    machine.synchronize()
    return time.perf_counter() - began


def _back(machine: Machine, store: PinnedStore, count: int, products: int) -> float:
    wrong = torch.zeros((), dtype=torch.int64, device=machine.device)
    machine.synchronize()
    began = time.perf_counter()
    for key in reversed(range(count)):
        for ahead in range(key, max(-1, key - _AHEAD), -1):
            store.prefetch(ahead)
        (found,) = store.get(key)
        machine.compute(products)
        if key % 7 == 0:
            wrong += (found != machine.states[key % 4]).sum()
        store.drop(key)
    machine.synchronize()
    seconds = time.perf_counter() - began
    assert int(wrong) == 0, "what came back is not what went out"
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    size = 64 << 20
    count = 12 if args.quick else 48
    machine = Machine(device, size, args.seed)
    samples: dict[str, list[float]] = {}
    records: list[TransferRecord] = []
    for _ in range(2 if args.quick else 5):
        out_rate, in_rate = machine.ceilings()
        little = machine.products_for(0.2 * size / out_rate)
        much = machine.products_for(2.0 * size / min(out_rate, in_rate))
        forward, reverse, _ = stream(machine, count, little)
        alone = machine.seconds(lambda: machine.compute(much * count))  # noqa: B023
        slow_forward, slow_reverse, records = stream(machine, count, much)
        for name, value in (
            ("d2h_over_ceiling", count * size / forward / out_rate),
            ("h2d_over_ceiling", count * size / reverse / in_rate),
            ("compute_slowdown", max(slow_forward, slow_reverse) / alone - 1),
            ("out_bytes_per_s", out_rate),
            ("in_bytes_per_s", in_rate),
        ):
            samples.setdefault(name, []).append(value)
    for name in ("out_bytes_per_s", "in_bytes_per_s"):
        print(f"{name:<20}{statistics.median(samples[name]) / 1e9:8.2f} GB/s")
    ratios = {
        name: statistics.median(samples[name])
        for name in ("d2h_over_ceiling", "h2d_over_ceiling", "compute_slowdown")
    }
    finish(args, "device_overlap", samples, ratios, [])
    if args.plot:
        _plot(records, args.plot)


def _plot(records: list[TransferRecord], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.5), layout="constrained")
    axes = figure.subplots()
    begin = min(record.start_s for record in records)
    for lane, kind in enumerate(("write", "read")):
        spans = [(r.start_s - begin, r.stop_s - r.start_s) for r in records if r.kind == kind]
        axes.broken_barh(spans, (lane - 0.4, 0.8), color=f"C{lane}")
    axes.set_yticks([0, 1], ["device to host", "host to device"])
    axes.set_xlabel("seconds")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
