"""Arrays of every dtype and kind of memory, their contents drawn from a hash, and their values."""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from typing import Any, NamedTuple

import numpy as np

try:
    from numpy._core import _multiarray_umath
except ImportError:  # NumPy 1.26
    from numpy.core import _multiarray_umath

Array = np.ndarray[Any, np.dtype[Any]]

RECORD = np.dtype([("a", "i1"), ("b", "f8"), ("c", "U2"), ("d", "f4", (2,))], align=True)
PLAIN = ("f8", "f4", "i8", "u1", "c16", "f2")
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (*PLAIN, "c8", "?", "i2", "u8", ">f8", ">i4", "M8[s]", "m8[ns]", "S5", "V7", "U3")
} | {"longdouble": np.dtype("g"), "clongdouble": np.dtype("G"), "record": RECORD}


class Leaf(NamedTuple):
    """What one array of a state is."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype].itemsize * int(np.prod(self.shape))


class Subclass(np.ndarray[Any, Any]):
    """A subclass of ndarray, which a state must not hold."""


def content(leaf: Leaf, key: bytes) -> Array:
    """Return an array whose values follow from `key`: all bit patterns that its dtype allows."""
    return _filled(DTYPES[leaf.dtype], leaf.shape, key)


def _filled(dtype: np.dtype[Any], shape: tuple[int, ...], key: bytes) -> Array:
    if dtype.names is not None:
        record = np.empty(shape, dtype)  # its padding is whatever memory holds
        for name in dtype.names:
            part = dtype[name]
            whole = (*shape, *part.shape)
            record[name] = _filled(part.base, whole, key + name.encode())
        return record
    count = int(np.prod(shape))
    if dtype.char in "gG":
        parts = 2 if dtype.char == "G" else 1
        numbers = _noise(key, 8 * parts * count).view(np.uint64)
        wide = (numbers.astype(np.longdouble) / 3).reshape(parts, *shape)
        return wide[0].copy() if parts == 1 else wide[0] + wide[1] * 1j
    noise = _noise(key, dtype.itemsize * count)
    if dtype.kind == "b":
        noise &= 1
    elif dtype.kind == "U":
        noise.reshape(-1, 4)[:] &= np.array([0x7F, 0, 0, 0], np.uint8)
    return noise.view(dtype).reshape(shape)


def _noise(key: bytes, nbytes: int) -> Array:
    noise = np.empty(nbytes, np.uint8)
    noise[:] = np.frombuffer(hashlib.shake_128(key).digest(nbytes), np.uint8)
    return noise


def values(array: Any) -> bytes:
    """Return the bytes of an array's values, without the padding in between."""
    array = np.asarray(array)
    if array.dtype.names is not None:
        return b"".join(values(array[name]) for name in array.dtype.names)
    if array.dtype.char in "gG":
        significant = 10 if array.dtype.itemsize % 16 == 0 else 8
        numbers = np.ascontiguousarray(array).reshape(-1).view(np.longdouble).view(np.uint8)
        return numbers.reshape(-1, np.dtype("g").itemsize)[:, :significant].tobytes()
    return array.tobytes()


def fingerprint(leaves: list[Any], *more: object) -> bytes:
    """Return a digest of the dtypes, shapes and values of arrays, and of whatever else is given."""
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, np.ndarray | np.generic):
            digest.update(f"{leaf.dtype.str}{leaf.shape}".encode())
            digest.update(values(leaf))
        else:
            digest.update(repr(leaf).encode())
    return digest.digest()


# ------------------------------------------------------------- memory without a base


def _new_array() -> Any:
    """Return NumPy's `PyArray_New`, with which C extensions wrap memory of their own."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(
        pointer(_multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    dims = ctypes.POINTER(ctypes.c_ssize_t)
    return ctypes.PYFUNCTYPE(
        ctypes.py_object,
        *(ctypes.py_object, ctypes.c_int, dims, ctypes.c_int, dims),  # type, ndim, dims, ...
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),  # data, ..., flags, NULL
    )(table[93])


_NEW_ARRAY = _new_array()
_UBYTE, _CARRAY = 2, 0x501  # NPY_UBYTE; C-contiguous, aligned, writeable


def lent(address: int, leaf: Leaf) -> Array:
    """Return an array over memory at an address, of which it has no base and owns nothing."""
    flat = (ctypes.c_ssize_t * 1)(leaf.nbytes)
    array = _NEW_ARRAY(np.ndarray, 1, flat, _UBYTE, None, address, 1, _CARRAY, None)
    with warnings.catch_warnings():  # a view would have a base: the array itself is changed
        warnings.simplefilter("ignore", DeprecationWarning)
        array.dtype, array.shape = DTYPES[leaf.dtype], leaf.shape
    assert array.base is None and not array.flags.owndata
    return array


class Lender:
    """Memory that arrays borrow without saying so."""

    def __init__(self, nbytes: int) -> None:
        self._memory = ctypes.create_string_buffer(max(1, nbytes) + 64)
        address = ctypes.addressof(self._memory)
        self._address = address + -address % 64

    def lend(self, leaf: Leaf) -> Array:
        """Return an array over this memory, or one of its own if it has no shape to lend."""
        if not leaf.nbytes or not leaf.shape:
            return np.empty(leaf.shape, DTYPES[leaf.dtype])
        return lent(self._address, leaf)
