"""What a cell keeps where nothing can find it: exact, or an error that names it."""

from __future__ import annotations

import functools
from collections import UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError, DifferenceWarning, StateError
from multistage.torch.sequences.cells import Cells
from multistage.torch.sequences.remembered import KNOWN
from multistage.torch.sequences.samples import Samples, Watch

STEPS, WIDTH = 60, 6


class Slots:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[Any] = [None] * STEPS

    def __getitem__(self, t: int) -> Any:
        return self.rows[t]

    def __setitem__(self, t: int, value: Any) -> None:
        self.rows[t] = value


class Closed:
    """Methods whose closures hold the memory."""

    def __init__(self) -> None:
        rows: list[Any] = [None] * STEPS
        self.get, self.put = rows.__getitem__, rows.__setitem__

    def __getitem__(self, t: int) -> Any:
        return self.get(t)

    def __setitem__(self, t: int, value: Any) -> None:
        self.put(t, value)


class Within:
    """A generator whose frame holds the memory."""

    def __init__(self) -> None:
        self.run = self._run()
        next(self.run)

    @staticmethod
    def _run() -> Iterator[Any]:
        rows: list[Any] = [None] * STEPS
        answer = None
        while True:
            t, value = yield answer
            answer = rows[t]
            rows[t] = answer if value is None else value

    def __getitem__(self, t: int) -> Any:
        return self.run.send((t, None))

    def __setitem__(self, t: int, value: Any) -> None:
        self.run.send((t, value))


MEMORIES: dict[str, Callable[[], Any]] = {
    "list": lambda: [None] * 100,
    "dict": lambda: dict.fromkeys(range(100)),
    "object array": lambda: np.empty(100, dtype=object),
    "UserList": lambda: UserList([None] * 100),
    "deque": lambda: deque([None] * 2000),
    "slots": Slots,
    "closures of methods": Closed,
    "generator": Within,
    "tensors": lambda: [torch.zeros(2, WIDTH) for _ in range(100)],
}


@pytest.mark.parametrize("distance", [1, 5, 30])  # the check compares twelve steps
@pytest.mark.parametrize("chunk", [4, None])
@pytest.mark.parametrize("name", MEMORIES)
def test_states_in_hidden_places_are_refused(name: str, chunk: int | None, distance: int) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
    memory = MEMORIES[name]()

    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, t = torch.tanh(state[0] @ weight + x), int(state[1])
        if t >= distance:
            h = h + 0.5 * memory[t - distance]
        if name == "tensors":
            memory[t].copy_(h)
        else:
            memory[t] = h
        return (h, state[1] + 1), h.square().mean()

    start = torch.zeros(2, WIDTH), torch.zeros((), dtype=torch.int64)
    x = torch.randn(STEPS, 2, WIDTH)
    message = r"outside of it \(shape \(2, 6\).*or return it|shape \(2, 6\).*is kept outside of it"
    with pytest.raises((ArgumentError, StateError), match=message):
        out = mst.unroll(cell, start, x, memory="20 KiB", planner="recompute", chunk=chunk)
        out.loss.backward()


def test_the_place_of_a_hidden_state_is_named() -> None:
    weight, rows = torch.ones(WIDTH, requires_grad=True), [None] * 100

    def cell(h: Tensor, x: Tensor) -> Tensor:
        h = h * weight + x
        if rows[7] is None:
            rows[7] = h
        return h + rows[7]

    x = torch.randn(STEPS, 2, WIDTH)
    with pytest.raises(ArgumentError, match="entry 7 of a list of 100"):
        mst.unroll(cell, x[0], x, memory="20 KiB", planner="recompute", chunk=4).state.sum()


def test_a_sample_of_chunks_is_looked_at_in_every_sequence() -> None:
    first, later = Samples(0, 100), [Samples(number, 100) for number in range(2, 322)]
    assert all(first.graphed(k) for k in range(100))
    assert all(sum(map(each.graphed, range(100))) == 7 for each in later)
    assert all(any(each.graphed(k) for each in later) for k in range(100))
    assert sum(each.watched(k) for each in later for k in range(100)) == 1000
    assert Samples(5, 1).graphed(0)
    assert [Samples(9, 50).graphed(k) for k in range(50)] == [
        Samples(9, 50).graphed(k) for k in range(50)
    ]


def test_a_cell_at_the_address_of_one_that_is_gone_is_looked_at_whole() -> None:
    class Cell:
        def __call__(self, h: Tensor, x: Tensor) -> Tensor:
            return h + x

    def graphed(cell: Cell) -> bool:
        looks = KNOWN.looks(Cells([cell]), 100)
        return all(map(looks.graphed, range(100)))

    cell = Cell()
    assert [graphed(cell) for _ in range(4)] == [True, True, False, False]
    address = id(cell)
    del cell
    others = [Cell() for _ in range(1000)]
    (other,) = [each for each in others if id(each) == address]
    assert [graphed(other) for _ in range(4)] == [True, True, False, False]


class Memory:
    """What a cell remembers, where no one looks; nothing refers to it weakly."""

    __slots__ = ("row",)

    def __init__(self) -> None:
        self.row: Tensor | None = None


def remembering(memory: Memory, h: Tensor, x: Tensor) -> Tensor:
    if x[1] > 50 and memory.row is not None:
        h = h + 0.3 * memory.row
    h = torch.tanh(0.9 * h + 0.01 * x)
    if x[0] > 50:
        memory.row = h
    return h


def in_default(memory: Memory) -> Callable[..., Tensor]:
    def cell(h: Tensor, x: Tensor, memory: Memory = memory) -> Tensor:
        return remembering(memory, h, x)

    return cell


def in_keyword(memory: Memory) -> Callable[..., Tensor]:
    def cell(h: Tensor, x: Tensor, *, memory: Memory = memory) -> Tensor:
        return remembering(memory, h, x)

    return cell


def named(h: Tensor, x: Tensor, memory: Memory) -> Tensor:
    return remembering(memory, h, x)


@pytest.mark.parametrize(
    "make",
    [
        in_default,
        in_keyword,
        lambda memory: lambda h, x: remembering(memory, h, x),
        lambda memory: lambda h, x: remembering((1, memory)[1], h, x),
        lambda memory: functools.partial(remembering, memory),
        lambda memory: functools.partial(named, memory=memory),
        lambda memory: functools.partial(in_default(memory)),
    ],
)
def test_every_new_cell_is_looked_at_whole(make: Callable[[Memory], Any]) -> None:
    """Of cells of one code that remember something seldom, the third was not."""
    x = torch.randn(STEPS, 4)
    x[30, 0] = x[31, 1] = 99
    for _ in range(6):
        h = torch.ones(4, requires_grad=True)
        with pytest.raises((StateError, ArgumentError)):
            out = mst.unroll(
                make(Memory()), h, x, planner="recompute", chunk=1, memory="64 KiB", outputs=None
            )
            torch.autograd.grad(out.state.sum(), h)


def test_cells_that_refer_to_what_was_there_before_are_not_new() -> None:
    inner, sizes = nn.GRUCell(4, 4), {"heads": 2, "act": "tanh", "layers": [1, 2]}
    weights = {"w": torch.ones(4, requires_grad=True)}

    def graphed() -> bool:
        def cell(h: Tensor, x: Tensor, sizes: Any = sizes) -> Tensor:
            return weights["w"] * inner(x, h)  # type: ignore[no-any-return]

        looks = KNOWN.looks(Cells([cell]), 100)
        return all(map(looks.graphed, range(100)))

    assert [graphed() for _ in range(4)] == [True, True, False, False]


def test_writes_to_what_is_kept_elsewhere_are_seen() -> None:
    kept, row = torch.zeros(3), torch.randn(2, 3)
    watch = Watch([row])
    with watch:
        own = torch.ones(3)
        own[0].add_(1)
        row.add_(own)
        watch.refuse_written("the cell", (0, 4))
        kept[1:].mul_(2)
    with pytest.raises(StateError, match=r"shape \(2,\) .*mul_.*at steps 0 to 3"):
        watch.refuse_written("the cell", (0, 4))
    passing = torch.from_numpy(np.zeros(3))
    with (watch := Watch([])):
        passing.add_(1)
    del passing
    watch.refuse_written("the cell", (0, 4))
    with (watch := Watch([])):
        watch.unseen(lambda t: kept.add_(t))(1)
    watch.refuse_written("the cell", (0, 4))


class Norms(nn.Module):
    """Batch norm from some step on, or with statistics for each step."""

    def __init__(self, late: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.late = late
        count = STEPS if late is None else 1
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(count)])

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, t = torch.tanh(state[0] @ self.weight + x), int(state[1])
        if self.late is None:
            h = self.norms[t](h)
        elif t >= self.late:
            norm = self.norms[0]
            h = nn.functional.batch_norm(h, norm.running_mean, norm.running_var, training=True)
        return (h, state[1] + 1), h.square().mean()


@pytest.mark.parametrize(
    "how",
    [
        {"planner": "keep"},
        {"planner": "recompute", "chunk": 4},
        {"planner": "recompute", "memory": "30 KiB"},
        {"planner": "recompute", "memory": "30 KiB", "unequal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("late", [None, 20])
def test_statistics_that_change_late_are_counted_once(late: int | None, how: Any) -> None:
    x = torch.randn(STEPS, 4, WIDTH)
    found = []
    for ours in (False, True):
        torch.manual_seed(1)
        cell = Norms(late)
        state: Any = torch.zeros(4, WIDTH), torch.zeros((), dtype=torch.int64)
        if ours:
            loss = mst.unroll(cell, state, x, **how).loss
        else:
            losses = []
            for each in x:
                state, y = cell(state, each)
                losses.append(y)
            loss = functools.reduce(torch.add, losses)
        loss.backward()
        found.append([loss.detach(), cell.weight.grad, *cell.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_results_that_depend_on_a_buffer_changed_late_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
            h, t = state
            if t >= 20:
                self.scale.add_(0.1)
            h = torch.tanh(h * self.weight * self.scale + x)
            return (h, t + 1), h.square().mean()

    x = torch.randn(STEPS, 2, WIDTH)
    start = x[0], torch.zeros((), dtype=torch.int64)
    cell = Scaled()
    loss = mst.unroll(cell, start, x, planner="recompute", chunk=4).loss
    with pytest.raises(StateError, match="depend on buffer 'scale', which changes at later steps"):
        loss.backward()
    with pytest.raises(StateError, match="changes buffer 'scale'"):
        mst.unroll(Scaled(), start, x, planner="recompute", chunk=4, check="off")


def test_statistics_of_batch_norm_outside_of_modules_are_refused() -> None:
    means, variances = [torch.zeros(WIDTH)] * 100, [torch.ones(WIDTH)] * 100
    weight = torch.ones(WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(h * weight + x, means[0], variances[0], training=True)

    x = torch.randn(STEPS, 4, WIDTH)
    with pytest.raises(StateError, match=r"statistics of batch norm.*no buffer of a module"):
        mst.unroll(cell, x[0], x, planner="recompute", chunk=4)


@pytest.mark.parametrize("unequal", [False, True])
def test_every_output_of_a_repeated_chunk_is_compared(unequal: bool) -> None:
    weight, seen = torch.ones(WIDTH, requires_grad=True), [0] * 100

    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, t = torch.tanh(state[0] * weight + x), int(state[1])
        seen[t] += 1
        return (h, state[1] + 1), h.mean() * (seen[t] if t == 13 else 1)

    x = torch.randn(STEPS, 2, WIDTH)
    start = x[0], torch.zeros((), dtype=torch.int64)
    loss = mst.unroll(
        cell, start, x, memory="6 KiB", planner="recompute", chunk=4, unequal=unequal
    ).loss
    with pytest.raises(StateError, match="returned other numbers at steps"):
        loss.backward()


def test_one_chunk_that_differs_is_warned_of_once_though_steps_are_run_again_after_it() -> None:
    weight, others, runs = torch.ones(WIDTH, requires_grad=True), [0] * 100, [0] * 100

    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, t = torch.tanh(state[0] * weight + x), int(state[1])
        runs[t] += 1
        return (h, state[1] + 1), h.mean() + others[t]

    x = torch.randn(STEPS, 2, WIDTH)
    start = x[0], torch.zeros((), dtype=torch.int64)
    loss = mst.unroll(
        cell, start, x, memory="1 KiB", planner="recompute", chunk=1, check="warn"
    ).loss
    others[STEPS - 7], before = 1, sum(runs)
    with pytest.warns(DifferenceWarning, match="other numbers at steps 53 to 53") as warned:
        loss.backward()
    assert sum(runs) - before > STEPS  # some were advanced in the backward pass
    assert len(warned) == 1


@pytest.mark.parametrize("memory", ["4 KiB", "10 MiB"])
@pytest.mark.parametrize("unequal", [False, True])
def test_a_draw_that_a_cache_keeps_is_found_out(memory: str, unequal: bool) -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    noise = functools.lru_cache(lambda: torch.randn(WIDTH))

    def cell(h: Tensor, x: Tensor) -> Tensor:  # only its first run draws twice
        return nn.functional.dropout(torch.tanh(h * weight + x) + noise())

    x = torch.randn(STEPS, 2, WIDTH)
    with pytest.raises(StateError, match="returned other numbers when its first step"):
        mst.unroll(cell, x[0], x, memory=memory, unequal=unequal).state.sum().backward()


class Dithered(torch.autograd.Function):
    """Draws in its gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


@pytest.mark.parametrize("check", ["error", "off"])
@pytest.mark.parametrize("unequal", [False, True])
def test_a_draw_in_a_gradient_is_refused_where_steps_run_again(check: Any, unequal: bool) -> None:
    weight = torch.ones(WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return Dithered.apply(torch.tanh(h * weight + x))

    def gradient(**options: Any) -> Tensor:
        torch.manual_seed(0)
        h = mst.unroll(cell, x[0], x, check=check, unequal=unequal, **options).state
        return torch.autograd.grad(h.sum(), weight)[0]

    x = torch.randn(STEPS, 2, WIDTH)
    with pytest.raises(StateError, match="in its backward pass"):
        gradient(memory="64 KiB", planner="recompute")
    kept = gradient(memory="10 MiB", planner="keep")
    torch.manual_seed(0)
    h = x[0]
    for x_t in x:
        h = cell(h, x_t)
    assert torch.equal(kept, torch.autograd.grad(h.sum(), weight)[0])


@pytest.mark.parametrize("check", ["error", "off"])
@pytest.mark.parametrize("part", [lambda n: n, lambda n: n[:]])
def test_a_buffer_that_is_changed_is_no_leaf_of_the_state(check: Any, part: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.zeros(WIDTH))

        def forward(self, state: Any, x: Tensor) -> Any:
            self.count += 1  # and so to the state, from the second step on
            return torch.tanh(self.linear(state[0]) + x) + state[1], part(self.count)

    x = torch.randn(STEPS, 2, WIDTH)
    with pytest.raises(StateError, match="returns a buffer that it changes in its state"):
        mst.unroll(Counting(), (x[0], torch.zeros(WIDTH)), x, memory="64 KiB", check=check)
