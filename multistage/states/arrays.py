"""States of NumPy arrays, as executors take them."""

from __future__ import annotations

from .in_place import InPlace
from .layout import Layout
from .references import References


class ArrayStates:
    """Pytrees of NumPy arrays.

    Parameters
    ----------
    in_place : bool
        Whether steps overwrite the arrays of their state.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place

    def layout(self, state: object) -> Layout:
        return Layout.of(state)

    def slots(self, layout: Layout) -> InPlace | References:
        return InPlace(layout) if self._in_place else References(layout)
