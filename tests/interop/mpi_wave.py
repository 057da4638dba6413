"""A wave on a torus, its rows spread over ranks; any number of them gives the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, COLUMNS = 13, 8


class Alone:
    """One rank that talks to itself."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def sendrecv(self, value: Any, dest: int, source: int) -> Any:
        return value


class Wave:
    """u'' = c lap(u) - u^3 in explicit steps; arithmetic is per point, communication is halos.

    A state is the pair (before, now), an adjoint the adjoints of the two and
    the gradient with respect to c so far.
    """

    def __init__(self, comm: Any) -> None:
        self.comm, self.steps = comm, 0
        rank, size = comm.Get_rank(), comm.Get_size()
        self.above, self.below = (rank - 1) % size, (rank + 1) % size
        self.rows = np.array_split(np.arange(ROWS), size)[rank]
        i, j = self.rows[:, None], np.arange(COLUMNS)
        self.c = 0.05 + 0.01 * ((3 * i + 5 * j) % 7)
        now = ((7 * i + 3 * j) % 11) / 11.0
        self.start = (now.copy(), now)
        self.seed = (0.1 * ((i + j) % 5), 0.2 * ((i * j) % 3 + 1.0), np.zeros_like(now))

    def lap(self, u: Any) -> Any:
        top = self.comm.sendrecv(u[-1].copy(), dest=self.below, source=self.above)
        bottom = self.comm.sendrecv(u[0].copy(), dest=self.above, source=self.below)
        high = np.concatenate([top[None], u, bottom[None]])
        sides = np.roll(u, 1, axis=1) + np.roll(u, -1, axis=1)
        return (high[:-2] + high[2:]) + sides - 4.0 * u

    def step(self, state: Any, i: int) -> Any:
        before, now = state
        self.steps += 1
        return now, 2.0 * now - before + self.c * self.lap(now) - 0.01 * (now * now * now)

    def adjoint_step(self, state: Any, adjoint: Any, i: int) -> Any:
        now, (first, second, gradient) = state[1], adjoint
        back = first + 2.0 * second + self.lap(self.c * second) - 0.03 * (now * now * second)
        return -second, back, gradient + second * self.lap(now)


def store_all(n_steps: int) -> Any:
    """Return the gradient of one rank that keeps every state."""
    wave = Wave(Alone())
    states = [wave.start]
    for i in range(n_steps):
        states.append(wave.step(states[-1], i))
    adjoint = wave.seed
    for i in reversed(range(n_steps)):
        adjoint = wave.adjoint_step(states[i], adjoint, i)
    return np.concatenate(adjoint)


def whole(parts: Any) -> Any:
    """Return the adjoint of the whole domain from those of the ranks."""
    return np.concatenate([np.concatenate(pieces) for pieces in zip(*parts, strict=True)])
