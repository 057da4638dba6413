"""The plain twin of `native/joint_bound.c`: the dual at given prices."""

import math

import numpy as np

from multistage.planners.chain.joint_bound import Dual
from multistage.support.arrays import Reals


class DualTwin(Dual):
    """The dual, its table of plans in plain Python."""

    def least(self, work, planes, prices, slots=None):
        """Return what `ms_joint_dual` returns."""
        return _least(self, work, planes, prices, self.slots if slots is None else slots)


def _least(dual: Dual, work: float, planes: Reals, prices: tuple[Reals, ...], slots: int) -> float:
    fast_state, fast_tape, move_state, move_tape, late_state, again_state, *waits = prices
    wait_taped, wait_passed = waits
    sizes, n = dual.sizes, len(dual.sizes)
    memories = np.arange(slots + 1)
    right: list[Reals] = [np.empty(0)] * n

    def shifted(values: Reals, by: int) -> Reals:
        out = np.full(slots + 1, math.inf)
        if by <= slots:
            out[by:] = values[: slots + 1 - by]
        return out

    taped = np.where(memories >= dual.taping[n - 1], 0.0, math.inf)
    passed = np.full(slots + 1, math.inf)
    for s in range(n - 1, -1, -1):
        state = int(sizes.state[s])
        moved = np.full(slots + 1, math.inf)
        if s < n - 1:
            fast = shifted(np.minimum(taped, passed), int(sizes.tape[s])) + fast_tape[s]
            away = np.minimum(taped + wait_taped[s], passed + wait_passed[s])
            taped = np.minimum(fast, away + move_tape[s])
            taped[: dual.taping[s]] = math.inf
            moved = taped + move_state[s]
        passed = np.full(slots + 1, math.inf)
        row = s * n - s * (s - 1) // 2 - s
        for k in range(s + 1, n):
            u = work * (dual.before[k] - dual.before[s])
            passing = int(dual.passing[row + k])
            later = dual.total * planes[:, row + k - 1].reshape(-1)[: slots + 1].astype(float)
            here = later + right[k] + u
            passed[passing:] = np.minimum(passed, here)[passing:]
            held = later + shifted(right[k], state) + late_state[s]
            left = np.minimum(shifted(later, state), later + again_state[s])
            here = np.minimum(held, left + right[k] + move_state[s]) + u
            moved[passing:] = np.minimum(moved, here)[passing:]
        kept = np.minimum(taped, passed)
        right[s] = np.minimum(shifted(kept, state) + fast_state[s], moved)
    return float(min(taped[slots], passed[slots]))
