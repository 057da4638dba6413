"""`unroll` over steps that differ: the bits of plain training, within the limit."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_cells import judged
from leaving import said_late
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import multistage as ms
import multistage.torch as mst
from multistage.actions import Evict, Reverse, Tape
from multistage.backends import MemoryStore
from multistage.backends.testing import FaultyStore
from multistage.errors import (
    ArgumentError,
    BudgetError,
    CheckpointWarning,
    ScheduleError,
    StateError,
)
from multistage.model.tier import Tier
from multistage.torch.sequences import planning, running, search
from multistage.torch.tensors.meter import Meter

SMALL = "buffers=24KiB"


class Layer(nn.Module):
    """One layer of a stack of any widths; the input is not used."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(self, h: Tensor, x: None) -> Tensor:
        y = self.linear(h)
        return torch.tanh(y) * torch.sigmoid(y)


class Normed(nn.Module):
    """Batch norm, an operator in place, and outputs."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(before, after), nn.BatchNorm1d(after)

    def forward(self, h: Tensor, x: None) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.norm(self.linear(h)).relu_()
        return y, {"mean": y.mean(), "sums": y.sum(1, keepdim=True)}


class Level(nn.Module):
    """One layer at one time; the state is the stack's."""

    def __init__(self, number: int, before: int, width: int) -> None:
        super().__init__()
        self.number, self.cell = number, nn.GRUCell(before, width)

    def forward(self, state: tuple[Tensor, ...], x: Tensor | None) -> tuple[Tensor, ...]:
        below = x if self.number == 0 else state[self.number - 1]
        h = nn.functional.dropout(self.cell(below, state[self.number]), 0.1)
        return tuple(h if i == self.number else v for i, v in enumerate(state))


class Head(nn.Module):
    """A loss at the end of each time step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, state: tuple[Tensor, ...], x: None) -> Any:
        return state, self.linear(state[-1]).square().mean()


class Reader(nn.Module):
    """Reads a whole sequence at each step, of another length each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.second(h) + torch.relu(self.first(x)).mean(0))
        return h, h.square().mean()


class Attends(nn.Module):
    """A memory that grows by one entry a step."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(6, 6)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        bank, h = state
        bank = torch.cat([bank, self.key(h)[None]])
        weights = torch.einsum("bd,tbd->tb", h, bank).softmax(0)
        h = torch.tanh(torch.einsum("tb,tbd->bd", weights, bank) + x)
        return (bank, h), h


class Joined(nn.Module):
    """Another tree at each step: all layers before."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * count, 4)

    def forward(self, states: list[Tensor], x: None) -> list[Tensor]:
        return [*states, torch.tanh(self.linear(torch.cat(states, -1)))]


Case = tuple[Any, Any, Any]  # cells, state, inputs


def widths(batch: int = 8) -> Case:
    sizes = [8, 16, 32, 64, 32, 16, 8]
    cells = [Layer(a, b) for a, b in itertools.pairwise(sizes)] * 3
    return cells, torch.randn(batch, 8, requires_grad=True), None


def normed(batch: int = 8) -> Case:
    sizes = [6, 12, 24, 12, 6]
    cells = [Normed(a, b) for a, b in itertools.pairwise(sizes)] * 3
    return cells, torch.randn(batch, 6, requires_grad=True), None


def grid(batch: int = 5, times: int = 6) -> Case:
    sizes = [3, 8, 16, 4]
    layers = [Level(k, sizes[k], sizes[k + 1]) for k in range(3)]
    x = [torch.randn(batch, 3, requires_grad=True) for _ in range(times)]
    inputs = [x[t] if k == 0 else None for t in range(times) for k in range(4)]
    state = tuple(torch.zeros(batch, n, requires_grad=True) for n in sizes[1:])
    return [*layers, Head(4)] * times, state, inputs


def curriculum(batch: int = 4) -> Case:
    lengths = [2] * 6 + [5] * 5 + [9] * 4 + [3] * 2
    xs = [torch.randn(n, batch, 4, requires_grad=True) for n in lengths]
    return Reader(), torch.zeros(batch, 16, requires_grad=True), xs


def growing(batch: int = 2) -> Case:
    state = torch.zeros(0, batch, 6), torch.randn(batch, 6, requires_grad=True)
    return Attends(), state, torch.randn(12, batch, 6, requires_grad=True)


def trees(batch: int = 3) -> Case:
    return [Joined(n + 1) for n in range(7)], [torch.randn(batch, 4, requires_grad=True)], None


CASES: dict[str, Callable[..., Case]] = {
    "widths": widths,
    "normed": normed,
    "grid": grid,
    "curriculum": curriculum,
    "growing": growing,
    "trees": trees,
    "alike": lambda: ([Normed(6, 6)] * 40, torch.randn(8, 6, requires_grad=True), None),
}


def plainly(cells: Any, state: Any, inputs: Any, mode: str) -> tuple[Any, list[Tensor]]:
    """Run the steps as one would write it; return the last state and the reduced y."""
    several = isinstance(cells, list)
    flat: list[list[Tensor]] = []
    for t in range(len(cells) if several else len(inputs)):
        result = (cells[t] if several else cells)(state, None if inputs is None else inputs[t])
        pair = isinstance(result, tuple) and len(result) == 2
        if pair and pytree.tree_structure(result) != pytree.tree_structure(state):
            state, y = result
            flat.append(pytree.tree_leaves(y))
        else:
            state = result
    reduced = []
    for leaves in zip(*flat, strict=True):
        if leaves[0].dim() == 0 or mode == "sum":
            total = leaves[0]
            for leaf in leaves[1:]:
                total = total + leaf
            reduced.append(total)
        else:
            reduced.append(leaves[-1] if mode == "last" else torch.stack(leaves))
    return state, reduced


def results_of(name: str, mode: str, run: Callable[[Case], tuple[Any, Any]]) -> list[Any]:
    """Return all that a run leaves: results, gradients, buffers, the generators."""
    torch.manual_seed(0)
    cells, state, inputs = case = CASES[name]()
    torch.manual_seed(1)
    last, y = run(case)
    leaves = [t for t in pytree.tree_leaves((last, y)) if isinstance(t, Tensor)]
    torch.stack([(t * t).sum() for t in leaves if t.requires_grad]).sum().backward()
    modules = list(dict.fromkeys(cells)) if isinstance(cells, list) else [cells]
    given = [t for t in pytree.tree_leaves((state, inputs)) if isinstance(t, Tensor)]
    return [
        *leaves,
        *(t.grad for t in given if t.requires_grad),
        *(p.grad for m in modules for p in m.parameters()),
        *(b for m in modules for b in m.buffers()),
        torch.rand(2),
    ]


def compare(name: str, mode: str = "stack", **options: Any) -> mst.Unrolled:
    """Compare a sequence with plain training; return what `unroll` did."""
    found: list[mst.Unrolled] = []

    def ours(case: Case) -> tuple[Any, Any]:
        out = mst.unroll(*case, outputs=mode, **options)
        found.append(out)
        return out.state, out.loss if out.outputs is None else out.outputs

    mine = results_of(name, mode, ours)
    theirs = results_of(name, mode, lambda case: plainly(*case, mode))
    assert len(mine) == len(theirs)
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a is None) == (b is None), number
        assert a is None or torch.equal(a, b), number
    return found[0]


# ------------------------------------------------------------------- equality


KEPT = "stack", {"memory": 1.0}
TIGHT = "last", {"memory": 0.85}
PAIRS = "sum", {"memory": "300 KiB", "chunk": 2, "planner": "recompute"}
AGAIN = "last", {"memory": 0.5, "chunk": 4, "planner": "recompute", "unequal": True}
SINGLY = "stack", {"memory": "300 KiB", "chunk": 1, "planner": "recompute"}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, PAIRS) for name in CASES),
        *((name, KEPT) for name in ("widths", "growing")),
        *((name, TIGHT) for name in ("normed", "grid", "curriculum")),
        *((name, SINGLY) for name in ("normed", "growing", "trees")),
        ("alike", AGAIN),
    ],
)
def test_numbers_are_those_of_plain_training(name: str, how: tuple[str, dict[str, Any]]) -> None:
    mode, options = how
    out = compare(name, mode, **options)
    assert out.plan is not None and out.plan.checked is not None
    assert out.plan.checked.outcome == "equal"
    assert (out.plan.planner == "keep") == (options["memory"] == 1.0)


@pytest.mark.parametrize("name", ["grid", "curriculum"])
def test_results_are_exact_where_little_memory_is_left(name: str) -> None:
    """At the smallest limit that works, which the error names."""
    with pytest.raises(BudgetError) as error:
        compare(name, memory=1, chunk=1)
    out = compare(name, memory=error.value.least_bytes, chunk=1)
    plan = out.plan
    assert plan is not None and plan.plan is not None
    assert plan.plan.forward_steps > 2 * plan.n_steps
    assert plan.peak_bytes <= plan.memory_bytes == error.value.least_bytes


def test_the_smallest_limit_of_planner_stream_has_room_for_its_buffers() -> None:
    least = {}
    for planner in ("recompute", "stream"):
        with pytest.raises(BudgetError) as error:
            compare("widths", memory=1, planner=planner, tiers=[f"memory:?{SMALL}"], chunk=1)
        least[planner] = error.value.least_bytes
    assert least["stream"] >= least["recompute"] + (20 << 10)


@pytest.mark.long(but=("grid", "widths"))
@pytest.mark.parametrize("name", sorted(CASES))
def test_planner_stream_works_at_the_smallest_limit_that_it_names(name: str) -> None:
    options: dict[str, Any] = {"planner": "stream", "tiers": [f"memory:?{SMALL}"]}
    with pytest.raises(BudgetError) as error:
        compare(name, memory=1, **options)
    out = compare(name, memory=error.value.least_bytes, **options)
    assert out.plan is not None and out.plan.planner == "stream"


@pytest.mark.parametrize(
    ("name", "tier"), [("widths", "file:"), ("normed", "memory:"), ("growing", "file:")]
)
def test_states_travel_to_a_tier(name: str, tier: str, tmp_path: Path) -> None:
    where = f"{tier}{tmp_path}?{SMALL}" if tier == "file:" else f"{tier}?{SMALL}"
    out = compare(name, memory="250 KiB", tiers=[where], planner="stream", chunk=1)
    assert out.plan is not None and out.plan.plan is not None and out.plan.plan.writes > 0
    made = out.plan.plan
    assert (made.memory_bytes or 0) + sum(made.reserved.values()) == 250 << 10
    del out
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["lose_read", "lose_write", "refuse"])
def test_lost_states_are_computed_again(fault: str) -> None:
    store = FaultyStore(MemoryStore(buffer_bytes=4096), **{fault: lambda number: number % 3 == 1})
    options: dict[str, Any] = {"tiers": [store], "planner": "stream", "chunk": 1}
    with pytest.warns(CheckpointWarning):
        out = compare("grid", memory="250 KiB", check="off", **options)
    assert out.plan is not None and out.plan.planner == "stream"


@pytest.mark.parametrize("name", ["widths", "grid", "normed"])
def test_a_late_tier_leaves_the_bits_as_they_are(name: str) -> None:
    """A sequence leaves its plan where writes are said to be late; the next is planned anew."""
    options: dict[str, Any] = {"planner": "stream", "chunk": 1, "memory": "250 KiB"}
    options |= {"tiers": [f"memory:?{SMALL}"], "check": "off"}
    with said_late(lambda _: True) as taken:
        first, second = (compare(name, **options) for _ in range(2))
    assert taken and first.plan is not second.plan


def test_a_second_backward_on_a_late_tier_is_no_other_news() -> None:
    """Each backward but the first runs forward again, on the same late tier."""
    found = running.KNOWN._found
    cells, state, inputs = widths()
    options: dict[str, Any] = {"planner": "stream", "chunk": 1, "memory": "250 KiB"}
    options |= {"tiers": [f"memory:?{SMALL}"], "check": "off"}
    with said_late(lambda _: True):
        out = mst.unroll(cells, state, inputs, **options)
        known = dict(found)
        loss = out.state.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert dict(found) == known


def test_two_backwards_and_hooks_that_fire_once() -> None:
    torch.manual_seed(0)
    cells, state, _ = widths()
    fired = []
    cells[0].linear.weight.register_hook(lambda g: fired.append(1))
    out = mst.unroll(cells, state, None, memory="100 KiB", chunk=2, planner="recompute")
    loss = out.state.square().sum()
    (first,) = torch.autograd.grad(loss, [state], retain_graph=True)
    loss.backward()
    assert state.grad is not None and torch.equal(first, state.grad) and len(fired) == 1


def test_backward_from_another_thread() -> None:
    """Autograd numbers its nodes by thread: sums must come first all the same."""
    found = []
    for elsewhere in (False, True):
        torch.manual_seed(0)
        cells, state, inputs = widths()
        out = mst.unroll(cells, state, inputs, memory="1 MiB", chunk=9, planner="recompute")
        assert out.plan is not None and out.plan.plan is not None
        assert out.plan.plan.kept == (0, 1)
        loss = out.state.square().sum()
        if elsewhere:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        found.append([state.grad, *(p.grad for m in cells[:6] for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Any) -> None:
    torch.manual_seed(0)
    cells, state, inputs = normed()
    last, y = plainly([m.eval() for m in cells], state, inputs, "stack")
    with context():
        out = mst.unroll(cells, state, inputs)
    assert torch.equal(out.state, last) and out.plan is None
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(out.outputs), y, strict=True))


def test_cells_that_are_one_run_as_equal_steps() -> None:
    cell = Layer(8, 8)
    out = mst.unroll([cell] * 30, torch.randn(4, 8), None, memory="64 KiB", planner="recompute")
    assert out.plan is not None and out.plan.plan is not None and not out.plan.plan.actions


def test_a_pair_is_state_and_output_where_trees_differ() -> None:
    def opens(h: Tensor, x: None) -> Any:
        return (h, h * 2), None

    def closes(state: tuple[Tensor, Tensor], x: None) -> Any:
        return state[0] + state[1], {"loss": state[1].sum()}

    start = torch.ones(3, requires_grad=True)
    out = mst.unroll([opens, closes, opens, closes], start, None, memory=1.0)
    assert out.loss is not None and out.state.tolist() == [9.0] * 3
    out.loss.backward()
    assert start.grad is not None and start.grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("seed", range(3, 6))
def test_random_sequences(seed: int) -> None:
    """More of them: `python tests/torch/fuzz_cells.py --count 500`."""
    assert not judged(seed).startswith("DIFFERENT")


# --------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("name", "memory"), [("widths", 0.85), ("grid", 0.6), ("curriculum", 0.85), ("growing", 0.6)]
)
def test_memory_stays_within_the_limit(name: str, memory: float) -> None:
    torch.manual_seed(0)
    cells, state, inputs = CASES[name](200)
    modules = nn.ModuleList(dict.fromkeys(cells)) if isinstance(cells, list) else cells
    given = [t for t in pytree.tree_leaves((state, inputs)) if isinstance(t, Tensor)]

    def run() -> mst.Unrolled:
        out = mst.unroll(cells, state, inputs, memory=memory, outputs=None)
        leaves = [*pytree.tree_leaves(out.state), *([] if out.loss is None else [out.loss])]
        torch.stack([t.sum() for t in leaves]).sum().backward()
        return out

    tensors = [*given, *modules.parameters()]
    gradients = sum(t.nbytes for t in tensors if t.requires_grad)
    for _ in ("planned and checked", "known"):
        with Meter(torch.device("cpu")) as meter:
            meter.ignore(tensors)
            meter.ignore(t.grad for t in tensors if t.grad is not None)
            out = run()
        assert out.plan is not None and out.plan.plan is not None
        assert meter.peak_bytes <= out.plan.memory_bytes + gradients
    assert out.plan.peak_bytes <= out.plan.memory_bytes < out.plan.keep_bytes


class Wide(nn.Module):
    """A step of one width whose graph is large, or not."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies = copies
        self.linear = nn.Linear(16, 16)

    def forward(self, h: Tensor, x: None) -> Tensor:
        wide = torch.tanh(torch.sigmoid(self.linear(h).repeat(1, self.copies)))
        return wide.view(len(h), self.copies, 16).mean(1)


def test_the_check_of_large_first_steps_stays_within_the_limit() -> None:
    """Chunks of the small steps behind them are long; so many large ones do not fit."""
    cells = [Wide(60)] * 12 + [Wide(1)] * 200
    h = torch.ones(16, 16)
    parameters = [p for cell in (cells[0], cells[-1]) for p in cell.parameters()]
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([h, *parameters])
        out = mst.unroll(cells, h, None, memory=0.2)
    assert out.plan is not None and out.plan.chunk > 12 and out.plan.checked is not None
    assert out.plan.checked.outcome == "equal"
    assert meter.peak_bytes <= out.plan.memory_bytes


def test_a_plan_that_takes_more_than_the_limit_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever planned it: the machine that judges each action knows the user's limit."""
    within = search.plan_within
    monkeypatch.setattr(search, "plan_within", lambda costs, room, **_: within(costs, 3 * room))
    cells, state, _ = widths()
    with pytest.raises(ScheduleError, match="but the limit is"):
        mst.unroll(cells, state, None, memory="30 KiB", planner="recompute", check="off")


def test_states_of_kinds_are_let_go_of_before_the_sequence_is_run() -> None:
    cells, alive = [Layer(8, 64), Layer(64, 8), Layer(8, 8)], list[int]()

    class Last(nn.Module):
        def forward(self, h: Tensor, x: None) -> Tensor:
            alive.append(meter.live_bytes())
            return h * 2

    with torch.no_grad(), Meter(torch.device("cpu")) as meter:
        mst.unroll([*cells, Last()], torch.ones(100, 8), None, memory="1 GiB")
    assert alive[-1] < 25_600  # bytes of the widest state


def test_a_graph_counts_the_state_before_it_that_leaves() -> None:
    """A graph refers to its input: where it is held, the state's memory is not free."""
    stage = ms.Stage("step", 1.0, 2.0, 1000, 2100, gradient_bytes=1000)
    cell, h = (lambda h, x: torch.sin(h)), torch.zeros(250, requires_grad=True)
    options: Any = {"tiers": MemoryStore(buffer_bytes=4096), "planner": "stream", "chunk": 1}
    costs = ms.StageCosts((stage,) * 40, 1000)
    plan = mst.unroll(cell, h, None, n_steps=40, memory=40_000, costs=costs, **options).plan
    assert plan is not None and plan.plan is not None and plan.planner == "stream"
    held, evicted = set[int](), 0
    for action in plan.plan.actions:
        match action:
            case Tape(step):
                held.add(step)
            case Reverse(step):
                held.discard(step)
            case Evict(step):
                evicted += 1
                counted = plan.plan.costs.stages[step].tape_bytes
                assert step not in held or counted == 2100 + 1000
    assert evicted


# ---------------------------------------------------------------------- plans


class Counted(nn.Module):
    """A cell of one width or another, whose calls are counted."""

    calls: list[int]

    def __init__(self, before: int, after: int, calls: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(before, after)
        object.__setattr__(self, "count", _Count(calls))

    def forward(self, h: Tensor, x: None) -> Tensor:
        self.count()  # type: ignore[operator]
        return torch.tanh(self.linear(h))


class _Count:
    """Counts where no scope looks: what it counts is no part of the computation."""

    def __init__(self, calls: list[int]) -> None:
        self.calls = iter(_counting(calls))

    def __call__(self) -> None:
        next(self.calls)


def _counting(calls: list[int]) -> Iterator[None]:
    while True:
        calls[0] += 1
        yield


def test_a_long_sequence_is_measured_once_per_kind() -> None:
    """10 000 steps of four kinds: the steps are not run before the sequence is."""
    calls = [0]
    sizes = [4, 8, 12, 8, 4]
    four = [Counted(a, b, calls) for a, b in itertools.pairwise(sizes)]
    with torch.no_grad():
        mst.unroll(four * 2500, torch.zeros(1, 4), None)
    assert 10_000 < calls[0] < 10_100
    calls[0] = 0
    with pytest.raises(BudgetError):
        mst.unroll(four * 2500, torch.zeros(1, 4), None, memory=64)
    assert calls[0] < 300


def test_a_curriculum_is_planned_by_its_kinds() -> None:
    inputs = [torch.ones(n, 1, 4) for n in (2, 4, 8) for _ in range(60)]
    out = mst.unroll(Reader(), torch.zeros(1, 16, requires_grad=True), inputs, memory=0.15)
    plan = out.plan
    assert plan is not None and plan.plan is not None
    assert [count for _, count in plan.kinds] == [60, 60, 60]
    assert len(plan.plan.costs.stages) <= 192
    # Chunks of long inputs have fewer steps: their graphs are larger.
    lengths = [b - a for a, b in itertools.pairwise(plan.cuts)]
    assert lengths[0] > lengths[-2]
    assert "Kinds of steps" in str(plan) and "Reader on (1, 16), x (4, 1, 4)" in str(plan)


def test_given_costs_plan_steps_of_any_number_of_kinds() -> None:
    torch.manual_seed(0)
    cell, x, state = Attends(), torch.randn(100, 2, 6), (torch.zeros(0, 2, 6), torch.zeros(2, 6))
    stages = [
        ms.Stage(f"step {t}", 1e-4, 2e-4, n, 4 * n, backward_overhead_bytes=8 * n)
        for t, n in enumerate(range(96, 4896, 48))
    ]
    costs = ms.StageCosts(tuple(stages), 48)
    gradients = []
    for options in ({"costs": costs, "memory": "300 KiB"}, None):
        cell.zero_grad()
        if options is None:
            _, (y,) = plainly(cell, state, x, "stack")
        else:
            out = mst.unroll(cell, state, x, **options)  # type: ignore[arg-type]
            assert out.plan is not None and out.plan.planner == "recompute"
            y = out.outputs
        y.square().sum().backward()
        gradients.append([p.grad.clone() for p in cell.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    smaller = replace(costs, stages=(replace(stages[0], output_bytes=50), *stages[1:]))
    with pytest.raises(BudgetError, match="state 1, which step 0 returned, takes 96 bytes"):
        mst.unroll(cell, state, x, costs=smaller, memory="300 KiB", chunk=1)
    light = [replace(s, tape_bytes=s.output_bytes, backward_overhead_bytes=0) for s in stages]
    costs = replace(costs, stages=tuple(light))
    with pytest.raises(BudgetError, match=r"the graph of step .* takes .* costs say tape_bytes="):
        mst.unroll(cell, state, x, costs=costs, memory="100 KiB", chunk=1).outputs.sum().backward()
    with pytest.raises(BudgetError, match=r"the graph of steps 0 to 99 takes more than .* costs="):
        mst.unroll(cell, state, x, costs=costs, memory=1.0)
    with pytest.raises(ArgumentError, match="costs have 100 stages, but the sequence has 99"):
        mst.unroll(cell, state, x[:99], costs=costs, memory="300 KiB")


def test_given_costs_are_weighed_for_each_cell() -> None:
    """Costs that one cell's graphs held to say nothing of another's."""

    def cell(copies: int) -> Wide:
        torch.manual_seed(0)
        return Wide(copies)

    stage = ms.Stage("step", 1e-4, 2e-4, 1024, 6 * 1024, 1024, 2048, 2048, 8192)
    costs = ms.StageCosts((stage,) * 20, 1024)
    options: dict[str, Any] = {"costs": costs, "memory": "40 KiB", "check": "off"}
    mst.unroll(cell(1), torch.ones(16, 16), None, n_steps=20, **options).state.sum().backward()
    with pytest.raises(BudgetError, match="the graph of step"):
        mst.unroll(cell(9), torch.ones(16, 16), None, n_steps=20, **options).state.sum().backward()


# ----------------------------------------------------------------- bad input


def test_bad_arguments() -> None:
    one, two, h = Layer(4, 8), Layer(8, 4), torch.ones(2, 4)
    for cells, options, message in [
        ([], {}, "cell is an empty sequence"),
        ([one, 3], {}, "cell 1 is int; it must be callable"),
        (iter([one, two]), {}, "cell is list_iterator; it must be callable, or a list"),
        ([one, one], {"costs": 3}, "costs is int; give a StageCosts"),
        ([Layer(4, 4), Layer(4, 4)], {"unequal": False}, "unequal=False is for one cell"),
        ([one, two], {"n_steps": 3}, "2 cells and 3 steps; give one cell for each step"),
        ([one, two], {"inputs": torch.ones(3, 2)}, "2 cells and 3 steps"),
        ([one, two], {"fused": True}, "fused=True is for cells that take several steps"),
        ([nn.GRU(4, 4), two], {}, "give an nn.GRUCell for each layer"),
        ([one, two], {"planner": "offload"}, "'offload' takes steps that are alike"),
        ([one, two], {"planner": "stream"}, "needs a tier"),
    ]:
        given: dict[str, Any] = {"inputs": None, **options}
        with pytest.raises(ArgumentError, match=message):
            mst.unroll(cells, h, **given)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"Layer does not run at step 2, on a state of shapes"):
        mst.unroll([one, two, two], h, None)
    with pytest.raises(BudgetError, match="the smallest limit that works here"):
        mst.unroll([one, two], h, None, memory=100)
    with pytest.raises(ArgumentError, match="more than 64 kinds"):
        mst.unroll(Attends(), (torch.zeros(0, 2, 6), torch.zeros(2, 6)), torch.randn(100, 2, 6))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (lambda h, x: (torch.tanh(h), h, h), "does not run at step 1, on a state of shapes"),
        (lambda h, x: (h + x)[:, :2], "does not run at step 1, on a state of shapes"),
        (lambda h, x: (h, [h.sum(), 3.0]), "returns float in y"),
    ],
)
def test_a_cell_that_cannot_take_its_own_state_is_refused(cell: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        mst.unroll(cell, torch.zeros(2, 6, requires_grad=True), torch.randn(5, 2, 6))


def test_given_costs_allow_any_number_of_cells() -> None:
    stage = ms.Stage("step", 1e-4, 2e-4, 32, 200, 32, 200, 200, 400)
    costs = ms.StageCosts((stage,) * 65, 32)
    cells, h = [Layer(4, 4) for _ in range(65)], torch.ones(2, 4, requires_grad=True)
    mst.unroll(cells, h, None, costs=costs, memory="8 KiB").state.sum().backward()
    mine, h.grad = h.grad, None
    plainly(cells, h, None, "stack")[0].sum().backward()
    assert mine is not None and h.grad is not None and torch.equal(mine, h.grad)


def test_bound_methods_of_one_object_are_one_cell() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def wide(self, h: Tensor, x: None) -> Tensor:
            return torch.tanh(self.up(h))

        def narrow(self, h: Tensor, x: None) -> Tensor:
            return torch.tanh(self.down(h))

    both, h = Both(), torch.ones(2, 4)
    cells = [cell for _ in range(40) for cell in (both.wide, both.narrow)]
    out = mst.unroll(cells, h, None, memory="64 KiB")
    assert out.plan is not None and len(out.plan.kinds) <= 3
    out = mst.unroll([both.wide, both.narrow], h, None, memory="64 KiB")
    assert torch.equal(out.state, both.narrow(both.wide(h, None), None))


def test_inputs_made_larger_than_planned_for() -> None:
    cell, h = Reader(), torch.zeros(2, 16)

    def inputs(t: int) -> Tensor:
        return torch.ones(2 if t < 50 else 9, 2, 4)

    for planner in ("keep", "recompute"):
        with pytest.raises(StateError, match="x_50 of inputs takes 288 bytes, and the first 64"):
            mst.unroll(cell, h, inputs, n_steps=60, planner=planner)  # type: ignore[arg-type]
    out = mst.unroll(cell, h, inputs, n_steps=60, unequal=True, memory=0.5)
    # State 0 wants no gradient, which makes its step a kind of its own.
    assert out.plan is not None and [count for _, count in out.plan.kinds] == [1, 49, 10]


def test_shapes_that_values_decide_are_refused() -> None:
    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        after = h.sum() * torch.ones(3 if x > 0 else 2)
        return after, after.sum()

    x = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0])
    with pytest.raises(StateError, match="other steps of this kind return"):
        mst.unroll(cell, torch.ones(2, requires_grad=True), x, chunk=1, memory=1.0)


class Late(nn.Module):
    """Breaks its word on states of one width only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.linear = nn.Linear(8, 8)

    def forward(self, h: Tensor, x: None) -> Any:
        y = torch.tanh(self.linear(h))
        if h.shape[0] == 4:
            match self.how:
                case "counts":
                    self.calls += 1
                case "writes":
                    h.mul_(2.0)
                case "draws":
                    y = y * random.random()
                case "varies":
                    y = y + next(_NUMBERS)
        return y[:4] if h.shape[0] == 8 else torch.cat([y, y])


_NUMBERS = (float(number) for number in range(10**9))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("counts", "changes attribute 'calls'"),
        ("writes", "writes to the state it is given"),
        ("varies", "other numbers"),
    ],
)
def test_hidden_state_of_a_later_kind_is_found(how: str, message: str) -> None:
    with pytest.raises(StateError, match=message):
        mst.unroll(Late(how), torch.ones(8, 8), None, n_steps=6, chunk=1, planner="recompute")


def test_random_numbers_of_a_later_kind_are_drawn_again() -> None:
    found = []
    for planner in ("keep", "recompute"):
        torch.manual_seed(0)
        random.seed(0)
        cell, h = Late("draws"), torch.ones(8, 8, requires_grad=True)
        options: Any = {"planner": planner, "chunk": 1, "memory": "1 MiB"}
        mst.unroll(cell, h, None, n_steps=6, **options).state.sum().backward()
        found.append((h.grad, cell.linear.weight.grad, random.random()))
    assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[1][:2], strict=True))  # type: ignore[arg-type]
    assert found[0][2] == found[1][2]


# ---------------------------------------------------- values that decide what a step costs


class Loops(nn.Module):
    """As many operators as an int in x_t says, or as a tensor does, or results as wide."""

    def __init__(self, how: str = "loop") -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(16, 16)

    def forward(self, h: Tensor, x: Any) -> Tensor:
        h = self.linear(h)
        match self.how:
            case "loop":
                for _ in range(int(x)):
                    h = torch.tanh(h)
            case "width":
                h = torch.tanh(torch.sigmoid(h.repeat(1, x))).view(len(h), x, 16).mean(1)
            case "chosen":  # by the values of x_t
                rows = torch.zeros(int(x), dtype=torch.int64)
                h = torch.tanh(torch.sigmoid(h.unsqueeze(0)[rows])).mean(0)
        return h


_SPARSE = [1] * 50 + [60] * 10
_BY_VALUES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "equal steps": ("loop", _SPARSE, {"unequal": False}),
    "a function": ("loop", lambda t: _SPARSE[t], {"n_steps": 60}),
    "a function of steps that differ": (
        "loop",
        lambda t: _SPARSE[t],
        {"n_steps": 60, "unequal": True},
    ),
    "a tensor": ("loop", torch.tensor(_SPARSE), {}),
    "wide results": ("width", _SPARSE, {"unequal": False}),
    "results as wide as values say": ("chosen", torch.tensor(_SPARSE), {}),
    "many values": ("loop", [*range(1, 11), *_SPARSE[10:]], {}),
}


@pytest.mark.parametrize("planner", ["keep", "recompute"])
@pytest.mark.parametrize("name", list(_BY_VALUES))
def test_values_that_make_graphs_larger_than_planned_are_refused(name: str, planner: Any) -> None:
    """What was exceeded without a word is an error; where there is room, all is well."""
    how, inputs, options = _BY_VALUES[name]
    limit = {"keep": 400, "recompute": 40}[planner] << 10
    cell, h = Loops(how), torch.ones(16, 16, requires_grad=True)
    with pytest.raises(BudgetError, match="takes more than was measured"):
        out = mst.unroll(cell, h, inputs, memory=limit, planner=planner, **options)
        out.state.sum().backward()
    out = mst.unroll(cell, h, inputs, memory="64 MiB", planner=planner, **options)
    out.state.sum().backward()
    gradient, h.grad = h.grad, None
    state: Any = h
    for t in range(60):
        state = cell(state, inputs(t) if callable(inputs) else inputs[t])
    state.sum().backward()
    assert gradient is not None and h.grad is not None and torch.equal(gradient, h.grad)


def test_views_of_what_was_given_are_no_part_of_a_graph_that_values_decide() -> None:
    def cell(h: Tensor, x: Tensor) -> Tensor:
        few = x[:64]
        return torch.tanh(2 * h + few[few > 0].sum())

    h, x = torch.zeros(1, 1024, requires_grad=True), torch.ones(20, 100_000)
    out = mst.unroll(cell, h, x, memory=1.0, outputs=None)
    assert out.plan is not None and out.plan.planner == "keep" and out.plan.by_values


@pytest.mark.parametrize("unequal", [False, True])
def test_nodes_that_are_dropped_at_once_do_not_count_as_held(unequal: bool) -> None:
    def cell(h: Tensor, x: None) -> Tensor:
        _ = h.square().mean().sqrt().log()
        return torch.tanh(h)

    h, each = torch.ones(4, 8, requires_grad=True), {"n_steps": 40, "unequal": unequal}
    out = mst.unroll(cell, h, None, memory=1.0, **each)  # type: ignore[arg-type]
    assert out.plan is not None and out.plan.planner == "keep"


@pytest.mark.parametrize("how", ["loop", "width"])
def test_few_values_are_measured_one_by_one(how: str) -> None:
    cell, h = Loops(how), torch.ones(16, 16, requires_grad=True)
    given = [h, *cell.parameters()]
    for _ in range(2):
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([*given, *(t.grad for t in given if t.grad is not None)])
            out = mst.unroll(cell, h, _SPARSE, memory=0.4)
            out.state.sum().backward()
        assert out.plan is not None and [count for _, count in out.plan.kinds] == [50, 10]
        assert out.plan.planner == "recompute"
        assert meter.peak_bytes <= out.plan.memory_bytes + sum(t.nbytes for t in given)
    assert "x 60" in str(out.plan)


def test_values_of_fused_or_travelling_steps_stay_one_kind(tmp_path: Path) -> None:
    def fused(h: Tensor, x: Any) -> Tensor:
        scale, mark = x
        return h * scale.sum() * mark.prod()

    h = torch.ones(4, requires_grad=True)
    inputs = [(torch.ones(1), torch.ones(1)) for _ in range(6)]
    assert mst.unroll(fused, h, inputs, fused=True).plan.kinds == ()  # type: ignore[union-attr]
    cell, wide = Loops(), torch.ones(16, 16, requires_grad=True)
    options: Any = {"planner": "offload", "tiers": f"file:{tmp_path}", "memory": "64 MiB"}
    assert mst.unroll(cell, wide, [1, 2] * 4, **options).plan.planner == "offload"  # type: ignore[union-attr]


def test_a_state_that_changes_shape_late_is_refused() -> None:
    weight, h = torch.ones(4, requires_grad=True), torch.zeros(4)
    x = torch.zeros(60)
    x[40] = 1.0

    def cell(h: Tensor, x: Tensor) -> Tensor:
        h = h * weight
        return h.repeat(2, 1) if x > 0 else h

    for chunk in (1, 4):
        with pytest.raises(StateError, match=r"returned a state at step 40 whose leaf 0 is"):
            mst.unroll(cell, h, x, planner="recompute", chunk=chunk, memory="1 MiB")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(h) + x)


def test_a_sequence_inside_a_cell_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each step of the outer one, and the tier is not measured for each."""
    made: Counter[str] = Counter()

    def counted(module: Any, name: str, function: Callable[..., Any]) -> None:
        def call(*args: Any, **options: Any) -> Any:
            made[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, call)

    fast = Tier.of_rates(1e12, 1e12, tapes=False)
    counted(planning, "choose", planning.choose)
    counted(planning, "measured", planning.measured)
    counted(search, "measured_rates", lambda store, nbytes: fast)
    inner, outer, xs = Inner(), Inner(), torch.randn(16, 5, 6)
    options: Any = {"tiers": f"file:{tmp_path}?{SMALL}", "unequal": True, "progress": False}

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return outer(mst.unroll(inner, h, xs, memory=6144, **options).state, x)

    def plainly(h: Tensor, x: Tensor) -> Tensor:
        for one in xs:
            h = inner(h, one)
        return outer(h, x)

    first = torch.randn(5, 6, requires_grad=True)
    inputs = torch.randn(16, 5, 6, requires_grad=True)
    for _ in range(2):
        out = mst.unroll(cell, first, inputs, memory=0.8, **options)
        found = torch.autograd.grad(out.state.sum(), [first, inputs, *outer.parameters()])
    h = first
    for x in inputs:
        h = plainly(h, x)
    expected = torch.autograd.grad(h.sum(), [first, inputs, *outer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert out.plan is not None and out.plan.planner != "keep"
    assert made["choose"] == made["measured"] == 2
    assert made["measured_rates"] <= 2 * 3  # for each size of pages


class Hooked(Layer):
    def forward(self, h: Tensor, x: None) -> Tensor:
        h.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(h, x)


def test_hooks_on_states_that_are_made_again_to_be_measured() -> None:
    """No limit in bytes: states of each kind are not held, and come from the steps before."""
    torch.manual_seed(0)
    widths = [4, 8, 16, 8, 4]
    cells = [Hooked(a, b) for a, b in itertools.pairwise(widths)]
    h = torch.randn(3, 4, requires_grad=True)
    targets = [h, *nn.ModuleList(cells).parameters()]
    plain = h * 1
    for cell in cells * 5:
        plain = cell(plain, None)
    ours = mst.unroll(cells * 5, h * 1, None, planner="recompute", chunk=1).state
    found = [torch.autograd.grad(last.square().sum(), targets) for last in (plain, ours)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
