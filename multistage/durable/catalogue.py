"""Which states a durable store has, in which files, and which files are needed no more."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ..backends.extents import Index, TransferState
from ..support.step_sets import StepSet
from .batches import NEVER, PLACES, Batch


@dataclass(slots=True)
class Found:
    """What a run left in its folder, and which of it is taken over.

    Attributes
    ----------
    batches : list of Batch
    next_number : int
        The number of the next batch.
    below : int
        States before this step alone.
    kept : container of int or None
        These alone; None for all.
    """

    batches: list[Batch] = field(default_factory=list)
    next_number: int = 0
    below: int = NEVER
    kept: Container[int] | None = None

    def steps(self) -> list[int]:
        """Return the steps of the states that are taken over, ascending."""
        steps = {step for batch in self.batches for step in batch.steps}
        return sorted(step for step in steps if self.wants(step))

    def wants(self, step: int) -> bool:
        """Whether a state is taken over."""
        return step < self.below and (self.kept is None or step in self.kept)


class Catalogue:
    """The batches of an open store.

    Parameters
    ----------
    lasting : bool
        Whether the file of dropped states stays until an adjoint makes it unneeded: a run
        that is resumed needs every checkpoint below the adjoint that it begins with.

    Attributes
    ----------
    needed_below : int
        Of states from this step on, no file is needed.

    Notes
    -----
    The computing thread's; `needed_below` may be set by any thread.
    """

    def __init__(self, lasting: bool) -> None:
        self._lasting = lasting
        self._index: Index[Batch] = Index(PLACES)
        self._dropped = StepSet()  # states in a file still, as far as the index knows them
        self._dead: dict[int, Batch] = {}  # without live states, by number
        self.needed_below = self._looked_below = NEVER if lasting else 0

    @property
    def batches(self) -> Iterable[Batch]:
        """All batches, those without a live state too."""
        return self._index.extents.values()

    def begin(self, batch: Batch) -> None:
        """Know of a batch without states."""
        self._index.extents[batch.number] = batch

    def take_over(self, found: Found) -> int:
        """Know of what a run left; return how many states that is, wanted or not."""
        for batch in found.batches:
            self.begin(batch)
            batch.live = 0
            for place, step in enumerate(batch.steps):
                if found.wants(step) and step not in self._index:
                    self._index.enter(step, batch, place)
                    batch.live += 1
            self._note_death(batch)
        return sum(len(batch.steps) for batch in found.batches)

    def enter(self, step: int, batch: Batch) -> None:
        """Know of a state that was put last into a batch."""
        self._index.enter(step, batch, len(batch.steps) - 1)
        self._dead.pop(batch.number, None)  # its states so far may all have been dropped
        batch.live += 1

    def find(self, step: int) -> tuple[Batch, int] | None:
        """Return the batch of a state that was not dropped, and the place in it."""
        return None if step in self._dropped else self._index.find(step)

    def revive(self, step: int) -> bool:
        """Take a dropped state back that is on the disk still: states are what they were."""
        if step not in self._dropped:
            return False
        entry = self._index.find(step)
        assert entry is not None
        batch = entry[0]
        self._dropped.discard(step)
        if batch.state is TransferState.FAILED or not self._lasting:
            self._index.pop(step)
            return False
        self._dead.pop(batch.number, None)
        batch.live += 1
        return True

    def drop(self, step: int) -> None:
        """Do without a state that `find` finds."""
        entry = self._index.find(step)
        assert entry is not None
        self._dropped.add(step)
        entry[0].live -= 1
        self._note_death(entry[0])

    def lose(self, step: int) -> None:
        """Forget a state that cannot be read."""
        batch = self._index.pop(step)
        assert batch is not None
        batch.live -= 1
        self._note_death(batch)

    def _note_death(self, batch: Batch) -> None:
        if not batch.live:
            self._dead[batch.number] = batch

    def bury(self) -> list[Batch]:
        """Forget the batches of dropped states that are not needed and that no thread uses.

        Returns them: their files can go.
        """
        needed_below = self.needed_below
        newest = self._dead[next(reversed(self._dead))] if self._dead else None
        if needed_below == self._looked_below and (newest is None or newest.least < needed_below):
            return []  # many may wait for the next adjoint: they are not looked at each time
        self._looked_below = needed_below
        left, gone = {}, []
        for batch in self._dead.values():
            if batch.least < needed_below or not batch.settled:
                left[batch.number] = batch
                continue
            for step in batch.steps:
                entry = self._index.find(step)
                if entry is not None and entry[0] is batch:
                    self._index.pop(step)
                    self._dropped.discard(step)
            self._index.forget(batch)
            gone.append(batch)
        self._dead = left
        return gone
