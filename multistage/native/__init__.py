"""The C core, loaded through ctypes: plain functions on int64 arrays.

`LIBRARY` is None where the core was not built; every kernel has a plain
Python twin that then takes over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

_INT64 = ctypes.c_int64
_ARRAY = ctypes.POINTER(ctypes.c_int64)


def _load() -> ctypes.CDLL | None:
    here = Path(__file__).parent
    names = [*here.glob("_native*.so"), *here.glob("_native*.dylib"), *here.glob("_native*.dll")]
    if not names:
        return None
    library = ctypes.CDLL(str(names[0]))
    library.ms_revolve_state_len.restype = _INT64
    library.ms_revolve_state_len.argtypes = []
    library.ms_revolve_stack_len.restype = _INT64
    library.ms_revolve_stack_len.argtypes = [_INT64]
    library.ms_revolve_init.restype = None
    library.ms_revolve_init.argtypes = [_ARRAY, _ARRAY, _INT64, _INT64, _INT64, _INT64]
    library.ms_revolve_fill.restype = _INT64
    library.ms_revolve_fill.argtypes = [_ARRAY, _ARRAY, _ARRAY, _INT64]
    return library


LIBRARY = _load()


def revolve_codes(
    start: int, stop: int, slots: int, keep_first: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield Revolve's actions as (code, a, b), from the C core.

    Codes: 0 advance a to b, 1 reverse a, 2 save a, 3 load a, 4 free a.
    Made in growing batches: the first action costs microseconds whatever the
    length, and at most 1024 actions exist at a time.
    """
    assert LIBRARY is not None
    state = (_INT64 * LIBRARY.ms_revolve_state_len())()
    stack = (_INT64 * LIBRARY.ms_revolve_stack_len(slots + 1))()
    LIBRARY.ms_revolve_init(state, stack, start, stop, slots, int(keep_first))
    room = 64
    out = (_INT64 * (3 * 1024))()
    while made := LIBRARY.ms_revolve_fill(state, stack, out, room):
        codes = iter(out[: 3 * made])
        yield from islice(zip(codes, codes, codes, strict=False), made)
        room = min(1024, 4 * room)
