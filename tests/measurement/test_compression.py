"""`compress=auto` keeps what is predicted to be faster; reports state what was done."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from chains import kept

from multistage.backends import CascadeStore, CompressedStore, MemoryStore
from multistage.backends.medium import Ram
from multistage.backends.streamed import StreamedStore
from multistage.measurement.compression import choose_compression
from multistage.model.chain import FunctionChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Array, Layout

pytest.importorskip("blosc2")
pytest.importorskip("zfpy")

SIZE = 40_000


class Slow(Ram):
    """A medium that takes its time for every page."""

    def write(self, slot: int, offset: int, data: Array) -> None:
        threading.Event().wait(len(data) / 20e6)
        super().write(slot, offset, data)

    def read(self, slot: int, data: Array) -> None:
        threading.Event().wait(len(data) / 20e6)
        super().read(slot, data)


def smooth() -> Any:
    return np.repeat(np.linspace(0, 1, SIZE // 100), 100)


LAYOUT = Layout.of(smooth())


def chain() -> FunctionChain[Any, Any]:
    return FunctionChain(lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a)


@pytest.mark.parametrize("better", ["none", "blosc"])
def test_the_smaller_prediction_wins(better: str) -> None:
    store = CompressedStore(MemoryStore(), "auto")
    seen: list[tuple[str, Costs]] = []

    def predict(costs: Costs) -> float:
        seen.append((store.choice, costs))
        return 1.0 if store.choice == better else 2.0

    costs = Costs(1e-3, 2e-3, state_bytes=8 * SIZE, tiers=(Tier("memory", 5.0, 5.0),))
    found = choose_compression(costs, (store,), LAYOUT, [smooth()], 10, predict)
    assert [choice for choice, _ in seen] == ["none", "blosc"]
    assert store.choice == better
    assert found is dict(seen)[better]
    assert found.tiers[0].write_s < 5
    with_it, without = ("2 s", "1 s") if better == "none" else ("1 s", "2 s")
    assert f"{with_it} predicted with blosc, {without} without" in store.why
    assert found.tiers[0].write_overhead_s >= 0


def test_equal_predictions_leave_it() -> None:
    upper, lower = CompressedStore(MemoryStore(8 << 20), "auto"), CompressedStore(MemoryStore())
    store = CascadeStore(upper, lower)
    costs = Costs(1e-3, 2e-3, state_bytes=8 * SIZE, tiers=(Tier("memory", 5.0, 5.0),))
    choose_compression(costs, (store,), LAYOUT, [smooth()], 10, lambda _: 1.0)
    assert (upper.choice, lower.choice) == ("none", "blosc")
    assert upper.why and not lower.why


def test_a_slow_tier_is_compressed_to() -> None:
    """20 MB/s for states that shrink fifty times: nothing a busy machine could turn round."""
    n = 60
    store = CompressedStore(StreamedStore("slow", Slow, buffer_bytes=0), "auto")
    with Reversal(chain(), n_steps=n, memory="4 slots", tiers=store, planner="interval") as run:
        run.forward(smooth())
        adjoint = run.reverse(np.ones(SIZE))
        report = str(run.report())
    assert store.choice == "blosc"
    assert "slow+auto: compressed by blosc2 (LZ4, nothing is lost), ratio " in report
    assert "slow+auto: compress=auto: " in report
    expected = kept(chain(), smooth(), np.ones(SIZE), n)[1]
    assert adjoint.tobytes() == expected.tobytes()


def test_given_costs_are_not_measured() -> None:
    store = CompressedStore(MemoryStore(buffer_bytes=0), "auto")
    costs = Costs(1e-3, 2e-3, state_bytes=8 * SIZE, tiers=(Tier("memory", 1e-3, 1e-3),))
    with Reversal(chain(), n_steps=30, memory="4 slots", tiers=store, costs=costs) as run:
        run.forward(smooth())
        run.reverse(np.ones(SIZE))
        assert store.choice == "none"
        assert "memory+auto: not compressed" in str(run.report())


def test_the_report_of_a_lossy_run_says_so() -> None:
    n = 40
    costs = Costs(1e-3, 2e-3, state_bytes=8 * SIZE, tiers=(Tier("memory", 2e-3, 2e-3),))
    tier = "memory:?compress=zfp&tolerance=1e-3&buffers=0"
    with Reversal(
        chain(), n_steps=n, memory="5 slots", tiers=tier, costs=costs, planner="interval"
    ) as run:
        run.forward(np.linspace(0, 1, SIZE))
        found = run.reverse(np.ones(SIZE))
        text = str(run.report())
        data = run.report().to_dict()
    assert "compressed by zfp with tolerance 0.001" in text
    assert "the adjoint is not exact" in data["tiers"][0]["notes"][0]
    expected = kept(chain(), np.linspace(0, 1, SIZE), np.ones(SIZE), n)[1]
    assert found.tobytes() != expected.tobytes()
    np.testing.assert_allclose(found, expected, atol=0.05)
