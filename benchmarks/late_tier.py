"""A tier that turns slow in a sweep: what it costs beside no tier, and beside waiting for it.

The tier is host memory that moves its bytes at a given rate, the same on any machine, and
steps sleep.  From the beginning, a quarter or half of the forward or of the reverse sweep
on every transfer takes 1.5, 3, 10 or 50 times as long as planned.  What is timed is that
one sweep, against Revolve (equal steps) or RR-9302 (unequal ones) without a tier in the same
memory, and against waiting, for which a factor of 3 stands.  Each gradient is compared bit for
bit with that of the sweep without a tier.

    python -m benchmarks.late_tier [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from benchmarks._common import finish, options
from multistage import Costs, Reversal, Stage, StageCosts
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.execute.late import Late
from multistage.model.tier import Tier
from multistage.states.layout import Array, Layout

SLOWER = (1.5, 3.0, 10.0, 50.0)
PLACES = (0.0, 0.25, 0.5)
WAITED = 3.0  # the factor at which waiting is timed: at others it takes for ever
_N = {"equal": 200, "unequal": 48}
_STEP_S, _RHO, _BYTES = 1e-3, 0.3, 1 << 18
_SLOTS, _SHARE = 7, 0.15  # of equal steps; of the bytes of all states of unequal ones


class Paced(Ram):
    """Host memory that moves so many bytes in a second."""

    rate = np.inf

    def write(self, slot: int, offset: int, data: Array) -> None:
        """Write, no faster than that."""
        began = time.perf_counter()
        super().write(slot, offset, data)
        self._rest(began, data)

    def read(self, slot: int, data: Array) -> None:
        """Read, no faster than that."""
        began = time.perf_counter()
        super().read(slot, data)
        self._rest(began, data)

    def _rest(self, began: float, data: Array) -> None:
        while (left := began + len(data) / Paced.rate - time.perf_counter()) > 0:
            time.sleep(min(left, 1e-3))


class Problem:
    """Steps that sleep, of one kind; a place in the sweep from which on the tier is slow."""

    def __init__(self, kind: str) -> None:
        draw, self.n, self.kind = np.random.default_rng(0), _N[kind], kind
        sizes = np.full(self.n + 1, _BYTES // 8)
        self.seconds = np.full(self.n, _STEP_S)
        if kind == "unequal":
            sizes = draw.choice([1, 2, 4], self.n + 1) * (_BYTES // 16)
            self.seconds = draw.choice([1.0, 2.0, 4.0], self.n) * 3 * _STEP_S
        self.sizes = [int(size) for size in sizes]
        self.planned = 8 * sum(self.sizes) / (_RHO * 3 * float(self.seconds.sum()))
        self.slow_at, self.slower = (0, 0), 1.0
        self.forward = True

    def step(self, x: Array, i: int) -> Array:
        """Return the next state."""
        if self.forward and i >= self.slow_at[0]:
            Paced.rate = self.planned / self.slower
        time.sleep(float(self.seconds[i]))
        return np.resize(np.sin(x), self.sizes[i + 1])

    def back(self, x: Array, adjoint: Array, i: int) -> Array:
        """Return the adjoint of the state before."""
        if i <= self.slow_at[1]:
            Paced.rate = self.planned / self.slower
        time.sleep(2 * float(self.seconds[i]))
        return np.cos(x) * np.resize(adjoint, len(x))

    def run(self, *, tier: bool) -> Reversal[Any, Any]:
        """Return a reversal, with the tier or without, in the same memory for states."""
        store = StreamedStore("paced", Paced, buffer_bytes=0)
        given: dict[str, Any] = {"tiers": store if tier else None, "progress": False}
        if self.kind == "equal":
            tiers = (Tier.of_rates(self.planned, self.planned, name="paced"),)
            costs = Costs(_STEP_S, 2 * _STEP_S, state_bytes=_BYTES, tiers=tiers if tier else ())
            given |= {"costs": costs, "n_steps": self.n, "memory": f"{_SLOTS} slots"}
        else:
            stages = [
                Stage(f"{i}", float(s), 2 * float(s), 8 * size, 8 * size, 0)
                for i, (s, size) in enumerate(zip(self.seconds, self.sizes[1:], strict=True))
            ]
            costs = StageCosts(tuple(stages), 8 * self.sizes[0])
            room = int(_SHARE * 8 * sum(self.sizes))
            buffers = store.buffer_bytes(Layout.up_to(8 * max(self.sizes))) if tier else 0
            given |= {"costs": costs, "memory": room + buffers}
        return Reversal(self.step, self.back, **given)

    def swept(self, tier: bool, slower: float, forward: bool, place: float) -> tuple[float, bytes]:
        """Return the seconds of a sweep, and its gradient."""
        at = int(place * self.n)
        self.slow_at = (at, -1) if forward else (self.n, self.n - at)
        self.slower, Paced.rate = 1.0, self.planned
        with self.run(tier=tier) as run:
            run.prepare(np.linspace(0, 1, self.sizes[0]))
            self.slower, self.forward = slower, True
            began = time.perf_counter()
            run.forward(np.linspace(0, 1, self.sizes[0]))
            self.forward = False
            if not forward and not place:
                Paced.rate = self.planned / slower
            gradient = run.reverse(np.ones(self.sizes[-1]))
            seconds = time.perf_counter() - began
            self.slower, Paced.rate = 1.0, np.inf
        return seconds, gradient.tobytes()


def cases(quick: bool) -> Iterator[tuple[float, bool, float]]:
    """Yield how many times slower, whether from the forward sweep on, and from which part of it."""
    for slower in (3.0, 50.0) if quick else SLOWER:
        for forward in (True, False):
            for place in (0.0, 0.5) if quick else PLACES:
                yield slower, forward, place


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for kind in _N:
        problem = Problem(kind)
        for slower, forward, place in cases(args.quick):
            alone_s, answer = problem.swept(False, 1.0, forward, place)
            seconds, gradient = problem.swept(True, slower, forward, place)
            assert gradient == answer, "another gradient than without the tier"
            row = {"kind": kind, "slower": slower, "forward": forward, "place": place}
            row |= {"no_tier_s": alone_s, "seconds": seconds}
            if slower == WAITED:
                with mock.patch.object(Late, "__call__", lambda *_: None):
                    row["waiting_s"], gradient = problem.swept(True, slower, forward, place)
                assert gradient == answer, "another gradient than without the tier"
            rows.append(row)
            sweep = "forward" if forward else "reverse"
            print(
                f"{kind}, {slower:g} times slower from {place:g} of the {sweep} sweep on: "
                f"{seconds / alone_s:.3f} of no tier",
                flush=True,
            )
    over = [row["seconds"] / row["no_tier_s"] for row in rows]
    waited = [row["seconds"] / row["waiting_s"] for row in rows if "waiting_s" in row]
    ratios = {
        "over_no_tier_mean": float(np.mean(over)),
        "over_no_tier_worst": max(over),
        "over_waiting": float(np.mean(waited)),
    }
    finish(args, "late_tier", {"rows": rows}, ratios)


if __name__ == "__main__":
    main()
