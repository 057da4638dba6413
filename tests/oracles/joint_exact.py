"""The exact optimum of chains of up to six stages with an asynchronous slow tier.

The oracle of the joint planner and of its lower bound: an A* search in
`joint_exact.c`, built by the first who asks.  It shares nothing with the
planner, the simulator or the judge but `StageCosts` and `Tier`.
"""

from __future__ import annotations

import ctypes

from multistage.model.stages import StageCosts
from multistage.model.tier import Tier

from .compiled import library

MAX_STAGES = 6
_ARRAY = ctypes.POINTER(ctypes.c_int64)
_NAMES = (
    ("state", "gradient"),
    ("tape", "advance", "taping", "back"),
    ("forward_s", "spared_s", "backward_s"),
    ("write_s", "read_s"),
)
_MOST_SECONDS = 63


class _Problem(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("memory", ctypes.c_int64),
        *((name, _ARRAY) for names in _NAMES for name in names),
        ("shared", ctypes.c_int64),
        ("tapes", ctypes.c_int64),
    )


def _library() -> ctypes.CDLL:
    loaded = library("joint_exact")
    loaded.exact_joint.restype = ctypes.c_int64
    loaded.exact_joint.argtypes = [ctypes.POINTER(_Problem), ctypes.c_int64, ctypes.c_int64]
    return loaded


def exact_joint_makespan(
    costs: StageCosts, memory_bytes: int, rates: Tier, upper_s: int, *, limit: int = 2_000_000
) -> int | None:
    """Return the least makespan of any schedule, `upper_s` if none is faster.

    None if `limit` states of the search do not suffice.  Times of stages and
    of transfers must be whole seconds, at most 63; the tier's capacity is not
    heeded.
    """
    stages, n = costs.stages, len(costs.stages) + 1
    assert n <= MAX_STAGES + 1
    sizes = [costs.input_bytes, *(s.output_bytes for s in stages), 0]
    tapes = [0, *(s.tape_bytes for s in stages), 0]
    things = [0] * 16
    for i in range(1, n + 1):
        things[i] = tapes[i]
        things[8 + i] = sizes[i]
    arrays = {
        "state": sizes,
        "gradient": [costs.input_gradient_bytes, *(s.gradient_bytes for s in stages), 0],
        "tape": tapes,
        "advance": [0, *(s.forward_overhead_bytes for s in stages), 0],
        "taping": [0, *(s.tape_overhead_bytes for s in stages), 0],
        "back": [0, *costs.reverse_bytes, 0],
        "forward_s": [0, *(_whole(s.forward_s) for s in stages), 0],
        "spared_s": [0, *(_whole(s.spared_s) for s in stages), 0],
        "backward_s": [0, *(_whole(s.backward_s) for s in stages), 0],
        "write_s": [_whole(rates.writing_s(size)) for size in things],
        "read_s": [_whole(rates.reading_s(size)) for size in things],
    }
    problem = _Problem(
        n,
        memory_bytes - costs.input_bytes,
        *((ctypes.c_int64 * len(values))(*values) for values in arrays.values()),
        int(rates.shared),
        int(rates.tapes),
    )
    found = _library().exact_joint(ctypes.byref(problem), upper_s, limit)
    if found == -2:
        raise MemoryError("no memory for the exact search")
    return None if found == -1 else int(found)


def _whole(seconds: float) -> int:
    whole = round(seconds)
    assert abs(whole - seconds) < 1e-9 and whole <= _MOST_SECONDS, f"{seconds} s"
    return whole
