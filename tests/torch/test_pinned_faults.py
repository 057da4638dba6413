"""The cascade of pinned memory and a file: every fault at every call of the tier below."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
import torch
from host_streams import pinned
from test_pinned import AsArrays

from multistage.backends import FileStore, MemoryStore
from multistage.errors import StoreError
from multistage.states.layout import Layout
from multistage.torch.tiers.pinned import PinnedCascade

ROOM = 4 * faults.LAYOUT.nbytes  # pinned; three of the four are kept free
N = 16


class AsBytes(AsArrays):
    """What the tier below is given are bytes, as it is for tensors."""

    def open(self, layout: Layout) -> None:
        self._layout = layout
        leaves = [np.zeros(leaf.nbytes, np.uint8) for leaf in layout.leaves]
        self._store.open(Layout.of(leaves))

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        # Copies, since torch warns of arrays that may not be written to.
        return super().put(key, [np.array(array) for array in arrays], block=block)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=faults.quick_folder() or tmp_path) as folder:
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


def cascade(name: str, folder: Path) -> Any:
    if name == "pinned":
        return AsBytes(pinned(None))
    return AsBytes(PinnedCascade(pinned(ROOM), faults.STORES[name](folder)))


def below(store: Any) -> Any:
    return getattr(store._store, "_lower", None)


ABOVE = ("memory", *faults.FILE_ENGINES)
# All that is seen of a fault below is how the store answers, which is the same for each errno and
# for any wrong byte. tests/backends/test_faults.py has every fault in every engine for files.
ANSWERED = (
    *faults.STORE_FAULTS,
    "write error (EIO)",
    "torn write",
    "read error (EIO)",
    "bit flipped",
    "a hundred times slower",
)
CASES = [("memory", fault) for fault in faults.FAULTS]
CASES += [(name, fault) for name in faults.FILE_ENGINES for fault in ANSWERED]
CASES += [("pinned", fault) for fault in faults.STORE_FAULTS]


@pytest.mark.long(but="memory-*")
@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault_at_every_call(name: str, fault: str, quick: Path) -> None:
    total = faults.Outcome()
    for outcome in faults.at_every_call(
        lambda: cascade(name, quick), fault, "overlapped", N, below
    ):
        total += outcome
        assert list(quick.iterdir()) == []
    assert total.exact == total.cases
    assert total.cases >= (1 if fault == "a hundred times slower" else 2)


@pytest.mark.long(but="memory-*")
@pytest.mark.parametrize("fault", faults.OPERATOR_FAULTS)
@pytest.mark.parametrize("name", ["pinned", *ABOVE])
def test_an_operator_raises_at_every_call(name: str, fault: str, quick: Path) -> None:
    outcomes = list(
        faults.raising_cases(
            lambda: cascade(name, quick), "overlapped", faults.OPERATOR_FAULTS[fault], N
        )
    )
    assert len(outcomes) >= 18


@pytest.mark.parametrize("scarce", ["thread", "memory"])
def test_a_failed_open_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    layout = Layout.of(np.zeros(100))
    held = faults._held()
    real, refused = threading.Thread.start, 0
    for at in range(20):
        store = PinnedCascade(pinned(8 << 20), FileStore(tmp_path))
        trigger = faults.Trigger(at)

        def start(self: threading.Thread, trigger: faults.Trigger = trigger) -> None:
            if trigger():
                raise RuntimeError("can't start new thread")
            real(self)

        def host(*_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched:
            if scarce == "thread":
                patched.setattr(threading.Thread, "start", start)
            else:
                patched.setattr(torch, "empty", host)
            try:
                store.open(layout)
            except StoreError as error:
                refused += 1
                assert "cannot be used" in str(error)
            else:
                store.close()
        assert faults._held() == held
        assert list(tmp_path.iterdir()) == []
        if scarce == "memory" or not trigger.struck:
            break
    assert refused >= 1


def test_stores_above_memory_too() -> None:
    """The cascade moves states at all: else nothing above was tried."""
    store = cascade("memory", Path())
    inner = below(store)
    assert isinstance(inner, MemoryStore)
    assert faults.run_case(store, faults.SCHEDULES["overlapped"](N), False).exact
    assert inner.stats.writes >= 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", range(8))
def test_a_read_out_of_order_does_not_deadlock(first: int) -> None:
    """As when a checkpoint was lost: all slots are kept for others that were asked for before."""
    layout = Layout.of(np.zeros(100, np.uint8))
    store = PinnedCascade(pinned(4 * layout.nbytes), MemoryStore())
    store.open(layout)
    states = [np.full(100, key, np.uint8) for key in range(12)]
    for key, state in enumerate(states):
        assert store.put(key, [state], block=True)
        assert store.wait_written(key)
    for key in reversed(range(12)):
        store.prefetch(key)
    for key in (first, *reversed(range(12))):
        assert bytes(store.get(key)[0].numpy()) == bytes(states[key])
    for key in range(12):
        store.drop(key)
    store.close()
