"""The pyrevolve drop-in by its documented calls: operators over arrays whose time levels rotate."""

from __future__ import annotations

from typing import Any

import numpy as np

from multistage import Costs, Tier
from multistage.interop import pyrevolve
from multistage.interop.pyrevolve.storage import BytesStorage, DiskStorage, NumpyStorage
from multistage.model.costs import NOT_KEPT

from . import planned
from .contents import DTYPES, Leaf, content, fingerprint


class Fields:
    """What the operators work on: the time levels of some fields, and the adjoint."""

    def __init__(self, leaf: Leaf, fields: int, levels: int, seed: int) -> None:
        self.leaf, self.count, self.levels, self.seed = leaf, fields, levels, seed
        shape = (levels + 1, *leaf.shape)
        self.arrays = [np.zeros(shape, DTYPES[leaf.dtype]) for _ in range(fields)]
        self.adjoint = b""
        self.reset()

    def reset(self) -> None:
        for k, array in enumerate(self.arrays):
            for level in range(self.levels + 1):
                array[level] = content(self.leaf, b"%d %d %d" % (self.seed, k, level))
        self.adjoint = b""

    def at(self, t: int) -> list[Any]:
        """Return the arrays of state t: levels t, t - 1, ... of each field."""
        every = self.levels + 1
        return [array[(t - back) % every] for array in self.arrays for back in range(self.levels)]

    def step(self, t: int) -> None:
        key = fingerprint(self.at(t), t)
        for k, array in enumerate(self.arrays):
            array[(t + 1) % (self.levels + 1)] = content(self.leaf, key + bytes([k]))

    def back(self, t: int) -> None:
        """Use the levels as the forward step left them."""
        self.adjoint = fingerprint([*self.at(t), *self.at(t + 1)], t, self.adjoint)


def store_all(fields: Fields, n: int) -> bytes:
    """Return the adjoint, every level of every step kept."""
    fields.reset()
    kept = []
    for t in range(n):
        fields.step(t)
        kept.append([array.copy() for array in fields.arrays])
    for t in reversed(range(n)):
        for array, then in zip(fields.arrays, kept[t], strict=True):
            array[...] = then
        fields.back(t)
    return fields.adjoint


class _Forward(pyrevolve.Operator):
    def __init__(self, fields: Fields, called: Any) -> None:
        self.fields, self.called = fields, called

    def apply(self, **times: Any) -> None:
        for t in range(times["t_start"], times["t_end"]):
            self.called("step", t)
            self.fields.step(t)


class _Backward(_Forward):
    def apply(self, **times: Any) -> None:
        for t in reversed(range(times["t_start"], times["t_end"])):
            self.called("adjoint", t)
            self.fields.back(t)


class _Checkpoint(pyrevolve.Checkpoint):
    def __init__(self, fields: Fields) -> None:
        self.fields = fields

    @property
    def dtype(self) -> Any:
        return self.fields.arrays[0].dtype

    @property
    def size(self) -> int:
        return sum(array.size for array in self.fields.at(0))

    def get_data(self, timestep: int) -> Any:
        return self.fields.at(timestep)

    def get_data_location(self, timestep: int) -> Any:
        return self.fields.at(timestep)


def dropin(play: Any) -> None:
    """Run two sweeps of a revolver and compare what the adjoint operators saw."""
    case = play.case
    fields = Fields(case.leaves[0], len(case.leaves), case.levels, case.seed)
    answer = store_all(fields, case.n)
    with play.judged(), _revolver(play, fields) as revolver:
        for _ in range(case.sweeps):
            fields.reset()
            revolver.apply_forward()
            revolver.apply_reverse()
            if fields.adjoint != answer:
                play.seen.found("another gradient")
            else:
                play.seen.outcomes["exact"] += 1


def _costs(case: Any, state_bytes: int) -> Costs:
    tape, write, read = (ratio * 1e-3 for ratio in case.ratios)
    tiers = tuple(Tier(f"tier {k}", write, read) for k, _ in enumerate(case.tiers))
    return Costs(1e-3, 1e-3, tape, max(64, state_bytes), NOT_KEPT, tiers)


def _revolver(play: Any, fields: Fields) -> Any:
    case = play.case
    given = (_Checkpoint(fields), _Forward(fields, play.fault), _Backward(fields, play.fault))
    folder, n, slots = str(play.folder), case.n, case.slots
    options: dict[str, Any] = {}
    how = case.seed % 4
    if how:  # else as pyrevolve's users write it
        name = case.planner.rpartition(":")[2]
        options["memory"] = f"{slots} slots"
        options["planner"] = name
        if case.tiers:
            options["tiers"] = planned.tiers(case, play.folder)
        if case.seed % 5:  # else measured
            options["costs"] = _costs(case, given[0].nbytes)
    checkpoints = None if how else (None if case.seed % 8 else slots)
    match case.revolver:
        case "memory":
            return pyrevolve.MemoryRevolver(*given, checkpoints, n, **options)
        case "single":
            return pyrevolve.SingleLevelRevolver(*given, checkpoints, n, **options)
        case "disk":
            return pyrevolve.DiskRevolver(*given, checkpoints, n, filedir=folder, **options)
    size, dtype = given[0].size, given[0].dtype
    storages: list[Any] = [NumpyStorage(size, slots, dtype)]
    if case.seed % 3 == 0:
        compression = pyrevolve.compression.init_compression({"scheme": "blosc"})
        storages[0] = BytesStorage(given[0].nbytes, slots, dtype, compression)
    storages.append(DiskStorage(size, n, dtype, filedir=folder, wd=1.0, rd=1.0))
    return pyrevolve.MultiLevelRevolver(*given, n, storages)
