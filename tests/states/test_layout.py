"""States to records and back."""

from __future__ import annotations

import numpy as np
import pytest

from multistage.errors import StateError
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


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ((), "holds no array"),
        (3.0, "is float"),
        ((np.zeros(2), None), "is NoneType"),
        ({"a": [1, 2]}, r"leaf \['a'\]\[0\] is int"),
        (np.array([object()]), "Python objects"),
        (np.ma.zeros(3), "is MaskedArray"),
    ],
)
def test_bad_leaves(state: object, rule: str) -> None:
    with pytest.raises(StateError, match=rule):
        Layout.of(state)


@pytest.mark.parametrize(
    ("first", "later", "rule"),
    [
        (np.zeros(3), np.zeros(4), r"from \(3,\) float64 to \(4,\) float64"),
        (np.zeros(3), np.zeros(3, np.float32), "to .* float32"),
        (np.zeros(3), (np.zeros(3),), "changed its structure"),
        ({"a": np.zeros(3)}, {"b": np.zeros(3)}, "changed its structure"),
        ({"a": np.zeros(3)}, {"a": np.zeros((3, 1))}, r"leaf \['a'\]"),
    ],
)
def test_a_changed_layout_is_named(first: object, later: object, rule: str) -> None:
    layout = Layout.of(first)
    with pytest.raises(StateError, match=rule):
        layout.arrays(later, "state 7")
