"""The files of a durable store: a batch of states each, written whole and read state by state."""

from __future__ import annotations

import contextlib
import errno
from array import array
from collections.abc import Sequence

import numpy as np

from ..backends.arena import LandingPool
from ..backends.extents import TransferState
from ..states.layout import Array, Layout
from .folder import Folder
from .headers import BadFile, Kind, encode, parse_states, states_table
from .records import OrderedLayout, checksum_of

PLACES = 1 << 20  # more than the states of any batch
NEVER = 2**62
_SMALL = 4
_BATCH_BYTES = 1 << 20


class Batch:
    """Some states in one file, or on their way there.

    It belongs to the computing thread while `state` is FILLING, then to the writer until
    it is DONE or FAILED.
    """

    __slots__ = (
        "arrays",
        "buffer",
        "checksums",
        "error",
        "file_bytes",
        "least",
        "live",
        "name",
        "number",
        "offset",
        "state",
        "steps",
        "wanted",
    )

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.state = TransferState.FILLING
        self.steps = array("q")
        self.checksums = array("Q")
        self.live = 0
        self.least = NEVER
        self.buffer: Array | None = None
        self.arrays: Sequence[Array] | None = None
        self.offset = self.file_bytes = 0
        self.error = ""
        self.wanted = False  # now: by a reader, or because it is full

    def add(self, step: int) -> None:
        """Enter a state, at the next place."""
        self.steps.append(step)
        self.least = min(self.least, step)

    @property
    def settled(self) -> bool:
        """Whether its write is over."""
        return self.state in (TransferState.DONE, TransferState.FAILED)


def ordered(layout: Layout) -> OrderedLayout:
    """Return a layout whose records hold the strides of arrays."""
    return layout if isinstance(layout, OrderedLayout) else OrderedLayout.like(layout)


def per_batch(layout: OrderedLayout) -> int:
    """Return how many states share a file, 1 for large ones."""
    count = _BATCH_BYTES // layout.record_bytes
    return min(count, 1 << 14) if count >= _SMALL else 1


def batches_in(
    folder: Folder, prefix: str, layout: OrderedLayout, below: int
) -> tuple[list[Batch], int]:
    """Return the batches that a run left, if they hold states before `below`.

    The number of the next batch comes with them.  Files that are damaged, another run's or
    not needed are removed.  Records are not read.
    """
    found, next_number = [], 0
    for name in folder.names():
        kind, _, text = name.partition("-")
        if kind != prefix:
            continue
        number = int(text)
        try:
            found.append(_batch_in(folder, name, number, layout, below))
        except BadFile:
            with contextlib.suppress(OSError):
                folder.unlink(name)
                continue
        except OSError:
            # Its states are recomputed.  The file stays: the next resumed run may read it,
            # if there were no descriptors left, for example.
            pass
        next_number = max(next_number, number + 1)
    return found, next_number


def _batch_in(folder: Folder, name: str, number: int, layout: OrderedLayout, below: int) -> Batch:
    header, table = folder.header(name)
    if header.run != folder.run:
        raise BadFile("it belongs to another run")
    steps, checksums = parse_states(header, table, layout.record_bytes)
    if min(steps) < 0 or max(steps) >= 2**48 or len(steps) >= PLACES:
        raise BadFile("its steps are out of range")
    if min(steps) >= below:
        raise BadFile("it is not needed any more")
    batch = Batch(number, name)
    batch.state = TransferState.DONE
    batch.steps, batch.checksums = steps, checksums
    batch.least = min(steps)
    batch.offset = len(header.prelude) + len(table)
    batch.file_bytes = batch.offset + header.payload_bytes
    return batch


def write_batch(batch: Batch, folder: Folder, layout: OrderedLayout) -> None:
    """Write the file of a batch, and note in the batch what lies where.  Raises OSError."""
    size, count = layout.record_bytes, len(batch.steps)
    if batch.buffer is not None:
        records = [[batch.buffer[k * size : (k + 1) * size]] for k in range(count)]
        pieces = [batch.buffer[: count * size]]
    else:
        assert batch.arrays is not None
        pieces = layout.parts(batch.arrays)
        records = [pieces]
    batch.checksums = array("Q", map(checksum_of, records))
    table = states_table(batch.steps, batch.checksums)
    header = encode(Kind.STATES, folder.run, table, count * size)
    batch.offset = len(header)
    batch.file_bytes = len(header) + count * size
    # A power cut before the name is on the disk costs a checkpoint, no more.
    folder.publish(batch.name, [header, *pieces], settled=False)


def read_record(
    batch: Batch, place: int, folder: Folder, layout: OrderedLayout, pool: LandingPool
) -> Array:
    """Return the bytes of one state, verified.  Raises OSError, BadFile, MemoryError."""
    size = layout.record_bytes
    if batch.state is TransferState.FAILED:
        raise OSError(errno.EIO, batch.error)
    # A page for each small state would be more than the state.
    landing = np.empty(size, np.uint8) if per_batch(layout) > 1 else pool.take()
    record = landing[:size]
    folder.read(batch.name, batch.file_bytes, batch.offset + place * size, record)
    if checksum_of([record]) != batch.checksums[place]:
        raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")
    return record
