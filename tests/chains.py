"""Chains whose adjoint is a digest of every bit it was given, and of the order.

Two runs have equal digests only if each adjoint step saw the same bytes, in
the same order in memory, as the same step: stricter than equal gradients.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import optree

from multistage.model.blocks import Blocks
from multistage.model.chain import Chain, FunctionChain, InPlaceChain


def digest(tree: Any, adjoint: int, step: int) -> int:
    """Return the adjoint of a step: a digest of its tape, its number and the adjoint after it."""
    value = zlib.crc32(b"%d" % step, adjoint)
    for array in optree.tree_leaves(tree):
        order = b"F" if array.flags.f_contiguous and not array.flags.c_contiguous else b"C"
        value = zlib.crc32(order + np.ascontiguousarray(array).tobytes(), value)
    return value


def _nested(state: Any, i: int) -> Any:
    h, (c, k), n = state["h"], state["pair"], state["n"]
    return {
        "h": np.sin(h + np.float32(i)) * np.float32(0.9),
        "pair": (c * (0.5 + 0.3j) + h.sum(), k * 6364136223846793005 + i),
        "n": np.asarray(n + np.int64(k[0] % 7)),
        "none": np.zeros((0, 3)),
    }


def _nested_start() -> Any:
    return {
        "h": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
        "pair": (np.linspace(0, 1, 5) * (1 + 2j), np.array([3, 5], np.uint64)),
        "n": np.array(7, np.int64),
        "none": np.zeros((0, 3)),
    }


def _nan(state: Any, i: int) -> Any:
    bits = state.view(np.uint64) * np.uint64(3) + np.uint64(i)
    return (bits | np.uint64(0x7FF8000000000000)).view(np.float64).copy()


def _fortran(state: Any, i: int) -> Any:
    return np.asfortranarray(np.cos(state * i) + state / 3)


def _view(state: Any, i: int) -> Any:
    both = np.stack([np.cos(state[0]), state[1].T[::-1].T * 0.5 + i])
    return both[0], both[1, ::-1].T.T


def _large(state: Any, i: int) -> Any:
    return np.sin(state + i)


def _taped(state: Any, i: int) -> tuple[Any, Any]:
    after = _nested(state, i)
    return after, (state["h"] * 2, after["pair"])


def _in_place(state: Any, start: int, stop: int) -> None:
    for i in range(start, stop):
        state["x"] *= np.float32(0.9)
        state["x"] += np.sin(state["y"][:4].real).astype(np.float32) + np.float32(i)
        state["y"][...] = state["y"][::-1] * 1j + i


def _in_place_start() -> Any:
    return {"x": np.ones(4, np.float32), "y": np.asfortranarray(np.ones((8, 4)) * 1j)[:, 0].copy()}


def _in_place_tape(state: Any, i: int) -> Any:
    """Return part of the state before the step, and part of that after it: a view."""
    before = state["y"][2:5].copy()
    _in_place(state, i, i + 1)
    return before, state["x"][:2]


def _workspace() -> Chain[Any, int]:
    """Return a chain that overwrites its own two buffers in turn and returns views of them."""
    work = np.zeros((2, 9))

    def step(state: Any, i: int) -> Any:
        np.sin(state + i, out=work[i % 2])
        return work[i % 2]

    return FunctionChain(step, digest)


def _functional(step: Callable[[Any, int], Any]) -> Chain[Any, int]:
    return FunctionChain(step, digest)


# Those whose tapes are not their states.
TAPED = ("tape", "in-place-tape", "blocks-tape")

CHAINS: dict[str, tuple[Callable[[], Chain[Any, int]], Callable[[], Any]]] = {
    "nested": (lambda: _functional(_nested), _nested_start),
    "tape": (lambda: FunctionChain(_nested, digest, _taped), _nested_start),
    "in-place": (lambda: InPlaceChain(_in_place, digest), _in_place_start),
    "in-place-tape": (lambda: InPlaceChain(_in_place, digest, _in_place_tape), _in_place_start),
    "blocks": (lambda: Blocks(_functional(_nested), 3), _nested_start),
    "blocks-tape": (lambda: Blocks(FunctionChain(_nested, digest, _taped), 2), _nested_start),
    "blocks-in-place": (lambda: Blocks(InPlaceChain(_in_place, digest), 4), _in_place_start),
    "blocks-workspace": (lambda: Blocks(_workspace(), 2), lambda: np.linspace(0, 1, 9)),
    "nan": (lambda: _functional(_nan), lambda: np.full(9, np.nan)),
    "fortran": (
        lambda: _functional(_fortran),
        lambda: np.asfortranarray(np.arange(20.0).reshape(4, 5)),
    ),
    "views": (lambda: _functional(_view), lambda: (np.ones((3, 4)), np.ones((3, 4)))),
    "workspace": (_workspace, lambda: np.linspace(0, 1, 9)),
    "large": (lambda: _functional(_large), lambda: np.linspace(0, 1, 60_000)),
}


def store_all(name: str, n: int, adjoint: int = 1) -> tuple[bytes, int]:
    """Return the last state's bytes and the adjoint, every state kept: the answer."""
    make, start = CHAINS[name]
    return kept(make(), start(), adjoint, n)


def kept(chain: Any, state: Any, adjoint: Any, n: int) -> tuple[bytes, Any]:
    """Return the last state's bytes and the adjoint, deep copies kept of each state or tape."""
    tapes = []
    state = copy.deepcopy(state)
    for i in range(n):
        if chain.state_is_tape:
            tapes.append(copy.deepcopy(state))
            state = chain.advance(state, i, i + 1)
        else:
            state, tape = chain.tape(state, i)
            tapes.append(copy.deepcopy(tape))
    last = raw(state)
    for i in reversed(range(n)):
        adjoint = chain.reverse(tapes[i], adjoint, i)
    return last, adjoint


def raw(state: Any) -> bytes:
    """Return the bytes of a state."""
    return b"".join(array.tobytes() for array in optree.tree_leaves(state))
