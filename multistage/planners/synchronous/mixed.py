"""Mixed storage: each slot holds a state or a tape.

Maddison 2024, "Step-based checkpointing with high-level algorithmic
differentiation", J. Comput. Sci. 82, 102405, doi:10.1016/j.jocs.2024.102405.
A stored state restarts its step as often as needed; a stored tape serves the
one adjoint step and spares running it again.  In steps run beyond the taped
ones, with s slots and tapes of t slots each,

    A(l, s) = min( A(l-1, s-t),                                     tape step 0
                   min over 0 < j < l of j + A(l-j, s-1) + A(j, s))  save state 0
    A(1, s) = 0

where `l` steps are left from the live state.  Every step is taped exactly
once whatever the schedule, so that the choice does not depend on what a tape
costs.  With t = 1 this is the paper's program; larger tapes are an
extension.

Optimal for uniform steps and one memory level, tapes rounded up to whole
slots and the working tape left to the turn.  About s n^2 / 2 sums and s n numbers.  Known gaps:
tapes smaller than a state take a whole slot, and where a state is its own tape
there is nothing to mix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ... import native
from ...actions import Advance, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...model.costs import Costs
from ...schedule.rules import check
from ...support.arrays import Reals
from ..predict import Counts, Draft, counted, planner
from ..single.binomial import nu
from ..single.revolve import plain_revolve
from .hierarchy import (
    MOST_S,
    PER_LENGTH_S,
    PER_ROW_S,
    PLAIN_PER_S,
    PLANNING_S,
    PRUNED_PER_S,
    Rows,
    affordable,
)

# What "auto" spends on it, some tens of milliseconds each: seconds for the
# table, steps for the walk.
_CHEAP_S, _CHEAP_STEPS = 1 / 15, 10_000


@dataclass(slots=True)
class MixedTable:
    """A(l, s) for all lengths up to n and slots up to what makes a difference.

    Attributes
    ----------
    rows : list of array
        By slots, then by length.
    tape : int
        Slots of one tape.
    """

    rows: list[Reals]
    tape: int
    _choices: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def slots(self) -> int:
        """Slots that make a difference."""
        return len(self.rows) - 1

    def choice(self, length: int, slots: int) -> int:
        """Return 0 to keep a tape of the first of `length` > 1 steps, else where to split."""
        found = self._choices.get((length, slots))
        if found is None:
            if slots == 1 and length > 2:  # whatever lies above needs a slot of its own
                return length - 1
            own, less = self.rows[slots], self.rows[slots - 1]
            if slots >= self.tape and self.rows[slots - self.tape][length - 1] == own[length]:
                found = 0
            else:
                sums = np.arange(1, length) + own[1:length] + less[length - 1 : 0 : -1]
                found = int(sums.argmin()) + 1
            self._choices[length, slots] = found
        return found


def _rounded_up(tape_slots: float) -> int:
    return max(1, math.ceil(tape_slots - 1e-9))


def solve_mixed(
    n_steps: int,
    slots: int,
    tape: int = 1,
    *,
    native_kernel: bool | None = None,
    most_s: float = MOST_S,
) -> MixedTable:
    """Return the program solved for up to `n_steps` steps and `slots` >= 1 slots.

    Raises
    ------
    ArgumentError
        Where that would take more than about `most_s` seconds (a minute without
        the C kernel) or 4 GiB.

    Examples
    --------
    >>> int(solve_mixed(20, 4).rows[4][20])  # Revolve runs 39 besides the taped ones
    26
    """
    slots = min(slots, max(1, (n_steps - 1) * tape))
    # Lengths up to s / t cost nothing with s slots.
    sums = slots * n_steps**2 / 2 - slots**3 / (6 * tape**2)
    size = 8 * slots * n_steps
    affordable(n_steps, slots, sums, size, native_kernel, "planner 'revolve'", most_s)
    none = np.full(n_steps + 1, math.inf)
    none[:2] = 0.0
    rows: list[Reals] = [none]
    ahead = np.arange(n_steps + 1, dtype=float)
    right = np.ascontiguousarray(none[::-1])
    for s in range(1, slots + 1):
        below = np.full(n_steps + 1, math.inf)
        if s >= tape:
            below[1:] = rows[s - tape][:-1]
        below[:2] = 0.0
        basis = Rows(ahead, below, 0.0)
        row, over = basis.blank(), basis.blank()
        # Lengths whose tapes all fit cost nothing.
        basis.fill(s // tape + 2, right, row, over, native_kernel=native_kernel)
        rows.append(row)
        right = over
    return MixedTable(rows, tape)


def mixed_schedule(table: MixedTable, slots: int, n_steps: int) -> Schedule:
    """Yield the schedule, choosing state or tape for each slot as it goes; O(slots) memory."""
    held: list[tuple[int, bool]] = []  # step, whether a tape
    live, end, free, ended = 0, n_steps, min(slots, table.slots), False
    while True:
        while end - live > 1:
            known = bool(held) and held[-1] == (live, False)
            choice = table.choice(end - live, free + known)
            if choice == 0:
                if known:
                    held.pop()
                    free += 1
                    yield Free(live)
                yield Tape(live)
                held.append((live, True))
                free -= table.tape
                live += 1
                continue
            if not known:
                yield Save(live)
                held.append((live, False))
                free -= 1
            yield Advance(live, live + choice)
            live += choice
        if held and held[-1] == (live, False):
            held.pop()
            free += 1
            yield Free(live)
        if not ended:
            yield Tape(live)
            yield EndForward()
            ended = True
        yield Reverse(live)
        end = live
        while held and held[-1] == (end - 1, True):
            held.pop()
            free += table.tape
            end -= 1
            yield Reverse(end)
        if end == 0:
            return
        live = held[-1][0]
        yield Load(live)


def worth_trying(costs: Costs, slots: int, n_steps: int) -> bool:
    """Whether `mixed` can win over Revolve here, and is solved in some tens of milliseconds."""
    tape = _rounded_up(costs.tape_slots)
    if costs.state_is_tape or slots < tape or nu(n_steps, slots) == 0:
        return False
    per_s = PLAIN_PER_S if native.LIBRARY is None else PRUNED_PER_S
    seconds = slots * (n_steps**2 / 2 / per_s + PER_ROW_S + n_steps * PER_LENGTH_S)
    return n_steps <= _CHEAP_STEPS and seconds <= _CHEAP_S


@planner("mixed")
def mixed(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the optimal plan whose slots hold states or tapes.

    Raises
    ------
    ArgumentError
        Where solving would take more than about a second.

    Examples
    --------
    >>> costs = Costs(1.0, 2.0, tape_step_s=1.5)
    >>> plan = mixed(costs, slots=4, n_steps=20)
    >>> plan.makespan_s, plan.lower_bound_s
    (96.0, 85.0)
    """
    if costs.state_is_tape:
        return plain_revolve(costs, slots, n_steps, "A state is its own tape")
    table = solve_mixed(n_steps, slots, _rounded_up(costs.tape_slots), most_s=PLANNING_S)
    make = partial(mixed_schedule, table, slots, n_steps)
    used = check(make(), n_steps, tape_slots=costs.tape_slots)
    taped = sum(isinstance(action, Tape) for action in make())
    kept = taped - 1
    return counted(
        costs,
        slots,
        n_steps,
        make,
        Counts(used.forward_steps, taped, peak_slots=used.peak_slots),
        f"{kept} tapes are kept in slots for their adjoint steps, beside states.",
        {"tapes kept": kept},
    )
