"""Copies of views, and what comes back from a tier: laid out as the view, so that bits agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage.durable.records import OrderedLayout
from multistage.model.blocks import Blocks
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Layout, Layouts
from multistage.states.strides import alike, duplicate, geometry, repeats

KERNELS: list[Callable[[Any], Any]] = [
    np.exp,
    lambda x: np.cbrt(x if x.dtype.kind == "f" else x.imag),
    np.expm1,
    np.sinh,
    lambda x: np.abs(x) ** np.abs(x),
    np.sum,
    lambda x: x @ x.T,
    lambda x: x.T @ x,
    lambda x: np.exp(x + x),
    lambda x: np.add.reduce(x, axis=0),
]


@st.composite
def views(draw: st.DrawFn) -> Any:
    """A view of random values: any order and signs of strides, gaps, repetitions, alignment."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 9, 17]), max_size=3))
    shape = [4 * n for n in shape] if len(shape) == 1 else shape
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    if len(shape) in (1, 2):
        steps[0] = draw(st.sampled_from([steps[0], steps[0], 50]))
    slack = [draw(st.sampled_from([0, 0, 1])) for _ in shape]
    whole = [n * abs(step) + more for n, step, more in zip(shape, steps, slack, strict=True)]
    dtype = np.dtype(draw(st.sampled_from(["f8", "f8", "f4", "c16", ">f8"])))
    order = draw(st.permutations(range(len(shape))))
    off = draw(st.sampled_from([0, 0, 0, 1, 4]))
    count = int(np.prod(whole))
    raw = np.zeros(count * dtype.itemsize + off, np.uint8)[off:]
    base = raw.view(dtype).reshape([whole[k] for k in order]).transpose(np.argsort(order))
    view = base[(..., *(slice(None, None, step) for step in steps))]
    view = view[(..., *(slice(0, n) for n in shape))]
    seed = draw(st.integers(0, 99))
    view[...] = np.random.default_rng(seed).standard_normal(view.shape) * 3
    for axis, n in enumerate(view.shape):
        if draw(st.integers(0, 7)) == 0:
            view = np.broadcast_to(np.take(view, [0], axis), view.shape) if n > 1 else view
    if draw(st.booleans()) and view.ndim == 1 and len(view) > 2:
        view = np.lib.stride_tricks.sliding_window_view(view, 2)
    return view


def tripped(array: Any) -> list[Any]:
    """Return a copy of an array, and the array as three tiers give it back."""
    given_back = []
    for layout in (Layout.of(array), OrderedLayout.of(array)):
        for each in (array, duplicate(array)):
            flat, packing = layout.pack([each])
            assert flat[0].flags.c_contiguous
            assert flat[0].shape == array.shape
            given_back += layout.unpack([leaf.copy() for leaf in flat], packing)
    return [duplicate(array), *given_back]


# NumPy 1 chooses the kernels of some views by where input and output lie: no two runs agree.
reproducible = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 rounds by address"
)


def _span(array: Any) -> int:
    """Return the bytes from the first element in memory to the last."""
    reach = sum((n - 1) * abs(by) for n, by in zip(array.shape, array.strides, strict=True))
    return reach + array.itemsize if array.size else 0


@reproducible
@settings(max_examples=200, deadline=None)
@given(views())
def test_kernels_round_alike_before_and_after(array: Any) -> None:
    for again in tripped(array):
        assert alike(again, array)
        assert again.tobytes() == array.tobytes()
        for flag in ("C_CONTIGUOUS", "F_CONTIGUOUS", "ALIGNED"):
            assert again.flags[flag] == array.flags[flag], flag
        assert [np.sign(a) for a in again.strides] == [np.sign(a) for a in array.strides]
        with np.errstate(all="ignore"):
            for k, kernel in enumerate(KERNELS):
                if array.ndim not in (1, 2) and k > 5:
                    continue
                before, after = np.asarray(kernel(array)), np.asarray(kernel(again))
                assert before.tobytes() == after.tobytes(), k


@settings(max_examples=200, deadline=None)
@given(views())
def test_the_layout_of_a_copy_is_that_of_its_copy(array: Any) -> None:
    again = duplicate(array)
    assert again.strides == geometry(array).strides
    assert geometry(again) == geometry(array)
    assert _span(again) <= 4 * array.nbytes


@pytest.mark.parametrize("columns", [3, 1000])
def test_a_column_of_a_matrix_takes_twice_its_bytes_at_most(columns: int) -> None:
    column = np.zeros((500, columns))[:, 1]
    assert _span(duplicate(column)) < 2 * column.nbytes
    assert duplicate(column).strides == (16,)


def test_empty_and_plain_arrays_need_no_strides() -> None:
    for array in (
        np.zeros((0, 3)),
        np.zeros((3, 0)).T,
        np.zeros(4)[1:],
        np.zeros((2, 3)),
        np.array(2.0),
    ):
        assert Layout.of(array).pack([array])[1] is None
        assert duplicate(array).flags.owndata


SHAPES: dict[str, Callable[[Any], Any]] = {
    "backwards": lambda x: x[::-1].copy()[::-1],
    "every second": lambda x: np.repeat(x, 2)[::2],
    "backwards with gaps": lambda x: np.repeat(x[::-1], 2)[::-2],
    "a column": lambda x: np.repeat(x, 9).reshape(-1, 9)[:, 4],
    "read-only": lambda x: np.frombuffer(np.repeat(x, 2).tobytes())[::-2],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "plain": lambda x: x,
}


def _step(shape: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    def step(s: Any, i: int) -> Any:
        x = s["x"] if isinstance(s, dict) else s
        made = shape(np.ascontiguousarray(np.cos(x[::-1] * 1.1 + i) + 0.3 * x))
        return {"x": made} if isinstance(s, dict) else made

    return step


def _back(s: Any, a: Any, i: int) -> Any:
    x = s["x"] if isinstance(s, dict) else s
    return np.cbrt(a) * np.exp(x) + np.expm1(x) * (x @ x) / 999 + a


@reproducible
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_views_are_those_of_store_all(name: str, tree: bool, tmp_path: Path) -> None:
    shape = SHAPES[name]
    step, n, x = _step(shape), 24, shape(np.random.default_rng(1).standard_normal(257))
    first: Any = {"x": x} if tree else x
    states = [first]
    for i in range(n):
        states.append(step(states[-1], i))
    expected = np.ones(257)
    for i in reversed(range(n)):
        expected = _back(states[i], expected, i)
    costs = Costs(1.0, 2.0, state_bytes=x.nbytes, tiers=(Tier("memory", 1.5, 1.5),))
    options: list[dict[str, Any]] = [
        {"planner": "revolve"},
        {"tiers": "memory:", "planner": "streaming"},
        {"tiers": f"file:{tmp_path}", "planner": "interval"},
        {"durable": tmp_path / "run"},
    ]
    for each in options:
        for chain in (FunctionChain(step, _back), Blocks(FunctionChain(step, _back), 3)):
            if "durable" in each and isinstance(chain, Blocks):
                each = {"durable": tmp_path / "blocks"}
            steps = n // 3 if isinstance(chain, Blocks) else n
            with Reversal(chain, n_steps=steps, memory="6 slots", costs=costs, **each) as run:
                run.forward(first)
                assert run.reverse(np.ones(257)).tobytes() == expected.tobytes(), each


@pytest.mark.parametrize(
    ("array", "shared"),
    [
        (np.zeros(3), False),
        (np.zeros((3, 4)).T, False),
        (np.zeros((3, 4))[:, ::-2], False),
        (np.zeros(())[...], False),
        (np.broadcast_to(np.float64(1), (1,)), False),
        (np.broadcast_to(np.float64(1), (3,)), True),
        (np.broadcast_to(np.zeros(4), (3, 4)), True),
        (np.broadcast_to(np.zeros((4, 1)), (4, 3)), True),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(9), 3), True),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (2, 2), (16, 16)), True),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (2, 3), (8, 16)), False),
    ],
)
def test_elements_that_share_memory_are_not_writeable_in_a_copy(array: Any, shared: bool) -> None:
    assert repeats(array) == shared
    copy = duplicate(array)
    assert copy.flags.writeable is not shared
    assert np.array_equal(copy, array)


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_steps_write_to_a_broadcast_leaf_only_where_they_did_at_first(
    slots: int, size: int, tmp_path: Path
) -> None:
    def forward(state: dict[str, Any], start: int, stop: int) -> None:
        for i in range(start, stop):
            value = np.sin(np.arange(3) + state["x"] + i)
            if state["x"].flags.writeable:
                state["x"][...] = value
            else:  # as the leaf of state 0 is: one number in the place of three
                state["x"] = value

    def reverse(state: dict[str, Any], adjoint: Any, i: int) -> Any:
        return adjoint * np.cos(np.arange(3) + state["x"] + i)

    n, begin = 7, {"x": np.broadcast_to(np.float64(0.3), (3,))}
    states, state = [], dict(begin)
    for i in range(n):
        states.append({"x": state["x"].copy()})
        forward(state, i, i + 1)
    expected = np.ones(3)
    for i in reversed(range(n)):
        expected = reverse(states[i], expected, i)
    chain: Any = InPlaceChain(forward, reverse)
    blocks = Blocks(chain, size or 1, n)
    steps = blocks.n_blocks if size else n
    for tier in (None, f"file:{tmp_path}"):
        with Reversal(
            blocks if size else chain, n_steps=steps, memory=f"{slots} slots", tiers=tier
        ) as run:
            run.forward(dict(begin))
            assert np.array_equal(run.reverse(np.ones(3)), expected)


def test_what_slots_share_is_held_once_and_parts_of_an_array_each() -> None:
    held, whole = Layouts(np.zeros(1), in_place=False), np.zeros(10)
    for arrays, nbytes in (([whole], 80), ([whole[:4], whole], 80), ([whole[:3]], 80)):
        held.count(arrays)
        assert held.held_bytes == nbytes
    held.count([whole, whole], -1)
    assert held.held_bytes == 56  # views of 4 and of 3
    held.count([whole[:4], whole[:3]], -1)
    assert held.held_bytes == 0
