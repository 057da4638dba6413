"""No planner has more in memory than its budget: counted by the allocator, not by ourselves.

NumPy tells `tracemalloc` of its arrays.  The chains below look at what is allocated
whenever a step or an adjoint step begins: states and tapes in fast slots, the
live state, the working tape, and whatever somebody has forgotten to let go.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from multistage import PLANNERS, Budget, Costs, Reversal, Tier
from multistage.backends import FileStore
from multistage.chain import FunctionChain, InPlaceChain
from multistage.costs import NOT_KEPT
from multistage.errors import BudgetError
from multistage.interop.checkpoint_schedules import as_planner

SIZE = 16_384  # numbers in a state
STATE = 8 * SIZE
NOISE = 0.3  # states that Python's own objects may take meanwhile
N = 17

KEEPS_TAPES = ("store-all", "periodic", "recursive", "mixed")


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


class Counted:
    """What is allocated beyond the start, in states, at each step and adjoint step.

    Parameters
    ----------
    tape : float or None
        States a tape takes; None if a state is its own.
    in_place, one_tape : bool
    holding : bool
        Whether tapes may be held while steps run, unseen by the chain.
    """

    def __init__(self, tape: float | None, in_place: bool, one_tape: bool, holding: bool) -> None:
        self.tape, self.in_place, self.one_tape = tape, in_place, one_tape
        # In place the last step's tape is a copy, whose arrays stay for the next one.
        self.holding = (holding or in_place) and tape is None
        self.tapes = 0  # made and not yet used
        self.base = 0
        self.most = 0.0
        self.over = -np.inf  # most beyond what the computation itself may have
        self.latest = np.zeros(SIZE if one_tape else 0)

    def begin(self) -> None:
        self.base = tracemalloc.get_traced_memory()[0]

    def _count(self, beside: float, *, working: bool) -> None:
        if not self.base:
            return  # measured before the run
        size = 1.0 if self.tape is None else self.tape
        allowed = beside + (size if working and not self.one_tape else 0.0)
        allowed += 1  # state 0, of which a copy is kept throughout, see `run`
        found = (tracemalloc.get_traced_memory()[0] - self.base) / STATE
        self.most, self.over = max(self.most, found), max(self.over, found - allowed)

    def step(self, state: Any, i: int) -> Any:
        # The live state; in place it is the caller's array.
        self._count(0.0 if self.in_place else 1.0, working=self.tapes > 0 or self.holding)
        if self.in_place:
            np.sin(state, out=state)
            state += 0.1 * i
            return state
        made = np.sin(state)
        made += 0.1 * i
        return made

    def taped(self, state: Any, i: int) -> tuple[Any, Any]:
        if self.one_tape:
            self.latest[:] = state
            return self.step(state, i), None
        assert self.tape is not None
        tape = np.empty(int(self.tape * SIZE))
        tape[:] = state[0]
        self.tapes += 1
        made = self.step(state, i)
        self._count(0.0 if self.in_place else 2.0, working=True)
        return made, tape

    def adjoint(self, tape: Any, adjoint: float, i: int) -> float:
        self._count(0.0 if self.in_place else 1.0, working=True)
        self.tapes -= self.tape is not None and not self.one_tape
        value = self.latest[0] if self.one_tape else tape[0]
        return float(adjoint * 0.9 + value + i)

    def chain(self) -> Any:
        tapes = self.tape is not None
        if self.in_place:

            def forward(state: Any, start: int, stop: int) -> None:
                for i in range(start, stop):
                    self.step(state, i)

            chain: Any = InPlaceChain(
                forward, self.adjoint, (lambda x, i: self.taped(x, i)[1]) if tapes else None
            )
        else:
            chain = FunctionChain(self.step, self.adjoint, self.taped if tapes else None)
        chain.one_tape = self.one_tape
        return chain

    def costs(self, tiers: tuple[Tier, ...]) -> Costs:
        nbytes = NOT_KEPT if self.one_tape else int((self.tape or 0) * STATE)
        step_s = None if self.tape is None else 1.0
        return Costs(1.0, 2.0, step_s, STATE, nbytes, tiers)


KINDS: dict[str, tuple[float | None, bool, bool]] = {
    "state is tape": (None, False, False),
    "state is tape, in place": (None, True, False),
    "half a state": (0.5, False, False),
    "one state": (1.0, False, False),
    "three states": (3.0, False, False),
    "half a state, in place": (0.5, True, False),
    "three states, in place": (3.0, True, False),
    "one tape": (1.0, False, True),
    "one tape, in place": (1.0, True, True),
}


def run(
    counted: Counted,
    planner: Any,
    budget: Budget,
    store: FileStore | None,
    n: int | None = N,
    speed: float = 3.0,
) -> int | None:
    """Run one reversal; return its slots, None if the planner finds no room."""
    tiers = () if store is None else (Tier("file", speed, speed),)
    reversal = Reversal(
        counted.chain(),
        n_steps=n,
        planner=planner,
        budget=budget,
        costs=counted.costs(tiers),
        tier=store,
    )
    with reversal as run:
        # In place, and as a view of what the caller owns, state 0 is copied: so all
        # that is kept of it is seen here.
        state = np.full(2 * SIZE, 0.7)[:SIZE]
        try:
            if n is not None:
                run.prepare(state)
        except BudgetError:
            return None
        counted.begin()
        if n is None:
            run.forward(state, until=lambda _, i: i == N)
        else:
            run.forward(state)
        expected = N if n is None else n
        run.reverse(1.0)
        assert run.plan is not None
        assert run.report().counts.reverse_steps == expected
        return run._slots


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("planner", ["auto", *PLANNERS])
def test_every_planner_keeps_to_its_slots(planner: str, kind: str) -> None:
    if planner == "pyrevolve":
        pytest.importorskip("pyrevolve")
    for slots in (3, 8, 60):
        counted = Counted(*KINDS[kind], holding=planner in (*KEEPS_TAPES, "auto"))
        if run(counted, planner, Budget(slots=slots), None) is not None:
            assert counted.over <= slots + NOISE, (slots, counted.over)
            assert counted.most > min(slots, 3) - 1, (slots, counted.most)


@pytest.mark.parametrize("kind", ["state is tape, in place", "three states"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_keeps_to_its_slots_beside_a_tier(
    planner: str, kind: str, tmp_path: Any
) -> None:
    if planner == "pyrevolve":
        pytest.importorskip("pyrevolve")
    slots = 3
    counted = Counted(*KINDS[kind], holding=planner in KEEPS_TAPES)
    if run(counted, planner, Budget(slots=slots), FileStore(tmp_path)) is not None:
        assert counted.over <= slots + NOISE, counted.over


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tier", [False, True])
def test_an_unknown_length_keeps_to_its_slots(tier: bool, kind: str, tmp_path: Any) -> None:
    slots = 4
    counted = Counted(*KINDS[kind], holding=False)
    run(counted, "auto", Budget(slots=slots), FileStore(tmp_path) if tier else None, None)
    assert counted.over <= slots + NOISE, counted.over


@pytest.mark.parametrize("kind", ["state is tape", "half a state", "three states, in place"])
@pytest.mark.parametrize("planner", ["auto", "store-all", "periodic", "recursive", "mixed"])
def test_a_budget_in_bytes_is_kept(planner: str, kind: str) -> None:
    for states in (1.5, 4.9, 9.3):
        counted = Counted(*KINDS[kind], holding=True)
        if run(counted, planner, Budget(bytes=int(states * STATE)), None) is not None:
            assert counted.over <= states + NOISE, (states, counted.over)


@pytest.mark.parametrize("kind", ["state is tape", "half a state", "three states, in place"])
@pytest.mark.filterwarnings("ignore:Numba not available")
@pytest.mark.parametrize("name", ["Revolve", "MultistageCheckpointSchedule", "Mixed"])
def test_schedules_of_checkpoint_schedules_keep_to_their_slots(name: str, kind: str) -> None:
    theirs = pytest.importorskip("checkpoint_schedules")
    made = {
        "Revolve": lambda: theirs.Revolve(N, 4),
        "MultistageCheckpointSchedule": lambda: theirs.MultistageCheckpointSchedule(N, 4, 0),
        "Mixed": lambda: theirs.MixedCheckpointSchedule(N, 4, storage=theirs.StorageType.RAM),
    }[name]
    counted = Counted(*KINDS[kind], holding=True)
    if name == "Mixed" and KINDS[kind][0] == 3.0:
        return  # its tapes would take more than its snapshots
    run(counted, as_planner(made), Budget(slots=5), None)
    assert counted.over <= 5 + NOISE, counted.over
