"""`Sequential` against plain autograd, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError, BudgetError, MultistageError, StateError
from multistage.model.stages import Stage, StageCosts
from multistage.torch.tensors.meter import Meter

WIDTH = 24


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative batch norm": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "residual": Residual,
    "identity": nn.Identity,
    "flatten": nn.Flatten,
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


def a_chain(*kinds: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(KINDS[kind]() for kind in kinds))


DEEP = ("linear", "batch norm", "relu in place", "residual", "dropout", "tanh") * 3


def assert_trains_alike(
    plain: nn.Module,
    ours: nn.Module,
    x: Any,
    *,
    steps: int = 2,
    loss: Callable[[Any], Tensor] = lambda y: (y * y).sum(),
) -> None:
    """Outputs, gradients, buffers and random numbers of a few steps of training."""
    inputs = [copy.deepcopy(x), copy.deepcopy(x)]
    for step in range(steps):
        results = []
        for model, x in zip((plain, ours), inputs, strict=True):
            torch.manual_seed(step)
            y = model(x)
            loss(y).backward()
            after = torch.rand(3)
            results.append([loss(y).detach(), after])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        grads = [
            [p.grad for p in model.parameters()] + [t.grad for t in _leaves(x)]
            for model, x in zip((plain, ours), inputs, strict=True)
        ]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        for (name, a), (other, b) in zip(
            plain.state_dict().items(), ours.state_dict().items(), strict=True
        ):
            assert name == other
            assert torch.equal(a, b), name


def assert_fails_alike(model: nn.Module, x: Tensor, share: float) -> None:
    """What plain training refuses is refused, never answered with another gradient."""
    try:
        ours = mst.Sequential(copy.deepcopy(model), x, max(0.3, share))
    except (RuntimeError, BudgetError):
        return
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        ours(x).sum().backward()


def _leaves(x: Any) -> list[Tensor]:
    found = [x] if isinstance(x, Tensor) else list(x.values()) if isinstance(x, dict) else list(x)
    return [t for t in found if isinstance(t, Tensor)]


def both(model: nn.Module, x: Any, memory: Any, **options: Any) -> tuple[nn.Module, mst.Sequential]:
    return model, mst.Sequential(copy.deepcopy(model), x, memory, **options)


# ------------------------------------------------------------------ exactness


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("memory", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("planner", ["optimal", "revolve", "periodic"])
def test_training_is_plain_training(memory: float, planner: Any, wants: bool) -> None:
    x = torch.randn(256, WIDTH, requires_grad=wants)
    plain, ours = both(a_chain(*DEEP), x, memory, planner=planner)
    assert ours.plan.keeps_all == (memory == 1.0 and planner != "revolve")
    assert_trains_alike(plain, ours, x)


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=9), st.floats(0.0, 1.0))
@settings(max_examples=15, deadline=None)
def test_random_chains(kinds: list[str], share: float) -> None:
    x = torch.randn(128, WIDTH)
    model = a_chain("linear", *kinds, "linear")
    try:
        copy.deepcopy(model)(x).sum().backward()
    except RuntimeError:  # written over what a gradient needs
        assert_fails_alike(model, x, share)
        return
    whole = mst.Sequential(copy.deepcopy(model), x, memory=1.0).plan
    with pytest.raises(BudgetError) as refused:
        mst.Sequential(copy.deepcopy(model), x, memory=1)
    least = int(str(refused.value).split("< ")[1].split(" bytes")[0])
    memory = int(least + share * max(0, whole.plain_bytes - least))
    plain, ours = both(model, x, memory)
    assert_trains_alike(plain, ours, x)


def test_twice_in_one_graph_and_accumulation() -> None:
    x = torch.randn(128, WIDTH)
    plain, ours = both(a_chain(*("linear", "tanh", "residual") * 4), x, 0.6)
    for model in (plain, ours):
        (model(model(x)) + model(2 * x)).sum().backward()
        model(x).sum().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Appending(nn.Linear):
    """Changes the list that it takes."""

    def forward(self, state: Any) -> Any:
        state.append(super().forward(state[-1]).tanh())
        return state


class OnGraph(nn.Linear):
    """Passes a sparse tensor on."""

    def forward(self, state: Any) -> Any:
        return super().forward(torch.sparse.mm(state[1], state[0])).tanh(), state[1]


class Skips(nn.Linear):
    """Keeps its output for a later stage, which takes it."""

    def __init__(self, kept: dict[int, Tensor], number: int, puts: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept, self.number, self.puts = kept, number, puts

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        if not self.puts:
            return y + self.kept.pop(self.number)
        self.kept[self.number] = y
        return y


def several_times() -> list[nn.Module]:
    shared = Residual()
    return [shared, nn.Tanh(), Residual(), shared, Residual(), shared]


def skipping() -> list[nn.Module]:
    kept: dict[int, Tensor] = {}
    return [Skips(kept, min(k, 7 - k), k < 4) for k in range(8)]


STAGES: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[Tensor], Any], float]] = {
    "several times": (several_times, lambda x: x, 0.7),
    "skips": (skipping, lambda x: x, 0.9),
    "a list": (lambda: [Appending(WIDTH, WIDTH) for _ in range(6)], lambda x: [x], 0.8),
    "a sparse state": (
        lambda: [OnGraph(WIDTH, WIDTH) for _ in range(6)],
        lambda x: (x, torch.eye(len(x)).to_sparse_coo()),
        0.9,
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_that_share_or_pass_on_other_things(name: str) -> None:
    make, given, memory = STAGES[name]
    plain = nn.Sequential(*make())
    chain = mst.Sequential(copy.deepcopy(plain), memory=memory)
    x = torch.randn(64, WIDTH, requires_grad=True)
    found = []
    for model in (plain, chain):
        y = model(given(x))
        sum(t.square().sum() for t in _leaves(y) if t.requires_grad).backward()
        found.append([*_leaves(y)[:1], x.grad, *(p.grad for p in model.parameters())])
        x.grad = None
    assert not chain.plan.keeps_all
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.long
def test_compiled_stages_train_within_a_limit() -> None:
    """The compiler leaves the hooks alone that are called while a compiled stage runs."""
    plain = a_chain(*("residual",) * 4)
    stages: Any = [torch.compile(block, backend="aot_eager") for block in copy.deepcopy(plain)]
    chain = mst.Sequential(stages, memory=0.7)
    x = torch.randn(32, WIDTH, requires_grad=True)
    found = []
    for model in (plain, chain):
        (y,) = torch.autograd.grad(model(x).square().sum(), x)
        found.append(y)
    assert not chain.plan.keeps_all
    torch.testing.assert_close(*found)


@pytest.mark.long
def test_compiled_stages_stay_compiled() -> None:
    """The compiler never again runs what it has met below a mode that looks at operations."""
    runs = [0]

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        def run(*given: Tensor) -> object:
            runs[0] += 1
            return graph.forward(*given)

        return run

    blocks = a_chain(*("residual",) * 4)
    stages: Any = [torch.compile(block, backend=backend, fullgraph=True) for block in blocks]
    chain = mst.Sequential(stages, memory=0.7)
    x = torch.randn(32, WIDTH, requires_grad=True)
    chain(x).sum().backward()
    runs[0] = 0
    stages[0](x)
    assert runs == [1]


IN_A_COMPILED_STEP = """
import torch
from torch import nn
import multistage.torch as mst

torch.manual_seed(0)
stages = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(8)]
chain = mst.Sequential(stages, memory=0.7)
x = torch.randn(128, 64, requires_grad=True)

def step():
    chain(x.sin()).sum().backward()

found = []
for run in (torch.compile(step, backend="aot_eager"), step):
    x.grad = None
    run()
    found.append(x.grad)
assert chain.plan is not None and not chain.plan.keeps_all
assert torch.equal(*found)
"""


@pytest.mark.long
def test_stages_of_a_compiled_step() -> None:
    """A chain in what is compiled runs, and runs again, as it is written.

    In a process of its own: where a compiled stage has run, the compiler leaves us alone.
    """
    code = [sys.executable, "-W", "ignore", "-c", IN_A_COMPILED_STEP]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------- memory


def _least(model: nn.Module, x: Tensor, planner: Any = "optimal") -> int:
    """Return the smallest limit that works, which the error for a smaller one names."""
    with pytest.raises(BudgetError) as refused:
        mst.Sequential(model, x, memory=1, planner=planner)
    return int(str(refused.value).split("< ")[1].split(" bytes")[0])


@pytest.mark.long(but="*-0.0")
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("planner", ["optimal", "revolve"])
@pytest.mark.parametrize("wants", [True, False])
def test_the_limit_holds_for_every_byte(share: float, planner: Any, wants: bool) -> None:
    """What operations allocate and graphs save, from the input to the input's gradient."""
    x = torch.randn(256, WIDTH, requires_grad=wants)
    model = a_chain(*("linear", "batch norm", "relu in place", "residual", "dropout", "tanh") * 4)
    whole = mst.Sequential(model, x, memory=1.0).plan
    least = _least(model, x, planner)
    memory = int(least + share * (whole.plain_bytes - least))
    ours = mst.Sequential(model, x, memory=memory, planner=planner)
    ours(x).sum().backward()  # gradients of parameters are there from now on
    x.grad = None
    gc.collect()
    with Meter(torch.device("cpu")) as meter:
        meter.ignore(ours.parameters())
        meter.ignore(p.grad for p in ours.parameters() if p.grad is not None)
        meter.ignore([x])
        y = ours(x)
        y.backward(torch.ones_like(y))
    peak = meter.peak_bytes + x.nbytes
    assert peak <= memory
    assert peak >= 0.7 * ours.plan.peak_bytes


def test_nothing_is_kept_after_a_forward_without_backward() -> None:
    x = torch.randn(64, WIDTH)
    ours = mst.Sequential(a_chain(*DEEP), x, memory=0.6)
    with Meter(torch.device("cpu")) as meter:
        meter.ignore(ours.parameters())
        meter.ignore([x, *ours.buffers()])
        y = ours(x)
        assert meter.live_bytes() > 2 * x.nbytes
        del y
        assert meter.live_bytes() < x.nbytes  # counts of batches, made again


# --------------------------------------------------------------- as a module


def test_it_is_an_ordinary_module() -> None:
    x = torch.randn(128, WIDTH)
    model = a_chain(*DEEP)
    names = list(model.state_dict())
    ours = mst.Sequential(model, x, memory=0.6)
    assert list(ours.state_dict()) == names
    a_chain(*DEEP).load_state_dict(ours.state_dict())
    ours.load_state_dict(a_chain(*DEEP).state_dict())
    assert len(ours) == len(DEEP) and ours[0] is model[0] and list(ours) == list(model)
    assert "memory=0.6" in repr(ours)
    assert "plan optimal" in str(ours.plan)
    assert next(ours.double().parameters()).dtype == torch.float64
    ours.float().eval()
    with torch.no_grad():
        assert torch.equal(ours(x), model(x))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_copies_train_alike(again: Callable[[Any], Any]) -> None:
    x = torch.randn(128, WIDTH)
    plain, ours = both(a_chain(*("linear", "tanh", "dropout") * 4), x, 0.6)
    ours(x).sum().backward()
    ours.zero_grad()
    assert_trains_alike(plain, again(ours), x)


def test_costs_measured_elsewhere(tmp_path: Any) -> None:
    x = torch.randn(128, WIDTH)
    model = a_chain(*("linear", "tanh") * 4)
    costs = mst.profile(model, x, seconds=0.1)
    costs.save(tmp_path / "costs.json")
    loaded = StageCosts.load(tmp_path / "costs.json")
    plain, ours = both(model, x, 0.9, costs=loaded)
    assert_trains_alike(plain, ours, x)
    assert all(p.grad is not None for p in plain.parameters())
    with pytest.raises(ArgumentError, match="costs of 8 stages"):
        mst.Sequential(a_chain("linear", "tanh"), x, 0.9, costs=loaded)


# ------------------------------------------------------------------ bad input


def test_unsupported_uses_raise_errors() -> None:
    x = torch.randn(128, WIDTH, requires_grad=True)
    ours = mst.Sequential(a_chain(*("linear", "tanh") * 6), x, memory=0.6)
    y = ours(x).sum()
    with pytest.raises(MultistageError, match="double backward"):
        torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(BudgetError, match="smallest limit"):
        mst.Sequential(a_chain("linear", "tanh"), x, memory=10)
    with pytest.raises(ArgumentError, match=r"multistage\.torch\.compile"):
        mst.Sequential(Residual(), x)
    with pytest.raises(ArgumentError, match="at least one stage"):
        mst.Sequential([], x)
    with pytest.raises(ArgumentError, match="stages are callable"):
        mst.Sequential([nn.Tanh(), 3], x)


def test_another_kind_of_input() -> None:
    ours = mst.Sequential(a_chain(*("linear", "tanh") * 6), torch.randn(128, WIDTH), memory=0.6)
    ours(torch.randn(256, WIDTH)).sum().backward()  # profiled and planned again
    strict = mst.Sequential(
        a_chain(*("linear", "tanh") * 6), torch.randn(128, WIDTH), memory=0.6, replan=False
    )
    with pytest.raises(ArgumentError, match="another kind"):
        strict(torch.randn(256, WIDTH))


@pytest.mark.parametrize("which", ["input", "between"])
def test_a_state_written_to_is_refused(which: str) -> None:
    """Plain autograd refuses it too: run again from there, the gradient would be another."""
    x = torch.randn(128, WIDTH)
    seen: list[Tensor] = []
    model = a_chain(*("linear", "tanh") * 8)
    ours = mst.Sequential(model, x, memory=0.6)
    for layer in model:  # planned for before: what hooks keep would count
        layer.register_forward_hook(lambda _m, _i, y: seen.append(y.detach()))
    loss = ours(x).sum()
    for tensor in [x] if which == "input" else list(seen[:-1]):
        tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


class Grows(nn.Module):
    """Computes more, and saves more, while a variable of the process says so."""

    def forward(self, x: Tensor) -> Tensor:
        more = os.environ.get("MULTISTAGE_TEST_GROWS")
        y = (x + 0 if more else x).exp()
        return y.sin() if more else y


def test_a_stage_that_saves_more_when_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, requires_grad=True)
    costs = StageCosts(tuple(Stage(str(i), 1.0, 1.0, 40, 100, 40) for i in range(4)), 1, 1)
    ours = mst.Sequential([Grows() for _ in range(4)], x, memory=261, costs=costs, check="off")
    assert not ours.plan.keeps_all
    y = ours(x)
    monkeypatch.setenv("MULTISTAGE_TEST_GROWS", "1")
    with pytest.raises(StateError, match="saved other tensors when it was run again"):
        y.sum().backward()
