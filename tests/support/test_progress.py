"""Progress bars: shown where somebody watches, nowhere else, and never in the way."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import CHAINS, raw, store_all

from multistage import Costs, Reversal, Stage, StageCosts, Tier, measure, plan, plan_chain
from multistage.measurement.store import probe_tier
from multistage.model.chain import FunctionChain
from multistage.planners.ranking import trade_off
from multistage.support import progress
from multistage.support.progress import VARIABLE, in_notebook, is_shown

COSTS = Costs(1.0, 2.0, state_bytes=10)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(patch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in place of standard error, whose bars appear at once; return it.

    No fixture: pytest itself replaces the stream between setting up and calling.
    """
    screen = Terminal()
    patch.delenv(VARIABLE, raising=False)
    patch.setattr(sys, "stderr", screen)
    patch.setattr(progress, "_DELAY_S", 0.0)
    patch.setattr(progress, "_EVERY_S", 0.0)
    return screen


@pytest.mark.parametrize(
    ("given", "setting", "stream", "expected"),
    [
        (True, "0", io.StringIO(), True),
        (False, "1", Terminal(), False),
        (None, None, Terminal(), True),
        (None, None, io.StringIO(), False),
        (None, "0", Terminal(), False),
        (None, "off", Terminal(), False),
        (None, "1", io.StringIO(), True),
        (None, "", Terminal(), True),
        (None, None, None, False),
        (None, None, object(), False),
    ],
)
def test_who_watches(
    given: bool | None,
    setting: str | None,
    stream: Any,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    if setting is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, setting)
    assert is_shown(given) is expected


def test_threads_beside_the_main_one_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.extend([is_shown(None), is_shown(True)]))
    thread.start()
    thread.join()
    assert (found, is_shown(None)) == ([False, True], True)


def test_a_closed_stream_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    screen.isatty = screen.getvalue
    screen.close()  # asked, it raises ValueError
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not is_shown(None)


def test_notebooks_are_known_by_their_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert in_notebook() and is_shown(None)
    shell.config = {"TerminalIPythonApp": {}}
    assert not in_notebook()


def test_bars_over_both_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    threads = threading.active_count()
    with Reversal(
        CHAINS["nested"][0](), n_steps=33, memory="5 slots", costs=COSTS, planner="revolve"
    ) as run:
        last = raw(run.forward(CHAINS["nested"][1]()))
        assert "forward:" in terminal.getvalue() and "reverse:" in terminal.getvalue()
        assert (last, run.reverse(1)) == store_all("nested", 33)
    assert "/33" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")  # they vanish
    assert threading.active_count() == threads


@pytest.mark.parametrize("chain", CHAINS)
def test_long_runs_go_in_pieces(chain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One action may be hours: the bar moves within it, and the gradient is the same."""
    watched(monkeypatch)
    monkeypatch.setattr(progress, "_PIECE_S", 4.0)  # four steps of a second
    seen: list[tuple[int, int]] = []
    costs = Costs(1.0, 2.0, 1.2, 10, 20) if "tape" in chain else COSTS
    made = CHAINS[chain][0]()
    advance = made.advance

    def watching(state: Any, start: int, stop: int) -> Any:
        seen.append((start, stop))
        return advance(state, start, stop)

    monkeypatch.setattr(made, "advance", watching)
    run: Reversal[Any, Any] = Reversal(
        made, n_steps=33, memory="5 slots", costs=costs, planner="revolve"
    )
    with run:
        last = raw(run.forward(CHAINS[chain][1]()))
        forward = len(seen)
        assert (last, run.reverse(1)) == store_all(chain, 33)
        assert run.report().counts.forward_steps == run.report().plan.forward_steps
    assert max(stop - start for start, stop in seen) == 4
    assert sum(stop - start for start, stop in seen[:forward]) >= 32


def test_an_exception_takes_the_bar_along(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)

    def step(x: Any, i: int) -> Any:
        if i == 20:
            raise KeyError("bang")
        return x + 1

    run: Reversal[Any, Any] = Reversal(
        step, lambda x, a, i: a, 33, memory="5 slots", costs=COSTS, planner="revolve"
    )
    with pytest.raises(KeyError):
        run.forward(np.zeros(3))
    assert run._sweeps.bars._bar is None
    assert terminal.getvalue().endswith("\r")


def test_measuring_planning_and_solving_show_bars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = watched(monkeypatch)
    chain: Any = FunctionChain(lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a)
    measure(chain, np.zeros(100), 50, seconds=0.01)
    tiered = Costs(1.0, 2.0, tiers=(Tier("t", 1.0, 1.0),))
    plan(tiered, "5 slots", 50)
    trade_off(tiered, 50, ["revolve"])
    stages = [Stage(f"{i}", 1.0, 2.0, 10 + i, 30 + 2 * i) for i in range(20)]
    plan_chain(StageCosts(tuple(stages), 10), 0.4)
    probe_tier(tmp_path, [4096], seconds=0.02)
    for what in ("measuring", "planning", "trade-off", "solving", "probing"):
        assert f"{what}:" in terminal.getvalue(), what
    assert "revolve" in terminal.getvalue()  # what it is at


PROGRAM = """
import sys, numpy as np, multistage as ms
from multistage.support import progress
progress._DELAY_S = progress._EVERY_S = 0.0
ms.reverse(lambda x, i: x, lambda x, a, i: a, np.zeros(2), np.ones(2), 50, memory="5 slots",
           costs=ms.Costs(1.0, 2.0))
"""


@pytest.mark.parametrize("size", [(0, 0), (24, 80)])
@pytest.mark.parametrize("setting", [None, "0"])
def test_on_a_real_terminal(setting: str | None, size: tuple[int, int]) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)  # those that programs make have none
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    if setting is not None:
        environment[VARIABLE] = setting
    try:
        subprocess.run(
            [sys.executable, "-c", PROGRAM], stderr=theirs, env=environment, check=True, timeout=280
        )
        os.write(theirs, b"END")
        seen = ""
        while not seen.endswith("END"):
            seen += os.read(ours, 100_000).decode(errors="replace")
    finally:
        os.close(ours)
        os.close(theirs)
    assert ("forward:" in seen and "reverse:" in seen) == (setting is None)
    assert setting is None or seen == "END"
