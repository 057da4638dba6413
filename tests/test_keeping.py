"""Operators that keep what they were given: the exact gradient, or an error that names the rule.

The oracle, `chains.kept`, keeps deep copies of every state and tape.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from chains import digest, kept

from multistage.errors import StateError
from multistage.model.blocks import Blocks
from multistage.model.chain import FunctionChain, InPlaceChain
from multistage.model.costs import Costs
from multistage.reversal import Reversal

N = 9
COSTS = Costs(1.0, 2.0, state_bytes=64)
TAPED = Costs(1.0, 2.0, 1.0, state_bytes=64, tape_bytes=64)


def forward(x: Any, start: int, stop: int) -> None:
    for i in range(start, stop):
        np.sin(x + i, out=x)


def begun() -> Any:
    return np.linspace(0.1, 1, 4)  # a view, by the way


def told(x: Any, adjoint: Any, i: int) -> Any:
    return np.asarray(digest([x], int(adjoint), i))


def oracle(chain: Any, state: Any) -> Any:
    return kept(chain, state, np.asarray(1), N)[1]


def swept(chain: Any, state: Any, slots: int = 2, n: int = N, **options: Any) -> Any:
    costs = COSTS if chain.state_is_tape else TAPED
    with Reversal(chain, n_steps=n, memory=f"{slots} slots", costs=costs, **options) as run:
        run.forward(state)
        return run.reverse(np.asarray(1))


# ------------------------------------------------------------------- what is given


class Keeper:
    """Uses what it was given by the call before, of which it keeps a part."""

    def __init__(self, part: Callable[[Any], Any] = lambda x: x) -> None:
        self.part, self.kept = part, part(np.zeros(4))

    def reverse(self, x: Any, adjoint: Any, i: int) -> Any:
        before = np.asarray(self.kept() if callable(self.kept) else self.kept)
        self.kept = self.part(x)
        return np.asarray(digest([x, before], int(adjoint), i))

    def forward(self, x: Any, start: int, stop: int) -> None:
        forward(x, start, stop)
        self.kept = self.part(x)


PARTS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda x: x,
    "a view": lambda x: x[1:],
    "a memoryview": memoryview,
    "a closure": lambda x: lambda: x,
    "a part of its buffer": lambda x: x.base[:2] if x.base is not None else x[:2],
}


@pytest.mark.long(but=("3-*", "*-the array"))
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("slots", [1, 3, 20])
def test_an_adjoint_that_keeps_its_state_is_refused_in_place(slots: int, part: str) -> None:
    for kind in ("alone", "tiers", "blocks"):
        chain: Any = InPlaceChain(forward, Keeper(PARTS[part]).reverse)
        options: dict[str, Any] = {"tiers": "memory:"} if kind == "tiers" else {}
        if kind == "blocks":
            chain, options = Blocks(chain, 3, N), {"n": 3}
        with pytest.raises(StateError, match=r"adjoint of step \d kept a reference to the state"):
            swept(chain, begun(), slots, **options)


@pytest.mark.parametrize("container", ["dict", "list", "tuple", "nested"])
def test_an_adjoint_that_keeps_the_tree_is_refused(container: str) -> None:
    trees: dict[str, Callable[[Any], Any]] = {
        "dict": lambda x: {"x": x},
        "list": lambda x: [x],
        "tuple": lambda x: (x,),
        "nested": lambda x: {"a": (x, [np.ones(2)])},
    }
    kept: list[Any] = []

    def leaf(state: Any) -> Any:
        while not isinstance(state, np.ndarray):
            state = state[next(iter(state))] if isinstance(state, dict) else state[0]
        return state

    def reverse(state: Any, adjoint: Any, i: int) -> Any:
        kept.append(state["a"][1] if container == "nested" else state)
        return told(leaf(state), adjoint, i)

    chain = InPlaceChain(lambda s, i, j: forward(leaf(s), i, j), reverse)
    with pytest.raises(StateError, match="the adjoint of step 8 kept a reference"):
        swept(chain, trees[container](begun()))


def test_an_adjoint_that_keeps_a_container_it_put_into_its_state_is_refused() -> None:
    kept: list[Any] = [[np.ones(4)]]

    def reverse(state: Any, adjoint: Any, i: int) -> Any:
        state["l"] = [state["l"][0].copy()]
        kept.append(state["l"])
        return np.asarray(digest([state["l"][0], kept[-2][0]], int(adjoint), i))

    chain = InPlaceChain(lambda s, i, j: forward(s["l"][0], i, j), reverse)
    with pytest.raises(StateError, match="the adjoint of step 8 kept a reference"):
        swept(chain, {"l": [begun()]})


@pytest.mark.parametrize("checked", [False, True])
def test_operators_may_keep_scalars_and_empty_tuples_of_their_state(checked: bool) -> None:
    """Nothing overwrites these."""

    def chain() -> Any:
        kept: list[Any] = []

        def advance(s: Any, start: int, stop: int) -> None:
            for i in range(start, stop):
                forward(s["x"], i, i + 1)
                kept.append(s["t"])
                s["t"] = s["t"] + np.float64(0.5)

        def reverse(s: Any, adjoint: Any, i: int) -> Any:
            kept.extend((s["t"], s["none"]))
            return np.asarray(digest([s["x"], np.asarray(s["t"])], int(adjoint), i))

        return InPlaceChain(advance, reverse)

    def state() -> Any:
        return {"x": begun(), "t": np.float64(0), "none": ()}

    assert swept(chain(), state(), checked=checked) == oracle(chain(), state())


class Box:
    def __init__(self, x: Any) -> None:
        self.x = x


def test_an_adjoint_in_an_object_that_refers_to_the_state_is_refused() -> None:
    chain = InPlaceChain(forward, lambda x, adjoint, i: Box(x))
    with pytest.raises(StateError, match=r"kept a reference.*return arrays, or tuples, lists"):
        swept(chain, begun())


def test_an_adjoint_that_keeps_a_tape_in_the_live_arrays_is_refused() -> None:
    """A tape that is used at once is not copied."""

    def tape(x: Any, i: int) -> Any:
        forward(x, i, i + 1)
        return [x]

    def chain() -> Any:
        keeper = Keeper()
        return InPlaceChain(forward, lambda t, a, i: keeper.reverse(t[0], a, i), tape)

    assert swept(chain(), begun(), 20) == oracle(chain(), begun())  # all are held: copies
    with pytest.raises(StateError, match="kept a reference to the state"):
        swept(chain(), begun(), 2)


def test_a_checked_forward_step_that_keeps_its_state_is_refused_in_place() -> None:
    """With the same attribute set by both, none refers to the state any more than before."""
    keeper = Keeper()
    with pytest.raises(StateError, match="step 0 kept a reference to the state"):
        swept(InPlaceChain(keeper.forward, keeper.reverse), begun(), checked=True)


def test_operators_may_know_the_arrays_of_state_0() -> None:
    """As solvers do: the arrays that a sweep begins with are the ones that it overwrites."""

    class Solver:
        def __init__(self, x: Any) -> None:
            self.x = x

        def forward(self, x: Any, start: int, stop: int) -> None:
            forward(self.x, start, stop)

        def reverse(self, x: Any, adjoint: Any, i: int) -> Any:
            return told(self.x, adjoint, i)

    plain = InPlaceChain(forward, told)
    for checked in (False, True):
        x = begun()
        solver = Solver(x)
        found = swept(InPlaceChain(solver.forward, solver.reverse), x, checked=checked)
        assert found == oracle(plain, begun())


def test_frames_that_a_profiler_holds_for_a_moment_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Dask's does in a thread of its own, which goes on while this one waits."""
    frames: list[types.FrameType] = []
    monkeypatch.setattr("multistage.states.sharing.time.sleep", lambda _: frames.clear())

    def back(x: Any, a: Any, i: int) -> Any:
        frames.append(sys._getframe())
        return told(x, a, i)

    def replacing(state: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            fresh = np.sin(state["x"] + i)
            state["x"] = fresh[:] if i % 2 else fresh
            frames.append(sys._getframe())

    def of_dict(state: Any, a: Any, i: int) -> Any:
        return told(state["x"], a, i)

    expected = oracle(InPlaceChain(forward, told), begun())
    assert swept(InPlaceChain(forward, back), begun()) == expected
    expected = oracle(InPlaceChain(replacing, of_dict), {"x": begun()})
    frames.clear()
    assert swept(InPlaceChain(replacing, of_dict), {"x": begun()}) == expected


def test_what_a_call_leaves_in_cycles_is_not_kept() -> None:
    def reverse(x: Any, adjoint: Any, i: int) -> Any:
        def count(k: int) -> float:
            return 0.0 if k == len(x) else x[k] + count(k + 1)

        return told(np.asarray(count(0)), adjoint, i)

    def walked(x: Any, start: int, stop: int) -> None:
        def again(i: int) -> None:
            if i < stop:
                forward(x, i, i + 1)
                again(i + 1)

        again(start)

    gc.disable()
    try:
        expected = oracle(InPlaceChain(forward, reverse), begun())
        assert swept(InPlaceChain(walked, reverse), begun()) == expected
    finally:
        gc.enable()


# ----------------------------------------------------------- tapes by way of globals

STATE: Any = None
STATES: dict[str, Any] = {}
TABLE = np.full(4, 0.5)
elsewhere: Any = types.ModuleType("multistage_test_elsewhere")


def scaled(a: Any) -> Any:
    return a * STATE


def made(**members: Any) -> Any:
    """Return an object of a class with these members."""
    return type("Made", (), members)()


@dataclass
class Record:
    own: Any

    def read(self) -> Any:
        return self.own * STATE


class Shared:
    """Keeps the state in a class."""

    field: Any = None
    fields: ClassVar[dict[str, Any]] = {}

    def read(self) -> Any:
        return self.field

    def look_up(self) -> Any:
        return type(self).fields["x"]


class Heir(Shared):
    pass


class Named(NamedTuple):
    own: Any

    def read(self) -> Any:
        return self.own * STATE


VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE")


REACHING: dict[str, Callable[[Any], Any]] = {
    "a class": lambda x: Shared(),
    "a class above": lambda x: Heir(),
    "the class itself": lambda x: Shared,
    "a static method": lambda x: made(read=staticmethod(lambda: STATE)),
    "a class method": lambda x: made(read=classmethod(lambda cls: STATES["x"])),
    "a descriptor": lambda x: made(
        found=made(__get__=lambda self, owner, kind: STATE), read=lambda self: self.found
    ),
    "a wrapper": lambda x: made(read=functools.wraps(len)(lambda self: STATE)),
    "a string": lambda x: made(read=lambda self: globals()["STATE"]),
    "a method of a named tuple": lambda x: Named(x.copy()),
    "a context variable": lambda x: made(read=lambda self: VARIABLE.get()),
    "a lambda": lambda x: lambda a: a * STATE,
    "a function": lambda x: scaled,
    "a function that calls it": lambda x: lambda a: scaled(a),
    "a function in a function": lambda x: lambda a: (lambda b: b * STATE)(a),
    "a dict": lambda x: lambda a: a * STATES["x"],
    "an attribute": lambda x: lambda a: a * BOX.x,
    "another module": lambda x: lambda a: a * elsewhere.STATE,
    "a method": lambda x: made(__call__=lambda self, a: a * STATE),
    "a property": lambda x: made(read=property(lambda self: STATES["x"])),
    "a method of a dataclass": lambda x: Record(x.copy()),
}
BOX = Box(None)


@pytest.mark.parametrize("name", REACHING)
def test_a_tape_that_reaches_the_state_through_a_global_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap, x = REACHING[name], begun()
    monkeypatch.setitem(sys.modules, elsewhere.__name__, elsewhere)
    monkeypatch.setitem(globals(), "STATE", x)
    monkeypatch.setitem(STATES, "x", x)
    monkeypatch.setattr(BOX, "x", x)
    monkeypatch.setattr(elsewhere, "STATE", x, raising=False)
    monkeypatch.setattr(Shared, "field", x)
    monkeypatch.setitem(Shared.fields, "x", x)
    VARIABLE.set(x)

    def tape(x: Any, i: int) -> Any:
        made = wrap(x)
        forward(x, i, i + 1)
        return [made]

    with pytest.raises(StateError, match=r"the tape of step 0 holds a .* shares memory with the"):
        swept(InPlaceChain(forward, told, tape), x, 20)


def test_a_tape_may_read_a_table_through_a_global() -> None:
    def tape(x: Any, i: int) -> Any:
        kept = x.copy()
        forward(x, i, i + 1)
        return lambda a: np.multiply(a, kept) * TABLE

    def reverse(tape: Any, adjoint: Any, i: int) -> Any:
        return told(tape(np.full(4, 3.0)), adjoint, i)

    chain = InPlaceChain(forward, reverse, tape)
    assert swept(chain, begun(), 20, checked=True) == oracle(chain, begun())


# ------------------------------------------------------------------ with checked=True


def _counting() -> Any:
    calls = [0]

    def step(x: Any, i: int) -> Any:
        calls[0] += 1
        return np.sin(x + calls[0])

    return FunctionChain(step, told)


def _counting_in_place() -> Any:
    calls = [0]

    def step(x: Any, start: int, stop: int) -> None:
        for _ in range(start, stop):
            calls[0] += 1
            np.sin(x + calls[0], out=x)

    return InPlaceChain(step, told)


def _drawing() -> Any:
    source = np.random.default_rng(0)
    return FunctionChain(lambda x, i: np.sin(x + source.normal()), told)


def _an_older_view() -> Any:
    buffers = [np.zeros(4) for _ in range(3)]
    views = [buffer[:] for buffer in buffers]

    def step(x: Any, i: int) -> Any:
        views[i % 3][...] = np.sin(x + i)
        return buffers[i % 3]

    return FunctionChain(step, told)


def _an_older_view_of_a_tape() -> Any:
    buffer = np.zeros(4)
    view = buffer[:]

    def tape(x: Any, i: int) -> Any:
        view[...] = x
        forward(x, i, i + 1)
        return buffer

    return InPlaceChain(forward, told, tape)


class Solver:
    """Knows the arrays of state 0, as solvers do, and more of them than its adjoint reads."""

    def __init__(self, x: Any) -> None:
        self.x, self.scale = x, np.full(4, 0.5)
        self.model = Box(x)
        self.all = [x, self.scale]

    def forward(self, x: Any, start: int, stop: int) -> None:
        forward(self.x, start, stop)

    def tape(self, x: Any, i: int) -> Any:
        kept = self.x.copy()
        self.forward(x, i, i + 1)
        return kept

    @property
    def now(self) -> Any:
        return self.x

    def scaled(self, t: Any, adjoint: Any, i: int) -> Any:
        self.work = t * self.scale
        return told(self.work, adjoint, i)

    def sound(self, t: Any, adjoint: Any, i: int) -> Any:
        return self.scaled(t, adjoint, i)

    def _read(self) -> Any:
        return self.x

    def __call__(self, t: Any, adjoint: Any, i: int) -> Any:
        return told(t * self._read(), adjoint, i)

    def by_a_property(self, t: Any, adjoint: Any, i: int) -> Any:
        return told(t * self.now, adjoint, i)

    def in_an_object(self, t: Any, adjoint: Any, i: int) -> Any:
        return told(t * self.model.x, adjoint, i)

    def in_a_list(self, t: Any, adjoint: Any, i: int) -> Any:
        return told(t * self.all[0], adjoint, i)


def _of_solver(adjoint_of: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        solver = Solver(STATE)
        return InPlaceChain(solver.forward, adjoint_of(solver), solver.tape)

    return made


SOUND: dict[str, Callable[[Any], Any]] = {
    "a method": lambda solver: solver.sound,
    "a function": lambda solver: lambda t, adjoint, i: solver.sound(t, adjoint, i),
    "a partial": lambda solver: functools.partial(Solver.sound, solver),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_checked_run_of_a_solver_that_knows_its_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an object that an adjoint names only the attributes that it reads count."""
    make = _of_solver(SOUND[name])
    monkeypatch.setitem(globals(), "STATE", begun())
    expected = oracle(make(), STATE)
    monkeypatch.setitem(globals(), "STATE", begun())
    assert swept(make(), STATE, 3, checked=True) == expected


def _a_global() -> Any:
    def tape(x: Any, i: int) -> Any:
        kept = x.copy()
        forward(x, i, i + 1)
        return kept

    return InPlaceChain(forward, lambda t, a, i: told(t * STATE, a, i), tape)


_READS = r"the adjoint operator, called with the tape of step \d, reads the arrays of the live"
BREACHES: dict[str, tuple[Callable[[], Any], str]] = {
    "counting": (_counting, r"state \d differs from what it was when step \d ran first"),
    "counting in place": (_counting_in_place, r"state \d differs from what it was"),
    "drawing": (_drawing, r"state \d differs from what it was"),
    "an older view": (_an_older_view, r"state \d was written to since it was made"),
    "of a tape": (_an_older_view_of_a_tape, r"the tape of step \d was written to since"),
    "a global": (_a_global, _READS),
    "a method": (_of_solver(lambda solver: solver.__call__), _READS),
    "a callable": (_of_solver(lambda solver: solver), _READS),
    "a partial": (_of_solver(lambda solver: functools.partial(Solver.__call__, solver)), _READS),
    "an argument": (
        _of_solver(lambda solver: functools.partial(lambda x, t, a, i: told(x, a, i), solver.x)),
        _READS,
    ),
    "a default": (_of_solver(lambda solver: lambda t, a, i, x=solver.x: told(x, a, i)), _READS),
    "a function": (_of_solver(lambda solver: lambda t, a, i: solver(t, solver.now, i)), _READS),
    "a property": (_of_solver(lambda solver: solver.by_a_property), _READS),
    "an object": (_of_solver(lambda solver: solver.in_an_object), _READS),
    "a list": (_of_solver(lambda solver: solver.in_a_list), _READS),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_checked_run_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BREACHES[name]
    x = begun()
    monkeypatch.setitem(globals(), "STATE", x)
    with pytest.raises(StateError, match=message):
        swept(make(), x, 3, checked=True)


@pytest.mark.parametrize("swept_before", [False, True])
def test_a_checked_run_is_prepared_for_states_of_another_shape(swept_before: bool) -> None:
    """Where steps are measured, state 0 of another layout is no state that was overwritten."""
    chain: Any = FunctionChain(lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a)
    with Reversal(chain, n_steps=3, memory="2 slots", checked=True) as run:
        run.prepare(np.ones(4))
        if swept_before:
            run.forward(np.ones(4))
            run.reverse(np.ones(4))
        run.prepare(np.zeros(5))
        assert run.forward(np.zeros(5)).tobytes() == np.zeros(5).tobytes()


@pytest.mark.parametrize("functionals", [None, 2])
@pytest.mark.parametrize("block", [0, 2])
def test_a_checked_run_finds_it_below_functionals_and_blocks(
    functionals: int | None, block: int
) -> None:
    x = begun()
    chain: Any = InPlaceChain(
        forward, lambda t, a, i: told(t * x, a, i), lambda x, i: (x.copy(), forward(x, i, i + 1))[0]
    )
    with (
        Reversal(
            Blocks(chain, block) if block else chain,
            n_steps=3,
            memory="9 slots",
            checked=True,
            functionals=functionals,
        ) as run,
        pytest.raises(StateError, match=_READS),
    ):
        run.forward(x)
        run.reverse(np.asarray(1) if functionals is None else [1] * functionals)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("taped", [False, True])
def test_a_checked_run_of_good_operators(in_place: bool, taped: bool) -> None:
    padded = np.dtype([("a", "i1"), ("x", "f8")], align=True)

    def state() -> Any:
        made = np.empty(3, padded)  # padding holds whatever memory held
        made["a"], made["x"] = 1, np.linspace(0, 1, 3)
        return {"b": made, "a": np.ones(2)}

    def grow(s: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            s["b"]["x"] = np.sin(s["b"]["x"] + i)
            s["a"] *= 0.9

    def step(s: Any, i: int) -> Any:
        s = copy.deepcopy(s)
        grow(s, i, i + 1)
        return s

    def tape_step(s: Any, i: int) -> Any:
        return step(s, i), (s["b"]["x"].copy(), {"v": s["a"][1:]}, None)

    def tape(s: Any, i: int) -> Any:
        kept = s["b"]["x"].copy()
        grow(s, i, i + 1)
        return kept, {"v": s["a"][1:]}, None

    def reverse(t: Any, adjoint: Any, i: int) -> Any:
        x, v = (t[0], t[1]["v"]) if taped else (t["b"]["x"], t["a"])
        return np.asarray(digest([x, v], int(adjoint), i))

    chain: Any = FunctionChain(step, reverse, tape_step if taped else None)
    if in_place:
        chain = InPlaceChain(grow, reverse, tape if taped else None)
    costs = TAPED if taped else COSTS
    with Reversal(chain, n_steps=N, memory="4 slots", costs=costs, checked=True) as run:
        for _ in range(2):
            run.forward(state())
            assert run.reverse(np.asarray(1)) == oracle(chain, state())
