"""The runs of stages that a table of a long chain is solved for: all short ones, few long ones.

The longer a run of stages s..t, the fewer are the ends t that there may be.  Ends are ranked as
in tournaments: of two neighbours the better wins, of two winners again, and so on.  The better
has the smaller state behind it, as it may be kept; in another tournament the stage that takes
more memory wins, before and after which runs should end.  Runs of up to `16 * short` stages have
every end, longer ones the winners of one round, those of up to twice the length of two rounds,
and so on up to five.  Where runs begin is not rounded.

Behind the end before t, stages that do not fit as one run may be reversed by shorter ones
(`native/chain.h`).  There are O(L log L) runs in place of the L^2 / 2 of a short chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...support.arrays import Integers
from .sizes import Sizes, need_to_tape

# First stages that have the same ends: `TILE` of `native/chain.h`.
_TILE = 16
# Rounds that an end need win at most: fewer than 64 stages between two, `GAP` of `native/chain.h`.
_MOST_ROUNDS = 5


def most_runs(stages: int) -> int:
    """Return about the most runs of one first stage, of a chain of so many."""
    return 100 + stages // 20


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of a table, as `native/core.h` has them.

    Attributes
    ----------
    ends, places : array
        By 16 first stages each.
    begins : array
        Where the cells of each first stage begin, place 0; one more entry, the number of cells.
    """

    ends: Integers
    places: Integers
    begins: Integers

    @classmethod
    def of(cls, sizes: Sizes, short: int) -> Runs:
        """Return the runs of a chain; of up to `16 * short` stages there are all."""
        n = len(sizes)
        tiles = -(-n // _TILE)
        away = np.arange(n) // _TILE - np.arange(tiles)[:, None]
        wanted = np.ceil(np.log2(np.maximum(1, (away + 1) / short)))
        there = (away >= 0) & (_rounds(sizes) >= np.minimum(_MOST_ROUNDS, wanted))
        places = np.where(there, np.cumsum(there, axis=1) - 1, -1).astype(np.int32)
        ends = np.zeros((tiles, n), np.int32)
        tile, end = np.nonzero(there)
        ends[tile, places[tile, end]] = end
        first = np.arange(n)
        before = first % _TILE  # ends before the first stage itself
        begins = np.concatenate(([0], np.cumsum(there.sum(axis=1)[first // _TILE] - before)))
        begins[:-1] -= before
        return cls(ends, places, begins)

    @property
    def arrays(self) -> tuple[Integers, Integers, Integers]:
        """The ends, places and begins."""
        return self.ends, self.places, self.begins

    def cell(self, s: int, t: int) -> int:
        """Return where a plane of the table has stages s..t."""
        return int(self.begins[s] + self.places[s // _TILE, t])


def _rounds(sizes: Sizes) -> Integers:
    """Return how many rounds each end wins; the last of all wins every one."""
    needs = [int(sizes.state[j]) + need_to_tape(sizes, j, j) for j in range(len(sizes))]
    large = _won(np.array(needs))
    rounds = np.maximum(_won(-sizes.state[1:]), large)
    rounds[:-1] = np.maximum(rounds[:-1], large[1:])
    rounds[-1] = _MOST_ROUNDS
    return rounds


def _won(values: Integers) -> Integers:
    """Return how many rounds each value wins, the larger of two against the other."""
    rounds = np.zeros(len(values), np.int64)
    left = np.arange(len(values))
    while len(left) > 1:
        even = len(left) - len(left) % 2
        pairs = left[:even].reshape(-1, 2)
        second = values[pairs[:, 1]] >= values[pairs[:, 0]]
        left = np.append(np.where(second, pairs[:, 1], pairs[:, 0]), left[even:])
        rounds[left] += 1
    return rounds
