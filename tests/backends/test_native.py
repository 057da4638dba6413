"""The native engine: its checksum, its faults, one call at a time, and its life."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from leaks import descriptors, native_threads

from multistage import native
from multistage.backends import CheckpointLost, FileStore
from multistage.backends.arena import pages
from multistage.backends.direct import DirectFile
from multistage.backends.files import available_engines
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import check_store
from multistage.errors import CheckpointWarning, StoreError
from multistage.states.layout import Layout

pytestmark = pytest.mark.skipif("native" not in available_engines(), reason="no C core here")

Hook = Callable[[int, int, int, int], int]
PAGE = 4096
# Gathered in three chunks of 2 MiB each, from arrays with gaps between them.
LARGE = {
    "a": np.zeros(3, np.int8),
    "b": np.arange(400_001.0),
    "c": np.zeros((0, 2)),
    "d": np.arange(290_000.0),
}
SMALL = np.arange(1000.0)


def pwrite(fd: int, address: int, nbytes: int, position: int) -> int:
    return os.pwrite(fd, (ctypes.c_char * nbytes).from_address(address), position)


def pread(fd: int, address: int, nbytes: int, position: int) -> int:
    return os.preadv(fd, [(ctypes.c_char * nbytes).from_address(address)], position)


def hooked(
    folder: Path,
    *,
    write: Hook = pwrite,
    read: Hook = pread,
    buffer_bytes: int = 8 << 20,
    threads: int = 2,
) -> StreamedStore:
    store = StreamedStore(
        "hooked", lambda: DirectFile(folder), buffer_bytes=buffer_bytes, bounces=2, threads=threads
    )
    store._hooks = (write, read)
    return store


def failing(move: Hook, at: int, answer: int) -> Hook:
    """Answer the call number `at` with something else than what it was asked for."""
    calls = iter(range(10_000))

    def hook(fd: int, address: int, nbytes: int, position: int) -> int:
        return answer if next(calls) == at else move(fd, address, nbytes, position)

    return hook


@pytest.mark.parametrize("nbytes", [1, 100, 200, 4096, 32769, 100_003, (4 << 20) + 1])
def test_states_of_any_size_come_back_from_the_disk(tmp_path: Path, nbytes: int) -> None:
    state = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    store = FileStore(tmp_path, "native", buffer_bytes=0)
    store.open(Layout.of(state))
    try:
        assert store.put(0, [state])
        assert store.wait_written(0)
        assert store.get(0)[0].tobytes() == state.tobytes()
    finally:
        store.close()


def test_interrupted_and_partial_transfers(tmp_path: Path) -> None:
    """The system may move less than it is asked for, by no whole page, or be interrupted."""

    def sparing(move: Hook) -> Hook:
        calls = iter(range(10**9))

        def hook(fd: int, address: int, nbytes: int, position: int) -> int:
            if next(calls) % 3 == 0:
                return -errno.EINTR
            part = max(PAGE, nbytes // 3 // PAGE * PAGE)
            moved = move(fd, address, part, position)
            return moved if moved == nbytes else moved + 7

        return hook

    check_store(lambda: hooked(tmp_path, write=sparing(pwrite), read=sparing(pread)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("answer", [-errno.EIO, 0, 7])
def test_a_write_that_fails(tmp_path: Path, at: int, answer: int, threads: int) -> None:
    """Three states of three chunks: whichever fails takes its own state along, no other."""
    layout = Layout.of(LARGE)
    store = hooked(tmp_path, write=failing(pwrite, at, answer), threads=threads)
    store.open(layout)
    arrays = {
        key: [(array + key).astype(array.dtype) for array in layout.arrays(LARGE)]
        for key in range(3)
    }
    written = []
    failed = None
    for key in range(3):
        assert store.put(key, arrays[key], block=True)
        written.append(store.wait_written(key))
        if not written[-1]:
            failed = key
    assert written.count(False) == 1
    assert failed is not None
    assert store.stats.lost == 1
    for key in range(3):
        if key == failed:
            with pytest.raises(CheckpointLost, match="no checkpoint"):
                store.get(key)
        else:
            for one, other in zip(store.get(key), arrays[key], strict=True):
                assert one.tobytes() == other.tobytes()
    assert store.put(failed, arrays[failed], block=True)
    assert store.get(failed)[1].tobytes() == arrays[failed][1].tobytes()
    store.close()


def flipping(at: int) -> Hook:
    calls = iter(range(10_000))

    def hook(fd: int, address: int, nbytes: int, position: int) -> int:
        moved = pread(fd, address, nbytes, position)
        if next(calls) == at:
            (ctypes.c_uint8 * nbytes).from_address(address)[nbytes // 5] ^= 16
        return moved

    return hook


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("fault", ["error", "end", "flip"])
def test_a_read_that_fails(tmp_path: Path, at: int, fault: str, threads: int) -> None:
    hooks = {
        "error": failing(pread, at, -errno.EIO),
        "end": failing(pread, at, 0),
        "flip": flipping(at),
    }
    reason = {"error": "Input/output", "end": "file ends", "flip": "checksum does not match"}
    layout = Layout.of(LARGE)
    store = hooked(tmp_path, read=hooks[fault], threads=threads)
    store.open(layout)
    lost = []
    for key in range(3):
        assert store.put(key, layout.arrays(LARGE), block=True)
    for key in range(3):
        try:
            for one, other in zip(store.get(key), layout.arrays(LARGE), strict=True):
                assert one.tobytes() == other.tobytes()
        except CheckpointLost as error:
            assert reason[fault] in str(error)
            lost.append(key)
    assert len(lost) == 1
    store.close()


def test_small_states_are_lost_with_their_extent(tmp_path: Path) -> None:
    layout = Layout.of(SMALL)
    store = hooked(
        tmp_path, write=failing(pwrite, 1, -errno.EIO), buffer_bytes=6 * 5 * layout.nbytes
    )
    store.open(layout)
    for key in range(40):
        assert store.put(key, [SMALL + key], block=True)
    lost = []
    for key in range(40):
        try:
            assert store.get(key)[0].tolist() == (SMALL + key).tolist()
        except CheckpointLost:
            lost.append(key)
    assert lost == list(range(5, 10))
    store.close()


def test_signals_are_left_to_the_interpreter(tmp_path: Path) -> None:
    store, others = FileStore(tmp_path, "native"), native_threads()
    store.open(Layout.of(SMALL))
    faults = 1 << signal.SIGSEGV - 1
    until = time.monotonic() + 30
    while True:
        blocked = []
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text() == "multistage-io\n":
                lines = (task / "status").read_text().splitlines()
                blocked.append(int(dict(line.split(":", 1) for line in lines)["SigBlk"], 16))
        # A thread that was not scheduled yet still blocks everything.
        if not any(mask & faults for mask in blocked) or time.monotonic() > until:
            break
    store.close()
    assert len(blocked) == 4 + others
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
        assert all(mask >> number - 1 & 1 for mask in blocked)
    assert not any(mask >> signal.SIGSEGV - 1 & 1 for mask in blocked)


def test_a_full_disk_warns_once(tmp_path: Path) -> None:
    layout = Layout.of(SMALL)
    store = hooked(tmp_path, write=failing(pwrite, 2, -errno.ENOSPC), buffer_bytes=0)
    store.open(layout)
    written = []
    for key in range(3):
        assert store.put(key, [SMALL], block=True)
        written.append(store.wait_written(key))
    assert written == [True, True, False]
    with pytest.warns(CheckpointWarning, match="no space is left"):
        assert not store.put(3, [SMALL], block=True)
    store.drop(1)
    assert store.put(4, [SMALL + 4], block=True)
    assert store.get(4)[0].tolist() == (SMALL + 4).tolist()
    store.close()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The real thing: growing the file in steps falls back to what is needed, then fails."""
    script = """
        import resource, sys
        import numpy as np
        from multistage.backends import FileStore
        from multistage.states.layout import Layout
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 8192, 5 * 8192))
        store = FileStore(sys.argv[1], "native", buffer_bytes=0)
        state = np.arange(1000.0)
        store.open(Layout.of(state))
        written = []
        for key in range(7):
            store.put(key, [state + key], block=True)
            written.append(store.wait_written(key))
        assert written == [True] * 5 + [False] * 2, written
        assert all(store.get(key)[0][0] == key for key in range(5))
        store.close()
    """
    _run(script, tmp_path)


def _run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_interpreter_ends_while_states_are_moved(tmp_path: Path) -> None:
    """The threads stop before the memory goes that they work on."""
    script = """
        import sys
        import numpy as np
        from multistage.backends import FileStore
        from multistage.states.layout import Layout
        store = FileStore(sys.argv[1], "native", queue_depth=30)
        state = np.zeros(1 << 18)
        store.open(Layout.of(state))
        for key in range(20):
            assert store.put(key, [state + key])
        for key in range(20):
            store.prefetch(key)
        del state
    """
    for _ in range(3):
        _run(script, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_gets_an_error(tmp_path: Path) -> None:
    script = """
        import os, sys, warnings
        import numpy as np
        from multistage.backends import FileStore
        from multistage.errors import StoreError
        from multistage.states.layout import Layout
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        store = FileStore(sys.argv[1], "native", buffer_bytes=0)
        state = np.arange(1000.0)
        store.open(Layout.of(state))
        store.put(1, [state])
        assert store.wait_written(1)
        pid = os.fork()
        if pid == 0:
            for use in (
                lambda: store.put(2, [state]),
                lambda: store.put(3, [state], block=True),
                lambda: store.get(1),
            ):
                try:
                    use()
                except StoreError as error:
                    assert "forked child" in str(error)
                else:
                    os._exit(3)
            store.close()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.put(2, [state + 2])
        assert store.get(2)[0][0] == 2
        assert store.get(1)[0].tolist() == state.tolist()
        store.close()
    """
    _run(script, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_memory_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes O_DIRECT like a disk, and memory like none."""
    shared = Path("/dev/shm")
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    if ["/dev/shm", "tmpfs"] not in [mount[1:3] for mount in mounts]:
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        store = FileStore(folder, "native")
        store.open(Layout.of(SMALL))
        assert store.put(1, [SMALL])
        assert store.get(1)[0].tolist() == SMALL.tolist()
        store.close()
        assert f"folder {folder!r} lies in memory" in caplog.text
        store.open(Layout.of(SMALL))  # as a run does that has measured it
        store.close()
        assert caplog.text.count("lies in memory") == 1
        caplog.clear()


def test_a_store_that_cannot_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = native_threads(), descriptors()
    for chunk_bytes, allocate in ((100, pages), (4 << 20, _no_memory)):
        store = FileStore(tmp_path, "native", buffer_bytes=0)
        store._chunk_bytes = chunk_bytes
        with monkeypatch.context() as patch:
            patch.setattr("multistage.backends.streamed.pages", allocate)
            with pytest.raises(StoreError, match=r"cannot be used: .*(Invalid|memory)"):
                store.open(Layout.of(SMALL))
        store.close()
        assert (native_threads(), descriptors()) == before
        store._chunk_bytes = 4 << 20
        store.open(Layout.of(SMALL))
        store.close()


def _no_memory(nbytes: int) -> object:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_without_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", None)
    assert available_engines() == ("direct", "aiofiles")
    assert FileStore(tmp_path).engine == "direct"
    store = FileStore(tmp_path, "native")
    with pytest.raises(StoreError, match=r"needs Linux and the C core.*use engine 'auto'"):
        store.open(Layout.of(SMALL))
    assert list(tmp_path.iterdir()) == []


ROOT = Path(__file__).parents[2]


@pytest.mark.long(but="thread")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_a_driver_in_c_under_a_sanitizer(tmp_path: Path, sanitizer: str) -> None:
    compiler, folder = shutil.which("cc"), ROOT / "multistage" / "native"
    sources = [
        folder / f"{name}.c" for name in ("io", "io_bytes", "io_sum", "stream", "stream_parts")
    ]
    if compiler is None or not all(source.exists() for source in sources):
        pytest.skip("needs a C compiler and the sources")
    program = tmp_path / "stress"
    options = ["-g", "-O1", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    empty = [compiler, *options, "-o", str(program), str(tmp_path / "empty.c")]
    if subprocess.run(empty, capture_output=True).returncode:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    files = [*map(str, sources), str(Path(__file__).with_name("stream_stress.c"))]
    subprocess.run([compiler, *options, "-o", str(program), *files], check=True)
    # Without a random layout of memory, which not every version of them can bear.
    plain = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run(
        [*plain, str(program)],
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stderr
