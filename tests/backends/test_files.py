"""Files as a tier: without a name, never left behind, and never trusted blindly."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import files_of
from leaks import descriptors

from multistage.backends import CascadeStore, CheckpointLost, FileStore, MemoryStore
from multistage.backends.compressed import CompressedStore
from multistage.backends.direct import DirectFile
from multistage.backends.files import AioFile, available_engines
from multistage.backends.streamed import StreamedStore
from multistage.errors import (
    ArgumentError,
    CheckpointWarning,
    MultistageError,
    SlowWarning,
    StoreError,
)
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Layout

STATE = np.arange(1000.0)
LAYOUT = Layout.of(STATE)
ENGINES = available_engines()
MEDIA: dict[str, Any] = {"direct": DirectFile, "aiofiles": AioFile}


def opened(folder: Path, engine: Any = "aiofiles", **options: Any) -> FileStore:
    store = FileStore(folder, engine, **options)
    store.open(LAYOUT)
    return store


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_shows_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, nameless: bool
) -> None:
    """Also where others may write, and where a system knows no files without a name."""
    if not nameless:
        monkeypatch.delattr("os.O_TMPFILE", raising=False)
    tmp_path.chmod(0o777)
    mask = os.umask(0)
    try:
        store, other = (opened(tmp_path, engine, buffer_bytes=0) for _ in range(2))
    finally:
        os.umask(mask)
    assert store.put(1, [STATE], block=True)
    assert store.wait_written(1)
    assert list(tmp_path.iterdir()) == []
    files = files_of(tmp_path)
    assert len(files) == 2
    for file in files:
        assert (file.stat().st_mode & 0o777, file.stat().st_nlink) == (0o600, 0)
    other.close()
    tmp_path.chmod(0o000)
    assert store.get(1)[0].tolist() == STATE.tolist()
    tmp_path.chmod(0o700)
    tmp_path.rmdir()
    assert store.put(2, [STATE + 2], block=True)
    assert store.get(2)[0].tolist() == (STATE + 2).tolist()
    store.close()
    tmp_path.mkdir()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_left_after_an_exception(tmp_path: Path, engine: str) -> None:
    def step(x: Any, i: int) -> Any:
        assert i < 10 or files_of(tmp_path)
        if i == 15:
            raise RuntimeError("bang")
        return x + 1

    store = FileStore(tmp_path, engine)  # type: ignore[arg-type]
    costs = Costs(1.0, 2.0, state_bytes=STATE.nbytes, tiers=(Tier("file", 1.0, 1.0),))
    run: Reversal[Any, Any] = Reversal(
        step, lambda x, a, i: a, 20, memory="3 slots", tiers=store, planner="streaming", costs=costs
    )
    with pytest.raises(RuntimeError, match="bang"):
        run.forward(STATE)
    assert files_of(tmp_path) == list(tmp_path.iterdir()) == []


SCRIPT = """
import os, signal, sys
import numpy as np
from multistage.backends import FileStore
from multistage.states.layout import Layout

store = FileStore({folder!r}, {engine!r}, buffer_bytes=0)
state = np.arange(1000.0)
store.open(Layout.of(state))
store.put(1, [state])
assert store.wait_written(1)
print("ready", flush=True)
{end}
"""


def _child(folder: Path, engine: str, end: str) -> subprocess.Popen[str]:
    script = SCRIPT.format(folder=str(folder), engine=engine, end=textwrap.dedent(end))
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long(but=("*-native", "-direct", "*SIGKILL*"))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "end",
    [
        "",
        "raise RuntimeError",
        "sys.exit(3)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_nothing_is_left_when_the_process_ends(tmp_path: Path, engine: str, end: str) -> None:
    child = _child(tmp_path, engine, end)
    out, _ = child.communicate()
    assert out == "ready\n"
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    cases = [(tmp_path / "missing", "create it"), (file, "name one"), (Path("/proc"), "choose")]
    for folder, remedy in cases:
        store = FileStore(folder)
        for use in (store.check, lambda store=store: store.open(LAYOUT)):
            with pytest.raises(StoreError, match=f"{folder.name}.*{remedy}"):
                use()
        store.close()
        with pytest.raises(StoreError, match=remedy):
            Reversal(lambda x, i: x, lambda x, a, i: a, 3, tiers=f"file:{folder}")


def test_check_leaves_nothing(tmp_path: Path) -> None:
    FileStore(tmp_path).check()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="engine='fast' must be one of auto, native, direct"):
        FileStore(tmp_path, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer_bytes", [0, 200_000])
def test_damaged_files_are_never_believed(tmp_path: Path, buffer_bytes: int) -> None:
    """A flipped bit costs the states of its extent alone; `faults.DAMAGE` has the rest."""
    store = opened(tmp_path, buffer_bytes=buffer_bytes)
    for key in range(20):
        assert store.put(key, [STATE + key], block=True)
        assert store.wait_written(key)
    # Wait for all writes: a read comes behind them.
    written = [store.get(key)[0].tolist() == (STATE + key).tolist() for key in (0, 19)]
    assert written == [True, True]
    in_extents = store.per_extent(LAYOUT) > 1
    keys, at = ([4, 5, 6, 7], 32768) if in_extents else ([1], 8192)  # in the second extent
    (file,) = files_of(tmp_path)
    with file.open("r+b", buffering=0) as harmed:
        harmed.seek(at + 2000)
        byte = harmed.read(1)[0]
        harmed.seek(at + 2000)
        harmed.write(bytes([byte ^ 4]))
    for key in reversed(range(20)):
        if key in keys:
            with pytest.raises(CheckpointLost, match="read failed"):
                store.get(key)
            with pytest.raises(CheckpointLost, match="no checkpoint"):
                store.get(key)
        else:
            assert store.get(key)[0].tolist() == (STATE + key).tolist()
    assert store.stats.lost == len(keys)
    store.close()


@pytest.mark.parametrize("engine", MEDIA)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, code: int
) -> None:
    kind = MEDIA[engine]
    write = kind.write

    def limited(self: Any, slot: int, offset: int, data: Any) -> None:
        if slot >= 3:
            raise OSError(code, os.strerror(code))
        write(self, slot, offset, data)

    monkeypatch.setattr(kind, "write", limited)
    store = opened(tmp_path, engine, buffer_bytes=0)
    assert [store.put(key, [STATE], block=True) for key in range(3)] == [True] * 3
    assert store.put(3, [STATE], block=True)
    assert [store.wait_written(key) for key in range(4)] == [True, True, True, False]
    with pytest.raises(CheckpointLost):
        store.get(3)
    with pytest.warns(CheckpointWarning, match="no space is left"):
        assert not store.put(4, [STATE])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.put(5, [STATE], block=True)  # told once
        store.drop(2)
        assert store.put(6, [STATE + 6], block=True)  # room that was freed serves again
    assert store.get(6)[0].tolist() == (STATE + 6).tolist()
    assert store.stats.refused == 2
    store.close()


def test_an_error_that_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failing = DirectFile.write, [False, True, False]

    def flaky(self: DirectFile, slot: int, offset: int, data: Any) -> None:
        if failing and failing.pop(0):
            raise OSError(errno.EIO, "Input/output error")
        write(self, slot, offset, data)

    monkeypatch.setattr(DirectFile, "write", flaky)
    store = opened(tmp_path, "direct", buffer_bytes=0)
    for key in range(3):
        assert store.put(key, [STATE + key], block=True)
    assert [store.wait_written(key) for key in range(3)] == [True, False, True]
    assert store.get(2)[0].tolist() == (STATE + 2).tolist()
    assert store.stats.lost == 1
    store.close()


def test_partial_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write and read less than it is asked for."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:4096], at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:4096]], at))
    store = opened(tmp_path, "direct", buffer_bytes=0)
    for key in range(3):
        assert store.put(key, [STATE + key], block=True)
    for key in range(3):
        assert store.get(key)[0].tolist() == (STATE + key).tolist()
    store.close()


def test_filesystems_without_direct_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, system_open = getattr(os, "O_DIRECT", 0), os.open
    if not direct:
        pytest.skip("no O_DIRECT here")

    def refusing(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refusing)
    medium = DirectFile(tmp_path)
    assert not medium.direct
    medium.begin(2, 4096)
    medium.write(2, 0, np.full(4096, 7, np.uint8))
    data = np.zeros(4096, np.uint8)
    medium.read(2, data)
    assert (data == 7).all()
    medium.close()
    medium.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["native", "direct"])
def test_devices_with_larger_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """O_DIRECT is taken at `open`, and every transfer of a page is refused (EINVAL)."""
    if engine not in available_engines():
        pytest.skip("the C core was not built")

    def pwritev(fd: int, *_: object) -> int:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", pwritev)
    before, store = descriptors(), FileStore(tmp_path, engine, buffer_bytes=0)
    layout = Layout.of(np.zeros(1000))
    with pytest.warns(SlowWarning, match="larger blocks"):
        store.open(layout)
    assert store.put(1, [np.arange(1000.0)], block=True)
    assert store.get(1)[0].tolist() == list(range(1000))
    store.close()
    assert descriptors() == before


def test_the_disk_taken_stays_within_the_capacity(tmp_path: Path) -> None:
    capacity = 5 * 8192
    store = opened(tmp_path, "direct", capacity_bytes=capacity, buffer_bytes=0)
    for key in range(5):
        assert store.put(key, [STATE], block=True)
        assert store.wait_written(key)
        medium = store._stream._medium
        assert isinstance(medium, DirectFile)
        taken = os.fstat(medium.fd)
        assert max(taken.st_size, taken.st_blocks * 512) <= capacity
    store.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_can_be_closed_where_an_event_loop_runs(tmp_path: Path, engine: str) -> None:
    """As in a notebook, whose cells run inside a loop."""

    async def cell() -> None:
        store = opened(tmp_path, engine, buffer_bytes=0)
        assert store.put(1, [STATE], block=True)
        assert store.get(1)[0].tolist() == STATE.tolist()
        store.close()

    asyncio.run(cell())


def test_a_forked_child_leaves_its_parents_files(tmp_path: Path) -> None:
    child = _child(
        tmp_path,
        "aiofiles",
        """
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)
        assert store.get(1)[0].tolist() == state.tolist()
        print("still there")
        """,
    )
    out, _ = child.communicate()
    assert out == "ready\nstill there\n"
    assert list(tmp_path.iterdir()) == []


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
    "inodes": (os, "open", _system_error(errno.ENOSPC)),
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


@pytest.mark.parametrize("kind", [*ENGINES, "cascade", "blosc"])
@pytest.mark.parametrize("buffer_bytes", [0, 200_000])
@pytest.mark.parametrize("scarce", SCARCE)
def test_a_store_that_cannot_open_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, buffer_bytes: int, scarce: str
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
    assert store._stream is None
