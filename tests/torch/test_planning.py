"""Plans of `unroll` are remembered for cells of a kind, and only while they hold."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError, BudgetError
from multistage.torch.sequences import costs, planning, running
from multistage.torch.tensors.meter import Meter


@pytest.fixture(autouse=True)
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each measurement."""
    measured: list[int] = []
    sample_chunks = planning.sample_chunks

    def counted(*args: Any, **options: Any) -> Any:
        measured.append(options["most_bytes"])
        return sample_chunks(*args, **options)

    monkeypatch.setattr(planning, "sample_chunks", counted)
    return measured


class Inner(nn.Module):
    """A cell of n steps of its own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        for _ in range(self.n):
            h = torch.tanh(h * self.weight)
        return h + x


def inner(n: int) -> Callable[..., Tensor]:
    weight = torch.ones(256, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        for _ in range(n):
            h = torch.tanh(h * weight)
        return h + x

    return cell


def test_a_plan_is_kept_while_it_fits_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, measurements: list[int]
) -> None:
    free = [1 << 30]
    monkeypatch.setattr(planning, "free_bytes", lambda device: free[0])
    cell, h, x = Inner(2), torch.zeros(256), torch.randn(100, 256)

    def plan_with(limit: int) -> Any:
        free[0] = limit
        return mst.unroll(cell, h, x).plan

    first = plan_with(1 << 30)
    assert first.planner == "keep"
    assert plan_with(1 << 29) is first
    tight = plan_with(first.keep_bytes // 3)
    assert tight.planner == "recompute"
    assert tight.peak_bytes <= first.keep_bytes // 3
    assert plan_with(tight.memory_bytes + 100) is tight
    assert plan_with(1 << 30).planner == "keep"
    with pytest.raises(BudgetError, match="smallest limit that works"):
        plan_with(1000)
    assert len(measurements) == 1


@pytest.mark.parametrize("steps", [3, 60])
def test_what_plain_training_takes_does_not_depend_on_the_chunk_that_is_given(steps: int) -> None:
    cell, h, x = torch.nn.GRUCell(16, 16), torch.zeros(8, 16), torch.randn(steps, 8, 16)

    def plan_by(chunk: int | None) -> Any:
        return mst.unroll(cell, h, x, memory="1 GiB", chunk=chunk).plan

    assert len({plan_by(chunk).keep_bytes for chunk in (None, 1, 2, 3, 7)}) == 1


@pytest.mark.parametrize("make", [Inner, inner])
def test_cells_of_equal_code_and_unequal_weight(make: Any, measurements: list[int]) -> None:
    h, x = torch.zeros(256), torch.randn(200, 256)
    light = mst.unroll(make(1), h, x, memory="200 KiB").plan
    cell = make(40)
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x, h])
        out = mst.unroll(cell, h, x, memory="200 KiB", outputs=None)
        out.state.sum().backward()
        assert meter.peak_bytes < 260 << 10  # gradients of parameters and results besides
    heavy = out.plan
    assert light is not None and heavy is not None
    assert heavy.keep_bytes > 5 * light.keep_bytes
    assert len(measurements) == 2
    assert mst.unroll(make(40), h, x, memory="200 KiB").plan is heavy
    assert mst.unroll(make(1), h, x, memory="200 KiB").plan is light
    assert len(measurements) == 2


def test_a_lighter_cell_of_a_kind_takes_the_plan_of_a_heavier_one(measurements: list[int]) -> None:
    h, x = torch.zeros(256), torch.randn(50, 256)
    known = mst.unroll(Inner(21), h, x, memory="200 KiB").plan
    assert mst.unroll(Inner(20), h, x, memory="200 KiB").plan is known
    assert mst.unroll(Inner(22), h, x, memory="200 KiB").plan is not known
    assert len(measurements) == 2


class Config:
    def __init__(self, window: int) -> None:
        self.window = window


def averaged(window: int, h: Tensor, x: Tensor) -> Tensor:
    """Take what no graph tells of: x requires no gradient."""
    return torch.tanh(h) + x.repeat(window, 1).mean(0)


class Averaging(nn.Module):
    def __init__(self, window: object) -> None:
        super().__init__()
        self.window = window

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        window = getattr(self.window, "window", self.window)
        return averaged(window[0] if isinstance(window, tuple) else window, h, x)


def of_closure(window: int) -> Callable[..., Tensor]:
    return lambda h, x: averaged(window, h, x)


def by_default(window: int) -> Callable[..., Tensor]:
    def cell(h: Tensor, x: Tensor, window: int = window) -> Tensor:
        return averaged(window, h, x)

    return cell


def by_keyword(window: int) -> Callable[..., Tensor]:
    def cell(h: Tensor, x: Tensor, *, window: int = window) -> Tensor:
        return averaged(window, h, x)

    return cell


def repeated(one: int, other: int, window: int, h: Tensor, x: Tensor) -> Tensor:
    return averaged(window, h, x)


def by_inner_default(window: int) -> Callable[..., Tensor]:
    inner = by_default(window)
    return lambda h, x: inner(h, x)


class Configured:
    """What it takes is decided where no walk looks."""

    __slots__ = ("window",)

    def __init__(self, window: int) -> None:
        self.window = window

    def __call__(self, h: Tensor, x: Tensor) -> Tensor:
        return averaged(self.window, h, x)


def averaging_by(function: Callable[..., object]) -> Callable[[int], nn.Module]:
    """Return what makes a module with an attribute that tells the window."""

    class By(nn.Module):
        def __init__(self, window: int) -> None:
            super().__init__()
            self.told = function(window)

        def forward(self, h: Tensor, x: Tensor) -> Tensor:
            told: Any = self.told
            if isinstance(told, dict | list):
                return averaged(100 if "wide" in told else 4, h, x)
            return averaged(told() if callable(told) else len(told), h, x)

    return By


@pytest.mark.parametrize(
    "make",
    [
        Averaging,
        lambda window: Averaging(np.int64(window)),
        Configured,
        by_inner_default,
        lambda window: functools.partial(repeated, 4, 100, window),
        averaging_by(lambda window: torch.zeros(window, 1)),
        averaging_by(lambda window: (lambda: 100) if window > 4 else (lambda: window)),
        averaging_by(lambda window: {"wide" if window > 4 else "narrow": 1}),
        averaging_by(lambda window: ["wide" if window > 4 else "narrow"]),
        lambda window: Averaging((window,)),
        lambda window: Averaging(Config(window)),
        of_closure,
        by_default,
        by_keyword,
        lambda window: functools.partial(averaged, window),
    ],
)
@pytest.mark.parametrize("unequal", [False, True])
def test_a_number_that_decides_what_a_step_takes_beside_its_graph(make: Any, unequal: bool) -> None:
    h, x = torch.zeros(256, requires_grad=True), torch.randn(64, 256)
    options = {"memory": "60 KiB", "planner": "recompute", "unequal": unequal}

    def planned(window: int) -> Any:
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([h, x])
            out = mst.unroll(make(window), h, x, **options)
            meter.reset_peak()
            torch.autograd.grad(out.state.sum(), h)
        assert meter.peak_bytes <= 60 << 10
        return out.plan

    plan = planned(4)
    with pytest.raises(BudgetError, match="smallest limit that works"):
        planned(100)
    assert planned(4) is plan
    assert planned(3) is plan or unequal


@pytest.mark.parametrize(("first", "second"), [(-1, -2), (1, 1.0), (1, True), ("1", b"1")])
def test_what_is_equal_or_has_one_hash_may_decide_differently(first: Any, second: Any) -> None:
    """Numbers in place, too: the module is the one that was seen before."""
    cell, h, x = Averaging(4), torch.zeros(256, requires_grad=True), torch.randn(64, 256)
    decide = lambda told: 4 if (told, type(told)) == (first, type(first)) else 100  # noqa: E731
    cell.window = first
    cell.forward = lambda h, x: averaged(decide(cell.window), h, x)  # type: ignore[method-assign]
    options = {"memory": "60 KiB", "planner": "recompute"}
    mst.unroll(cell, h, x, **options)  # type: ignore[arg-type]
    cell.window = second
    with pytest.raises(BudgetError, match="smallest limit that works"):
        mst.unroll(cell, h, x, **options)  # type: ignore[arg-type]


def test_inputs_are_part_of_what_a_step_takes() -> None:
    h, x = torch.zeros(256, requires_grad=True), torch.randn(64, 256)

    def run(window: int) -> None:
        def at(t: int, window: int = window) -> Tensor:
            return x[t].repeat(window, 1).mean(0)

        given: Any = {"n_steps": 64, "memory": "100 KiB", "planner": "recompute"}
        mst.unroll(lambda h, x: torch.tanh(h) + x, h, at, **given)

    run(4)
    with pytest.raises(BudgetError, match="smallest limit that works"):
        run(400)


def test_numbers_that_change_all_the_time_do_not_make_plans_anew(measurements: list[int]) -> None:
    cell, h, x = Inner(2), torch.zeros(256), torch.randn(64, 256)
    plans = set()
    for n in range(5):
        cell.iteration, cell.rate = n, 0.1 / (n + 1)  # type: ignore[assignment]
        plans.add(id(mst.unroll(cell, h, x, memory="60 KiB").plan))
    assert len(plans) == len(measurements) == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_plan_is_remembered_for_its_limit_in_bytes_or_as_a_fraction(
    several: bool, measurements: list[int]
) -> None:
    cell = [inner(1) for _ in range(6)] if several else inner(1)
    h, x = torch.ones(256), torch.ones(6, 256)

    def within(memory: Any) -> Any:
        plan = mst.unroll(cell, h, x, memory=memory, outputs=None).plan
        assert plan is not None
        return plan

    assert within(1.0).planner == "keep"
    with pytest.raises(BudgetError, match="memory=1 bytes < "):  # 1 == 1.0, but it is bytes
        within(1)
    with pytest.raises(ArgumentError, match="memory=True"):
        within(True)
    assert within("1 MiB") == within(1 << 20)
    if not several:
        assert len(measurements) == 3  # one for each of 1.0, 1 and 1 MiB


@pytest.mark.parametrize("unequal", [None, True])
def test_lengths_of_one_kind_share_what_was_measured(
    unequal: bool | None, monkeypatch: Any
) -> None:
    """Each new length was measured and checked: windows of 20 to 100 steps took twice as long."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, call)

    counted(planning, "sample_chunks")
    counted(planning, "measured")
    counted(running, "check_chain")
    cell = nn.GRUCell(3, 7)

    def run(steps: int, **how: Any) -> None:
        x, h = torch.randn(steps, 5, 3), torch.zeros(5, 7)
        out = mst.unroll(cell, h, x, unequal=unequal, **how)
        out.state.sum().backward()  # type: ignore[attr-defined]
        assert out.plan is not None and out.plan.n_steps == steps
        assert out.plan.checked is not None and out.plan.checked.outcome == "equal"

    run(40, planner="recompute")
    once = Counter(counts)
    assert once.total() >= 2
    for steps in (31, 17, 60, 2):
        run(steps, planner="recompute")
    assert counts == once
    run(33, planner="keep")
    assert counts.total() > once.total()


def test_chunks_between_doubled_sizes_are_tried() -> None:
    """A limit that six steps at once fit and eight do not: each keeps three vectors of 1 KiB."""
    cell, h, x = Inner(3), torch.zeros(256), torch.randn(100, 256)
    plan = mst.unroll(cell, h, x, memory="34 KiB").plan
    assert plan is not None
    assert max(chunk for _, chunk, *_ in plan.alternatives) == 6


def test_about_half_as_many_steps_are_measured_as_a_sequence_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, measured = list[int](), costs.measured

    def noted(given: Any, kind: Any, state: Any, steps: tuple[int, int], **more: Any) -> Any:
        sizes.append(steps[1])
        return measured(given, kind, state, steps, **more)

    monkeypatch.setattr(costs, "measured", noted)
    mst.unroll(Inner(4), torch.zeros(256), torch.randn(40, 256), memory=0.5)
    assert len(sizes) >= 3
    assert sum(sizes[:-1]) <= 20


class Passing(Inner):
    """A cell of which hardly anything is saved, with a large state beside."""

    def forward(self, state: Any, x: Tensor) -> Any:
        h, large = state
        for _ in range(self.n):
            torch.tanh(h * self.weight)  # saved, and gone at once
        return torch.tanh(h * self.weight) + x, large + 1


def passing(n_steps: int, n: int = 0, **options: Any) -> Any:
    state = torch.zeros(256), torch.zeros(1 << 18, requires_grad=True)
    return mst.unroll(Passing(n), state, torch.randn(n_steps, 256), **options).plan


@pytest.mark.parametrize(("steps", "unequal"), [(2, None), (13, None), (1, True)])
def test_the_smallest_limit_may_be_that_of_plain_autograd(steps: int, unequal: bool | None) -> None:
    with pytest.raises(BudgetError) as error:
        passing(steps, memory=1000, unequal=unequal)
    least = error.value.least_bytes
    assert least is not None
    assert passing(steps, memory=least, unequal=unequal).planner == "keep"
    with pytest.raises(BudgetError):
        passing(steps, memory=least - 1, unequal=unequal)


def test_short_sequences_do_not_tell_how_the_bytes_of_longer_ones_grow() -> None:
    assert passing(3, memory="64 MiB").planner == "keep"
    assert passing(6, memory="64 MiB").keep_bytes < 3 << 20


def test_where_tapes_travel_a_state_and_the_next_are_counted() -> None:
    how = {"tiers": ["memory:"], "planner": "offload", "check": "off"}
    few, many = [passing(9, n, memory=(64 + n) << 20, **how).peak_bytes for n in (0, 20)]
    assert 2 << 20 <= few < 3 << 20
    # Each saved tensor is counted, whether or not its address was used before.
    assert 9 * 20 * 1024 <= many - few < 9 * 22 * 1024
