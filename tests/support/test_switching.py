"""The switch interval is short while runs with stores are at work, and restored by the last."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from multistage import Costs, Reversal, Tier
from multistage.support import switching

COSTS = Costs(1e-3, 1e-3, state_bytes=80, tiers=(Tier("memory", 1e-3, 1e-3),))


@pytest.fixture(autouse=True)
def before() -> Iterator[float]:
    interval = sys.getswitchinterval()
    yield interval
    found = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    assert found == interval


def test_two_runs_that_overlap(before: float) -> None:
    """The first to begin is the first to end: the second must not restore what it found."""
    entered, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    seen: list[float] = []

    def run(number: int) -> None:
        def step(x: np.ndarray, i: int) -> np.ndarray:
            entered[number].set()
            assert leave[number].wait(60)
            return np.sin(x)

        with Reversal(
            step, lambda x, a, i: a, 8, memory="3 slots", tiers="memory:", costs=COSTS
        ) as one:
            one.forward(np.zeros(10))
            seen.append(sys.getswitchinterval())

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for number, thread in enumerate(threads):
        thread.start()
        assert entered[number].wait(60)
        assert sys.getswitchinterval() == 5e-4
    for number, thread in enumerate(threads):
        leave[number].set()
        thread.join(60)
    assert seen == [5e-4, before]


def test_a_value_set_meanwhile_holds(before: float) -> None:
    user = object()
    switching.shorten(user)
    sys.setswitchinterval(2e-3)
    switching.restore(user)
    assert sys.getswitchinterval() == 2e-3
    sys.setswitchinterval(before)


def test_a_forked_child_has_its_own(before: float) -> None:
    user = object()
    switching.shorten(user)
    child = os.fork()
    if not child:
        switching.restore(user)
        os._exit(0 if sys.getswitchinterval() == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sys.getswitchinterval() == 5e-4
    switching.restore(user)
