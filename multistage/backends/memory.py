"""Host memory as a slow tier."""

from __future__ import annotations

from .medium import Ram
from .streamed import StreamedStore


class MemoryStore(StreamedStore):
    """Checkpoints in host memory, copied there and back by background threads.

    Worth it where compute runs in a faster or smaller memory, and as a stand-in
    for a disk in tests.

    Parameters
    ----------
    capacity_bytes : int or None
        Most bytes it takes; None if unbounded.
    buffer_bytes : int
        Page-aligned buffers for transfers, in bytes.
    queue_depth : int
        Writes that may be waiting or in flight.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.states.layout import Layout
    >>> store = MemoryStore()
    >>> store.open(Layout.of(np.zeros(3)))
    >>> store.put(7, [np.array([1.0, 2.0, 3.0])])
    True
    >>> store.get(7)
    [array([1., 2., 3.])]
    >>> store.close()
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        buffer_bytes: int = 8 << 20,
        queue_depth: int = 2,
    ) -> None:
        super().__init__(
            "memory",
            Ram,
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
        )
