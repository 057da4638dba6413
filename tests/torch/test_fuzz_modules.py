"""Some random modules; `fuzz_modules.py` runs thousands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz_modules import Finding, play, simplest
from modulefuzz.corpus import CORPUS
from modulefuzz.programs import BEFORE, BETWEEN, BLOCKS, CALLS, FLOWS, FRONTS, Case, draw, text
from torch import Tensor

from multistage.torch.chains.runner import Run

EACH = 12
# What is not equal to plain training: the kind of module, and how it is refused.
REFUSED = {
    "sequential": {
        "Hidden": "returns other numbers each time it is",
        "Lazy": "a lazy module has parameters",
        "Renormalised": "writes to parameter in place",
        "MaxNorm": "writes to parameter in place",
    },
    "unroll": {
        "CarriesGraph": "keeps a tensor with a graph in",
        "Attribute": "changes attribute when it runs its first",
        "Helper": "changes attribute when it runs its first",
        "Hidden": "returned other numbers when its first step",
        "ClassCounter": "changes class attribute when it runs",
        "Reentrant": "uses reentrant whose gradients autograd",
        "Lazy": "a lazy module has parameters",
        "Cached": "changes attribute when it runs its first",
        "MaxNorm": "changes parameter when it runs its first",
        "Sparse": "has a sparse gradient",
        "LateNoise": "draws from generator of cpu at steps",
        "LateDraw": "draws from generator of cpu at steps",
        "OldSpectralNorm": "changes attribute when it runs its first",
        "OldWeightNorm": "changes attribute when it runs its first",
        "Everywhere": "changes attribute attribute attribute class attribute when",
    },
    "offload": {},
}
# Whose own gradients plain autograd refuses, there.
NOT_PLAIN = {
    "sequential": ("Overwrites",),
    "unroll": ("Renormalised", "LateBuffer"),
    "offload": ("Overwrites",),
}
# Not left to the long tests: kinds that `unroll` or plain autograd refuses, and some others.
SHORT = [
    "sequential-*",
    *(f"unroll-{name}" for name in (*REFUSED["unroll"], *NOT_PLAIN["unroll"])),
    *(f"*-{name}" for name in ("Dense", "BatchNorm", "Dropout", "Seeded", "Bias", "Overwrites")),
]


@pytest.mark.long(but=SHORT)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("front", REFUSED)
def test_every_kind_of_module_is_exact_or_refused(front: str, name: str) -> None:
    blocks = (name, "Dense") if front == "unroll" else (name, "Dense", name, "Residual", "Dense")
    memory = 0.5 if front == "unroll" else 0.6
    case = Case(0, front, blocks, memory, check="error", steps=2, wants=True)
    if name in NOT_PLAIN[front]:
        assert play(case).startswith("plain training: RuntimeError")
    elif name in REFUSED[front]:
        assert f" {REFUSED[front][name]}" in play(case)
    else:
        assert play(case) == "equal"


@pytest.mark.parametrize("name", ["Grouped", "Bias", "OldSpectralNorm", "Sparse", "Counter"])
def test_some_kinds_of_modules_are_captured(name: str) -> None:
    blocks = (name, "Residual", "Dense", "Residual", "Residual", "Dense", "Residual")
    assert play(Case(0, "compile", blocks, 0.8, check="error", steps=2, wants=True)) == "equal"


# Chains whose loops do something before or between the sweeps, call otherwise, or pass a tree.
MIXED = ("Dense", "Seeded", "BatchNorm", "Dropout", "Annealed", "Everywhere", "Residual", "Dense")
LOOP = Case(0, "sequential", MIXED, 0.7, "error", 2, wants=True)
LOOPS: dict[str, Case] = {
    **{f"between: {event}": replace(LOOP, between=(event,)) for event in BETWEEN},
    **{f"before: {event}": replace(LOOP, before=(event,)) for event in BEFORE},
    **{f"flow: {flow}": replace(LOOP, flow=flow) for flow in FLOWS},
    **{f"call: {call}": replace(LOOP, call=call) for call in CALLS},
    "functional and frozen": replace(LOOP, call="functional", frozen=True),
    "thawed": replace(LOOP, between=("thaw",), frozen=True),
    "tied, of functions": replace(LOOP, tied=True, closures=True),
    "of functions, assigned": replace(LOOP, between=("assign",), closures=True),
}
# Writes that plain autograd refuses, and those that leave it no version to see.
REFUSED_LOOPS = {
    "between: write": "plain training: RuntimeError",
    "between: buffers": "plain training: RuntimeError",
    "between: input": "plain training: RuntimeError",
    "between: data": "refused: parameter of stage",
    "between: fused": "refused: parameter of stage",
    "between: numpy": "refused: parameter of stage",
}


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_is_exact_or_refused(name: str) -> None:
    assert play(LOOPS[name]).startswith(REFUSED_LOOPS.get(name, "equal"))


@pytest.mark.long
@pytest.mark.parametrize("front", FRONTS)
def test_random_modules_are_exact_or_refused(front: str) -> None:
    ends = Counter(play(draw(seed, front)) for seed in range(EACH))
    assert ends["equal"] >= EACH / 4, ends


@pytest.mark.parametrize("name", CORPUS)
def test_earlier_failures_pass(name: str) -> None:
    play(CORPUS[name])


def test_a_case_follows_from_its_number() -> None:
    for seed in range(100):
        assert text(draw(seed)) == text(draw(seed))
    assert {draw(seed).front for seed in range(100)} == set(FRONTS)


def test_a_wrong_gradient_is_found_and_made_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Run._tensor

    def wrong(self: Run, i: int, number: int) -> Tensor:
        tensor = honest(self, i, number)
        return tensor + 1 if tensor.is_floating_point() else tensor

    monkeypatch.setattr(Run, "_tensor", wrong)
    monkeypatch.setattr("fuzz_modules.SHRINK_S", 10.0)
    case = Case(0, "sequential", ("Dense", "Conv", "Residual", "Residual"), 0.6, steps=2, tied=True)
    with pytest.raises(Finding, match="differ: gradient") as found:
        play(case)
    simple, _ = simplest(case, found.value)
    assert (simple.steps, simple.tied) == (1, False)
    assert len(simple.blocks) < 4
    assert play(replace(simple, check="error")).startswith("refused: the chain does not do what")


@pytest.mark.long
def test_a_program_runs_by_itself(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text(Case(0, "sequential", ("Dense", "Dropout", "Dense"))))
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert done.stdout == "these differ: []\n"
