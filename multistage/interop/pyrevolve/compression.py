"""Compression of checkpoints in memory, by pyrevolve's names: blosc, zfp or your own.

`blosc` is lossless (blosc2); `zfp` is lossy within the tolerance given, and
then the gradient is no longer exact.  Both are extras:
`pip install 'multistage-checkpointing[compress]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backends import codecs
from ...errors import ArgumentError
from ...states.layout import Array

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Params = Mapping[str, object]

_LOSSES = ("tolerance", "rate", "precision")  # of zfp, which exclude each other
# What each scheme knows, with its value if none is given; `parallel` is speed alone.
_KNOWN: dict[str | None, dict[str, object]] = {
    None: {},
    "blosc": {"chunk_size": 1 << 30},
    "zfp": {"tolerance": 1e-7, "rate": None, "precision": None, "parallel": None},
}


@dataclass(frozen=True, slots=True)
class CompressedObject:
    """Compressed bytes, and the shape and dtype they are of.

    Attributes
    ----------
    data : bytes-like
    shape : tuple of int
    dtype : dtype
    chunks : tuple of int
        The bytes of each part that was compressed by itself.
    """

    data: codecs.Packed
    shape: tuple[int, ...]
    dtype: DTypeLike
    chunks: tuple[int, ...] = ()


def _compressed(scheme: str | None, params: Params, array: Array) -> CompressedObject:
    """Return an array compressed by a scheme: by Blosc in chunks, by zfp within its tolerance."""
    if scheme == "zfp":
        known = {name: params[name] for name in _LOSSES if name in params}
        return CompressedObject(codecs.zfp(array, **known), array.shape, array.dtype)
    if scheme is None:
        return CompressedObject(memoryview(array.tobytes()), array.shape, array.dtype)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    chunk_bytes: Any = params["chunk_size"]
    chunks = codecs.blosc(raw, array.dtype.itemsize, int(chunk_bytes))
    lengths = tuple(len(chunk) for chunk in chunks)
    return CompressedObject(b"".join(chunks), array.shape, array.dtype, lengths)


def _restored(scheme: str | None, params: Params, compressed: CompressedObject) -> Array:
    """Return the array that a scheme compressed."""
    if scheme == "zfp":
        return codecs.unzfp(compressed.data)
    data = compressed.data
    if scheme == "blosc":
        ends = np.cumsum([0, *compressed.chunks]).tolist()
        data = codecs.unblosc(data[start:stop] for start, stop in pairwise(ends))
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


def init_compression(
    params: Params,
) -> tuple[Callable[[Array], CompressedObject], Callable[[CompressedObject], Array]]:
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
    losses = sorted(set(rest) & set(_LOSSES))
    if len(losses) > 1:
        raise ArgumentError(f"{' and '.join(losses)} of zfp exclude each other; give one")
    if not losses:
        rest = {name: value for name, value in _KNOWN[scheme].items() if value is not None} | rest
    return partial(compressors[scheme], rest), partial(decompressors[scheme], rest)
