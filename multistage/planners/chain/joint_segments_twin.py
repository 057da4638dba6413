"""The operations that reverse a segment and the bytes they need, as in `native/joint_traces.c`."""

from __future__ import annotations

from .joint_core import ADVANCE, REVERSE, TAPE, TAPE_LAST
from .sizes import Sizes
from .table import INFEASIBLE, Table

_TRACE_OPS = 1 << 18  # as in joint_work.h

Operation = tuple[int, int, int]  # need, kind, stage


def operations(true: Sizes, table: Table, s: int, t: int, m: int) -> list[Operation] | None:
    """Return the operations that reverse s..t within m slots, the input not counted."""
    slots = table.sizes
    out: list[Operation] = []
    stack: list[tuple[int, int, int, int]] = [(s, t, m, 0)]
    while stack:
        i, stop, have, held = stack.pop()
        if len(out) + 2 >= _TRACE_OPS:
            return None
        tape = int(true.tape[i])
        if stop < 0:
            need = held + tape + int(true.gradient[i + 1]) + int(true.gradient[i])
            out.append((need + int(true.reverse[i]), REVERSE, i))
            continue
        k = table.choice(i, stop, have)
        if k == INFEASIBLE:
            return None
        gradient = int(true.gradient[stop + 1])
        if k == i:
            kind = TAPE_LAST if i == stop else TAPE
            out.append((held + tape + gradient + int(true.taping[i]), kind, i))
            stack.append((i, -1, have, held))
            if i < stop:
                stack.append((i + 1, stop, have - int(slots.tape[i]), held + tape))
            continue
        if len(out) + k - i >= _TRACE_OPS:
            return None
        for j in range(i, k):
            need = held + gradient + (0 if j == i else int(true.state[j]))
            out.append((need + int(true.state[j + 1]) + int(true.advance[j]), ADVANCE, j))
        stack.append((i, k - 1, have, held))
        stack.append((k, stop, have - int(slots.state[k]), held + int(true.state[k])))
    return out
