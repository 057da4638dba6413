"""Some hundred random cases; `fuzz_gradients.py` runs them for hours."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_gradients import run_case, simplest
from fuzzing.cases import PLAYS, Case, draw
from fuzzing.contents import DTYPES, Leaf, Lender, content, values
from fuzzing.corpus import CORPUS, REFUSED
from fuzzing.operators import Operators
from fuzzing.oracle import store_all
from signals import ctrl_c_works as ctrl_c_works

FUZZ = Path(__file__).with_name("fuzz_gradients.py")
EACH = 20  # cases of each play


@pytest.mark.long(but="call")
@pytest.mark.parametrize("play", PLAYS)
def test_random_cases_are_exact_or_refused(play: str, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(EACH):
        case = draw(seed, play)
        if case.costs == "measured":  # for half a second
            case = replace(case, costs="right")
        seen = run_case(case, tmp_path)
        assert seen.findings == [], str(case)
        outcomes += seen.outcomes
    assert outcomes["exact"], outcomes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CORPUS)
def test_earlier_failures_pass(name: str, tmp_path: Path) -> None:
    seen = run_case(CORPUS[name], tmp_path)
    assert seen.findings == [], str(CORPUS[name])
    wanted = REFUSED.get(name)
    assert bool(seen.refusals) == (wanted is not None) and bool(seen.outcomes), seen
    assert all(re.search(str(wanted), message) for message in seen.refusals), seen.refusals
    assert seen.outcomes["exact"] or wanted is not None


def test_a_case_follows_from_its_number() -> None:
    for seed in range(200):
        assert draw(seed) == draw(seed)
    assert {draw(seed).play for seed in range(200)} == set(PLAYS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_contents_follow_from_their_key(dtype: str, shape: tuple[int, ...]) -> None:
    leaf = Leaf(dtype, shape)
    lender = Lender(leaf.nbytes)
    one, other, lent = content(leaf, b"key"), content(leaf, b"key"), lender.lend(leaf)
    lent[...] = one
    assert values(one) == values(other) == values(lent)
    assert (one.shape, one.dtype) == (lent.shape, lent.dtype) == (shape, DTYPES[dtype])
    if one.nbytes:
        assert values(one) != values(content(leaf, b"another"))


def test_an_answer_depends_on_every_step_and_leaf() -> None:
    case = Case(0, n=5, tree="dict", leaves=(Leaf("f8", (3,)), Leaf("?", (9,))))
    case = replace(case, starts=("plain",) * 2, manners=("new",) * 2)
    answers = {store_all(replace(case, n=n)) for n in range(1, 6)}
    answers |= {
        store_all(replace(case, leaves=(leaf, case.leaves[1])))
        for leaf in (Leaf("f8", (4,)), Leaf("f4", (3,)))
    }
    answers |= {store_all(replace(case, seed=seed)) for seed in range(1, 4)}
    assert len(answers) == 10
    assert store_all(case) == store_all(replace(case, slots=7, planner="online"))


def test_a_wrong_gradient_is_found_and_made_simpler(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one tape, in one call of many."""
    honest = Operators.adjoint

    def wrong(self: Operators, tape: object, adjoint: object, i: int) -> object:
        if i == 2 and self.called is not None:  # the package's operators, not the oracle's
            tape = self.start()
        return honest(self, tape, adjoint, i)

    monkeypatch.setattr(Operators, "adjoint", wrong)
    case = Case(0, n=21, sweeps=2, tiers=("memory:",), checked=True)
    seen = run_case(case)
    assert seen.findings == ["another gradient"] * 2
    case, seen = simplest(case, seen)
    assert (case.n, case.sweeps, case.tiers, case.checked) == (3, 1, (), False)
    assert seen.findings == ["another gradient"]


def test_leftovers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuzzing.plays import PLAYED, Play

    def leaving(play: Play) -> None:
        (play.folder / "forgotten").touch()
        sys.setswitchinterval(0.0123)

    monkeypatch.setitem(PLAYED, "sweeps", leaving)
    found = "\n".join(run_case(Case(0)).findings)
    assert "file forgotten" in found and "switch interval" in found


@pytest.mark.long
def test_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FUZZ, "--cases", "12", "--seed", "100"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 cases in" in done.stdout and ": 0 findings" in done.stdout
    assert list(tmp_path.iterdir()) == []
