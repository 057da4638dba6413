"""Folders shared with other users: what is safe, what is refused, what is never followed."""

from __future__ import annotations

import ast
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import multistage
from multistage.backends import CascadeStore, CheckpointLost, FileStore, MemoryStore
from multistage.backends.compressed import CompressedStore
from multistage.backends.files import ENGINES
from multistage.backends.lifetimes import _endings
from multistage.backends.private import PREFIX, PrivateFolder
from multistage.backends.streamed import StreamedStore
from multistage.errors import MultistageError, StoreError
from multistage.states.layout import Layout

STATE = np.arange(1000.0)
LAYOUT = Layout.of(STATE)
FILE_ENGINES = tuple(engine for engine in ENGINES if engine != "auto")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for other users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can reach: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "shared"
        folder.mkdir()
        yield folder


def used(folder: Path) -> None:
    store = FileStore(folder)
    store.open(LAYOUT)
    assert store.put(1, [STATE])
    assert store.get(1)[0].tolist() == STATE.tolist()
    store.close()


def run_as(uid: int, code: str, *arguments: object) -> str:
    """Run Python code as another user; return what it wrote."""
    preamble = f"""
        import os, sys, warnings
        import numpy as np
        from pathlib import Path
        from multistage.backends import FileStore
        from multistage.errors import StoreError
        from multistage.states.layout import Layout
        import tempfile
        with tempfile.TemporaryDirectory() as warm:  # imports that only root may be able to do
            for engine in ("direct", "aiofiles"):
                store = FileStore(warm, engine, buffer_bytes=0)
                store.open(Layout.of(np.zeros(3)))
                assert store.put(1, [np.zeros(3)]) and store.wait_written(1)
                store.close()
        os.setgroups([])
        os.setgid({uid})
        os.setuid({uid})
        STATE = np.arange(1000.0)
        LAYOUT = Layout.of(STATE)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(preamble) + textwrap.dedent(code)]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(Path(multistage.__file__).parents[1])},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


# ------------------------------------------------------------------- which folders


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777, 0o3775])
def test_safe_folders(shared: Path, mode: int) -> None:
    shared.chmod(mode)
    used(shared)
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize(("mode", "who"), [(0o777, "others"), (0o757, "others"), (0o772, "others")])
def test_folders_that_others_may_write_to(shared: Path, mode: int, who: str) -> None:
    shared.chmod(mode)
    for use in (FileStore(shared).check, lambda: FileStore(shared).open(LAYOUT)):
        with pytest.raises(StoreError, match=f"{who} may write to it.*mkdir -m 700 .*shared/own"):
            use()
    assert list(shared.iterdir()) == []


@as_root
def test_folders_that_a_group_may_write_to(shared: Path) -> None:
    shared.chmod(0o770)
    os.chown(shared, 0, 54_321)
    with pytest.raises(StoreError, match="group 54321 may write to it"):
        used(shared)


def test_a_private_group_is_no_other(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    shared.chmod(0o775)
    gid = shared.stat().st_gid
    members: list[str] = []
    me = pwd.struct_passwd(("me", "x", os.geteuid(), gid, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: me)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("me", "x", gid, members)))
    users = [me, pwd.struct_passwd(("root", "x", 0, gid, "", "/", "/bin/sh"))]
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    used(shared)
    users.append(pwd.struct_passwd(("you", "x", 54_321, gid, "", "/", "/bin/sh")))
    with pytest.raises(StoreError, match=f"group {gid} may write to it"):
        used(shared)  # the group's member list leaves out whose primary group it is
    users.pop()
    used(shared)
    members.append("you")
    with pytest.raises(StoreError, match=f"group {gid} may write to it"):
        used(shared)


def access_list(*named: tuple[int, int, int]) -> bytes:
    """Return a POSIX ACL as the kernel has it: rwx for the owner and as the mask."""
    fixed = [(0x01, 7, 2**32 - 1), (0x04, 5, 2**32 - 1), (0x10, 7, 2**32 - 1), (0x20, 0, 2**32 - 1)]
    entries = sorted([*fixed, *named])
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.parametrize(
    ("entry", "refused"),
    [
        ((0x02, 7, 54_321), "lets user 54321 write"),
        ((0x08, 6, 54_321), "lets group 54321 write"),
        ((0x02, 5, 54_321), None),
    ],
)
def test_an_access_control_list_counts(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: tuple[int, int, int],
    refused: str | None,
) -> None:
    """The mode shows the mask in the place of the group's permissions."""
    from multistage.backends import private

    gid, alone = shared.stat().st_gid, private._is_alone
    monkeypatch.setattr(private, "_is_alone", lambda of: of == gid or alone(of))
    try:
        os.setxattr(shared, "system.posix_acl_access", access_list(entry))
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    assert shared.stat().st_mode & stat.S_IWGRP
    if refused is None:
        used(shared)
    else:
        with pytest.raises(StoreError, match=refused):
            used(shared)


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_folders_of_other_users(shared: Path, mode: int) -> None:
    """Root too may not trust them: their owner can exchange what lies in them."""
    os.chown(shared, 54_321, 54_321)
    shared.chmod(mode)
    with pytest.raises(StoreError, match="owned by user 54321, not by you or root; make one"):
        used(shared)


# ------------------------------------------------------------------ several users

NEIGHBOUR = """
    import signal
    folder, theirs = Path(sys.argv[1]), Path(sys.argv[2])
    store = FileStore(folder, "aiofiles", buffer_bytes=0)
    store.open(LAYOUT)
    assert store.put(1, [STATE]) and store.wait_written(1)
    for what in (os.listdir, os.rmdir, lambda p: os.rename(p, folder / "mine")):
        try:
            what(theirs)
        except PermissionError:
            continue
        raise SystemExit("the other user's folder is not private")
    if len(sys.argv) > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    assert store.get(1)[0].tolist() == STATE.tolist()
    store.close()
    print(theirs.exists())
"""


@as_root
@pytest.mark.parametrize("place", ["sticky", "/dev/shm"])
def test_users_share_a_sticky_folder(shared: Path, place: str) -> None:
    shared.chmod(0o1777)
    folder = shared if place == "sticky" else Path(place)
    if not folder.is_dir() or not folder.stat().st_mode & stat.S_ISVTX:
        pytest.skip("no such folder")
    store = FileStore(folder, "aiofiles", buffer_bytes=0)
    store.open(LAYOUT)
    assert store._private is not None
    mine = store._private.path
    try:
        assert store.put(1, [STATE])
        assert store.wait_written(1)
        assert run_as(54_321, NEIGHBOUR, folder, mine) == "True\n"
        assert store.get(1)[0].tolist() == STATE.tolist()
    finally:
        store.close()
    assert not mine.exists()


@as_root
def test_leftovers_of_other_users_stay(shared: Path) -> None:
    shared.chmod(0o1777)
    store = FileStore(shared)
    store.open(LAYOUT)
    assert store._private is not None
    try:
        with pytest.raises(AssertionError):
            run_as(54_321, NEIGHBOUR, shared, store._private.path, "killed")
    finally:
        store.close()
    (left,) = shared.iterdir()
    used(shared)
    assert list(shared.iterdir()) == [left]
    run_as(54_321, "store = FileStore(sys.argv[1]); store.open(LAYOUT); store.close()", shared)
    assert list(shared.iterdir()) == []


# ---------------------------------------------------------------- traps in a folder


@pytest.mark.parametrize("trap", ["link to a folder", "link for a lock", "pipe for a lock"])
def test_traps_among_the_leftovers(tmp_path: Path, trap: str) -> None:
    victim, place = tmp_path / "victim", tmp_path / "place"
    victim.mkdir()
    place.mkdir()
    (victim / "lock").write_text("mine")
    set_trap = place / f"{PREFIX}{15 * '0'}a"
    if trap == "link to a folder":
        set_trap.symlink_to(victim)
    else:
        set_trap.mkdir()
        if trap == "link for a lock":
            (set_trap / "lock").symlink_to(victim / "lock")
        else:
            os.mkfifo(set_trap / "lock")
    used(place)  # a pipe is not waited for
    assert (victim / "lock").read_text() == "mine"
    for left in place.iterdir():
        assert left == set_trap
    set_trap.unlink() if set_trap.is_symlink() else PrivateFolder(place).remove()
    if set_trap.exists():
        (set_trap / "lock").unlink()
        set_trap.rmdir()


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Path]:
    """What a killed process left in `tmp_path`, a checkpoint and all."""
    private = PrivateFolder(tmp_path)
    (private.path / "1").write_bytes(b"checkpoint")
    descriptors = _endings[private._removal._key][0].args[1]  # type: ignore[attr-defined]
    private._removal.forget()  # as the end of the process releases it
    for descriptor in descriptors:
        os.close(descriptor)
    yield private.path
    for path in tmp_path.glob(f"{PREFIX}*"):
        shutil.rmtree(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


FOREIGN: dict[str, Callable[[Path], object]] = {
    "another name": lambda left: left.rename(left.with_name(f"{PREFIX}results")),
    "a longer name": lambda left: left.rename(left.with_name(left.name + "0")),
    "a copy": lambda left: left.rename(left.with_name(f"{PREFIX}{16 * 'a'}")),
    "no marker": lambda left: (left / "lock").write_bytes(b""),
    "another marker": lambda left: (left / "lock").write_text("1234 host\n"),
    "half a marker": lambda left: os.truncate(left / "lock", 20),
    "no lock": lambda left: (left / "lock").unlink(),
    "a folder for a lock": lambda left: ((left / "lock").unlink(), (left / "lock").mkdir()),
}


@pytest.mark.parametrize("change", FOREIGN)
def test_a_folder_that_is_not_a_leftover_stays(tmp_path: Path, left: Path, change: str) -> None:
    FOREIGN[change](left)
    before = contents(tmp_path)
    assert before
    used(tmp_path)
    assert contents(tmp_path) == before


def test_of_a_leftover_only_our_files_go(tmp_path: Path, left: Path) -> None:
    (left / "thesis.tex").write_text("...")
    used(tmp_path)
    assert contents(tmp_path) == {f"{left.name}/thesis.tex": b"..."}
    store = FileStore(tmp_path, "aiofiles", buffer_bytes=0)
    store.open(LAYOUT)
    assert store._private is not None
    mine = store._private.path
    (mine / "thesis.tex").write_text("...")
    store.close()  # nor of a folder that was in use
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]


def test_a_durable_run_is_no_leftover(tmp_path: Path, left: Path) -> None:
    """Whatever its name: a run that was stopped, beside one with a file tier."""
    from multistage import Reversal

    folder = tmp_path / f"{PREFIX}results"
    for name in (folder, tmp_path / f"{PREFIX}{16 * '1'}"):
        run: Any = Reversal(lambda x, i: x + i, lambda x, a, i: a + x, 9, durable=name)
        run.forward(np.ones(3))
        run.close()
    before = {name: data for name, data in contents(tmp_path).items() if left.name not in name}
    used(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_links_in_place_of_our_files_are_not_followed(tmp_path: Path, trap: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"v" * 20_000)
    store = FileStore(tmp_path, "aiofiles", buffer_bytes=0)
    store.open(LAYOUT)
    assert store._private is not None
    for key in (0, 1):
        assert store.put(key, [STATE + key])
        assert store.wait_written(key)
    for name in ("1", "2"):
        file = store._private.path / name
        file.unlink(missing_ok=True)
        file.symlink_to(victim) if trap == "link" else os.mkfifo(file)
    with pytest.raises(CheckpointLost, match="read failed"):
        store.get(1)
    assert store.put(2, [STATE + 2])
    assert store.put(3, [STATE + 3], block=True)
    assert not store.wait_written(3) or not store.wait_written(2)
    assert store.get(0)[0].tolist() == STATE.tolist()
    store.close()
    assert victim.read_bytes() == b"v" * 20_000


@pytest.mark.parametrize("engine", FILE_ENGINES)
def test_a_folder_moved_away_keeps_its_files(tmp_path: Path, engine: Any) -> None:
    """Files are opened in the folder that was looked at, whatever its name leads to by now."""
    place, moved = tmp_path / "place", tmp_path / "moved"
    place.mkdir()
    store = FileStore(place, engine, buffer_bytes=0)
    store.open(LAYOUT)
    place.rename(moved)
    place.mkdir()
    assert store.put(1, [STATE])
    assert store.wait_written(1)
    assert store.get(1)[0].tolist() == STATE.tolist()
    store.close()
    assert list(moved.iterdir()) == list(place.iterdir()) == []


def test_nothing_is_pickled() -> None:
    """No module imports what runs code found in data."""
    banned = {"pickle", "cPickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
    root = Path(multistage.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                whole = ast.unparse(node.func)
                names = {"pickle"} if whole in ("torch.load", "np.load", "numpy.load") else set()
            else:
                continue
            assert not names & banned, f"{path.relative_to(root)}: {names & banned}"


# ------------------------------------------------- a system that gives nothing more


class Failing:
    """A function of the system that fails at one call."""

    def __init__(self, real: Callable[..., Any], at: int, error: BaseException) -> None:
        self.real, self.at, self.error, self.calls = real, at, error, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.real(*arguments, **options)


def _system_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


SCARCE: dict[str, tuple[object, str, Exception]] = {
    "descriptors": (os, "open", _system_error(errno.EMFILE)),
    "inodes": (os, "mkdir", _system_error(errno.ENOSPC)),
    "locks": (fcntl, "flock", _system_error(errno.ENOLCK)),
    "memory": (mmap, "mmap", _system_error(errno.ENOMEM)),
    "memory of Python's": (mmap, "mmap", MemoryError()),
    "threads": (threading.Thread, "start", RuntimeError("can't start new thread")),
}


def _made(kind: Any, folder: Path, buffer_bytes: int) -> StreamedStore:
    """Return a store with a file: of an engine, below memory, or compressed."""
    if kind == "cascade":
        return CascadeStore(
            MemoryStore(1 << 20, buffer_bytes=buffer_bytes),
            FileStore(folder, "direct", buffer_bytes=buffer_bytes),
        )
    if kind == "blosc":
        return CompressedStore(FileStore(folder, "direct", buffer_bytes=buffer_bytes), kind)
    return FileStore(folder, kind, buffer_bytes=buffer_bytes)


@pytest.mark.parametrize("kind", [*FILE_ENGINES, "cascade", "blosc"])
@pytest.mark.parametrize("buffer_bytes", [0, 200_000])
@pytest.mark.parametrize("scarce", SCARCE)
def test_a_store_that_cannot_open_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    buffer_bytes: int,
    scarce: str,
) -> None:
    """Each call that `open` makes of the system fails in turn."""
    owner, name, error = SCARCE[scarce]
    real = getattr(owner, name)
    refused = 0
    for at in range(1, 50):
        store = _made(kind, tmp_path, buffer_bytes)
        failing = Failing(real, at, error)
        method = owner is threading.Thread
        replaced = (lambda self, failing=failing: failing(self)) if method else failing
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, replaced)
            try:
                store.open(LAYOUT)
            except MultistageError as caught:
                refused += 1
                assert str(caught)
            else:
                store.close()
        assert list(tmp_path.iterdir()) == []
        assert not [t for t in threading.enumerate() if t.name.startswith("multistage")]
        store.open(LAYOUT)  # it has survived
        assert store.put(1, [STATE])
        assert store.get(1)[0].tolist() == STATE.tolist()
        store.close()
        store.close()
        if failing.calls < at:
            break
    # The native engine starts no thread of Python's; `test_native` has its own refused.
    assert refused >= (scarce != "threads" or kind != "native")


def test_an_interrupted_close_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, "direct")  # whose threads are Python's
    store.open(LAYOUT)
    join = threading.Thread.join
    interrupted = Failing(join, 1, KeyboardInterrupt())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", lambda self: interrupted(self))
        with pytest.raises(KeyboardInterrupt):
            store.close()
        store.close()
    assert store._carrier is None


class Interrupted:
    """A trace function that raises KeyboardInterrupt before the `at`-th line, in any frame."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupted:
        if event == "line":
            self.at -= 1
            if not self.at:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("what", ["folder", "store"])
def test_a_folder_is_removed_by_a_second_call_if_ctrl_c_came_before_any_line(
    tmp_path: Path, what: str
) -> None:
    store = FileStore(tmp_path, "direct")
    traced = sys.gettrace()
    for at in itertools.count(1):
        private = store._make_private()
        (private.path / "1").write_bytes(b"checkpoint")
        remove = private.remove if what == "folder" else store._give_back
        interrupted = Interrupted(at)
        sys.settrace(interrupted)
        try:
            remove()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
        remove()
        assert list(tmp_path.iterdir()) == []
        assert private._removal.is_done
        if interrupted.at > 0:
            break
    assert at > 10


def test_a_folder_stays_while_threads_may_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, "aiofiles")
    store.open(LAYOUT)
    assert store.put(1, [STATE])
    with monkeypatch.context() as patched:
        patched.setattr(store._carrier, "close", Failing(store.close, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.close()
    assert len(list(tmp_path.iterdir())) == 1
    store.close()
    assert list(tmp_path.iterdir()) == []
