"""The C core, loaded through ctypes: plain functions on int64 arrays.

`LIBRARY` is None where the core was not built; every kernel has a plain
Python twin that then takes over.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator

_INT64 = ctypes.c_int64
_ARRAY = ctypes.POINTER(ctypes.c_int64)
_BYTES = ctypes.c_void_p  # a NumPy array's `ctypes.data`


def _load() -> ctypes.CDLL | None:
    # Asked of the import system, not of this file's folder: in an editable
    # install the built library lies elsewhere than the sources.
    found = importlib.util.find_spec(f"{__name__}._native")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
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
    library.ms_priced.argtypes = [_INT64, _INT64, *[ctypes.c_double] * 5, _BYTES]
    chain = ctypes.POINTER(Chain)
    library.ms_chain_isa.restype = _INT64
    library.ms_chain_isa.argtypes = []
    library.ms_chain_none.restype = None
    library.ms_chain_none.argtypes = [chain, _BYTES, _INT64]
    library.ms_chain_solve.restype = _INT64
    library.ms_chain_solve.argtypes = [chain, _BYTES, _BYTES, *[_INT64] * 5]
    library.ms_chain_trace.restype = _INT64
    library.ms_chain_trace.argtypes = [chain, _BYTES, _BYTES, _INT64, _BYTES, _BYTES]
    library.ms_chain_curve.restype = None
    library.ms_chain_curve.argtypes = [chain, chain, *[_BYTES] * 5, _INT64, *[_BYTES] * 4]
    library.ms_chain_smallest.restype = None
    library.ms_chain_smallest.argtypes = [chain, _INT64, _INT64, _BYTES, _BYTES]
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
    library.ms_bind.restype = _INT64
    library.ms_bind.argtypes = [_BYTES, _INT64, _INT64]
    return library


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
    )
    owner: object = None


LIBRARY = _load()


def library() -> ctypes.CDLL:
    """Return the C core, where it is known to be there."""
    assert LIBRARY is not None
    return LIBRARY


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
