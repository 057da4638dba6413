"""Object stores: fsspec's memory filesystem, and S3 as moto's server speaks it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leaving import on_time

from multistage.backends import CascadeStore, MemoryStore, RemoteStore, open_store
from multistage.backends.base import CheckpointLost
from multistage.backends.remote import RemoteObjects
from multistage.backends.streamed import StreamedStore
from multistage.backends.testing import check_store
from multistage.errors import ArgumentError, CheckpointWarning, StoreError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Layout

fsspec = pytest.importorskip("fsspec")

LAYOUT = Layout.of(np.zeros(1000))


def state(key: int) -> list[np.ndarray[Any, Any]]:
    return [np.full(1000, float(key))]


@pytest.fixture(scope="module", autouse=True)
def loop() -> None:
    """Start fsspec's threads, which are there for good, before leaks are looked for."""
    from fsspec.asyn import get_loop

    found = get_loop()
    names = ThreadPoolExecutor(1)  # in which a loop looks up addresses
    names.submit(int).result()
    found.call_soon_threadsafe(found.set_default_executor, names)


@pytest.fixture(autouse=True)
def nothing_left(loop: None) -> Iterator[None]:
    yield
    assert fsspec.filesystem("memory").find("/") == []


# ------------------------------------------------------------ memory filesystem


@pytest.mark.long(but="")
@pytest.mark.parametrize(
    "options", ["", "?connections=3&capacity=24MiB", "?buffers=0&capacity=24MiB"]
)
def test_contract(options: str) -> None:
    check_store(lambda: open_store(f"fsspec:memory://tests/run{options}"))


def test_contract_as_the_lower_level() -> None:
    check_store(lambda: open_store("memory:6MiB > fsspec:memory://tests/run"))


def test_objects_lie_under_a_prefix_of_their_own() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/tests/run/mine", b"keep")
    stores = [RemoteStore("memory://tests/run", buffer_bytes=0) for _ in range(2)]
    for number, store in enumerate(stores):
        store.open(LAYOUT)
        assert store.put(1, state(number), block=True)
        assert store.wait_written(1)
    prefixes = {path.split("/")[3] for path in memory.find("/tests/run")} - {"mine"}
    assert len(prefixes) == 2
    assert all(name.startswith(".multistage-") for name in prefixes)
    stores[0].close()
    assert stores[1].get(1)[0][0] == 1
    stores[1].close()
    assert memory.find("/") == ["/tests/run/mine"]
    memory.rm("/tests", recursive=True)


def test_capacity_is_honoured_to_the_byte() -> None:
    memory = fsspec.filesystem("memory")
    store = RemoteStore("memory://tests", capacity_bytes=100_000, buffer_bytes=0)
    store.open(LAYOUT)
    with pytest.warns(CheckpointWarning, match="capacity of 100000 bytes is used"):
        taken = [key for key in range(30) if store.put(key, state(key), block=True)]
    assert all(store.wait_written(key) for key in taken)
    used = sum(memory.size(path) for path in memory.find("/tests"))
    assert len(taken) == store.capacity_states(LAYOUT) == 12
    assert used <= 100_000 < used + 8192
    assert store.stats.refused == 18
    store.close()


def test_objects_left_open_are_removed_at_exit() -> None:
    code = """if True:
        import atexit
        def look():
            print(seen, len(memory.find("/")))
        atexit.register(look)  # called after what is registered later, as by imports
        import numpy as np, fsspec
        from multistage.backends import RemoteStore
        from multistage.states.layout import Layout
        memory = fsspec.filesystem("memory")
        store = RemoteStore("memory://tests", buffer_bytes=0)
        store.open(Layout.of(np.zeros(1000)))
        store.put(1, [np.zeros(1000)], block=True)
        store.wait_written(1)
        seen = len(memory.find("/"))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"], done.stderr


class Faulty:
    """A filesystem that does something wrong at the calls it is told to."""

    async_impl = False

    def __init__(self, wrong: Callable[[str, int], bool]) -> None:
        self._memory = fsspec.filesystem("memory")
        self._wrong = wrong
        self._lock = threading.Lock()
        self.calls = {"pipe_file": 0, "cat_file": 0}

    def _next(self, name: str) -> bool:
        with self._lock:
            number, self.calls[name] = self.calls[name], self.calls[name] + 1
        return self._wrong(name, number)

    def pipe_file(self, path: str, content: bytes) -> None:
        if self._next("pipe_file"):
            raise RuntimeError("a client library's own error")
        self._memory.pipe_file(path, content)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        found: bytes = self._memory.cat_file(path, start=start, end=end)
        return found[:-1] if self._next("cat_file") else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("name", ["pipe_file", "cat_file"])
@pytest.mark.parametrize("size", [1000, 400_000])
def test_faults_lose_checkpoints_and_no_more(name: str, connections: int, size: int) -> None:
    layout = Layout.of(np.zeros(size))
    for fault in range(6):
        faulty = Faulty(lambda called, number, at=fault: (called, number) == (name, at))  # type: ignore[misc]
        store = StreamedStore(
            "faulty",
            lambda filesystem=faulty: RemoteObjects(  # type: ignore[misc]
                filesystem, "/tests/faulty", connections
            ),
            buffer_bytes=0,
        )
        store.open(layout)
        lost = 0
        for key in range(8):
            assert store.put(key, [np.full(size, float(key))], block=True)
        for key in reversed(range(8)):
            try:
                assert store.get(key)[0].tobytes() == np.full(size, float(key)).tobytes()
            except CheckpointLost as error:
                assert "RuntimeError" in str(error) or "ends before" in str(error)
                lost += 1
        store.close()
        assert lost == 1


def test_a_changed_object_is_noticed() -> None:
    memory = fsspec.filesystem("memory")
    store = RemoteStore("memory://tests", buffer_bytes=0)
    store.open(LAYOUT)
    for key in range(2):
        assert store.put(key, state(key), block=True)
        assert store.wait_written(key)
    first, second = sorted(memory.find("/tests"))
    content = bytearray(memory.cat_file(first))
    content[77] ^= 1
    memory.pipe_file(first, bytes(content))
    memory.rm_file(second)
    with pytest.raises(CheckpointLost, match="checksum"):
        store.get(0)
    with pytest.raises(CheckpointLost, match="read failed"):
        store.get(1)
    store.close()


def test_objects_that_cannot_be_removed_are_warned_about() -> None:
    class Stubborn(Faulty):
        def rm(self, path: str, recursive: bool) -> None:
            raise PermissionError("no right to delete")

    medium = RemoteObjects(Stubborn(lambda name, number: False), "/tests/stubborn")
    medium.write(0, 0, np.zeros(4096, np.uint8))
    with pytest.warns(CheckpointWarning, match=r"left under '/tests/stubborn'.*no right"):
        medium.close()
    fsspec.filesystem("memory").rm("/tests", recursive=True)


@pytest.mark.parametrize(
    ("url", "message"),
    [("nosuch://bucket", "name a protocol"), ("hdfs3x://bucket", "name a protocol")],
)
def test_an_unusable_store_raises_when_it_opens(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        RemoteStore(url).open(LAYOUT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://", "must name a bucket"),
        ("fsspec:memory", "must be one of fsspec's"),
        ("s3://key:secret@bucket/run", "must not hold credentials"),
        ("s3://bucket?connections=0", "connections=0 must be at least 1"),
        ("s3://bucket?connections=many", "connections='many' must be a whole number"),
        ("s3://bucket?secret=x", "unknown option 'secret'"),
        ("gs://bucket?endpoint=http://x", "unknown option 'endpoint'"),
        ("s3://bucket?capacity=1GiB > file:///x > ", "on both sides of '>'"),
        ("file:///x > s3://bucket", "needs a capacity"),
    ],
)
def test_invalid_urls_are_named_in_the_error(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        open_store(text)
    assert "secret@" not in str(caught.value)


def test_names() -> None:
    store = open_store("s3://bucket/my%20run?endpoint=http://127.0.0.1:9000&capacity=1TiB&queue=4")
    assert isinstance(store, RemoteStore)
    assert (store.url, store.capacity_bytes) == ("s3://bucket/my run", 1 << 40)
    assert (store.name, store.queue_depth) == ("s3", 4)
    cascade = open_store("memory:1MiB > file:///x?capacity=1GiB > fsspec:memory://run")
    assert isinstance(cascade, CascadeStore)
    upper, lower = cascade.levels
    assert isinstance(upper, MemoryStore)
    assert isinstance(lower, CascadeStore)
    assert cascade.name == "memory>file>memory"


# -------------------------------------------------------------------- S3 (moto)


class Server:
    """moto's S3 server on loopback."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, path: str = "/", method: str = "GET") -> str:
        request = urllib.request.Request(self.url + path, method=method)
        with self._opener.open(request, timeout=60) as answer:
            return str(answer.read(), "utf-8")

    def objects(self) -> int:
        return self.ask("/bucket?list-type=2").count("<Key>")


# It takes a port that is free, and tells which once it listens.
MOTO = """
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def s3(loop: None) -> Iterator[Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    process = subprocess.Popen(
        [sys.executable, "-c", MOTO], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        server = Server(int(process.stdout.readline()))
        server.ask("/bucket", "PUT")
        yield server
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_s3_meets_the_contract(s3: Server, credentials: None) -> None:
    check_store(lambda: open_store(f"s3://bucket/run?endpoint={s3.url}&capacity=24MiB"))
    assert s3.objects() == 0


def test_s3_below_a_disk(s3: Server, credentials: None, tmp_path: Path) -> None:
    n, size = 120, 20_000
    tier = f"file:{tmp_path}?capacity=1MiB&buffers=0 > s3://bucket/run?endpoint={s3.url}&buffers=0"
    seen = 0

    def step(x: Any, i: int) -> Any:
        nonlocal seen
        if i == n - 1:
            seen = s3.objects()
        return np.sin(x) + i

    costs = Costs(1e-3, 2e-3, state_bytes=8 * size, tiers=(Tier("cascade", 1e-3, 1e-3),))
    with (
        on_time(),  # to compute such steps again is faster
        Reversal(
            step, lambda x, a, i: np.cos(x) * a, n, memory="6 slots", tiers=tier, costs=costs,
            planner="interval", checked=True,
        ) as run,
    ):  # fmt: skip
        for _ in range(2):
            last = run.forward(np.linspace(0, 1, size))
            adjoint = run.reverse(np.ones(size))
            assert seen > 10  # the oldest states had gone down by then
            assert run.report().counts.lost == 0
    states = [np.linspace(0, 1, size)]
    for i in range(n):
        states.append(np.sin(states[-1]) + i)
    expected = np.ones(size)
    for x in reversed(states[:-1]):
        expected = np.cos(x) * expected
    assert last.tobytes() == states[-1].tobytes()
    assert adjoint.tobytes() == expected.tobytes()
    assert s3.objects() == 0


def test_states_are_recomputed_after_s3_loses_objects(s3: Server, credentials: None) -> None:
    """Objects deleted under a running job: recomputed, the gradient exact."""
    n = 40

    tier: Any = open_store(f"s3://bucket/run?endpoint={s3.url}&buffers=0")

    def step(x: Any, i: int) -> Any:
        if i == n - 1:
            medium = tier._stream._medium
            medium._filesystem.invalidate_cache()
            medium._filesystem.rm(medium._root, recursive=True)
        return np.sin(x) + i

    costs = Costs(1e-3, 2e-3, state_bytes=8000, tiers=(Tier("s3", 2e-3, 2e-3),))
    with (
        warnings.catch_warnings(),
        on_time(),  # to compute such steps again is faster
        Reversal(
            step, lambda x, a, i: np.cos(x) * a, n, memory="5 slots", tiers=tier, costs=costs,
            planner="interval",
        ) as run,
    ):  # fmt: skip
        warnings.simplefilter("ignore", CheckpointWarning)
        run.forward(np.linspace(0, 1, 1000))
        adjoint = run.reverse(np.ones(1000))
        assert run.report().counts.lost > 0
    states = [np.linspace(0, 1, 1000)]
    for i in range(n - 1):
        states.append(np.sin(states[-1]) + i)
    expected = np.ones(1000)
    for x in reversed(states):
        expected = np.cos(x) * expected
    assert adjoint.tobytes() == expected.tobytes()


def test_s3_without_a_bucket(s3: Server, credentials: None) -> None:
    with pytest.raises(StoreError, match="create the bucket, or name one that exists"):
        open_store(f"s3://nosuch/run?endpoint={s3.url}").open(LAYOUT)
    assert "nosuch" not in s3.ask()


def test_s3_without_credentials(
    s3: Server, credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        open_store(f"s3://bucket/run?endpoint={s3.url}").open(LAYOUT)


def test_s3_without_a_server(credentials: None) -> None:
    pytest.importorskip("s3fs")
    with socket.socket() as held:  # a port where nobody listens, nor can begin to
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(StoreError, match="whether the server can be reached"):
            open_store(f"s3://bucket/run?endpoint=http://127.0.0.1:{port}").open(LAYOUT)
