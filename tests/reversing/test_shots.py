"""A shot after a shot by one `Reversal`: what is carried over, and what must not be."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import digest, kept
from faults import files_of
from leaks import native_threads
from leaks import no_leak as no_leak

from multistage import FunctionChain, InPlaceChain, Reversal, Stage, StageCosts
from multistage.backends import FileStore
from multistage.errors import ArgumentError, BudgetError, StateError, StoreError
from multistage.execute.executor import Executor
from multistage.interop.dask import ShotWorker
from multistage.measurement import chain as measured
from multistage.reversing import streamed, uniform

N = 40


class Shot:
    """Steps that differ from shot to shot, of any kind; counts those it runs."""

    def __init__(self, kind: str, scale: float, size: int = 30) -> None:
        self.kind, self.scale, self.steps = kind, scale, 0
        self.start = np.linspace(0, scale, size)

    def step(self, x: Any, i: int) -> Any:
        self.steps += 1
        return np.sin(self.scale * x + i)

    def forward(self, x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            x[...] = self.step(x, i)

    def tape(self, x: Any, i: int) -> Any:
        before = x[:5] * self.scale
        self.forward(x, i, i + 1)
        return before

    def reverse(self, tape: Any, adjoint: int, i: int) -> int:
        return digest((tape, np.float64(self.scale)), adjoint, i)

    def chain(self) -> Any:
        match self.kind:
            case "functional":
                return FunctionChain(self.step, self.reverse)
            case "tape":
                return FunctionChain(
                    self.step, self.reverse, lambda x, i: (self.step(x, i), x[:5] * self.scale)
                )
            case "in place":
                return InPlaceChain(self.forward, self.reverse)
        return InPlaceChain(self.forward, self.reverse, self.tape)

    def answer(self, n: int = N) -> Any:
        return Shot(self.kind, self.scale, len(self.start)).by(n)

    def by(self, n: int) -> Any:
        return kept(self.chain(), self.start, 1, n)[1]

    def run(self, run: Reversal[Any, Any]) -> Any:
        run.forward(self.start.copy())
        return run.reverse(1)


KINDS = ["functional", "tape", "in place", "in place, tape"]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what a first shot needs: measurements, plans, executors, opened stores, threads."""
    found: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            found[what] += 1
            return plain(*given, **options)

        monkeypatch.setattr(owner, name, call)

    counted(uniform, "measure", "measured")
    counted(measured, "measure", "measured")
    counted(uniform, "FirstSteps", "measured")
    counted(measured, "probe_store", "measured")
    counted(streamed, "probe_store", "measured")
    counted(uniform, "plan", "planned")
    counted(Executor, "__init__", "executors")
    counted(FileStore, "open", "opened")
    counted(threading.Thread, "start", "threads")
    yield found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checked", [False, True])
def test_a_second_shot_finds_everything_as_it_is(
    kind: str, checked: bool, tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniform, "drifted", lambda old, new: False)  # or it would plan again
    shots = [Shot(kind, scale) for scale in (1.0, 1.5, 0.7)]
    options: Any = {"memory": "5 slots", "tiers": tmp_path, "checked": checked}
    with Reversal(shots[0].chain(), n_steps=N, **options) as run:
        before: Any = None
        for shot in shots:
            counts.clear()
            run.use(shot.chain())
            assert shot.run(run) == shot.answer()
            now = [str(link.readlink()) for link in files_of(tmp_path)], native_threads()
            if before is None:
                assert counts["measured"] and counts["planned"] and counts["opened"]
            else:
                assert not counts and now == before
                # A tape that is made for the adjoint of its step counts as of that.
                assert shot.steps - ("tape" in kind) == run.report().counts.forward_steps
            before = now
        assert before[0]


def test_costs_that_drift_make_a_plan_and_nothing_else(
    tmp_path: Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniform, "drifted", lambda old, new: True)
    with Reversal(
        Shot("in place", 1.0).chain(), n_steps=N, memory="5 slots", tiers=tmp_path
    ) as run:
        for scale in (1.0, 2.0):
            shot = Shot("in place", scale)
            counts.clear()
            run.use(shot.chain())
            assert shot.run(run) == shot.answer()
    assert counts == {"planned": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_another_shape_are_planned_for_anew(kind: str, tmp_path: Path) -> None:
    with Reversal(Shot(kind, 1.0).chain(), n_steps=N, memory="5 slots", tiers=tmp_path) as run:
        for size in (32, 72, 32, 24):
            shot = Shot(kind, 1.0 + size, size)
            run.use(shot.chain())
            assert shot.run(run) == shot.answer()
            assert run.costs is not None and run.costs.state_bytes == 8 * size  # type: ignore[union-attr]


def test_steps_that_differ_are_those_of_each_shot() -> None:
    """Sizes by step are carried over where they fit, and surveyed again where they do not."""

    def shot(widths: list[int]) -> Any:
        def step(x: Any, i: int) -> Any:
            return np.resize(np.sin(x), widths[i])

        return FunctionChain(step, digest)

    narrow, wide = [3, 9, 4, 7], [30, 90, 40, 70]
    with Reversal(shot(narrow), n_steps=4, memory="1 KiB") as run:
        for widths in (narrow, narrow, wide, narrow):
            run.use(shot(widths))
            start = np.linspace(0, 1, 5)
            run.forward(start.copy())
            assert run.reverse(1) == kept(shot(widths), start, 1, 4)[1]


def test_a_shot_that_fails_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    class Broken(Shot):
        def reverse(self, tape: Any, adjoint: int, i: int) -> int:
            if i == N // 2:
                raise FloatingPointError("blew up")
            return super().reverse(tape, adjoint, i)

    good = Shot("in place", 1.5)
    with Reversal(good.chain(), n_steps=N, memory="5 slots", tiers=tmp_path) as run:
        assert good.run(run) == good.answer()
        broken = Broken("in place", 9.0)
        run.use(broken.chain())
        with pytest.raises(FloatingPointError):
            broken.run(run)
        assert not files_of(tmp_path)
        other = Shot("in place", 2.5)
        run.use(other.chain())
        assert other.run(run) == other.answer()


def test_a_sweep_in_progress_is_forgotten(tmp_path: Path) -> None:
    one, other = Shot("functional", 1.0), Shot("functional", 2.0)
    with Reversal(one.chain(), n_steps=N, memory="5 slots", tiers=tmp_path) as run:
        run.forward(one.start)
        run.use(other.chain())
        with pytest.raises(ArgumentError, match=r"use\(\) has ended the sweep: call forward\(\)"):
            run.reverse(1)
        assert other.run(run) == other.answer()
        one.start[:] = 0  # no state of it is held read-only


def test_operators_of_another_kind_are_refused(tmp_path: Path) -> None:
    one, taped = Shot("functional", 1.0), Shot("tape", 1.0)
    with Reversal(one.chain(), n_steps=N, memory="5 slots") as run:
        run.forward(one.start)
        with pytest.raises(ArgumentError, match=r"state_is_tape=True, .*state_is_tape=False"):
            run.use(taped.chain())
        with pytest.raises(ArgumentError, match="needs an adjoint_step"):
            run.use(one.step)
        assert run.reverse(1) == one.answer()  # nothing has changed
        run.use(one.step, one.reverse)
        assert one.run(run) == one.answer()
    with (
        Reversal(one.chain(), n_steps=N, memory="5 slots", durable=tmp_path / "run") as durable,
        pytest.raises(ArgumentError, match="durable_label="),
    ):
        durable.use(one.chain())


def test_given_costs_of_unequal_steps_hold_for_every_shot() -> None:
    stages = StageCosts(tuple(Stage(f"{i}", 1.0, 2.0, 240, 240) for i in range(N)), 240)
    larger = Shot("functional", 1.0, 31)
    with Reversal(Shot("functional", 1.0).chain(), costs=stages, memory="1 KiB") as run:
        for scale in (1.0, 2.0):
            shot = Shot("functional", scale)
            run.use(shot.chain())
            assert shot.run(run) == shot.answer()
        run.use(larger.chain())
        with pytest.raises(BudgetError, match="state 0 takes 248 bytes"):
            larger.run(run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_in_a_forked_child_the_run_is_the_parents(tmp_path: Path) -> None:
    shot, other = Shot("in place", 1.0), Shot("in place", 2.0)
    with Reversal(shot.chain(), n_steps=N, memory="5 slots", tiers=tmp_path) as run:
        assert shot.run(run) == shot.answer()
        child = os.fork()
        if not child:
            status = 1
            try:
                run.use(other.chain())
            except StoreError:
                run.close()
                with Reversal(other.chain(), n_steps=N, memory="5 slots", tiers=tmp_path) as own:
                    status = 0 if other.run(own) == other.answer() else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run.use(other.chain())
        assert other.run(run) == other.answer()


# ------------------------------------------------------------------ on a worker


def lent(worker: ShotWorker, shot: Shot, n: int | None = N) -> object:
    """Run a shot as `map_shots` does; return the sweeps that it was lent."""
    with worker.reversal(shot.chain(), n_steps=n) as run:
        sweeps = run._sweeps
        if n is None:
            run.forward(shot.start.copy(), until=lambda state, i: i == N)
            found = run.reverse(1)
        else:
            found = shot.run(run)
    assert found == shot.answer(n or N)
    return sweeps


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ShotWorker]:
    made = ShotWorker("5 slots", f"file:{tmp_path}")
    yield made
    made.close()
    assert not files_of(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_lends_the_same_reversal(
    kind: str, worker: ShotWorker, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uniform, "drifted", lambda old, new: False)
    first = lent(worker, Shot(kind, 1.0))
    counts.clear()
    assert lent(worker, Shot(kind, 2.0)) is first
    assert lent(worker, Shot(kind, 3.0)) is first
    assert not counts


@pytest.mark.parametrize("n", [N, None])
def test_nothing_of_a_shot_stays(n: int | None, worker: ShotWorker) -> None:
    for kind in KINDS:
        shot = Shot(kind, 1.0)
        lent(worker, shot, n)
        gone = weakref.ref(shot)
        del shot
        gc.collect()
        assert gone() is None


def test_a_reversal_that_was_lent_is_of_no_use_after_its_block(worker: ShotWorker) -> None:
    """Else it would replace the sweep of the shot that has its place, which noticed nothing."""
    first, second = Shot("functional", 1.0), Shot("functional", 2.0)
    with worker.reversal(first.chain(), n_steps=N) as run:
        assert first.run(run) == first.answer()
    with worker.reversal(second.chain(), n_steps=N) as other:
        other.forward(second.start)
        for work in (run.close, run.report, lambda: run.forward(first.start)):
            with pytest.raises(ArgumentError, match="for its with block alone"):
                work()
        assert other.reverse(1) == second.answer()


def test_shots_of_other_kinds_keep_their_costs(
    worker: ShotWorker, counts: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(uniform, "drifted", lambda old, new: False)
    runs = {(kind, n): lent(worker, Shot(kind, 1.0), n) for kind in KINDS for n in (N, N + 1)}
    assert len(set(map(id, runs.values()))) == len(runs)
    assert len(files_of(tmp_path)) == 1  # one budget's worth of buffers
    counts.clear()
    for (kind, n), run in runs.items():
        assert lent(worker, Shot(kind, 2.0), n) is run
    assert set(counts) == {"opened"}


def test_shots_at_once_have_a_reversal_each(worker: ShotWorker) -> None:
    at_work, runs = threading.Barrier(2), list[int]()

    class Meeting(Shot):
        def reverse(self, tape: Any, adjoint: int, i: int) -> int:
            if i == N // 2:
                at_work.wait(60)
            return super().reverse(tape, adjoint, i)

    def both() -> None:
        threads = [
            threading.Thread(target=lambda scale=scale: runs.append(id(work(scale))))
            for scale in (1.0, 2.0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def work(scale: float) -> object:
        shot = Meeting("functional", scale)
        with worker.reversal(shot.chain(), n_steps=N) as run:
            sweeps = run._sweeps
            found = shot.run(run)
        assert found == shot.answer()
        return sweeps

    both()
    assert len(set(runs)) == 2
    both()
    assert len(runs) == 4 and set(runs[2:]) == set(runs[:2])


def test_a_shot_that_raises_is_lent_no_more(worker: ShotWorker, tmp_path: Path) -> None:
    shot = Shot("functional", 1.0)
    first = lent(worker, shot)
    with (
        pytest.raises(StateError, match="no good"),
        worker.reversal(shot.chain(), n_steps=N) as run,
    ):
        assert run._sweeps is first
        run.forward(shot.start)
        raise StateError("no good")
    assert not files_of(tmp_path)
    assert lent(worker, Shot("functional", 2.0)) is not first


def test_what_is_given_back_after_the_end_is_closed(worker: ShotWorker, tmp_path: Path) -> None:
    shot = Shot("functional", 1.0)
    with worker.reversal(shot.chain(), n_steps=N) as run:
        worker.close()
        assert shot.run(run) == shot.answer()
        assert files_of(tmp_path)
    assert not files_of(tmp_path)
