"""Cases that once ended with a wrong gradient, a raw exception or something left behind."""

from __future__ import annotations

from dataclasses import replace

from .cases import Case
from .contents import Leaf

_TWO = Case(
    1,
    n=5,
    tree="list",
    leaves=(Leaf("f8", (3,)), Leaf("f8", (3,))),
    starts=("plain", "plain"),
    manners=("new", "new"),
)
_IN_PLACE = replace(_TWO, in_place=True, manners=("overwrite", "overwrite"))
_TAPED = replace(_TWO, tape="arrays")
_ONE_TAPE = replace(_TAPED, one_tape=True, front="own")
_NUMBER = (Leaf("f8", ()), Leaf("f8", (3,)))

CORPUS: dict[str, Case] = {
    "the drop-in within a budget": replace(
        _IN_PLACE, play="pyrevolve", revolver="memory", n=5, slots=2
    ),
    "one tape, periodic": replace(_ONE_TAPE, n=3, slots=2, planner="periodic"),
    "one tape in place, whatever is fastest": replace(
        _ONE_TAPE, in_place=True, manners=_IN_PLACE.manners, n=3, slots=1
    ),
    "one tape, costs that keep several": replace(_ONE_TAPE, n=3, costs="kept tapes"),
    "one tape in blocks": replace(_ONE_TAPE, block=3),
    "one tape in blocks, kept by the operators": replace(_ONE_TAPE, tape="none", block=3),
    "arrays replaced in the given dict": replace(_TWO, tree="dict", container="rebound"),
    "arrays replaced in the given list": replace(_TWO, container="rebound", slots=1),
    "arrays replaced in nested containers": replace(_TWO, tree="deep", container="rebound"),
    "arrays replaced in a copy of the dict": replace(_TWO, tree="nested", container="mixed"),
    "a closure over the live state": replace(_IN_PLACE, tape="closure"),
    "a dataclass with the live state": replace(_IN_PLACE, tape="dataclass"),
    "a memoryview of the live state": replace(_IN_PLACE, tape="memoryview"),
    "slots with the live state": replace(_IN_PLACE, tape="slots"),
    "an array of objects with the live state": replace(_IN_PLACE, tape="object array"),
    "an iterator over the live state": replace(_IN_PLACE, tape="iterator"),
    "a tape of the live state from a class of the user's own": replace(
        _IN_PLACE, tape="after", front="own"
    ),
    "the same in blocks": replace(_IN_PLACE, tape="after", front="own", block=2),
    "costs without tapes": replace(
        _TAPED, slots=5, tape_factor=6.0, costs="tapes are states", planner="store-all"
    ),
    "costs with too small tapes": replace(_TAPED, n=20, tape_factor=6.0, costs="small tapes"),
    "costs with too large states": replace(_TAPED, n=20, tape_factor=6.0, costs="large states"),
    "a plan for other tapes": replace(
        _TAPED, n=20, tape_factor=6.0, costs="small tapes", planner="plan:store-all", slots=40
    ),
    "a leaf that becomes a NumPy scalar": replace(
        _IN_PLACE, leaves=_NUMBER, manners=("scalar", "overwrite")
    ),
    "two leaves that become one": replace(_IN_PLACE, manners=("overwrite", "alias")),
    "two leaves that share memory": replace(_IN_PLACE, manners=("overwrite", "view of next")),
    "two leaves that change places": replace(_IN_PLACE, manners=("overwrite", "swap")),
    "a leaf that changes its dtype": replace(_IN_PLACE, manners=("overwrite", "retype")),
    "a leaf that changes its shape": replace(_IN_PLACE, manners=("overwrite", "reshape")),
    "a leaf that becomes a number": replace(_IN_PLACE, manners=("overwrite", "number")),
    "a leaf exchanged for a workspace": replace(_IN_PLACE, manners=("overwrite", "rotating")),
    "a list that grows": replace(_IN_PLACE, container="other"),
    "a store in two runs": replace(
        _IN_PLACE, play="store", n=9, slots=1, tiers=("late",), ratios=(1.0, 0.1, 0.1)
    ),
    "a store in two runs, by reference": replace(
        _TWO, play="store", n=9, slots=1, tiers=("late",), ratios=(1.0, 0.1, 0.1)
    ),
    "borrowed memory at the start": replace(_TWO, starts=("borrowed", "plain")),
    "borrowed memory in a step": replace(_TWO, manners=("borrowed", "new")),
    "a slot freed under a write": replace(
        _IN_PLACE,
        n=13,
        slots=2,
        planner="call:online",
        mutation=("free early", 0.3),
        tiers=("late",),
    ),
    "a wait left out": replace(
        _IN_PLACE,
        n=13,
        slots=2,
        planner="call:streaming",
        mutation=("delete", 0.6),
        tiers=("late",),
    ),
    "the last state as the adjoint": replace(_IN_PLACE, begin="last"),
    "a view of the last state in the adjoint": replace(_IN_PLACE, begin="tree of last"),
    "state 0 as the adjoint": replace(_IN_PLACE, begin="state 0", adjoint="in place"),
    "the workspace as the adjoint": replace(
        _TWO, manners=("lent view", "new"), begin="last", adjoint="in place"
    ),
    "an adjoint that holds its tape": replace(_IN_PLACE, adjoint="of the tape"),
    "the same in a block": replace(_IN_PLACE, adjoint="of the tape", block=3),
    "None for an adjoint": replace(_TWO, none_at=2),
    "None for an adjoint in a block": replace(_TWO, none_at=2, block=2),
    "a compressed tier of the drop-in": replace(
        _IN_PLACE,
        seed=5,
        play="pyrevolve",
        revolver="memory",
        tiers=("memory:?compress=blosc&buffers=0",),
    ),
    "the last state in a workspace": replace(_TWO, play="call", manners=("lent view", "new")),
    "a read-only leaf": replace(
        _IN_PLACE, seed=0, play="durable", starts=("readonly", "plain"), fault="error"
    ),
    "a step that writes to its input is measured": replace(
        _TWO, manners=("writes input", "new"), costs="measured"
    ),
    "a tape with views of states": replace(
        _TAPED, n=9, manners=("new", "input view"), tape="before", planner="mixed"
    ),
    "a scalar below a tuple, measured": replace(
        _IN_PLACE,
        n=1,
        tree="deep",
        leaves=_NUMBER,
        manners=("scalar", "overwrite"),
        costs="measured",
    ),
    "values with padding": replace(
        _IN_PLACE, play="durable", n=1, leaves=(Leaf("clongdouble", (2, 3)),) * 2
    ),
    "never closed": replace(_TWO, play="dropped", tiers=("memory:?buffers=0",)),
}
