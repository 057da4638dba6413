"""Whose folder it is, who may use it now, and how files appear in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leaks import no_leak as no_leak

from multistage.durable.folder import Folder
from multistage.durable.headers import BadFile
from multistage.durable.status import inspect
from multistage.errors import StoreError

ROOT = os.geteuid() == 0


def test_a_new_folder_is_ours_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        folder = Folder(tmp_path / "run", create=True)
        folder.lock()
        folder.publish("run", [b"abc"])
    finally:
        os.umask(mask)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    for path in folder.path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    folder.remove()
    folder.close()
    folder.close()
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "no folder"),
        (lambda path: path.symlink_to(path.parent), "symbolic link"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "others may write"),
        (lambda path: (path.mkdir(), path.chmod(0o720)), "others may write"),
    ],
)
def test_a_folder_that_is_refused(tmp_path: Path, prepare: object, reason: str) -> None:
    path = tmp_path / "missing" / "run" if reason == "does not exist" else tmp_path / "run"
    prepare(path)  # type: ignore[operator]
    with pytest.raises(StoreError, match=reason):
        Folder(path, create=True)


@pytest.mark.skipif(not ROOT, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        Folder(path, create=True)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        inspect(path)


@pytest.mark.skipif(not ROOT, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.publish("run", [b"abc"])
    os.chown(tmp_path / "run", 12345, 12345)
    with pytest.raises(BadFile, match="no plain file of yours"):
        folder.open("run")
    folder.close()


@pytest.mark.parametrize("name", ["run", "lock", "states-3", "adjoint-3"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    folder = Folder(tmp_path / "run", create=True)
    (folder.path / name).symlink_to(target)
    with pytest.raises(BadFile, match="symbolic link"):
        folder.open(name)
    if name == "lock":
        with pytest.raises(StoreError, match="its lock cannot be opened"):
            folder.lock()
    else:
        folder.publish(name, [b"new"])  # in place of the link, not through it
        assert not (folder.path / name).is_symlink()
    (folder.path / f"tmp-{name}").symlink_to(target)
    if name != "lock":
        folder.publish(name, [b"newer"])
    folder.clear()
    assert target.read_bytes() == b"precious"
    folder.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["run", "lock"])
def test_a_pipe_in_place_of_a_file_hangs_nobody(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    folder = Folder(tmp_path)
    with pytest.raises(BadFile, match="no plain file"):
        folder.open(name)
    if name == "lock":
        with pytest.raises(StoreError, match="its lock"):
            folder.lock()
    folder.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from multistage.durable.folder import Folder\n"
        "folder = Folder(Path(sys.argv[1])); folder.lock()\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        folder = Folder(tmp_path)
        assert folder.in_use()
        with pytest.raises(StoreError, match=f"in use by process {other.pid} on "):
            folder.lock()
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert not folder.in_use()
    folder.lock()
    folder.close()


def test_who_looks_does_not_keep_a_run_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl
    import time

    folder = Folder(tmp_path)
    folder.lock()
    folder.close()
    looking = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(looking))  # seen enough
    folder = Folder(tmp_path)
    folder.lock()
    folder.close()


def test_a_child_that_lives_on_holds_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from multistage.durable.folder import Folder\n"
        "folder = Folder(Path(sys.argv[1])); folder.lock()\n"
        "if os.fork(): print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        folder = Folder(tmp_path)
        assert folder.in_use()
        other.send_signal(signal.SIGKILL)
        other.wait()
        folder.lock()  # though the child waits for its input still
        folder.close()


def test_a_lock_that_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real, asked = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        real(fd, operation)
        if not asked:
            asked.append(fd)
            (tmp_path / "lock").unlink()  # by the run that just ended

    monkeypatch.setattr(fcntl, "flock", flock)
    folder = Folder(tmp_path)
    folder.lock()
    assert (tmp_path / "lock").exists()
    folder.close()


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.publish("run", [b"old"])

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space"):
        folder.publish("run", [b"new"])
    assert folder.names() == ["run"]
    assert (tmp_path / "run").read_bytes() == b"old"
    folder.close()


def test_files_of_others_are_told_and_left(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name in ("states-1x", "thesis.tex", "states-", "states-1234567890123", "tmp-thesis"):
        (tmp_path / name).write_text("")
    folder.publish("states-1", [b""])
    assert len(folder.strangers()) == 5
    folder.remove()
    assert len(list(tmp_path.iterdir())) == 5
    folder.close()
