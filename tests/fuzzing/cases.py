"""What is tried: one case, drawn from one integer, and simpler ones for when it fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from .contents import DTYPES, PLAIN, Leaf

PLAYS = (
    "sweeps",  # one Reversal, some sweeps
    "call",  # multistage.reverse
    "fault",  # an operator raises, or Ctrl-C comes while it runs; then another sweep
    "ctrl-c",  # Ctrl-C at any instruction of the package; then another sweep
    "turns",  # two Reversals, their calls in turn
    "threads",  # two Reversals in two threads
    "store",  # one store in two Reversals
    "durable",  # in a folder, stopped and resumed
    "dropped",  # never closed
    "nested",  # a Reversal in an operator of another
    "pyrevolve",  # the drop-in, its documented calls
)
_WEIGHTS = (30, 4, 10, 10, 6, 3, 3, 8, 3, 2, 12)

# Fields that matter to these plays alone.
_OF_PLAYS = {
    "fault": ("fault", "durable"),
    "fault_at": ("fault", "ctrl-c"),
    "revolver": ("pyrevolve",),
    "levels": ("pyrevolve",),
}

TREES = ("array", "tuple", "list", "dict", "nested", "deep")
# What a step may do with a leaf, and what may be refused: all else must work.
FUNCTIONAL = ("new", "same", "input view", "view", "reversed", "fortran", "readonly", "lent view")
FUNCTIONAL_ODD = (
    "rotating",
    "borrowed",
    "scalar",
    "broadcast",
    "alias",
    "writes input",
    "retype",
    "reshape",
    "subclass",
    "number",
)
IN_PLACE = ("overwrite", "same", "rebind")
IN_PLACE_ODD = (
    "scalar",
    "swap",
    "retype",
    "reshape",
    "alias",
    "view of next",
    "readonly",
    "borrowed",
    "subclass",
    "number",
    "rotating",
    "fortran",
)
STARTS = ("plain", "fortran", "view", "reversed", "borrowed")
STARTS_ODD = ("readonly", "broadcast", "alias")
TAPES = ("arrays", "nested", "before", "after", "none", "number")
TAPES_ODD = ("dataclass", "closure", "memoryview", "object array", "iterator", "slots")
ADJOINTS = ("digest", "in place", "tree", "rotating", "integer")
BEGINS = ("fresh", "last", "part of last", "tree of last", "state 0")
PLANNER_NAMES = (
    "store-all",
    "streaming",
    "revolve",
    "pyrevolve",
    "interval",
    "periodic",
    "recursive",
    "online",
    "h-revolve",
    "disk-revolve",
    "periodic-disk",
    "stumm-walther",
    "mixed",
)
MUTATIONS = ("delete", "twice", "free early", "swap", "other step")
TIERS = (
    "memory:?buffers=0",
    "memory:",
    "memory:?capacity={few}&buffers=0",
    "file:{folder}?engine=native&buffers=0",
    "file:{folder}?engine=native&buffers=64KiB&queue=1",
    "file:{folder}?engine=direct&buffers=0",
    "file:{folder}?engine=aiofiles&buffers=0",
    "file:{folder}?engine=auto",
    "memory:{few}?buffers=0 > file:{folder}?buffers=0",
    "memory:{few}?buffers=0 > memory:{few}?buffers=0 > file:{folder}?engine=direct&buffers=0",
    "memory:?compress=blosc&buffers=0",
    "file:{folder}?compress=blosc",
    "numa:0?buffers=0",
    "fsspec:memory://fuzz",
    "late",
    "late",
    "lossy",
)
COSTS_ODD = (
    "tapes are states",
    "states are tapes",
    "small tapes",
    "large tapes",
    "small states",
    "large states",
    "no tier",
    "another tier",
    "kept tapes",
)


@dataclass(frozen=True)
class Case:
    """One case.  Fields at their defaults are the plainest there are."""

    seed: int
    play: str = "sweeps"
    n: int = 1
    in_place: bool = False
    front: str = "adapter"  # "plain": bare functions; "own": a class with the Protocol's members
    tree: str = "array"
    leaves: tuple[Leaf, ...] = (Leaf("f8", (3,)),)
    starts: tuple[str, ...] = ("plain",)
    manners: tuple[str, ...] = ("new",)
    when: int = 0  # the first step that does what is odd
    container: str = "new"  # "rebound", "mixed": the one given, with new arrays; "other": retyped
    turns: bool = False  # keys of dicts change their order
    keeps: str = ""  # what an adjoint step keeps, and the next one reads: "copy", "given"
    idle: int = 0  # every idle-th step changes nothing
    tape: str = ""  # "": the state is the tape
    tape_factor: float = 1.0  # bytes of a tape over those of a state
    one_tape: bool = False
    block: int = 0
    adjoint: str = "digest"
    begin: str = "fresh"
    none_at: int = -1  # the adjoint step that returns None
    slots: int = 3
    in_bytes: int | None = None  # a budget in bytes, by so many more than those of the slots
    planner: str = "auto"
    mutation: tuple[str, float] = ("", 0.0)
    tiers: tuple[str, ...] = ()
    costs: str = "right"
    ratios: tuple[float, float, float] = (1.0, 2.0, 2.0)  # tape, write, read in forward steps
    checked: bool = False
    until: bool = False
    sweeps: int = 1
    reuse: bool = False  # the same object is state 0 of every sweep
    fault: str = ""
    fault_at: float = 0.0
    revolver: str = ""
    levels: int = 1

    def __str__(self) -> str:
        plain = Case(0)
        told = [f"--case {self.seed}: {self.play}"]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if field.name in _OF_PLAYS and self.play not in _OF_PLAYS[field.name]:
                continue
            if value != getattr(plain, field.name) or field.name in ("n", "slots"):
                shown = ",".join(map(_told, value)) if isinstance(value, tuple) else value
                told.append(f"{field.name}={shown}")
        return " ".join(told)

    @property
    def odd(self) -> bool:
        """Whether a documented error may come of it."""
        exact = {"auto", "revolve", "pyrevolve", "streaming", "plan:auto", "call:auto"}
        odd = {*FUNCTIONAL_ODD, *IN_PLACE_ODD, *STARTS_ODD, *TAPES_ODD}
        return bool(
            odd & {*self.manners, *self.starts, self.tape}
            or self.container == "other"
            or self.none_at >= 0
            or (self.keeps == "given" and self.in_place)  # lent for the time of the call
            or self.planner not in exact
            or self.mutation[0]
            or self.costs not in ("right", "measured")
            or self.play in ("store", "pyrevolve")
            # Something else refers to the array that a leaf is replaced by.
            or ("rebind" in self.manners and self.tape)
            # Then there are buffers to be paid for.
            or (self.in_bytes is not None and (self.tiers or self.play == "durable"))
            or (self.play == "durable" and (self.adjoint != "digest" or self.begin != "fresh"))
            or (self.begin != "fresh" and self.adjoint == "in place")
        )


def _told(value: object) -> str:
    if isinstance(value, Leaf):
        return f"{value.dtype}{list(value.shape)}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(seed: int, only: str | None = None) -> Case:
    """Return the case of an integer, of one play if `only` names it."""
    source = random.Random(seed)
    play = source.choices(PLAYS, _WEIGHTS)[0]
    one = _plain(source, seed, only or play)
    for _ in range(source.choices((0, 1, 2), (25, 55, 20))[0]):
        one = replace(one, **source.choice(_SPICES)(source, one))
    return _settled(source, one)


def _plain(source: random.Random, seed: int, play: str) -> Case:
    in_place = source.random() < 0.5
    tree = source.choice(TREES)
    count = 1 if tree == "array" else source.randint(2, 4)
    leaves = tuple(_leaf(source, PLAIN) for _ in range(count))
    tape = source.choice(TAPES) if source.random() < 0.4 else ""
    n = source.choice((1, 2, 3, 4, 5, 7, 10, 13, 20, 21, 34))
    tiers = (source.choice(TIERS),) if source.random() < 0.5 else ()
    return Case(
        seed,
        play,
        n,
        in_place,
        source.choice(("adapter", "adapter", "own", "adapter" if in_place else "plain")),
        tree,
        leaves,
        tuple(source.choice(("plain", source.choice(STARTS))) for _ in leaves),
        tuple(_usual(source, in_place) for _ in leaves),
        source.choice((0, 0, 1, 3)),
        tape=tape,
        tape_factor=source.choice((0.2, 1.0, 1.0, 6.0)),
        block=source.choice((0, 0, 0, 0, 1, 2, 3)),
        adjoint=source.choice(("digest", source.choice(ADJOINTS))),
        slots=source.choice((1, 1, 2, 3, 4, 6, n, 2 * n)),
        in_bytes=source.choice((None, None, None, 1 << 22 if tiers else source.choice((0, 63)))),
        planner=_planner(source),
        tiers=tiers,
        costs="measured" if source.random() < 0.02 else "right",
        ratios=(
            source.choice((0.5, 1.0, 1.5)),
            source.choice((0.1, 0.5, 1.0, 2.5, 8.0)),
            source.choice((0.1, 0.5, 2.0, 8.0)),
        ),
        checked=source.random() < 0.2,
        until=source.random() < 0.12,
        sweeps=source.choice((1, 1, 2, 3)),
        reuse=source.random() < 0.2,
        fault=source.choice(("error", "Ctrl-C", "StopIteration", "MemoryError", "exit")),
        fault_at=source.random(),
        revolver=source.choice(("memory", "memory", "single", "disk", "levels")),
        levels=source.choice((1, 2, 3)),
    )


def _leaf(source: random.Random, names: tuple[str, ...]) -> Leaf:
    shape = source.choice(((), (1,), (3,), (3,), (7,), (2, 3), (4, 4), (0, 2), (2, 1, 3)))
    if source.random() < 0.02:
        shape = (40_000,)
    return Leaf(source.choice(names), shape)


def _usual(source: random.Random, in_place: bool) -> str:
    if in_place:
        return source.choice(("overwrite", "overwrite", "overwrite", *IN_PLACE))
    return source.choice(("new", "new", "new", *FUNCTIONAL))


def _planner(source: random.Random) -> str:
    if source.random() < 0.45:
        return "auto"
    if source.random() < 0.7:
        return source.choice(PLANNER_NAMES)
    name = source.choice(("auto", *PLANNER_NAMES))
    return f"{source.choice(('plan', 'call'))}:{name}"


def _one_manner(source: random.Random, one: Case) -> dict[str, Any]:
    odd = source.choice(IN_PLACE_ODD if one.in_place else FUNCTIONAL_ODD)
    k = source.randrange(len(one.leaves))
    leaves = one.leaves
    if odd == "scalar":
        leaves = (*leaves[:k], Leaf(leaves[k].dtype, ()), *leaves[k + 1 :])
    elif odd in ("borrowed", "rotating", "broadcast", "reshape"):
        leaves = (*leaves[:k], Leaf(leaves[k].dtype, (4,)), *leaves[k + 1 :])
    elif odd in ("swap", "alias", "view of next"):
        leaves = (leaves[0],) * len(leaves)
    return {"manners": (*one.manners[:k], odd, *one.manners[k + 1 :]), "leaves": leaves}


def _one_tape(source: random.Random, one: Case) -> dict[str, Any]:
    sized = {"block": source.choice((0, 2, 3))}
    return {"one_tape": True, "front": "own", "tape": source.choice(("arrays", "none")), **sized}


def _mutant(source: random.Random, one: Case) -> dict[str, Any]:
    planner = source.choice(("revolve", *PLANNER_NAMES))
    tiers = one.tiers or (source.choice(("late", *TIERS)),)
    mutation = (source.choice(MUTATIONS), source.random())
    return {"planner": f"call:{planner}", "mutation": mutation, "tiers": tiers, "until": False}


_SPICES = (
    _one_manner,
    _one_manner,
    _one_manner,
    _one_tape,
    _mutant,
    lambda source, one: {
        "container": source.choice(("rebound", "rebound", "mixed", "other")),
        "tree": source.choice(("list", "dict", "nested", "deep")),
        "in_place": False,
    },
    lambda source, one: {
        "in_place": True,
        "tree": source.choice(("list", "dict", "deep")),
        "leaves": (Leaf(source.choice(PLAIN), ()), *one.leaves[1:]),
        "manners": ("scalar", *one.manners[1:]),
    },
    lambda source, one: {"starts": (source.choice(STARTS_ODD), *one.starts[1:])},
    lambda source, one: {"leaves": tuple(_leaf(source, tuple(DTYPES)) for _ in one.leaves)},
    lambda source, one: {"leaves": tuple(_leaf(source, tuple(DTYPES)) for _ in one.leaves)},
    lambda source, one: {"idle": source.choice((1, 2, 3))},
    lambda source, one: {"turns": True, "tree": source.choice(("dict", "nested", "deep"))},
    lambda source, one: {"keeps": source.choice(("copy", "given"))},
    lambda source, one: {"tape": source.choice(TAPES_ODD)},
    lambda source, one: {
        "tape": source.choice(TAPES_ODD),
        "in_place": True,
        "leaves": (Leaf("f8", (3,)),) * len(one.leaves),
    },
    lambda source, one: {"begin": source.choice(BEGINS[1:])},
    lambda source, one: {"begin": source.choice(BEGINS[1:]), "adjoint": "in place"},
    lambda source, one: {"adjoint": "of the tape"},
    lambda source, one: {"none_at": source.randrange(one.n)},
    lambda source, one: {"costs": source.choice(COSTS_ODD)},
    lambda source, one: {"costs": source.choice(COSTS_ODD), "tape": "arrays", "tape_factor": 6.0},
    lambda source, one: {"tiers": (source.choice(TIERS), source.choice(TIERS))},
    lambda source, one: {"until": True},
)


def _settled(source: random.Random, one: Case) -> Case:
    """Return the case without what does not go together."""
    changes: dict[str, Any] = {}
    count = 1 if one.tree == "array" else len(one.leaves)
    changes["tree"] = tree = "array" if count == 1 and one.tree == "array" else one.tree
    usual = IN_PLACE if one.in_place else FUNCTIONAL
    odd = IN_PLACE_ODD if one.in_place else FUNCTIONAL_ODD
    changes["manners"] = tuple(
        manner if manner in usual + odd else usual[0] for manner in one.manners[:count]
    )
    if not one.in_place and tree in ("array", "tuple") and one.container != "new":
        changes["container"] = "new"
    if one.in_place and one.container in ("rebound", "mixed"):
        changes["container"] = "new"
    front = one.front
    if one.in_place and front == "plain":
        front = "adapter"
    if one.block or one.one_tape:
        front = "own" if one.one_tape else "adapter" if front == "plain" else front
    changes["front"] = front
    tape = one.tape
    if tape not in ("", "arrays", "nested", "none", "number") and not one.in_place:
        shared = {"rotating", "borrowed", "lent view", "writes input"} & set(changes["manners"])
        tape = "arrays" if shared else tape  # the next step would overwrite it: the user's fault
    if one.one_tape and tape not in ("arrays", "none"):
        tape = "arrays"
    written = {"rotating", "borrowed", "lent view"} & set(changes["manners"]) and not one.in_place
    if one.adjoint == "of the tape" and (one.one_tape or written):
        changes["adjoint"] = "digest"  # the operators themselves overwrite that tape
    changes["keeps"] = "copy" if written and one.keeps == "given" else one.keeps
    if one.block and one.tape in TAPES_ODD and one.in_place and one.front == "own":
        tape = "arrays"
    changes["tape"] = tape
    if one.play in ("durable", "pyrevolve"):  # the next process has none of it
        changes["keeps"] = ""
    if one.play == "durable":
        changes |= {"tiers": (), "until": False}
        if one.adjoint == "integer":
            changes["adjoint"] = "digest"
    if one.play == "call":
        changes |= {"until": False, "block": 0, "front": "plain", "in_place": False}
        changes |= {"one_tape": False, "sweeps": 1}
        changes["manners"] = tuple(
            manner if manner in FUNCTIONAL + FUNCTIONAL_ODD else "new" for manner in one.manners
        )
        if one.in_place:
            changes["container"] = "new"
            changes["tape"] = "arrays" if tape else ""
    if one.play in ("threads", "turns", "nested", "durable", "ctrl-c"):
        changes["costs"] = "right" if one.costs == "measured" else one.costs
    if one.until and one.block:
        changes["n"] = -(-one.n // one.block) * one.block  # blocks are full there
    if one.play == "store" and not one.tiers:
        changes["tiers"] = ("memory:?buffers=0",)
    if one.until and "until" not in changes:
        changes["planner"] = "auto"
        changes["mutation"] = ("", 0.0)
    if not one.tiers and "tiers" not in changes and one.costs in ("no tier",):
        changes["costs"] = "right"
    if one.costs == "states are tapes" and tape:
        changes["costs"] = "tapes are states"
    elif one.costs in ("tapes are states", "small tapes", "large tapes") and not tape:
        changes["costs"] = "states are tapes"
    if one.costs == "kept tapes" and not one.one_tape:
        changes["costs"] = "right"
    return replace(one, **changes)


def simpler(one: Case) -> Iterator[Case]:
    """Yield cases that are simpler in one thing each."""
    plain = Case(one.seed)
    for n in sorted({1, 2, 3, one.n // 2, one.n - 1}):
        if 0 < n < one.n and not (one.until and one.block and n % one.block):
            yield replace(one, n=n)
    for field in fields(one)[1:]:
        name, value = field.name, getattr(one, field.name)
        if name == "block" and one.until:
            continue
        if name in ("n", "leaves", "starts", "manners", "tree", "fault", "fault_at", "revolver"):
            continue
        if value != getattr(plain, name) and name != "in_place":
            yield replace(one, **{name: getattr(plain, name)})
    if len(one.leaves) > 2:
        for k in range(len(one.leaves)):
            yield replace(
                one,
                **{
                    name: getattr(one, name)[:k] + getattr(one, name)[k + 1 :]
                    for name in ("leaves", "starts", "manners")
                },
            )
    usual = "overwrite" if one.in_place else "new"
    for k in range(len(one.leaves)):
        for name, value in (("leaves", Leaf("f8", (3,))), ("starts", "plain"), ("manners", usual)):
            whole = getattr(one, name)
            if whole[k] != value:
                yield replace(one, **{name: (*whole[:k], value, *whole[k + 1 :])})
