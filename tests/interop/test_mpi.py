"""Real ranks, started by mpiexec: gradients of any number of ranks have the same bits."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi_wave import store_all, whole

import multistage

HERE = Path(__file__).parent
ROOT = Path(multistage.__file__).parent.parent
BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
pytestmark = [
    pytest.mark.skipif(
        MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpi4py and mpiexec",
    )
]
N = 60
# More ranks than cores, as root in a container: MPICH must not spin (15 times slower),
# Open MPI must be told; neither minds what is meant for the other.
LENIENT = {
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "20",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def launch(
    ranks: int, *arguments: str | Path, folder: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, arguments)],
        env=os.environ | LENIENT | {"PYTHONPATH": path} | more,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )


def results(ranks: int, case: str, folder: Path) -> list[Any]:
    done = launch(ranks, HERE / "mpi_worker.py", case, folder)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / f"{rank}/result").read_bytes()) for rank in range(ranks)]


@pytest.mark.long(but="2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_and_actions(ranks: int, tmp_path: Path) -> None:
    found = results(ranks, "gradients", tmp_path)
    expected = store_all(N).tobytes()
    for name in found[0]:
        adjoints, logs, steps, figures = zip(*(one[name] for one in found), strict=True)
        for sweep in range(2):
            gradient = whole([one[sweep] for one in adjoints])
            assert gradient.tobytes() == expected, f"{name}, sweep {sweep}"
        assert all(log == logs[0] for log in logs), f"{name}: other actions"
        assert len(set(steps)) == len(set(figures)) == 1, name
        writes, reads, lost, recovered = figures[0]
        if name == "no tier":
            assert writes == reads == lost == 0
        elif name != "measured":
            assert writes > 0 and reads > 0
        if "lost" in name or name == "refused":
            assert lost > 0, name
        if name == "all lost":
            assert lost == reads or recovered > 0


def test_a_second_shot_measures_opens_and_starts_nothing(tmp_path: Path) -> None:
    """It may be planned for anew where costs have drifted, which is the machine's to say."""
    found = results(2, "shots", tmp_path)
    expected = store_all(N).tobytes()
    for rank, kinds in enumerate(found):
        for gradients, (first, *others) in kinds:
            assert first["FirstSteps"] == 1 and first["probe_store"] and first["open"]
            assert len(others) >= 2 and all(set(each) <= {"plan"} for each in others), rank
            parts = [[gradient] for gradient in gradients]
            if gradients is kinds[0][0]:
                parts = [[one[0][0][k] for one in found] for k in range(3)]
            assert all(whole(part).tobytes() == expected for part in parts)


def test_ranks_measure_at_once_what_they_share(tmp_path: Path) -> None:
    for rates in results(2, "shares", tmp_path):
        assert rates == [(0.25, 0.5), (0.25, 0.5), (0.75, 1.5)]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_that_differ_are_streamed_by_one_plan(ranks: int, tmp_path: Path) -> None:
    found = results(ranks, "unequal", tmp_path)
    for name in found[0]:
        right, figures = zip(*(one[name] for one in found), strict=True)
        assert right == ([True] * 2,) * ranks, name
        assert len(set(figures)) == 1, name
    # By given seconds, which are far above those of the disk.
    assert all(one[3] > 0 for name, (_, one) in found[0].items() if "True" in name)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_dropin_keeps_ranks_in_step(ranks: int, tmp_path: Path) -> None:
    found = results(ranks, "dropin", tmp_path)
    expected = store_all(N).tobytes()
    for name in found[0]:
        gradients, steps = zip(*(one[name] for one in found), strict=True)
        assert len(set(steps)) == 1, f"{name}: ranks ran other steps"
        for sweep in range(2):
            assert whole([one[sweep] for one in gradients]).tobytes() == expected, (name, sweep)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("devito") is None, reason="needs devito")
@pytest.mark.parametrize("ranks", [2, 3])
def test_devito_keeps_ranks_in_step(ranks: int, tmp_path: Path) -> None:
    """The communicator is that of the grid; a full and a faulty disk are those of one rank."""
    folders = os.pathsep.join([str(BESIDE.parent), os.environ["PATH"]])  # Devito calls mpicc
    options = {"DEVITO_MPI": "1", "DEVITO_LOGGING": "ERROR", "PATH": folders}
    done = launch(ranks, HERE / "devito_worker.py", tmp_path, folder=tmp_path, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is exact") == ranks


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("pyadjoint") is None, reason="needs pyadjoint")
def test_tapes_of_pyadjoint_keep_ranks_in_step(tmp_path: Path) -> None:
    """Values, gradients and Hessians, each rank with arrays of its own size, faults on one."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    done = launch(2, "-W", "ignore", HERE / "tape_worker.py", "answers", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is exact") == 2
    failed = launch(2, "-W", "ignore", HERE / "tape_worker.py", "fails", tmp_path)
    assert failed.returncode != 0
    assert "rank 1 of 2 raised multistage.errors.StateError: state 6 has" in failed.stderr
    failed = launch(2, "-W", "ignore", HERE / "tape_worker.py", "longer", tmp_path)
    assert failed.returncode != 0
    assert "ArgumentError: the tape has n_steps=12 timesteps, and another one" in failed.stderr


@pytest.mark.long
def test_the_dropin_must_know_which_ranks_share_the_steps(tmp_path: Path) -> None:
    exact = store_all(N).tobytes()
    for said, gradients in results(2, "unknown", tmp_path):
        assert all(error.startswith("ArgumentError: MPI started 2 ranks, and") for error in said)
        assert all("give comm=" in error for error in said)
        assert all(whole([one]).tobytes() == exact for one in gradients)


@pytest.mark.long
def test_an_exception_on_one_rank_ends_all(tmp_path: Path) -> None:
    done = launch(3, HERE / "mpi_worker.py", "fails", tmp_path)
    assert done.returncode != 0
    said = "multistage: rank 1 of 3 raised FloatingPointError: rank 1 went wrong in step 30; all"
    assert said in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert not list(tmp_path.glob("*/result"))


@pytest.mark.long
def test_a_killed_rank_ends_all_and_the_same_command_resumes(tmp_path: Path) -> None:
    for sweep in ("step", "adjoint_step"):
        done = launch(2, HERE / "mpi_worker.py", "killed", tmp_path)
        assert done.returncode != 0 and "signal" in (done.stdout + done.stderr).lower()
        assert (tmp_path / f"1/died in {sweep}").exists() and not list(tmp_path.glob("*/result"))
    parts, steps = zip(*results(2, "killed", tmp_path), strict=True)
    assert whole(parts).tobytes() == store_all(N).tobytes()
    assert steps == (0, 0)  # the last state was on the disk of both
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_killed_ranks_of_steps_that_differ_resume(tmp_path: Path) -> None:
    for death in range(4):
        done = launch(2, HERE / "mpi_worker.py", "killed_unequal", tmp_path)
        assert done.returncode != 0 and "signal" in (done.stdout + done.stderr).lower()
        assert (tmp_path / f"{death % 2}/died {death}").exists()
        assert not list(tmp_path.glob("*/result"))
    assert results(2, "killed_unequal", tmp_path) == 2 * [(True, 0)]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_example() -> None:
    done = launch(4, ROOT / "examples/wave_mpi.py", "--quick")
    assert done.returncode == 0, done.stderr
    assert "equals that of one rank: True" in done.stdout
