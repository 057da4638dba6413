"""Compression on the way to a tier, on the store's threads.

What is gained is bandwidth: an extent has its place in the medium, whatever
fills it, so a capacity counts the bytes before compression.  Objects of a
remote store are as small as what is in them, so there space is gained as well.

`blosc` (blosc2: LZ4 after shuffling) gives every bit back.  `zfp` does not: each
array is within `tolerance` of the original, the adjoint is that of a slightly
different computation, and reports say so.  What zfp cannot promise (NaN,
infinities, a tolerance finer than the numbers) is seen by decompressing at once
and stored as it was.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import xxhash

from ..errors import ArgumentError, StateError
from ..states.layout import Array, Layout, Leaf
from . import codecs
from .arena import pages, round_up
from .base import Store
from .medium import Medium
from .streamed import StreamedStore

Scheme = Literal["auto", "blosc", "zfp"]

# Of LZ4, Zstd and BloscLZ at levels 1 and 5, with bytes or bits shuffled, on a
# wavefield in float32 and float64: the least of time for most of the gain.
_LEVEL = 1


class CompressedStore(StreamedStore):
    """A store whose extents are compressed on their way.

    Parameters
    ----------
    store : StreamedStore
        Closed, and not used elsewhere: files, a remote store, memory.
    scheme : {"blosc", "zfp", "auto"}
        `auto`: blosc or nothing, whichever makes a `Reversal` faster as it
        measures and plans; nothing where costs are given and not measured.
    tolerance : float, optional
        For zfp, which needs it: the largest absolute error of any number.

    Attributes
    ----------
    choice : {"blosc", "zfp", "none"}
        What is done.

    Raises
    ------
    ArgumentError
        For a scheme that is unknown or not installed, or a wrong tolerance.
    StateError
        From `open` with zfp, if an array is not of float32 or float64.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> CompressedStore(MemoryStore(), "blosc").name
    'memory+blosc'
    """

    def __init__(
        self, store: StreamedStore, scheme: Scheme = "blosc", *, tolerance: float | None = None
    ) -> None:
        if scheme not in get_args(Scheme):
            raise ArgumentError(f"compress={scheme!r} must be one of {', '.join(get_args(Scheme))}")
        if isinstance(store, CompressedStore) or not isinstance(store, StreamedStore):
            raise ArgumentError(
                f"a {type(store).__name__} cannot be compressed; compress the levels of a cascade"
            )
        if (tolerance is not None) != (scheme == "zfp"):
            raise ArgumentError(
                "zfp loses information and needs its bound, as in compress=zfp&tolerance=1e-6"
                if scheme == "zfp"
                else f"compress={scheme} loses nothing and takes no tolerance"
            )
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise ArgumentError(f"tolerance={tolerance} must be a finite number above 0")
        codecs.require("zfp" if scheme == "zfp" else "blosc")
        super().__init__(
            f"{store.name}+{scheme}",
            capacity_bytes=store.capacity_bytes,
            buffer_bytes=store._buffer_bytes,
            queue_depth=store.queue_depth,
            extent_bytes=store._most_extent_bytes,
            # zfp needs arrays, not pieces of them.
            chunk_bytes=1 << 62 if scheme == "zfp" else store._chunk_bytes,
            threads=store.threads,
            cpus=store.cpus,
        )
        self.store, self.share = store, store.share
        self.scheme = scheme
        self.tolerance = tolerance
        self.exact = scheme != "zfp"
        self.choice: Literal["blosc", "zfp", "none"] = "none" if scheme == "auto" else scheme
        self.why = ""  # the choice was made
        self._compressed: _Compressed | None = None
        self._lent = False

    def choose(self, choice: Literal["blosc", "none"], why: str = "") -> None:
        """Say what `auto` is to do from the next `open` on."""
        assert self.scheme == "auto"
        self.choice, self.why = choice, why

    def check(self) -> None:
        """Raise StoreError if the store cannot be used."""
        self.store.check()

    def parts(self) -> Sequence[Store]:
        """Return this store and the inner one."""
        return [self, *self.store.parts()]

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers, those of compressed bytes counted."""
        inner = max(super().buffer_bytes(layout), self.store.buffer_bytes(layout))
        extent = round_up(self.per_extent(layout) * layout.nbytes)
        # One extent as it is read, and one piece as the codec returns it and in pages.
        return inner + extent + 2 * min(extent, self._piece_bytes)

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """Open the inner store's medium, with compression before it."""
        codec: _Codec | None = None
        if self.choice == "zfp":
            assert self.tolerance is not None
            codec = _Zfp(layout, self.tolerance)
        elif self.choice == "blosc":
            codec = _Blosc(layout)
        inner = self.store.lend(layout, extent_bytes)
        self._lent, self._compressed = True, None
        if codec is None:
            return inner
        try:
            piece_bytes = min(extent_bytes, self._piece_bytes)
            self._compressed = _Compressed(inner, codec, extent_bytes, piece_bytes)
        except BaseException:  # no memory
            inner.close()
            raise
        return self._compressed

    @property
    def _piece_bytes(self) -> int:
        """The most bytes that are written at once."""
        return max(self._chunk_bytes, self._most_extent_bytes)

    def _give_back(self) -> None:
        if self._lent:  # else it may be open for others
            self.store.close()
            self._lent = False

    def notes(self) -> list[str]:
        """Return scheme, bound, ratio reached and, with `auto`, why."""
        found = self.store.notes()
        if self._compressed is not None:
            found.append(self._compressed.said())
        elif self.choice == "none":
            found.append("not compressed")
        if self.why:
            found.append(self.why)
        return found


def compressions(store: Store) -> list[CompressedStore]:
    """Return the stores in `store` that compress: itself, or those that it is built on."""
    return [part for part in store.parts() if isinstance(part, CompressedStore)]


class _Codec(Protocol):
    """Turns bytes into fewer; `encode` and `decode` are called by a thread each."""

    def encode(self, data: Array) -> bytes | None:
        """Return the bytes for some of an extent, None to store them as they are."""
        ...

    def decode(self, payload: memoryview, data: Array) -> None:
        """Fill `data` with what was encoded."""
        ...

    def said(self, ratio: str) -> str:
        """Return a sentence for reports."""
        ...


class _Blosc:
    """LZ4 after shuffling the bytes of the numbers that make up most of a state."""

    def __init__(self, layout: Layout) -> None:
        import blosc2

        dtype = max(layout.leaves, key=lambda leaf: leaf.nbytes).dtype
        self._typesize = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
        self._options = {
            "codec": blosc2.Codec.LZ4,
            "clevel": _LEVEL,
            "filters": [blosc2.Filter.SHUFFLE],
            "filters_meta": [0],
            "nthreads": 1,  # the other cores compute
        }
        self._decompress: Callable[..., Any] = blosc2.decompress2
        # By default it keeps the interpreter lock: a chain of Python steps
        # would stand still for as long as an extent takes.
        blosc2.set_releasegil(True)

    def encode(self, data: Array) -> bytes | None:
        (chunk,) = codecs.blosc(data, self._typesize, **self._options)
        return bytes(chunk)

    def decode(self, payload: memoryview, data: Array) -> None:
        self._decompress(payload, dst=memoryview(data), nthreads=1)  # type: ignore[arg-type]

    def said(self, ratio: str) -> str:
        return f"compressed by blosc2 (LZ4, nothing is lost), ratio {ratio}"


class _Zfp:
    """Every array within a tolerance, the same array of neighbouring states as one."""

    def __init__(self, layout: Layout, tolerance: float) -> None:
        for leaf in layout.leaves:
            if leaf.dtype not in (np.float32, np.float64) or not leaf.dtype.isnative:
                raise StateError(
                    f"leaf {leaf.path or 'array'} has dtype {leaf.dtype}; zfp takes float32 and "
                    "float64 alone, use compress=blosc"
                )
        self._layout, self._tolerance = layout, tolerance
        self._largest = 0.0
        self._kept = self._arrays = 0

    def _pieces(self, data: Array) -> list[tuple[Leaf, Array]]:
        """Return each leaf and its bytes in all states of an extent, one row a state."""
        nbytes = self._layout.nbytes
        count = len(data) // nbytes
        rows = data[: count * nbytes].reshape(count, nbytes)
        return [
            (leaf, rows[:, leaf.offset : leaf.offset + leaf.nbytes])
            for leaf in self._layout.leaves
            if leaf.nbytes
        ]

    def encode(self, data: Array) -> bytes | None:
        parts: list[bytes] = []
        for leaf, rows in self._pieces(data):
            raw = np.ascontiguousarray(rows)
            values = raw.reshape(-1).view(leaf.dtype)
            payload = self._within(values.reshape(_axes(len(rows), leaf.shape)))
            self._arrays += 1
            self._kept += payload is None
            kept = raw.tobytes() if payload is None else payload
            parts += [bytes([payload is None]), len(kept).to_bytes(8, "little"), kept]
        return b"".join(parts)

    def _within(self, values: Array) -> bytes | None:
        """Return the array's bytes, None if they would not hold the tolerance."""
        if not np.isfinite(values).all():
            return None
        payload = codecs.zfp(values, tolerance=self._tolerance)
        if len(payload) >= values.nbytes:
            return None
        error = float(np.abs(np.subtract(codecs.unzfp(payload).astype(np.float64), values)).max())
        if not error <= self._tolerance:
            return None
        self._largest = max(self._largest, error)
        return payload

    def decode(self, payload: memoryview, data: Array) -> None:
        at = 0
        for leaf, rows in self._pieces(data):
            kept, size = payload[at], int.from_bytes(payload[at + 1 : at + 9], "little")
            content = payload[at + 9 : at + 9 + size]
            at += 9 + size
            if kept:
                raw = np.frombuffer(content, np.uint8)
            else:
                raw = codecs.unzfp(content).reshape(-1).view(np.uint8)
            rows[...] = raw.reshape(len(rows), leaf.nbytes)

    def said(self, ratio: str) -> str:
        said = (
            f"compressed by zfp with tolerance {self._tolerance:g}, ratio {ratio}, largest error "
            f"{self._largest:.3g}: the adjoint is not exact"
        )
        if self._kept:
            said += f" ({self._kept} of {self._arrays} arrays kept as they were)"
        return said


def _axes(count: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return at most four axes for the arrays of some states."""
    axes = [length for length in (count, *shape) if length > 1] or [1]
    return (math.prod(axes[:-3]), *axes[-3:]) if len(axes) > 4 else tuple(axes)


class _Piece(NamedTuple):
    """Bytes of an extent that were written at once."""

    start: int
    stop: int
    at: int  # in the inner extent
    stored_bytes: int
    checksum: int
    encoded: bool


class _Compressed:
    """A medium before another: what is written is encoded, what is read is decoded.

    One thread writes while another reads, so each has a buffer of its own from the beginning.
    """

    def __init__(self, inner: Medium, codec: _Codec, extent_bytes: int, piece_bytes: int) -> None:
        self._inner, self._codec = inner, codec
        self._pieces: dict[int, tuple[_Piece, ...]] = {}
        # Not touched: most of it is needed only for bytes that compress badly.
        self._out, self._in = (pages(n, touch=False) for n in (piece_bytes, extent_bytes))
        self._raw_bytes = self._stored_bytes = 0

    def begin(self, slot: int, nbytes: int) -> None:
        self._pieces[slot] = ()
        self._inner.begin(slot, nbytes)

    def free(self, slot: int) -> None:
        self._inner.free(slot)

    def write(self, slot: int, offset: int, data: Array) -> None:
        before = self._pieces[slot] if offset else ()
        at = before[-1].at + round_up(before[-1].stored_bytes) if before else 0
        payload = self._codec.encode(data)
        encoded = payload is not None and round_up(len(payload)) < len(data)
        # Not of the buffer: behind zfp no other checksum would see that it was changed.
        content = np.frombuffer(payload, np.uint8) if encoded and payload else data
        checksum = xxhash.xxh3_64_intdigest(content.data)
        if encoded:
            self._out[: len(content)] = content
        whole = self._out[: round_up(len(content))] if encoded else data
        piece = _Piece(offset, offset + len(data), at, len(content), checksum, encoded)
        self._pieces[slot] = (*before, piece)
        self._inner.write(slot, at, whole)
        self._raw_bytes += len(data)
        self._stored_bytes += len(whole)

    def read(self, slot: int, data: Array) -> None:
        pieces = [piece for piece in self._pieces.get(slot, ()) if piece.start < len(data)]
        if not pieces or pieces[-1].stop != len(data):
            raise OSError(errno.EIO, f"extent {slot} was not written to its end")
        size = pieces[-1].at + round_up(pieces[-1].stored_bytes)
        if size > len(self._in):  # of many small arrays, each at a multiple of 64 bytes
            self._in = pages(size, touch=False)
        self._inner.read(slot, self._in[:size])
        for piece in pieces:
            content = self._in[piece.at : piece.at + piece.stored_bytes]
            # Before anybody decodes them: decoders trust what they are given.
            if xxhash.xxh3_64_intdigest(content.data) != piece.checksum:
                raise OSError(errno.EIO, "the checksum does not match: compressed bytes changed")
            target = data[piece.start : piece.stop]
            if piece.encoded:
                try:
                    self._codec.decode(content.data, target)
                except Exception as error:
                    raise OSError(errno.EIO, f"could not be decompressed: {error}") from error
            else:
                target[:] = content

    def said(self) -> str:
        if not self._stored_bytes:
            return self._codec.said("-")
        return self._codec.said(f"{self._raw_bytes / self._stored_bytes:.2f}")

    def close(self) -> None:
        self._inner.close()
