"""The smallest peak of any persistent schedule of a chain."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from ... import native
from .sizes import Sizes, chain_in_core, need_to_pass, need_to_tape
from .traces import Trace


def smallest(
    true: Sizes, *, tapes: bool = True, native_kernel: bool | None = None
) -> tuple[int, Trace]:
    """Return the smallest peak of any persistent schedule in bytes, and one with it.

    Exact, in O(L^3 / 6): theorem 1 with the peak in place of the time.  The
    chain's input is not counted.
    """
    n = len(true)
    use_native = native.available() if native_kernel is None else native_kernel
    choice: Callable[[int, int], int]
    if use_native:
        cells = n * (n + 1) // 2
        peaks, choices = np.empty(cells, np.int64), np.empty(cells, np.int32)
        prefix = np.zeros(n + 1, np.float32)
        chain = chain_in_core(true, prefix, tapes, np.zeros(n, np.float32))
        rows = max(1, int(3e8 / max(1, n * n)))
        for last in range(n - 1, -1, -rows):
            native.library().ms_chain_smallest(
                ctypes.byref(chain),
                max(0, last - rows + 1),
                last,
                peaks.ctypes.data,
                choices.ctypes.data,
            )

        def choice(s: int, t: int) -> int:
            return int(choices[s * n - s * (s - 1) // 2 + t - s])

        peak = int(peaks[n - 1])
    else:
        found = _smallest_twin(true, tapes)

        def choice(s: int, t: int) -> int:
            return found[s, t][1]

        peak = found[0, n - 1][0]
    trace: Trace = []
    stack = [(0, n - 1)]
    while stack:
        s, t = stack.pop()
        k = choice(s, t)
        trace.append((s, t, k))
        if s == t:
            continue
        if k == s:
            stack.append((s + 1, t))
        else:
            stack.append((s, k - 1))
            stack.append((k, t))
    return peak, trace


def _smallest_twin(true: Sizes, tapes: bool) -> dict[tuple[int, int], tuple[int, int]]:
    n = len(true)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for s in range(n - 1, -1, -1):
        for t in range(s, n):
            tape_peak = need_to_tape(true, s, t)
            if s == t:
                found[s, t] = tape_peak, s
                continue
            options = []
            if tapes:
                options.append((max(tape_peak, int(true.tape[s]) + found[s + 1, t][0]), s))
            none = need_to_pass(true, s, t)
            for k in range(s + 1, t + 1):
                right = int(true.state[k]) + found[k, t][0]
                options.append((max(none, right, found[s, k - 1][0]), k))
            found[s, t] = min(options, key=lambda option: option[0])
    return found
