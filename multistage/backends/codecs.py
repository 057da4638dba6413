"""Arrays to fewer bytes and back: blosc2 without loss, zfpy within a bound.

Both packages are extras: `pip install 'multistage-checkpointing[compress]'`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import numpy as np

from ..errors import ArgumentError
from ..states.layout import Array

# Compressed bytes.
Packed = bytes | bytearray | memoryview

PACKAGES = {"blosc": "blosc2", "zfp": "zfpy"}
_BLOSC_BYTES = 1 << 30  # it takes up to 2 GiB at once
_MOST_TYPESIZE = 255


def installed(scheme: str) -> bool:
    """Whether the package of a scheme can be imported."""
    return importlib.util.find_spec(PACKAGES[scheme]) is not None


def require(scheme: str) -> None:
    """Raise ArgumentError if the package of a scheme is not installed."""
    if not installed(scheme):
        raise ArgumentError(
            f"compression scheme {scheme!r} needs {PACKAGES[scheme]}; "
            "pip install 'multistage-checkpointing[compress]'"
        )


def blosc(raw: Array, typesize: int, **options: object) -> list[bytes]:
    """Return blosc2's chunks of some bytes (uint8), without loss.

    Parameters
    ----------
    typesize : int
        Bytes of one number: equal bytes of neighbours are brought together.
    options
        blosc2's: codec, clevel, filters, nthreads.
    """
    import blosc2

    typesize = typesize if 1 <= typesize <= _MOST_TYPESIZE else 1
    size = _BLOSC_BYTES - _BLOSC_BYTES % typesize
    return [
        blosc2.compress2(raw[at : at + size], typesize=typesize, **options)
        for at in range(0, len(raw), size)
    ]


def unblosc(chunks: Iterable[Packed]) -> bytes:
    """Return the bytes that `blosc` was given."""
    import blosc2

    return b"".join(blosc2.decompress2(bytes(chunk)) for chunk in chunks)


def zfp(array: Array, **bound: object) -> bytes:
    """Return zfp's bytes of an array of one to four axes of numbers, with loss.

    Parameters
    ----------
    bound
        zfpy's: tolerance, rate or precision, one of them.
    """
    import zfpy

    data: bytes = zfpy.compress_numpy(np.ascontiguousarray(array), write_header=True, **bound)
    return data


def unzfp(data: Packed) -> Array:
    """Return the array in zfp's bytes."""
    import zfpy

    array: Array = zfpy.decompress_numpy(bytes(data))
    return array
