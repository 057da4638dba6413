"""Several functionals from one sweep: a chain whose adjoint is a list of adjoints.

Where the adjoint of a step begins, those of all functionals are computed from the same state or
tape.  What an adjoint step may do with that, and with what it returns, when it is called once:

=======================================  =======================================
an adjoint step                          called for several functionals
=======================================  =======================================
writes to its state or tape              StateError: arrays are read-only meanwhile;
                                         through other objects only if checked
takes items out of its tape              each call is given containers of its own
writes to the adjoint that it is given   that is its functional's alone
returns arrays that it uses again        they are copied, unless nothing else
                                         refers to them
adds to arrays of its own                **they hold the sum over the functionals**
=======================================  =======================================
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
import optree

from ..errors import ArgumentError, StateError
from ..states.layout import Array, rebuilt
from ..states.sharing import ATOMS, Frozen, is_record, overlap, references
from ..states.slots import no_adjoint, overwritten
from ..states.strides import duplicate
from ..support.values import shown, whole_or_none
from .blocks import Blocks
from .chain import Chain
from .costs import Costs
from .stages import StageCosts

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")
CostsT = TypeVar("CostsT")
T = TypeVar("T")


class Functionals(Generic[State, Adjoint]):
    """A chain whose adjoint is a list, of which each entry is propagated by another chain's.

    Parameters
    ----------
    chain : Chain
        Whose adjoint step is called for one entry after the other.
    digest : callable, optional
        Tells tapes apart, for a checked run: that of each step stays the same.
    """

    def __init__(
        self, chain: Chain[State, Adjoint], digest: Callable[[object], bytes] | None = None
    ) -> None:
        self.in_place, self.state_is_tape = chain.in_place, chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))
        self.advance, self.tape = chain.advance, chain.tape
        self._chain, self._lender, self._digest = chain, Lender(), digest

    @classmethod
    def of(
        cls, chain: Chain[State, Adjoint], digest: Callable[[object], bytes] | None
    ) -> Chain[State, list[Adjoint]]:
        """Return a chain for lists of adjoints; of blocks, whose steps are run again for all."""
        if not isinstance(chain, Blocks):
            return cls(chain, digest)
        made = chain.around(partial(cls.of, digest=digest))
        return cast(Chain[State, list[Adjoint]], made)

    def reverse(self, tape: object, adjoint: list[Adjoint], step: int) -> list[Adjoint]:
        """Return the adjoints of the state before `step`, in the list that is given."""
        by, digest = self._chain.reverse, self._digest
        before = digest and digest(tape)
        with self._lender.lending(tape, step):
            for k in range(len(adjoint)):
                propagate(adjoint, k, lambda one: by(in_own_containers(tape), one, step), step)
                if digest and digest(tape) != before:
                    raise _written(step)
        return adjoint


def innermost(chain: Chain[State, Adjoint]) -> Chain[State, Adjoint]:
    """Return the chain of a user's operators, which functionals and blocks call."""
    while isinstance(chain, Functionals | Blocks):
        chain = chain._chain
    return chain


class Lender:
    """Lends trees of arrays to operators, which may not write to them meanwhile."""

    def __init__(self) -> None:
        self.frozen = Frozen()

    @contextlib.contextmanager
    def lending(self, tree: object, step: int) -> Iterator[None]:
        """Keep the arrays of a tree read-only.  Raises StateError where one is written to."""
        arrays = _arrays(tree)
        for array in arrays:
            self.frozen.hold(array)
        try:
            yield
        except ValueError as error:
            if overwritten(error, self) is error:
                raise
            raise _written(step) from error
        finally:
            for array in arrays:
                self.frozen.free(array)


def _written(step: int) -> StateError:
    return StateError(
        f"an operator of step {step} wrote to a state, a tape or another adjoint, which is needed "
        "again; let it write to the adjoint or tangent that it returns alone, or reverse one "
        "functional at a time"
    )


def _arrays(tree: object) -> list[Array]:
    """Return the arrays of a tree, those in its dataclasses too."""
    if type(tree) is np.ndarray:
        return [tree]
    found: list[Array] = []
    left, seen = [tree], set[int]()
    while left:
        for leaf in optree.tree_leaves(cast(Any, left.pop()), none_is_leaf=True):
            if isinstance(leaf, np.ndarray):
                found.append(leaf)
            elif is_record(leaf) and id(leaf) not in seen:
                seen.add(id(leaf))
                left += [getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)]
    return found


def in_own_containers(tree: T, records: dict[int, object] | None = None) -> T:
    """Return a tree of the same arrays, in containers of its own.

    `records` are dataclasses by the identities of those whose copies they are.
    """
    if isinstance(tree, np.ndarray) or type(tree) in ATOMS:
        return tree
    leaves, spec = optree.tree_flatten(cast(Any, tree), none_is_leaf=True)
    known: dict[int, object] = {} if records is None else records
    own = [_in_own_fields(leaf, known) if is_record(leaf) else leaf for leaf in leaves]
    return rebuilt(tree, spec, own)


def _in_own_fields(leaf: Any, known: dict[int, object]) -> object:
    if id(leaf) not in known:
        known[id(leaf)] = made = copy.copy(leaf)
        for each in dataclasses.fields(leaf):
            if hasattr(leaf, each.name):
                value = in_own_containers(getattr(leaf, each.name), known)
                object.__setattr__(made, each.name, value)
    return known[id(leaf)]


def own_adjoints(given: object, count: int) -> list[object]:
    """Return copies of as many adjoints as there are functionals.

    Raises
    ------
    ArgumentError
        If they are no list or tuple of that many, or one is None: operators that keep their
        adjoint themselves have but one.
    """
    if not isinstance(given, list | tuple) or len(given) != count:
        found = f"{len(given)} of them" if isinstance(given, list | tuple) else shown(given)
        raise ArgumentError(
            f"with functionals={count}, reverse() takes a list of {count} adjoints, not {found}"
        )
    for k, each in enumerate(given):
        if each is None:
            raise ArgumentError(
                f"adjoint {k} of {count} is None; operators that keep their adjoint themselves "
                "reverse one functional at a time: leave functionals= out"
            )
    try:
        return [copied(each) for each in given]
    except StateError as error:
        raise ArgumentError(str(error)) from error


def copied(tree: T) -> T:
    """Return a copy, arrays laid out as they are.  Raises StateError if some overlap."""
    leaves, spec = optree.tree_flatten(cast(Any, tree), none_is_leaf=True)
    arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, np.ndarray)}
    if overlap(list(arrays.values())):
        raise StateError("arrays of an adjoint share memory with one another; give copies")
    made: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in made:
            plain = type(leaf) is np.ndarray and not leaf.dtype.hasobject
            made[id(leaf)] = duplicate(leaf) if plain else copy.deepcopy(leaf)
    return rebuilt(tree, spec, [made[id(leaf)] for leaf in leaves])


def propagate(adjoints: list[Adjoint], k: int, by: Callable[[Adjoint], Adjoint], step: int) -> None:
    """Put what an adjoint step makes of an adjoint in its place.

    It is copied, if anything else refers to what could be written to: another call may.
    """
    held: list[Any] = adjoints
    hand, held[k] = [held[k]], None  # or it would be referred to twice
    hand.append(by(hand.pop()))
    if hand[0] is None:
        raise no_adjoint(step)
    held[k] = hand.pop() if _is_alone(hand, (0,)) else copied(hand.pop())


def _is_alone(values: Any, keys: Iterable[Any]) -> bool:
    """Whether nothing but a container refers to its values, nor to what these are made of."""
    for key in keys:  # by key: a name would be one more reference
        kind = type(values[key])
        if kind in ATOMS or (issubclass(kind, np.generic) and not issubclass(kind, np.void)):
            continue  # a void may be a view
        if references(values, key) != 1:
            return False
        if kind is np.ndarray:
            found = values[key].flags.owndata and not values[key].dtype.hasobject
        elif kind is dict:
            found = _is_alone(values[key], values[key])
        else:
            found = kind in (list, tuple) and _is_alone(values[key], range(len(values[key])))
        if not found:
            return False
    return True


def times(costs: CostsT, functionals: int | None, *, back: bool = False) -> CostsT:
    """Return costs, of adjoint steps of one functional, as those of all; or `back` again."""
    count, made = whole_or_none(functionals), cast(Any, costs)
    if count is None or count < 1:
        return costs  # refused with the other arguments
    factor = 1 / count if back else float(count)
    if isinstance(costs, Costs):
        made = replace(costs, reverse_step_s=costs.reverse_step_s * factor)
    elif isinstance(costs, StageCosts):
        stages = [
            replace(
                stage,
                backward_s=stage.backward_s * factor,
                gradient_bytes=round(stage.gradient_bytes * factor),
            )
            for stage in costs.stages
        ]
        made = replace(costs, stages=tuple(stages))
    return cast(CostsT, made)
