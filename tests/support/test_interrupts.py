"""Ctrl-C: real signals, in processes of their own, at chosen and at random moments."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from signals import ctrl_c_works as ctrl_c_works

from multistage.support.interrupts import Shield

CHILD = """
import gc, json, os, signal, sys, threading
from pathlib import Path
import numpy as np
from multistage import Costs, Reversal, Tier
from multistage.errors import ArgumentError

folder, engine, what = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
N, GIVEN = 200, Costs(2e-5, 4e-5, state_bytes=8_192, tiers=(Tier("file", 4e-5, 4e-5),))
tier = "memory:" if engine == "memory" else f"file:{folder}?engine={engine}&buffers=0"
hit = {"where": None, "step": 0}


def at(where, i):
    if hit["where"] == where and hit["step"] == i:
        hit["where"] = None
        os.kill(os.getpid(), signal.SIGINT)  # Python answers within a few instructions


def step(x, i):
    at("forward", i)
    return np.sin(x) + 0.01 * i


def adjoint_step(x, a, i):
    at("reverse", i)
    return np.cos(x) * a


def left():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), os.listdir(folder)


def reversal(costs=GIVEN):
    return Reversal(step, adjoint_step, N, memory="12 slots", tiers=tier, costs=costs,
                    planner="streaming")


def swept():
    with reversal() as run:
        run.forward(np.linspace(0, 1, 1024))
        return run.reverse(np.ones(1024)).tolist()


def stopped(costs=GIVEN):
    '''Run until Ctrl-C; return what the report says, and check that nothing is left.'''
    before, start = left(), np.linspace(0, 1, 1024).copy()
    told, caught = "", False
    try:
        with reversal(costs) as run:
            run.forward(start)
            run.reverse(np.ones(1024))
    except KeyboardInterrupt:
        caught = True
        try:
            report = run.report()
            told = report.ended
            assert report.to_dict()["ended"] == told and str(report) and report._repr_html_()
            assert told or report.counts.reverse_steps == N
        except ArgumentError as error:
            told = str(error)
    assert start.flags.writeable or not caught
    assert left() == before, (left(), before)
    return caught, told


exact = swept()
measured = what.pop("measured", False)
hit.update(what)
print(json.dumps(stopped(None if measured else GIVEN)))
assert swept() == exact
"""


def child(folder: Path, engine: str, **what: Any) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), engine, json.dumps(what)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long(but="*-7-memory")
@pytest.mark.parametrize("engine", ["memory", "aiofiles"])
@pytest.mark.parametrize("step", [0, 7, 199])
@pytest.mark.parametrize("where", ["forward", "reverse"])
def test_a_partial_report(where: str, step: int, engine: str, tmp_path: Path) -> None:
    caught, told = child(tmp_path, engine, where=where, step=step)
    assert caught
    assert f"interrupted in the {where} sweep: " in told
    forward, reversed_ = _counts(told)
    if where == "forward":
        assert (reversed_, step - 5 <= forward <= step + 5) == (0, True)
    else:
        assert (forward, 199 - step - 1 <= reversed_ <= 199 - step + 1) == (200, True)


def _counts(told: str) -> tuple[int, int]:
    """Return the steps run forward and reversed, of a report's sentence."""
    numbers = [int(word) for word in told.split(": ")[1].split() if word.isdigit()]
    assert numbers[1] == 200, told
    return numbers[0], numbers[2]


def test_before_the_first_step(tmp_path: Path) -> None:
    """Within step 0, which is timed so that the rest can be planned."""
    caught, told = child(tmp_path, "memory", where="forward", step=0, measured=True)
    assert caught
    assert "no step to report: the run was interrupted in the forward sweep" in told


@pytest.mark.long(but=("native", "durable"))
@pytest.mark.parametrize("name", ["memory", "native", "direct", "aiofiles", "cascade", "durable"])
def test_at_any_moment(name: str) -> None:
    """11 of 20 such processes ended in a crash while a native store opened, 3 in a hang."""
    program = Path(__file__).parent.parent / "ctrl_c.py"
    done = subprocess.run(
        [sys.executable, program, "--child", name, "8", "1"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [name, 8, []]


COMMAND = """
import os, signal, sys
from multistage.cli import main
from multistage.demos.lstm import LSTM

step, update = LSTM.step, LSTM.update
left = [5 if sys.argv[1] == "measuring" else -1]


def counted(self, *arguments):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, *arguments)


def updated(self, *arguments):  # the first sweep is over
    if left[0] < 0:
        left[0] = 300
    return update(self, *arguments)


LSTM.step, LSTM.update = counted, updated
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("when", ["measuring", "sweeping"])
def test_the_command_line_reports_its_progress_when_interrupted(when: str, tmp_path: Path) -> None:
    run = ["demo", "lstm", "--n-steps=400", "--width=8", "--batch=2", "--sweeps=3"]
    run += ["--planner=revolve", "--tiers=memory:", f"--output={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, when, *run], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("multistage: interrupted\n")
    assert "Traceback" not in done.stderr
    told = "Interrupted in the forward sweep: [0-9]+ of 400 steps run forward, 0 reversed"
    assert bool(re.search(told, done.stderr)) == (when == "sweeping")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("call", ["signal", "getsignal"])
@pytest.mark.parametrize("leaving", [False, True])
def test_ctrl_c_while_a_shield_is_set_or_lowered(
    leaving: bool, call: str, up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    module = sys.modules["_signal"]
    real = getattr(module, call)

    def struck(*args: Any) -> Any:
        found = real(*args)
        monkeypatch.setattr(module, call, real)
        signal.raise_signal(signal.SIGINT)
        return found

    try:
        with pytest.raises(KeyboardInterrupt):
            if not leaving:
                monkeypatch.setattr(module, call, struck)
            with Shield(up):
                if leaving:
                    monkeypatch.setattr(module, call, struck)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
