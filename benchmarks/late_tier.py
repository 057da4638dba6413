"""A tier that turns slow in a sweep: what it costs beside no tier, and beside waiting for it.

From the beginning, a quarter or half of the forward or of the reverse sweep on every transfer
takes 1.5, 3, 10 or 50 times as long as planned.  That one sweep stands against Revolve (equal
steps) or RR-9302 (unequal ones) without a tier in the same memory, and against waiting.
Each gradient is compared bit for bit with that of the sweep without a tier.

In virtual time steps and transfers only advance a clock: what is run again and waited for is
exact, the same on any machine.  Without `--quick` the same is timed with steps that sleep
and host memory that moves so many bytes in a second; waiting is timed where the tier is 3
times slower, as it takes for ever at others.

    python -m benchmarks.late_tier [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import numpy as np

from benchmarks._common import finish, options
from multistage import Costs, Reversal, Stage, StageCosts
from multistage.backends.base import BaseStore, Store, StoreStats, TransferRecord
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.execute.executor import Executor
from multistage.execute.late import Late
from multistage.execute.metered import Metered
from multistage.model.tier import Tier
from multistage.reversing import unequal, uniform
from multistage.states.layout import Array, Layout

SLOWER = (1.5, 3.0, 10.0, 50.0)
PLACES = (0.0, 0.25, 0.5)
WAITED = 3.0
KINDS = {"equal": 200, "unequal": 48}
_STEP_S, _RHO, _BYTES = 1e-3, 0.3, 1 << 18
_SLOTS, _SHARE = 7, 0.15  # of equal steps; of the bytes of all states of unequal ones


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the seconds now."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let some seconds pass."""
        self.now += seconds


class RealClock:
    """Seconds as they pass."""

    __call__ = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)


class VirtualStore(BaseStore):
    """A tier in virtual time: one transfer after the other each way, at the rate of now.

    Parameters
    ----------
    clock : Clock
    gives_up : bool
        Whether a write that is cancelled ends at once, not when it would have.

    Attributes
    ----------
    rate : float
        Bytes that it moves in a second.
    waited_s : float
        Seconds that were waited for it.
    """

    name, queue_depth = "virtual", 2

    def __init__(self, clock: Clock, *, gives_up: bool = True) -> None:
        self.clock, self._gives_up, self.rate, self.waited_s = clock, gives_up, np.inf, 0.0
        self.stats = StoreStats()
        self._transfers: deque[TransferRecord] = deque()
        self._begun: list[TransferRecord] = []
        self._kept: dict[int, list[Array]] = {}
        self._ends: dict[tuple[str, int], float] = {}
        self._free = {"write": 0.0, "read": 0.0}

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Those that have ended."""
        now = self.clock.now
        self._transfers += [each for each in self._begun if each.stop_s <= now]
        self._begun = [each for each in self._begun if each.stop_s > now]
        return self._transfers

    def buffer_bytes(self, layout: Layout) -> int:
        """Return 0."""
        return 0

    def capacity_states(self, layout: Layout) -> int | None:
        """Return None."""
        return None

    def open(self, layout: Layout) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._ends.clear()

    def _begin(self, kind: Literal["write", "read"], key: int, nbytes: int) -> None:
        start = max(self.clock.now, self._free[kind], self._ends.get(("write", key), 0.0))
        stop = self._free[kind] = self._ends[kind, key] = start + nbytes / self.rate
        self._begun.append(TransferRecord(kind, key, start, stop, nbytes))

    def _wait(self, kind: str, key: int, timeout_s: float = np.inf) -> bool:
        stop = self._ends.get((kind, key), 0.0)
        waits_s = max(0.0, min(stop - self.clock.now, timeout_s))
        self.clock.sleep(waits_s)
        self.waited_s += waits_s
        return stop <= self.clock.now

    def _writing(self) -> list[int]:
        now = self.clock.now
        return [key for (kind, key), stop in self._ends.items() if kind == "write" and stop > now]

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Write."""
        while self.waits():
            if not block:
                return False
            self._wait("write", self._writing()[0])
        self._kept[key] = [array.copy() for array in arrays]
        for array in self._kept[key]:
            array.flags.writeable = False
        self._begin("write", key, sum(array.nbytes for array in arrays))
        return True

    def waits(self) -> bool:
        """Whether as many writes are in flight as may be."""
        return len(self._writing()) >= self.queue_depth

    def wait_written(self, key: int) -> bool:
        """Wait for a write."""
        return self._wait("write", key) and key in self._kept

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds."""
        return self._wait("write", key, timeout_s)

    def cancel(self, key: int) -> None:
        """Give up a write."""
        if self._gives_up and key in self._writing():
            self._ends["write", key] = self._free["write"] = self.clock.now
            self._begun = [each for each in self._begun if each.key != key or each.kind == "read"]
            del self._kept[key]

    def prefetch(self, key: int) -> None:
        """Read."""
        if ("read", key) not in self._ends:
            self._begin("read", key, sum(array.nbytes for array in self._kept[key]))

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than so many seconds."""
        self.prefetch(key)
        return self._wait("read", key, timeout_s)

    def get(self, key: int) -> list[Array]:
        """Wait for a read."""
        self.arrived(key, np.inf)
        del self._ends["read", key]
        return self._kept[key]

    def drop(self, key: int) -> None:
        """Forget a state; a write in flight goes on."""
        self._kept.pop(key, None)
        self._ends.pop(("read", key), None)
        if key not in self._writing():
            self._ends.pop(("write", key), None)
        if not any(kind == "read" for kind, _ in self._ends):
            self._free["read"] = self.clock.now


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


@dataclass(frozen=True, slots=True)
class Case:
    """When a tier turns slow.

    Attributes
    ----------
    slower : float
        How many times as long transfers take then; inf: they never end.
    forward : bool
        Whether that is in the forward sweep.
    place : float
        After which part of it.
    """

    slower: float
    forward: bool
    place: float


@dataclass(frozen=True, slots=True)
class Swept:
    """One sweep: its seconds and gradient, steps run forward, seconds waited, why it left."""

    seconds: float
    gradient: bytes
    steps: int
    waited_s: float
    late: str
    writes: int


class Problem:
    """Steps that take time, of one kind, on a tier in virtual or real time.

    Parameters
    ----------
    kind : {"equal", "unequal"}
    real : bool
    gives_up : bool
        See `VirtualStore`.
    slots : int
        Of equal steps.
    """

    def __init__(
        self, kind: str, *, real: bool = False, gives_up: bool = True, slots: int = _SLOTS
    ) -> None:
        draw, self.n, self.kind = np.random.default_rng(0), KINDS[kind], kind
        self.real, self._gives_up, self._slots = real, gives_up, slots
        nbytes = _BYTES if real else _BYTES >> 6
        sizes = np.full(self.n + 1, nbytes // 8)
        self.seconds = np.full(self.n, _STEP_S)
        if kind == "unequal":
            sizes = draw.choice([1, 2, 4], self.n + 1) * (nbytes // 16)
            self.seconds = draw.choice([1.0, 2.0, 4.0], self.n) * 3 * _STEP_S
        self.sizes = [int(size) for size in sizes]
        self.planned = 8 * sum(self.sizes) / (_RHO * 3 * float(self.seconds.sum()))
        self._clock: Clock | RealClock = RealClock()
        self._throttled: Any = Paced
        self._slow_rate, self._slow_at, self._forward, self._steps = np.inf, (0, 0), True, 0

    def step(self, x: Array, i: int) -> Array:
        """Return the next state."""
        if self._forward and i >= self._slow_at[0]:
            self._throttled.rate = self._slow_rate
        self._clock.sleep(float(self.seconds[i]))
        self._steps += 1
        return np.resize(np.sin(x), self.sizes[i + 1])

    def back(self, x: Array, adjoint: Array, i: int) -> Array:
        """Return the adjoint of the state before."""
        if i <= self._slow_at[1]:
            self._throttled.rate = self._slow_rate
        self._clock.sleep(2 * float(self.seconds[i]))
        return np.cos(x) * np.resize(adjoint, len(x))

    def _store(self) -> Store:
        if self.real:
            return StreamedStore("paced", Paced, buffer_bytes=0)
        self._clock = clock = Clock()
        self._throttled = store = VirtualStore(clock, gives_up=self._gives_up)
        return store

    def _reversal(self, store: Store, *, tier: bool) -> Reversal[Any, Any]:
        """Return a reversal, with the tier or without, in the same memory for states."""
        given: dict[str, Any] = {"tiers": store if tier else None, "progress": False}
        if self.kind == "equal":
            tiers = (Tier.of_rates(self.planned, self.planned, name=store.name),)
            nbytes = 8 * self.sizes[0]
            costs = Costs(_STEP_S, 2 * _STEP_S, state_bytes=nbytes, tiers=tiers if tier else ())
            given |= {"costs": costs, "n_steps": self.n, "memory": f"{self._slots} slots"}
        else:
            stages = [
                Stage(f"{i}", float(s), 2 * float(s), 8 * size, 8 * size, 0)
                for i, (s, size) in enumerate(zip(self.seconds, self.sizes[1:], strict=True))
            ]
            room = int(_SHARE * 8 * sum(self.sizes))
            buffers = store.buffer_bytes(Layout.up_to(8 * max(self.sizes))) if tier else 0
            of_stages = StageCosts(tuple(stages), 8 * self.sizes[0])
            given |= {"costs": of_stages, "memory": room + buffers}
        return Reversal(self.step, self.back, **given)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Have steps timed by the virtual clock, and tiers of unequal steps not be measured."""
        if self.real:
            yield
            return
        made = partial(Executor, clock=self._clock)
        rates = Tier.of_rates(self.planned, self.planned, tapes=False)
        with (
            mock.patch.object(uniform, "Executor", made),
            mock.patch.object(unequal, "Executor", made),
            mock.patch.object(unequal, "measured_rates", lambda *_: rates),
            mock.patch.object(unequal, "Metered", partial(Metered, clock=self._clock)),
        ):
            yield

    def swept(self, case: Case, *, tier: bool = True) -> Swept:
        """Run one sweep."""
        (found,) = self.sweeps([case], tier=tier)
        return found

    def sweeps(self, cases: Sequence[Case], *, tier: bool = True) -> Iterator[Swept]:
        """Run sweeps of one reversal, each on a tier that is as fast as planned at first."""
        store, start = self._store(), np.linspace(0, 1, self.sizes[0])
        with self._timed(), self._reversal(store, tier=tier) as run:
            self._throttled.rate = self.planned
            run.prepare(start.copy())
            for case in cases:
                yield self._one(run, case, start)
            self._throttled.rate = np.inf

    def _one(self, run: Reversal[Any, Any], case: Case, start: Array) -> Swept:
        at = int(case.place * self.n)
        self._slow_at = (at, -1) if case.forward else (self.n, self.n - at)
        self._throttled.rate, self._slow_rate = self.planned, self.planned / min(case.slower, 1e9)
        waited_s = 0.0 if self.real else self._throttled.waited_s
        self._forward, self._steps, began = True, 0, self._clock()
        run.forward(start)
        self._forward = False
        if not case.forward and not case.place:
            self._throttled.rate = self._slow_rate
        gradient = run.reverse(np.ones(self.sizes[-1]))
        seconds, counts = self._clock() - began, run.report().counts
        waited_s = counts.stall_s if self.real else self._throttled.waited_s - waited_s
        return Swept(seconds, gradient.tobytes(), self._steps, waited_s, counts.late, counts.writes)


def cases(slower: Sequence[float] = SLOWER) -> Iterator[Case]:
    """Yield tiers that turn slow."""
    for times in slower:
        for forward in (True, False):
            for place in PLACES:
                yield Case(times, forward, place)


def compared(problem: Problem, case: Case, *, waits: bool) -> dict[str, Any]:
    """Return a sweep beside that without a tier and, if asked, beside waiting."""
    alone, swept = problem.swept(case, tier=False), problem.swept(case)
    assert swept.gradient == alone.gradient, "another gradient than without the tier"
    row = {"kind": problem.kind, "no_tier_s": alone.seconds, "no_tier_steps": alone.steps}
    row |= {name: value for name, value in asdict(swept).items() if name != "gradient"}
    if waits:
        with mock.patch.object(Late, "__call__", lambda *_: None):
            waiting = problem.swept(case)
        assert waiting.gradient == alone.gradient, "another gradient than without the tier"
        row["waiting_s"] = waiting.seconds
    return row | asdict(case)


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    samples: dict[str, list[dict[str, Any]]] = {}
    ratios: dict[str, float] = {}
    for real in (False,) if args.quick else (False, True):
        rows = samples["real" if real else "virtual"] = []
        for kind in KINDS:
            problem = Problem(kind, real=real)
            for case in cases():
                waits = not real or case.slower == WAITED
                rows.append(row := compared(problem, case, waits=waits))
                sweep = "forward" if case.forward else "reverse"
                print(
                    f"{'real' if real else 'virtual'} time, {kind}, {case.slower:g} times slower "
                    f"from {case.place:g} of the {sweep} sweep on: "
                    f"{row['seconds'] / row['no_tier_s']:.3f} of no tier, {row['steps']} steps for "
                    f"{row['no_tier_steps']}, waited {row['waited_s']:.3f} s",
                    flush=True,
                )
        over = [row["seconds"] / row["no_tier_s"] for row in rows]
        waited = [row["seconds"] / row["waiting_s"] for row in rows if "waiting_s" in row]
        prefix = "real_" if real else ""
        ratios |= {
            f"{prefix}over_no_tier_mean": float(np.mean(over)),
            f"{prefix}over_no_tier_worst": max(over),
            f"{prefix}over_waiting": float(np.mean(waited)),
        }
    finish(args, "late_tier", samples, ratios)


if __name__ == "__main__":
    main()
