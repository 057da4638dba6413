"""States to records and back."""

from __future__ import annotations

import numpy as np

from multistage.states.layout import Layout


def test_a_nested_state_round_trips_through_a_record() -> None:
    state = {"u": (np.arange(6.0).reshape(2, 3), np.array([1, 2], np.int16)), "t": np.array(3.0)}
    layout = Layout.of(state)
    record = np.zeros(layout.nbytes, np.uint8)
    for view, array in zip(layout.views(record), layout.arrays(state), strict=True):
        view[...] = array
    again = layout.state(layout.views(record))
    assert again["t"] == 3.0
    assert np.array_equal(again["u"][0], state["u"][0])
    assert again["u"][1].dtype == np.int16
    assert all(leaf.offset % (64 if leaf.nbytes > 32 else 8) == 0 for leaf in layout.leaves)
    assert layout.same_as(Layout.of(again))


def test_an_empty_array_and_a_numpy_scalar_are_leaves() -> None:
    layout = Layout.of((np.zeros((0, 3)), np.float32(2)))
    assert [leaf.nbytes for leaf in layout.leaves] == [0, 4]
    assert len(layout.arrays((np.zeros((0, 3)), np.float32(5)))) == 2
