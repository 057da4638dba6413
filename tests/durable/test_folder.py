"""Whose folder it is, who may use it now, and how files appear in it."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaks import no_leak as no_leak
from simple_runs import gradient, leave_broken, plain

from multistage.cli import main
from multistage.durable import run as durable_run
from multistage.durable.folder import Folder
from multistage.durable.headers import BadFile, Kind, encode
from multistage.durable.status import inspect
from multistage.errors import CheckpointWarning, StoreError

ROOT = os.geteuid() == 0


def ours(folder: Folder, payload: bytes = b"") -> list[bytes]:
    """Return a file of the folder's run, in pieces."""
    return [encode(Kind.ADJOINT, folder.run, b"", len(payload)), payload]


def test_a_new_folder_is_ours_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        folder = Folder(tmp_path / "run", create=True)
        folder.lock()
        folder.publish("run", ours(folder))
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
    with pytest.raises(BadFile, match="no plain file of yours"), folder.open("run"):
        pass
    folder.close()


@pytest.mark.parametrize("name", ["run", "lock", "states-3", "adjoint-3"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    folder = Folder(tmp_path / "run", create=True)
    (folder.path / name).symlink_to(target)
    with pytest.raises(BadFile, match="symbolic link"), folder.open(name):
        pass
    if name == "lock":
        with pytest.raises(StoreError, match=r"its file 'lock' cannot be used: .* symbolic link"):
            folder.lock()
    else:
        folder.lock()
        with pytest.raises(FileExistsError, match=f"a file '{name}' is there"):
            folder.publish(name, ours(folder))
    temporary = folder.path / f"tmp-{folder.run.hex()}-{name}"
    temporary.symlink_to(target)
    folder.remove()
    assert (folder.path / name).is_symlink()
    assert temporary.is_symlink()
    assert target.read_bytes() == b"precious"
    folder.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["run", "lock"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    folder = Folder(tmp_path)
    with pytest.raises(BadFile, match="no plain file"), folder.open(name):
        pass
    if name == "lock":
        with pytest.raises(StoreError, match=r"its file 'lock' cannot be used: .* no plain file"):
            folder.lock()
    folder.close()


@pytest.mark.parametrize("begun", ["True", "os.fork()"])
def test_one_process_at_a_time(begun: str, tmp_path: Path) -> None:
    """A child of it that lives on holds no lock."""
    code = (
        "import os, sys; from pathlib import Path; from multistage.durable.folder import Folder\n"
        "folder = Folder(Path(sys.argv[1])); folder.lock()\n"
        f"if {begun}: print('locked', flush=True)\n"
        "sys.stdin.read()"
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
        folder.lock()  # though the child waits for its input still
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

    folder = Folder(tmp_path)
    folder.lock()
    folder.close()
    monkeypatch.setattr(fcntl, "flock", flock)
    folder = Folder(tmp_path)
    folder.lock()
    assert (tmp_path / "lock").exists()
    folder.close()


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.publish("run", ours(folder, b"old"))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space"):
        folder.publish("run", ours(folder, b"new"))
    assert folder.names() == ["run"]
    assert (tmp_path / "run").read_bytes()[-3:] == b"old"
    folder.close()


def test_files_of_others_are_listed_and_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.lock()
    strange = [
        "states-1x",
        "thesis.tex",
        "states-",
        "states-1234567890123",
        "tmp-run",
        "tmp-thesis",
    ]
    unfinished = f"tmp-{16 * 'ab'}-run"  # of a run nobody knows
    for name in (*strange, unfinished):
        (tmp_path / name).write_text("")
    folder.publish("states-1", ours(folder))
    assert folder.strangers() == sorted(strange)
    folder.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*strange, unfinished])
    folder.close()


# What a stranger may have called as we call our files; each is told by its name.
NAMES = ["run", "last", "lock", "states-0", "probe-3", "adjoint-12"]
STRANGE: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("twelve years of work" * 10),
    "empty": lambda path: path.write_bytes(b""),
    "the magic alone": lambda path: path.write_bytes(b"MSDURABL"),
    "a header cut off": lambda path: path.write_bytes(encode(Kind.RUN, b"r" * 16, b"", 0)[:31]),
    "another magic": lambda path: path.write_bytes(b"NSDURABL" + bytes(100)),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling link": lambda path: path.symlink_to("/nowhere"),
    "hard link": lambda path: (
        (path.parent.parent / "thesis").write_text("..."),
        path.hardlink_to(path.parent.parent / "thesis"),
    ),
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
}


def seen(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return what lies in a folder: inode, time of the last change, contents."""
    found = {}
    for path in folder.iterdir():
        status = path.lstat()
        plain = stat.S_ISREG(status.st_mode)
        data = path.read_bytes() if plain else b""
        found[path.name] = (status.st_ino, status.st_mtime_ns, data)
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_stranger_is_refused_by_its_name(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / "run"
    path.mkdir()
    STRANGE[what](path / name)
    before = seen(path)
    with pytest.raises(StoreError, match=f"its file '{name}' "):
        summed(path, costs=None)
    assert seen(path) == before
    for options in ([], ["--force"], ["--dry-run"]):
        assert main(["clean", *options, str(path)]) == 0
        assert seen(path) == before
    assert not inspect(path).resumable


def summed(path: Path, **options: Any) -> bool:
    """Whether 9 steps in a durable folder have the gradient they should have."""
    return np.array_equal(gradient(path, 9, **options), plain(9))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", [*STRANGE, "another run"])
@pytest.mark.parametrize("name", ["last", "lock", "states-7", "probe-3", "adjoint-12", "adjoint-1"])
def test_a_file_of_a_stranger_beside_a_run_stays(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / "run"
    leave_broken(path, 9, 3)
    (path / name).unlink(missing_ok=True)
    if what == "another run":
        (path / name).write_bytes(encode(Kind.ADJOINT, b"r" * 16, b"", 3) + b"abc")
    else:
        STRANGE[what](path / name)
    before = seen(path)[name]
    if name == "lock" and what != "another run":
        with pytest.raises(StoreError, match="its file 'lock' "):
            summed(path)
        assert seen(path)[name] == before
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # it is in the way of one of ours
        assert summed(path)
    if name != "lock":  # a lock of another run of ours is a lock
        assert seen(path) == {name: before}


def test_clean_leaves_a_file_of_a_stranger_beside_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_broken(tmp_path / "run", 9, 3)
    path = tmp_path / "run"
    for name in ("states-77", "thesis.tex", "tmp-last"):
        (path / name).write_text("...")
    (path / "adjoint-5").unlink(missing_ok=True)
    (path / "adjoint-5").write_bytes(encode(Kind.ADJOINT, b"r" * 16, b"", 3) + b"abc")
    foreign = {"adjoint-5", "states-77", "thesis.tex", "tmp-last"}
    before = seen(path)
    assert inspect(path).strangers == 4 and not inspect(path).resumable
    assert main(["clean", "--force", "--dry-run", str(path)]) == 0
    assert seen(path) == before
    told = capsys.readouterr().out.splitlines()
    would = {line.split()[2] for line in told if line.startswith("would remove ")}
    assert would == set(before) - foreign
    assert main(["clean", "--force", str(path)]) == 0
    assert set(seen(path)) == foreign
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"removed: {len(before) - 4} files, ")
    assert told[0].endswith(f"the folder stays {path}")
    assert told[1] == "kept: 'adjoint-5', 'states-77', 'thesis.tex', 'tmp-last'"


def test_a_file_that_changes_after_the_look_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.lock()
    folder.publish("states-0", ours(folder))
    pread = os.pread

    def exchanged(fd: int, count: int, offset: int) -> bytes:
        data = pread(fd, count, offset)
        other = tmp_path / "other"
        other.write_bytes(b"precious")
        other.rename(tmp_path / "states-0")
        return data

    monkeypatch.setattr(os, "pread", exchanged)
    assert not folder.unlink("states-0")
    assert (tmp_path / "states-0").read_bytes() == b"precious"
    folder.close()


def test_a_folder_put_in_the_place_of_ours_stays(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", create=True)
    folder.lock()
    folder.path.rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    folder.remove()
    folder.close()
    assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("lacking", ["nameless files", "links", "/proc", "both"])
def test_a_file_system_that_can_do_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """As NFS, which makes no nameless files, or FAT, which has no links."""
    real_open, real_link = os.open, os.link

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if lacking in ("nameless files", "both") and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real_open(path, flags, *args, **options)

    def linked(source: Any, *args: Any, **options: Any) -> None:
        if lacking in ("links", "both") or (lacking == "/proc" and str(source).startswith("/proc")):
            raise OSError(errno.EPERM, "Operation not permitted")
        real_link(source, *args, **options)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "link", linked)
    folder = Folder(tmp_path / "run", create=True)
    folder.lock()
    (folder.path / "last").write_text("...")
    for payload in (b"old", b"new"):
        folder.publish("states-0", ours(folder, payload))
        with pytest.raises(FileExistsError, match="a file 'last' is there"):
            folder.publish("last", ours(folder))
    assert (folder.path / "states-0").read_bytes()[-3:] == b"new"
    assert (folder.path / "last").read_text() == "..."
    assert folder.names() == ["last", "lock", "states-0"]
    second = Folder(folder.path)
    with pytest.raises(StoreError, match="in use by process"):
        second.lock()
    second.close()
    (folder.path / "last").unlink()
    left = folder.path / f"tmp-{folder.run.hex()}-states-1"
    left.write_bytes(b"MSD")  # killed while it was written
    folder.remove()
    folder.close()
    assert not folder.path.exists()


SYSTEMS_OWN = [".DS_Store", "._run", ".nfs0000000012af34000001", ".fuse_hidden0000a1b", "Thumbs.db"]


def test_files_of_the_system_do_not_block_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    leave_broken(path, 9, 3)
    for name in SYSTEMS_OWN:
        (path / name).write_text("noise")
    assert inspect(path).resumable
    assert summed(path)
    assert sorted(each.name for each in path.iterdir()) == sorted(SYSTEMS_OWN)
    assert summed(path)
    (path / "thesis.tex").write_text("")
    with pytest.raises(StoreError, match=r"no durable run wrote, such as 'thesis\.tex'"):
        summed(path)


@pytest.mark.parametrize("when", ["checked", "locked"])
def test_a_folder_that_its_last_user_removes_meanwhile_is_made_again(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run ended between our opening the folder and locking it: no lock can be made."""
    path, times = tmp_path / "run", iter([True])

    def removed() -> None:
        if next(times, False):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()

    look, lock_file = durable_run.ours_alone, Folder._lock_file
    if when == "checked":
        monkeypatch.setattr(durable_run, "ours_alone", lambda folder: (look(folder), removed()))
    else:
        monkeypatch.setattr(Folder, "_lock_file", lambda self: (lock_file(self), removed())[0])
    assert summed(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_before_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir(0o700)
    mkdir = Path.mkdir

    def refused(self: Path, mode: int = 0o777) -> None:
        try:
            mkdir(self, mode)
        except FileExistsError:
            self.rmdir()  # by its last user
            raise

    monkeypatch.setattr(Path, "mkdir", refused)
    folder = Folder(path, create=True)
    assert folder.made and path.is_dir()
    folder.close()
