"""What `multistage status` and `multistage clean` say and do."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaks import no_leak as no_leak
from simple_runs import BrokenOff, simple

from multistage import Reversal
from multistage.cli import main
from multistage.durable.status import clean, inspect
from multistage.errors import StoreError

N = 40


def begun(folder: Path, back: int = -1, **options: Any) -> Reversal[Any, Any]:
    """Return a run that is in progress, or was interrupted at a step."""
    run = simple(folder, N, back, **options)
    with contextlib.suppress(BrokenOff):
        run.forward(np.ones(100))
        if back >= 0:
            run.reverse(np.ones(100))
    return run


def test_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    begun(folder, forward=20, durable_label="epoch 3")
    found = inspect(folder)
    assert found.n_steps == N
    assert (found.forward_step, found.states, found.adjoint_step) == (20, 21, None)
    assert found.resumable
    assert found.reason == "the same call resumes from state 20"
    assert main(["status", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("epoch 3", "array (100,) float64", "state 20 of 40 (50.0 %)", "nobody"):
        assert text in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80
    run = begun(folder, durable_label="epoch 3")
    assert inspect(folder).in_use == f"process {os.getpid()} on {os.uname().nodename}"
    assert inspect(folder).reason == "it is running"
    with pytest.raises(StoreError, match="in use by process"):
        clean(folder, force=True)
    run.close()
    assert inspect(folder).reason == "the same call resumes with the reverse sweep"
    begun(folder, back=11, durable_label="epoch 3")
    found = inspect(folder)
    assert found.adjoint_step is not None
    assert 11 < found.adjoint_step < N
    assert found.adjoints in (1, 2)
    assert found.reason == f"the same call resumes at adjoint step {found.adjoint_step - 1}"
    assert main(["status", "--json", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["adjoint_step"] == found.adjoint_step


def test_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    begun(folder, back=11)
    held = inspect(folder).nbytes
    assert main(["clean", str(folder)]) == 2
    assert "a run that can be resumed (forward: state 40 of 40" in capsys.readouterr().err
    assert inspect(folder).resumable
    assert main(["clean", "--dry-run", str(folder)]) == 2
    assert "a run that can be resumed (forward: state 40 of 40" in capsys.readouterr().err
    would = clean(folder, force=True, dry_run=True)
    assert inspect(folder).resumable
    assert {name for name, _ in would.files} == {path.name for path in folder.iterdir()}
    assert would.folder
    lock = (folder / "lock").stat().st_size
    done = clean(folder, force=True)
    assert done.nbytes == would.nbytes == held + lock
    assert str(done).startswith(f"removed: {len(would.files)} files, ")
    assert str(done).endswith(f", the folder {folder}")
    assert not folder.exists()
    assert main(["clean", str(folder)]) == 2
    assert "it does not exist" in capsys.readouterr().err


def test_nothing_is_said_to_be_removed_where_nothing_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--force"], ["--dry-run"]):
        assert main(["clean", *options, str(tmp_path)]) == 0
        told = f"nothing to remove: {tmp_path} holds no file of a durable run\n"
        assert capsys.readouterr().out == told
    for k in range(7):
        (tmp_path / f"{k}.tex").write_text("...")
    assert main(["clean", str(tmp_path)]) == 0
    kept = "kept: '0.tex', '1.tex', '2.tex', '3.tex', '4.tex' and 2 more\n"
    assert capsys.readouterr().out == told + kept


def test_status_and_a_dry_run_look_only(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = begun(folder)
    with pytest.raises(StoreError, match="in use by process"):
        clean(folder, force=True, dry_run=True)
    run.close()
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}
    assert inspect(folder).begun
    assert clean(folder, force=True, dry_run=True).folder
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()} == before


@pytest.mark.parametrize("harmed", [False, True])
def test_what_cannot_be_resumed_goes_without_force(harmed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder, back=11)
    number = (folder / "run").read_bytes()[16:32].hex()
    (folder / f"tmp-{number}-last").write_bytes(b"MSD")
    if harmed:
        os.truncate(folder / "run", 100)
    else:
        (folder / "run").unlink()
    found = inspect(folder)
    assert found.leftovers == 1 and not found.resumable
    assert ("cannot be used" in found.reason) == harmed
    clean(folder)
    assert not folder.exists()


def test_a_label_cannot_command_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder, back=11, durable_label="\x1b[2J\n" + 100 * "x")
    shown = str(inspect(folder))
    assert "\x1b" not in shown
    assert "?[2J?xxx" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80


def test_a_link_to_a_folder_is_not_cleaned(tmp_path: Path) -> None:
    folder, link = tmp_path / "run", tmp_path / "link"
    begun(folder, back=11)
    link.symlink_to(folder)
    with pytest.raises(StoreError, match="symbolic link"):
        clean(link, force=True)
    assert inspect(folder).resumable
