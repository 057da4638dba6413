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
    "the live state of an own class": replace(_IN_PLACE, tape="after", front="own"),
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
    "without numbers": replace(_IN_PLACE, leaves=(Leaf("f8", (0,)),) * 2, adjoint="of the tape"),
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
    "a lossy tier of the drop-in": replace(
        _IN_PLACE, seed=1, play="pyrevolve", revolver="memory", n=20, slots=4, tiers=("lossy",)
    ),
    "keys of dicts that change their order": replace(
        _TWO, tree="nested", turns=True, tiers=("memory:?buffers=0",)
    ),
    "an adjoint that keeps its state": replace(_IN_PLACE, keeps="given"),
    "the same of a functional chain": replace(_TWO, keeps="given"),
    "the same of its tape": replace(_TAPED, keeps="given", slots=20),
    "an adjoint that keeps copies": replace(_IN_PLACE, keeps="copy"),
    "the last state as the adjoint, in blocks": replace(
        _IN_PLACE, begin="last", adjoint="in place", n=9, block=3
    ),
    "a view of the last state in the adjoint, with a tier": replace(
        _IN_PLACE, begin="tree of last", n=9, tiers=("memory:?buffers=0",)
    ),
    "None for an adjoint of a tape": replace(_TAPED, none_at=4),
    "None for the last adjoint in place": replace(_IN_PLACE, none_at=0),
    "None for an adjoint in a folder": replace(_TWO, none_at=2, play="durable", seed=3),
    "an operator raises": replace(
        _TWO, play="fault", fault="error", fault_at=0.5, tiers=("file:{folder}?buffers=0",)
    ),
    "an adjoint step raises": replace(_IN_PLACE, play="fault", fault="error", fault_at=0.9),
    "Ctrl-C in an operator": replace(
        _TWO, play="fault", fault="Ctrl-C", fault_at=0.5, tiers=("file:{folder}?buffers=0",)
    ),
    "an operator of a run of unknown length raises": replace(
        _TWO, play="fault", fault="error", fault_at=0.2, until=True
    ),
    "a forward sweep without its reverse": replace(
        _TWO, play="dropped", tiers=("file:{folder}?engine=direct&buffers=0",)
    ),
}

# What must be refused, and how; every other one ends with the exact gradient alone.
_SHARES = "the tape of step 4 holds a .*{} that shares memory with the state"
_RETURNED_NONE = r"the adjoint of step \d returned None"
REFUSED: dict[str, str] = {
    "a closure over the live state": _SHARES.format("function"),
    "a memoryview of the live state": _SHARES.format("memoryview"),
    "slots with the live state": _SHARES.format("Slotted"),
    "an array of objects with the live state": _SHARES.format("ndarray"),
    "an iterator over the live state": _SHARES.format("list_iterator"),
    "costs without tapes": "but this chain makes tapes; give tape_step_s and tape_bytes",
    "costs with too small tapes": "takes 6.5 fast slots of the 3 in the budget",
    "costs with too large states": "takes 6.5 fast slots of the 3 in the budget",
    "a plan for other tapes": "takes 40.5 fast slots of the 40 in the budget",
    "two leaves that become one": r"state 1: leaf \[1\] .* is another leaf too",
    "two leaves that share memory": r"leaf \[1\] was replaced by a view of memory that something",
    "a leaf that changes its dtype": r"state 1 changed leaf \[1\] from .* float64 to .* float32",
    "a leaf that changes its shape": r"state 1 changed leaf \[1\] from \(3,\) .* to \(2,\)",
    "a leaf that becomes a number": r"state 1: leaf \[1\] is float; every leaf must be a plain",
    "a leaf exchanged for a workspace": r"leaf \[1\] was .* which something else refers to",
    "a list that grows": "state 1 changed its structure",
    "a store in two runs": "holds the checkpoints of another run",
    "a store in two runs, by reference": "holds the checkpoints of another run",
    "a slot freed under a write": r"Free\(2\) but a write from that slot was not awaited",
    "a wait left out": "EndForward but the live state is 12, not 13",
    "None for an adjoint": _RETURNED_NONE,
    "None for an adjoint in a block": _RETURNED_NONE,
    "None for an adjoint of a tape": _RETURNED_NONE,
    "None for the last adjoint in place": _RETURNED_NONE,
    "None for an adjoint in a folder": _RETURNED_NONE,
    "a read-only leaf": r"leaf \[0\] is read-only and has changed",
    "a step that writes to its input is measured": "an operator wrote to a state that a checkpoint",
    "an adjoint that keeps its state": r"the adjoint of step \d kept a reference to the state",
}
