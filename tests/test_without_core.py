"""Without the C core: chains are planned, but not with a tier, which every front door says."""

import numpy as np
import pytest

from multistage import Reversal, native, plan_chain
from multistage.cli import main
from multistage.errors import ArgumentError
from multistage.model.chain import FunctionChain
from multistage.model.stages import Stage, StageCosts
from multistage.planners import Plan

LAYERS = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 40), 10)
REFUSED = (
    "a tier for stages or steps that differ needs the C core .*"
    "install a C compiler, then: pip install .*; or plan without a tier"
)


@pytest.fixture
def without_core(monkeypatch):
    monkeypatch.setattr(native, "LIBRARY", None)
    monkeypatch.setattr(native, "_WHY", "")


def growing(state, i):
    return np.concatenate((state, [float(i)]))


GROWING = FunctionChain(growing, lambda state, adjoint, i: adjoint[: len(state)])


def test_plan_chain_refuses_a_tier(without_core):
    with pytest.raises(ArgumentError, match=REFUSED):
        plan_chain(LAYERS, 0.4, tiers="write=1GB/s")
    with pytest.raises(ArgumentError, match="MULTISTAGE_CORE=off switches it off"):
        plan_chain(LAYERS, tiers="write=1GB/s")  # even where all fits


def test_the_command_line_says_so(without_core, tmp_path, capsys):
    file = tmp_path / "costs.json"
    file.write_text(LAYERS.to_json())
    given = ["plan", "--chain", str(file), "--memory", "40%"]
    assert main(given) == 0
    capsys.readouterr()
    assert main([*given, "--rates", "write=1GB/s"]) != 0
    assert "needs the C core" in capsys.readouterr().err


def test_a_reversal_whose_steps_differ_refuses_a_tier(without_core):
    costs = StageCosts.uniform(6, Stage("step", 1.0, 2.0, 16, 16), 16)
    with pytest.raises(ArgumentError, match=REFUSED):
        Reversal(GROWING, costs=costs, memory=400, n_steps=6, tiers="memory:")
    # Only the second step shows that states differ in size.
    with (
        Reversal(GROWING, memory="3 slots", n_steps=20, tiers="memory:") as reversal,
        pytest.raises(ArgumentError, match=REFUSED),
    ):
        reversal.forward(np.ones(2))
    with Reversal(GROWING, memory="3 slots", n_steps=20) as reversal:
        last = reversal.forward(np.ones(2))
        assert np.array_equal(reversal.reverse(last), np.ones(2)[:2] * last[:2])


def test_plans_without_a_tier_are_the_same(monkeypatch):
    for costs in (LAYERS, StageCosts.from_json(LAYERS.to_json().replace("2.0", "1.5"))):
        with_core = plan_chain(costs, 0.4)
        with monkeypatch.context() as patched:
            patched.setattr(native, "LIBRARY", None)
            patched.setattr(native, "_WHY", "")
            assert plan_chain(costs, 0.4).actions == with_core.actions


@pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
def test_a_plan_from_a_machine_with_the_core_is_read(monkeypatch):
    plan = plan_chain(LAYERS, 0.4, tiers="write=40B/s")
    monkeypatch.setattr(native, "LIBRARY", None)
    monkeypatch.setattr(native, "_WHY", "")
    read = Plan.from_dict(plan.to_dict() | {"lower_bound_s": None})
    assert read.actions == plan.actions


def test_training_with_a_tier_is_refused(without_core):
    torch = pytest.importorskip("torch")
    mst = pytest.importorskip("multistage.torch")
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    with pytest.raises(ArgumentError, match=REFUSED):
        mst.Sequential(layers, torch.ones(2, 8), 0.5, tiers="memory:")
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(8)]
    cells = [lambda h, x, w=w: torch.tanh(h @ w) for w in weights]
    with pytest.raises(ArgumentError, match=REFUSED):
        mst.unroll(cells, torch.ones(64, 4), None, memory=0.4, tiers="memory:")
    out = mst.unroll(cells, torch.ones(64, 4), None, memory="1 MiB")
    assert out.state.shape == (64, 4)
