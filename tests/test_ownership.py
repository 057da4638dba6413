"""Who owns what: states, tapes and adjoints stay as they were, or the run says what is wrong.

The oracle, `chains.kept`, keeps deep copies of every state and tape.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
from chains import digest as crc
from chains import kept
from fuzzing.contents import Leaf, lent
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage.errors import StateError
from multistage.execute.executor import Executor
from multistage.model.blocks import Blocks
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.base import store_all_schedule
from multistage.planners.single.revolve import revolve_schedule
from multistage.reversal import Reversal
from multistage.states import sharing

N = 17
COSTS = Costs(1.0, 2.0, state_bytes=128, tiers=(Tier("memory", 1.5, 1.5),))


def told(tree: Any, adjoint: Any, step: int) -> Any:
    """Return a digest of all that an adjoint step was given, as an array."""
    return np.asarray(crc(tree, int(adjoint), step))


def oracle(chain: Any, state: Any, adjoint: Any, n: int = N) -> Any:
    return kept(chain, state, adjoint, n)[1]


def reversed_by(chain: Any, state: Any, adjoint: Any, n: int = N, slots: int = 3) -> Any:
    """Return the adjoint of a Revolve schedule; without slots, of one that keeps every tape."""
    executor: Executor[Any, Any] = Executor(chain, ())
    executor.forward(revolve_schedule(slots, n) if slots else store_all_schedule(n), state)
    return executor.reverse(adjoint)


def everywhere(
    chain: Callable[[], Any], start: Callable[[], Any], tmp_path: Path, *, measured: bool = False
) -> None:
    """Compare with the oracle: in fast slots, through a tier, durably."""
    expected = oracle(chain(), start(), np.asarray(1))
    assert reversed_by(chain(), start(), np.asarray(1)) == expected
    for options in (
        {"tiers": "memory:", "planner": "streaming", "costs": COSTS},
        {"tiers": "memory:", "planner": "interval", "costs": COSTS, "checked": True},
        {"durable": tmp_path / "run", "costs": COSTS},
        *([{}] if measured else []),  # steps are called before the sweep
    ):
        with Reversal(chain(), n_steps=N, memory="3 slots", **options) as run:
            run.forward(start())
            assert run.reverse(np.asarray(1)) == expected, options


# ------------------------------------------------------------------- containers

Point = namedtuple("Point", "x v")


class Pair:
    def __init__(self, x: Any, v: Any, label: object = "pair") -> None:
        self.x, self.v, self.label = x, v, label


NODES = "multistage-tests"
optree.register_pytree_node(
    Pair,
    lambda p: ((p.x, p.v), p.label, ("x", "v")),
    lambda label, children: Pair(*children, label),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def _both() -> tuple[Any, Any]:
    return np.linspace(0, 1, 4), np.linspace(1, 2, 4)


def _items(state: Any, i: int) -> Any:
    x, v = ("x", "v") if isinstance(state, dict) else (0, 1)
    state[x] = np.sin(state[x] + i)
    state[v] = state[v] * 0.5 + state[x]
    return state


def _nested(state: Any, i: int) -> Any:
    state["inner"][0] = np.cos(state["inner"][0]) + state["pair"].x
    state["pair"] = Point(state["inner"][0] / (i + 1), state["pair"].v)
    return state


def _attributes(state: Any, i: int) -> Any:
    state.x = np.sin(state.x + state.v)
    state.v = state.v * 0.5 + i
    return state


CONTAINERS: dict[str, tuple[Callable[[Any, int], Any], Callable[[], Any]]] = {
    "dict": (_items, lambda: dict(zip("xv", _both(), strict=True))),
    "dict in another order": (_items, lambda: dict(zip("vx", _both(), strict=True))),
    "list": (_items, lambda: list(_both())),
    "ordered": (_items, lambda: OrderedDict(zip("xv", _both(), strict=True))),
    "defaultdict": (_items, lambda: defaultdict(list, zip("xv", _both(), strict=True))),
    "deque": (_items, lambda: deque(_both(), maxlen=2)),
    "nested": (_nested, lambda: {"inner": [_both()[0]], "pair": Point(*_both())}),
    "registered": (_attributes, lambda: Pair(*_both())),
    "list of one": (lambda s, i: _items([*s, s[0]], i)[:1], lambda: [_both()[0]]),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_may_rebind_inside_its_containers(in_place: bool, name: str, tmp_path: Path) -> None:
    step, start = CONTAINERS[name]

    def forward(state: Any, first: int, stop: int) -> None:
        for i in range(first, stop):
            step(state, i)

    def chain() -> Any:
        return InPlaceChain(forward, told) if in_place else FunctionChain(step, told)

    if in_place and name == "list of one":
        return
    everywhere(chain, start, tmp_path, measured=name in ("dict", "nested", "registered"))
    if not in_place:
        mine = start()
        before = optree.tree_leaves(mine)
        reversed_by(chain(), mine, 1)
        assert all(map(lambda one, other: one is other, optree.tree_leaves(mine), before))
        assert type(mine) is type(start()) and all(leaf.flags.writeable for leaf in before)


def test_metadata_that_can_change_are_refused() -> None:
    chain = FunctionChain(_attributes, told)
    with pytest.raises(StateError, match=r"pytree node Pair has metadata that can change"):
        reversed_by(chain, {"p": [Pair(*_both(), label=[0])]}, 1)
    assert reversed_by(chain, Pair(*_both(), label=(0,)), 1) == oracle(chain, Pair(*_both()), 1)


# --------------------------------------------------------------------- scalars


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_scalar_stays_a_scalar(dtype: Any, tmp_path: Path) -> None:
    """`x**3` of a scalar and of a 0-d array differ in the last bit."""

    def step(x: Any, i: int) -> Any:
        return dtype(abs(x) ** 3 * dtype(0.9) + dtype(0.1 + i / 99))

    def adjoint(x: Any, a: Any, i: int) -> Any:
        return told(np.asarray(x**3), a, i)

    everywhere(lambda: FunctionChain(step, adjoint), lambda: np.array(0.73, dtype), tmp_path)


def test_scalars_within_a_tree(tmp_path: Path) -> None:
    def step(state: Any, i: int) -> Any:
        t = abs(state["t"]) ** 3 + 0.3
        return {
            "x": np.sin(state["x"] + t),
            "t": t if i % 3 else np.asarray(t),
            "k": state["k"] + 1,
        }

    def start() -> Any:
        return {"x": _both()[0], "t": np.array(0.37), "k": np.array(0)}

    everywhere(lambda: FunctionChain(step, told), start, tmp_path)

    def forward(state: Any, first: int, stop: int) -> None:
        for i in range(first, stop):
            state.update(step(state, i))

    everywhere(lambda: InPlaceChain(forward, told), start, tmp_path)


def test_structured_scalars_are_refused() -> None:
    cell = np.zeros(1, [("a", "f8")])
    with pytest.raises(StateError, match="is void; every leaf must be a plain"):
        Executor(FunctionChain(lambda x, i: x, told), ()).forward(revolve_schedule(1, 2), cell[0])


# ------------------------------------------------------------- borrowed memory


class Rotating:
    """An operator that returns its two buffers in turn, as arrays without a base."""

    def __init__(self, lend: Callable[[Any, int], Any]) -> None:
        self.memory, self.lend = np.zeros(8), lend

    def step(self, x: Any, i: int) -> Any:
        out = self.lend(self.memory, 4 * (i % 2))
        out[...] = np.sin(x + i)
        return out


FOUR = Leaf("f8", (4,))
LENT: dict[str, Callable[[Any, int], Any]] = {
    "without a base": lambda memory, k: lent(memory.ctypes.data + 8 * k, FOUR),
    "a view": lambda memory, k: memory[k : k + 4],
    "a buffer": lambda memory, k: np.frombuffer(memory, count=4, offset=8 * k),
    "by address": lambda memory, k: np.ctypeslib.as_array(
        ctypes.cast(memory.ctypes.data + 8 * k, ctypes.POINTER(ctypes.c_double)), (4,)
    ),
}


@pytest.mark.parametrize("how", LENT)
def test_arrays_that_borrow_memory_are_copied(how: str, tmp_path: Path) -> None:
    def chain() -> Any:
        return FunctionChain(Rotating(LENT[how]).step, told)

    def within() -> Any:
        step = Rotating(LENT[how]).step
        return FunctionChain(lambda s, i: {"x": [step(s["x"][0], i)]}, told)

    everywhere(chain, lambda: np.linspace(0, 1, 4), tmp_path)
    everywhere(within, lambda: {"x": [np.linspace(0, 1, 4)]}, tmp_path)
    everywhere(lambda: Blocks(chain(), 3), lambda: np.linspace(0, 1, 4), tmp_path)


def test_a_state_0_that_borrows_memory_is_copied() -> None:
    memory = np.linspace(0, 1, 4)
    executor: Executor[Any, Any] = Executor(FunctionChain(lambda x, i: np.sin(x), told), ())
    expected = oracle(FunctionChain(lambda x, i: np.sin(x), told), memory, 1)
    executor.forward(revolve_schedule(2, N), lent(memory.ctypes.data, FOUR))
    memory[...] = np.nan
    assert executor.reverse(1) == expected


# -------------------------------------------------- what an in-place step may do


class Solver:
    """Knows an array of its state by another name, and has arrays that must not be written to."""

    def __init__(self) -> None:
        self.cache: Any = 0.0
        self.constant, self.table = np.full(3, 0.25), np.linspace(0, 1, 60).reshape(20, 3)

    def caching(self, array: Any) -> Any:
        self.cache = array
        return array


Operation = Callable[[Any, int, Solver], object]
EXACT: dict[str, Operation] = {
    "in place": lambda s, i, o: np.add(s["a"] * 0.9, np.sin(s["b"]) + i, out=s["a"]),
    "new": lambda s, i, o: s.update(a=np.sin(s["a"] + s["b"])),
    "swap": lambda s, i, o: s.update(a=s["b"], b=s["a"]),
    "scalar": lambda s, i, o: s.update(t=abs(np.sin(s["t"])) ** 3 + 0.1),
    "no scalar": lambda s, i, o: s.update(t=np.asarray(s["t"] * 2)),
    "scalar read": lambda s, i, o: s.update(t=s["t"] + 0.1, b=s["b"] + s["t"]),
    "rows": lambda s, i, o: s.update(
        zip("ab", np.stack([s["b"] + 1, np.cos(s["a"])]), strict=True)
    ),
    "turned": lambda s, i, o: s.update(m=np.asfortranarray(s["m"] * 0.5 + s["t"])),
    "below": lambda s, i, o: s["l"].__setitem__(1, (s["l"][0] * 2, s["l"][1][0] + 1)),
    "read": lambda s, i, o: s.update(b=s["b"] + s["l"][1][0] + s["m"].sum() + o.cache),
}
REFUSED: dict[str, Operation] = {
    "constant": lambda s, i, o: s.update(a=o.constant),
    "row of a table": lambda s, i, o: s.update(a=o.table[i]),
    "alias": lambda s, i, o: s.update(a=s["b"]),
    "backwards": lambda s, i, o: s.update(a=s["a"][::-1]),
    "cached": lambda s, i, o: s.update(a=o.caching(s["a"] + 1)),
    "other dtype": lambda s, i, o: s.update(a=s["a"].astype(np.float32)),
    "other shape": lambda s, i, o: s.update(b=np.append(s["b"], 1.0)),
    "number": lambda s, i, o: s.update(t=float(s["t"]) + 1),
    "other tree": lambda s, i, o: s.update(new=s["a"]),
}
OPERATIONS = EXACT | REFUSED


def _operating(steps: list[list[str]]) -> InPlaceChain[Any, int]:
    solver = Solver()

    def forward(state: Any, first: int, stop: int) -> None:
        for i in range(first, stop):
            for name in steps[i % len(steps)]:
                OPERATIONS[name](state, i, solver)

    return InPlaceChain(forward, told)


def _operated() -> Any:
    x, v = _both()
    return {
        "a": x[:3].copy(),
        "b": v[1:].copy(),
        "t": np.array(0.37),
        "m": np.arange(6.0).reshape(2, 3) / 7,
        "l": [np.ones(3), (np.zeros(3), np.full(3, 0.1))],
    }


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([EXACT, OPERATIONS]).flatmap(
        lambda some: st.lists(
            st.lists(st.sampled_from(sorted(some)), max_size=3), min_size=1, max_size=20
        )
    ),
    st.integers(1, 5),
)
def test_the_exact_gradient_or_an_error(steps: list[list[str]], slots: int) -> None:
    def tiered() -> Any:
        memory = f"{slots + 1} slots"
        with Reversal(
            _operating(steps), n_steps=N, memory=memory, tiers="memory:", costs=COSTS
        ) as run:
            run.forward(_operated())
            return run.reverse(1)

    for run in (
        lambda: reversed_by(_operating(steps), _operated(), 1, N, slots),
        lambda: reversed_by(Blocks(_operating(steps), 3, N), _operated(), 1, 6, slots),
        tiered,
    ):
        try:
            found = run()
        except ValueError:  # a StateError, or the steps' own
            assert any(name in REFUSED for names in steps for name in names)
            continue
        plain = _operating(steps)
        expected = oracle(plain, _operated(), 1)
        if oracle(plain, _operated(), 1) == expected:  # or the steps overwrite their constants
            assert found == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_leaf_is_refused_at_the_first_step_that_returns_it(name: str) -> None:
    chain = _operating([["in place"]] * 5 + [[name]] + [["in place"]] * 12)
    expected = r"state 6\b.*leaf \['\w'\]|state 6\b.*structure"
    with pytest.raises(StateError, match=expected):
        Executor(chain, ()).forward(store_all_schedule(N), _operated())


def test_another_state_than_the_one_given_is_refused() -> None:
    class Chain(InPlaceChain[Any, Any]):
        def advance(self, state: Any, start: int, stop: int) -> Any:
            return state + (stop - start)

    chain = Chain(lambda s, i, j: None, told)
    with pytest.raises(StateError, match="must return the state it was given"):
        reversed_by(chain, np.zeros(3), 1)


def test_leaves_that_share_memory_stay_where_they_are() -> None:
    def forward(state: Any, first: int, stop: int) -> None:
        for i in range(first, stop):
            state["whole"] *= 0.9
            state["part"] += i

    def start() -> Any:
        whole = np.linspace(0, 1, 6)
        return {"whole": whole, "part": whole[2:4], "same": whole}

    executor: Executor[Any, Any] = Executor(InPlaceChain(forward, told), ())
    state, states = start(), []  # the oracle's copies do not share memory
    for i in range(N):
        states.append(copy.deepcopy(state))
        forward(state, i, i + 1)
    expected = 1
    for i in reversed(range(N)):
        expected = told(states[i], expected, i)
    executor.forward(revolve_schedule(3, N), start())
    assert executor.reverse(1) == expected

    def exchanged(state: Any, first: int, stop: int) -> None:
        state["part"] = state["part"] + 1

    with pytest.raises(StateError, match="share memory with one another"):
        reversed_by(InPlaceChain(exchanged, told), start(), 1)


def test_a_leaf_created_at_each_access_is_refused() -> None:
    class Fleeting:
        def __init__(self, x: float) -> None:
            self.x = x

    optree.register_pytree_node(
        Fleeting,
        lambda f: ((np.asarray(f.x),), None),
        lambda _, children: Fleeting(float(children[0])),
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )

    def forward(state: Any, first: int, stop: int) -> None:
        state.x += stop - first

    with pytest.raises(StateError, match="another array each time the state is looked at"):
        reversed_by(InPlaceChain(forward, told), Fleeting(1.0), 1)


def test_a_read_only_leaf_may_stay_as_it_is() -> None:
    def forward(state: Any, first: int, stop: int) -> None:
        for _ in range(first, stop):
            state["x"] *= state["c"]

    def start(writeable: bool = False) -> Any:
        c = np.full(4, 0.9)
        c.flags.writeable = writeable
        return {"x": np.linspace(1, 2, 4), "c": c}

    chain = InPlaceChain(forward, told)
    assert reversed_by(chain, start(), 1) == oracle(chain, start(True), 1)

    def spoiled(state: Any, first: int, stop: int) -> None:
        state["c"].flags.writeable = True
        state["c"] *= 0.5
        state["c"].flags.writeable = False

    with pytest.raises(StateError, match=r"leaf \['c'\] is read-only and has changed"):
        reversed_by(InPlaceChain(spoiled, told), start(), 1)


# ----------------------------------------------------------------------- tapes


@dataclass
class Record:
    x: Any
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class Frozen:
    parts: tuple[Any, ...]


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


def _grow(x: Any, start: int, stop: int) -> None:
    for i in range(start, stop):
        x *= 0.9
        x += np.sin(x) + i


def _taping(wrap: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    def tape(x: Any, i: int) -> Any:
        _grow(x, i, i + 1)
        return wrap(x)

    return tape


def _read(tape: Any, adjoint: int, i: int) -> int:
    match tape:
        case Record():
            tape = tape.x * tape.scale
        case Frozen():
            tape = tape.parts[0] * 2
    return told(np.asarray(tape), adjoint, i)


@pytest.mark.parametrize("wrap", [Record, lambda x: Record(x[1:3]), lambda x: Frozen((x, x[1:]))])
@pytest.mark.parametrize("n", [1, 6])
def test_dataclasses_are_copied_where_they_share_memory(wrap: Any, n: int) -> None:
    chain = InPlaceChain(_grow, _read, _taping(wrap))
    assert reversed_by(chain, np.linspace(0, 1, 4), 1, n, 0) == oracle(
        chain, np.linspace(0, 1, 4), 1, n
    )


def _pointer(x: Any) -> Any:
    return x.ctypes.data_as(ctypes.POINTER(ctypes.c_double))


def _generator(x: Any) -> Any:
    yield x


class Vector:
    """What a tensor of another package shows of itself."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = x.__array_interface__


OPAQUE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "Plain": (Plain, "shares memory"),
    "Slotted": (Slotted, "shares memory"),
    "function": (lambda x: lambda a: a * x, "shares memory"),
    "partial": (lambda x: functools.partial(np.multiply, x), "shares memory"),
    "method": (lambda x: Plain(x).__eq__, "shares memory"),
    "memoryview": (lambda x: memoryview(x), "shares memory"),
    "set": (lambda x: {Slotted(x[1:])}, "shares memory"),
    "generator": (_generator, "shares memory"),
    "LP_c_double": (_pointer, "shares memory"),
    "nditer": (lambda x: np.nditer(x), "unseen"),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_tapes_that_cannot_be_copied_are_refused(name: str) -> None:
    wrap, why = OPAQUE[name]
    for tape in (wrap, lambda x: (np.zeros(2), [wrap(x)])):
        chain = InPlaceChain(_grow, _read, _taping(tape))
        for made in (chain, Blocks(chain, 2, 6)):
            with pytest.raises(StateError, match=f"the tape of step 0 holds a .*{name}.* {why}"):
                reversed_by(made, np.linspace(0, 1, 4), 1, 3, 0)


def test_opaque_tapes_of_their_own_are_held() -> None:
    def copied(x: Any) -> Any:
        x = x.copy()
        return Plain(x), Slotted(x), memoryview(x), lambda a: a * x, np.random.default_rng(0)

    def read(tape: Any, adjoint: int, i: int) -> int:
        return told((tape[0].x, np.asarray(tape[2]), tape[3](2.0)), adjoint, i)

    chain = InPlaceChain(_grow, read, _taping(copied))
    state = np.linspace(0, 1, 4)
    reversed_by(chain, state, 1, 5, 0)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_operator_that_overwrites_a_tape_it_returned_is_seen(in_place: bool) -> None:
    work = np.zeros(4)

    def tape(x: Any, i: int) -> Any:
        np.cos(x, out=work)
        if in_place:
            _grow(x, i, i + 1)
            return [work]
        return np.sin(x), [work]

    chain: Any = (
        InPlaceChain(_grow, _read, tape)
        if in_place
        else FunctionChain(lambda x, i: np.sin(x), _read, tape)
    )
    for made in (chain, Blocks(chain, 3, 6)):
        with pytest.raises(StateError, match="to a tape that is held"):
            reversed_by(made, np.linspace(0, 1, 4), 1, 2, 0)
        assert work.flags.writeable


@pytest.mark.parametrize("in_place", [False, True])
def test_views_in_tapes_are_copied_unless_they_are_the_states(in_place: bool) -> None:
    work, kept = np.zeros((2, 4)), []

    def tape(x: Any, i: int) -> Any:
        np.cos(x, out=work[i % 2])
        fresh = np.tanh(x).reshape(2, 2)
        after = np.sin(x + i)
        if in_place:
            x[...] = after
        made = [work[i % 2], x[1:], after[::2], fresh]
        kept.append([made[0], *made[2:]] if in_place else list(made))
        return made if in_place else (after, made)

    def read(tape: Any, adjoint: int, i: int) -> int:
        return told(optree.tree_map(np.asarray, tape), adjoint, i)

    def step(x: Any, i: int) -> Any:
        return np.sin(x + i)

    def forward(x: Any, first: int, stop: int) -> None:
        raise AssertionError("taped")

    chain: Any = InPlaceChain(forward, read, tape) if in_place else FunctionChain(step, read, tape)
    expected = oracle(chain, np.linspace(0, 1, 4), 1, 7)
    assert reversed_by(chain, np.linspace(0, 1, 4), 1, 7, 0) == expected


def test_a_tape_container_that_is_used_again() -> None:
    tapes: list[Any] = [None, None]

    def tape(x: Any, i: int) -> Any:
        tapes[0], tapes[1] = np.cos(x), np.sin(x)
        return tapes[1], tapes

    chain = FunctionChain(lambda x, i: np.sin(x), told, tape)
    assert reversed_by(chain, np.linspace(0, 1, 4), 1, 7, 0) == oracle(
        chain, np.linspace(0, 1, 4), 1, 7
    )


def test_an_adjoint_step_may_overwrite_its_tape() -> None:
    def reverse(tape: Any, adjoint: Any, i: int) -> Any:
        tape *= adjoint
        return tape

    chain = FunctionChain(lambda x, i: np.sin(x), reverse, lambda x, i: (np.sin(x), np.cos(x)))
    start, seed = np.linspace(0, 1, 4), np.ones(4)
    assert np.array_equal(reversed_by(chain, start, seed, 5, 0), oracle(chain, start, seed, 5))
    assert seed.tolist() == [1] * 4


def test_a_view_is_writeable_again_when_its_owner_is() -> None:
    """NumPy makes no view of a read-only array writeable: one given back first waits."""
    whole = np.zeros(4)
    views = [whole[:2], whole[1:]]
    for one_by_one in (True, False):
        frozen = sharing.Frozen()
        for array in (whole, *views):
            frozen.hold(array)
        assert not any(array.flags.writeable for array in (whole, *views))
        if one_by_one:
            for array in (*views, whole):
                frozen.free(array)
        else:
            frozen.free_all()
        assert all(array.flags.writeable for array in (whole, *views))
    other = sharing.Frozen()  # of another run, which continues
    view = whole[2:]
    frozen.hold(view)
    other.hold(whole)
    frozen.free(view)
    assert not view.flags.writeable


# -------------------------------------------------------------------- adjoints


def test_an_adjoint_in_a_dataclass_is_copied_and_in_an_object_refused() -> None:
    def reverse(tape: Any, adjoint: Any, i: int) -> Any:
        adjoint.x *= np.cos(tape)
        return adjoint

    chain = InPlaceChain(_grow, reverse)
    last = np.linspace(0, 1, 4)
    _grow(last, 0, N)
    expected = oracle(chain, np.linspace(0, 1, 4), Record(last.copy())).x
    found = reversed_by(chain, live := np.linspace(0, 1, 4), Record(live))
    assert np.array_equal(found.x, expected)
    with pytest.raises(StateError, match=r"the adjoint holds a .*Plain that shares memory"):
        reversed_by(chain, live := np.linspace(0, 1, 4), Plain(live))
    assert np.array_equal(reversed_by(chain, live, Plain(last.copy())).x.shape, (4,))


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", ["state", "tape", "tape in place"])
def test_an_adjoint_step_may_return_what_operators_make_again(
    kind: str, blocks: bool, slots: int
) -> None:
    """What it returns by reference lies in buffers of the operators."""
    buffers = np.zeros((3, 4))

    def step(x: Any, i: int) -> Any:
        return np.sin(x + i, out=buffers[i % 2] if kind == "state" else None)

    def forward(x: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            np.sin(x + i, out=x)

    def tape(x: Any, i: int) -> Any:
        buffers[2] = x
        if kind == "tape":
            return np.sin(x + i), buffers[2]
        forward(x, i, i + 1)
        return buffers[2]

    def reverse(x: Any, adjoint: Any, i: int) -> Any:
        return np.cos(x + i) * adjoint[0], x, adjoint[1] * i + adjoint[2]

    chain: Any = FunctionChain(step, reverse)
    if kind == "tape":
        chain = FunctionChain(step, reverse, tape, one_tape=True)
    elif kind == "tape in place":
        chain = InPlaceChain(forward, reverse, tape, one_tape=True)
    start, adjoint = np.linspace(0.1, 1, 4), (np.ones(4), np.zeros(4), np.zeros(4))
    plain = FunctionChain(lambda x, i: np.sin(x + i), reverse)
    expected = oracle(plain, start.copy(), copy.deepcopy(adjoint))
    n = N
    if blocks:
        chain = Blocks(chain, 2, N)
        n = chain.n_blocks
    found = reversed_by(chain, start.copy(), copy.deepcopy(adjoint), n, slots)
    assert [a.tolist() for a in found] == [a.tolist() for a in expected]


# -------------------------------------------------------------------- one tape


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("planner", ["revolve", "streaming"])
def test_a_tape_in_a_workspace_may_be_the_adjoint(planner: str, tree: bool) -> None:
    """The last step's tape is made in the forward sweep; the next one overwrote it: 6 % off."""
    work = np.empty(3)

    def tape_step(x: Any, i: int) -> Any:
        work[...] = 0.1 * i + x
        return x * 1.01, {"t": work} if tree else work

    def adjoint_step(tape: Any, adjoint: Any, i: int) -> Any:
        tape = tape["t"] if tree else tape
        tape *= adjoint
        return tape

    states = [np.ones(3)]
    for _ in range(9):
        states.append(states[-1] * 1.01)
    expected = np.ones(3)
    for i in reversed(range(9)):
        expected = (0.1 * i + states[i]) * expected
    costs = Costs(1.0, 1.0, 1.0, state_bytes=24, tape_bytes=24)

    def step(x: Any, i: int) -> Any:
        return tape_step(x, i)[0]

    with Reversal(
        step, adjoint_step, 9, tape_step=tape_step, memory="3 slots", planner=planner, costs=costs
    ) as run:
        run.forward(np.ones(3))
        assert np.array_equal(run.reverse(np.ones(3)), expected)
