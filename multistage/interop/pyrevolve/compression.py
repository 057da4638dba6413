"""Compression of checkpoints in memory, by pyrevolve's names: blosc, zfp or your own.

`blosc` is lossless (blosc2); `zfp` is lossy within the tolerance given, and
then the gradient is no longer exact.  Both are extras:
`pip install 'multistage-checkpointing[compress]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backends import codecs
from ...errors import ArgumentError
from ...states.layout import Array

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Params = Mapping[str, object]

# What each scheme knows, and its value if none is given: of zfp, which takes one of them.
_KNOWN: dict[str | None, dict[str, object]] = {
    None: {},
    "blosc": {},
    "zfp": {"tolerance": 1e-7, "rate": None, "precision": None},
}


@dataclass(frozen=True, slots=True)
class CompressedObject:
    """Compressed bytes, in parts that were compressed by themselves, and what they are of."""

    parts: list[codecs.Packed]
    shape: tuple[int, ...]
    dtype: DTypeLike


Compression = tuple[Callable[[Array], CompressedObject], Callable[[CompressedObject], Array]]


def _compressed(scheme: str | None, params: Params, array: Array) -> CompressedObject:
    parts: list[codecs.Packed]
    if scheme == "zfp":
        parts = [codecs.zfp(array, **params)]
    elif scheme == "blosc":
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = [*codecs.blosc(raw, array.dtype.itemsize)]
    else:
        parts = [array.tobytes()]
    return CompressedObject(parts, array.shape, array.dtype)


def _restored(scheme: str | None, params: Params, compressed: CompressedObject) -> Array:
    if scheme == "zfp":
        return codecs.unzfp(compressed.parts[0])
    data = codecs.unblosc(compressed.parts) if scheme == "blosc" else compressed.parts[0]
    return np.frombuffer(data, compressed.dtype).reshape(compressed.shape)


compressors: dict[str | None, Callable[[Params, Array], CompressedObject]] = {
    scheme: partial(_compressed, scheme) for scheme in _KNOWN
}
decompressors: dict[str | None, Callable[[Params, CompressedObject], Array]] = {
    scheme: partial(_restored, scheme) for scheme in _KNOWN
}
compressors_available: list[str | None] = [
    None,
    *filter(codecs.installed, codecs.PACKAGES),
]


def init_compression(params: Params) -> Compression:
    """Return the functions that compress an array and bring it back.

    Parameters
    ----------
    params : mapping
        `scheme`: None, `"blosc"`, `"zfp"`, or `"custom"` with `compressor`
        and `decompressor`, which are called with the other parameters first.

    Raises
    ------
    ArgumentError
        For a scheme that is unknown or not installed, or a parameter that it
        does not have.

    Examples
    --------
    >>> compress, decompress = init_compression({"scheme": None})
    >>> decompress(compress(np.arange(3)))
    array([0, 1, 2])
    """
    rest: dict[str, Any] = dict(params)
    scheme = rest.pop("scheme", None)
    if scheme == "custom":
        compressor, decompressor = rest.pop("compressor", None), rest.pop("decompressor", None)
        if not callable(compressor) or not callable(decompressor):
            raise ArgumentError("scheme 'custom' needs a compressor and a decompressor")
        return partial(compressor, rest), partial(decompressor, rest)
    if scheme not in compressors:
        raise ArgumentError(
            f"compression scheme {scheme!r} is not known; choose None, 'blosc', 'zfp' or 'custom'"
        )
    if scheme is not None:
        codecs.require(scheme)
    if unknown := set(rest) - set(_KNOWN[scheme]):
        raise ArgumentError(
            f"scheme {scheme!r} has no parameters {sorted(unknown)}; "
            f"it has {sorted(_KNOWN[scheme]) or 'none'}"
        )
    if len(rest) > 1:
        raise ArgumentError(f"{' and '.join(sorted(rest))} of zfp exclude each other; give one")
    rest = rest or {name: value for name, value in _KNOWN[scheme].items() if value is not None}
    return partial(compressors[scheme], rest), partial(decompressors[scheme], rest)
