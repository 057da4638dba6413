"""Durable runs of several ranks: where they continue together, and what they refuse together."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_mpi import MPI, Comm, World, run_ranks, succeed
from mpi_wave import Wave, store_all, whole

from multistage import Reversal
from multistage.cli import main
from multistage.durable.agreement import Found, Pace, agree
from multistage.durable.status import inspect
from multistage.errors import ArgumentError, CheckpointWarning, StoreError
from multistage.interop.mpi import MPIReversal
from multistage.measurement import chain, store
from multistage.model.costs import Costs
from multistage.model.tier import Tier

N = 40
COSTS = Costs(1.0, 2.0, state_bytes=10, tiers=(Tier("durable", 1.0, 1.0),))


class BrokenOff(Exception):
    """What ends all ranks, in these tests."""


@pytest.fixture(autouse=True)
def fake_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads  # some of another test may end now


def ranks(
    size: int,
    folder: Path,
    *,
    forward: int = -1,
    back: int = -1,
    until: bool = False,
    each: Callable[[int], dict[str, Any]] = lambda rank: {},
    seed: float = 1.0,
    flush: bool = False,
    **options: Any,
) -> list[Any]:
    """Run a sweep on all ranks, or begin one that all break off; return what each gave."""

    def work(comm: Comm) -> Any:
        wave = Wave(comm)

        def step(state: Any, i: int) -> Any:
            if i == forward:
                raise BrokenOff
            return wave.step(state, i)

        def adjoint_step(state: Any, adjoint: Any, i: int) -> Any:
            if flush:  # every adjoint is on the disk before the next step
                assert run._durable is not None
                run._durable.store.flush()
            if i == back:
                raise BrokenOff
            return wave.adjoint_step(state, adjoint, i)

        settings: dict[str, Any] = {"costs": COSTS, "memory": "4 slots", "checked": True}
        settings |= {"durable": folder, "durable_every_s": 0, "on_error": "raise"}
        settings |= options | each(comm.rank)
        n = None if until else settings.pop("n", N)
        with MPIReversal(step, adjoint_step, n, comm=comm, **settings) as run:
            run.forward(wave.start, (lambda _, i: i == N) if until else None)
            found = run.reverse(tuple(seed * part for part in wave.seed))
        return found, wave.steps

    world = World(size)
    found = run_ranks(size, work, world)
    assert not world.aborted
    return found


def broken_off(size: int, folder: Path, **options: Any) -> None:
    found = ranks(size, folder, **options)
    if any(not isinstance(one, BrokenOff) for one in found):
        succeed([one for one in found if not isinstance(one, BrokenOff)])
        raise AssertionError("not broken off")


def exact(size: int, folder: Path, **options: Any) -> list[int]:
    """Run or resume to the end; return the steps each rank took."""
    found = succeed(ranks(size, folder, **options))
    assert whole([adjoint for adjoint, _ in found]).tobytes() == store_all(N).tobytes()
    assert not folder.exists()
    return [steps for _, steps in found]


def rank(folder: Path, number: int) -> Path:
    return folder / f"rank-{number:04d}"


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_broken_off_and_exact(size: int, until: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for broken in ({"forward": 20}, {"back": 30}, {"back": 11}, {"back": 0}):
        broken_off(size, folder, until=until, **broken)
        assert sorted(path.name for path in folder.iterdir()) == [
            f"rank-{k:04d}" for k in range(size)
        ]
    steps = exact(size, folder, until=until)
    assert max(steps) < N


def test_costs_of_the_first_sweep_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run measures nothing: it has the plan of the run that was broken off."""
    folder, probed = tmp_path / "run", list[float]()

    def probe(*given: Any, **options: Any) -> Tier:
        tier = store.probe_store(*given, **options)
        probed.append(tier.write_s)
        return tier

    monkeypatch.setattr(chain, "probe_store", probe)
    broken_off(2, folder, back=20, costs=None)
    assert len(probed) == 2
    probed.clear()
    assert max(exact(2, folder, costs=None)) < N
    assert not probed


BEHIND: dict[str, Callable[[Path], object]] = {
    "states": lambda path: [
        each.unlink() for each in sorted(path.glob("states-*"), key=lambda p: p.stat().st_mtime)[1:]
    ],
    "last": lambda path: (path / "last").unlink(),
    "newest adjoint": lambda path: min(
        path.glob("adjoint-*"), key=lambda each: int(each.name[8:])
    ).unlink(),
    "all adjoints": lambda path: [each.unlink() for each in path.glob("adjoint-*")],
    "all but the header": lambda path: [
        each.unlink() for each in path.iterdir() if each.name not in ("run", "lock")
    ],
    "a damaged state": lambda path: [
        each.write_bytes(each.read_bytes()[:-30] + 30 * b"?") for each in path.glob("states-*")
    ],
}


FORWARD = ("states", "all but the header", "a damaged state")


@pytest.mark.long(but=("*-broken[0-2]", "*-broken6", "*-broken10"))
@pytest.mark.parametrize(
    ("what", "broken"),
    [(what, {"forward": 25}) for what in FORWARD]
    + [(what, {"back": back}) for what in BEHIND for back in (20, 0)],
)
def test_a_rank_that_is_behind_takes_the_others_back(
    what: str, broken: dict[str, int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    broken_off(3, folder, **broken)
    BEHIND[what](rank(folder, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        exact(3, folder)


def test_adjoints_beyond_the_one_agreed_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off(2, folder, back=20, flush=True)
    BEHIND["newest adjoint"](rank(folder, 1))
    reached = [inspect(rank(folder, k)).adjoint_step for k in range(2)]
    assert reached[0] is not None and reached[1] is not None and reached[0] < reached[1]
    broken_off(2, folder, back=reached[1] - 1)  # before another one is written
    found = {k: {path.name for path in rank(folder, k).glob("adjoint-*")} for k in range(2)}
    assert found[0] <= found[1] and f"adjoint-{reached[1]}" in found[0]
    exact(2, folder)


def test_a_run_that_had_begun_on_some_ranks_only_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off(3, folder, forward=0)
    for path in (rank(folder, 1) / "run", *folder.glob("rank-*/states-*")):
        path.unlink()
    exact(3, folder)


def test_a_removal_that_was_killed_is_no_refusal(tmp_path: Path) -> None:
    """Every rank gives up its progress before any gives up its folder."""
    folder = tmp_path / "run"
    broken_off(2, folder, back=0)
    for path in rank(folder, 0).iterdir():
        if path.name != "run":
            path.unlink()
    exact(2, folder)
    broken_off(2, folder, back=0)
    shutil.rmtree(rank(folder, 0))
    for path in rank(folder, 1).iterdir():
        if path.name != "run":
            path.unlink()
    exact(2, folder)


def everywhere(found: list[Any], kind: type[Exception], reason: str) -> None:
    """Assert that every rank raised the same."""
    for one in found:
        assert isinstance(one, kind), one
        assert reason in str(one)


def seen(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "fewer ranks": (lambda folder: None, {"size": 2}, "it is rank 0 of 3, this run's rank 0 of 2"),
    "more ranks": (lambda folder: None, {"size": 4}, "it is rank 0 of 3, this run's rank 0 of 4"),
    "a missing folder": (
        lambda folder: shutil.rmtree(rank(folder, 1)),
        {},
        "rank 1 has no folder of the run that rank 0 is in the middle of",
    ),
    "exchanged folders": (
        lambda folder: (
            rank(folder, 1).rename(folder / "aside"),
            rank(folder, 2).rename(rank(folder, 1)),
            (folder / "aside").rename(rank(folder, 2)),
        ),
        {},
        "rank 1 (and 1 more): durable folder",
    ),
    "another label": (lambda folder: None, {"durable_label": "b"}, "its label is ''"),
    "another n": (lambda folder: None, {"n": N + 1}, f"it has n_steps={N}, this run"),
    "an end to find": (lambda folder: None, {"until": True}, "an unknown number of steps"),
    "a damaged header": (
        lambda folder: os.truncate(rank(folder, 2) / "run", 100),
        {},
        "rank 2: durable folder",
    ),
    "a stranger's file": (
        lambda folder: (rank(folder, 2) / "thesis.tex").write_text("..."),
        {},
        "rank 2: durable folder",
    ),
    "a stranger's file beside": (
        lambda folder: (folder / "thesis.tex").write_text("..."),
        {},
        "it holds 'thesis.tex', which is no folder of a rank",
    ),
    "a stranger's lock": (
        lambda folder: (rank(folder, 1) / "lock").write_text("1 host"),
        {},
        "its file 'lock' was not written by a durable run",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refusals_reach_all_ranks_and_change_no_file(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off(3, folder, back=20)
    act, options, reason = CHANGES[change]
    act(folder)
    before = seen(folder)
    everywhere(ranks(**{"size": 3, "folder": folder, **options}), StoreError, reason)
    assert seen(folder) == before
    assert set(folder.iterdir()) >= {rank(folder, k) for k in (0, 2)}


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    """Of the same program: only the number of the run tells them apart."""
    for name in ("a", "b"):
        broken_off(2, tmp_path / name, back=20)
    shutil.rmtree(rank(tmp_path / "a", 1))
    rank(tmp_path / "b", 1).rename(rank(tmp_path / "a", 1))
    everywhere(ranks(2, tmp_path / "a"), StoreError, "rank 1 has the folder of another run")


def test_arguments_are_the_same_on_every_rank(tmp_path: Path) -> None:
    for each in (
        lambda rank: {"durable_label": str(rank)},
        lambda rank: {"durable_every_s": rank},
        lambda rank: {"durable": tmp_path if rank else None},
    ):
        everywhere(ranks(2, tmp_path / "run", each=each), ArgumentError, "ranks disagree on")
    everywhere(ranks(2, tmp_path / "run", tiers="memory:"), ArgumentError, "leave tiers= out")
    assert list(tmp_path.iterdir()) == []


def test_another_adjoint_is_refused_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off(2, folder, back=20)
    everywhere(ranks(2, folder, seed=2.0), ArgumentError, "the adjoint differs from the one")
    exact(2, folder)


def test_one_program_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def work(comm: Comm) -> Any:
        wave = Wave(comm)
        with MPIReversal(
            wave.step, wave.adjoint_step, N, comm=comm, durable=folder, costs=COSTS
        ) as run:
            run.forward(wave.start)
            if comm.rank == 0:
                everywhere(ranks(2, folder), StoreError, "is in use by process")
            comm.allgather(None)
            return run.reverse(wave.seed)

    assert whole(succeed(run_ranks(2, work))).tobytes() == store_all(N).tobytes()
    assert not folder.exists()


def test_folders_of_ranks_and_of_a_single_process_are_distinguished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    broken_off(2, folder, back=20)
    run: Any = Reversal(lambda x, i: x, lambda x, a, i: a, 9, durable=folder, costs=COSTS)
    with pytest.raises(StoreError, match="folders of an MPI program's ranks"):
        run.forward(np.ones(3))
    plain: Any = Reversal(lambda x, i: x, lambda x, a, i: a, 9, durable=tmp_path / "b", costs=COSTS)
    plain.forward(np.ones(3))
    plain.close()
    everywhere(ranks(2, tmp_path / "b"), StoreError, "which is no folder of a rank")
    exact(2, folder)


def test_status_and_clean_take_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    broken_off(3, folder, back=20)
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.count("the same call resumes at adjoint step") == 3
    assert main(["status", "--json", str(folder)]) == 0
    assert [each["n_steps"] for each in json.loads(capsys.readouterr().out)] == 3 * [N]
    before = seen(folder)
    assert main(["clean", str(folder)]) == 2
    assert main(["clean", "--force", "--dry-run", str(folder)]) == 0
    assert seen(folder) == before
    (rank(folder, 1) / "thesis.tex").write_text("...")
    assert main(["clean", "--force", str(folder)]) == 0
    assert seen(folder) == {"rank-0001/thesis.tex": b"..."}


def test_states_of_another_layout_begin_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def work(comm: Comm) -> Any:
        with MPIReversal(
            lambda x, i: x + i,
            lambda x, a, i: a + x,
            10,
            comm=comm,
            durable=folder,
            costs=COSTS,
            on_error="raise",
        ) as run:
            found = []
            for size in (3, 3, 5):
                run.forward(np.zeros(size))
                found.append(run.reverse(np.zeros(size)).tolist())
        return found

    for found in succeed(run_ranks(2, work)):
        assert found == [3 * [120.0], 3 * [120.0], 5 * [120.0]]
    assert not folder.exists()


def test_a_gradient_that_was_not_saved_is_there_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def work(comm: Comm) -> Any:
        wave = Wave(comm)
        with MPIReversal(
            wave.step,
            wave.adjoint_step,
            N,
            comm=comm,
            durable=folder,
            costs=COSTS,
            on_error="raise",
        ) as run:
            run.forward(wave.start)
            run.reverse(wave.seed)
            raise BrokenOff

    assert all(isinstance(one, BrokenOff) for one in run_ranks(2, work))
    assert all(inspect(rank(folder, k)).complete for k in range(2))
    assert exact(2, folder) == [0, 0]


# ------------------------------------------------------------------ agreement


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([Found(), Found()], (None, None, ())),
        ([Found(b"r"), Found()], (None, None, ())),
        ([Found(b"r", progress=True)] * 2, (b"r", None, ())),
        ([Found(b"r", 9, (1,), True), Found(b"r", progress=True)], (b"r", None, ())),
        ([Found(b"r", 9, (1,), True), Found(b"r", 9, (), True)], (b"r", 9, ())),
        ([Found(b"r", 9, (1, 4), True), Found(b"r", 9, (4, 6), True)], (b"r", 9, (4,))),
    ],
)
def test_the_least_is_agreed(found: list[Found], expected: tuple[Any, ...]) -> None:
    agreed = agree(found)
    assert (agreed.run, agreed.length, agreed.adjoints) == expected


def test_ends_that_differ_are_refused() -> None:
    with pytest.raises(StoreError, match="must answer alike on every rank"):
        agree([Found(b"r", 9, (), True), Found(b"r", 8, (), True)])


def test_adjoints_are_written_at_their_interval_on_all_clocks() -> None:
    """Two ranks whose clocks run at different speeds, in virtual time."""
    speeds, every_s, step_s = (1.0, 3.0), 6.0, 0.01
    paces = [Pace(9_999, every_s, 0.0) for _ in speeds]
    written, reductions = [], 0
    for k, step in enumerate(reversed(range(10_000))):
        if step > paces[0].step:
            continue
        nows = [(k + 1) * step_s * speed for speed in speeds]
        reductions += 1
        said = [p.says(step, now, busy=False, safe=5) for p, now in zip(paces, nows, strict=True)]
        most = [max(both) for both in zip(*said, strict=True)]
        answers = {p.agreed(step, now, most) for p, now in zip(paces, nows, strict=True)}
        assert len(answers) == len({p.step for p in paces}) == 1
        if answers == {(True, 5)}:
            written.append((k + 1) * step_s)
    gaps = np.diff(written)
    assert every_s / 3 <= gaps.min() <= gaps.max() <= 1.1 * every_s
    assert reductions < 8 * len(written)


def test_a_busy_disk_on_one_rank_holds_all_back() -> None:
    pace = Pace(99, 0.0, 0.0)
    free = pace.says(99, 1.0, busy=False, safe=100)
    assert pace.agreed(99, 1.0, [1.0, *free[1:]]) == (False, 100)
    assert pace.agreed(98, 2.0, pace.says(98, 2.0, busy=False, safe=98)) == (True, 98)


def test_an_older_adjoint_stays_until_every_rank_has_a_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's disk takes no adjoint after the first."""
    from multistage.durable.folder import Folder

    publish, folder = Folder.publish, tmp_path / "run"

    def limited(self: Folder, name: str, pieces: Any, **how: bool) -> None:
        other = self.path.name == "rank-0001" and list(self.path.glob("adjoint-*"))
        if name.startswith("adjoint") and other:
            raise OSError(5, "Input/output error")
        publish(self, name, pieces, **how)

    monkeypatch.setattr(Folder, "publish", limited)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        broken_off(2, folder, back=5, flush=True)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", MPI)
    steps = [{int(p.name[8:]) for p in rank(folder, k).glob("adjoint-*")} for k in range(2)]
    (kept,) = steps[1]
    assert kept in steps[0]
    assert min(steps[0]) < kept
    exact(2, folder)
