"""The description of a hierarchy of storages, as pyrevolve's `schedulers` holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import ArgumentError


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
        storage_list: Sequence[Any] | None = None,
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
