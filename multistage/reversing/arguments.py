"""The arguments of a `Reversal`, checked before anything is measured, opened or run.

Planners believe their costs, and the executor its plan.  Costs that call a
state its own tape where tapes are made, or a plan for smaller tapes, would
have more in memory than the budget allows, unseen by any report.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, Self, TypeAlias, TypeVar, cast

from ..actions import Action
from ..backends.base import Store, require_distinct
from ..backends.urls import Tiers, open_store, tier_names
from ..durable.records import OrderedLayout
from ..durable.run import DurableRun
from ..errors import ArgumentError, BudgetError
from ..execute.executor import Resumed
from ..model.budget import Budget
from ..model.chain import Chain, FunctionChain
from ..model.costs import NOT_KEPT, Costs
from ..model.functionals import Functionals, innermost
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..planners import PLANNERS, Plan, Planner
from ..planners.base import require_steps
from ..states.in_place import ArrayStates
from ..states.layout import Array, Layout
from ..states.slots import States
from ..support.free_memory import default_budget_bytes
from ..support.interrupts import Shield
from ..support.values import shown, whole
from .watching import Checked, digest

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


# What unequal steps are planned with: costs, bytes for what is kept, the tier.
Unequals: TypeAlias = tuple[StageCosts, int, Tier | None]
# A plan, or the actions of a part of one.
Made = TypeVar("Made", Plan, tuple[Action, ...])
# The planner of steps that differ, and whose costs a first sweep is to show.
SURVEY = "survey"
# The memory of a rank, of which what it keeps in such a sweep is counted as parts.
WHOLE = 1 << 40


class Agreement(Protocol):
    """What the ranks of an MPI program agree on in a sweep whose first steps are timed.

    Every method is called by all ranks.

    Attributes
    ----------
    size : int
        How many ranks there are.
    """

    size: int

    def most(self, value: float, /) -> float:
        """Return the largest of all ranks' values."""
        ...

    def slowest(self, mine: Callable[[], Costs], /) -> Costs:
        """Return the costs that all ranks plan with, after those that each has seen.

        What `mine` raises on one rank is raised on all.
        """
        ...

    def largest(self, mine: Callable[[], int], /) -> int:
        """Return the largest of what `mine` returns on each rank; what it raises, all raise."""
        ...

    def fitting(
        self,
        mine: Callable[[], tuple[Unequals, int]],
        make: Callable[[Unequals, int | None], Made],
        start: Resumed = ...,
        /,
    ) -> Made:
        """Return what is made of unequal steps and fits every rank.

        `mine` returns what this rank plans with, and the bytes that are left of its room; what
        it raises on one rank is raised on all.  `make` is given what all plan with and, where
        no plan fits, how many states Revolve keeps; it begins at `start`.
        """
        ...

    def same(self, make: Callable[[], Made], /) -> Made:
        """Return what `make` returns; raise on all ranks unless it is the same."""
        ...


class Operators(Generic[State, Adjoint]):
    """A chain that runs the operators of the current shot.

    Everything above it, plans and executors included, knows a chain by its kind alone.

    Parameters
    ----------
    chain : Chain
        Of the first shot.
    wrap : callable
        What is made of the chain of each shot, such as one for several functionals.

    Attributes
    ----------
    in_place, state_is_tape, one_tape : bool
        The kind of chain, which all shots have in common.
    current : Chain or None
        What is run; None to forget the operators of the last shot.
    functionals : int or None
        How many adjoints are propagated at once, in a list; None for one, as it is.
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint],
        wrap: Callable[[Chain[State, Adjoint]], object],
        functionals: int | None = None,
    ) -> None:
        self.current: Chain[State, Adjoint] | None = cast(Chain[State, Adjoint], wrap(chain))
        self._wrap, self.functionals = wrap, functionals
        self.in_place, self.state_is_tape, self.one_tape = kind_of(chain)

    @classmethod
    def of(
        cls,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None,
        tape_step: Callable[[State, int], tuple[State, object]] | None,
        functionals: int | None,
        checked: bool,
    ) -> Self:
        """Return those of the arguments of a `Reversal`; the same, if that is what they are."""
        made = chain_of(chain, adjoint_step, tape_step)
        if isinstance(made, cls):
            return made
        if functionals is None:
            return cls(made, lambda chain: chain)
        count = whole(functionals, "functionals", 1)
        return cls(made, partial(Functionals.of, digest=digest if checked else None), count)

    def others(
        self,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None,
        tape_step: Callable[[State, int], tuple[State, object]] | None,
        *,
        durable: bool,
    ) -> Chain[State, Adjoint]:
        """Return the operators of another shot, to be made `current`.

        Raises
        ------
        ArgumentError
            If they are of another kind, or the run is durable.
        """
        if durable:
            raise ArgumentError(
                "use() is not for durable runs, which resume by their durable_label=; make a "
                "Reversal with one of its own for each shot"
            )
        made = chain_of(chain, adjoint_step, tape_step)
        if kind_of(made) != kind_of(self):
            names = ("in_place", "state_is_tape", "one_tape")
            ours, theirs = (
                ", ".join(map("{}={}".format, names, kind_of(each))) for each in (self, made)
            )
            raise ArgumentError(
                f"use() takes operators like those before, with {ours}; these have {theirs}: make "
                "another Reversal for them"
            )
        return cast(Chain[State, Adjoint], self._wrap(made))

    def _now(self) -> Chain[State, Adjoint]:
        if self.current is None:
            raise ArgumentError("the operators of the last shot are gone; give others by use()")
        return self.current

    def own(self) -> object:
        """Return the user's own adjoint step, which functionals and blocks call."""
        return innermost(self._now()).reverse

    # Properties, not methods: a call more would be paid at every step.

    @property
    def advance(self) -> Callable[[State, int, int], State]:
        """That of the current shot."""
        return self._now().advance

    @property
    def tape(self) -> Callable[[State, int], tuple[State, object]]:
        """That of the current shot."""
        return self._now().tape

    @property
    def reverse(self) -> Callable[[object, Adjoint, int], Adjoint]:
        """That of the current shot."""
        return self._now().reverse


@dataclass(frozen=True, slots=True)
class Arguments(Generic[State, Adjoint]):
    """What a `Reversal` is given, checked and filled in.

    Attributes
    ----------
    chain : Chain
        The operators, as they are run.
    operators : Operators
        What is at the bottom of it.
    n_steps : int or None
    budget : Budget
    stores : tuple of Store
        The slow tiers, closed.
    probed : tuple of Store
        What is measured for them.
    planner : str or Planner
    costs : Costs, StageCosts or None
        As given.
    states : States
    durable : DurableRun or None
    checked : bool
    watched : Checked or None
        The chain, where its operators are checked.
    may_differ : bool
        Whether steps that turn out to be unequal are planned as such.
    agreement : Agreement or None
        Of the ranks of an MPI program, which also correct costs themselves.
    """

    chain: Chain[State, Adjoint]
    operators: Operators[State, Adjoint]
    n_steps: int | None
    budget: Budget
    stores: tuple[Store, ...]
    probed: tuple[Store, ...]
    planner: str | Planner
    costs: Costs | StageCosts | None
    states: States[State, Array, Layout]
    durable: DurableRun | None
    checked: bool
    watched: Checked[State, Adjoint] | None
    may_differ: bool
    agreement: Agreement | None

    @classmethod
    def of(
        cls,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None = None,
        n_steps: int | None = None,
        *,
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
        memory: Budget | int | str | None = None,
        tiers: Tiers | None = None,
        planner: str | Plan | Planner = "auto",
        costs: Costs | StageCosts | None = None,
        checked: bool = False,
        functionals: int | None = None,
        states: States[State, Array, Layout] | None = None,
        durable: str | os.PathLike[str] | DurableRun | None = None,
        durable_every_s: float = 60.0,
        durable_label: str = "",
        agreement: Agreement | None = None,
        probed: Store | None = None,
    ) -> Self:
        """Return the arguments of a `Reversal`; its documentation describes them.

        Raises
        ------
        ArgumentError, BudgetError, StoreError
            If an argument breaks its rule, or does not go with another.
        """
        operators = Operators.of(chain, adjoint_step, tape_step, functionals, checked)
        watched = Checked(operators, operators.own) if checked and states is None else None
        chain = watched or operators
        _require_kinds(costs, planner)
        if isinstance(planner, Plan):
            n_steps = planner.n_steps if n_steps is None else n_steps
            memory = Budget(slots=planner.slots) if memory is None else memory
            costs = planner.costs if costs is None else costs
        _require_stages_alone(planner, costs, durable, states)
        if isinstance(costs, StageCosts):
            n_steps = len(costs.stages) if n_steps is None else n_steps
        if n_steps is not None:
            n_steps = require_steps(n_steps, planner if isinstance(planner, str) else "given")
        run = None
        if durable is not None:
            run, tiers = _durable_run(durable, tiers, states, durable_every_s, durable_label)
            chain, probed = run.chain(chain, unequal=isinstance(costs, StageCosts)), run.probe
        resolved = planner_of(planner, n_steps)
        budget, stores = _checked_budget(memory), _checked_stores(tiers)
        if isinstance(costs, Costs):
            # Less those of a tier that they were measured with and that is not here now.
            costs = agreeing(costs, chain)
            costs = costs if stores else costs.without_tiers()
        said = states is not None or run is not None or costs is not None  # what steps are like
        return cls(
            chain=chain,
            operators=operators,
            n_steps=n_steps,
            budget=budget,
            stores=stores,
            probed=stores if probed is None else (probed,),
            planner=resolved,
            costs=costs,
            states=_states_of(states, chain.in_place, run),
            durable=run,
            checked=checked,
            watched=watched,
            may_differ=not said and planner == "auto" and agreement is None,
            agreement=agreement,
        )

    @property
    def steps_differ(self) -> bool:
        """Whether steps are planned as unequal from the first sweep on."""
        return isinstance(self.costs, StageCosts) or self.planner == SURVEY

    @property
    def first_store(self) -> Store | None:
        """The fastest of the slow tiers."""
        return self.stores[0] if self.stores else None


def _durable_run(
    durable: str | os.PathLike[str] | DurableRun,
    tiers: Tiers | None,
    states: object,
    every_s: float,
    label: str,
) -> tuple[DurableRun, Tiers | None]:
    """Return the durable side of a run, and its tiers.  Raises ArgumentError."""
    if isinstance(durable, DurableRun):  # of a rank, whose store answers for all ranks
        return durable, tiers
    _require_durable_alone(tiers, states)
    run = DurableRun(durable, every_s, label)
    return run, run.store


def chain_of(
    chain: Chain[State, Adjoint] | Callable[[State, int], State],
    adjoint_step: Callable[..., Adjoint] | None,
    tape_step: Callable[[State, int], tuple[State, object]] | None,
) -> Chain[State, Adjoint]:
    """Return a chain, made of the functions if no chain is given.

    Raises
    ------
    ArgumentError
        If functions are given beside a chain, or `adjoint_step` is missing.
    """
    if callable(chain):
        if adjoint_step is None:
            raise ArgumentError("a plain step function needs an adjoint_step beside it")
        return FunctionChain(chain, adjoint_step, tape_step)
    if adjoint_step is not None or tape_step is not None:
        raise ArgumentError("adjoint_step and tape_step go with a plain step, not with a Chain")
    return chain


def kind_of(chain: Chain[State, Adjoint]) -> tuple[bool, bool, bool]:
    """Return `in_place`, `state_is_tape` and `one_tape`, which a chain need not have."""
    return chain.in_place, chain.state_is_tape, bool(getattr(chain, "one_tape", False))


def _checked_budget(memory: Budget | int | str | None) -> Budget:
    """Return the limit, part of the free memory if none is given.  Raises BudgetError."""
    found = Budget.parse(default_budget_bytes() if memory is None else memory)
    if found.slots is not None:
        found.slots_for(1)
    return found


def _require_kinds(costs: object, planner: object) -> None:
    """Raise ArgumentError for costs or a plan of another type."""
    if isinstance(planner, Plan) and planner.actions:
        raise ArgumentError(
            "planner= takes a plan of uniform steps, not one of stages that differ; give its costs "
            "as costs=, with which the steps are planned"
        )
    if costs is not None and not isinstance(costs, Costs | StageCosts):
        raise ArgumentError(
            f"costs={shown(costs)} must be Costs, from measure() or made by hand, or "
            "StageCosts of steps that differ"
        )


def _require_durable_alone(tier: object, states: object) -> None:
    """Raise ArgumentError for arguments that cannot be combined with `durable`."""
    if tier is not None:
        raise ArgumentError("durable= is the tier itself; leave tiers= out")
    if states is not None:
        raise ArgumentError("durable= takes states that are pytrees of NumPy arrays, not states=")


def _require_stages_alone(planner: object, costs: object, durable: object, states: object) -> None:
    """Raise ArgumentError for arguments that do not go with unequal steps, if these are."""
    if not (isinstance(costs, StageCosts) or planner == SURVEY):
        return
    given = f"planner={SURVEY!r}" if costs is None else "costs=StageCosts(...)"
    if planner == SURVEY and costs is not None:
        raise ArgumentError(f"planner={SURVEY!r} measures each step; leave costs= out, or it")
    if costs is not None and planner != "auto":
        raise ArgumentError(
            f"planner={shown(planner)} plans uniform steps; with {given} leave it out"
        )
    if planner == SURVEY and durable is not None:
        raise ArgumentError(f"{given} does not go with durable=; give costs=StageCosts(...) there")
    if states is not None and not callable(getattr(states, "weigh", None)):
        raise ArgumentError(
            f"{given} does not go with states= that do not weigh() each state; give Costs there"
        )


def _states_of(
    states: States[State, Array, Layout] | None, in_place: bool, run: DurableRun | None
) -> States[State, Array, Layout]:
    """Return what describes states.  Raises ArgumentError for an object that does not."""
    if run is not None and run.states is not None:
        return cast("States[State, Array, Layout]", run.states)
    if states is None:
        return ArrayStates(in_place, Layout if run is None else OrderedLayout)
    if not all(callable(getattr(states, name, None)) for name in ("layout", "slots")):
        raise ArgumentError(
            f"states={shown(states)} must describe states, with methods layout() and slots(); "
            "leave it out for trees of arrays, or give memory='3 slots'"
        )
    return states


def _checked_stores(tier: Tiers | None) -> tuple[Store, ...]:
    """Return the stores of the tiers, each of which can be used.  Raises StoreError."""
    stores = tuple(open_store(each) for each in tier_names(tier))
    require_distinct(stores, "the tiers")
    with Shield(up=True):
        for store in stores:
            store.check()
    return stores


def one_tape(chain: Chain[State, Adjoint]) -> bool:
    """Whether a chain has tapes, of which only the latest exists."""
    return not chain.state_is_tape and bool(getattr(chain, "one_tape", False))


def agreeing(costs: Costs, chain: Chain[State, Adjoint]) -> Costs:
    """Return given costs as those of a chain, of which no second tape may be kept perhaps.

    Raises
    ------
    ArgumentError
        If they disagree on what a tape is; how large one is shows when it is made.
    """
    if one_tape(chain) and not costs.state_is_tape:
        return costs if costs.one_tape else replace(costs, tape_bytes=NOT_KEPT)
    if chain.state_is_tape and not costs.state_is_tape:
        raise ArgumentError(
            f"costs say that steps make tapes (tape_step_s={costs.tape_step_s:g}), but this "
            "chain's state is its own tape; give costs without tape_step_s, or a chain that tapes"
        )
    if costs.state_is_tape and not chain.state_is_tape:
        raise ArgumentError(
            "costs say that a state is its own tape (tape_step_s=None), but this chain makes "
            "tapes; give tape_step_s and tape_bytes, or no costs to have them measured"
        )
    if chain.state_is_tape and costs.tape_slots != 1:
        raise ArgumentError(
            f"costs say that a tape has tape_bytes={costs.tape_bytes} and a state "
            f"state_bytes={costs.state_bytes}, but this chain's state is its own tape; "
            "leave tape_bytes out"
        )
    return costs


def planner_of(planner: str | Plan | Planner, n_steps: int | None) -> str | Planner:
    """Return the name of a planner, or the planner itself.

    Raises
    ------
    ArgumentError
        If there is none of that name, or the plan is for another number of steps.
    """
    if isinstance(planner, str):
        if planner != "auto" and planner not in (SURVEY, *PLANNERS):
            raise ArgumentError(
                f"planner {planner!r} is not known; choose 'auto' or one of {', '.join(PLANNERS)}"
            )
        return planner
    if not isinstance(planner, Plan):
        if not callable(planner):
            raise ArgumentError(f"planner={planner!r} must be a name, a Plan or a callable")
        return planner
    made = planner
    if made.n_steps != n_steps:
        raise ArgumentError(f"the plan is for {made.n_steps} steps, not n_steps={n_steps}")
    return lambda costs, slots, n: made


def planned(
    planner: Callable[[Costs, int, int], object], costs: Costs, slots: int, n_steps: int
) -> Plan:
    """Return the plan of a user's planner, for these steps and within these slots.

    Raises
    ------
    ArgumentError
        If it returns no plan, or one for another number of steps or other tapes.
    BudgetError
        If the plan takes more slots.
    """
    made = planner(costs, slots, n_steps)
    if not isinstance(made, Plan):
        raise ArgumentError(f"the planner returned {type(made).__name__}; it must return a Plan")
    theirs = made.costs
    if not isinstance(theirs, Costs):
        raise ArgumentError("the planner returned a plan of stages; it must plan uniform steps")
    if made.n_steps != n_steps:
        raise ArgumentError(f"the plan is for {made.n_steps} steps, not n_steps={n_steps}")
    if made.slots > slots:
        raise BudgetError(
            f"the plan takes {made.slots} fast slots, the budget holds {slots}; "
            "raise the budget or plan again"
        )
    if theirs.state_is_tape != costs.state_is_tape:
        kinds = {True: "a state is its own tape", False: "steps make tapes"}
        raise ArgumentError(
            f"in the plan's costs {kinds[theirs.state_is_tape]}, here "
            f"{kinds[costs.state_is_tape]}; plan again with the costs of this chain"
        )
    if costs.one_tape:  # a plan that keeps states only will do, whatever it took tapes for
        return made if theirs.one_tape else replace(made, seal=())
    if theirs.tape_slots < costs.tape_slots * (1 - 1e-9):
        raise ArgumentError(
            f"the plan is for tapes of {theirs.tape_slots:g} states, here one has "
            f"{costs.tape_slots:g}; plan again with the costs of this chain"
        )
    return made
