"""A store belongs to one run at a time and to one process; what is dropped ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from leaks import descriptors, native_threads

from multistage import Costs, Reversal, Tier
from multistage.backends import (
    CascadeStore,
    CompressedStore,
    FileStore,
    MemoryStore,
    RemoteStore,
    Store,
    lifetimes,
)
from multistage.backends.lifetimes import Ending, _endings
from multistage.errors import ArgumentError, StoreError
from multistage.execute.executor import Executor
from multistage.model.chain import FunctionChain
from multistage.states.layout import Layout

N = 40
STATE = np.linspace(0.0, 1.0, 600)
LAYOUT = Layout.of(STATE)
COSTS = Costs(1e-3, 1e-3, state_bytes=STATE.nbytes, tiers=(Tier("memory", 1e-3, 1e-3),))
STORES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda folder: MemoryStore(),
    "native": lambda folder: FileStore(folder, "native"),
    "direct": lambda folder: FileStore(folder, "direct"),
    "aiofiles": lambda folder: FileStore(folder, "aiofiles"),
    "remote": lambda folder: RemoteStore("memory://lifetimes"),
    "cascade": lambda folder: CascadeStore(
        MemoryStore(40_000, buffer_bytes=0), FileStore(folder, "direct")
    ),
    "compressed": lambda folder: CompressedStore(MemoryStore()),
}


def step(x: np.ndarray, i: int) -> np.ndarray:
    return np.sin(x) + 0.01 * i


def adjoint_step(x: np.ndarray, a: np.ndarray, i: int) -> np.ndarray:
    return np.cos(x) * a


def run(store: Any, **options: Any) -> Reversal[Any, Any]:
    options.setdefault("planner", "streaming")
    return Reversal(step, adjoint_step, N, memory="6 slots", tiers=store, costs=COSTS, **options)


def plain(state: np.ndarray = STATE) -> bytes:
    states = [state]
    for i in range(N):
        states.append(step(states[-1], i))
    adjoint = np.ones_like(state)
    for i in reversed(range(N)):
        adjoint = adjoint_step(states[i], adjoint, i)
    return adjoint.tobytes()


@pytest.fixture(autouse=True)
def forks_beside_threads() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield


# ------------------------------------------------------------------ one run at a time


@pytest.mark.parametrize("name", STORES)
def test_a_second_run_in_a_store_is_refused_and_the_first_is_exact(
    name: str, tmp_path: Path
) -> None:
    store = STORES[name](tmp_path)
    with run(store) as first, run(store) as second:
        first.forward(STATE)
        with pytest.raises(StoreError, match="holds the checkpoints of another run"):
            second.forward(STATE + 1)
        second.close()  # which closes nothing of the first one's
        assert first.reverse(np.ones_like(STATE)).tobytes() == plain()
        first.forward(STATE)  # two sweeps of one run are one run
        assert first.reverse(np.ones_like(STATE)).tobytes() == plain()
        first.close()
        second.forward(STATE + 1)
        assert second.reverse(np.ones_like(STATE)).tobytes() == plain(STATE + 1)


def test_a_level_belongs_to_the_store_built_on_it(tmp_path: Path) -> None:
    file = FileStore(tmp_path, "direct")
    cascade = CascadeStore(MemoryStore(40_000, buffer_bytes=0), file)
    for taken, others in (
        (cascade, [file, CompressedStore(file), CascadeStore(MemoryStore(40_000), file)]),
        (file, [cascade, CompressedStore(file)]),
        (CompressedStore(file), [file, cascade]),
    ):
        with run(taken) as first:
            first.forward(STATE)
            for other in others:
                with run(other) as second, pytest.raises(StoreError, match="another run"):
                    second.forward(STATE + 1)
            assert first.reverse(np.ones_like(STATE)).tobytes() == plain()
    assert list(tmp_path.iterdir()) == []


def test_a_store_twice_in_one_run_is_refused() -> None:
    store = MemoryStore(1 << 20)
    for twice in (
        lambda: run([store, store]),
        lambda: run([CompressedStore(store), store]),
        lambda: CascadeStore(store, store),
        lambda: CascadeStore(store, CascadeStore(MemoryStore(1 << 20), store)),
        lambda: Executor(FunctionChain(step, adjoint_step), [store, store]),
    ):
        with pytest.raises(ArgumentError, match="'memory' twice"):
            twice()
    with run(["memory:1MiB", "memory:1MiB"], planner="h-revolve") as named:  # two stores
        named.prepare(STATE)


def test_of_threads_that_race_for_a_store_one_gets_it() -> None:
    store, start = MemoryStore(), threading.Barrier(8)
    found: list[bool] = []

    def race() -> None:
        start.wait(60)
        try:
            store.open(LAYOUT)
            found.append(True)
        except StoreError:
            found.append(False)

    for _ in range(20):
        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found.count(True) == 1 and len(found) == 8
        found.clear()
        store.close()


def test_a_closed_store_raises_an_error() -> None:
    store = MemoryStore()
    for use in uses(store):
        with pytest.raises(StoreError, match="closed"):
            use()
    store.open(LAYOUT)
    store.close()
    for use in uses(store):
        with pytest.raises(StoreError, match="closed"):
            use()


@pytest.mark.parametrize("levels", [1, 2])
def test_a_store_whose_medium_cannot_be_closed_is_free_again(
    levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = MemoryStore(1 << 20)
    store = one if levels == 1 else CascadeStore(one, MemoryStore())
    threads = threading.active_count()

    def close(medium: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("the server is gone")

    store.open(LAYOUT)
    monkeypatch.setattr("multistage.backends.medium.Ram.close", close)
    with pytest.raises(RuntimeError, match="server"):
        store.close()
    gc.collect()
    assert threading.active_count() == threads
    store.open(LAYOUT)
    assert store.put(1, [STATE])
    store.close()


def uses(store: Store) -> list[Callable[[], object]]:
    return [
        lambda: store.put(1, [STATE]),
        lambda: store.put(2, [STATE], block=True),
        lambda: store.wait_written(0),
        lambda: store.prefetch(0),
        lambda: store.get(0),
        lambda: store.drop(0),
    ]


# --------------------------------------------------------------------- one process


def in_child(work: Callable[[], None]) -> None:
    """Do something in a forked child that is killed if it hangs; raise what it raised."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        signal.setitimer(signal.ITIMER_REAL, 120.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        said = b"done"
        try:
            work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode()
        os.write(theirs, said)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (code, said) == (0, b"done")


@pytest.mark.parametrize("name", STORES)
def test_a_forked_child_is_refused_at_its_first_call(name: str, tmp_path: Path) -> None:
    store = STORES[name](tmp_path)
    store.open(LAYOUT)
    assert all(store.put(key, [STATE + key], block=True) for key in range(30))

    def child() -> None:
        for use in [*uses(store), lambda: store.open(LAYOUT)]:
            with pytest.raises(StoreError, match="forked child"):
                use()
        store.close()
        store.close()
        if name == "remote":
            return  # fsspec's own loop has no thread there
        store.open(LAYOUT)
        assert all(store.put(key, [STATE - key], block=True) for key in range(30))
        assert store.get(3)[0].tolist() == (STATE - 3).tolist()
        store.close()

    in_child(child)
    for key in reversed(range(30)):
        assert store.get(key)[0].tolist() == (STATE + key).tolist()
    store.close()


@pytest.mark.parametrize("name", [*STORES, "durable"])
def test_a_sweep_in_progress_belongs_to_its_process(name: str, tmp_path: Path) -> None:
    tier = {"durable": tmp_path / "kept"} if name == "durable" else {}
    ours = run(
        None if tier else STORES[name](tmp_path),
        **tier,
        **({} if not tier else {"planner": "auto"}),
    )
    with ours:
        ours.forward(STATE)

        def child() -> None:
            for use in (
                lambda: ours.reverse(np.ones_like(STATE)),
                lambda: ours.forward(STATE),
                lambda: ours.prepare(STATE),
            ):
                with pytest.raises(StoreError, match="forked child"):
                    use()
            ours.close()
            ours.close()
            if name in ("memory", "native"):
                ours.forward(STATE)
                assert ours.reverse(np.ones_like(STATE)).tobytes() == plain()
                ours.close()

        in_child(child)
        if name == "durable":
            assert {"run", "last", "lock"} <= {path.name for path in (tmp_path / "kept").iterdir()}
        assert ours.reverse(np.ones_like(STATE)).tobytes() == plain()
    assert STATE.flags.writeable


def test_a_sweep_in_fast_memory_alone_continues_in_a_child() -> None:
    with run(None, planner="auto") as ours:
        ours.forward(STATE)

        def child() -> None:
            assert ours.reverse(np.ones_like(STATE)).tobytes() == plain()

        in_child(child)
        assert ours.reverse(np.ones_like(STATE)).tobytes() == plain()


@pytest.mark.parametrize(
    ("name", "end"),
    [("native", "exit"), ("direct", "exit"), ("aiofiles", "error"), ("cascade", "_exit")],
)
def test_however_a_child_ends_its_parents_files_stay(name: str, end: str, tmp_path: Path) -> None:
    script = f"""
import os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import numpy as np, warnings
from pathlib import Path
from test_lifetimes import STATE, STORES, plain, run
warnings.simplefilter("ignore", DeprecationWarning)
ours = run(STORES[{name!r}](Path(sys.argv[1])))
ours.forward(STATE)
if not (pid := os.fork()):
    {{"exit": sys.exit, "_exit": os._exit, "error": ours.reverse}}[{end!r}](0)
os.waitpid(pid, 0)
assert ours.reverse(np.ones_like(STATE)).tobytes() == plain()
ours.close()
assert not os.listdir(sys.argv[1])
print("exact")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout == "exact\n", done.stderr


# ---------------------------------------------------------------- dropped, not closed


def threads_of_ours() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("multistage")]


def left(folder: Path) -> object:
    for thread in threading.enumerate():
        if thread.name == "multistage-closing":
            thread.join(60)
    return threads_of_ours(), native_threads(), sorted(descriptors()), list(folder.iterdir())


@pytest.mark.parametrize("when", ["opened", "in the sweep", "after it"])
@pytest.mark.parametrize("name", STORES)
def test_a_dropped_run_leaves_nothing(name: str, when: str, tmp_path: Path) -> None:
    if name == "remote":
        fsspec.filesystem("memory").makedirs("/lifetimes", exist_ok=True)  # its loop begins
    before, state = left(tmp_path), STATE.copy()
    ours = run(STORES[name](tmp_path))
    ours.prepare(state)
    if when != "opened":
        ours.forward(state)
        assert not state.flags.writeable
    if when == "after it":
        ours.reverse(np.ones_like(state))
    del ours
    assert left(tmp_path) == before
    assert state.flags.writeable


@pytest.mark.parametrize("name", ["memory", "native", "direct"])
def test_a_dropped_store_leaves_nothing(name: str, tmp_path: Path) -> None:
    before = left(tmp_path)
    store = STORES[name](tmp_path)
    store.open(LAYOUT)
    assert all(store.put(key, [STATE], block=True) for key in range(200))
    del store
    assert left(tmp_path) == before


def test_a_run_whose_step_is_a_method_of_its_owner_is_collected(tmp_path: Path) -> None:
    """The owner has the run, the run the owner's method: a finalizer must not keep both."""

    class Model:
        def __init__(self) -> None:
            self.run = Reversal(
                self.step, self.adjoint_step, memory="6 slots", tiers=FileStore(tmp_path, "direct"),
                costs=COSTS,
            )  # fmt: skip

        def step(self, x: np.ndarray, i: int) -> np.ndarray:
            return step(x, i)

        def adjoint_step(self, x: np.ndarray, a: np.ndarray, i: int) -> np.ndarray:
            return adjoint_step(x, a, i)

    before, state, model = left(tmp_path), STATE.copy(), Model()
    model.run.forward(state, until=lambda x, i: i == N)
    owner = weakref.ref(model)
    del model
    gc.collect()
    assert owner() is None
    assert left(tmp_path) == before
    assert state.flags.writeable


def test_a_run_that_a_traceback_held_goes_with_it(tmp_path: Path) -> None:
    before, state = left(tmp_path), STATE.copy()

    def fails() -> None:
        ours = run(FileStore(tmp_path, "direct"))
        ours.forward(state)
        raise ZeroDivisionError

    held: list[BaseException] = []
    try:
        fails()
    except ZeroDivisionError as error:
        held.append(error)
    assert left(tmp_path) != before
    held.clear()
    assert left(tmp_path) == before
    assert state.flags.writeable


def test_a_store_collected_in_another_thread_is_closed_in_a_new_thread() -> None:
    """The collector may run in a thread that the store's threads wait for."""
    names: list[str] = []
    store = MemoryStore()
    store.open(LAYOUT)
    before = threads_of_ours()
    held = [store]
    del store
    stream = held[0]._stream
    assert stream is not None and held[0]._ending is not None

    def noted() -> None:
        names.append(threading.current_thread().name)
        stream.close()

    held[0]._ending.forget()
    held[0]._ending = Ending(held[0], noted)
    other = threading.Thread(target=held.clear)
    other.start()
    other.join(60)
    for thread in threading.enumerate():
        if thread.name == "multistage-closing":
            thread.join(60)
    assert names == ["multistage-closing"]
    assert len(before) == 2 and threads_of_ours() == []


def test_an_ending_that_ctrl_c_met_is_made_up_for() -> None:
    """Ctrl-C that comes while garbage is collected is raised in the first callback, and dropped."""

    class Owner:
        pass

    ended: list[str] = []

    def interrupted_once() -> None:
        ended.append("first")
        if len(ended) == 1:
            raise KeyboardInterrupt

    owner, other = Owner(), Owner()
    ending = Ending(owner, interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        ending()
    assert not ending.is_done
    ending()
    assert ended == ["first", "first"] and ending.is_done
    ending()
    due = Ending(other, lambda: ended.append("due"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetimes, "_end", lambda key: None)  # as if interrupted before
        del other
        lifetimes._due.append(_endings[due._key][2][1])  # type: ignore[index]
    assert not due.is_done
    Ending(owner, int).forget()
    assert ended[2:] == ["due"] and due.is_done
