"""The Python twin of `native/chain.c`: the table of a chain, and the choices of its schedules."""

from __future__ import annotations

import numpy as np

from ...support.arrays import Reals
from .sizes import Sizes, need_to_pass, need_to_tape


def solved(
    sizes: Sizes,
    slots: int,
    tapes: bool,
    prefix: Reals,
    leaf: Reals,
    moves: tuple[Reals, Reals] | None,
) -> dict[tuple[int, int], Reals]:
    """Return the excess of each pair of stages for memories 0..slots, as `Table` has it."""
    n, memories = len(sizes), np.arange(slots + 1)
    excess: dict[tuple[int, int], Reals] = {}

    def shifted(s: int, t: int, by: int) -> Reals:
        out = np.full(slots + 1, np.inf, np.float32)
        if by <= slots:
            out[by:] = excess[s, t][: slots + 1 - by]
        return out

    for s in range(n - 1, -1, -1):
        for t in range(s, n):
            fits = memories >= need_to_tape(sizes, s, t)
            if s == t:
                excess[s, t] = np.where(fits, leaf[s], np.float32(np.inf))
                continue
            best = np.full(slots + 1, np.inf, np.float32)
            for k in range(s + 1, t + 1):
                right = shifted(k, t, int(sizes.state[k])) + prefix[k]
                if moves is not None:
                    right = np.minimum(right, excess[k, t] + (prefix[k] + moves[0][k]))
                best = np.minimum(best, excess[s, k - 1] + right)
            passes = memories >= need_to_pass(sizes, s, t)
            best = np.where(passes, best - prefix[s], np.float32(np.inf))
            if tapes:
                taped = shifted(s + 1, t, int(sizes.tape[s]))
                if moves is not None:
                    taped = np.minimum(taped, excess[s + 1, t] + moves[1][s])
                best = np.minimum(best, np.where(fits, taped, np.float32(np.inf)))
            excess[s, t] = best.astype(np.float32)
    return excess
