"""The C core, loaded through ctypes: plain functions on arrays, declared in core.h and stream.h.

`LIBRARY` is None where the core was not built; a kernel's plain Python twin then
takes over, and the first one to do so warns.  What has no twin is refused (`require`).

The environment variable MULTISTAGE_CORE, looked at when the package is built
and again when it is imported, is "off" to do without the core and "required"
to make its absence an error.  A core that was compiled from other sources than
those beside it is always one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from ..errors import ArgumentError, SlowWarning
from .header import Header, sum_of_sources
from .header import Struct as Struct

_HERE = Path(__file__).parent
HEADER = Header("".join((_HERE / name).read_text() for name in ("core.h", "stream.h", "loop.h")))
_INT64 = ctypes.c_int64


# A structure comes after those that it refers to.
ChainStruct = HEADER.structure("chain_t")
Joint = HEADER.structure("joint_t")
JointProgram = HEADER.structure("program_t")
JointDual = HEADER.structure("dual_t")
SweepCall = HEADER.structure("sweep_t")
Piece = HEADER.structure("piece_t")
Transfer = HEADER.callback("transfer_t")
StreamView = HEADER.structure("stream_view_t")
StreamRecord = HEADER.structure("stream_record_t")
StreamOptions = HEADER.structure("stream_options_t")

_INSTALL = (
    "install a C compiler, then: "
    "pip install --force-reinstall --no-deps --no-cache-dir multistage-checkpointing"
)


def _load(wanted: str) -> tuple[ctypes.CDLL | None, str]:
    """Return the core, or None and the reason why it is missing ("" if it is turned off)."""
    if wanted == "off":
        return None, ""
    # Asked of the import system, not of this file's folder: in an editable
    # install the built library lies elsewhere than the sources.
    found = importlib.util.find_spec(f"{__name__}._native")
    if found is None or found.origin is None:
        why = f"it was not built, or not for the package in {_HERE.parent}"
    else:
        try:
            return _declared(ctypes.CDLL(found.origin), found.origin), ""
        except OSError as error:  # made for another machine, or for a newer libc
            why = str(error)
    if wanted == "required":
        raise ImportError(f"multistage has no C core ({why}); {_INSTALL}")
    return None, why


def _declared(library: ctypes.CDLL, path: str) -> ctypes.CDLL:
    """Return the library, its functions' types declared.

    Raises
    ------
    ImportError
        If it was compiled from other sources than those beside this file.
    """
    expected = sum_of_sources(_HERE)
    try:
        HEADER.declare(library)
        stale = "other sources" if expected not in (0, library.ms_sources()) else ""
    except AttributeError as error:
        stale = f"another version ({error})"
    if stale:
        raise ImportError(
            f"multistage's C core, {path}, was compiled from {stale} than those in {_HERE}; "
            "compile it again with `pip install -e .` there, or do without it with "
            "MULTISTAGE_CORE=off"
        )
    return library


def _load_held(path: str) -> ctypes.PyDLL:
    """Return what takes nanoseconds and never waits, called with the interpreter lock held."""
    held = ctypes.PyDLL(path)
    HEADER.declare(held)
    return held


LIBRARY, _WHY = _load(os.environ.get("MULTISTAGE_CORE", ""))
HELD = None if LIBRARY is None else _load_held(LIBRARY._name)


# What an array of NumPy begins with, for compiled code of any version: an object's head, then where
# its bytes are; 0 if that is found to be otherwise.
HEAD = object.__basicsize__ if sys.implementation.name == "cpython" else 0
_probe = np.ones(3)[1:]
if HEAD and ctypes.c_void_p.from_address(id(_probe) + HEAD).value != _probe.ctypes.data:
    HEAD = 0


def whereabouts(array: object) -> int:
    """Return what tells the core where the bytes of an array begin: HEAD further on, or here if 0.

    Between two steps of a computation, whose data is in the caches in place of our code,
    `array.ctypes.data` takes 25 us, more than all else of a put.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError(f"a store takes arrays of NumPy, not {type(array).__name__}")
    return id(array) if HEAD else int(array.ctypes.data)


def available() -> bool:
    """Whether the C core is there; warns once if it should be and is not.

    For code that chooses between a kernel and its twin.
    """
    if LIBRARY is None and _WHY:
        _warn(_WHY)
    return LIBRARY is not None


def missing() -> str:
    """Return why the C core is not there; "" if it is, or if it is switched off."""
    return _WHY


@cache
def _warn(why: str) -> None:
    warnings.warn(
        f"multistage runs without its C core ({why}). Gradients are the same, but planning "
        "takes up to 100 times longer and files are written by threads of Python. For the "
        f"fast one, {_INSTALL}. To do without it and without this warning: MULTISTAGE_CORE=off",
        SlowWarning,
        stacklevel=3,
    )


def require(what: str, instead: str) -> None:
    """Raise ArgumentError where the C core is missing, of which there is no Python twin.

    Parameters
    ----------
    what, instead : str
        What needs it, and what can be done without it.
    """
    if LIBRARY is None:
        why = _WHY or "MULTISTAGE_CORE=off switches it off"
        raise ArgumentError(f"{what} needs the C core ({why}); {_INSTALL}; or {instead}")


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

    Bytes: 0 advance a to b, 1 reverse a, 2 save a, 3 load a, 4 free a.
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
