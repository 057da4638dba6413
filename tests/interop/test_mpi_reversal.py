"""`MPIReversal` with ranks as threads: agreement, errors, life."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_mpi import MPI, Aborted, Comm, Deadlock, World, run_ranks, succeed
from mpi_wave import Wave, store_all, whole

from multistage.backends import FileStore, MemoryStore
from multistage.errors import ArgumentError, BudgetError, StateError, StoreError
from multistage.interop import mpi, ranks
from multistage.interop.mpi import MPIReversal
from multistage.interop.ranks import slowest
from multistage.measurement import chain, driver, store
from multistage.model.chain import FunctionChain
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.reversing import first_sweep, uniform
from multistage.support import free_memory as limits

pytestmark = pytest.mark.filterwarnings("ignore::multistage.errors.CheckpointWarning")
N = 40
COSTS = Costs(1.0, 2.0, state_bytes=10, tiers=(Tier("memory", 2.5, 2.5),))


@pytest.fixture(autouse=True)
def fake_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    interval, threads = sys.getswitchinterval(), set(threading.enumerate())
    yield
    assert sys.getswitchinterval() == interval
    assert set(threading.enumerate()) <= threads  # some of another test may end now


def waves(comm: Comm, n: int | None = N, **options: Any) -> tuple[Wave, MPIReversal[Any, Any]]:
    options.setdefault("memory", "5 slots")
    options.setdefault("costs", COSTS)
    wave = Wave(comm)
    return wave, MPIReversal(wave.step, wave.adjoint_step, n, comm=comm, **options)


def gradient(run: MPIReversal[Any, Any], wave: Wave) -> Any:
    run.forward(wave.start)
    return run.reverse(wave.seed)


def assert_exact(found: list[Any]) -> None:
    assert whole(found).tobytes() == store_all(N).tobytes()


def errors(size: int, work: Callable[[Comm], Any]) -> list[Any]:
    world = World(size)
    found = run_ranks(size, work, world)
    assert not world.aborted
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tier", [None, "memory:", "file:{}", "memory: + file:{}"])
def test_gradient_is_that_of_one_rank(size: int, tier: str | None, tmp_path: Path) -> None:
    tier = tier and tier.format(tmp_path)

    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm, tiers=tier, checked=True)
        with reversal as run:
            found = [gradient(run, wave) for _ in range(2)]
            assert run.plan is not None
            assert run.report().counts.writes == run.plan.writes
            assert (run.rank, run.size) == (comm.rank, size)
        return found, str(run.plan.parameters)

    found = succeed(run_ranks(size, work))
    assert len({plan for _, plan in found}) == 1
    for sweep in range(2):
        assert_exact([one[sweep] for one, _ in found])
    assert list(tmp_path.iterdir()) == []


def test_several_functionals_on_all_ranks() -> None:
    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm, functionals=2, tiers="memory:")
        with reversal as run:
            plan = run.prepare(wave.start)
            assert run.costs is not None
            seconds = plan.costs.mean().reverse_step_s, run.costs.reverse_step_s
            run.forward(wave.start)
            found: Any = run.reverse([wave.seed, wave.seed])
            return found, seconds

    found = succeed(run_ranks(2, work))
    for k in range(2):
        assert_exact([one[k] for one, _ in found])
    assert [seconds for _, seconds in found] == [(4.0, 2.0)] * 2

    def unlike(comm: Comm) -> Any:
        return waves(comm, functionals=1 + comm.rank, on_error="raise")

    for error in errors(2, unlike):
        assert "functionals" in str(error) and isinstance(error, ArgumentError)


@pytest.mark.long(but=("None-*", "*> memory:-True"))
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("tier", [None, "memory:", "memory:1MiB > memory:"])
def test_ranks_time_the_same_steps_and_plan_alike(
    prepared: bool, tier: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's clock says something else; steps that communicate would not match."""
    own = threading.local()

    def perf_counter() -> float:
        return time.perf_counter() * own.speed

    def work(comm: Comm) -> Any:
        own.speed = 10.0**comm.rank
        wave, reversal = waves(comm, costs=None, tiers=tier)
        with reversal as run:
            if prepared:
                plan = run.prepare(wave.start)
                assert wave.steps > 0
                wave.steps = 0
            run.forward(wave.start)
            assert run.plan is not None
            if prepared:
                assert run.plan == plan
            adjoint = run.reverse(wave.seed)
            assert run.costs is not None
            plan, counts = run.report().plan, run.report().counts
            assert wave.steps == counts.forward_steps  # none was run to be measured alone
        return str((plan.parameters, plan.makespan_s)), counts.forward_steps, adjoint

    for module in (chain, driver, store):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(first_sweep, "perf_counter", perf_counter)
    found = succeed(run_ranks(3, work))
    assert len({one[:2] for one in found}) == 1
    assert_exact([adjoint for *_, adjoint in found])


@pytest.mark.parametrize("prepared", [False, True])
def test_ranks_measure_at_once_what_they_share(
    prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees half of it then; of six that share it, four are others."""
    together = threading.Barrier(2, timeout=60)

    def written(*_: object) -> tuple[float, float, int]:
        together.wait()
        return 0.25, 0.0, 4

    def read(*_: object) -> tuple[float, float]:
        together.wait()
        return 0.5, 0.0

    monkeypatch.setattr(store, "_write", written)
    monkeypatch.setattr(store, "_read", read)

    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm, costs=None, tiers="memory:?share=6")
        with reversal as run:
            if prepared:
                run.prepare(wave.start)
            else:
                run.forward(wave.start)
            assert run.costs is not None
            (tier,) = run.costs.tiers
            if not prepared:
                run.reverse(wave.seed)
        return tier.write_s, tier.read_s

    assert succeed(run_ranks(2, work)) == [(0.75, 1.5)] * 2


def test_a_shared_tier_is_not_planned_for_faster_than_measured(tmp_path: Path) -> None:
    def work(comm: Comm) -> Any:
        seen = []
        for tier in (f"file:{tmp_path}?buffers=0", f"file:{tmp_path}?buffers=0&share=3"):
            wave, reversal = waves(comm, tiers=tier)
            with reversal as run:
                found = gradient(run, wave)
                assert run.costs is not None
                (rates,) = run.costs.tiers
            seen.append(rates.write_s)
        return found, seen

    found = succeed(run_ranks(2, work))
    assert_exact([adjoint for adjoint, _ in found])
    for _, (alone, shared) in found:
        assert alone < 2.5 == shared


def test_a_tier_that_fails_on_one_rank_while_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks raise, and may call again: the first steps are timed anew."""
    own = threading.local()

    def work(comm: Comm) -> Any:
        own.rank = comm.rank
        wave, reversal = waves(comm, costs=None, tiers="memory:")
        with reversal as run:
            with pytest.raises(StoreError, match="rank 1: no more room"):
                run.forward(wave.start)
            return gradient(run, wave)

    failed = threading.Event()

    def probe(each: Any, *given: Any, **options: Any) -> Tier:
        if own.rank == 1 and not failed.is_set():
            failed.set()
            raise StoreError("no more room")
        return store.probe_store(each, *given, **options)

    monkeypatch.setattr(chain, "probe_store", probe)
    found = succeed(run_ranks(3, work))
    assert_exact(found)


def test_tapes_are_weighed_in_step() -> None:
    def work(comm: Comm) -> Any:
        wave = Wave(comm)

        def tape_step(state: Any, i: int) -> Any:
            return wave.step(state, i), state

        with MPIReversal(
            wave.step, wave.adjoint_step, N, tape_step=tape_step, comm=comm, memory="9 slots"
        ) as run:
            run.forward(wave.start)
            adjoint = run.reverse(wave.seed)
            assert run.costs is not None and run.costs.tape_step_s is not None
            assert run.costs.tape_bytes > 0
        return adjoint

    found = succeed(run_ranks(3, work))
    assert_exact(found)


@pytest.mark.parametrize("given", [None, Costs(3600.0, 7200.0)], ids=["drifted", "given"])
def test_costs_are_corrected_alike_on_every_rank(
    given: Costs | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm, costs=given, memory="3 slots")
        with reversal as run:
            found = []
            for _ in range(2):
                found.append(gradient(run, wave))
                assert run.plan is not None and run.costs is not None
                found.append((run.plan.costs.forward_step_s, run.costs.forward_step_s))
        return found

    if given is None:  # the first sweep's costs are no one's
        monkeypatch.setattr(first_sweep, "_typical", lambda samples: 1e-9)
        monkeypatch.setattr(uniform, "drifted", lambda old, new: old.forward_step_s == 1e-9)
    found = succeed(run_ranks(3, work))
    (first, learned), (second, _) = found[0][1], found[0][3]
    assert first == (3600 if given else 1e-9)
    assert second < 1 if given else second == learned > 1e-9
    assert all(one[1][0] == first and one[3][0] == second for one in found)
    assert_exact([one[2] for one in found])


@pytest.mark.parametrize("drifts", [False, True])
@pytest.mark.parametrize("tier", [None, "file:{}"])
def test_a_second_shot_finds_everything_as_it_is(
    tier: str | None, drifts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs that drift are planned for anew, on all ranks, and the tiers stay open."""
    tier = tier and tier.format(tmp_path)
    found: Counter[str] = Counter()
    for owner, name in (
        (uniform, "FirstSteps"),
        (chain, "probe_store"),
        (mpi, "measure"),
        (uniform, "plan"),
        (FileStore, "open"),
        (mpi, "Sweeps"),
    ):
        plain = getattr(owner, name)

        def call(*given: Any, name: str = name, plain: Any = plain, **options: Any) -> Any:
            found[name] += 1
            return plain(*given, **options)

        monkeypatch.setattr(owner, name, call)
    monkeypatch.setattr(uniform, "drifted", lambda old, new: drifts)

    def work(comm: Comm) -> Any:
        gradients, counts = [], []
        wave, reversal = waves(comm, costs=None, tiers=tier)
        with reversal as run:
            for _ in range(3):
                comm.allgather(None)
                before = found.copy()
                comm.allgather(None)
                wave = Wave(comm)
                run.use(wave.step, wave.adjoint_step)
                gradients.append(gradient(run, wave))
                assert wave.steps == run.report().counts.forward_steps
                comm.allgather(None)
                counts.append(found - before)
        return gradients, counts

    ranks = succeed(run_ranks(2, work))
    for _, (first, *others) in ranks:
        assert first["FirstSteps"] == first["Sweeps"] == 2
        assert others == 2 * [{"plan": 2} if drifts else {}]
    for shot in range(3):
        assert_exact([gradients[shot] for gradients, _ in ranks])


def test_the_operators_of_each_shot_are_run() -> None:
    def shot(scale: int) -> Any:
        return FunctionChain(lambda x, i: scale * x, lambda x, a, i: scale * a)

    def work(comm: Comm) -> Any:
        found = []
        with MPIReversal(shot(1), n_steps=5, comm=comm, memory="3 slots") as run:
            for scale in (2, 3, 5):
                run.use(shot(scale))
                run.forward(np.ones(1))
                found.append(run.reverse(np.ones(1))[0])
        return found

    assert succeed(run_ranks(2, work)) == 2 * [[32, 243, 3125]]


def test_operators_of_another_kind_on_one_rank_are_refused_on_all() -> None:
    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm)
        with reversal as run:
            run.forward(wave.start)
            tape = (lambda x, i: (wave.step(x, i), x)) if comm.rank else None
            with pytest.raises(ArgumentError, match=r"rank 1: .*state_is_tape=False"):
                run.use(wave.step, wave.adjoint_step, tape_step=tape)
            return run.reverse(wave.seed)  # nothing has changed

    assert_exact(errors(2, work))


def test_online() -> None:
    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm, None, tiers="memory:")
        with reversal as run:
            run.forward(wave.start, until=lambda state, i: i == N)
            return run.reverse(wave.seed)

    assert_exact(succeed(run_ranks(3, work)))


def test_all_ranks_plan_again_if_states_change_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Comm) -> Any:
        def grown(size: int) -> Any:
            return np.full(size, comm.rank + 1.0)

        def step(x: Any, i: int) -> Any:
            return x + 0.1 * sum(comm.allgather(float(x[0])))

        with MPIReversal(step, lambda x, a, i: a, 9, comm=comm, memory="1 KiB") as run:
            plans = []
            for size in (10, 10 + comm.rank):
                run.forward(grown(size))
                run.reverse(grown(size))
                assert run.plan is not None
                plans.append(run.plan.slots)
        return plans

    monkeypatch.setattr(uniform, "drifted", lambda old, new: False)
    # 80 and 88 bytes take 128 with padding on every rank but the first.
    assert succeed(run_ranks(2, work)) == [[8, 8], [8, 8]]


def test_the_tightest_budget_holds() -> None:
    def work(comm: Comm) -> Any:
        wave, reversal = waves(comm, memory=f"{9 - comm.rank} slots")
        with reversal as run:
            return run.prepare(wave.start).slots

    assert succeed(run_ranks(3, work)) == [7, 7, 7]


def test_memory_is_shared_by_the_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: 4 * 3 * 4096)

    def work(comm: Comm) -> Any:
        with MPIReversal(lambda x, i: x, lambda x, a, i: a, 9, comm=comm, costs=COSTS) as run:
            return run.prepare(np.zeros(64)).slots

    assert succeed(run_ranks(3, work)) == [8, 8, 8]


# ----------------------------------------------------------------------- errors


class NoDisk(MemoryStore):
    def open(self, layout: Any) -> None:
        raise StoreError("no disk")


UNEQUAL = StageCosts(tuple(Stage(f"{i}", 1.0, 2.0, 80, 80) for i in range(N)), 80)
SHORT = StageCosts(UNEQUAL.stages[1:], 80)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        (lambda rank: {"n": 40 + rank}, ArgumentError, "n_steps: 40 on rank 0, 41 on rank 1"),
        (lambda k: {"planner": "auto" if k else "revolve"}, ArgumentError, "planner: 'revolve' on"),
        (lambda rank: {"tiers": "memory:" if rank else None}, ArgumentError, "having a tier"),
        (lambda rank: {"costs": COSTS if rank else None}, ArgumentError, "the kind of costs"),
        ({"n": 0}, ArgumentError, "rank 1: n_steps=0"),
        ({"planner": "best"}, ArgumentError, "rank 1: planner 'best' is not known"),
        ({"memory": "0 slots"}, BudgetError, "rank 1: 0 slots"),
        ({"tiers": "file:/nowhere/at/all"}, StoreError, "rank 1: folder '/nowhere/at/all'"),
        ({"on_error": "ignore"}, ArgumentError, "rank 1: on_error='ignore'"),
        (lambda rank: {"costs": UNEQUAL if rank else COSTS}, ArgumentError, "the kind of costs"),
        (
            lambda rank: {"costs": UNEQUAL if rank else SHORT, "n": None},
            ArgumentError,
            "n_steps: 39 on rank 0, 40 on rank 1",
        ),
        ({"costs": SHORT}, ArgumentError, "rank 1: costs have 39 stages"),
    ],
)
def test_arguments_refused_on_all_ranks(options: Any, kind: type[Exception], said: str) -> None:
    def of(rank: int) -> dict[str, Any]:
        if callable(options):
            return options(rank)
        return options if rank == 1 else {"tiers": "memory:"}  # type: ignore[no-any-return]

    for error in errors(3, lambda comm: waves(comm, **of(comm.rank))):
        assert type(error) is kind
        assert said in str(error)
        assert callable(options) or str(error).startswith(said)


@pytest.mark.parametrize(
    ("options", "state", "kind", "said"),
    [
        (
            lambda rank: {},
            lambda rank, start: start[rank:],
            ArgumentError,
            "the number of arrays in a state: 2 on rank 0, 1 on rank 1",
        ),
        (
            lambda rank: {"tiers": NoDisk() if rank else MemoryStore()},
            lambda rank, start: start,
            StoreError,
            "rank 1: no disk",
        ),
        (
            lambda rank: {"memory": 1000 if rank else 10},
            lambda rank, start: start,
            BudgetError,
            "rank 0: budget of 10 bytes",
        ),
        (lambda rank: {}, lambda rank, start: start if rank else "text", StateError, "rank 0: "),
    ],
)
def test_states_refused_on_all_ranks(
    options: Any, state: Any, kind: type[Exception], said: str
) -> None:
    def work(comm: Comm) -> None:
        wave, reversal = waves(comm, **options(comm.rank))
        with reversal as run:
            run.forward(state(comm.rank, wave.start))

    for error in errors(2, work):
        assert type(error) is kind
        assert said in str(error)


def test_reverse_needs_forward_and_serves_once() -> None:
    def work(comm: Comm) -> None:
        wave, reversal = waves(comm)
        with reversal as run:
            with pytest.raises(ArgumentError, match="needs a complete sweep"):
                run.report()
            with pytest.raises(ArgumentError, match="either n_steps"):
                run.forward(wave.start, until=lambda state, i: True)
            run.forward(wave.start)
            run.reverse(wave.seed)
            run.reverse(wave.seed)

    for error in errors(2, work):
        assert type(error) is ArgumentError
        assert "needs a forward()" in str(error)


@pytest.mark.parametrize("first", ["forward", "reverse", "close", "prepare"])
@pytest.mark.parametrize("other", ["forward", "reverse", "close", "prepare"])
def test_different_calls_are_an_error_on_all(first: str, other: str) -> None:
    if first == other:
        return

    def work(comm: Comm) -> None:
        wave, run = waves(comm, tiers="memory:")
        arguments = {"forward": (wave.start,), "prepare": (wave.start,), "reverse": (wave.seed,)}
        run.forward(wave.start)
        name = first if comm.rank == 0 else other
        try:
            getattr(run, name)(*arguments.get(name, ()))
        finally:
            for again in ("forward", "reverse", "prepare"):
                with pytest.raises(ArgumentError, match=r"make another|closed"):
                    getattr(run, again)(*arguments[again])
            run.close()  # local now

    for error in errors(2, work):
        assert type(error) is ArgumentError
        assert str(error).startswith(f"rank 0 calls {first}() and rank 1 {other}()")


def test_a_reduction_in_flight_is_not_dropped() -> None:
    """MPI would write into memory that was given back."""

    def work(comm: Comm) -> Any:
        with MPIReversal(
            lambda x, i: x + 0.1,
            lambda x, a, i: 2 * a,
            200,
            comm=comm,
            memory="5 slots",
            tiers="memory:",
            costs=COSTS,
        ) as run:
            run.forward(np.zeros(10))
            assert run._store is not None
            assert run._store._pending is not None
            run.forward(np.zeros(20))  # another layout: the stores are closed
            return run.reverse(np.ones(20))[0]

    for size in (1, 3):
        world = World(size)
        assert succeed(run_ranks(size, work, world)) == [2.0**200] * size
        gc.collect()
        assert world.dropped == []


def test_a_rank_that_left_by_an_exception_needs_another_reversal() -> None:
    def fails_at_ten(state: Any, i: int) -> bool:
        return i == 10 and 1 // 0 == 1

    def work(comm: Comm) -> Any:
        wave, run = waves(comm, None, tiers="memory:", on_error="raise")
        with pytest.raises(ZeroDivisionError):
            run.forward(wave.start, fails_at_ten)
        for call in (run.forward, run.prepare, run.reverse):
            with pytest.raises(ArgumentError, match="make another MPIReversal"):
                call(wave.start)
        run.close()
        _, another = waves(comm, tiers="memory:")
        with another:
            return gradient(another, wave)

    assert_exact(succeed(run_ranks(2, work)))


def test_plans_that_differ_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Comm) -> None:
        wave, reversal = waves(comm)
        with reversal as run:
            run.forward(wave.start)

    monkeypatch.setattr(ranks, "slowest", lambda costs, rank: Costs(1.0 + rank, 1.0))
    for error in errors(2, work):
        assert type(error) is ArgumentError
        assert "ranks disagree on the plan" in str(error)


# ------------------------------------------------------- exceptions on one rank


def failing(comm: Comm, where: str, **options: Any) -> None:
    wave = Wave(comm)

    def fail(name: str, i: int) -> None:
        if where == name and comm.rank == 1 and i == 20:
            raise ZeroDivisionError(f"in {name}")

    def step(state: Any, i: int) -> Any:
        fail("step", i)
        return wave.step(state, i)

    def adjoint_step(state: Any, adjoint: Any, i: int) -> Any:
        fail("adjoint_step", i)
        return wave.adjoint_step(state, adjoint, i)

    with MPIReversal(
        step, adjoint_step, N, comm=comm, memory="5 slots", costs=COSTS, tiers="memory:", **options
    ) as run:
        run.forward(wave.start)
        fail("between", 20)
        run.reverse(wave.seed)


@pytest.mark.parametrize("where", ["step", "adjoint_step", "between"])
def test_an_exception_on_one_rank_ends_all(where: str, capsys: Any) -> None:
    world = World(3)
    found = run_ranks(3, lambda comm: failing(comm, where), world)
    assert world.aborted
    assert type(found[1]) is ZeroDivisionError
    assert type(found[0]) is type(found[2]) is Aborted
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert f"multistage: rank 1 of 3 raised ZeroDivisionError: in {where}; all" in said


@pytest.mark.parametrize("where", ["step", "adjoint_step"])
def test_an_exception_is_left_to_the_program_on_demand(where: str, capsys: Any) -> None:
    world = World(3)
    found = run_ranks(3, lambda comm: failing(comm, where, on_error="raise"), world)
    assert not world.aborted
    assert type(found[1]) is ZeroDivisionError
    # Alone in a halo exchange, as under MPI: the one that failed sent no message when it left.
    assert type(found[0]) is type(found[2]) is Deadlock
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closes", [True, False], ids=["", "its tier cannot be closed"])
def test_an_exception_ends_all_where_no_block_is_left(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    stop = MPIReversal._stop

    def broken(run: Any, *, keep: bool = False) -> None:
        stop(run, keep=keep)
        if not closes:
            raise StoreError("the tier cannot be closed")

    def work(comm: Comm) -> None:
        wave = Wave(comm)

        def step(state: Any, i: int) -> Any:
            if comm.rank == 1 and i == 20:
                raise ZeroDivisionError("in step")
            return wave.step(state, i)

        run: Any = MPIReversal(step, wave.adjoint_step, N, comm=comm, memory="5 slots", costs=COSTS)
        run.forward(wave.start)

    monkeypatch.setattr(MPIReversal, "_stop", broken)
    world = World(2)
    found = run_ranks(2, work, world)
    assert world.aborted
    assert isinstance(found[1], ZeroDivisionError if closes else StoreError)


def test_a_failure_while_arguments_are_checked_ends_all(capsys: Any) -> None:
    class Odd(str):
        __hash__ = str.__hash__

        def __ne__(self, other: object) -> bool:
            raise RuntimeError("no error of ours")

    def work(comm: Comm) -> None:
        waves(comm, planner=Odd("auto") if comm.rank == 0 else "auto")

    world = World(2)
    run_ranks(2, work, world)
    assert world.aborted
    assert "rank 0 of 2 raised RuntimeError" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_the_block_by_exit(code: int) -> None:
    def work(comm: Comm) -> None:
        with waves(comm)[1]:
            sys.exit(code)

    world = World(2)
    run_ranks(2, work, world)
    assert world.aborted == (code != 0)


def test_closing_twice_does_not_abort_other_ranks() -> None:
    def work(comm: Comm) -> None:
        wave, reversal = waves(comm, tiers="memory:")
        with reversal as run:
            run.forward(wave.start)
            run.close()
            run.close()
            with pytest.raises(ArgumentError, match="closed"):
                run.forward(wave.start)
            with pytest.raises(ArgumentError, match=r"closed|left the order"):
                run.reverse(wave.seed)
            raise KeyError(comm.rank)

    assert [type(error) for error in errors(2, work)] == [KeyError, KeyError]


# ------------------------------------------------------------------------ costs


def test_slowest_takes_each_figure_from_the_rank_it_is_worst_on() -> None:
    tiers = (
        Tier("file", 1.0, 9.0, 0.1, 0.4, capacity_states=None, queue_depth=2),
        Tier("memory", 2.0, 8.0, 0.2, 0.3, capacity_states=7, queue_depth=3),
    )
    costs = [
        Costs(1.0, 5.0, 2.0, state_bytes=10, tiers=tiers[:1], action_s=1e-6),
        Costs(3.0, 4.0, 1.0, state_bytes=30, tiers=tiers[1:], action_s=2e-6),
    ]
    found = [slowest(costs, rank) for rank in range(2)]
    for rank, one in enumerate(found):
        tier = Tier(tiers[rank].name, 2.0, 9.0, 0.2, 0.4, capacity_states=7, queue_depth=3)
        bytes_ = 10 if rank == 0 else 30
        assert one == Costs(3.0, 5.0, 2.0, state_bytes=bytes_, tiers=(tier,), action_s=2e-6)
