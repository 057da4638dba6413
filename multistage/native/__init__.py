"""The C core, loaded through ctypes: plain functions on int64 arrays.

`LIBRARY` is None where the core was not built; every kernel has a plain
Python twin that then takes over, and the first one to do so warns.

The environment variable MULTISTAGE_CORE, looked at when the package is built
and again when it is imported, is "off" to do without the core and "required"
to make its absence an error.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import warnings
from collections.abc import Iterator
from functools import cache

from ..errors import SlowWarning

_INT64 = ctypes.c_int64
_ARRAY = ctypes.POINTER(ctypes.c_int64)
_BYTES = ctypes.c_void_p  # a NumPy array's `ctypes.data`


_INSTALL = (
    "install a C compiler, then: "
    "pip install --force-reinstall --no-deps --no-cache-dir multistage-checkpointing"
)


def _load(wanted: str) -> tuple[ctypes.CDLL | None, str]:
    """Return the core, or None and why it is not there ("" if nobody wants it)."""
    if wanted == "off":
        return None, ""
    # Asked of the import system, not of this file's folder: in an editable
    # install the built library lies elsewhere than the sources.
    found = importlib.util.find_spec(f"{__name__}._native")
    if found is None or found.origin is None:
        why = "it was not built"
    else:
        try:
            return _declared(ctypes.CDLL(found.origin)), ""
        except OSError as error:  # made for another machine, or for a newer libc
            why = str(error)
        except AttributeError as error:  # in a source tree: older than the Python beside it
            why = f"{found.origin} is of another version: {error}"
    if wanted == "required":
        raise ImportError(f"multistage has no C core ({why}); {_INSTALL}")
    return None, why


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library, its functions' types declared.  Raises AttributeError if one lacks."""
    library.ms_revolve_state_len.restype = _INT64
    library.ms_revolve_state_len.argtypes = []
    library.ms_revolve_stack_len.restype = _INT64
    library.ms_revolve_stack_len.argtypes = [_INT64]
    library.ms_revolve_init.restype = None
    library.ms_revolve_init.argtypes = [_ARRAY, _ARRAY, _INT64, _INT64, _INT64, _INT64]
    library.ms_revolve_fill.restype = _INT64
    library.ms_revolve_fill.argtypes = [_ARRAY, _ARRAY, _ARRAY, _INT64]
    library.ms_revolve_accesses.restype = None
    library.ms_revolve_accesses.argtypes = [*[_INT64] * 3, *[_BYTES] * 3]
    library.ms_exact.restype = _INT64
    library.ms_exact.argtypes = [*[_INT64] * 6, _BYTES, _BYTES, _INT64, _BYTES, _INT64]
    library.ms_priced_work_len.restype = _INT64
    library.ms_priced_work_len.argtypes = [_INT64, _INT64]
    library.ms_priced.restype = ctypes.c_double
    library.ms_priced.argtypes = [_INT64, _INT64, *[ctypes.c_double] * 6, _BYTES]
    chain = ctypes.POINTER(Chain)
    library.ms_chain_isa.restype = _INT64
    library.ms_chain_isa.argtypes = []
    library.ms_chain_none.restype = None
    library.ms_chain_none.argtypes = [chain, _BYTES, _INT64]
    library.ms_chain_solve.restype = _INT64
    library.ms_chain_solve.argtypes = [chain, _BYTES, _BYTES, *[_INT64] * 5]
    library.ms_chain_trace.restype = _INT64
    library.ms_chain_trace.argtypes = [chain, _BYTES, _BYTES, *[_INT64] * 3, _BYTES, _BYTES]
    library.ms_chain_curve.restype = None
    library.ms_chain_curve.argtypes = [chain, chain, *[_BYTES] * 5, _INT64, _INT64, *[_BYTES] * 4]
    library.ms_chain_smallest.restype = None
    library.ms_chain_smallest.argtypes = [chain, _INT64, _INT64, _BYTES, _BYTES]
    joint, program = ctypes.POINTER(Joint), ctypes.POINTER(JointProgram)
    library.ms_joint_work_len.restype = _INT64
    library.ms_joint_work_len.argtypes = [_INT64]
    library.ms_joint_judge.restype = ctypes.c_double
    library.ms_joint_judge.argtypes = [joint, *[_BYTES] * 3]
    library.ms_joint_layout.restype = None
    library.ms_joint_layout.argtypes = [joint, *[_BYTES] * 3]
    library.ms_joint_improve.restype = ctypes.c_double
    library.ms_joint_improve.argtypes = [joint, _BYTES, ctypes.c_double, _INT64, _INT64]
    library.ms_joint_program_len.restype = _INT64
    library.ms_joint_program_len.argtypes = [joint, program]
    library.ms_joint_program.restype = None
    library.ms_joint_program.argtypes = [joint, program, _BYTES, _BYTES, _INT64, _BYTES, _BYTES]
    library.ms_joint_dual_len.restype = _INT64
    library.ms_joint_dual_len.argtypes = [_INT64, _INT64]
    library.ms_joint_dual.restype = ctypes.c_double
    library.ms_joint_dual.argtypes = [ctypes.POINTER(JointDual), _BYTES]
    library.ms_hierarchy_blocks.restype = _INT64
    library.ms_hierarchy_blocks.argtypes = [_INT64]
    library.ms_hierarchy_row.restype = None
    library.ms_hierarchy_row.argtypes = [
        *[_INT64] * 3,
        _BYTES,
        ctypes.c_double,
        *[_BYTES] * 8,
        _INT64,
    ]
    library.ms_sweep_len.restype = _INT64
    library.ms_sweep_len.argtypes = [_INT64, _INT64]
    library.ms_sweep.restype = _INT64
    library.ms_sweep.argtypes = [ctypes.POINTER(SweepCall), _INT64, _BYTES, _BYTES, _BYTES]
    library.ms_sweep_tables_len.restype = _INT64
    library.ms_sweep_tables_len.argtypes = []
    library.ms_bind.restype = _INT64
    library.ms_bind.argtypes = [_BYTES, _INT64, _INT64]
    library.ms_nodes_wanted.restype = _INT64
    library.ms_nodes_wanted.argtypes = [_ARRAY, _INT64]
    library.ms_io_len.restype = _INT64
    library.ms_io_len.argtypes = []
    library.ms_io_start.restype = _INT64
    library.ms_io_start.argtypes = [_BYTES, ctypes.POINTER(IoOptions)]
    library.ms_io_wait.restype = _INT64
    library.ms_io_wait.argtypes = [_BYTES, _INT64, _INT64]
    library.ms_io_stop.restype = None
    library.ms_io_stop.argtypes = [_BYTES]
    library.ms_io_in_memory.restype = _INT64
    library.ms_io_in_memory.argtypes = [_INT64]
    library.ms_xxh64.restype = _INT64
    library.ms_xxh64.argtypes = [_BYTES, _INT64]
    return library


def _load_held(path: str) -> ctypes.PyDLL:
    """Return what takes nanoseconds and never waits, called with the interpreter lock held."""
    held = ctypes.PyDLL(path)
    held.ms_io_submit.restype = None
    held.ms_io_submit.argtypes = [_BYTES, ctypes.POINTER(Job), _INT64]
    held.ms_io_state.restype = _INT64
    held.ms_io_state.argtypes = [ctypes.POINTER(Job)]
    return held


class Chain(ctypes.Structure):
    """`chain_t` of chain.c: pointers to int64 arrays, and to the float32 prefix sums and leaves."""

    _fields_ = (
        ("n", _INT64),
        ("state", _BYTES),
        ("grad", _BYTES),
        ("tape", _BYTES),
        ("advance", _BYTES),
        ("taping", _BYTES),
        ("reverse", _BYTES),
        ("prefix", _BYTES),
        ("leaf", _BYTES),
        ("tapes", _INT64),
        ("move_state", _BYTES),
        ("move_tape", _BYTES),
    )
    owner: object = None


class Joint(ctypes.Structure):
    """`joint_t` of joint.h: a chain, its table, a limit and a tier."""

    _fields_ = (
        ("slots", ctypes.POINTER(Chain)),
        ("bytes", ctypes.POINTER(Chain)),
        ("none", _BYTES),
        ("table", _BYTES),
        ("memories", _INT64),
        ("unit", ctypes.c_double),
        *((name, _BYTES) for name in ("forward_s", "reverse_s", "spared_s")),
        ("limit", _INT64),
        *((name, ctypes.c_double) for name in ("write_bytes_per_s", "read_bytes_per_s")),
        ("latency_s", ctypes.c_double),
        ("capacity", _INT64),
        ("shared", _INT64),
        ("may", _BYTES),
        ("work", _BYTES),
    )
    owner: object = None


class JointProgram(ctypes.Structure):
    """`program_t` of joint_program.c: how the dynamic program rounds and what it charges."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("read_price", "staging", "fineness")),
        ("speed", ctypes.c_double),
        *((name, _INT64) for name in ("reserve", "steps", "stride", "isa")),
    )


class JointDual(ctypes.Structure):
    """`dual_t` of joint_bound.c: a chain in slots, and prices."""

    _fields_ = (
        ("n", _INT64),
        ("slots", _INT64),
        *((name, _BYTES) for name in ("state", "tape", "taping", "passing")),
        ("excess", _BYTES),
        ("forward", _BYTES),
        ("total", ctypes.c_double),
        ("work", ctypes.c_double),
        *((name, _BYTES) for name in ("fast_state", "fast_tape", "move_state", "move_tape")),
        *((name, _BYTES) for name in ("late_state", "again_state")),
    )


class SweepCall(ctypes.Structure):
    """`sweep_t` of sweep.c: a streaming schedule and its costs."""

    _fields_ = (
        *((name, _INT64) for name in ("n", "online", "slots", "tail_start", "depth")),
        *((name, _INT64) for name in ("queue_depth", "drain_steps", "keep_from", "end_start")),
        *((name, _INT64) for name in ("capacity", "reserve", "backlog")),
        *((name, ctypes.c_uint64) for name in ("extra", "skip")),
        *((name, ctypes.c_double) for name in ("spacing", "end_spacing", "forward", "taping")),
        *((name, ctypes.c_double) for name in ("reverse", "turn", "action", "write", "read")),
        *((name, ctypes.c_double) for name in ("write_overhead", "read_overhead")),
    )


class Piece(ctypes.Structure):
    """`piece_t` of io.h: an array and its place in the record."""

    _fields_ = (("data", _BYTES), ("offset", _INT64), ("nbytes", _INT64))


class Job(ctypes.Structure):
    """`job_t` of io.h: one extent to write or read."""

    _fields_ = (
        ("next", _BYTES),
        ("written", _BYTES),
        ("data", _BYTES),
        ("pieces", ctypes.POINTER(Piece)),
        ("n_pieces", _INT64),
        ("nbytes", _INT64),
        ("position", _INT64),
        ("sum", _INT64),
        ("start_ns", _INT64),
        ("stop_ns", _INT64),
        ("error", _INT64),
        ("state", _INT64),
    )


Transfer = ctypes.CFUNCTYPE(_INT64, _INT64, _BYTES, _INT64, _INT64)


class IoOptions(ctypes.Structure):
    """`io_options_t` of io.h."""

    _fields_ = (
        ("fd", _INT64),
        ("extent_bytes", _INT64),
        ("most_bytes", _INT64),
        ("bounce", _BYTES),
        ("chunk_bytes", _INT64),
        ("n_bounces", _INT64),
        ("nice", _INT64),
        ("pwrite", Transfer),
        ("pread", Transfer),
    )


LIBRARY, _WHY = _load(os.environ.get("MULTISTAGE_CORE", ""))
HELD = None if LIBRARY is None else _load_held(LIBRARY._name)


def available() -> bool:
    """Whether the C core is there; warns once if it should be and is not.

    For whoever chooses between a kernel and its twin.
    """
    if LIBRARY is None and _WHY:
        _warn(_WHY)
    return LIBRARY is not None


@cache
def _warn(why: str) -> None:
    warnings.warn(
        f"multistage runs without its C core ({why}). Gradients are the same, but planning "
        "takes up to 100 times longer and files are written by threads of Python. For the "
        f"fast one, {_INSTALL}. To do without it and without this warning: MULTISTAGE_CORE=off",
        SlowWarning,
        stacklevel=3,
    )


def library() -> ctypes.CDLL:
    """Return the C core, where it is known to be there."""
    assert LIBRARY is not None
    return LIBRARY


def held_library() -> ctypes.PyDLL:
    """Return the functions of the C core that are called with the interpreter lock held."""
    assert HELD is not None
    return HELD


def nodes_wanted() -> list[int]:
    """Return the memory nodes this thread is bound to or prefers; none without the C core."""
    if LIBRARY is None:
        return []
    nodes = (_INT64 * 1024)()
    return nodes[: LIBRARY.ms_nodes_wanted(nodes, len(nodes))]


def revolve_codes(start: int, stop: int, slots: int, keep_first: bool) -> Iterator[list[int]]:
    """Yield Revolve's actions from the C core, in batches of flat (code, a, b) triples.

    Codes: 0 advance a to b, 1 reverse a, 2 save a, 3 load a, 4 free a.
    The batches grow to 512 actions: the first action costs microseconds
    whatever the length, and memory does not depend on it.
    """
    assert LIBRARY is not None
    state = (_INT64 * LIBRARY.ms_revolve_state_len())()
    stack = (_INT64 * LIBRARY.ms_revolve_stack_len(slots + 1))()
    LIBRARY.ms_revolve_init(state, stack, start, stop, slots, int(keep_first))
    out = (_INT64 * (3 * 512))()
    room = 32
    while made := LIBRARY.ms_revolve_fill(state, stack, out, room):
        yield out[: 3 * made]
        room = min(512, 4 * room)
