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
from modulefuzz.programs import FRONTS, Case, draw, text
from torch import Tensor

from multistage.torch.chains.runner import Run

EACH = 12


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
