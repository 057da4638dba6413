"""Values belong to the keys of dicts, and the order of the keys is part of a state.

The operators read values in the order of their keys: an order that is not restored, or
values under the keys of others, show in the gradient.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import digest, kept

from multistage.durable.records import OrderedLayout
from multistage.errors import StateError
from multistage.model.blocks import Blocks
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.reversal import Reversal
from multistage.states.layout import Reordered

N = 17
COSTS = Costs(1.0, 2.0, state_bytes=256, tiers=(Tier("memory", 1.5, 1.5),))
STAGE = Stage("", 1.0, 2.0, output_bytes=160, tape_bytes=160)
TREES: dict[str, Callable[[Any], Any]] = {
    "dict": lambda d: d,
    "defaultdict": lambda d: defaultdict(list, d),
    "ordered": OrderedDict,
    "around an ordered one": lambda d: {key: OrderedDict(y=d[key], x=np.ones(1)) for key in d},
    "within a dict": lambda d: {"z": d, "a": np.ones(2)},
    "within a list": lambda d: [np.ones(2), (d, np.zeros(1))],
    "around one": lambda d: {key: {"y": d[key], "x": np.ones(1)} for key in d},
}


def started(tree: str, names: str = "qpr") -> Any:
    values = {name: np.linspace(k, k + 1, 4) for k, name in enumerate("pqr")}
    return TREES[tree]({name: values[name] for name in names})


def dict_of(state: Any) -> Any:
    """Return the dict whose keys change places."""
    if isinstance(state, list):
        return state[1][0]
    return state.get("z", state)


def arrays_of(state: Any) -> list[Any]:
    """Return the arrays of a state in the order of its keys."""
    if isinstance(state, np.ndarray):
        return [state]
    parts = state.values() if isinstance(state, dict) else state
    return [array for part in parts for array in arrays_of(part)]


def told(state: Any, adjoint: Any, i: int) -> Any:
    """Return a digest of the arrays in the order of the keys, and of the keys."""
    return np.asarray(digest([names_in(state), *arrays_of(state)], int(adjoint), i))


def names_in(state: Any) -> Any:
    """Return the keys in a state as they are ordered, as an array."""
    found = dict_of(state)
    names = [*found, *(name for part in found.values() if isinstance(part, dict) for name in part)]
    return np.frombuffer(repr(names).encode(), np.uint8)


def exchanged(state: Any, i: int) -> None:
    """Overwrite arrays by what depends on the order of the keys, then change that."""
    total = 0.0
    for k, array in enumerate(arrays_of(state)):
        total = 0.7 * total + (k + 1) * array.sum()
    for array in arrays_of(state):
        array *= 0.9
        array += np.sin(total + i)
    found = dict_of(state)
    for name in ("p", "q", "r")[: i % 4]:
        if (i + ord(name)) % 3:
            to_end(found, name)
        if isinstance(found[name], dict):
            to_end(found[name], "yx"[i % 2])


def to_end(found: Any, name: str) -> None:
    if isinstance(found, OrderedDict):
        found.move_to_end(name)
    else:
        found[name] = found.pop(name)


def forward(state: Any, start: int, stop: int) -> None:
    for i in range(start, stop):
        exchanged(state, i)


def step(state: Any, i: int) -> Any:
    state = renewed(state)
    exchanged(state, i)
    return state


def renewed(tree: Any) -> Any:
    """Return copies of arrays in the containers of a tree, which are the step's own."""
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            tree[key] = renewed(tree[key])
        return tree
    return tuple(map(renewed, tree)) if isinstance(tree, tuple) else tree.copy()


def chain_of(in_place: bool) -> Any:
    return InPlaceChain(forward, told) if in_place else FunctionChain(step, told)


def expected(state: Any, n: int = N) -> Any:
    return kept(chain_of(True), state, np.asarray(1), n)[1]


WAYS: dict[str, dict[str, Any]] = {
    "slots": {"costs": COSTS},
    "store-all": {"costs": COSTS, "memory": f"{N + 1} slots"},
    "measured": {},
    "streaming": {"costs": COSTS, "tiers": "memory:", "planner": "streaming"},
    "interval": {"costs": COSTS, "tiers": "memory:", "planner": "interval", "checked": True},
    "unequal": {"costs": StageCosts((STAGE,) * N, 160), "memory": 5 * 160},
    "unequal, streamed": {
        "costs": StageCosts((STAGE,) * N, 160),
        "memory": 5 * 160 + 65536,
        "tiers": "memory:?buffers=0",
    },
    "durable": {"costs": COSTS},
}


@pytest.mark.long(but=("streaming-*", "durable-dict-*"))
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_keys_is_restored(way: str, tree: str, in_place: bool, tmp_path: Path) -> None:
    if way == "measured" and tree != "within a dict":
        return
    options = {"memory": "3 slots", **WAYS[way]}
    if way == "durable":
        options["durable"] = tmp_path / "run"
    with Reversal(chain_of(in_place), n_steps=N, **options) as run:
        for names in ("qpr", "rqp"):
            run.forward(started(tree, names))
            assert run.reverse(np.asarray(1)) == expected(started(tree, names))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_within_blocks(tree: str, in_place: bool) -> None:
    blocks = Blocks(chain_of(in_place), 3, N)
    with Reversal(blocks, n_steps=blocks.n_blocks, memory="2 slots", costs=COSTS) as run:
        run.forward(started(tree))
        assert run.reverse(np.asarray(1)) == expected(started(tree))


@pytest.mark.parametrize("slots", [1, 99])
def test_keys_change_places_together_with_shapes(slots: int) -> None:
    """In place, each state is restored in its own order, not in that of state 0."""

    def forward(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            names, total = list(state), sum(k * a.sum() for k, a in enumerate(state.values(), 1))
            state.clear()
            state.update((name, np.full(i % 5 + 1, np.cos(total + i))) for name in names[::-1])

    stages = [Stage("", 1.0, 2.0, 16 * (i % 5 + 1), 16 * (i % 5 + 1), 0) for i in range(N)]
    chain, start = InPlaceChain(forward, told), {"b": np.ones(3), "a": np.ones(2)}
    _, wanted = kept(chain, {**start}, np.asarray(1), N)
    costs = StageCosts(tuple(stages), 40)
    with Reversal(chain, costs=costs, memory=f"{slots} slots") as run:
        run.forward(start)
        assert run.reverse(np.asarray(1)) == wanted


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("at", [3, 12])
def test_a_durable_run_is_resumed_with_the_keys_in_their_order(
    tree: str, in_place: bool, at: int, tmp_path: Path
) -> None:
    """The next process knows the order of the keys of state 0 only."""

    class Killed(BaseException):
        pass

    def killed(state: Any, adjoint: Any, i: int) -> Any:
        if i == at:
            raise Killed
        adjoint = told(state, adjoint["a"], i)
        return {"b": adjoint + i, "a": adjoint}

    def reverse(state: Any, adjoint: Any, i: int) -> Any:
        assert list(adjoint) == ["b", "a"]
        adjoint = told(state, adjoint["a"], i)
        return {"b": adjoint + i, "a": adjoint}

    first = told(started(tree), np.asarray(1), 0)
    given = {"a": np.ones_like(first), "b": np.zeros_like(first)}
    for adjoint_step in (killed, reverse):
        chain: Any = FunctionChain(step, adjoint_step)
        if in_place:
            chain = InPlaceChain(forward, adjoint_step)
        with Reversal(
            chain, n_steps=N, memory="2 slots", costs=COSTS,
            durable=tmp_path / "run", durable_every_s=0.0,
        ) as run:  # fmt: skip
            run.forward(started(tree))
            if adjoint_step is killed:
                with pytest.raises(Killed):
                    run.reverse(given)
            else:
                assert run.reverse(given)["a"] == expected(started(tree))


def test_records_keep_the_order_of_keys() -> None:
    state = {"b": {"y": np.ones(2), "x": np.zeros(3)}, "a": np.ones(1)}
    other = {"a": state["a"], "b": {"x": np.zeros(3), "y": np.ones(2)}}
    layout = OrderedLayout.of(state)
    arrays = layout.arrays(other)
    assert type(arrays) is Reordered and type(layout.arrays(state)) is list
    packed, _ = layout.pack(arrays)
    heir = OrderedLayout.of(state)
    made: Any = heir.state(heir.unpack(packed, None))
    assert [*made] == ["a", "b"] and [*made["b"]] == ["x", "y"]
    plain = layout.pack(layout.arrays(state))[0]
    assert [array.nbytes for array in plain] == [array.nbytes for array in packed]
    assert layout.digest(plain) != layout.digest(packed)
    assert [*heir.state(heir.unpack(plain, None))] == ["b", "a"]
    packed[-1][-1] = 9  # no place of a key
    assert heir.packing(packed[-1]) is None


class Name:
    """A key that cannot be sorted among others."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize("tiers", [None, "memory:"])
def test_keys_that_cannot_be_sorted_keep_their_order(tiers: str | None) -> None:
    """Values came under each other's keys."""
    one, two = Name("one"), Name("two")
    lent = np.zeros((2, 2, 3))

    def made(state: Any, i: int, turned: bool) -> Any:
        out = lent[i % 2]
        out[0], out[1] = np.sin(state[one] + state[two]), state[two] * 0.9 + i
        return {two: out[1], one: out[0]} if turned else {one: out[0], two: out[1]}

    def reverse(state: Any, adjoint: Any, i: int) -> Any:
        return np.asarray(digest([state[one], state[two]], int(adjoint), i))

    start = {one: np.linspace(0, 1, 3), two: np.ones(3)}
    states = [start]
    for i in range(N):
        states.append({key: array.copy() for key, array in made(states[-1], i, False).items()})
    adjoint = np.asarray(1)
    for i in reversed(range(N)):
        adjoint = reverse(states[i], adjoint, i)
    for turns in (False, True):
        with Reversal(
            FunctionChain(lambda s, i, t=turns: made(s, i, t and i > 5), reverse),
            n_steps=N, memory="3 slots", costs=COSTS, tiers=tiers,
        ) as run:  # fmt: skip
            if turns:
                with pytest.raises(StateError, match=r"state \d changed its structure"):
                    run.forward(dict(start))
            else:
                run.forward(dict(start))
                assert run.reverse(np.asarray(1)) == adjoint


def test_an_ordered_dict_made_in_another_order_is_another_structure() -> None:
    def turned(state: Any, i: int) -> Any:
        return OrderedDict(reversed(state.items()))

    run: Reversal[Any, Any] = Reversal(turned, told, 4, memory="2 slots", costs=COSTS)
    with run, pytest.raises(StateError, match="use a dict, whose order may change"):
        run.forward(OrderedDict(p=np.ones(4), q=np.zeros(4)))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("slots", [2, N + 1])
def test_tapes_and_adjoints_keep_the_order_of_an_ordered_dict(slots: int, in_place: bool) -> None:
    """After `move_to_end`, which optree does not see."""

    def turned(i: int, **parts: Any) -> Any:
        found = OrderedDict(parts)
        found.move_to_end([*parts][i % len(parts)])
        return found

    def tape(x: Any, i: int) -> Any:
        kept = {"t": turned(i, p=x.copy(), q=np.sin(x), r=x + i)}
        np.cos(x + i, out=x)
        return kept

    def functional(x: Any, i: int) -> Any:
        after = x.copy()
        kept = tape(after, i)
        return after, kept

    def reverse(tape: Any, adjoint: Any, i: int) -> Any:
        found = digest([np.array([*map(ord, adjoint)]), *adjoint.values()], 1, i)
        made = np.asarray(digest([names_in(tape["t"]), *arrays_of(tape["t"])], found, i))
        # Part of the tape itself: copied as that is released.
        return turned(int(made), a=made, b=tape["t"]["p"][1:], c=np.ones(1))

    def advance(x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            tape(x, i)

    start, first = np.linspace(0, 1, 4), turned(0, a=np.ones(1), b=np.ones(2))
    expected = kept(InPlaceChain(advance, reverse, tape), start, first, N)[1]
    chain: Any = FunctionChain(lambda x, i: np.cos(x + i), reverse, functional)
    if in_place:
        chain = InPlaceChain(advance, reverse, tape)
    costs = Costs(1.0, 2.0, 1.0, state_bytes=64, tape_bytes=192)
    with Reversal(chain, n_steps=N, memory=f"{slots} slots", costs=costs) as run:
        run.forward(start)
        found = run.reverse(first)
    assert [*found] == [*expected]
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
