"""What the folder of a durable run holds: the journal, read and begun again.

The folder is the journal.  Each of its files is complete or absent, so what
it holds is what was reached:

=====================  ========================================================
`run`                  the run began: steps, structure, digest of state 0, costs
`states-K`             these states were computed
`last`                 the forward sweep is over; this is its last state
`adjoint-K`            steps n-1..K are reversed; the newest two are kept
`adjoint-0`            the run is complete
=====================  ========================================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ..backends.arena import pages
from ..errors import StoreError
from ..states.layout import Array
from ..version import __version__
from .agreement import Peers
from .folder import LAST, SYSTEMS, Folder
from .headers import BadFile, Kind, RunFacts, encode, parse_adjoint, states_table
from .records import OrderedLayout, checksum_of
from .store import Batch, batch_in

_CHUNK = 4 << 20
CLEAN = "multistage clean --force"  # removes a run that is not complete


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An adjoint on the disk.

    Attributes
    ----------
    name : str
        Of its file.
    step : int
        Steps from here on are reversed.
    given : bytes
        Digest of the adjoint the sweep began with.
    checksum : int
        Of its record.
    offset, file_bytes : int
        Where the record begins, where the file ends.
    """

    name: str
    step: int
    given: bytes
    checksum: int
    offset: int
    file_bytes: int


def another_run(folder: Folder, difference: str) -> StoreError:
    """Return the error for a folder that holds a run which is not the caller's."""
    return folder.refused(
        f"it holds another run: {difference}; finish that one, name another folder, "
        f"or remove it with `{CLEAN} {folder.path}`"
    )


def foreign(folder: Folder, name: str) -> StoreError:
    """Return the error for a folder with a file that no run of ours wrote."""
    return folder.refused(
        f"its file {name!r} was not written by this run, nor by one that was killed here; "
        "move it, or name another folder"
    )


def facts_of(
    layout: OrderedLayout, state: object, n_steps: int | None, label: str, peers: Peers
) -> RunFacts:
    """Return what distinguishes a run that begins with a state."""
    packed, _ = layout.pack(layout.arrays(state))
    structure, leaves = layout.describe()
    return RunFacts(
        n_steps=n_steps,
        structure=structure,
        leaves=leaves,
        record_bytes=layout.record_bytes,
        start=layout.digest(packed).hex(),
        label=label,
        package=__version__,
        rank=peers.rank,
        ranks=peers.size,
    )


def anew(folder: Folder) -> None:
    """Remove what a run left; let the next be another, lest it take up what could not go.

    Raises StoreError.
    """
    try:
        folder.clear()
        folder.number(os.urandom(16))
    except OSError as error:
        raise folder.refused(f"what a run left in it cannot be removed: {error}") from error


def snapshots(folder: Folder, run: bytes, n_steps: int | None) -> list[Snapshot]:
    """Return the adjoints in a folder whose headers are good, the furthest first."""
    found = []
    for name in folder.names():
        if not name.startswith("adjoint-"):
            continue
        try:
            header = folder.header(name)
            step, checksum, given = parse_adjoint(header)
        except (OSError, BadFile):
            continue
        if header.run == run and step >= 0 and (n_steps is None or step <= n_steps):
            place = header.offset, header.file_bytes
            found.append(Snapshot(name, step, given, checksum, *place))
    return sorted(found, key=lambda each: each.step)


def intact(folder: Folder, found: Snapshot) -> bool:
    """Whether an adjoint's record passes its checksum; read piece by piece."""
    seen = xxhash.xxh3_64()
    piece = np.empty(_CHUNK, np.uint8)
    at = found.offset
    try:
        while at < found.file_bytes:
            part = piece[: min(_CHUNK, found.file_bytes - at)]
            folder.read(found.name, found.file_bytes, at, part)
            seen.update(part.data)
            at += len(part)
    except (OSError, BadFile):
        return False
    return int(seen.intdigest()) == found.checksum


def last_in(folder: Folder, run: bytes, record_bytes: int, n_steps: int | None) -> Batch | None:
    """Return the file of the last state, which is not read; None if it is not there.

    Parameters
    ----------
    n_steps : int or None
        The step it must have; None if the length is unknown.
    """
    try:
        found = batch_in(folder, LAST, run, record_bytes)
    except (OSError, BadFile):
        return None
    fits = len(found.steps) == 1 and found.least > 0 and n_steps in (found.least, None)
    return found if fits else None


def read_last(
    folder: Folder, layout: OrderedLayout, n_steps: int | None
) -> tuple[int, list[Array]] | None:
    """Return the step of the last state and its arrays; None if it is not there."""
    found = last_in(folder, folder.run, layout.record_bytes, n_steps)
    try:
        arrays = found and _arrays(folder, layout, found, found.checksums[0])
    except (OSError, BadFile):
        return None
    return (found.least, arrays) if found and arrays else None


def _arrays(
    folder: Folder, layout: OrderedLayout, found: Batch | Snapshot, checksum: int
) -> list[Array]:
    """Return the arrays of the one record in a file.  Raises OSError, BadFile."""
    if found.file_bytes != found.offset + layout.record_bytes:
        raise BadFile("it is not of this layout")
    record = pages(layout.record_bytes, touch=False)[: layout.record_bytes]
    folder.read(found.name, found.file_bytes, found.offset, record)
    arrays = layout.split(record)
    if arrays is None or checksum_of([record]) != checksum:
        raise BadFile("it was changed")
    return layout.unpack(arrays, None)


def write_last(folder: Folder, layout: OrderedLayout, last: object, step: int) -> None:
    """Write the last state; return when it is on the disk.  Raises OSError, StateError."""
    pieces = layout.parts(layout.pack(layout.arrays(last, "the last state"))[0])
    table = states_table([step], [checksum_of(pieces)])
    header = encode(Kind.STATES, folder.run, table, layout.record_bytes)
    folder.publish(LAST, [header, *pieces])


def read_adjoint(folder: Folder, layout: OrderedLayout, found: Snapshot) -> list[Array]:
    """Return the arrays of an adjoint.

    Raises
    ------
    StoreError
        If it has become unreadable.
    """
    try:
        return _arrays(folder, layout, found, found.checksum)
    except (OSError, BadFile) as error:
        raise StoreError(
            f"the adjoint at step {found.step} in {str(folder.path)!r} cannot be used: {error}; "
            "begin again with forward()"
        ) from error


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:04d}"


RANK_NAME = re.compile(r"rank-[0-9]{4,9}")


def open_parent(path: Path) -> None:
    """See that a folder is one for folders of ranks.  Raises StoreError."""
    folder = Folder(path, create=True)
    try:
        for name in folder.names():
            if not RANK_NAME.fullmatch(name) and not SYSTEMS.fullmatch(name):
                raise folder.refused(
                    f"it holds {name!r}, which is no folder of a rank; "
                    "name a folder for this run alone"
                )
    finally:
        folder.close()


def ours_alone(folder: Folder) -> None:
    """Raise unless everything in the folder belongs to this kind of run."""
    if any(RANK_NAME.fullmatch(name) for name in folder.strangers()):
        raise folder.refused(
            "it holds the folders of an MPI program's ranks; resume that with MPIReversal, "
            "or name another folder"
        )
    if strangers := folder.strangers():
        raise folder.refused(
            f"it holds files that no durable run wrote, such as {strangers[0]!r}; "
            "name a folder for this run alone"
        )
    run = folder.known()
    if run is None and (others := folder.others(None)):
        raise foreign(folder, others[0])
