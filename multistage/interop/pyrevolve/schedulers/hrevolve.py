"""H-Revolve as a scheduler of pyrevolve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .... import actions
from ....errors import ArgumentError
from ....planners.synchronous.levels import Level, solve
from ....planners.uniform import require_steps
from ..planners import on_storages
from .base import Action as Action
from .base import Architecture as Architecture
from .base import Scheduler as Scheduler


class HAction(Action):
    """An action of `HRevolve`; `index` is the level and the time step of a checkpoint."""

    def __init__(
        self,
        action_type: int = Action.TERMINATE,
        capo: int = 0,
        old_capo: int = 0,
        ckp: int = 0,
        index: int | Sequence[int] = 0,
    ) -> None:
        super().__init__(action_type, capo, old_capo, ckp)
        self.index = index

    def storageIndex(self) -> int:
        """Return the level of the checkpoint; 0 of an action that is of none."""
        return 0 if isinstance(self.index, int) else self.index[0]


class HRevolve(Scheduler):
    """H-Revolve over the levels of an `Architecture`; `next` gives its actions.

    As in pyrevolve all steps are run before the first REVERSE, of time step
    `n_timesteps`, which stands for the end of the forward sweep.

    Parameters
    ----------
    n_checkpoints, n_timesteps : int
        Both the number of time steps.
    architecture : Architecture, optional
    uf, ub, up : float
        Cost of a forward step, of an adjoint step and, without effect, of the turn.

    Raises
    ------
    ArgumentError
        If an argument is out of range.

    Examples
    --------
    >>> scheduler = HRevolve(5, 5, Architecture(None, wd=[0, 2], rd=[0, 2], sizes=[2, 3]))
    >>> scheduler.next().index, scheduler.makespan
    ([0, 0], 14.0)
    """

    def __init__(
        self,
        n_checkpoints: int,
        n_timesteps: int,
        architecture: Architecture | None = None,
        uf: float = 1,
        ub: float = 1,
        up: float = 1,
    ) -> None:
        n = require_steps(n_timesteps, "h-revolve")
        if n_checkpoints != n:
            raise ArgumentError(
                f"n_checkpoints={n_checkpoints} must be n_timesteps={n}; "
                "the architecture says how many checkpoints there are"
            )
        super().__init__(n_checkpoints, n)
        arch = self.architecture = Architecture() if architecture is None else architecture
        self.uf, self.ub, self.up = uf, ub, up
        levels = tuple(
            Level(int(size), float(write), float(read))
            for size, write, read in zip(arch.sizes, arch.wd, arch.rd, strict=True)
        )
        # One step more: the one whose REVERSE ends the forward sweep.
        solved = solve(levels, n + 1, float(uf))
        self.oplist = list(_translated(on_storages(solved, levels[0].capacity or 1, 1)))
        self.n_ops = len(self.oplist)
        self._at = 0

    def resetSequence(self) -> None:
        """Start again."""
        self._at = 0

    def next(self) -> HAction:
        """Return the next action; TERMINATE at the end, again and again."""
        if self._at >= self.n_ops:
            return HAction()
        action: HAction = self.oplist[self._at]
        self._at += 1
        self.capo, self.old_capo, self.cp_pointer = action.capo, action.old_capo, action.capo
        return action

    def storage(self, k: int) -> list[int]:
        """Return the time steps of all checkpoints written to level k, in order."""
        return [
            each.capo
            for each in self.oplist
            if each.type == each.TAKESHOT and each.storageIndex() == k
        ]

    @property
    def makespan(self) -> float:
        """The cost of all actions, one after the other."""
        arch = self.architecture
        total = 0.0
        for each in self.oplist:
            if each.type == each.ADVANCE:
                total += (each.capo - each.old_capo) * self.uf
            elif each.type == each.REVERSE:
                total += self.ub
            elif each.type == each.TAKESHOT:
                total += arch.wd[each.storageIndex()]
            elif each.type == each.RESTORE:
                total += arch.rd[each.storageIndex()]
        return total

    @property
    def ratio(self) -> float:
        """Forward steps over time steps, those right before their adjoint not counted."""
        steps = sum(each.capo - each.old_capo for each in self.oplist if each.type == each.ADVANCE)
        return float(steps) / self.n_timesteps


def _translated(schedule: actions.Schedule) -> Iterator[HAction]:
    """Yield the actions of a synchronous schedule: level 0 its slots, level k its tier k - 1."""
    level, tokens = 0, 0  # the level that the next Load is from
    for action, send in actions.drive(schedule):
        match action:
            case actions.Advance(start, stop):
                yield HAction(HAction.ADVANCE, stop, start, index=start)
            case actions.Save(step):
                yield HAction(HAction.TAKESHOT, step, step, index=[0, step])
            case actions.Put(step, tier):
                send(tokens)
                tokens += 1
                yield HAction(HAction.TAKESHOT, step, step, index=[tier + 1, step])
            case actions.Get(_, tier):
                send(tokens)
                tokens += 1
                level = tier + 1
            case actions.Load(step):
                yield HAction(HAction.RESTORE, step, step, index=[level, step])
            case actions.Free(step):
                if not level:  # else the slot that a read passed through
                    yield HAction(HAction.CPDEL, step, step, index=[0, step])
                level = 0
            case actions.Drop(step, tier):
                yield HAction(HAction.CPDEL, step, step, index=[tier + 1, step])
            case actions.Reverse(step):
                yield HAction(HAction.REVERSE, step, step, index=step)
            case actions.Await():
                send(True)
            case actions.Tape() | actions.EndForward() | actions.Offer():
                pass
