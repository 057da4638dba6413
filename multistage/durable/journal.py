"""What the folder of a durable run holds: the journal, read back.

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

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..backends.arena import pages
from ..model.costs import Costs
from ..states.layout import Array
from .folder import LAST, RUN, Folder
from .headers import BadFile, RunFacts, parse_run
from .records import OrderedLayout, Records


@dataclass(frozen=True, slots=True)
class Journal:
    """What a folder holds of a run; records of states are not read, nor is the last state.

    Attributes
    ----------
    run : bytes
        Number of the run.
    facts : RunFacts
    costs : Costs or None
    last : Records or None
        The last state.
    adjoints : tuple of Records
        Those that pass their checksum, the furthest first; none without the last state.
    """

    run: bytes
    facts: RunFacts
    costs: Costs | None
    last: Records | None
    adjoints: tuple[Records, ...]

    @classmethod
    def of(cls, folder: Folder) -> Journal:
        """Read a folder.  Raises OSError, BadFile if it holds no run."""
        header = folder.header(RUN)
        facts, costs = parse_run(header)
        run, n = header.run, facts.n_steps
        last = next(_found(folder, LAST, run, facts), None)
        if last is not None and (last.least == 0 or n not in (last.least, None)):
            last = None
        adjoints: list[Records] = []
        if last is not None:
            found = _found(folder, "adjoint-", run, facts)
            adjoints = [e for e in found if e.least <= last.least and e.is_intact(folder)]
        adjoints.sort(key=lambda each: each.least)
        return cls(run, facts, costs, last, tuple(adjoints))

    @property
    def n_steps(self) -> int | None:
        """Steps of the run, None while they are unknown."""
        return self.last.least if self.last else self.facts.n_steps

    def states(self, folder: Folder) -> Iterator[Records]:
        """Yield the files of states whose headers are good."""
        return _found(folder, "states-", self.run, self.facts)


def _found(folder: Folder, begin: str, run: bytes, facts: RunFacts) -> Iterator[Records]:
    """Yield what a run left in the files whose names begin so; in one record but for states."""
    record_bytes = None if begin == "adjoint-" else facts.record_bytes
    for name in folder.names():
        if not name.startswith(begin):
            continue
        try:
            found = Records.found(folder, name, run, record_bytes, unequal=facts.unequal)
        except (OSError, BadFile):
            continue
        if len(found.steps) == 1 or begin == "states-":
            yield found


def arrays_in(
    folder: Folder, first: OrderedLayout, found: Records
) -> tuple[OrderedLayout, list[Array]]:
    """Return the layout and the arrays of the one record in a file; see `Records.layout`.

    Raises OSError, BadFile.
    """
    layout = found.layout(0, first)
    record = pages(layout.record_bytes, touch=False)[: layout.record_bytes]
    found.read(folder, 0, record)
    arrays = layout.split(record)
    if arrays is None:
        raise BadFile("it was changed")
    return layout, layout.unpack(arrays, None)


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:04d}"


RANK_NAME = re.compile(r"rank-[0-9]{4,9}")
