"""One rank's part of a computation whose states differ in size, for fake ranks and real ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from multistage.model.stages import Stage, StageCosts


class Part:
    """One rank's part of a computation whose mesh changes; every step exchanges a number."""

    def __init__(self, seed: int, rank: int, comm: Any, n: int = 30, most: int = 60) -> None:
        draw = random.Random(f"{seed} {rank}")
        self.n, self.comm = n, comm
        self.sizes = [draw.randint(1, most) for _ in range(n + 1)]
        self.seconds = [draw.uniform(1, 9) for _ in range(n)]
        self.ran: list[int] = []

    def _together(self, value: float) -> float:
        return value if self.comm is None else sum(self.comm.allgather(value))

    def start(self) -> Any:
        return np.sin(np.arange(self.sizes[0]) + 1.0)

    def step(self, u: Any, i: int) -> Any:
        self.ran.append(i)
        mean = self._together(float(u.sum()))
        return np.cos(np.resize(u, self.sizes[i + 1]) + 0.1 * mean)

    def adjoint_step(self, u: Any, adjoint: Any, i: int) -> Any:
        mean = self._together(float(adjoint.sum()) + float(u.sum()))
        return np.sin(np.resize(adjoint, self.sizes[i]) * u + mean)

    def costs(self, more: int = 0) -> StageCosts:
        """Return the costs; sizes are `more` bytes smaller than they are."""
        stages = [
            Stage(f"{i}", s, 2 * s, 8 * size - more, 8 * size - more, 0)
            for i, (s, size) in enumerate(zip(self.seconds, self.sizes[1:], strict=True))
        ]
        return StageCosts(tuple(stages), 8 * self.sizes[0])

    def store_all(self) -> bytes:
        states = [self.start()]
        for i in range(self.n):
            states.append(self.step(states[-1], i))
        adjoint = np.ones_like(states[-1])
        for i in reversed(range(self.n)):
            adjoint = self.adjoint_step(states[i], adjoint, i)
        return bytes(adjoint.tobytes())


def swept(run: Any, part: Part) -> bytes:
    last = run.forward(part.start())
    return bytes(run.reverse(np.ones_like(last)).tobytes())
