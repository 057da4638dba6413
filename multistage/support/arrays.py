"""Types of arrays that are computed with; the type of a state's arrays is `states.layout.Array`."""

from __future__ import annotations

import numpy as np

Reals = np.ndarray[tuple[int, ...], np.dtype[np.floating]]
Integers = np.ndarray[tuple[int, ...], np.dtype[np.integer]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
