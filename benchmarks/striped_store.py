"""A tier striped over two paths beside each path by itself: what becomes of the sum of their rates.

The paths are host memory that moves so many bytes a second, each by itself as two disks would:
equal ones, and one three times as fast as the other.  Each is measured alone and both as one tier,
in turn, with one transfer in flight and with several, written and read back.

`over_sum`
    rate of the striped tier over the sum of the rates of its paths, the least over all
`over_sum_one`, `over_sum_several`
    the same by transfers in flight

    python -m benchmarks.striped_store [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks._common import finish, interleaved, options
from multistage.backends import Store, StripedStore
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.states.layout import Array, Layout

RATES = {"equal": (40e6, 40e6), "unequal": (60e6, 20e6)}
STATE_BYTES = 8 << 20
IN_FLIGHT = {"one": 1, "several": 3}
COUNT = 6  # states moved at a time


class Paced(Ram):
    """Host memory that moves so many bytes in a second, each way."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write bytes at the pace."""
        began = time.perf_counter()
        super().write(slot, offset, data)
        self._wait(began, len(data))

    def read(self, slot: int, data: Array) -> None:
        """Read bytes at the pace."""
        began = time.perf_counter()
        super().read(slot, data)
        self._wait(began, len(data))

    def _wait(self, began: float, nbytes: int) -> None:
        time.sleep(max(0.0, began + nbytes / self._rate - time.perf_counter()))


def path(rate: float) -> StreamedStore:
    """Return a store that moves so many bytes in a second."""
    return StreamedStore(f"{rate / 1e6:.0f} MB/s", lambda: Paced(rate))


def moved(store: Store, states: list[Array], in_flight: int) -> float:
    """Return the bytes per second that are written and read back."""
    began = time.perf_counter()
    for key in range(COUNT):
        assert store.put(key, [states[key % len(states)]], block=True)
        if key >= in_flight - 1:
            assert store.wait_written(key - in_flight + 1)
    for key in range(COUNT):
        assert store.wait_written(key)
    for key in reversed(range(COUNT)):
        for ahead in range(key, max(-1, key - in_flight), -1):
            store.prefetch(ahead)
        array = store.get(key)[0]
        assert array[key] == states[key % len(states)][key], f"state {key} came back changed"
        store.drop(key)
    ended = time.perf_counter()
    return COUNT * STATE_BYTES / (ended - began)


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    generator = np.random.default_rng(args.seed)
    states = [generator.integers(0, 256, STATE_BYTES, np.uint8) for _ in range(3)]
    samples: dict[str, dict[str, list[float]]] = {}
    found: dict[str, list[float]] = {name: [] for name in IN_FLIGHT}
    for kind, rates in RATES.items():
        for name, in_flight in IN_FLIGHT.items():
            stores: dict[str, Store] = {
                "one": path(rates[0]),
                "other": path(rates[1]),
                "striped": StripedStore(path(rates[0]), path(rates[1])),
            }
            runs: dict[str, Callable[[], float]] = {}
            for what, store in stores.items():
                store.open(Layout.of(states[0]))
                runs[what] = partial(moved, store, states, in_flight)
                runs[what]()  # memory is touched, rates are seen
            got = interleaved(runs, 2 if args.quick else 7)
            for store in stores.values():
                store.close()
            samples[f"{kind}, {name} in flight"] = got
            turns = zip(got["one"], got["other"], got["striped"], strict=True)
            ratio = statistics.median(both / (one + other) for one, other, both in turns)
            found[name].append(ratio)
            shown = (f"{what} {statistics.median(rate) / 1e6:.0f}" for what, rate in got.items())
            print(f"{kind}, {name} in flight: {', '.join(shown)} MB/s, {ratio:.3f} of the sum")
    ratios = {f"over_sum_{name}": min(values) for name, values in found.items()}
    finish(args, "striped_store", samples, {"over_sum": min(ratios.values()), **ratios})


if __name__ == "__main__":
    main()
