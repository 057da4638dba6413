"""What pyrevolve's schedulers share: their actions, and the description of a hierarchy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from ....errors import ArgumentError


class Leveled(Protocol):
    """What a storage says of its level: costs of a checkpoint, and how many it holds."""

    @property
    def wd(self) -> float: ...

    @property
    def rd(self) -> float: ...

    @property
    def nckp(self) -> int: ...


class Architecture:
    """Levels of storage: how many checkpoints each holds, and what they cost there.

    Parameters
    ----------
    storage_list : sequence of Storage or None
        Fastest first; None takes the levels from the other arguments.
    wd, rd : sequence of float
        Cost of writing and of reading one checkpoint, in forward steps.
    sizes : sequence of int
        Checkpoints each level holds.

    Raises
    ------
    ArgumentError
        If there is no level, or costs or sizes are out of range.

    Examples
    --------
    >>> Architecture(None, wd=[0, 2], rd=[0, 2], sizes=[3, 100])
    [(3, 0, 0), (100, 2, 2)]
    """

    def __init__(
        self,
        storage_list: Sequence[Leveled] | None = None,
        wd: Sequence[float] = (1,),
        rd: Sequence[float] = (1,),
        sizes: Sequence[int] = (1,),
    ) -> None:
        if storage_list is not None:
            wd = [storage.wd for storage in storage_list]
            rd = [storage.rd for storage in storage_list]
            sizes = [storage.nckp for storage in storage_list]
        if not len(wd) == len(rd) == len(sizes) > 0:
            raise ArgumentError(
                f"{len(sizes)} sizes, {len(wd)} write costs and {len(rd)} read costs; "
                "give one of each for every level, and at least one level"
            )
        for level, (size, write, read) in enumerate(zip(sizes, wd, rd, strict=True)):
            if size < 1 or not (0 <= write < float("inf") and 0 <= read < float("inf")):
                raise ArgumentError(
                    f"level {level} has size {size}, wd={write}, rd={read}; "
                    "a size is at least 1, costs are finite and not negative"
                )
        self.nblevels = len(sizes)
        self.wd, self.rd, self.sizes = list(wd), list(rd), list(sizes)

    def __repr__(self) -> str:
        return repr(list(zip(self.sizes, self.wd, self.rd, strict=True)))


class Action:
    """One action of a scheduler.

    Attributes
    ----------
    type : int
        `ADVANCE` and so on.
    capo, old_capo : int
        The state that is live after the action, and before.
    ckp : int
        The checkpoint in use.
    """

    ADVANCE = 0
    TAKESHOT = 1
    RESTORE = 2
    LASTFW = 3
    REVERSE = 4
    CPDEL = 5
    TERMINATE = 6
    REVSTART = 15  # of CRevolve alone: the adjoint of the last step

    type_names: ClassVar[dict[int, str]] = {
        ADVANCE: "ADVANCE",
        TAKESHOT: "TAKESHOT",
        RESTORE: "RESTORE",
        LASTFW: "LASTFW",
        REVERSE: "REVERSE",
        CPDEL: "CPDEL",
        TERMINATE: "TERMINATE",
        REVSTART: "REVSTART",
    }

    def __init__(self, action_type: int, capo: int, old_capo: int, ckp: int) -> None:
        self.type, self.capo, self.old_capo, self.ckp = action_type, capo, old_capo, ckp

    def __repr__(self) -> str:
        return json.dumps(
            {
                "type": self.type_names[self.type],
                "from": self.old_capo,
                "to": self.capo,
                "ckp": self.ckp,
            }
        )

    def storageIndex(self) -> int:
        """Return the level of storage that the action is of."""
        raise NotImplementedError(f"{type(self).__name__} must define storageIndex()")


class Scheduler:
    """Says what to do next.

    Attributes
    ----------
    capo, old_capo : int
        The state that is live after the last action, and before.
    cp_pointer : int
        The checkpoint in use.
    oplist : list
        All operations.
    """

    def __init__(self, n_checkpoints: int, n_timesteps: int) -> None:
        self.n_timesteps, self.n_checkpoints = n_timesteps, n_checkpoints
        self.capo = self.old_capo = self.cp_pointer = 0
        self.oplist: list[Any] = []

    def next(self) -> Action:
        """Return the next action."""
        raise NotImplementedError(f"{type(self).__name__} must define next()")
