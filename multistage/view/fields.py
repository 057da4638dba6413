"""Fields of numbers as images: a palette, and PNG by the standard library's zlib alone."""

from __future__ import annotations

import struct
import zlib
from typing import Literal

import numpy as np

from ..support.arrays import Reals
from .chart import Image

Palette = Literal["heat", "gray", "difference"]
# Red, green, blue at even distances from the lowest value to the highest.  "heat" rises in
# lightness throughout, as viridis does; "difference" is white in its middle.
_COLORS: dict[Palette, tuple[tuple[int, int, int], ...]] = {
    "heat": ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)),
    "gray": ((0, 0, 0), (255, 255, 255)),
    "difference": ((5, 48, 97), (67, 147, 195), (255, 255, 255), (214, 96, 77), (103, 0, 31)),
}


def image_of(
    field: Reals,
    palette: Palette,
    values: tuple[float, float],
    place: tuple[float, float, float, float],
    label: str = "",
) -> Image:
    r"""Return a field of two dimensions as an image, its first row at the top.

    Parameters
    ----------
    field : array
    palette : {"heat", "gray", "difference"}
    values : (float, float)
        What has the first and the last color; what lies beyond has them too.
    place : (left, right, top, bottom)
        Of the image's edges, in the units of the axes.

    Examples
    --------
    >>> image = image_of(np.eye(2), "gray", (0, 1), (0, 2, 0, 2))
    >>> image.png[:4], image.right
    (b'\x89PNG', 2)
    """
    low, high = values
    colors = np.array(_COLORS[palette], float)
    at = np.clip((field - low) / ((high - low) or 1.0), 0, 1) * (len(colors) - 1)
    pixels = np.stack([np.interp(at, np.arange(len(colors)), each) for each in colors.T], axis=-1)
    return Image(label, to_png(pixels.round().astype(np.uint8)), *place)


def to_png(pixels: Reals) -> bytes:
    """Return rows of pixels (red, green, blue; uint8) as a PNG file (RFC 2083)."""
    height, width, _ = pixels.shape
    # Each row begins with its filter: 0, none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
