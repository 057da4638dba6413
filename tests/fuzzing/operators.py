"""A case's operators, as users write them: a state is a digest of the one before.

The adjoint of a step is a digest too, of every value of its tape, its number
and the adjoint after it: one bit that differs anywhere shows at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multistage import Blocks, FunctionChain, InPlaceChain

from .cases import Case
from .contents import DTYPES, Leaf, Lender, Subclass, content, fingerprint
from .trees import built, deep, key_orders, leaves, mapped, places, put, turn_keys


@dataclass
class Opaque:
    """A tape that no pytree library looks into."""

    parts: list[Any]


class Slotted:
    """The same with slots."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


class Alive:
    """Counts objects that somebody refers to."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, what: Any) -> None:
        self.now += 1
        weakref.finalize(what, self._gone).atexit = False

    def _gone(self) -> None:
        self.now -= 1

    def look(self) -> None:
        self.most = max(self.most, self.now)


class Operators:
    """The operators of one case; `called` is told of every call before it runs."""

    def __init__(self, case: Case, called: Callable[[str, int], None] | None = None) -> None:
        self.case = case
        self.called = called
        self.tapes = Alive()
        self.states = Alive()
        self.tape_bytes = 0
        self._work: dict[tuple[str, int], list[Any]] = {}
        self._kept: list[Any] = []  # memory that is lent
        self._held: list[Any] = []  # what the adjoint step before has kept
        self._one: list[Any] = []  # the only tape of operators that have but one

    # -------------------------------------------------------------------- state

    def start(self) -> Any:
        """Return a new state 0."""
        case, made = self.case, []
        for k, leaf in enumerate(case.leaves):
            array = content(leaf, b"start %d %d" % (case.seed, k))
            made.append(self._shaped(case.starts[k], leaf, array, made))
        return built(case.tree, made)

    def _shaped(self, how: str, leaf: Leaf, array: Any, before: list[Any]) -> Any:
        """Return an array of the same values, in memory of another kind."""
        match how:
            case "fortran":
                return np.asfortranarray(array) if array.ndim else array
            case "view" | "input view":
                wide = np.empty((*leaf.shape, 2), array.dtype)
                wide[..., 0] = array
                return wide[..., 0]
            case "reversed" if array.ndim:
                return array[::-1].copy()[::-1]
            case "readonly":
                array.flags.writeable = False
            case "broadcast" if array.size:
                return np.broadcast_to(array.reshape(-1)[0], leaf.shape)
            case "borrowed":
                self._kept.append(lender := Lender(leaf.nbytes))
                lent = lender.lend(leaf)
                lent[...] = array
                return lent
            case "alias":
                return next((other for other in before if _like(other, array)), array)
            case "scalar" if not array.ndim:
                return array[()]
            case "number":
                return 1.5
            case "retype":
                other = np.dtype("f4" if leaf.dtype != "f4" else "f8")
                return content(Leaf(other.str[1:], leaf.shape), array.tobytes())
            case "reshape":
                return array.reshape(-1)[:-1].copy() if array.size else array.reshape(0)
            case "subclass":
                return array.view(Subclass)
            case _:
                pass
        return array

    def _rotating(self, kind: str, k: int, i: int, array: Any) -> Any:
        """Write into one of two buffers in turn, and return that."""
        buffers = self._work.get((kind, k))
        if buffers is None:
            leaf = self.case.leaves[k]
            buffers = []
            for _ in range(2):
                if kind == "borrowed":
                    self._kept.append(lender := Lender(leaf.nbytes))
                    buffers.append(lender.lend(leaf))
                else:
                    buffers.append(np.empty(leaf.shape, DTYPES[leaf.dtype]))
            self._work[kind, k] = buffers
        buffer = buffers[i % 2]
        buffer[...] = array
        return buffer[...] if kind == "lent view" else buffer

    def _odd_now(self, i: int) -> bool:
        return i >= self.case.when

    # ------------------------------------------------------------------ forward

    def _tell(self, kind: str, i: int) -> None:
        self.tapes.look()
        self.states.look()
        if self.called is not None:
            self.called(kind, i)

    def step(self, state: Any, i: int) -> Any:
        """Step i of a functional chain."""
        self._tell("step", i)
        case, old = self.case, leaves(state)
        if case.idle and i % case.idle == case.idle - 1:
            return state
        key = fingerprint(old, i, key_orders(state) if case.turns else ())
        made: list[Any] = []
        for k, leaf in enumerate(case.leaves):
            made.append(self._next(k, leaf, old, made, key + bytes([k]), i))
        if case.manners[0] == "new":
            self.states.add(made[0])
        after = self._contained(state, made, i)
        if case.turns and isinstance(after, dict | list | tuple):
            turn_keys(after, i)
        return after

    def _next(self, k: int, leaf: Leaf, old: list[Any], made: list[Any], key: bytes, i: int) -> Any:
        manner = self.case.manners[k]
        match manner:
            case "same":
                return old[k]
            case "input view":
                return old[k][...] if isinstance(old[k], np.ndarray) else old[k]
        array = content(leaf, key)
        match manner:
            case "rotating" | "borrowed" | "lent view":
                return self._rotating(manner, k, i, array)
            case "writes input" if self._odd_now(i) and isinstance(old[k], np.ndarray):
                old[k][...] = array
                return old[k]
            case "new":
                return array
        if self._odd_now(i):
            return self._shaped(manner, leaf, array, made)
        return array

    def _contained(self, state: Any, made: list[Any], i: int) -> Any:
        """Return the new leaves in a tree: a new one, or that of the state before."""
        case = self.case
        if case.container == "other" and self._odd_now(i):
            return made
        if case.container == "new" or len(made) != len(leaves(state)):
            return built(case.tree, made)
        rebound = all(put(place, new) for place, new in zip(list(places(state)), made, strict=True))
        if rebound:
            return dict(state) if case.container == "mixed" and isinstance(state, dict) else state
        # Leaves right in a tuple cannot be replaced; what hangs below it is.
        if isinstance(state, dict | list):
            return built(case.tree, made)
        return (
            type(state)(state)
            if all(isinstance(p, dict | list) for p in state)
            else built(case.tree, made)
        )

    def forward(self, state: Any, start: int, stop: int) -> Any:
        """Steps of an in-place chain; what is returned matters to an `own` front only."""
        for i in range(start, stop):
            self._tell("step", i)
            self._overwrite(state, i)
        return state

    def _overwrite(self, state: Any, i: int) -> None:
        case = self.case
        if case.idle and i % case.idle == case.idle - 1:
            return
        at, old = list(places(state)), leaves(state)
        if case.container == "other" and self._odd_now(i):
            if isinstance(state, list):
                state.append(np.zeros(2))
            elif isinstance(state, dict):
                state["more"] = np.zeros(2)
        key = fingerprint(old, i, key_orders(state) if case.turns else ())
        for k, leaf in enumerate(case.leaves):
            self._overwrite_one(k, leaf, at, content(leaf, key + bytes([k])), i)
        if case.turns and isinstance(state, dict | list | tuple):
            turn_keys(state, i)

    def _overwrite_one(self, k: int, leaf: Leaf, at: list[Any], array: Any, i: int) -> None:
        manner, place = self.case.manners[k], at[k]
        now = place[0][place[1]] if place[0] is not None else None
        rebound: Any = None
        match manner:
            case "same":
                return
            case "rebind":
                rebound = array
            case "swap" | "alias" | "view of next" if self._odd_now(i) and len(at) > 1:
                container, key = at[(k + 1) % len(at)]
                other = container[key]
                if isinstance(other, np.ndarray) and isinstance(now, np.ndarray):
                    if manner == "swap" and other.shape == now.shape and other.dtype == now.dtype:
                        if isinstance(container, list | dict) and put(place, other):
                            container[key] = now
                        now = place[0][place[1]]
                    elif manner == "alias" and other.shape == now.shape:
                        rebound = other
                    elif other.shape == now.shape:
                        rebound = other[...]
            case "rotating" | "borrowed" if self._odd_now(i):
                rebound = self._rotating(manner, k, i, array)
            case _ if manner != "overwrite" and self._odd_now(i):
                rebound = self._shaped(manner, leaf, array, [])
        if rebound is not None and put(place, rebound):
            return
        if place[0] is None:
            self._whole[...] = array
        elif isinstance(now, np.ndarray) and now.flags.writeable and _like(now, array):
            now[...] = array
        else:
            put(place, array)

    # -------------------------------------------------------------------- tapes

    def tape_step(self, state: Any, i: int) -> tuple[Any, Any]:
        """Step i of a functional chain, keeping its tape."""
        before = leaves(state)
        key = fingerprint(before, i, "tape")
        after = self.step(state, i)
        return after, self._tape(key, before, leaves(after))

    def tape_in_place(self, state: Any, i: int) -> Any:
        """Step i of an in-place chain, keeping its tape."""
        key = fingerprint(leaves(state), i, "tape")
        before = [np.array(leaf) for leaf in leaves(state)]
        self.run_in_place(state, i, i + 1)
        return self._tape(key, before, leaves(state))

    def _tape(self, key: bytes, before: list[Any], after: list[Any]) -> Any:
        case = self.case
        share = sum(leaf.nbytes for leaf in case.leaves) * case.tape_factor / 8
        own = content(Leaf("f8", (max(2, int(share)),)), key)
        self._count(own)
        live = [leaf for leaf in after if isinstance(leaf, np.ndarray)]
        parts = [own, *live[:1]]  # half of it the tape's, half the state's
        if case.one_tape:
            return self._only(own)
        match case.tape:
            case "arrays":
                return own
            case "nested":
                return {"own": own, "more": (own[:1].copy(), [own[1:]])}
            case "before":
                return (own, before)
            case "after":
                return (own, *(leaf[...] for leaf in live))
            case "none":
                return None
            case "number":
                return int.from_bytes(key, "little")
            case "dataclass":
                return Opaque(parts)
            case "closure":
                return lambda: parts
            case "memoryview":
                view = [memoryview(part) for part in live[:1] if part.dtype.char in "dfBl"]
                return [own, *view]
            case "object array":
                held = np.empty(len(parts), object)
                for k, part in enumerate(parts):
                    held[k] = part
                return held
            case "iterator":
                return iter(parts)
            case "slots":
                return Slotted(parts)
        raise AssertionError(case.tape)

    def _only(self, own: Any) -> Any:
        """Return the one tape there is, written again; or None where it stays in the operators."""
        if not self._one or self._one[0].shape != own.shape:
            self._one = [own.copy()]
        self._one[0][...] = own
        return None if self.case.tape == "none" else self._one[0]

    def _count(self, own: Any) -> None:
        self.tapes.add(own)
        self.tape_bytes = own.nbytes

    def tape_parts(self, tape: Any) -> list[Any]:
        """Return what a tape holds, as arrays or numbers."""
        if self.case.one_tape:
            return list(self._one) if tape is None else [tape]
        match self.case.tape:
            case "dataclass" | "slots":
                return list(tape.parts)
            case "closure":
                return list(tape())
            case "memoryview":
                return [np.asarray(part) for part in tape]
            case "object array" | "iterator":
                return list(tape)
            case _:
                return leaves(tape)

    # ------------------------------------------------------------------ adjoint

    def begin(self, last: Any, start: Any) -> Any:
        """Return the adjoint that the reverse sweep begins with."""
        self._held = []
        match self.case.begin:
            case "last":
                return last
            case "part of last":
                found = leaves(last)[-1]
                return found[...] if isinstance(found, np.ndarray) else np.asarray(found)
            case "tree of last":
                return {"given": leaves(last), "more": np.ones(2)}
            case "state 0" if self.case.in_place:
                return start
            case _:
                words = np.arange(1, 3, dtype=np.uint64)
                return {"d": words, "e": (words[:1],)} if self.case.adjoint == "tree" else words

    def adjoint(self, tape: Any, adjoint: Any, i: int) -> Any:
        """Return the adjoint of step i."""
        self._tell("adjoint", i)
        case = self.case
        if i == case.none_at:
            return None
        parts = leaves(tape) if not case.tape else self.tape_parts(tape)
        orders = key_orders(tape) if case.turns and not case.tape else ()
        key = fingerprint([*parts, *leaves(adjoint), *self._held], i, orders)
        if case.keeps and not case.one_tape:
            self._held = deep(parts) if case.keeps == "copy" else parts
        words = np.frombuffer(key, np.uint64)
        match case.adjoint:
            case "integer":
                return int(words[0])
            case "tree":
                return {"d": words.copy(), "e": (words[:1].copy(),)}
            case "rotating":
                buffers = self._work.setdefault(("adjoint", 0), [np.zeros((2, 2), np.uint64)])
                buffers[0][i % 2] = words
                return buffers[0][i % 2]
            case "of the tape":
                return {"d": words.copy(), "t": parts[-1:]}
            case "in place" if _all_plain(adjoint):
                mapped(lambda array: _mixed(array, key), adjoint)
                return adjoint
        return words.copy()

    # -------------------------------------------------------------- as the chain

    def run_in_place(self, state: Any, start: int, stop: int) -> Any:
        """`forward`, where a state that is one array is at hand."""
        self._whole = state
        try:
            return self.forward(state, start, stop)
        finally:
            self._whole = None  # lent for the time of the call

    _whole: Any = None

    def chain(self) -> Any:
        """Return the chain, by the front that the case names."""
        case = self.case
        found: Any
        if case.front == "own":
            found = _Own(self)
        elif case.in_place:
            tape = self.tape_in_place if case.tape else None
            found = InPlaceChain(self.run_in_place, self.adjoint, tape)
        else:
            found = FunctionChain(self.step, self.adjoint, self.tape_step if case.tape else None)
        return Blocks(found, case.block, None if case.until else case.n) if case.block else found

    @property
    def n_steps(self) -> int:
        """Steps of the schedule: blocks, if there are some."""
        return -(-self.case.n // (self.case.block or 1))


class _Own:
    """A user's own class with the members that the Protocol asks for."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self.in_place = operators.case.in_place
        self.state_is_tape = not operators.case.tape
        if operators.case.one_tape:
            self.one_tape = True

    def advance(self, state: Any, start: int, stop: int) -> Any:
        if self.in_place:
            return self._operators.run_in_place(state, start, stop)
        for i in range(start, stop):
            state = self._operators.step(state, i)
        return state

    def tape(self, state: Any, step: int) -> tuple[Any, Any]:
        if self.in_place:
            return state, self._operators.tape_in_place(state, step)
        return self._operators.tape_step(state, step)

    def reverse(self, tape: Any, adjoint: Any, step: int) -> Any:
        return self._operators.adjoint(tape, adjoint, step)


def _like(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _all_plain(tree: Any) -> bool:
    return all(
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiuc" and leaf.dtype.char not in "gG"
        for leaf in leaves(tree)
    )


def _mixed(array: Any, key: bytes) -> Any:
    """Write to an array what follows from its old contents and a key."""
    leaf = Leaf(array.dtype.str.lstrip("|=<"), array.shape)
    array[...] = content(leaf, key + array.tobytes()) if leaf.dtype in DTYPES else array
    return array


def copied(operators: Operators, tape: Any) -> Any:
    """Return a deep copy of a tape, of its own kind."""
    match operators.case.tape if not operators.case.one_tape else "only":
        case "only":
            return operators._one[0].copy()
        case "dataclass" | "slots":
            return type(tape)([deep(part) for part in tape.parts])
        case "closure":
            parts = [deep(part) for part in tape()]
            return lambda: parts
        case "memoryview":
            return [memoryview(np.array(part)) for part in tape]
        case "object array":
            return [deep(part) for part in tape]
        case "iterator":
            return iter([deep(part) for part in tape])
        case _:
            return deep(tape)
