"""Arrays that borrow memory and have no base, as extensions make them over their own buffers."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

_NEW = 93  # place of PyArray_New in NumPy's C API, since 1.0


def _array_api() -> Any:
    for package in ("numpy._core", "numpy.core"):
        try:
            module = importlib.import_module(f"{package}._multiarray_umath")
        except ImportError:
            continue
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        return ctypes.cast(get(module._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    raise AssertionError("NumPy without a C API")


_new: Any = ctypes.PYFUNCTYPE(
    ctypes.py_object,
    ctypes.py_object,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_ssize_t),
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
)(_array_api()[_NEW])


def borrowed(memory: Any, first: int, count: int) -> Any:
    """Return an array of doubles on part of another one's memory, as PyArray_SimpleNewFromData."""
    shape = (ctypes.c_ssize_t * 1)(count)
    number = np.dtype(np.float64).num
    array = _new(np.ndarray, 1, shape, number, None, memory.ctypes.data + 8 * first, 0, 0x501, None)
    assert array.base is None and not array.flags.owndata and array.flags.writeable
    return array
