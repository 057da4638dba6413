"""The front door: exact gradients, plain errors, nothing left behind."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import CHAINS, digest, raw, store_all
from chains import TAPED as TAPED_CHAINS

from multistage.backends import FileStore, MemoryStore, Store
from multistage.errors import ArgumentError, BudgetError, StateError
from multistage.measurement.seen import drifted
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, Plan
from multistage.reversal import Reversal, reverse
from multistage.support import free_memory as limits

N = 33
COSTS = Costs(1.0, 2.0, state_bytes=10, tiers=(Tier("file", 2.0, 2.0),))
TAPED = Costs(
    1.0, 2.0, tape_step_s=1.2, tape_bytes=20, state_bytes=10, tiers=(Tier("file", 2.0, 2.0),)
)
TIERS: dict[str, Callable[[Path], str | Store | None]] = {
    "none": lambda folder: None,
    "memory": lambda folder: "memory:64MiB",
    "file": lambda folder: FileStore(folder),
    "direct": lambda folder: FileStore(folder, "direct"),
    "aiofiles": lambda folder: f"file:{folder}?engine=aiofiles&buffers=0",
}


def sines(n: int | None = N, **options: Any) -> Reversal[Any, Any]:
    options.setdefault("memory", "5 slots")
    options.setdefault("costs", COSTS)
    return Reversal(lambda x, i: np.sin(x) + i, lambda x, a, i: np.cos(x) * a, n, **options)


def sweep(run: Reversal[Any, Any], **options: Any) -> tuple[list[float], list[float]]:
    last = run.forward(np.linspace(0, 1, 4), **options)
    return last.tolist(), run.reverse(np.ones(4)).tolist()


def sines_answer(n: int = N) -> tuple[list[float], list[float]]:
    states = [np.linspace(0, 1, 4)]
    for i in range(n):
        states.append(np.sin(states[-1]) + i)
    adjoint = np.ones(4)
    for x in reversed(states[:-1]):
        adjoint = np.cos(x) * adjoint
    return states[-1].tolist(), adjoint.tolist()


# ------------------------------------------------------------------ gradients


@pytest.mark.long(but=("auto-*", "streaming-*", "*-nested-*"))
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("planner", ["auto", *PLANNERS])
def test_gradients_are_those_of_store_all(
    planner: str, chain: str, tier: str, tmp_path: Path
) -> None:
    slots = 3 * N if planner in ("store-all", "periodic", "recursive") else 6
    with Reversal(
        CHAINS[chain][0](),
        n_steps=N,
        memory=f"{slots} slots",
        tiers=TIERS[tier](tmp_path),
        planner=planner,
        costs=TAPED if chain in TAPED_CHAINS else COSTS,
        checked=True,
    ) as run:
        for _ in range(2):
            last = raw(run.forward(CHAINS[chain][1]()))
            assert (last, run.reverse(1)) == store_all(chain, N)
            assert run.report().counts.reverse_steps == N
            assert run.report().counts.peak_slots <= slots
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("chain", ["nested", "tape", "in-place", "in-place-tape", "blocks-tape"])
def test_measured_costs(chain: str, tmp_path: Path) -> None:
    with Reversal(
        CHAINS[chain][0](), n_steps=N, memory="64 KiB", tiers=FileStore(tmp_path, buffer_bytes=0)
    ) as run:
        assert run.costs is None
        for _ in range(3):
            last = raw(run.forward(CHAINS[chain][1]()))
            assert (last, run.reverse(1)) == store_all(chain, N)
        assert run.costs.forward_step_s > 0


def test_unknown_number_of_steps() -> None:
    seen = []

    def until(x: Any, i: int) -> bool:
        seen.append((i, float(x[0])))
        return i == N

    for tier in (None, "memory:"):
        seen.clear()
        with sines(None, tiers=tier, checked=True) as run:
            assert sweep(run, until=until) == sines_answer()
            assert [i for i, _ in seen] == list(range(1, N + 1))
            assert seen[-1][1] == sines_answer()[0][0]
            assert run.report().n_steps == N
            assert sweep(run, until=lambda x, i: i == 7) == sines_answer(7)
            assert sweep(run, until=lambda x, i: True) == sines_answer(1)


def test_hindsight_is_planned_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sweep of unknown length the gradient comes first; Ctrl-C later cannot lose it."""
    planned: list[int] = []
    online, interrupt = PLANNERS["online"], [True]

    def counted(costs: Costs, slots: int, n_steps: int | None) -> Plan:
        planned.append(n_steps or 0)
        if interrupt.pop() if interrupt else False:
            raise KeyboardInterrupt
        return online(costs, slots, n_steps)

    monkeypatch.setitem(PLANNERS, "online", counted)
    with sines(None) as run:
        assert sweep(run, until=lambda x, i: i == 7) == sines_answer(7)
        assert planned == []
        with pytest.raises(KeyboardInterrupt):
            run.report()
        report = run.report()
        assert run.plan is report.plan and report.plan.n_steps == 7
        assert planned == [7, 7]
        run.forward(np.zeros(4), lambda x, i: i == 9)
        assert run.plan is None and run.report() is report  # of the sweep before
        assert sweep(run, until=lambda x, i: i == 9) == sines_answer(9)
        assert planned == [7, 7]
        assert run.plan.n_steps == 9
        assert run.report().plan is run.plan
        assert planned == [7, 7, 9]


def test_in_one_call() -> None:
    result = reverse(
        lambda x, i: np.sin(x) + i,
        lambda x, a, i: np.cos(x) * a,
        np.linspace(0, 1, 4),
        np.ones_like,
        N,
        memory="5 slots",
        costs=COSTS,
    )
    assert (result.last_state.tolist(), result.adjoint.tolist()) == sines_answer()
    assert result.report.n_steps == N


def test_one_step() -> None:
    for planner in ("auto", *PLANNERS):
        with sines(1, tiers="memory:", planner=planner, checked=True) as run:
            assert sweep(run) == sines_answer(1)


def test_the_front_door_allows_another_layout() -> None:
    with sines(tiers="memory:") as run:
        assert sweep(run) == sines_answer()
        last = run.forward(np.zeros((50, 50)))
        assert run.reverse(last).shape == (50, 50)
        assert sweep(run) == sines_answer()


# ------------------------------------------------------------------------ life


def test_another_layout_gives_the_first_sweep_up() -> None:
    start = np.linspace(0, 1, 4).copy()  # its own memory: marked read-only, not copied
    with sines(tiers="memory:") as run:
        run.forward(start)
        assert not start.flags.writeable
        run.forward(np.zeros((50, 50)))
        assert start.flags.writeable


# ------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n": 0}, ArgumentError, "n_steps=0"),
        ({"n": -3}, ArgumentError, "n_steps=-3"),
        ({"n": 2.5}, ArgumentError, "n_steps=2.5"),
        ({"n": True}, ArgumentError, "n_steps=True"),
        ({"n": "10"}, ArgumentError, "n_steps='10'"),
        ({"costs": {}}, ArgumentError, "costs={} must be Costs"),
        ({"durable": 7, "tiers": None}, ArgumentError, "durable=7 must be the name of a folder"),
        ({"durable": "", "tiers": None}, ArgumentError, "durable='' must be the name of a folder"),
        ({"durable": "a\0b", "tiers": None}, ArgumentError, "must be the name of a folder"),
        ({"tiers": "file:///a%00b"}, ArgumentError, "must be the name of a folder"),
        ({"memory": "-5 slots"}, ArgumentError, "'-5 slots': slots must be a whole number"),
        ({"memory": "2.5 slots"}, ArgumentError, "'2.5 slots': slots must be a whole number"),
        ({"memory": "slots"}, ArgumentError, "'slots': slots must be a whole number"),
        ({"memory": "0 slots"}, BudgetError, "0 slots < 1 slot needed|0 slots < 1 slot"),
        ({"memory": -1}, ArgumentError, "-1"),
        ({"memory": "some"}, ArgumentError, "some"),
        ({"memory": "3 slits"}, ArgumentError, "3 slits"),
        ({"tiers": "ftp://there"}, ArgumentError, "is not known; write file:"),
        ({"tiers": "scratch"}, ArgumentError, "is not known"),
        ({"tiers": "file:///tmp?speed=9"}, ArgumentError, "unknown option 'speed'"),
        ({"planner": "fastest"}, ArgumentError, "choose 'auto' or one of store-all, "),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = dict(options)
    with pytest.raises(error, match=message):
        sines(options.pop("n", N), **options)


def test_bad_operators() -> None:
    with pytest.raises(ArgumentError, match="needs an adjoint_step"):
        Reversal(lambda x, i: x, n_steps=3)
    with pytest.raises(ArgumentError, match="adjoint_step=3 must be callable"):
        Reversal(lambda x, i: x, 3)
    with pytest.raises(ArgumentError, match="go with a plain step"):
        Reversal(CHAINS["nested"][0](), digest, 3)
    with pytest.raises(ArgumentError, match="must be callable or None"):
        FunctionChain(lambda x, i: x, digest, tape_step=3)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (1.0, "plain numpy.ndarray"),
        ([np.zeros(3), 2], r"leaf \[1\] is int"),
        ({"x": [1.0]}, r"leaf \['x'\]\[0\] is float"),
        (np.array([None]), "holds Python objects"),
        ({"x": np.zeros(2), "y": None}, r"leaf \['y'\] is NoneType"),
        ((), "at least one"),
        (np.ma.masked_array([1.0]), "MaskedArray"),
    ],
)
def test_bad_states(state: Any, message: str) -> None:
    calls = []
    with (
        Reversal(lambda x, i: calls.append(i) or x, digest, 3, memory="2 slots") as run,
        pytest.raises(StateError, match=message),
    ):
        run.forward(state)
    assert not calls


def test_a_budget_below_one_state() -> None:
    with sines(memory="1 KiB") as run, pytest.raises(BudgetError, match="raise the budget"):
        run.forward(np.zeros(1000))
    # The tier's buffers are paid from it as well.
    with (
        sines(memory="64 KiB", tiers=MemoryStore()) as run,
        pytest.raises(BudgetError, match=r"I/O buffers"),
    ):
        run.forward(np.zeros(10))


def test_the_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: 6400)
    assert limits.default_budget_bytes() == 1600
    with sines(memory=None) as run:
        run.forward(np.zeros(8))
        assert run.plan.slots == 25


# ------------------------------------------------------------------ the details


def test_costs_drift() -> None:
    one = Costs(1.0, 2.0, tiers=(Tier("file", 4.0, 2.0),))
    assert not drifted(one, one)
    assert not drifted(one, Costs(1.2, 2.4, tiers=(Tier("file", 4.8, 2.4),)))
    assert drifted(one, Costs(10.0, 20.0, tiers=(Tier("file", 40.0, 20.0),)))
    assert not drifted(one, Costs(1.0, 2.5, tiers=(Tier("file", 4.0, 2.0),)))
    assert drifted(one, Costs(1.0, 2.7, tiers=(Tier("file", 4.0, 2.0),)))
    assert drifted(one, Costs(1.0, 1.5, tiers=(Tier("file", 4.0, 2.0),)))
    assert drifted(one, Costs(1.0, 2.0, tiers=(Tier("file", 6.0, 2.0),)))
    assert drifted(one, Costs(1.0, 2.0, tiers=(Tier("file", 4.0, 1.0),)))


@pytest.mark.parametrize("tier", [None, "memory:?buffers=0"])
def test_given_costs_are_corrected_by_what_a_sweep_shows(tier: str | None) -> None:
    """Also where only their scale is wrong, which changes the prediction alone."""
    hours = Tier("slow", 7200.0, 7200.0)
    given = Costs(3600.0, 7200.0, tiers=() if tier is None else (hours,))
    with sines(costs=given, memory="3 slots", tiers=tier, planner="interval") as run:
        assert sweep(run) == sines_answer()
        first = run.report()
        assert first.plan.makespan_s > 3600 * N
        assert sweep(run) == sines_answer()
        assert run.report().plan.costs == first.seen
        assert run.report().plan.makespan_s < 3600
        if tier is not None:
            moved, seconds = first.timeline.bytes["write"], first.timeline.totals_s["write"]
            assert moved
            assert first.seen.tiers[0].write_s == pytest.approx(seconds * 64 / moved)


@pytest.mark.parametrize(("planned_s", "kept"), [(7200.0, True), (1e-12, False)])
@pytest.mark.parametrize("name", ["memory:?buffers=0", "memory:?buffers=0 + memory:1GiB?buffers=0"])
def test_a_share_of_a_bandwidth_that_others_leave_idle(
    name: str, planned_s: float, kept: bool
) -> None:
    """Rates that a sweep sees are divided already where others transfer, and too high else."""
    tier = Tier("slow", planned_s, planned_s)
    for share in (1, 8):
        shared = name.replace("=0", f"=0&share={share}")
        costs = Costs(3600.0, 7200.0, tiers=(tier,))
        with sines(costs=costs, memory="3 slots", tiers=shared, planner="interval") as run:
            assert sweep(run) == sines_answer()
            assert run.costs is not None and run.costs.forward_step_s < 1.0
            (found,) = run.costs.tiers
            assert (found == tier) == (kept and share > 1)
            assert found.write_s > planned_s or kept


def test_a_given_plan_stays() -> None:
    made = PLANNERS["revolve"](COSTS, 5, N)
    with sines(planner=made, costs=None) as run:
        for _ in range(3):
            assert sweep(run) == sines_answer()
            assert run.plan is made


def test_a_report_is_of_the_sweep_that_was_stopped_last() -> None:
    """Not of the one before, where the last one did not come to its first step."""
    left = [20]

    def step(x: Any, i: int) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("an operator")
        return np.sin(x)

    with Reversal(step, lambda x, a, i: a, N, memory="5 slots", costs=COSTS) as run:
        with pytest.raises(RuntimeError):
            run.forward(np.ones(4))
        assert "of 33 steps run forward" in run.report().ended
        with pytest.raises(StateError):
            run.forward("no state")
        with pytest.raises(ArgumentError, match="stopped by StateError before its first step"):
            run.report()


def test_a_closed_run_gives_the_memory_of_its_checkpoints_back() -> None:
    """The copies of an in-place chain are kept for the next sweep, until `close`."""
    state = np.zeros(1 << 15)
    chain: InPlaceChain[Any, Any] = InPlaceChain(
        lambda x, i, j: np.add(x, j - i, out=x), lambda x, a, i: a
    )
    costs = Costs(1.0, 2.0, state_bytes=state.nbytes)
    tracemalloc.start()
    try:
        with Reversal(chain, n_steps=N, memory="8 slots", costs=costs) as run:
            for _ in range(2):
                run.forward(state)
                run.reverse(1)
            assert tracemalloc.get_traced_memory()[0] > 8 * state.nbytes
        assert tracemalloc.get_traced_memory()[0] < state.nbytes
        assert run.report().counts.peak_slots == 8
    finally:
        tracemalloc.stop()


def test_several_tiers_are_measured_and_what_is_no_planner_is_refused() -> None:
    with sines(costs=None, tiers=["memory:", MemoryStore()], memory="6 slots") as run:
        assert len(run.prepare(np.linspace(0, 1, 4)).costs.tiers) == 2
        assert sweep(run) == sines_answer()
    with pytest.raises(ArgumentError, match="a name, a Plan or a callable"):
        sines(planner=3)
