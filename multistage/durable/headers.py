"""The files of a durable folder: bytes to facts and back, nothing believed.

Every file is laid out alike, little-endian, with no pickle and nothing to
execute:

========  ======  ==========================================================
offset    bytes   what
========  ======  ==========================================================
0         8       magic, `MSDURABL`
8         4       format version
12        4       kind: 1 run, 2 states, 3 adjoint, 4 lock
16        16      number of the run, drawn at random when it began
32        8       bytes of the table
40        8       bytes of the payload
48        8       reserved, 0
56        8       xxh3 of the 56 bytes before and of the table
64        ...     table: JSON of a run; (step, xxh3) of each state or adjoint;
                  process and host that have the lock
...       ...     payload: one record after the other
========  ======  ==========================================================

Version 3 is that of runs whose states have one layout.  Where steps differ, files have
version 4, but for the lock: each state or adjoint has its own size and layout in the table
(`records`).

Magic and number have this place in every version: they identify the owner of a file.

A file is what its name says only if it is as long as its header says, its
table passes its checksum and it belongs to the run in question.  A header is
read with a bound, sizes in it are compared with the file's own length before
anything is allocated, and records are as long as our own layout makes them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

import xxhash

from ..errors import ArgumentError, MultistageError
from ..model.costs import Costs

MAGIC = b"MSDURABL"
VERSION, UNEQUAL = 3, 4
PRELUDE = struct.Struct("<8sII16sQQQQ")
_SUMMED = PRELUDE.size - 8
IDENTITY_BYTES = 32
# A table this long describes 200 000 states, or a state of 10 000 arrays.
TABLE_LIMIT = 4 << 20
# Always as long, so that a rewritten lock is never half of two.
_HOLDER_BYTES = 192


class BadFile(MultistageError):
    """A file is not what its name says; the message says why."""


class Kind(IntEnum):
    """What a file holds."""

    RUN = 1
    STATES = 2
    ADJOINT = 3
    LOCK = 4


@dataclass(frozen=True, slots=True)
class Header:
    """What begins a file: its sizes are those of the file, and its table passed its checksum."""

    kind: Kind
    run: bytes
    table: bytes
    payload_bytes: int
    version: int

    @property
    def offset(self) -> int:
        """Where the payload begins."""
        return PRELUDE.size + len(self.table)

    @property
    def file_bytes(self) -> int:
        """How long the file is."""
        return self.offset + self.payload_bytes


def encode(
    kind: Kind, run: bytes, table: bytes, payload_bytes: int, version: int = VERSION
) -> bytes:
    """Return the header of a file: prelude and table."""
    fields = (MAGIC, version, kind, run, len(table), payload_bytes, 0)
    summed = PRELUDE.pack(*fields, 0)[:_SUMMED]
    return PRELUDE.pack(*fields, xxhash.xxh3_64_intdigest(summed + table)) + table


def run_of(prelude: bytes) -> bytes | None:
    """Return the number of the run that wrote a file; None if it is no file of a durable run."""
    if len(prelude) < IDENTITY_BYTES or prelude[:8] != MAGIC:
        return None
    return prelude[16:IDENTITY_BYTES]


def read_header(read: Callable[[int, int], bytes], file_bytes: int) -> Header:
    """Return the header of a file of `file_bytes`.

    Parameters
    ----------
    read : callable
        `read(count, offset)` returns bytes of the file.

    Raises
    ------
    BadFile
        If it is no file of ours, of another version of the format, not as long as it says,
        or fails its checksum.
    """
    prelude = read(PRELUDE.size, 0)
    if len(prelude) != PRELUDE.size or prelude[:8] != MAGIC:
        raise BadFile("it is no file of a durable run")
    _, version, kind, run, table_bytes, payload_bytes, _, checksum = PRELUDE.unpack(prelude)
    if version not in (VERSION, UNEQUAL):
        raise BadFile(
            f"it has format version {version}, this package writes {VERSION} and {UNEQUAL}"
        )
    if table_bytes > TABLE_LIMIT:
        raise BadFile(f"its table of {table_bytes} bytes is longer than {TABLE_LIMIT}")
    if PRELUDE.size + table_bytes + payload_bytes != file_bytes:
        raise BadFile(
            f"it has {file_bytes} bytes, its header says {PRELUDE.size + table_bytes} "
            f"and {payload_bytes}"
        )
    table = read(table_bytes, PRELUDE.size)
    if xxhash.xxh3_64_intdigest(prelude[:_SUMMED] + table) != checksum:
        raise BadFile("its header fails its checksum: it was changed or cut")
    try:
        return Header(Kind(kind), run, table, payload_bytes, version)
    except ValueError:
        raise BadFile(f"it is of unknown kind {kind}") from None


# ----------------------------------------------------------------- the run


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What distinguishes runs.

    Attributes
    ----------
    n_steps : int or None
        None if the end is found by `until`.
    structure : str
        Tree of a state.
    leaves : tuple of (path, shape, dtype), as text
    record_bytes : int
        Bytes of one state on the disk; of state 0 where steps differ, as all of these.
    start : str
        Digest of state 0.
    label : str
        The caller's own mark.
    package : str
        Version of the package that began it.
    rank, ranks : int
        Which of how many ranks.
    unequal : bool
        Whether steps differ; the version of the files says so.
    """

    n_steps: int | None
    structure: str
    leaves: tuple[tuple[str, str, str], ...]
    record_bytes: int
    start: str
    label: str
    package: str
    rank: int = 0
    ranks: int = 1
    unequal: bool = False

    def difference(self, other: RunFacts) -> str | None:
        """Say how the run `other`, which is asked for, differs from this one; None if it is it."""
        if (self.n_steps, self.unequal) != (other.n_steps, other.unequal):
            return f"it has {_steps(self)}, this run {_steps(other)}"
        if (self.rank, self.ranks) != (other.rank, other.ranks):
            return (
                f"it is rank {self.rank} of {self.ranks}, "
                f"this run's rank {other.rank} of {other.ranks}"
            )
        if self.label != other.label:
            return f"its label is {plain(self.label)!r}, this run's {plain(other.label)!r}"
        if (self.structure, self.leaves) != (other.structure, other.leaves):
            for mine, its in zip(other.leaves, self.leaves, strict=False):
                if mine != its:
                    return f"its states have leaf {_leaf(its)}, this run's {_leaf(mine)}"
            return f"its states are {plain(self.structure)}, this run's {plain(other.structure)}"
        if self.record_bytes != other.record_bytes:
            return f"its records have {self.record_bytes} bytes, this run's {other.record_bytes}"
        if self.start != other.start:
            return "it began from another state 0"
        return None


def _steps(facts: RunFacts) -> str:
    if facts.n_steps is None:
        return "an unknown number of steps (until=)"
    kind = " steps that differ (StageCosts)" if facts.unequal else ""
    return f"n_steps={facts.n_steps}{kind}"


def plain(text: str, most: int = 60) -> str:
    """Return text of a file for a message or a terminal: no control characters, not too long."""
    shown = "".join(c if c.isprintable() else "?" for c in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def _leaf(leaf: tuple[str, str, str]) -> str:
    path, shape, dtype = map(plain, leaf)
    return f"{path or 'array'} {shape} {dtype}"


def run_table(facts: RunFacts, costs: Costs | None) -> bytes:
    """Return the table of a run.  Raises ArgumentError if a state has too many leaves."""
    known = None if costs is None else costs.to_json()
    told = {name: value for name, value in asdict(facts).items() if name != "unequal"}
    table = json.dumps({**told, "costs": known}).encode()
    if len(table) > TABLE_LIMIT:
        raise ArgumentError(
            f"the state's description takes {len(table)} bytes, more than {TABLE_LIMIT}; "
            "join arrays, or shorten durable_label"
        )
    return table


def parse_run(header: Header) -> tuple[RunFacts, Costs | None]:
    """Return what a run's header says, and its costs if they are those of one tier.

    Raises
    ------
    BadFile
        If it is no header of a run.
    """
    if header.kind is not Kind.RUN or header.payload_bytes:
        raise BadFile("it is no header of a run")
    try:
        data: Any = json.loads(header.table)
        leaves = tuple((path, shape, dtype) for path, shape, dtype in data["leaves"])
        named = set(RunFacts.__slots__) - {"leaves", "unequal"}
        facts = RunFacts(
            **{name: data[name] for name in named},
            leaves=leaves,
            unequal=header.version == UNEQUAL,
        )
        numbers = [facts.record_bytes, facts.ranks, facts.rank + 1] + [
            n for n in (facts.n_steps,) if n is not None
        ]
        if not all(type(n) is int and 0 < n < 2**62 for n in numbers):
            raise ValueError("a number is out of range")
        texts = (facts.structure, facts.start, facts.label, facts.package)
        if not all(type(text) is str for text in chain(texts, *leaves)):
            raise ValueError("a text is none")
        costs = data["costs"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadFile(f"its description of the run cannot be read: {error}") from None
    try:  # they decide how a resumed run is planned, nothing else
        known = Costs.from_json(costs)
    except ArgumentError:
        return facts, None
    return facts, known if len(known.tiers) == 1 else None


def lock_of(run: bytes) -> bytes:
    """Return what the lock of a folder holds: the number of the run, and this process."""
    text = f"{os.getpid()} {socket.gethostname()}\n".encode()[:_HOLDER_BYTES]
    return encode(Kind.LOCK, run, text.ljust(_HOLDER_BYTES), 0)


def holder_of(header: Header) -> str:
    """Return which process wrote a lock.  Raises BadFile."""
    if found := re.fullmatch(rb"([0-9]{1,10}) ([A-Za-z0-9._-]{1,100})\s*", header.table):
        return f"process {found[1].decode()} on {found[2].decode()}"
    raise BadFile("it names no process")
