"""Shots on a real cluster of processes: exact sums, dead workers, plain errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import files_of

from benchmarks.acoustic import build
from multistage import Costs, Reversal, Tier, open_store
from multistage.errors import ArgumentError, MultistageError, ShotError, StoreError
from multistage.states.layout import Layout

distributed = pytest.importorskip("distributed")

import dask  # noqa: E402

from multistage.interop.dask import ShotWorker, map_shots  # noqa: E402

STEPS = 60
SOURCES = list(range(30, 60, 5))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        # A LocalCluster gives a worker up for good that is away at the moment
        # 15 s after a death, though it be another one that it starts again from.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            memory_limit="1GiB",
            local_directory=str(tmp_path_factory.mktemp("workers")),
        ) as made,
    ):
        yield made


@pytest.fixture
def client(cluster: Any) -> Iterator[Any]:
    with distributed.Client(cluster) as made:
        made.wait_for_workers(2, timeout=280)
        yield made


def wave(source: int, worker: ShotWorker) -> tuple[float, Any]:
    model = build(50, 90, STEPS, sponge=10, source_column=source)
    with worker.reversal(model.chain(), n_steps=STEPS) as run:
        run.forward(model.start())
        adjoint = run.reverse(model.start_adjoint())
    return model.misfit(), model.gradient(adjoint)


def serial(sources: list[int]) -> tuple[float, Any]:
    parts = []
    for source in sources:
        alone = ShotWorker("8 slots", "memory:")
        parts.append(wave(source, alone))
        alone.close()
    misfit, gradient = parts[0]
    for more in parts[1:]:
        misfit, gradient = misfit + more[0], gradient + more[1]
    return misfit, gradient


def equal(one: Any, other: Any) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def test_the_sum_is_that_of_a_loop(client: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    for scratch in (None, tmp_path):
        result = map_shots(
            client,
            wave,
            iter(SOURCES),
            memory="8 slots",
            scratch=scratch,
            arrived=lambda index, result: seen.append(index),
        )
        assert equal(result, serial(SOURCES))
    assert sorted(seen) == sorted(2 * [*range(len(SOURCES))])
    assert list(tmp_path.iterdir()) == []


def carried(source: int, worker: ShotWorker) -> list[Any]:
    """Return this process, the run that the shot was lent, its open files and its gradient."""
    model = build(50, 90, STEPS, sponge=10, source_column=source)
    with worker.reversal(model.chain(), n_steps=STEPS) as run:
        run.forward(model.start())
        adjoint = run.reverse(model.start_adjoint())
        files = sorted(str(link.readlink()) for link in files_of(scratch_of(worker)))
        sweeps = id(run._sweeps)
    return [(os.getpid(), sweeps, files, model.gradient(adjoint))]


def scratch_of(worker: ShotWorker) -> Path:
    return Path(worker.tiers.removeprefix("file:"))


def test_shots_on_a_worker_share_a_run_and_its_file(client: Any, tmp_path: Path) -> None:
    found = map_shots(
        client, carried, SOURCES, memory="8 slots", scratch=tmp_path, reduce=lambda a, b: a + b
    )
    by_worker = {process: (run, files) for process, run, files, _ in found}
    assert 1 <= len(by_worker) <= 2
    for process, run, files, _ in found:
        assert (run, files) == by_worker[process] and len(files) == 1
    total = found[0][-1]
    for *_, gradient in found[1:]:
        total = total + gradient
    assert np.array_equal(total, serial(SOURCES)[1])

    def left(dask_worker: Any) -> tuple[int, list[str]]:
        kept = [name for name in dask_worker.plugins if name.startswith("multistage")]
        return len(files_of(tmp_path)), kept

    assert set(map(str, client.run(left).values())) == {"(0, [])"}


def late(item: tuple[int, str], worker: ShotWorker) -> list[int]:
    """Return the item's number; number 0 only when the file of another is there."""
    number, folder = item
    if number == 0:
        while not (Path(folder) / "3").exists():
            pass
    (Path(folder) / str(number)).touch()
    return [number]


def test_few_results_wait_on_the_client(client: Any, tmp_path: Path) -> None:
    taken, reduced = 0, 0

    def items() -> Iterator[tuple[int, str]]:
        nonlocal taken
        for number in range(30):
            # Sent and not yet summed, of which the first is not reduced: never above `ahead`.
            assert taken - reduced <= 5
            taken += 1
            yield number, str(tmp_path)

    def reduce(total: list[int], result: list[int]) -> list[int]:
        nonlocal reduced
        reduced += 1
        return total + result

    assert map_shots(client, late, items(), reduce=reduce, ahead=5) == list(range(30))


def killed_once(item: tuple[int, str, str], worker: ShotWorker) -> Any:
    """Run a shot; the first time shot 40 is asked for, die in the middle of its reverse sweep."""
    source, marker, folder = item
    model = build(50, 90, STEPS, sponge=10, source_column=source)
    chain = model.chain()
    plain = chain.reverse

    def reverse(state: Any, adjoint: Any, i: int) -> Any:
        if source == 40 and i == STEPS // 2 and not Path(marker).exists():
            Path(marker).write_text(f"{len(files_of(Path(folder)))} {run.report_counts()}")
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(state, adjoint, i)

    class Counted(Reversal[Any, Any]):
        def report_counts(self) -> int:
            executor = self._sweeps.executor
            assert executor is not None
            return executor.counts.writes

    killing = type(chain)(model.forward, reverse)
    costs = Costs(1e-4, 2e-4, tiers=(Tier("file", 2.5e-4, 2.5e-4),))
    with Counted(killing, n_steps=STEPS, memory="8 slots", tiers=worker.tiers, costs=costs) as run:
        run.forward(model.start())
        adjoint = run.reverse(model.start_adjoint())
    return model.misfit(), model.gradient(adjoint)


@pytest.mark.long(but="0")
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("allowed", [3, 0])
def test_a_worker_killed_in_mid_shot_costs_time_alone(
    client: Any, cluster: Any, tmp_path: Path, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `allowed` deaths Dask runs the shot again itself; with none we do."""
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", allowed)
    scratch, marker = tmp_path / "scratch", tmp_path / "marker"
    scratch.mkdir()
    before = set(client.nthreads())
    result = map_shots(
        client,
        killed_once,
        [(source, str(marker), str(scratch)) for source in SOURCES],
        scratch=scratch,
    )
    assert equal(result, serial(SOURCES))
    files, writes = map(int, marker.read_text().split())
    assert files >= 1  # it did use the scratch folder
    assert writes > 0
    assert list(scratch.iterdir()) == []
    client.wait_for_workers(2, timeout=280)
    assert set(client.nthreads()) != before  # and a worker did die


def deadly(item: int, worker: ShotWorker) -> int:
    if item == 1:
        store = open_store(worker.tiers)
        store.open(Layout.of(np.zeros(3)))
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_shot_that_kills_every_worker_ends(
    client: Any, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 0)
    with pytest.raises(ShotError, match="shot 1 failed: the workers it ran on died") as caught:
        map_shots(client, deadly, [0, 1, 2], deaths=0, scratch=tmp_path)
    assert caught.value.shot == 1
    assert list(tmp_path.iterdir()) == []
    client.wait_for_workers(2, timeout=280)
    with pytest.raises(ShotError, match="shot 1 failed"):
        map_shots(client, deadly, [0, 1, 2], deaths=1, scratch=tmp_path)
    client.wait_for_workers(2, timeout=280)
    assert map_shots(client, deadly, [0, 2], scratch=tmp_path) == 2
    assert list(tmp_path.iterdir()) == []


def raising(item: int, worker: ShotWorker) -> int:
    if item == 2:
        raise FloatingPointError("the scheme blew up")
    return item


def test_an_error_of_a_shot_has_its_index(client: Any, tmp_path: Path) -> None:
    with pytest.raises(ShotError, match=r"shot 2 failed: it raised .*blew up") as caught:
        map_shots(client, raising, range(5), scratch=tmp_path)
    assert caught.value.shot == 2
    assert isinstance(caught.value.__cause__, FloatingPointError)
    assert map_shots(client, raising, [0, 1, 3, 4]) == 8  # the cluster is fit for more
    assert list(tmp_path.iterdir()) == []


def started(item: str, worker: ShotWorker) -> None:
    Path(item).touch()


def test_a_worker_without_scratch_is_named_before_any_shot(client: Any, tmp_path: Path) -> None:
    one, other = sorted(client.nthreads())

    def make(dask_worker: Any) -> None:
        (Path(dask_worker.local_directory) / "shots").mkdir(exist_ok=True)

    client.run(make, workers=[one])
    mark = tmp_path / "ran"
    with pytest.raises(StoreError, match=f"worker {other}: .*it does not exist") as caught:
        map_shots(client, started, [str(mark)], scratch="shots")
    assert one not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="it is no folder") as caught:
        map_shots(client, started, [str(mark)], scratch=tmp_path / "file")
    assert one in str(caught.value) and other in str(caught.value)
    assert not mark.exists()
    client.run(make)
    assert map_shots(client, started, [str(mark)], scratch="shots") is None
    assert mark.exists()


def told(item: int, worker: ShotWorker) -> list[Any]:
    return [(worker.memory, worker.tiers, distributed.get_worker().local_directory)]


def test_each_worker_has_its_own_budget_and_folder(client: Any) -> None:
    def joined(total: Any, result: Any) -> Any:
        return total + result

    for budget, tier, folder in map_shots(client, told, range(4), reduce=joined):
        assert budget == (1 << 30) // 4  # a quarter of the limit, one thread
        assert tier == f"file:{Path(folder).resolve()}"
    assert map_shots(client, told, [0], memory="3 MiB")[0][0] == "3 MiB"


def test_bad_arguments(client: Any, tmp_path: Path) -> None:
    mark = [str(tmp_path / "ran")]
    for options, message in (
        ({"memory": "2 GiB"}, r"worker tcp://.*memory=2.00 GiB for each of 1 thread"),
        ({"memory": "much"}, "'much' is no byte count"),
        ({"ahead": 0}, "ahead=0 must be at least 1"),
        ({"deaths": -1}, "deaths=-1 must be at least 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            map_shots(client, started, mark, **options)
    with pytest.raises(ArgumentError, match="there are no shots"):
        map_shots(client, started, [])
    assert list(tmp_path.iterdir()) == []


def test_no_worker_at_all_is_an_error_not_a_hang() -> None:
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=":0") as empty,
        distributed.Client(empty) as client,
        pytest.raises(MultistageError, match=r"has had no worker for 0\.2 s"),
    ):
        map_shots(client, wave, SOURCES, patience_s=0.2)


def test_workers_that_all_go_are_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multistage.interop.dask._POLL_S", 0.2)
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as short,
        distributed.Client(short) as client,
    ):

        def leave(index: int, result: Any) -> None:
            short.scale(0)
            while client.nthreads():
                pass

        with pytest.raises(MultistageError, match=r"has had no worker for 0\.3 s"):
            map_shots(client, told, range(9), ahead=2, arrived=leave, patience_s=0.3)


def test_an_asynchronous_client_is_refused() -> None:
    class Asynchronous:
        asynchronous = True

    refused: Any = Asynchronous()
    with pytest.raises(ArgumentError, match="asynchronous"):
        map_shots(refused, wave, SOURCES)
