"""Chains whose tier is slower than planned: detours give the bits of plain training."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fuzz_tiers import CPU, PAGE, same  # noqa: E402
from test_tiers import costs_of_deep, deep, results  # noqa: E402
from tierfuzz.chains import chain  # noqa: E402
from tierfuzz.faults import Pace, poisoned  # noqa: E402
from tierfuzz.late import NOW, as_planned, asking, by_chance, said_late  # noqa: E402
from tierfuzz.plans import random_plan  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import multistage.torch as mst  # noqa: E402
from multistage import native  # noqa: E402
from multistage.actions import (  # noqa: E402
    Action,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.backends import MemoryStore  # noqa: E402
from multistage.errors import CheckpointWarning  # noqa: E402
from multistage.execute import detour  # noqa: E402
from multistage.execute.detour import Deadlines  # noqa: E402
from multistage.model.tier import Tier  # noqa: E402
from multistage.planners.chain.heterogeneous import ChainPlan, plan_chain  # noqa: E402
from multistage.planners.chain.joint_rule import DeadlineRule  # noqa: E402
from multistage.torch.chains.away import Away  # noqa: E402
from multistage.torch.chains.runner import Run  # noqa: E402
from multistage.torch.environment.scope import Scope  # noqa: E402
from multistage.torch.measurement.exploring import explore, untouched  # noqa: E402
from multistage.torch.measurement.measure import measure_stages  # noqa: E402
from multistage.torch.planning import choosing  # noqa: E402
from multistage.torch.planning.choosing import held_by_caller  # noqa: E402
from multistage.torch.planning.limited import sends  # noqa: E402
from multistage.torch.tensors.meter import Meter  # noqa: E402
from multistage.torch.tiers import stowage, tiered  # noqa: E402
from multistage.torch.tiers.paging import page_layout  # noqa: E402
from multistage.torch.tiers.porter import Carried  # noqa: E402
from multistage.torch.tiers.stowage import Berth  # noqa: E402

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="the rule's twin is slow")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("multistage"):
            thread.join(60)
            assert not thread.is_alive(), thread


class Gate(MemoryStore):
    """Takes no page until it is opened."""

    def __init__(self) -> None:
        super().__init__(buffer_bytes=0)
        self.gate = threading.Event()

    def put(self, key: int, arrays: Any, *, block: bool = False) -> bool:
        assert self.gate.wait(60)
        return super().put(key, arrays, block=block)


def bound(
    model: nn.Sequential, plan: ChainPlan, berth: Berth, asked: list[Deadlines]
) -> Callable[[Tensor], Tensor]:
    x = torch.randn(8, 24, requires_grad=True)
    with untouched(Scope(list(model)), x):
        _, traits = explore(list(model), [str(k) for k in range(len(model))], x)

    def call(x: Tensor) -> Tensor:
        asked.append(asking(plan))
        stages = list(model)
        return Run(stages, traits, plan.actions, berth, deadlines=asked[-1]).forward(x)

    return call


@contextlib.contextmanager
def nothing_recovered() -> Iterator[None]:
    """Fail where a run makes up for what its plan should have had at hand."""

    def recovers(away: Away, i: int, tape: Any) -> None:
        raise AssertionError(f"tape {i} was not at hand")

    def state(away: Away, i: int) -> Any:
        found = away._memory.at_hand(i)
        assert found is not None, f"state {i} was not at hand"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Away, "tape_again", recovers)
        patch.setattr(Away, "state", state)
        yield


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("times", [1, 2])
def test_detours_from_random_plans_give_the_bits_of_plain_training(seed: int, times: int) -> None:
    rng = random.Random(seed + 100 * times)
    expected = results(plain := chain(), plain, times)
    tier, taken = MemoryStore(buffer_bytes=0), 0
    berth = Berth(tier, CPU, PAGE)
    pace = rng.choice(["free", "eager", "lazy", "mixed"])
    with poisoned(), Pace(rng, pace).kept(), nothing_recovered():
        for _ in range(3):
            model, asked = chain(), []
            plan = as_planned(rng, random_plan(rng, len(model)), len(model))
            late, refuses = (by_chance(rng, rng.choice(odds)) for odds in ([0.2, 1], [0, 0.5]))
            with said_late(late, lambda: rng.choice([1.0, 1.5, 3.0, 10.0, 1e6]), refuses):
                found = results(model, bound(model, plan, berth, asked), times)
            assert same(found, expected), plan.actions
            taken += any(each.detour is not None for each in asked)
            gc.collect()
            if berth.opened is not None:
                berth.opened.wait(berth.opened.send([]))  # after all that was dropped
                assert tier.stats.stored_bytes == 0
    assert taken
    berth.close()


class Leaves:
    """Has a run leave its plan at the first eviction, for some actions."""

    def __init__(self, discard: set[int], actions: list[Action]) -> None:
        self._detour = SimpleNamespace(save=(), discard=discard, actions=actions)

    def begin(self) -> None:
        """Nothing: it does not ask."""

    def at_eviction(self, at: int, step: int, tape: bool, writes: Any) -> Any:
        return self._detour

    def at_turn(self, writes: Any) -> None:
        """Nothing: it has left."""


def test_a_tape_on_a_detour_has_its_state_though_it_would_have_left_by_the_plan() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))

    expected, model = results(plain := make(), plain), make()
    x = torch.randn(8, 24, requires_grad=True)
    with untouched(Scope(list(model)), x):
        _, traits = explore(list(model), ["0", "1", "2"], x)
    actions = [Tape(0), Put(0, tape=True), Evict(0, tape=True), Tape(1), Tape(2), Tape(3)]
    actions += [EndForward(), Reverse(3), Reverse(2), Reverse(1), Get(0, tape=True), Await(1)]
    actions += [Reverse(0), Drop(0, tape=True)]
    detour = [Save(1), Tape(1), Drop(0, tape=True), Free(1), Tape(2), Tape(3), EndForward()]
    detour += [Reverse(3), Reverse(2), Reverse(1), Load(0), Tape(0), Reverse(0)]
    asked: Any = Leaves({0}, detour)
    berth = Berth(MemoryStore(buffer_bytes=0), CPU, PAGE)
    with nothing_recovered():
        run = Run(list(model), traits, actions, berth, deadlines=asked)
        assert same(results(model, run.forward), expected)
    berth.close()


ROWS = 1024


def planned(memory: float, rho: float = 1.0) -> ChainPlan:
    """Return a plan for `deep` and a tier that moves all tapes in `rho` times plain training."""
    costs = held_by_caller(costs_of_deep())
    rate = sum(s.tape_bytes for s in costs.stages) / (rho * plan_chain(costs).plain_s)
    return plan_chain(costs, memory, tiers=Tier.of_rates(rate, rate))


@pytest.mark.parametrize("memory", [0.28, 0.45])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_detour_stays_within_the_limit(memory: float, refuses: bool) -> None:
    plan, model = planned(memory), deep()
    x = torch.randn(ROWS, 24, requires_grad=True)
    names = [str(k) for k in range(len(model))]
    traits = measure_stages(list(model), names, x, costs=costs_of_deep()).traits
    turn = plan.actions.index(EndForward())
    evictions = sum(isinstance(a, Evict) for a in plan.actions[:turn])
    assert evictions > 2
    given_up = 0
    for late in range(0, evictions, 2):
        berth, asked = Berth(MemoryStore(buffer_bytes=0), CPU, PAGE), asking(plan)
        left = iter(range(late, -1, -1))
        is_late = partial(lambda left: next(left, 1) == 0, left)
        with said_late(is_late, lambda: 10.0, lambda: refuses), Meter(CPU) as meter:
            meter.ignore([x, *model.parameters(), *model.buffers()])
            y = Run(list(model), traits, plan.actions, berth, deadlines=asked).forward(x)
            given_up += asked.detour is not None
            y.sum().backward()
            del y
        for tensor in (x, *model.parameters()):
            tensor.grad = None
        assert x.nbytes + meter.peak_bytes <= plan.memory_bytes
        berth.close()
    assert given_up


def test_a_tier_that_stops_writing_is_left_alone() -> None:
    expected = results(plain := deep(), plain, 2, rows=ROWS)
    plan, model, tier = planned(0.45), deep(), Gate()
    berth, asked = Berth(tier, CPU, PAGE), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NOW, "cancel_s", 0.01)
        with said_late(lambda: True, lambda: 1e6):
            assert same(results(model, bound(model, plan, berth, asked), 2, rows=ROWS), expected)
    assert asked[0].detour is not None and tier.stats.bytes_written == 0
    tier.gate.set()
    berth.close()


def test_a_write_that_cannot_be_cancelled_is_completed() -> None:
    expected = results(plain := deep(), plain, rows=ROWS)
    plan, model, tier = planned(0.45), deep(), Gate()
    berth, asked = Berth(tier, CPU, PAGE), []
    at_deadline = DeadlineRule.at_deadline

    def only_with_cancelling(rule: DeadlineRule, at: int, slower: float, **given: Any) -> Any:
        if given:
            tier.gate.set()
            return None
        return at_deadline(rule, at, slower)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NOW, "cancel_s", 0.01)
        patch.setattr(DeadlineRule, "at_deadline", only_with_cancelling)
        with said_late(lambda: not tier.gate.is_set(), lambda: 10.0):
            call = bound(model, plan, berth, asked)
            assert same(results(model, call, rows=ROWS), expected)
    assert asked[0].detour is None and berth.opened is not None
    assert berth.opened.written.rows >= sum(isinstance(a, Evict) for a in plan.actions)
    berth.close()


def test_a_tier_as_fast_as_planned_is_not_asked_about() -> None:
    plan = planned(0.45)
    assert Deadlines(plan).at_eviction(0, 0, True, Written(9, 1.0)) is None
    assert Deadlines(plan).at_turn(Written(0, 1.1)) is None


def test_a_machine_that_is_busy_in_all_is_no_slow_tier() -> None:
    plan = planned(0.45)
    forward_s = sum(stage.forward_s for stage in plan.costs.stages)
    assert Deadlines(plan, ask_s=0).at_turn(Written(0, 6.0, computed_s=5 * forward_s)) is None
    with pytest.raises(AssertionError, match="asked"):
        Deadlines(plan, ask_s=0).at_turn(Written(0, 6.0, computed_s=forward_s))


class Written:
    """Writes that are done after some waits; nothing is asked or cancelled."""

    def __init__(self, waits: int, slower: float, computed_s: float = 0.0) -> None:
        self._waits, self._slower, self._computed_s = waits, slower, computed_s

    def computed_s(self) -> float:
        return self._computed_s

    def written(self, step: int, tape: bool, timeout_s: float) -> bool:
        self._waits -= 1
        return self._waits < 0

    def slower(self, tier: Tier) -> float:
        return self._slower

    def under_way_bytes(self) -> int:
        raise AssertionError("the rule was asked, and takes a detour")

    def cancel(self, timeout_s: float) -> bool:
        raise AssertionError

    def resume(self) -> None:
        raise AssertionError


@pytest.fixture
def hooks_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "hooks_s", lambda: 1e-4)


def sequential(tier: MemoryStore, rho: float = 1.0) -> Any:
    """Return a chain that is planned for a tier by the rates of `planned`."""
    rates = planned(0.45, rho).tier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered, "_probed", lambda berth, most: (rates, 0.0))
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
    assert sends(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detour, "_PER_STAGE_S", 0.0)
        patch.setattr(detour, "_PER_PAIR_S", 0.0)
        with said_late(lambda: True, lambda: 50.0):
            assert same(results(model, model, rows=ROWS), expected[0])
    assert model.plan.given_up > 0 and model.plan == before
    assert "tapes given up in the last run" in str(model.plan)
    patched = Carried()
    with pytest.MonkeyPatch.context() as patch:  # nothing has arrived: as slow as it was said to be
        patch.setattr(tiered.Tiered, "_look", lambda _: (patched, patched))
        assert same(results(model, model, rows=ROWS), expected[1])
    assert not sends(model.plan) and model.plan.given_up == 0
    model.close()


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_a_tier_that_never_answers_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, tier = deep(), Gate()
    expected = [results(plain, plain, rows=ROWS) for _ in range(3)]
    model = sequential(tier)
    used = model._multistage.tiered
    monkeypatch.setattr(detour, "_PER_STAGE_S", 0.0)
    monkeypatch.setattr(detour, "_PER_PAIR_S", 0.0)
    monkeypatch.setattr(stowage, "PATIENCE_S", 0.01)
    with said_late(lambda: True, lambda: 50.0, lambda: True):
        assert same(results(model, model, rows=ROWS), expected[0])
    assert model.plan.given_up > 0
    porter = used._berth._porter
    assert same(results(model, model, rows=ROWS), expected[1])  # planned again, and the tier left
    assert not sends(model.plan) and used._berth.is_closing
    used.clock = lambda: 1e9
    assert same(results(model, model, rows=ROWS), expected[2])  # nor is it measured again
    tier.gate.set()
    porter._thread.join(60)
    porter.close()  # after the thread that closes it
    tier.open(page_layout(PAGE))
    porter.close()  # which leaves alone what another has opened
    assert tier.put(0, [torch.zeros(PAGE, dtype=torch.uint8).numpy()])
    tier.close()
    model.close()


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_an_unused_tier_is_tried_again() -> None:
    model = sequential(MemoryStore(buffer_bytes=0), rho=1e6)
    used, now = model._multistage.tiered, [0.0]
    used.clock = lambda: now[0]
    assert not sends(model.plan)
    asked: list[float] = []

    def probed(berth: Berth, most: int) -> tuple[Tier, float]:
        asked.append(now[0])
        return Tier.of_rates(1e12, 1e12), 0.0

    with pytest.MonkeyPatch.context() as patch, said_late(lambda: False, lambda: 1.0):
        patch.setattr(tiered, "_probed", probed)
        # Nothing is seen of the real rates, which on a busy machine are too slow for a plan.
        patch.setattr(tiered.Tiered, "_look", lambda _: (Carried(), Carried()))
        for second in (0.0, 49.0, 50.0, 51.0):
            now[0] = second
            results(model, model, rows=ROWS)
    assert asked == [50.0] and sends(model.plan)
    model.close()


@pytest.mark.usefixtures("hooks_cost_the_same")
def test_an_unused_tier_may_fail() -> None:
    plain, tier = deep(), MemoryStore(buffer_bytes=0)
    model = sequential(tier, rho=1e6)
    used, expected = model._multistage.tiered, results(plain, plain, rows=ROWS)
    used.looked(0.0)
    used.clock = lambda: 1e9
    tier.open(page_layout(PAGE))  # of another
    with pytest.warns(CheckpointWarning, match="could not be measured again: .*another run"):
        assert same(results(model, model, rows=ROWS), expected)
    assert not sends(model.plan)
    tier.close()
    model.close()
