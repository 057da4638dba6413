"""The rules of checkpoint_schedules, as its own test of validity has them.

Storage is told apart as there: what a `Forward` or a copy puts into working
memory lasts to the next `Forward`; an entry in RAM or on disk is whatever one
`Forward` wrote, restart data of all its steps, adjoint data of all of them, or
both; and working memory must be empty before an entry is fetched into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import checkpoint_schedules as their

Storage = their.StorageType
Steps = set[int]


@dataclass
class Judge:
    """Runs a schedule of theirs for n steps; an assertion fails at an illegal action."""

    schedule: Any
    n: int
    tape_slots: float = 1.0  # room of a tape, in states
    free_tapes: int = 1  # tapes that need no room; two where the live state is a tape too
    at: int | None = 0
    reversed: int = 0
    restart: Steps = field(default_factory=set)  # in working memory
    data: Steps = field(default_factory=set)
    entries: dict[Any, dict[int, tuple[Steps, Steps]]] = field(
        default_factory=lambda: {Storage.RAM: {}, Storage.DISK: {}}
    )
    ended: bool = False
    steps: int = 0  # run forward
    peak_entries: int = 0  # in RAM
    peak_slots: float = 0.0  # of states in RAM, and of tapes beyond those free

    def run(self) -> Judge:
        schedule = self.schedule
        assert (schedule.n, schedule.r) == (0, 0)
        for action in schedule:
            self.apply(action)
            assert self.at is None or schedule.n == self.at
            assert schedule.r == self.reversed
            in_ram = self.entries[Storage.RAM].values()
            states = sum(1 for restart, _ in in_ram if restart)
            tapes = len(self.data) + sum(len(data) for _, data in in_ram)
            slots = states + max(0, tapes - self.free_tapes) * self.tape_slots
            self.peak_slots = max(self.peak_slots, slots)
            self.peak_entries = max(self.peak_entries, len(in_ram))
            if isinstance(action, their.EndReverse):
                break
        else:
            raise AssertionError("no EndReverse")
        assert not any(self.entries.values())
        assert not self.restart
        assert not self.data
        return self

    def apply(self, action: Any) -> None:
        if isinstance(action, their.Forward):
            self.forward(action)
        elif isinstance(action, their.Reverse):
            assert self.ended
            assert action.n0 < action.n1 == self.n - self.reversed
            assert self.data.issuperset(range(action.n0, action.n1))
            self.reversed += action.n1 - action.n0
            if action.clear_adj_deps:
                self.data = set()
        elif isinstance(action, their.Copy | their.Move):
            self.fetch(action)
        elif isinstance(action, their.EndForward):
            assert self.at == self.n
            assert not self.ended
            self.ended = True
        else:
            assert isinstance(action, their.EndReverse)
            assert self.reversed == self.n
            if not self.schedule.is_exhausted:
                self.reversed = 0

    def forward(self, action: Any) -> None:
        assert action.n0 == self.at
        if self.schedule.max_n is not None:
            assert action.n1 <= self.n - self.reversed
        stop = min(action.n1, self.n)
        assert action.n0 < stop
        self.at = stop
        self.steps += stop - action.n0
        steps = set(range(action.n0, stop))
        kept = steps if action.write_ics else set(), steps if action.write_adj_deps else set()
        self.restart, self.data = set(), set()
        if action.storage in self.entries:
            assert any(kept)
            assert action.n0 not in self.entries[action.storage]
            self.entries[action.storage][action.n0] = kept
        elif action.storage == Storage.WORK:
            self.restart, self.data = set(kept[0]), set(kept[1])
        else:
            assert action.storage == Storage.NONE
            assert not any(kept)
        if stop == self.n:
            self.schedule.finalize(stop)

    def fetch(self, action: Any) -> None:
        assert not self.restart
        assert not self.data
        assert action.to_storage == Storage.WORK
        entries = self.entries[action.from_storage]
        self.restart, self.data = map(set, entries[action.n])
        if isinstance(action, their.Move):
            del entries[action.n]
        assert action.n < self.n - self.reversed
        self.at = action.n if action.n in self.restart else None
        if self.at is not None:  # it must reach to where the adjoint is
            assert self.restart.issuperset(range(action.n, self.n - self.reversed))
