"""Several functionals from one sweep: the bits of as many sweeps, whatever the operators do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from chains import CHAINS, raw, store_all
from unequal_chains import KINDS, Case

from benchmarks.late_tier import Clock, VirtualStore
from multistage import (
    Blocks,
    Costs,
    FunctionChain,
    InPlaceChain,
    Reversal,
    Stage,
    StageCosts,
    Tier,
    plan,
    reverse,
)
from multistage.errors import ArgumentError, StateError
from multistage.execute.executor import Executor
from multistage.model import functionals
from multistage.reversing import uniform

N = 13
COSTS = Costs(1.0, 2.0, tiers=(Tier("memory", 1.5, 1.5),))
START = np.linspace(0.1, 1.0, 9)
SEEDS = [np.ones(9), np.arange(9.0), -(np.linspace(1.0, 2.0, 9) ** 2)]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    "options",
    [
        {"memory": "3 slots", "checked": True},
        {"memory": "4 slots", "tiers": "memory:?buffers=0", "planner": "interval"},
        {"memory": "5 slots", "tiers": "memory:"},
    ],
    ids=["checked", "interval", "tier"],
)
def test_bits_are_those_of_as_many_sweeps(name: str, options: dict[str, Any]) -> None:
    make, start = CHAINS[name]
    answers = [store_all(name, N, adjoint) for adjoint in (1, 5, 9)]
    if options.get("planner") and not make().state_is_tape:
        options = {**options, "planner": "revolve", "tiers": None, "memory": "30 slots"}
    with Reversal(make(), n_steps=N, functionals=3, **options) as run:
        for _ in range(2):
            assert raw(run.forward(start())) == answers[0][0]
            found: Any = run.reverse([1, 5, 9])
            assert found == [adjoint for _, adjoint in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_differ_and_a_length_that_is_found(kind: str) -> None:
    case = Case(3, kind, N)
    last, answer = case.store_all()
    with Reversal(case.chain(), n_steps=N, memory="9 slots", functionals=2) as run:
        for _ in range(2):  # surveyed, then planned
            assert raw(run.forward(case.start())) == last
            found: Any = run.reverse((1, 1))
            assert found == [answer, answer]
    with Reversal(
        lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a, memory="2 slots", functionals=2
    ) as run:
        run.forward(START, until=lambda x, i: i == N)
        assert_each(run.reverse(SEEDS[:2]), SEEDS[:2])


def assert_each(found: Any, seeds: list[Any]) -> None:
    """Assert that adjoints are those of sines, each with the bits of a run of its own."""
    assert len(found) == len(seeds)
    for one, seed in zip(found, seeds, strict=True):
        alone = reverse(
            lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a, START, seed, N, memory="3 slots"
        )
        assert one.tobytes() == alone.adjoint.tobytes()


def one_buffer() -> Callable[..., Any]:
    """Return an adjoint step that returns the same array each time."""
    out = np.empty(9)
    return lambda x, a, i: np.multiply(np.cos(x), a, out=out)


def two_buffers() -> Callable[..., Any]:
    """Return one that uses what it returned last as scratch."""
    buffers = [np.empty(9), np.empty(9)]

    def back(x: Any, a: Any, i: int) -> Any:
        scratch, out = buffers
        a = np.array(a)
        np.cos(x, out=scratch)
        buffers.reverse()
        return np.multiply(scratch, a, out=out)

    return back


def view_of_one() -> Callable[..., Any]:
    whole = np.empty((2, 9))

    def back(x: Any, a: Any, i: int) -> Any:
        whole[0] = np.cos(x) * a
        return whole[0]

    return back


def void_of_one() -> Callable[..., Any]:
    """Return one that returns a record, a scalar that is a view of an array."""
    whole = np.zeros(2, [("u", float, 9)])

    def back(x: Any, a: Any, i: int) -> Any:
        whole["u"][0] = np.cos(x) * (a["u"] if a.dtype.names else a)
        return whole[0]

    return back


def overwritten(x: Any, a: Any, i: int) -> Any:
    a *= np.cos(x)
    return a


def keeping() -> Callable[..., Any]:
    """Return one that adds to what it returned last, an adjoint that is used up by then."""
    last: list[Any] = []

    def back(x: Any, a: Any, i: int) -> Any:
        made = np.cos(x) * a
        if last:
            last.pop()[:] = np.nan
        last.append(made)
        return made

    return back


@pytest.mark.parametrize(
    "make", [one_buffer, two_buffers, view_of_one, void_of_one, keeping, lambda: overwritten]
)
@pytest.mark.parametrize("block", [0, 3])
def test_adjoint_steps_may_use_arrays_again(make: Callable[[], Any], block: int) -> None:
    chain: Any = FunctionChain(lambda x, i: np.sin(x), make())
    blocks = Blocks(chain, block, N) if block else None
    with Reversal(
        blocks or chain,
        n_steps=N if blocks is None else blocks.n_blocks,
        memory="3 slots",
        functionals=4,
    ) as run:
        run.forward(START)
        same = SEEDS[0].copy()
        found: Any = run.reverse([same, *SEEDS[1:], same])  # one array for two of them
        if make is void_of_one:
            found = [one["u"] for one in found]
        assert_each(found, [*SEEDS, SEEDS[0]])
        assert np.array_equal(same, SEEDS[0])


def nested_back(x: Any, a: Any, i: int) -> Any:
    a["u"] *= np.cos(x)
    a["n"][0][:] += a["u"]
    a["n"][1] = a["n"][1] + 1.0
    return a


@pytest.mark.parametrize("shared", [False, True])
def test_adjoints_in_containers(shared: bool) -> None:
    held: list[Any] = []

    def back(x: Any, a: Any, i: int) -> Any:
        a = nested_back(x, a, i)
        if shared:  # the operator knows the dict that it returns, and changes it
            held[:] = [a]
        return a

    def changes(x: Any, a: Any, i: int) -> Any:
        if shared and held:
            held[0]["u"] = None
        return back(x, {"u": a["u"], "n": a["n"]}, i)

    def seeds() -> list[Any]:
        return [{"u": s.copy(), "n": [np.zeros(9), 0.0]} for s in SEEDS]

    with Reversal(
        lambda x, i: np.sin(x), changes, N, memory="3 slots", functionals=len(SEEDS)
    ) as run:
        run.forward(START)
        found: Any = run.reverse(seeds())
    for one, seed in zip(found, seeds(), strict=True):
        expected = reverse(lambda x, i: np.sin(x), nested_back, START, seed, N, memory="3 slots")
        assert one["u"].tobytes() == expected.adjoint["u"].tobytes()
        assert one["n"][0].tobytes() == expected.adjoint["n"][0].tobytes()
        assert one["n"][1] == N


def test_tapes_that_are_used_up() -> None:
    def taped(x: Any, i: int) -> Any:
        return np.sin(x), [np.cos(x), {"k": [1.0, 2.0]}]

    def back(tape: Any, a: Any, i: int) -> Any:
        assert sum(tape[1].pop("k")) == 3.0
        return tape.pop(0) * a

    with Reversal(
        lambda x, i: np.sin(x), back, N, tape_step=taped, memory="4 slots", functionals=3
    ) as run:
        run.forward(START)
        assert_each(run.reverse(SEEDS), SEEDS)


def writes_to_tape(x: Any, a: Any, i: int) -> Any:
    x[:] = np.cos(x)
    return x * a


IN_PLACE = InPlaceChain[Any, Any](
    lambda x, start, stop: [np.sin(x, out=x) for _ in range(start, stop)] and None, writes_to_tape
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FunctionChain(lambda x, i: np.sin(x), writes_to_tape),
        lambda: IN_PLACE,
        lambda: FunctionChain(
            lambda x, i: np.sin(x), writes_to_tape, lambda x, i: (np.sin(x), x.copy())
        ),
        lambda: Blocks(IN_PLACE, 2),
    ],
)
def test_a_tape_that_is_written_to_is_an_error(make: Callable[[], Any]) -> None:
    """For one functional it may be right; the next would read what is there then."""
    start = START.copy()
    with Reversal(make(), n_steps=3, memory="2 slots", functionals=2) as run:
        last = run.forward(start)
        with pytest.raises(StateError, match=r"operator( of step \d)? wrote to a state"):
            run.reverse([np.ones_like(last), np.ones_like(last)])
    assert start.flags.writeable


@dataclass
class Node:
    """A part of a tape that refers to others, and they to it."""

    slopes: list[Any]
    parent: Any = None


def test_tapes_may_refer_to_themselves() -> None:
    def taped(x: Any, i: int) -> Any:
        whole = Node([np.cos(x)])
        whole.slopes.append(Node([], whole))
        return np.sin(x), whole

    def back(tape: Any, a: Any, i: int) -> Any:
        assert tape.slopes.pop().parent is tape
        return tape.slopes.pop() * a

    with Reversal(
        lambda x, i: np.sin(x), back, N, tape_step=taped, memory="4 slots", functionals=3
    ) as run:
        run.forward(START)
        assert_each(run.reverse(SEEDS), SEEDS)


class Hidden:
    def __init__(self, slope: Any) -> None:
        self.left = [slope]


def takes_out(tape: Any, a: Any, i: int) -> Any:
    return (tape.left.pop() if tape.left else 1.0) * a


def writes_into(tape: Any, a: Any, i: int) -> Any:
    return np.multiply(tape[0], a, out=tape[0]).copy()


@pytest.mark.parametrize(
    ("hidden", "back"),
    [
        (Hidden, takes_out),
        (lambda slope: np.array([slope, None], object), writes_into),
        (lambda slope: iter([slope]), lambda tape, a, i: next(tape, 1.0) * a),
    ],
)
def test_checked_runs_see_what_is_hidden_in_tapes(
    hidden: Callable[..., Any], back: Callable[..., Any]
) -> None:
    def taped(x: Any, i: int) -> Any:
        return np.sin(x), hidden(np.cos(x))

    with Reversal(
        lambda x, i: np.sin(x), back, N, tape_step=taped, memory="4 slots", functionals=2,
        checked=True,
    ) as run:  # fmt: skip
        run.forward(START)
        with pytest.raises(StateError, match=f"operator of step {N - 1} wrote to a state, a tape"):
            run.reverse(SEEDS[:2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SEEDS, "functionals=2, .* takes a list of 2 adjoints, not 3 of them"),
        (np.ones((2, 9)), "takes a list of 2 adjoints, not array"),
        (iter(SEEDS[:2]), "takes a list of 2 adjoints, not <"),
        ([SEEDS[0], None], "adjoint 1 of 2 is None"),
        ([SEEDS[0], (START, START[1:])], "share memory with one another"),
    ],
)
def test_other_than_a_list_of_that_many_is_refused(given: Any, message: str) -> None:
    with Reversal(
        lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a, N, memory="3 slots", functionals=2
    ) as run:
        run.forward(START)
        with pytest.raises(ArgumentError, match=message):
            run.reverse(given)
        assert_each(run.reverse(SEEDS[:2]), SEEDS[:2])  # the sweep still stands


@pytest.mark.parametrize("functionals", [0, -1, 2.5, True, "2"])
def test_the_number_is_whole(functionals: Any) -> None:
    with pytest.raises(ArgumentError, match="functionals"):
        Reversal(lambda x, i: x, lambda x, a, i: a, N, functionals=functionals, costs=COSTS)


def test_a_step_that_returns_none_is_named() -> None:
    def back(x: Any, a: Any, i: int) -> Any:
        return None if i == 4 and a[0] > 1 else np.cos(x) * a

    with Reversal(lambda x, i: np.sin(x), back, N, memory="3 slots", functionals=2) as run:
        run.forward(START)
        with pytest.raises(StateError, match="adjoint of step 4 returned None"):
            run.reverse([np.zeros(9), 1e9 * np.ones(9)])


@pytest.mark.parametrize("planner", ["auto", "revolve", "streaming", "store-all", "h-revolve"])
def test_the_plan_knows_the_adjoint_steps_of_all(planner: str) -> None:
    """Steps run as often as one functional's plan says for such adjoint steps, adjoints k times."""
    ran: list[int] = []
    k = 4

    def step(x: Any, i: int) -> Any:
        ran.append(i)
        return np.sin(x)

    def back(x: Any, a: Any, i: int) -> Any:
        ran.append(~i)
        return np.cos(x) * a

    slots = "6 slots" if planner != "store-all" else "40 slots"
    with Reversal(
        step, back, N, memory=slots, tiers="memory:?buffers=0", planner=planner, costs=COSTS,
        functionals=k,
    ) as run:  # fmt: skip
        run.forward(START)
        made = run.plan
        assert made is not None
        run.reverse([SEEDS[0]] * k)
    expected = plan(
        Costs(1.0, 2.0 * k, state_bytes=72, tiers=COSTS.tiers), slots, N, planner, progress=False
    )
    assert made.costs.reverse_step_s == 2.0 * k
    assert made.makespan_s == pytest.approx(expected.makespan_s)
    assert made.forward_steps == expected.forward_steps
    if planner not in ("auto", "streaming"):  # where a busy tier takes fewer states
        assert sum(i >= 0 for i in ran) == made.forward_steps
    assert [i for i in ran if i < 0] == [~i for i in reversed(range(N)) for _ in range(k)]


@pytest.mark.parametrize(("slots", "write_s"), [(5, 2.0), (10, 1.0), (10, 5.0), (8, 40.0)])
@pytest.mark.parametrize("reverse_s", [0.5, 2.0])
def test_one_sweep_takes_the_forward_plan_and_the_adjoint_steps(
    slots: int, write_s: float, reverse_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time, on a tier as fast as planned for: no more than one sweep's and theirs."""
    n, one = 200, Costs(1.0, reverse_s, state_bytes=72, tiers=(Tier("slow", write_s, write_s),))
    took: dict[int, float] = {}
    for k in (1, 3, 5):
        clock, ran = Clock(), [0, 0]
        store = VirtualStore(clock)
        store.rate = 72 / write_s

        def step(x: Any, i: int, clock: Clock = clock, ran: list[int] = ran) -> Any:
            clock.sleep(1.0)
            ran[0] += 1
            return np.sin(x)

        def back(x: Any, a: Any, i: int, clock: Clock = clock, ran: list[int] = ran) -> Any:
            clock.sleep(reverse_s)
            ran[1] += 1
            return np.cos(x) * a

        monkeypatch.setattr(uniform, "Executor", partial(Executor, clock=clock))
        with Reversal(
            step, back, n, memory=f"{slots} slots", tiers=store, costs=one, functionals=k,
            planner="streaming",
        ) as run:  # fmt: skip
            run.forward(START)
            run.reverse([SEEDS[0]] * k)
            made = run.report().plan
        made_for = replace(one, reverse_step_s=k * reverse_s)
        expected = plan(made_for, f"{slots} slots", n, "streaming", progress=False)
        assert made.makespan_s == expected.makespan_s
        assert made.writes > 0
        assert ran == [made.forward_steps, k * n]
        assert clock.now == pytest.approx(made.makespan_s)
        took[k] = clock.now
    for k in (3, 5):
        assert took[k] <= 1.001 * (took[1] + (k - 1) * n * reverse_s)


def test_costs_are_one_functionals_and_go_from_run_to_run() -> None:
    calls: Any = {"step": lambda x, i: x + 1.0, "back": lambda x, a, i: a}
    stages = StageCosts.uniform(5, Stage("step", 1.0, 2.0, 72, 72, 72), 72)
    for costs in (Costs(1.0, 2.0), stages):
        with Reversal(
            calls["step"], calls["back"], 5, memory="2 slots", costs=costs, functionals=3
        ) as run:
            planned: Any = run.prepare(START).costs
            again: Any = run.costs
        if isinstance(costs, Costs):
            assert (planned.reverse_step_s, again.reverse_step_s) == (6.0, 2.0)
        else:
            assert [s.backward_s for s in planned.stages] == [6.0] * 5
            assert [s.gradient_bytes for s in planned.stages] == [216] * 5
            assert [s.backward_s for s in again.stages] == [2.0] * 5
            assert again.stages[0].gradient_bytes == 72
    with Reversal(calls["step"], calls["back"], 5, memory="2 slots", functionals=3) as run:
        guessed = run.prepare(START).costs.reverse_step_s
        assert run.costs is not None and guessed == pytest.approx(6 * run.costs.forward_step_s)
    assert Reversal(calls["step"], calls["back"], 5, memory="2 slots").costs is None


@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_is_copied_but_what_is_given(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, copied = [], functionals.copied

    def counted(tree: Any) -> Any:
        copies.append(1)
        return copied(tree)

    def back(x: Any, a: Any, i: int) -> Any:
        made, (total,) = (overwritten(x, a["u"], i) if in_place else np.cos(x) * a["u"]), a["more"]
        return {"u": made, "more": [total + made]}

    monkeypatch.setattr(functionals, "copied", counted)
    with Reversal(lambda x, i: np.sin(x), back, N, memory="3 slots", functionals=3) as run:
        run.forward(START)
        run.reverse([{"u": seed, "more": [np.zeros(9)]} for seed in SEEDS])
    # What is given; and what a thread that another test left looks at just then.
    assert 3 <= len(copies) < 3 + N


def test_other_operators_of_the_same_kind() -> None:
    chain: Any = FunctionChain(lambda x, i: x + 1.0, lambda x, a, i: a)
    with Reversal(chain, n_steps=N, memory="3 slots", functionals=3) as run:
        run.forward(START)
        assert [one.tobytes() for one in run.reverse(SEEDS)] == [s.tobytes() for s in SEEDS]
        run.use(lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a)
        run.forward(START)
        assert_each(run.reverse(SEEDS), SEEDS)
