"""Every fault at every call: what fails, where it is put in, and what must come of it.

A *case* is one run of a whole adjoint in which one thing fails, once or from
some call on: its first, its second, ..., its last.  A run is small enough for
all of them to be tried.  Each must end with the adjoint of store-all, to the
last bit, or with an error that says what to do; and it must end.

    python tests/faults.py

counts the cases and prints the table of docs/explanation/faults.md.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from chains import CHAINS, digest, raw, store_all

from multistage import native
from multistage.backends import (
    CascadeStore,
    CompressedStore,
    FileStore,
    MemoryStore,
    NumaStore,
    RemoteStore,
    Store,
)
from multistage.backends.arena import pages, pages_of_node
from multistage.backends.files import ENGINES
from multistage.backends.medium import Medium
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import FaultyStore
from multistage.errors import CheckpointWarning, MultistageError
from multistage.model.chain import Chain, FunctionChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, Plan
from multistage.planners.single.revolve import revolve_schedule
from multistage.planners.streaming.overlap import on_tier, overlap
from multistage.reversal import Reversal
from multistage.states.layout import Array, Layout

N = 10
N_COALESCED = 24  # so that some extents are no longer in a buffer when they are needed
SLOTS = 3
CHAIN = "nested"
LAYOUT = Layout.of(CHAINS[CHAIN][1]())
_COALESCED = 6 * 4 * LAYOUT.nbytes  # buffers for extents of four states
_ROOM = 1 << 20  # bounds what the direct engine takes ahead

answer = cache(store_all)


# ------------------------------------------------------------------ the schedules


def _planned(planner: str, transfer_s: float, n: int) -> Plan:
    costs = Costs(
        1.0, 2.0, state_bytes=LAYOUT.nbytes, tiers=(Tier("slow", transfer_s, transfer_s),)
    )
    return PLANNERS[planner](costs, SLOTS, n)


def _overlapped(n: int) -> Plan:
    """Revolve with most checkpoints in the tier, its transfers beside the steps."""
    plan = _planned("h-revolve", 0.5, n)
    return replace(plan, make=lambda: overlap(on_tier(revolve_schedule(n - 4, n)), SLOTS))


SCHEDULES: dict[str, Callable[[int], Plan]] = {
    "streaming": cache(lambda n: _planned("streaming", 1.5, n)),
    "interval": cache(lambda n: _planned("interval", 2.0, n)),
    "h-revolve": cache(lambda n: _planned("h-revolve", 0.2, n)),
    "overlapped": cache(_overlapped),
}


# --------------------------------------------------------------------- the stores


def _node() -> bool:
    try:
        pages_of_node(1, 0)
    except (OSError, AssertionError):
        return False
    return native.LIBRARY is not None


def _file(engine: str, buffer_bytes: int) -> Callable[[Path], StreamedStore]:
    return lambda folder: FileStore(
        folder, engine, capacity_bytes=_ROOM, buffer_bytes=buffer_bytes, queue_depth=8
    )


# Faults strike in a store's medium; the native engine has none, and hooks of
# its own in the C core, which `backends/test_native.py` lets fail.
FILE_ENGINES = tuple(engine for engine in ENGINES if engine not in ("auto", "native"))
STORES: dict[str, Callable[[Path], StreamedStore]] = {
    "memory": lambda folder: MemoryStore(buffer_bytes=0, queue_depth=8),
    "memory, coalesced": lambda folder: MemoryStore(buffer_bytes=_COALESCED),
}
for _engine in FILE_ENGINES:
    STORES[_engine] = _file(_engine, 0)
    STORES[f"{_engine}, coalesced"] = _file(_engine, _COALESCED)
PAGE = 4096  # an extent of one small state
STORES |= {
    "compressed": lambda folder: CompressedStore(MemoryStore(buffer_bytes=0, queue_depth=8)),
    "compressed, coalesced": lambda folder: CompressedStore(MemoryStore(buffer_bytes=_COALESCED)),
    "cascade": lambda folder: _cascade(),
    "cascade, lower level": lambda folder: _cascade(),
    "remote": lambda folder: RemoteStore("memory://faults", buffer_bytes=0, queue_depth=8),
}
# Whose medium is spoilt, where it is not the store's own.
SPOILT: dict[str, Callable[[Any], StreamedStore]] = {
    "compressed": lambda store: store.store,
    "compressed, coalesced": lambda store: store.store,
    "cascade": lambda store: store.levels[0],
    "cascade, lower level": lambda store: store.levels[1],
}


def _cascade() -> CascadeStore:
    upper = MemoryStore(3 * PAGE, buffer_bytes=0, queue_depth=8)
    return CascadeStore(upper, MemoryStore(buffer_bytes=0, queue_depth=8))


if _node():
    STORES["numa"] = lambda folder: NumaStore(0, buffer_bytes=0, queue_depth=8)


# --------------------------------------------------------------------- the faults


class Trigger:
    """Tells at which calls a fault strikes: one of them, or that and all later ones.

    Called by one thread at a time.
    """

    def __init__(self, first: int, lasting: bool = False) -> None:
        self.first, self.lasting = first, lasting
        self.calls = 0

    def __call__(self, _: object = None) -> bool:
        number, self.calls = self.calls, self.calls + 1
        return number >= self.first if self.lasting else number == self.first

    @property
    def struck(self) -> bool:
        return self.calls > self.first


class FaultyMedium:
    """A medium whose every write or read goes through a function that may spoil it.

    Parameters
    ----------
    inner : Medium
    write : callable, optional
        `write(inner, slot, offset, data)` in place of the inner one's.
    read : callable, optional
        `read(inner, slot, data)`.
    """

    def __init__(
        self,
        inner: Medium,
        write: Callable[[Medium, int, int, Array], None] | None = None,
        read: Callable[[Medium, int, Array], None] | None = None,
    ) -> None:
        self._inner, self._write, self._read = inner, write, read
        self.begin, self.free = inner.begin, inner.free

    def write(self, slot: int, offset: int, data: Array) -> None:
        if self._write is None:
            self._inner.write(slot, offset, data)
        else:
            self._write(self._inner, slot, offset, data)

    def read(self, slot: int, data: Array) -> None:
        if self._read is None:
            self._inner.read(slot, data)
        else:
            self._read(self._inner, slot, data)

    def close(self) -> None:
        self._inner.close()


def spoil(store: StreamedStore, **spoilers: Any) -> StreamedStore:
    """Have the store work on a `FaultyMedium`."""
    make = store.medium
    store.medium = lambda *of: FaultyMedium(make(*of), **spoilers)
    return store


def _error(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def _system(code: int) -> Callable[..., None]:
    return _error(OSError(code, os.strerror(code)))


def _torn(inner: Medium, slot: int, offset: int, data: Array) -> None:
    half = pages(len(data))
    half[: LAYOUT.nbytes // 2] = data[: LAYOUT.nbytes // 2]
    inner.write(slot, offset, half)


def _astray(inner: Medium, slot: int, offset: int, data: Array) -> None:
    inner.write(slot + 1 if slot < 3 else slot - 1, offset, data)


def _flipped(inner: Medium, slot: int, data: Array) -> None:
    inner.read(slot, data)
    data[(5 * slot + 3) % LAYOUT.nbytes] ^= 1 << slot % 8


def _halved(inner: Medium, slot: int, data: Array) -> None:
    inner.read(slot, data)
    data[LAYOUT.nbytes // 2 :] = 0


def _other(inner: Medium, slot: int, data: Array) -> None:
    inner.read(slot - 1 if slot else slot + 1, data)


WRITE_FAULTS: dict[str, Callable[..., None]] = {
    "write error (EIO)": _system(errno.EIO),
    "disk full (ENOSPC)": _system(errno.ENOSPC),
    "quota used (EDQUOT)": _system(errno.EDQUOT),
    "file too large (EFBIG)": _system(errno.EFBIG),
    "no memory while writing": _error(MemoryError()),
    "a bug while writing": _error(RuntimeError("not an OSError")),
    "torn write": _torn,
    "write lost in silence": lambda inner, slot, offset, data: None,
    "write to the wrong place": _astray,
}
READ_FAULTS: dict[str, Callable[..., None]] = {
    "read error (EIO)": _system(errno.EIO),
    "no memory while reading": _error(MemoryError()),
    "a bug while reading": _error(RuntimeError("not an OSError")),
    "bit flipped": _flipped,
    "half of it zeros": _halved,
    "bytes of another checkpoint": _other,
}
STORE_FAULTS: dict[str, str] = {
    "put refused": "refuse",
    "write answered as failed": "lose_write",
    "read answered as lost": "lose_read",
}
SLOW_S = 2e-3  # a transfer here takes some 20 us


def _struck(trigger: Trigger, fault: Callable[..., None], kind: str) -> Callable[..., None]:
    def transfer(inner: Medium, *arguments: Any) -> None:
        if trigger():
            fault(inner, *arguments)
        elif kind == "write":
            inner.write(*arguments)
        else:
            inner.read(*arguments)

    return transfer


def _slowed(kind: str) -> Callable[..., None]:
    def transfer(inner: Medium, *arguments: Any) -> None:
        time.sleep(SLOW_S)
        getattr(inner, kind)(*arguments)

    return transfer


# Tried not only once in a run, but from each call on.
LASTING = {*STORE_FAULTS, "write error (EIO)", "disk full (ENOSPC)", "read error (EIO)"}

Kind = Literal["store", "write", "read", "slow"]
FAULTS: dict[str, Kind] = {
    **dict.fromkeys(STORE_FAULTS, "store"),
    **dict.fromkeys(WRITE_FAULTS, "write"),
    **dict.fromkeys(READ_FAULTS, "read"),
    "a hundred times slower": "slow",
}


def faulty(make: Callable[[], Any], fault: str, trigger: Trigger, below: Any = None) -> Store:
    """Return a store in which a fault strikes when the trigger says so.

    `below(store)` names the streamed store whose medium is spoilt, by default
    the store itself.
    """
    store: Any = make()
    medium = store if below is None else below(store)
    match FAULTS[fault]:
        case "store":
            return FaultyStore(store, **{STORE_FAULTS[fault]: trigger})
        case "write":
            spoil(medium, write=_struck(trigger, WRITE_FAULTS[fault], "write"))
        case "read":
            spoil(medium, read=_struck(trigger, READ_FAULTS[fault], "read"))
        case "slow":
            spoil(medium, write=_slowed("write"), read=_slowed("read"))
    return store


# ------------------------------------------------------------------------ a case


@dataclass
class Outcome:
    """What came of some cases."""

    cases: int = 0
    exact: int = 0
    errors: int = 0
    noticed: int = 0  # cases in which a checkpoint was lost or refused

    def __iadd__(self, other: Outcome) -> Outcome:
        self.cases += other.cases
        self.exact += other.exact
        self.errors += other.errors
        self.noticed += other.noticed
        return self


def _held() -> tuple[int, int]:
    return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())


def run_case(
    store: Store,
    plan: Plan,
    checked: bool,
    sweeps: int = 1,
    name: str = CHAIN,
    chain: Chain[Any, int] | None = None,
) -> Outcome:
    """Run an adjoint on a store that fails; return what came of it.

    `name` is that of the chain whose answer is needed, `chain` runs in its place.

    Raises
    ------
    AssertionError
        If it ended with another adjoint, or left a thread or descriptor.
    """
    held = _held()
    made, start = CHAINS[name]
    noticed = errors = 0
    chain = made() if chain is None else chain
    run: Reversal[Any, int] = Reversal(chain, planner=plan, tiers=store, checked=checked)
    with warnings.catch_warnings(), run:
        warnings.simplefilter("ignore", CheckpointWarning)
        for _ in range(sweeps):
            try:
                last = raw(run.forward(start()))
                adjoint = run.reverse(1)
            except MultistageError as error:
                assert len(str(error)) > 20, error
                errors = 1
                break
            assert (last, adjoint) == answer(name, plan.n_steps), "another adjoint than store-all's"
            counts = run._sweeps.executor.counts if run._sweeps.executor is not None else None
            noticed |= bool(counts.lost or counts.refused)
    assert _held() == held, "a thread or a descriptor is left"
    return Outcome(1, 1 - errors, errors, noticed)


def at_every_call(
    make: Callable[[], Any], fault: str, schedule: str, n: int = N, below: Any = None
) -> Iterator[Outcome]:
    """Run the cases of one fault: at its first call, ..., its last; once, and from there on."""
    plan = SCHEDULES[schedule](n)
    # A schedule that asks for no answers breaks the rules when checkpoints are
    # lost, and the executor makes up for it: there is nothing to judge.
    checked = schedule != "overlapped"
    if FAULTS[fault] == "slow":
        yield run_case(faulty(make, fault, Trigger(0), below), plan, checked)
        return
    for lasting in (False, True) if fault in LASTING else (False,):
        for number in range(1000):
            trigger = Trigger(number, lasting)
            store = faulty(make, fault, trigger, below)
            # The second sweep is on a store that has seen the fault.
            outcome = run_case(store, plan, checked, sweeps=1 + (FAULTS[fault] == "write"))
            if not trigger.struck:
                break
            yield outcome


# ------------------------------------------------------- the operators, and files


class Boom(Exception):
    """Raised by an operator."""


def watched_chain(tick: Callable[[], None], name: str = CHAIN) -> Chain[Any, int]:
    """Return a chain that calls `tick` at every call of an operator."""
    inner: Any = CHAINS[name][0]()

    def step(state: Any, i: int) -> Any:
        tick()
        return inner.advance(state, i, i + 1)

    def adjoint_step(state: Any, adjoint: int, i: int) -> int:
        tick()
        return digest(state, adjoint, i)

    return FunctionChain(step, adjoint_step)


def raising_cases(
    make: Callable[[], Any], schedule: str, error: type[BaseException], n: int = N
) -> Iterator[Outcome]:
    """Run the cases in which an operator raises: at its first call, ..., its last.

    The error reaches the caller, and the same `Reversal` then works.
    """
    plan = SCHEDULES[schedule](n)
    held = _held()
    for at in range(1000):
        trigger = Trigger(at)

        def tick(trigger: Trigger = trigger) -> None:
            if trigger():
                raise error("bang")

        raised = False
        with Reversal(watched_chain(tick), planner=plan, tiers=make()) as run:
            for _ in range(2):
                try:
                    last = raw(run.forward(CHAINS[CHAIN][1]()))
                    found = (last, run.reverse(1))
                except error:
                    raised = True
                    assert _held() == held, "a thread or a descriptor is left"
            assert found == answer(CHAIN, n)
        if not raised:
            return
        yield Outcome(1, 0, 1)


def interrupt_cases(
    make: Callable[[], Any], schedule: str, n: int = N, below: Any = None
) -> Iterator[Outcome]:
    """Run the cases in which Ctrl-C comes during a transfer: the first, ..., the last.

    Wherever it meets the computing thread, what is left is a `close` away.
    """
    plan, held = SCHEDULES[schedule](n), _held()
    armed = False

    def handler(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        for at in range(1000):
            trigger = Trigger(at)

            def strike(inner: Medium, kind: str, *rest: Any, trigger: Trigger = trigger) -> None:
                if trigger():
                    _thread.interrupt_main()
                getattr(inner, kind)(*rest)

            store = make()
            spoil(
                store if below is None else below(store),
                write=lambda inner, *rest, strike=strike: strike(inner, "write", *rest),
                read=lambda inner, *rest, strike=strike: strike(inner, "read", *rest),
            )
            run = Reversal(CHAINS[CHAIN][0](), planner=plan, tiers=store)
            armed, outcome = True, Outcome(1, 1, 0)
            try:
                with run:
                    last = raw(run.forward(CHAINS[CHAIN][1]()))
                    assert (last, run.reverse(1)) == answer(CHAIN, n)
            except KeyboardInterrupt:
                outcome = Outcome(1, 0, 1)
            armed = False
            run.close()
            store.close()
            assert _held() == held, "a thread or a descriptor is left"
            if not trigger.struck:
                return
            yield outcome
    finally:
        signal.signal(signal.SIGINT, before)


def files_of(folder: Path) -> list[Path]:
    """Return the open files of a store in `folder`, which have no name."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this listing, or closed just now
            target = str(link.readlink())
            if str(folder) in target and target.endswith("(deleted)") and link.is_file():
                found.append(link)
    return found


def _rewritten(change: Callable[[bytearray], None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b", buffering=0) as file:
            data = bytearray(file.read())
            change(data)
            file.seek(0)
            file.write(data)

    return damage


def _flip(data: bytearray) -> None:
    for at in range(LAYOUT.nbytes // 2, len(data), 4096):
        data[at] ^= 16


def _noise(data: bytearray) -> None:
    data[:] = np.random.default_rng(0).bytes(len(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "file truncated": lambda path: os.truncate(path, min(4096, path.stat().st_size // 2)),
    "file emptied": lambda path: os.truncate(path, 0),
    "file overwritten": _rewritten(_noise),
    "bit flipped in the file": _rewritten(_flip),
}


def damage_cases(name: str, damage: str, folder: Path) -> Iterator[Outcome]:
    """Run the cases in which files are damaged: at the first call of an operator, ..., the last."""
    n = N_COALESCED if name.endswith("coalesced") else N
    for at in range(0, 1000, 1 if n == N else 3):
        trigger = Trigger(at)

        def tick(trigger: Trigger = trigger) -> None:
            for path in files_of(folder) if trigger() else ():
                with contextlib.suppress(FileNotFoundError):
                    DAMAGE[damage](path)

        plan = SCHEDULES["overlapped"](n)
        outcome = run_case(STORES[name](folder), plan, False, chain=watched_chain(tick))
        if not trigger.struck:
            return
        yield outcome


INTERRUPT = "Ctrl-C during a transfer"
OPERATOR_FAULTS: dict[str, type[BaseException]] = {
    "an operator raises": Boom,
    "Ctrl-C in an operator": KeyboardInterrupt,
}


CASES = [
    (name, fault)
    for name in STORES
    for fault in (*FAULTS, INTERRUPT, *OPERATOR_FAULTS)
    if fault not in OPERATOR_FAULTS or not name.endswith("coalesced")
    if fault in FAULTS or not name.endswith("lower level")
]


def cases_of(name: str, fault: str, folder: Path) -> Iterator[Outcome]:
    """Run all cases of one fault on one store, its files in `folder`."""
    n, schedules = N, list(SCHEDULES)
    if name.endswith("coalesced"):
        n, schedules = N_COALESCED, ["streaming", "overlapped"]

    def make() -> StreamedStore:
        return STORES[name](folder)

    if fault in FAULTS:
        for schedule in schedules:
            yield from at_every_call(make, fault, schedule, n, SPOILT.get(name))
    elif fault == INTERRUPT:
        for schedule in ("streaming", "overlapped"):
            yield from interrupt_cases(make, schedule, n, SPOILT.get(name))
    else:
        for schedule in ("streaming", "overlapped"):
            yield from raising_cases(make, schedule, OPERATOR_FAULTS[fault])


def quick_folder() -> str | None:
    """Return a folder in memory where there is one: faults put in by us need no disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None


def row(fault: str, outcomes: Iterable[Outcome]) -> str:
    """Return a row of the table."""
    total = Outcome()
    for outcome in outcomes:
        total += outcome
    return f"| {fault} | {total.cases} | {total.exact} | {total.errors} |"


def main() -> None:
    """Print the table."""
    out = sys.stdout.write
    out("| fault | cases | exact adjoint | clear error |\n|---|---|---|---|\n")
    with tempfile.TemporaryDirectory(dir=quick_folder()) as folder:
        for fault in (*FAULTS, INTERRUPT, *OPERATOR_FAULTS):
            names = [name for name, other in CASES if other == fault]
            outcomes = (o for name in names for o in cases_of(name, fault, Path(folder)))
            out(row(fault, outcomes) + "\n")
        for damage in DAMAGE:
            names = [name for name in STORES if name.startswith(FILE_ENGINES)]
            outcomes = (o for name in names for o in damage_cases(name, damage, Path(folder)))
            out(row(damage, outcomes) + "\n")


if __name__ == "__main__":
    main()
