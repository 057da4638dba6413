"""Hessian-vector products, forward over reverse: tangents beside states, in one schedule.

With x[i+1] = F_i(x[i]) and a functional J(x[n]), in the direction d of state 0:

=================  ====================================================================
tangent            t[i+1] = F_i' t[i], from t[0] = d
adjoint            a[i] = F_i'ᵀ a[i+1], from a[n] = J'(x[n]); a[0] is the gradient
second adjoint     s[i] = F_i'ᵀ s[i+1] + (F_i'' t[i])ᵀ a[i+1], from s[n] = J''(x[n]) t[n];
                   s[0] is the Hessian's product with d
=================  ====================================================================

F_i' and F_i'' are taken at x[i].  A state of the schedule is the pair (x[i], t[i]), its adjoint
the list of a[i] and s[i].
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
import optree

from .backends.urls import Tiers
from .errors import ArgumentError, StateError
from .model.budget import Budget
from .model.chain import Chain
from .model.costs import Costs
from .model.functionals import Lender, in_own_containers, own_adjoints, propagate
from .model.stages import StageCosts
from .planners import Plan, Planner
from .report import Report
from .reversal import Reversal
from .reversing.arguments import chain_of
from .states.layout import rebuilt
from .states.sharing import Memory, overlap

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


@dataclass(frozen=True, slots=True)
class HessianVector(Generic[State, Adjoint]):
    """What `hessian_vector` returns.

    Attributes
    ----------
    gradient : pytree of arrays
        Adjoint of state 0.
    product : pytree of arrays
        Second adjoint of state 0: the Hessian's product with the direction.
    last_state, last_tangent : pytree of arrays
        Copies, made before the reverse sweep.
    report : Report
    """

    gradient: Adjoint
    product: Adjoint
    last_state: State
    last_tangent: State
    report: Report


class _Tangents(Generic[State, Adjoint]):
    """The chain of states with their tangents, and of adjoints with second adjoints."""

    state_is_tape, one_tape = True, False

    def __init__(
        self,
        chain: Chain[State, Adjoint],
        tangent_step: Callable[[State, State, int], object],
        second_adjoint_step: Callable[[State, State, Adjoint, Adjoint, int], Adjoint],
    ) -> None:
        self.in_place = chain.in_place
        self._chain, self._lender = chain, Lender()
        self._tangent_step, self._second_adjoint_step = tangent_step, second_adjoint_step

    def advance(self, state: tuple[State, State], start: int, stop: int) -> tuple[State, State]:
        at, tangent = state
        for i in range(start, stop):
            with self._lender.lending(at, i):
                moved: Any = self._tangent_step(in_own_containers(at), tangent, i)
            if not self.in_place:
                tangent = moved
            elif moved is not None and moved is not tangent:
                raise StateError(
                    f"the tangent of step {i} is another than was given; beside an in-place "
                    "chain, tangent_step overwrites the tangent"
                )
            at = self._chain.advance(at, i, i + 1)
        return state if self.in_place else (at, tangent)

    def tape(self, state: tuple[State, State], step: int) -> tuple[tuple[State, State], object]:
        raise AssertionError("a state is its own tape")

    def reverse(self, tape: object, adjoint: list[Adjoint], step: int) -> list[Adjoint]:
        state, tangent = cast(tuple[State, State], tape)

        def second(one: Adjoint) -> Adjoint:
            with self._lender.lending(adjoint[0], step):
                given = in_own_containers((state, tangent, adjoint[0]))
                return self._second_adjoint_step(*given, one, step)

        with self._lender.lending(tape, step):
            propagate(adjoint, 1, second, step)  # first: it reads the adjoint after the step
            propagate(adjoint, 0, lambda one: self._chain.reverse(state, one, step), step)
        return adjoint


def hessian_vector(
    step: Chain[State, Adjoint] | Callable[[State, int], State],
    adjoint_step: Callable[..., Adjoint] | None,
    tangent_step: Callable[[State, State, int], object],
    second_adjoint_step: Callable[[State, State, Adjoint, Adjoint, int], Adjoint],
    state: State,
    direction: State,
    adjoint: Adjoint | Callable[[State], Adjoint],
    second_adjoint: Adjoint | Callable[[State, State], Adjoint],
    n_steps: int,
    *,
    memory: Budget | int | str | None = None,
    tiers: Tiers | None = None,
    planner: str | Plan | Planner = "auto",
    costs: Costs | StageCosts | None = None,
    progress: bool | None = None,
    durable: str | os.PathLike[str] | None = None,
    durable_every_s: float = 60.0,
    durable_label: str = "",
) -> HessianVector[State, Adjoint]:
    """Return a gradient and the Hessian's product with a direction, by one pair of sweeps.

    Parameters
    ----------
    step : callable, or Chain
        `step(state, i) -> state`; or a functional or in-place chain whose states are its
        tapes, with `adjoint_step=None`.
    adjoint_step : callable or None
        `adjoint_step(state, adjoint, i) -> adjoint`.
    tangent_step : callable
        `tangent_step(state, tangent, i) -> tangent`: the derivative of step i at `state`, in
        the direction `tangent`.  Beside an in-place chain it overwrites the tangent, before
        the step is run.
    second_adjoint_step : callable
        `second_adjoint_step(state, tangent, adjoint, second_adjoint, i) -> second_adjoint`:
        the derivative of `adjoint_step` in the direction of `tangent` and `second_adjoint`;
        all but the state and tangent are those after step i.  It is called before
        `adjoint_step`, and may overwrite `second_adjoint` alone.
    state, n_steps
        As for `Reversal`.
    direction : pytree of arrays
        Tangent of state 0, with its structure and shapes; zeros where only a model that the
        operators know is varied.
    adjoint : pytree of arrays, or callable
        Adjoint of the last state, or a function of it: the derivative of the functional.
    second_adjoint : pytree of arrays, or callable
        Its derivative in the direction of the last tangent, or a function of the last state
        and tangent that returns it: zeros if the functional is linear.
    memory, tiers, planner, costs, progress, durable, durable_every_s, durable_label
        As for `Reversal`; a state is that of `step` with its tangent.

    Returns
    -------
    HessianVector
        `gradient`, `product`, `last_state`, `last_tangent`, `report`.

    Raises
    ------
    ArgumentError
        For a direction of another structure, shape or kind of numbers than the state, or a
        chain with tapes.
    BudgetError, StoreError, StateError
        As `Reversal` does; StateError also where an operator writes to what another reads.

    Examples
    --------
    J = sin(sin(x))² / 2, by two steps; the product with 1 is its second derivative.

    >>> import numpy as np
    >>> found = hessian_vector(
    ...     lambda x, i: np.sin(x),
    ...     lambda x, a, i: np.cos(x) * a,
    ...     lambda x, t, i: np.cos(x) * t,
    ...     lambda x, t, a, s, i: np.cos(x) * s - np.sin(x) * t * a,
    ...     state=np.array(1.0), direction=np.array(1.0),
    ...     adjoint=lambda x: x, second_adjoint=lambda x, t: t, n_steps=2, memory="1 slot",
    ... )
    >>> round(float(found.gradient), 9), round(float(found.product), 9)
    (0.268454135, -0.450762258)
    """
    chain = chain_of(step, adjoint_step, None)
    if not chain.state_is_tape:
        raise ArgumentError(
            "hessian_vector() takes chains whose states are their tapes; give adjoint operators "
            "that start from the state, without tape functions"
        )
    for name, function in (
        ("tangent_step", tangent_step),
        ("second_adjoint_step", second_adjoint_step),
    ):
        if not callable(function):
            raise ArgumentError(f"{name}={function!r} must be callable")
    made = _Tangents(chain, tangent_step, second_adjoint_step)
    with Reversal(
        made,
        n_steps=n_steps,
        memory=memory,
        tiers=tiers,
        planner=planner,
        costs=costs,
        progress=progress,
        durable=durable,
        durable_every_s=durable_every_s,
        durable_label=durable_label,
    ) as run:
        last = run.forward((state, _beside(state, direction)))
        first: Any = adjoint(last[0]) if callable(adjoint) else adjoint
        second: Any = second_adjoint(*last) if callable(second_adjoint) else second_adjoint
        # The reverse sweep runs steps again, perhaps in the very buffers of the last state.
        kept = copy.deepcopy(last)
        start: Any = own_adjoints((first, second), 2)
        gradient, product = run.reverse(start)
        return HessianVector(gradient, product, *kept, run.report())


def _beside(state: State, direction: State) -> State:
    """Return a direction, apart from the state.  Raises ArgumentError if it is not like it."""
    (leaves, spec), (found, other) = (
        optree.tree_flatten(cast(Any, tree)) for tree in (state, direction)
    )
    shapes, theirs = ([np.shape(leaf) for leaf in each] for each in (leaves, found))
    if spec != other or shapes != theirs:
        raise ArgumentError(
            f"the direction is {other} of shapes {theirs}, the state {spec} of {shapes}; give a "
            "tangent for each array, zeros where it does not vary"
        )
    kinds = [[np.asarray(leaf).dtype for leaf in each] for each in (leaves, found)]
    if not all(map(partial(np.can_cast, casting="same_kind"), *kinds)):
        raise ArgumentError(
            f"the direction has dtypes {kinds[1]}, the state {kinds[0]}, whose derivatives those "
            "do not hold; give a direction of the state's dtypes"
        )
    if _overlap(found) and not _overlap(leaves):  # one array of zeros for all, perhaps
        return rebuilt(direction, other, map(copy.copy, found))
    return Memory(leaves).apart(direction, "the direction")


def _overlap(leaves: Sequence[object]) -> bool:
    return overlap([leaf for leaf in leaves if isinstance(leaf, np.ndarray)])
