"""Revolve one action at a time, in pyrevolve's terms, from our binomial schedules.

Griewank & Walther, Algorithm 799: Revolve, ACM TOMS 26 (2000) 19-45.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar

from ... import actions
from ...errors import ArgumentError, MultistageError
from ...planners.single.binomial import beta, nu, reverse_actions
from .tools import OutputGrabber as OutputGrabber


class RevolveError(MultistageError):
    """Kept for programs that catch it; a schedule of this package raises none."""

    errCodes: ClassVar[dict[int, str]] = {}


class Action(Enum):
    """What `CRevolve.revolve` says is to be done next."""

    advance = 1
    takeshot = 2
    restore = 3
    firstrun = 4
    youturn = 5
    terminate = 6
    error = 7


def _count(name: str, value: int, least: int) -> int:
    if value < least:
        raise ArgumentError(f"{name}={value} must be at least {least}")
    return int(value)


def maxrange(snapshots: int, timefactor: int) -> int:
    """Return the most steps that so many snapshots reverse with so many runs of any step.

    Examples
    --------
    >>> maxrange(3, 2)
    10
    """
    return beta(_count("snapshots", snapshots, 0), _count("timefactor", timefactor, 0))


def numforw(timesteps: int, snapshots: int) -> int:
    """Return the fewest forward steps that reverse `timesteps` steps, taped ones not counted.

    Examples
    --------
    >>> numforw(10, 3)
    15
    """
    return nu(_count("timesteps", timesteps, 1), _count("snapshots", snapshots, 1))


def expense(timesteps: int, snapshots: int) -> float:
    """Return `numforw` over `timesteps`.

    Examples
    --------
    >>> expense(10, 3)
    1.5
    """
    return numforw(timesteps, snapshots) / timesteps


def adjust(timesteps: int) -> int:
    """Return a number of snapshots that keeps memory and recomputation both logarithmic.

    About as many snapshots as runs of a step: the least such pair that
    reaches `timesteps`.

    Examples
    --------
    >>> adjust(20), adjust(21), adjust(1000)
    (3, 4, 7)
    """
    n = _count("timesteps", timesteps, 1)
    snapshots = repeats = 1
    while beta(snapshots, repeats) < n:
        snapshots, repeats = snapshots + 1, repeats + 1
    while True:
        fewer = (snapshots - 1, repeats) if snapshots > repeats else (snapshots, repeats - 1)
        if min(fewer) < 1 or beta(*fewer) < n:
            return snapshots
        snapshots, repeats = fewer


class CRevolve:
    """Revolve's controller: `revolve()` says what to do, the attributes say where.

    Parameters
    ----------
    snapshots : int
    timesteps : int
    snapshots_disk : None

    Attributes
    ----------
    capo, oldcapo : int
        The state that is live after the action, and before.
    check : int
        The snapshot in use, counted from 0; -1 when there is none.
    fine : int
        The steps still to be reversed.
    advances : int
        Forward steps so far.

    Raises
    ------
    ArgumentError
        Without `timesteps`, or with `snapshots_disk`: what they stood for is
        `multistage.Reversal.forward(until=...)` and `MultiLevelRevolver`.

    Examples
    --------
    >>> controller, seen = CRevolve(2, 3), []
    >>> while (action := controller.revolve()) is not Action.terminate:
    ...     seen.append(action.name)
    >>> seen[:5]
    ['takeshot', 'advance', 'takeshot', 'advance', 'firstrun']
    """

    info = 0

    def __init__(
        self, snapshots: int, timesteps: int | None = None, snapshots_disk: int | None = None
    ) -> None:
        if timesteps is None:
            raise ArgumentError(
                "CRevolve must know timesteps; for an unknown number of steps use "
                "multistage.Reversal and forward(until=...)"
            )
        if snapshots_disk is not None:
            raise ArgumentError(
                "CRevolve has one level; use MultiLevelRevolver, or the planner "
                "'stumm-walther' of multistage"
            )
        n = _count("timesteps", timesteps, 1)
        self._actions: Iterator[actions.Action] = reverse_actions(
            0, n, _count("snapshots", snapshots, 1)
        )
        self._saved: list[int] = []
        self._turned = False
        self.capo = self.oldcapo = 0
        self.check = -1
        self.fine = n
        self.advances = 0
        self.where = True

    def revolve(self) -> Action:
        """Return the next action."""
        for action in self._actions:
            match action:
                case actions.Advance(start, stop):
                    self.oldcapo, self.capo = start, stop
                    self.advances += stop - start
                    return Action.advance
                case actions.Save(step):
                    self._saved.append(step)
                    self.oldcapo, self.check = step, len(self._saved) - 1
                    return Action.takeshot
                case actions.Load(step):
                    self.oldcapo, self.capo = self.capo, step
                    self.check = self._saved.index(step)
                    return Action.restore
                case actions.Free():
                    self._saved.pop()
                case actions.Reverse(step):
                    self.oldcapo, self.fine = step, step
                    turned, self._turned = self._turned, True
                    return Action.youturn if turned else Action.firstrun
        self.check = -1
        return Action.terminate

    @property
    def checkram(self) -> int:
        """The snapshot in use; all are in memory."""
        return self.check

    @property
    def checkrom(self) -> int:
        """Always 0, since none is on disk."""
        return 0
