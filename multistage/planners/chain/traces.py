"""Traces, the choices of a schedule in the order of the recursion, and their judge."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from .sizes import Sizes, need_to_tape

# (s, t, choice): stage s keeps its tape where choice == s (always where s == t),
# else state `choice` is the next one kept and s..choice-1 run forward.
Trace: TypeAlias = list[tuple[int, int, int]]


def judge(true: Sizes, trace: Trace) -> tuple[float, int]:
    """Return seconds and peak bytes of a trace, the chain's input not counted.

    The twin of the C kernel's; `planners.chain.memory` is the independent judge.
    """
    held, peak, seconds = 0, 0, 0.0
    waiting: list[int] = []
    for s, t, k in trace:
        if k == s or s == t:
            peak = max(peak, held + need_to_tape(true, s, t))
            seconds += float(true.forward_s[s]) + float(true.reverse_s[s])
            if s == t:
                seconds -= float(true.spared_s[s])
                held = waiting.pop() if waiting else 0
            else:
                held += int(true.tape[s])
            continue
        for j in range(s, k):
            before = 0 if j == s else int(true.state[j])
            need = int(true.gradient[t + 1]) + before
            need += int(true.state[j + 1]) + int(true.advance[j])
            peak = max(peak, held + need)
            seconds += float(true.forward_s[j])
        waiting.append(held)
        held += int(true.state[k])
    return seconds, min(peak, int(np.iinfo(np.int64).max))
