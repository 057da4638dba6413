"""Host memory as a slow tier, and that of one NUMA node: DDR beside HBM, CXL beside DDR."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from .. import native
from ..errors import StoreError
from ..states.layout import Layout
from .arena import pages_of_node
from .medium import Medium, Ram
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
    threads, cpus
        See `FileStore`.

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
        threads: int = 2,
        cpus: str | Iterable[int] | None = None,
    ) -> None:
        super().__init__(
            "memory",
            Ram,
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            threads=threads,
            cpus=cpus,
        )


_NODES = Path("/sys/devices/system/node")


class NumaStore(StreamedStore):
    """Checkpoints in the memory of one node, whatever node the computation runs on.

    The paper's experiment on a Xeon Phi in flat mode: compute in MCDRAM
    (`numactl --membind=1 ...`), checkpoints in DDR (`NumaStore(0)`).

    Parameters
    ----------
    node : int
        As in `numactl --hardware`.
    capacity_bytes, buffer_bytes, queue_depth, threads, cpus
        As for `MemoryStore`.

    Raises
    ------
    StoreError
        By `open`, if there is no such node, or it may not be bound to.

    Examples
    --------
    >>> NumaStore(0, capacity_bytes=1 << 30).name
    'numa 0'
    """

    def __init__(
        self,
        node: int,
        capacity_bytes: int | None = None,
        *,
        buffer_bytes: int = 8 << 20,
        queue_depth: int = 2,
        threads: int = 2,
        cpus: str | Iterable[int] | None = None,
    ) -> None:
        super().__init__(
            f"numa {node}",
            lambda: Ram(partial(pages_of_node, node=node)),
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            threads=threads,
            cpus=cpus,
        )
        self._node = node

    def medium(self, layout: Layout, extent_bytes: int) -> Medium:
        """See that the node is there and can be bound to; return its memory."""
        self.check()
        return super().medium(layout, extent_bytes)

    def check(self) -> None:
        """Raise StoreError if the node is not there or cannot be bound to."""
        if native.LIBRARY is None:
            raise StoreError(f"tier {self.name!r} needs the C core, which was not built")
        there = sorted(int(p.name[4:]) for p in _NODES.glob("node[0-9]*"))
        if self._node not in there:
            raise StoreError(
                f"tier {self.name!r}: this machine has no memory node {self._node}; it has "
                f"{', '.join(map(str, there)) or 'none that the kernel reports'}"
            )
        try:
            pages_of_node(1, self._node)
        except OSError as error:
            raise StoreError(f"tier {self.name!r} cannot be used: {error}") from error
