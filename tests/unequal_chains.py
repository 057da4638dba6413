"""Random chains whose steps differ: other trees, shapes and dtypes from state to state.

The adjoint is a digest of every bit that an adjoint step was given, as in `chains`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import optree
from chains import digest, kept

from multistage.model.chain import Chain, FunctionChain, InPlaceChain
from multistage.model.stages import Stage, StageCosts

DTYPES = (np.float64, np.float32, np.complex128)
KINDS = ("functional", "tape", "in-place", "in-place-tape", "one-tape")
_TREES = (
    lambda a, b: {"x": a, "y": b},
    lambda a, b: {"y": b, "in": [a]},
    lambda a, b: (a, b),
    lambda a, b: [a, {"z": (b,)}],
    lambda a, b: (a, np.asarray(b.sum())),
)


class Case:
    """One random chain of `n` steps.

    Attributes
    ----------
    chain : Chain
    sizes : list of int
        Bytes of states 0..n.
    costs : StageCosts
    """

    def __init__(self, seed: int, kind: str, n: int, scale: int = 40) -> None:
        draw = random.Random(seed)
        self.kind, self.n = kind, n
        in_place = kind.startswith("in-place")
        self._trees = [0 if in_place else draw.randrange(len(_TREES)) for _ in range(n + 1)]
        # Some steps leave shapes as they are: in-place ones then write into their arrays.
        self._shapes: list[Any] = []
        for i in range(n + 1):
            if i and draw.random() < 0.4:
                self._shapes.append(self._shapes[-1])
                self._trees[i] = self._trees[i - 1]
                continue
            counts = (draw.randrange(1, scale), draw.randrange(1, 10 * scale))
            self._shapes.append([(count, draw.choice(DTYPES)) for count in counts])
        self.sizes = [
            sum(a.nbytes for a in optree.tree_leaves(self._made(i))) for i in range(n + 1)
        ]
        self.seconds = [draw.uniform(1, 20) for _ in range(n)]

    def start(self) -> Any:
        """Return a fresh state 0."""
        return self._made(0)

    def _arrays(self, i: int, salt: float) -> list[Any]:
        i = min(i, self.n)  # where steps are measured for a run of unknown length
        return [
            (np.cos(np.arange(count) * (k + 1.3) + salt) * 3).astype(dtype)
            for k, (count, dtype) in enumerate(self._shapes[i])
        ]

    def _made(self, i: int, salt: float = 0.5) -> Any:
        return _TREES[self._trees[min(i, self.n)]](*self._arrays(i, salt))

    def step(self, state: Any, i: int) -> Any:
        """Return state i + 1."""
        total = sum(float(abs(leaf).sum()) for leaf in optree.tree_leaves(state))
        return self._made(i + 1, total % 7 + i)

    def _taped(self, state: Any, i: int) -> tuple[Any, Any]:
        after = self.step(state, i)
        leaves = optree.tree_leaves(state)
        return after, (leaves[0] * 2, leaves[-1])

    def _forward(self, state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            made = self.step(state, i)
            for key in state:
                new = made[key]
                if state[key].shape == new.shape and state[key].dtype == new.dtype:
                    state[key][...] = new
                else:
                    state[key] = new
            del made, new

    def _tape_in_place(self, state: Any, i: int) -> Any:
        before = state["y"].copy()
        self._forward(state, i, i + 1)
        return before, state["x"][:1]

    def chain(self) -> Chain[Any, int]:
        """Return the chain."""
        match self.kind:
            case "functional":
                return FunctionChain(self.step, digest)
            case "tape":
                return FunctionChain(self.step, digest, self._taped)
            case "one-tape":
                return FunctionChain(self.step, digest, self._taped, one_tape=True)
            case "in-place":
                return InPlaceChain(self._forward, digest)
            case _:
                return InPlaceChain(self._forward, digest, self._tape_in_place)

    @property
    def costs(self) -> StageCosts:
        """Costs of the steps, as seen from outside: no gradients."""
        state_is_tape = self.kind in ("functional", "in-place")
        stages = []
        for i, (seconds, size) in enumerate(zip(self.seconds, self.sizes[1:], strict=True)):
            tape = size if state_is_tape else size + 2 * self.sizes[i] + 64
            stages.append(Stage(f"{i}", seconds, 2 * seconds, size, tape, gradient_bytes=0))
        return StageCosts(tuple(stages), self.sizes[0])

    def store_all(self) -> tuple[bytes, int]:
        """Return the last state's bytes and the adjoint, every state kept: the answer."""
        return kept(self.chain(), self.start(), 1, self.n)
