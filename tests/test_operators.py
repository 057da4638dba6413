"""Adapters from plain functions: what they check, and what a tape may refer to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multistage.actions import Advance, EndForward, Load, Reverse, Save, Tape
from multistage.errors import ArgumentError
from multistage.execute.executor import Executor
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS
from multistage.reversal import Reversal
from multistage.states.in_place import ArrayStates
from multistage.states.layout import Layout
from multistage.states.sharing import Frozen

N = 41


def forward(state: Any, start: int, stop: int) -> None:
    """Two fields: u feels the sine of v, v decays."""
    for i in range(start, stop):
        state["u"] += np.sin(state["v"] + i)
        state["v"] *= 0.9


def whole(state: Any, adjoint: Any, i: int) -> Any:
    return some(state["v"], adjoint, i)


def some(v: Any, adjoint: Any, i: int) -> Any:
    return {"u": adjoint["u"], "v": 0.9 * adjoint["v"] + np.cos(v + i) * adjoint["u"]}


def copied(state: Any, i: int) -> Any:
    v = state["v"].copy()
    forward(state, i, i + 1)
    return v


def start() -> Any:
    return {"u": np.linspace(0, 1, 5), "v": np.linspace(1, 2, 5)}


def swept(run: Any) -> list[list[float]]:
    run.forward(start())
    adjoint = run.reverse({"u": np.ones(5), "v": np.ones(5)})
    return [adjoint[name].tolist() for name in "uv"]


@pytest.mark.parametrize("planner", PLANNERS)
def test_an_adjoint_of_some_fields_equals_that_of_the_state(planner: str, tmp_path: Any) -> None:
    """Restart data and adjoint data differ, the bits do not."""
    slots = 2 * N if planner in ("store-all", "periodic", "recursive") else 5
    tiers = (Tier("file", 2.5, 2.0),)
    results = []
    for chain, costs in (
        (InPlaceChain(forward, whole), Costs(1.0, 2.0, state_bytes=128, tiers=tiers)),
        (
            InPlaceChain(forward, some, copied),
            Costs(1.0, 1.0, tape_step_s=1.5, state_bytes=128, tape_bytes=40, tiers=tiers),
        ),
    ):
        with Reversal(
            chain,
            n_steps=N,
            memory=f"{slots} slots",
            tiers=f"file:{tmp_path}",
            planner=planner,
            costs=costs,
            checked=True,
        ) as run:
            results.append(swept(run))
            assert swept(run) == results[-1]
    assert results[0] == results[1]


def test_tapes_are_held_beside_another_live_state() -> None:
    made = [Save(0), Tape(0), Tape(1), Advance(2, 3), Tape(3), EndForward()]
    made += [Load(0), Reverse(3), Advance(0, 2), Reverse(2), Reverse(1), Load(0), Reverse(0)]
    chains = InPlaceChain(forward, whole), InPlaceChain(forward, some, copied)
    results = [swept(_Sweep(Executor(chain, ()), made)) for chain in chains]
    assert results[0] == results[1]


class _Sweep:
    def __init__(self, executor: Executor[Any, Any], made: list[Any]) -> None:
        self.executor, self.made, self.reverse = executor, made, executor.reverse

    def forward(self, state: Any) -> Any:
        return self.executor.forward(self.made, state)


def test_arrays_a_tape_shares_with_the_state_are_copied() -> None:
    def tape(state: Any, i: int) -> Any:
        forward(state, i, i + 1)
        return [state["u"], {"part": state["v"][1:3]}, None, 7, table]

    table, state = np.arange(3.0), start()
    chain: InPlaceChain[Any, Any] = InPlaceChain(forward, whole, tape)
    slots = ArrayStates(in_place=True).slots(Layout.of(state))
    slots.keep(state, 0)
    after, tape_0 = chain.tape(state, 0)
    held = slots.keep_tape(tape_0, (state, after), 0).state
    assert after is state
    expected = state["u"].tolist(), state["v"][1:3].tolist()
    chain.advance(state, 1, 9)
    assert (held[0].tolist(), held[1]["part"].tolist()) == expected
    assert held[2:4] == [None, 7]
    assert held[4] is table  # held as it is: it is read-only until the tape is used
    assert not table.flags.writeable
    slots.release_all()
    assert table.flags.writeable


def test_operators_that_are_not_callable_are_refused() -> None:
    for arguments, message in (
        ((None, whole), "forward=None must be callable"),
        ((forward, 3), "reverse=3 must be callable"),
        ((forward, whole, "tape"), "tape='tape' must be callable or None"),
    ):
        with pytest.raises(ArgumentError, match=message):
            InPlaceChain(*arguments)
    for arguments, message in (
        ((None, whole), "step=None must be callable"),
        ((forward, 3), "adjoint_step=3 must be callable"),
        ((forward, whole, "tape"), "tape_step='tape' must be callable or None"),
    ):
        with pytest.raises(ArgumentError, match=message):
            FunctionChain(*arguments)


def test_a_state_that_is_its_tape_has_no_tape_step() -> None:
    assert InPlaceChain(forward, whole).state_is_tape
    assert not InPlaceChain(forward, some, copied).state_is_tape
    with pytest.raises(AssertionError, match="by copying its state"):
        InPlaceChain(forward, whole).tape(start(), 0)


def test_a_view_is_writeable_again_when_its_owner_is() -> None:
    """NumPy makes no view of a read-only array writeable: one given back first waits."""
    whole = np.zeros(4)
    views = [whole[:2], whole[1:]]
    for one_by_one in (True, False):
        frozen = Frozen()
        for array in (whole, *views):
            frozen.hold(array)
        assert not any(array.flags.writeable for array in (whole, *views))
        if one_by_one:
            for array in (*views, whole):
                frozen.free(array)
        else:
            frozen.free_all()
        assert all(array.flags.writeable for array in (whole, *views))
    other = Frozen()  # of another run, which continues
    view = whole[2:]
    frozen.hold(view)
    other.hold(whole)
    frozen.free(view)
    assert not view.flags.writeable
