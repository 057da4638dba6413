"""Blocks of steps: the adjoint of the single steps, bit for bit, in the memory promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
from chains import CHAINS, TAPED, raw, store_all

from multistage.errors import ArgumentError, StateError
from multistage.model.blocks import Blocks
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal

SINGLE = [name for name in CHAINS if not name.startswith("blocks")]


def costs_of(chain: str) -> Costs:
    return Costs(
        1.0,
        2.0,
        tape_step_s=1.2 if chain in TAPED else None,
        state_bytes=10,
        tiers=(Tier("file", 2.5, 2.0),),
    )


@pytest.mark.long(but=("*-5-30-*", "*-1-9-nested"))
@pytest.mark.parametrize("chain", SINGLE)
@pytest.mark.parametrize(("size", "n"), [(1, 9), (4, 31), (5, 30), (40, 31)])
@pytest.mark.parametrize("planner", ["store-all", "revolve", "streaming"])
def test_blocks_equal_single_steps(
    planner: str, size: int, n: int, chain: str, tmp_path: Path
) -> None:
    blocks = Blocks(CHAINS[chain][0](), size, n)
    assert blocks.n_blocks == -(-n // size)
    slots = n if planner == "store-all" else 3
    with Reversal(
        blocks,
        n_steps=blocks.n_blocks,
        memory=f"{slots} slots",
        tiers=f"file:{tmp_path}",
        planner=planner,
        costs=costs_of(chain),
        checked=True,
    ) as run:
        for _ in range(2):
            start = CHAINS[chain][1]()
            last = raw(run.forward(start))
            assert (last, run.reverse(1)) == store_all(chain, n)
            assert all(array.flags.writeable for array in optree.tree_leaves(start))


@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_of_several_sweeps_at_the_same_time(in_place: bool) -> None:
    """Within the steps of one sweep of some blocks others run, on states of their own."""
    inner: list[list[float]] = []
    outermost = [False]

    def advance(x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            x[:] = np.sin(x) + 0.1 * i

    def step(x: Any, i: int) -> Any:
        x = x.copy()
        advance(x, i, i + 1)
        return x

    def adjoint(x: Any, a: Any, i: int) -> Any:
        if outermost[0] and i % 3 == 1:
            outermost[0] = False
            inner.append(gradient(0.7))
            outermost[0] = True
        return np.cos(x) * a

    blocks: Any = Blocks(
        InPlaceChain(advance, adjoint) if in_place else FunctionChain(step, adjoint), 3, 9
    )

    def gradient(start: float) -> list[float]:
        with Reversal(blocks, n_steps=3, memory="1 slot", costs=Costs(1.0, 2.0)) as run:
            run.forward(np.full(3, start))
            found: list[float] = run.reverse(np.ones(3)).tolist()
        return found

    alone = [gradient(0.7), gradient(0.2)]
    outermost[0] = True
    assert gradient(0.2) == alone[1]
    assert inner == [alone[0]] * 3


def test_an_unknown_number_of_full_blocks() -> None:
    with Reversal(Blocks(CHAINS["nested"][0](), 3), memory="3 slots") as run:
        last = raw(run.forward(CHAINS["nested"][1](), until=lambda state, b: b == 7))
        assert (last, run.reverse(1)) == store_all("nested", 21)


def test_memory_inside_a_block_is_size_less_one_states(monkeypatch: pytest.MonkeyPatch) -> None:
    live, most = 0, 0
    size = 6

    def forward(x: Any, start: int, stop: int) -> None:
        x += stop - start

    blocks: Blocks[Any, Any] = Blocks(InPlaceChain(forward, lambda x, a, i: [*a, (i, x[0])]), size)
    with blocks._borrowed(np.zeros(3)) as slots:
        pass  # those that are lent next
    keep, release = slots.keep, slots.release

    def counted(state: Any, where: Any) -> Any:
        nonlocal live, most
        live += 1
        most = max(most, live)
        return keep(state, where)

    def released(kept: Any) -> None:
        nonlocal live
        live -= 1
        release(kept)

    monkeypatch.setattr(slots, "keep", counted)
    monkeypatch.setattr(slots, "release", released)
    seen = blocks.reverse(np.full(3, 12.0), [], 2)
    assert seen == [(i, float(i)) for i in reversed(range(12, 18))]
    assert (live, most) == (0, size - 1)


def test_an_operator_that_raises_leaves_nothing_read_only() -> None:
    made: list[Any] = []

    def step(x: Any, i: int) -> Any:
        made.append(np.cos(x) + i)
        return made[-1]

    def adjoint(x: Any, a: Any, i: int) -> Any:
        if i == 1:
            raise RuntimeError("bang")
        return a

    blocks: Blocks[Any, Any] = Blocks(FunctionChain(step, adjoint), 4)
    start = np.zeros(3)
    with pytest.raises(RuntimeError, match="bang"):
        blocks.reverse(start, np.ones(3), 0)
    assert len(made) == 3
    assert all(array.flags.writeable for array in (start, *made))


def test_a_step_that_overwrites_its_input_is_seen() -> None:
    blocks: Blocks[Any, Any] = Blocks(
        FunctionChain(lambda x, i: x.__iadd__(1), lambda x, a, i: a), 3, 9
    )
    with (
        Reversal(blocks, n_steps=3, memory="2 slots", costs=Costs(1.0, 2.0)) as run,
        pytest.raises(StateError, match="InPlaceChain"),
    ):
        run.forward(np.zeros(2))
        run.reverse(np.zeros(2))


def test_bad_numbers_are_refused() -> None:
    chain = CHAINS["nested"][0]()
    for size, n_steps, message in (
        (0, 3, "size=0 must be an int, at least 1"),
        (2.5, 3, "size=2.5 must"),
        (True, 3, "size=True must"),
        (2, 0, "n_steps=0 must"),
        (2, "7", "n_steps='7' must"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Blocks(chain, size, n_steps)
    assert Blocks(chain, np.int64(2), np.int32(7)).n_blocks == 4


def test_a_number_of_steps_instead_of_blocks_is_refused() -> None:
    """A Reversal told the number of steps, not of blocks, would reverse the last one forever."""
    blocks = Blocks(CHAINS["nested"][0](), 4, 31)
    with (
        Reversal(blocks, n_steps=31, memory="5 slots", costs=Costs(1.0, 2.0)) as run,
        pytest.raises(ArgumentError, match=r"31 steps in blocks of 4; give the Reversal n_steps=8"),
    ):
        run.forward(CHAINS["nested"][1]())
