"""Chains whose tier is late: runs go on without it, to the bits of plain training."""

from __future__ import annotations

import contextlib
import gc
import operator
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from fuzz_tiers import CPU, PAGE, same  # noqa: E402
from leaving import by_chance, said_late  # noqa: E402
from test_tiers import costs_of_deep, deep, results  # noqa: E402
from tierfuzz.chains import chain  # noqa: E402
from tierfuzz.faults import Pace, poisoned  # noqa: E402
from tierfuzz.late import as_planned, course  # noqa: E402
from tierfuzz.plans import random_plan  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import multistage.torch as mst  # noqa: E402
from multistage import native  # noqa: E402
from multistage.actions import Await, Evict  # noqa: E402
from multistage.backends import MemoryStore  # noqa: E402
from multistage.errors import CheckpointWarning  # noqa: E402
from multistage.execute import late as late_tiers  # noqa: E402
from multistage.execute.late import Late, Stages  # noqa: E402
from multistage.execute.sweep import Moved  # noqa: E402
from multistage.model.tier import Tier  # noqa: E402
from multistage.planners import Plan  # noqa: E402
from multistage.planners.chain.heterogeneous import plan_chain  # noqa: E402
from multistage.states.layout import Layout  # noqa: E402
from multistage.torch.chains.holdings import Holdings  # noqa: E402
from multistage.torch.chains.runner import Run  # noqa: E402
from multistage.torch.environment.captured import Snapshot  # noqa: E402
from multistage.torch.environment.scope import Scope  # noqa: E402
from multistage.torch.measurement.exploring import explore  # noqa: E402
from multistage.torch.measurement.measure import measure_stages  # noqa: E402
from multistage.torch.planning import choosing  # noqa: E402
from multistage.torch.planning.choosing import held_by_caller  # noqa: E402
from multistage.torch.tensors.meter import Meter  # noqa: E402
from multistage.torch.tiers import lane, tiered  # noqa: E402
from multistage.torch.tiers.lane import Carried, ChainTier, TierLane  # noqa: E402

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="the table's twin is slow")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("multistage"):
            thread.join(60)
            assert not thread.is_alive(), thread


class Gate(MemoryStore):
    """Takes no page, or gives none back, from some on until it is opened."""

    def __init__(self, *, reads: bool = False, after: int = 0) -> None:
        super().__init__(buffer_bytes=0)
        self.gate = threading.Event()
        self._reads, self._left = reads, after
        self.stopped = 0

    def _pass(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.stopped += not self.gate.is_set()
            assert self.gate.wait(60)

    def put(self, key: int, arrays: Any, *, block: bool = False) -> bool:
        if not self._reads:
            self._pass()
        return super().put(key, arrays, block=block)

    def get(self, key: int) -> Any:
        if self._reads:
            self._pass()
        return super().get(key)


def bound(model: nn.Sequential, plan: Plan, slow: ChainTier) -> Callable[[Tensor], Tensor]:
    x = torch.randn(8, 24, requires_grad=True)
    with Snapshot(Scope(list(model)), [x]):
        _, traits = explore(list(model), [str(k) for k in range(len(model))], x)

    def call(x: Tensor) -> Tensor:
        return Run(list(model), traits, plan.actions, slow, course=course(plan)).forward(x)

    return call


def is_empty(lane: TierLane, tier: MemoryStore) -> bool:
    """Have the room of what was dropped given back; return whether that is all."""
    sent = lane.write([torch.zeros(1, dtype=torch.uint8)])
    assert lane.wait(sent)
    lane.drop(sent)
    assert lane.wait(lane.write([]))
    return tier.stats.stored_bytes == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("times", [1, 2])
def test_random_plans_that_are_left_give_the_bits_of_plain_training(seed: int, times: int) -> None:
    rng = random.Random(seed + 100 * times)
    expected = results(plain := chain(), plain, times)
    tier, taken = MemoryStore(buffer_bytes=0), 0
    slow = ChainTier(tier, CPU, PAGE)
    pace = rng.choice(["free", "eager", "lazy", "mixed"])
    with poisoned(), Pace(rng, pace).kept():
        for _ in range(4):
            model = chain()
            plan = as_planned(rng, random_plan(rng, len(model)), len(model))
            with said_late(by_chance(rng, rng.choice([0.1, 0.3, 1.0]))) as found:
                got = results(model, bound(model, plan, slow), times)
            assert same(got, expected), plan.actions
            taken += len(found)
            found.clear()  # which refers to the run
            gc.collect()
            if slow.opened is not None:
                assert any(is_empty(slow.opened, tier) for _ in range(1000))
    assert taken
    slow.close()


ROWS = 1024


def planned(memory: float, rho: float = 1.0) -> Plan:
    """Return a plan for `deep` and a tier that moves all tapes in `rho` times plain training."""
    costs = held_by_caller(costs_of_deep())
    rate = sum(s.tape_bytes for s in costs.stages) / (rho * plan_chain(costs).plain_s)
    return plan_chain(costs, memory, tiers=Tier.of_rates(rate, rate))


@pytest.mark.parametrize("memory", [0.28, 0.45])
@pytest.mark.parametrize("kind", [Evict, Await])
def test_a_run_without_its_tier_stays_within_the_limit(memory: float, kind: type) -> None:
    plan, model = planned(memory), deep()
    x = torch.randn(ROWS, 24, requires_grad=True)
    names = [str(k) for k in range(len(model))]
    traits = measure_stages(list(model), names, x, costs=costs_of_deep()).traits
    places = [action for action in plan.actions if isinstance(action, kind)]
    assert len(places) > 2
    taken = 0
    for place in places[::2]:
        slow = ChainTier(MemoryStore(buffer_bytes=0), CPU, PAGE)
        with (
            said_late(partial(operator.eq, place)) as found,
            Meter(CPU) as meter,
            nothing_recovered(),
        ):
            meter.ignore([x, *model.parameters(), *model.buffers()])
            y = Run(list(model), traits, plan.actions, slow, course=course(plan)).forward(x)
            y.sum().backward()
            del y
        taken += len(found)
        for tensor in (x, *model.parameters()):
            tensor.grad = None
        assert x.nbytes + meter.peak_bytes <= plan.memory_bytes
        slow.close()
    assert taken


@contextlib.contextmanager
def nothing_recovered() -> Iterator[None]:
    """Fail where a run makes up for what its actions should have had at hand."""

    def recovers(holdings: Holdings, i: int, tape: Any) -> None:
        raise AssertionError(f"tape {i} was not at hand")

    def state(holdings: Holdings, i: int) -> Any:
        found = holdings.at_hand(i)
        assert found is not None, f"state {i} was not at hand"
        return found

    with (
        mock.patch.object(Holdings, "tape_again", recovers),
        mock.patch.object(Holdings, "state", state),
    ):
        yield


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("after", [0, 30])
def test_a_tier_that_stops_is_left_alone(reads: bool, after: int) -> None:
    expected = results(plain := deep(), plain, 2, rows=ROWS)
    plan, model, tier = planned(0.45), deep(), Gate(reads=reads, after=after)
    slow = ChainTier(tier, CPU, PAGE)

    def is_worth(late: Late, sweep: Any, *given: object) -> bool:
        return tier.stopped > 0 or sweep.is_forward != reads

    with mock.patch.object(Late, "_is_worth", is_worth):
        assert same(results(model, bound(model, plan, slow), 2, rows=ROWS), expected)
    assert tier.stopped == 1
    tier.gate.set()
    slow.close()


def test_a_machine_that_is_busy_in_all_is_no_slow_tier() -> None:
    plan = planned(0.45)
    asked = course(plan)
    evict = next(action for action in plan.actions if isinstance(action, Evict))
    rate = plan.tier.write_bytes_per_s  # type: ignore[union-attr]
    for busier, slower in ((5.0, 1.2), (1.0, 6.0)):
        away, sweep = mock.Mock(), mock.Mock()
        away.moved.return_value = Moved(evict.step, evict.tape, True, 0, "memory")
        away.seen_s.return_value = 6 / rate
        sweep.counts.forward_s = busier * asked._forward_s[asked._places[evict]]
        asked.begin(away)
        assert asked._slower(evict, sweep) == pytest.approx(slower)
        assert (asked.waiting_s(evict, sweep) > plan.makespan_s) == (slower > 2)


def test_waiting_takes_what_is_left_of_a_plan() -> None:
    plan = planned(0.45)
    ends = late_tiers._ends(plan, 1.0)
    assert len(ends) == len(plan.actions) and ends[-1] == pytest.approx(plan.makespan_s)
    assert ends == sorted(ends)
    assert late_tiers._ends(plan, 3.0)[-1] > plan.makespan_s


@pytest.fixture
def hooks_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "hooks_s", lambda: 1e-4)


def sequential(tier: MemoryStore, rho: float = 1.0) -> Any:
    """Return a chain that is planned for a tier by the rates of `planned`."""
    rates = planned(0.45, rho).tier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered, "_probed", lambda tier, most: (rates, 0.0))
        x = torch.randn(ROWS, 24, requires_grad=True)
        return mst.Sequential(
            deep(), x, memory=0.45, tiers=tier, costs=costs_of_deep(), check="off"
        )


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_a_chain_is_planned_again_after_a_detour() -> None:
    plain = deep()
    expected = [results(plain, plain, rows=ROWS) for _ in range(2)]
    model = sequential(MemoryStore(buffer_bytes=0))
    before = model.plan
    assert before.writes
    with (
        said_late(lambda action: isinstance(action, Evict)),
        mock.patch.object(Stages, "_slower", lambda *_: 50.0),
    ):
        assert same(results(model, model, rows=ROWS), expected[0])
    assert model.plan.given_up > 0 and model.plan == before
    assert "tapes given up in the last run" in str(model.plan)
    patched = Carried()
    with pytest.MonkeyPatch.context() as patch:  # nothing has arrived: as slow as it was said to be
        patch.setattr(tiered.Tiered, "_look", lambda _: (patched, patched))
        assert same(results(model, model, rows=ROWS), expected[1])
    assert not model.plan.writes and model.plan.given_up == 0
    model.close()


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_a_tier_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tier = deep(), Gate()
    expected = [results(plain, plain, rows=ROWS) for _ in range(3)]
    model = sequential(tier)
    used = model._multistage.tiered
    monkeypatch.setattr(lane, "PATIENCE_S", 0.01)
    with (
        said_late(lambda action: isinstance(action, Evict)),
        mock.patch.object(Stages, "_slower", lambda *_: 50.0),
    ):
        assert same(results(model, model, rows=ROWS), expected[0])
    assert model.plan.given_up > 0
    opened = used._tier._lane
    assert same(results(model, model, rows=ROWS), expected[1])  # planned again, and the tier left
    assert not model.plan.writes and used._tier.is_closing
    used.clock = lambda: 1e9
    assert same(results(model, model, rows=ROWS), expected[2])  # nor is it measured again
    stuck, x = used.stuck_bytes, torch.randn(ROWS, 24, requires_grad=True)
    with Meter(CPU) as meter:
        meter.ignore([x, *model.parameters(), *model.buffers()])
        model(x).sum().backward()
    # What the write that never ends holds is within the limit.
    assert 0 < stuck <= model.plan.memory_bytes - x.nbytes - meter.peak_bytes
    tier.gate.set()
    opened._lane.join(60)
    opened.close()  # after the thread that closes it
    tier.open(Layout.up_to(PAGE))
    opened.close()  # which leaves alone what another has opened
    assert tier.put(0, [torch.zeros(PAGE, dtype=torch.uint8).numpy()])
    tier.close()
    model.close()


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_an_unused_tier_is_tried_again() -> None:
    model = sequential(MemoryStore(buffer_bytes=0), rho=1e6)
    used, now = model._multistage.tiered, [0.0]
    used.clock = lambda: now[0]
    assert not model.plan.writes
    asked: list[float] = []

    def probed(slow: ChainTier, most: int) -> tuple[Tier, float]:
        asked.append(now[0])
        return Tier.of_rates(1e12, 1e12), 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered, "_probed", probed)
        # Nothing is seen of the real rates, which on a busy machine are too slow for a plan.
        patch.setattr(tiered.Tiered, "_look", lambda _: (Carried(), Carried()))
        for second in (0.0, 49.0, 50.0, 51.0):
            now[0] = second
            results(model, model, rows=ROWS)
    assert asked == [50.0] and model.plan.writes
    model.close()


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_an_unused_tier_may_fail() -> None:
    plain, tier = deep(), MemoryStore(buffer_bytes=0)
    model = sequential(tier, rho=1e6)
    used, expected = model._multistage.tiered, results(plain, plain, rows=ROWS)
    used.looked(0.0)
    used.clock = lambda: 1e9
    tier.open(Layout.up_to(PAGE))  # of another
    with pytest.warns(CheckpointWarning, match="could not be measured again: .*another run"):
        assert same(results(model, model, rows=ROWS), expected)
    assert not model.plan.writes
    tier.close()
    model.close()
