"""A chain of unequal stages as arrays, of bytes or of slots, and the memory its operations need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ... import native
from ...model.stages import StageCosts
from ...support.arrays import Integers, Reals

MAX_SLOTS = 1 << 30
# Beyond so many bytes in all, sums of sizes might not fit integers of 64 bits.
MOST_BYTES = 2**61


class Kept(NamedTuple):
    """Another way to keep tapes, of all stages; `again_s` is infinite where there is none."""

    tape: Integers
    taping: Integers
    reverse: Integers
    again_s: Reals


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """A chain as arrays, its loss a stage of its own; of bytes or of slots.

    `state` and `gradient` have one entry more than there are stages.
    """

    state: Integers
    gradient: Integers
    tape: Integers
    advance: Integers  # overheads
    taping: Integers
    reverse: Integers
    forward_s: Reals
    reverse_s: Reals
    spared_s: Reals  # of the forward, where a tape is made for its adjoint alone
    ways: tuple[Kept, ...] = ()

    @classmethod
    def of(cls, costs: StageCosts) -> Sizes:
        """Return the sizes in bytes, the loss appended, with no other way to keep a tape."""
        stages = costs.stages

        def sizes(*values: int) -> Integers:
            return np.array(values, np.int64)

        return cls(
            state=sizes(costs.input_bytes, *(stage.output_bytes for stage in stages), 0),
            gradient=sizes(
                costs.input_gradient_bytes, *(stage.gradient_bytes for stage in stages), 0
            ),
            tape=sizes(*(stage.tape_bytes for stage in stages), 0),
            advance=sizes(*(stage.forward_overhead_bytes for stage in stages), 0),
            taping=sizes(*(stage.tape_overhead_bytes for stage in stages), 0),
            reverse=sizes(*costs.reverse_bytes, 0),
            forward_s=np.array([*(stage.forward_s for stage in stages), 0.0]),
            reverse_s=np.array([*(stage.backward_s for stage in stages), 0.0]),
            spared_s=np.array([*(stage.spared_s for stage in stages), 0.0]),
        )

    @classmethod
    def beside_a_tier(cls, costs: StageCosts) -> Sizes:
        """Return the sizes as if no output were spared: transfers may begin before it is."""
        stages = [replace(stage, spared_bytes=0) for stage in costs.stages]
        return cls.of(replace(costs, stages=tuple(stages)))

    def __len__(self) -> int:
        return len(self.tape)

    def is_countable(self) -> bool:
        """Whether sums of the sizes fit integers of 64 bits."""
        sizes = (self.state, self.gradient, self.tape, self.advance, self.taping, self.reverse)
        return sum(int(size) for array in sizes for size in array) < MOST_BYTES

    def part(self, start: int, stop: int) -> Sizes:
        """Return the sizes of stages start..stop-1 alone."""
        own, ends = slice(start, stop), slice(start, stop + 1)
        return Sizes(
            self.state[ends],
            self.gradient[ends],
            self.tape[own],
            self.advance[own],
            self.taping[own],
            self.reverse[own],
            self.forward_s[own],
            self.reverse_s[own],
            self.spared_s[own],
        )

    def with_ways(self, costs: StageCosts) -> Sizes:
        """Return the sizes with the other ways to keep tapes that the costs have."""
        ways = []
        for number in range(max(len(stage.ways) for stage in costs.stages)):
            there = [len(stage.ways) > number for stage in costs.stages]
            stages = [
                stage.by(number + 1) if yes else stage
                for yes, stage in zip(there, costs.stages, strict=True)
            ]
            by = Sizes.of(replace(costs, stages=tuple(stages)))
            again_s = np.where([*there, False], by.reverse_s - self.reverse_s, np.inf)
            ways.append(Kept(by.tape, by.taping, by.reverse, again_s))
        return replace(self, ways=tuple(ways))

    def lightest(self) -> Sizes:
        """Return sizes that no way to keep a tape undercuts, for bounds."""
        tape, taping, reverse = (
            np.min(values, axis=0)
            for values in zip(
                (self.tape, self.taping, self.reverse), *(w[:3] for w in self.ways), strict=True
            )
        )
        return replace(self, tape=tape, taping=taping, reverse=reverse, ways=())

    def beside(self, reserve_bytes: int) -> Sizes:
        """Return sizes by which running a stage takes less, as much as is held back for it."""
        advance, taping, reverse = (
            values - reserve_bytes for values in (self.advance, self.taping, self.reverse)
        )
        ways = tuple(
            w._replace(taping=w.taping - reserve_bytes, reverse=w.reverse - reserve_bytes)
            for w in self.ways
        )
        return replace(self, advance=advance, taping=taping, reverse=reverse, ways=ways)

    def in_slots(self, unit_bytes: float) -> Sizes:
        """Return the sizes in slots of `unit_bytes`, rounded to the nearest."""

        def slots(values: Integers) -> Integers:
            return np.minimum(np.rint(values / unit_bytes), MAX_SLOTS).astype(np.int64)

        return Sizes(
            slots(self.state),
            slots(self.gradient),
            slots(self.tape),
            slots(self.advance),
            slots(self.taping),
            slots(self.reverse),
            self.forward_s,
            self.reverse_s,
            self.spared_s,
            tuple([Kept(slots(w[0]), slots(w[1]), slots(w[2]), w.again_s) for w in self.ways]),
        )


def way_of(s: int, t: int, choice: int) -> int | None:
    """Return by which way a choice keeps the tape of stage s, 0 for the whole; None if by none."""
    return 0 if choice == s or s == t else choice - t if choice > t else None


def need_to_tape(sizes: Sizes, s: int, t: int, way: int = 0) -> int:
    """Return m_all(s, t): the peak of taping and reversing stage s, the input not counted."""
    kept = sizes.ways[way - 1] if way else sizes
    return int(kept.tape[s]) + max(
        int(sizes.gradient[t + 1]) + int(kept.taping[s]),
        int(sizes.gradient[s + 1]) + int(sizes.gradient[s]) + int(kept.reverse[s]),
    )


def need_to_pass(sizes: Sizes, s: int, t: int) -> int:
    """Return m_none(s, t): the peak of running s..t-1 forward, keeping the input alone."""
    return int(sizes.gradient[t + 1]) + max(
        (0 if j == s else int(sizes.state[j])) + int(sizes.state[j + 1]) + int(sizes.advance[j])
        for j in range(s, t)
    )


def chain_in_core(
    sizes: Sizes,
    prefix: Reals,
    tapes: bool,
    leaf: Reals,
    moves: tuple[Reals, Reals] | None = None,
    again: Reals | None = None,
    band: int | None = None,
    equal: bool = False,
    runs: tuple[Integers, Integers, Integers] | None = None,
) -> native.Struct:
    """Return a chain as the C core takes it; the arrays must be contiguous.

    `again` has, for each way to keep a tape, what each stage costs more than by the first.
    `band` is that of the table, see `Table`; `equal` says that it has rows by length; `runs`
    are its runs, see `planners.chain.coarse`.
    """
    again = np.zeros((1, len(sizes)), np.float32) if again is None else again
    kept = [
        np.concatenate(values)
        for values in zip(
            (sizes.tape, sizes.taping, sizes.reverse), *(w[:3] for w in sizes.ways), strict=True
        )
    ]
    tape, taping, reverse = kept
    chain = native.ChainStruct(
        len(sizes),
        sizes.state.ctypes.data,
        sizes.gradient.ctypes.data,
        tape.ctypes.data,
        sizes.advance.ctypes.data,
        taping.ctypes.data,
        reverse.ctypes.data,
        prefix.ctypes.data,
        leaf.ctypes.data,
        int(tapes),
        len(sizes) if band is None else band,
        int(equal),
        *((None, None, None) if runs is None else (x.ctypes.data for x in runs)),
        len(again),
        again.ctypes.data,
        *((None, None) if moves is None else (x.ctypes.data for x in moves)),
    )
    # The arrays live as long as the pointers to them.
    chain.owner = sizes, prefix, leaf, moves, kept, again, runs
    return chain


def in_core(true: Sizes) -> native.Struct:
    """Return a chain in bytes as the C core takes it."""
    n = len(true)
    return chain_in_core(true, np.zeros(n + 1, np.float32), True, np.zeros(n, np.float32))
