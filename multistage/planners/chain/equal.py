"""The table of a chain of equal stages, by the number of stages alone.

Inside of such a chain the excess of stages s..t depends on t - s only.  Pairs that begin
with stage 0, whose input may have another gradient, and pairs that end with the last stage,
which is the loss, are solved apart.  O(L^2 S) additions in place of the O(L^3 S / 6) of
`native/chain.c`, which rounds its sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...support.arrays import Reals
from .sizes import Sizes, need_to_pass, need_to_tape

# Of shorter chains the general kernel is as fast.
LEAST_STAGES = 100


def inside_equal(sizes: Sizes, leaf: Reals, moves: tuple[Reals, Reals] | None) -> bool:
    """Whether all stages but the last are equal, but for the gradient of the chain's input."""
    stages = (sizes.tape, sizes.advance, sizes.taping, sizes.reverse, sizes.forward_s, leaf)
    alike = [values[:-1] for values in stages] + [sizes.state[1:-1], sizes.gradient[1:-1]]
    if moves is not None:
        alike += [moves[0][1:], moves[1][:-1]]
    return len(sizes) >= LEAST_STAGES and all((values == values[0]).all() for values in alike)


@dataclass(frozen=True, slots=True)
class EqualRows:
    """Excess by memory, one row for each length.

    Attributes
    ----------
    inner : array
        Of l + 1 stages that neither begin nor end the chain.
    last : array
        Of the last l + 1 stages, the first not among them.
    first : array
        Of the first l + 1 stages; the last row is of the whole chain.
    """

    inner: Reals
    last: Reals
    first: Reals

    def cells(self, size: int) -> Reals:
        """Return the rows as `native/chain.h` has them: planes of `size` memories."""
        rows = np.concatenate((self.first, self.inner, self.last))
        return np.ascontiguousarray(rows.reshape(len(rows), -1, size).transpose(1, 0, 2))

    def of(self, s: int, t: int) -> Reals:
        """Return the row of stages s..t."""
        ends = t == len(self.first) - 1
        row: Reals = (self.last if ends else self.inner)[t - s] if s else self.first[t]
        return row

    def planes(self, size: int) -> Reals:
        """Return the values of all pairs by s and t, in planes of `size` memories."""
        n, memories = self.first.shape
        out = np.empty((memories // size, n * (n + 1) // 2, size), np.float32)
        cells = self.cells(size)
        inner, last = cells[:, n : 2 * n - 2], cells[:, 2 * n - 2 :]
        out[:, :n] = cells[:, :n]
        at = n
        for s in range(1, n):
            length = n - 1 - s
            out[:, at : at + length] = inner[:, :length]
            out[:, at + length] = last[:, length]
            at += length + 1
        return out

    def pairs(self) -> dict[tuple[int, int], Reals]:
        """Return the rows by first and last stage."""
        n = len(self.first)
        return {(s, t): self.of(s, t) for s in range(n) for t in range(s, n)}


class _Family:
    """Rows by length, and what they cost right of a checkpoint and behind a tape."""

    def __init__(self, solver: _Solver, count: int) -> None:
        self.solver, self.count = solver, 0
        self.values, self.right, self.taped = np.empty((3, count, solver.memories), np.float32)

    def add(self, values: Reals) -> None:
        solver, at = self.solver, self.count
        self.values[at] = values
        self.right[at] = solver.beside(values, int(solver.sizes.state[1]), solver.move_state)
        self.taped[at] = solver.beside(values, int(solver.sizes.tape[0]), solver.move_tape)
        self.count += 1


class _Solver:
    def __init__(
        self,
        sizes: Sizes,
        memories: int,
        tapes: bool,
        prefix: Reals,
        leaf: Reals,
        moves: tuple[Reals, Reals] | None,
    ) -> None:
        self.sizes, self.memories, self.tapes, self.leaf = sizes, memories, tapes, leaf
        self.run = (prefix[1:] - prefix[0])[:, None]  # of 1, 2, ... stages
        self.move_state = None if moves is None else moves[0][1]
        self.move_tape = None if moves is None else moves[1][1]

    def beside(self, values: Reals, size: int, move: np.float32 | None) -> Reals:
        """Return the excess where `size` slots are held besides, or moved away at a price."""
        out = np.full(self.memories, np.inf, np.float32)
        if size < self.memories:
            out[size:] = values[: self.memories - size]
        return out if move is None else np.minimum(out, values + move)

    def row(self, s: int, t: int, left: _Family, right: _Family) -> Reals:
        """Return the excess of stages s..t, all shorter ones being known."""
        sizes, length = self.sizes, t - s
        out = np.full(self.memories, np.inf, np.float32)
        # Needs may be negative: see `Sizes.beside`.
        fits = min(max(0, need_to_tape(sizes, s, t)), self.memories)
        if not length:
            out[fits:] = self.leaf[s]
            return out
        # State k is kept: s..k-1 on the left, k..t on the right.
        both = right.right[length - 1 :: -1] if length > 1 else right.right[:1]
        best = (left.values[:length] + (both + self.run[:length])).min(axis=0)
        # Beyond the first stage, running forward takes the same for each.
        passes = min(max(0, need_to_pass(sizes, max(s, t - 2), t)), self.memories)
        out[passes:] = best[passes:]
        if self.tapes:
            taped = right.taped[length - 1]
            out[fits:] = np.minimum(out[fits:], taped[fits:])
        return out


def equal_rows(
    sizes: Sizes,
    memories: int,
    tapes: bool,
    prefix: Reals,
    leaf: Reals,
    moves: tuple[Reals, Reals] | None,
) -> EqualRows:
    """Return the solved program for memories 0..memories - 1; parameters as in `Table`."""
    n = len(sizes)
    solver = _Solver(sizes, memories, tapes, prefix, leaf, moves)
    inner, last, first = (_Family(solver, count) for count in (n - 2, n - 1, n))
    for length in range(n - 2):
        inner.add(solver.row(1, 1 + length, inner, inner))
    for length in range(n - 1):
        last.add(solver.row(n - 1 - length, n - 1, inner, last))
    for t in range(n - 1):
        same = t < n - 2 and sizes.gradient[0] == sizes.gradient[1]
        first.add(inner.values[t] if same else solver.row(0, t, first, inner))
    first.add(solver.row(0, n - 1, first, last))
    return EqualRows(inner.values, last.values, first.values)
