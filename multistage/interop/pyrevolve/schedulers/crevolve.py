"""Revolve as a scheduler of pyrevolve."""

from __future__ import annotations

from typing import ClassVar

from .. import crevolve as cr
from .base import Action as Action
from .base import Scheduler as Scheduler


class CAction(Action):
    """An action of `CRevolve`."""

    def storageIndex(self) -> int:
        """Return 0, the only level."""
        return 0


class CRevolve(Scheduler):
    """Revolve over one level; `next` gives its actions.

    Raises
    ------
    ArgumentError
        If a number is below 1.

    Examples
    --------
    >>> scheduler = CRevolve(2, 4)
    >>> scheduler.next()
    {"type": "TAKESHOT", "from": 0, "to": 0, "ckp": 0}
    >>> scheduler.ratio
    1.0
    """

    translations: ClassVar[dict[cr.Action, int]] = {
        cr.Action.advance: Action.ADVANCE,
        cr.Action.takeshot: Action.TAKESHOT,
        cr.Action.restore: Action.RESTORE,
        cr.Action.firstrun: Action.LASTFW,
        cr.Action.youturn: Action.REVERSE,
        cr.Action.terminate: Action.TERMINATE,
    }

    def __init__(self, n_checkpoints: int, n_timesteps: int) -> None:
        super().__init__(n_checkpoints, n_timesteps)
        self.revolve = cr.CRevolve(n_checkpoints, n_timesteps)
        while not self.oplist or self.oplist[-1].type != Action.TERMINATE:
            action = self._next()
            self.oplist.append(action)
            if action.type == Action.LASTFW:  # the adjoint of that step follows
                self.oplist.append(
                    CAction(Action.REVSTART, action.capo, action.old_capo, action.ckp)
                )
        self._at = 0

    def _next(self) -> CAction:
        kind = self.translations[self.revolve.revolve()]
        return CAction(kind, self.revolve.capo, self.revolve.oldcapo, self.revolve.check)

    def next(self) -> CAction:
        """Return the next action; TERMINATE at the end, again and again."""
        action: CAction = self.oplist[min(self._at, len(self.oplist) - 1)]
        self._at += 1
        self.capo, self.old_capo, self.cp_pointer = action.capo, action.old_capo, action.ckp
        return action

    @property
    def ratio(self) -> float:
        """Forward steps over time steps, those right before their adjoint not counted."""
        steps = sum(each.capo - each.old_capo for each in self.oplist if each.type == each.ADVANCE)
        return float(steps) / self.n_timesteps

    def storage(self, k: int) -> list[int]:
        """Return the time steps of all checkpoints, in order; there is one level."""
        return [each.capo for each in self.oplist if each.type == each.TAKESHOT]
