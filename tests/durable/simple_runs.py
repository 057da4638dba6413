"""A chain of few lines that can be broken off, and its gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import kept

from multistage import Costs, FunctionChain, Reversal, Tier

FAST = Costs(1.0, 1.0, tiers=(Tier("durable", 1.0, 1.0),))  # every state is worth a write


class BrokenOff(Exception):
    """What ends a process, in these tests."""


def simple(
    folder: Path, n: int = 20, back: int = -1, *, forward: int = -1, **options: Any
) -> Reversal[Any, Any]:
    """Return a run that breaks off at step `forward`, or adjoint step `back`."""

    def step(x: Any, i: int) -> Any:
        if i == forward:
            raise BrokenOff
        return x * 1.01 + i

    def adjoint_step(x: Any, a: Any, i: int) -> Any:
        if i == back:
            raise BrokenOff
        return a * x + i

    settings = {"durable_every_s": 0, "costs": FAST, "memory": "4 slots"} | options
    return Reversal(step, adjoint_step, n, durable=folder, **settings)


def plain(n: int) -> Any:
    """Return the gradient of `simple`, every state kept."""
    chain = FunctionChain(lambda x, i: x * 1.01 + i, lambda x, a, i: a * x + i)
    return kept(chain, np.ones(3), np.ones(3), n)[1]


def gradient(folder: Path, n: int = 20, back: int = -1, **options: Any) -> Any:
    """Run `simple` to its end, or begin one that breaks off."""
    with simple(folder, n, back, **options) as run:
        run.forward(np.ones(3))
        return run.reverse(np.ones(3))


def leave_broken(folder: Path, n: int, back: int) -> None:
    """Leave a run of `simple` behind that was broken off at adjoint step `back`."""
    with pytest.raises(BrokenOff):
        gradient(folder, n, back)
