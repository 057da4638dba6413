"""The public objects, called in any order: the documented result, or the documented error.

python tests/test_stateful.py 5000   # sequences of calls, for as long as that takes
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from leaks import descriptors, native_threads

from multistage import Budget, Costs, FunctionChain, InPlaceChain, Plan, Report, Reversal, Tier
from multistage.errors import ArgumentError, MultistageError, StateError

N = 11
KINDS = {
    "functional": None,
    "in place": None,
    "taped": None,
    "unknown length": None,
    "memory": "memory:?buffers=0",
    "in place, memory": "memory:?buffers=0",
    "native": "file:{folder}?engine=native&buffers=0",
    "direct": "file:{folder}?engine=direct&buffers=0",
    "aiofiles": "file:{folder}?engine=aiofiles&buffers=0",
    "cascade": "memory:12KiB?buffers=0 > file:{folder}?buffers=0",
    "durable": "durable",
    "in place, durable": "durable",
}


class Raised(Exception):
    """What an operator raises."""


class Computation:
    """Steps that raise in the call of a number, and the answers without the package."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.left = -1

    def called(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Raised

    def step(self, x: Any, i: int) -> Any:
        self.called()
        return np.sin(x) + 0.25 * i

    def forward(self, x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            x[...] = self.step(x, i)

    def taped(self, x: Any, i: int) -> tuple[Any, Any]:
        return self.step(x, i), np.cos(x)

    def back(self, x: Any, adjoint: Any, i: int) -> Any:
        self.called()
        return (x if self.kind == "taped" else np.cos(x)) * adjoint

    def chain(self) -> Any:
        if self.kind.startswith("in place"):
            return InPlaceChain(self.forward, self.back)
        return FunctionChain(self.step, self.back, self.taped if self.kind == "taped" else None)

    @staticmethod
    def start() -> Any:
        return np.linspace(0, 1, 7)


def store_all() -> tuple[Any, Any]:
    """Return the last state and the gradient."""
    states = [Computation.start()]
    for i in range(N):
        states.append(np.sin(states[-1]) + 0.25 * i)
    adjoint = np.ones(7)
    for x in reversed(states[:-1]):
        adjoint = np.cos(x) * adjoint
    return states[-1], adjoint


LAST, GRADIENT = store_all()


def same(one: Any, other: Any) -> bool:
    return bool(one.tobytes() == other.tobytes())


class Calls(RuleBasedStateMachine):
    """A Reversal and what is known of it.

    `ready`: a forward sweep stands ready for its reverse.  `told`: what a report
    tells of, "" for nothing.
    """

    @initialize(kind=st.sampled_from(sorted(KINDS)), slots=st.sampled_from((1, 3, 20)))
    def begin(self, kind: str, slots: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.kind, self.slots = kind, slots
        self.before = set(threading.enumerate()), descriptors(), native_threads()
        self.interval = sys.getswitchinterval()
        self.make()

    def make(self) -> None:
        self.computation = Computation(self.kind)
        tier = KINDS[self.kind]
        options: dict[str, Any] = {"tiers": tier and tier.format(folder=self.folder)}
        if tier == "durable":
            options = {"durable": self.folder / "run", "durable_every_s": 0.0}
        tiers = (Tier("tier", 2e-3, 2e-3),) if tier else ()
        costs = Costs(1e-3, 2e-3, 1e-3 if self.kind == "taped" else None, 64, 0, tiers)
        self.run = Reversal(
            self.computation.chain(),
            n_steps=None if self.kind == "unknown length" else N,
            memory=f"{self.slots} slots",
            costs=costs,
            progress=False,
            **options,
        )
        self.ready = self.planned = False
        self.told = ""

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        if self.run is not None:
            self.run.close()
            shutil.rmtree(self.folder / "run", ignore_errors=True)
            assert self.left() == []
        shutil.rmtree(self.folder)

    def left(self) -> list[Any]:
        threads, files, native = self.before
        gc.collect()
        for thread in threading.enumerate():  # it closes what another thread has opened
            if thread.name == "multistage-closing":
                thread.join()
        found: list[Any] = [*(set(threading.enumerate()) - threads), *(descriptors() - files)]
        found += ["native"] * (native_threads() - native)
        assert sys.getswitchinterval() == self.interval
        return [*found, *(path for path in self.folder.iterdir() if path.name != "run")]

    @property
    def until(self) -> Callable[[Any, int], bool] | None:
        return (lambda x, i: i >= N) if self.kind == "unknown length" else None

    # ----------------------------------------------------------------- the sweeps

    @rule()
    def prepare(self) -> None:
        plan = self.run.prepare(self.computation.start())
        assert plan is self.run.plan
        self.planned = True

    @rule(how=st.sampled_from(("here", "in another thread")))
    def forward(self, how: str) -> None:
        start = self.computation.start()
        last = self.somewhere(how, lambda: self.run.forward(start, self.until))
        assert same(last, LAST)
        self.ready, self.planned = True, True  # a report still tells of the sweeps before

    @precondition(lambda self: self.ready)
    @rule(how=st.sampled_from(("here", "in another thread")))
    def reverse(self, how: str) -> None:
        gradient = self.somewhere(how, lambda: self.run.reverse(np.ones(7)))
        assert same(gradient, GRADIENT)
        self.ready, self.told = False, "whole"

    @precondition(lambda self: not self.ready)
    @rule()
    def reverse_without_forward(self) -> None:
        with pytest.raises(ArgumentError, match="needs a forward"):
            self.run.reverse(np.ones(7))

    @rule(call=st.integers(1, 3 * N))
    def an_operator_raises(self, call: int) -> None:
        self.computation.left = call
        try:
            last = self.run.forward(self.computation.start(), self.until)
            assert same(last, LAST)
            assert same(self.run.reverse(np.ones(7)), GRADIENT)
            self.told = "whole"
        except Raised:
            self.told = "part"
        self.computation.left = -1
        self.ready, self.planned = False, True

    @rule()
    def both_and_neither(self) -> None:
        """A wrong call changes nothing."""
        with pytest.raises(ArgumentError, match="give either n_steps"):
            self.run.forward(
                self.computation.start(), None if self.until else lambda state, i: True
            )

    @rule(bad=st.sampled_from((None, "text", np.zeros(2, object), {})))
    def a_state_that_is_none(self, bad: Any) -> None:
        with pytest.raises(StateError):
            self.run.forward(bad, self.until)
        self.ready, self.told = False, ""

    def somewhere(self, how: str, call: Callable[[], Any]) -> Any:
        if how == "here":
            return call()
        found: list[Any] = []

        def kept() -> None:
            try:
                found.append(call())
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=kept)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    # ------------------------------------------------------------- what is told

    @rule()
    def report(self) -> None:
        if self.told == "whole":
            report = self.run.report()
            assert isinstance(report, Report)
            assert report.counts.reverse_steps == N
            assert str(report) and report.to_dict()["ended"] == ""
        elif self.told == "part":
            with contextlib.suppress(ArgumentError):  # stopped before its first step
                assert self.run.report().ended
        else:
            with pytest.raises(ArgumentError, match=r"report\(\)"):
                self.run.report()

    @rule(how=st.sampled_from((copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)))))
    def copies(self, how: Callable[[Any], Any]) -> None:
        """Plans, reports, costs and budgets are values; a Reversal holds what no copy can."""
        for value in (self.run.costs, Budget(slots=self.slots)):
            assert how(value) == value
        plan = self.run.plan
        assert plan is None or isinstance(plan, Plan)
        if plan is not None:
            again = how(plan)
            assert again == plan and str(again) == str(plan)
        if self.told == "whole":
            assert str(how(self.run.report())) == str(self.run.report())
        with pytest.raises(ArgumentError, match="cannot be copied or pickled"):
            how(self.run)

    # ------------------------------------------------------------------ its life

    @rule()
    def close(self) -> None:
        self.run.close()
        self.ready = False

    @rule(error=st.booleans())
    def a_block(self, error: bool) -> None:
        with contextlib.suppress(Raised), self.run as run:
            assert run is self.run
            if error:
                raise Raised
        self.ready = False

    @rule(sweep=st.booleans())
    def dropped(self, sweep: bool) -> None:
        """A run to which nothing refers leaves nothing."""
        if sweep:
            self.run.forward(self.computation.start(), self.until)
        self.run = self.computation = None
        assert self.left() == []
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        self.make()

    @precondition(lambda self: hasattr(os, "fork"))
    @rule(what=st.sampled_from(("forward", "reverse", "close")))
    def a_forked_child(self, what: str) -> None:
        """In a child the same call is exact, or refused by an error of ours; it never hangs."""
        child = os.fork()
        if not child:
            os._exit(self.in_child(what))
        _, status = os.waitpid(child, 0)
        assert status == 0, f"{what} in a child ended with status {status:#x}"

    def in_child(self, what: str) -> int:
        signal.alarm(120)
        try:
            with self.run as run:
                if what == "forward":
                    return int(not same(run.forward(self.computation.start(), self.until), LAST))
                if what == "reverse" and self.ready:
                    return int(not same(run.reverse(np.ones(7)), GRADIENT))
        except MultistageError:
            return 0
        except BaseException:
            traceback.print_exc()
            return 2
        return 0


def configured(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=14,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(Calls, settings=configured(50))


if __name__ == "__main__":
    run_state_machine_as_test(Calls, settings=configured(int(sys.argv[1])))
