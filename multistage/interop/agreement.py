"""What the ranks of an `MPIReversal` agree on: arguments, slots, costs and the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ..backends.base import Store
from ..backends.urls import open_store
from ..durable.records import OrderedLayout
from ..durable.run import DurableRun
from ..errors import ArgumentError
from ..measurement.chain import measure
from ..measurement.driver import with_driver
from ..measurement.seen import drifted
from ..measurement.store import probe_store
from ..model.budget import Budget
from ..model.chain import Chain
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..planners import Planner, UniformPlan
from ..reversing.arguments import Arguments
from ..reversing.sweeps import Sweeps
from ..states.layout import Array, Layout
from ..states.slots import States
from .agreed import AgreedStore
from .ranks import Ranks, slowest

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_PROBE_S = 1.0


def facts_to_agree(
    checked_here: partial[Arguments[State, Adjoint]], on_error: str
) -> dict[str, object]:
    """Check the arguments of this rank; return what must be the same on every rank.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        If an argument breaks its rule on this rank.
    """
    words = checked_here.keywords
    if on_error not in ("abort", "raise"):
        raise ArgumentError(f"on_error={on_error!r} must be 'abort' or 'raise'")
    if isinstance(words["costs"], StageCosts):
        raise ArgumentError(
            "costs=StageCosts(...) are those of unequal steps, and MPIReversal plans "
            "uniform ones; give Costs, or leave them out to have them measured"
        )
    given = checked_here()
    same = ("n_steps", "durable_every_s", "durable_label")
    planner = words["planner"]  # what one of the user's own makes is compared later
    return {name: words[name] for name in same} | {
        "planner": planner if isinstance(planner, str) else "one of your own",
        "on_error": on_error,
        "having a tier": words["tiers"] is not None,
        "having a durable folder": words["durable"] is not None,
        "having costs": words["costs"] is not None,
        "having a tape": not given.chain.state_is_tape,
    }


class Agreement(Generic[State, Adjoint]):
    """The sweeps of one rank, made with what all ranks have agreed on.

    Parameters
    ----------
    ranks : Ranks
    chain : Chain
    n_steps : int or None
    budget : Budget
        Of this rank.
    tier : str or Store, optional
        Of this rank.
    durable : DurableRun, optional
        This rank's part; its store is the tier.
    planner, costs, checked, progress, states
        As for `MPIReversal`.

    Attributes
    ----------
    sweeps : Sweeps or None
        None until all ranks have agreed.
    plan : UniformPlan or None
    costs : Costs or None
        The slowest rank's times, this rank's bytes.
    """

    def __init__(
        self,
        ranks: Ranks,
        chain: Chain[State, Adjoint],
        n_steps: int | None,
        budget: Budget,
        tier: str | Store | None,
        durable: DurableRun | None,
        *,
        planner: str | UniformPlan | Planner,
        costs: Costs | None,
        checked: bool,
        progress: bool,
        states: States[State, Array, Layout] | None = None,
    ) -> None:
        self._ranks, self._chain, self._n_steps = ranks, chain, n_steps
        self._budget, self._durable = budget, durable
        self._own_store: Store | None = None
        if durable is not None:
            self._own_store = durable.store
        elif tier is not None:
            self._own_store = open_store(tier)
        self.store = None if self._own_store is None else AgreedStore(self._own_store, ranks)
        self._probed = self._own_store if durable is None else durable.probe
        self.most = ranks.most
        self._planner, self._given = planner, costs
        self._checked, self._progress, self._states = checked, progress, states
        self._layout: Layout | None = None
        self.sweeps: Sweeps[State, Adjoint] | None = None
        self.costs: Costs | None = None
        self.plan: UniformPlan | None = None

    def prepared(
        self, state: State, matches: Callable[[], None], call: str, *, sweeps: bool
    ) -> Sweeps[State, Adjoint]:
        """Return the sweeps to run, new ones if states or costs are others than before.

        Parameters
        ----------
        matches : callable
            Raises ArgumentError if the call does not go with this rank's arguments.
        call : str
            The method that every rank must have called.
        sweeps : bool
            Whether a sweep follows, whose first steps may show what a step takes.
        """
        ranks = self._ranks

        def facts() -> tuple[dict[str, object], bool]:
            matches()
            layout = Layout.of(state) if self._states is None else self._states.layout(state)
            last = self._layout
            if last is None or not layout.same_as(last):
                self._forget()
                self._layout, self.costs = layout, None
            arrays: dict[str, object] = {"the number of arrays in a state": len(layout.leaves)}
            return arrays, self.sweeps is None or self.costs is None

        found = ranks.gather(facts, call)
        ranks.same([one for one, _ in found], "states have the same tree on every rank")
        if any(changed for _, changed in found):
            self._forget()
            self.sweeps = self._planned(state, sweeps=sweeps)
        assert self.sweeps is not None
        return self.sweeps

    def _forget(self) -> None:
        """Drop the plan, and all that was made for it; a durable folder stays open."""
        if self.sweeps is not None:
            self.sweeps.let_go()
        self.sweeps = self.plan = None

    def _planned(self, state: State, *, sweeps: bool) -> Sweeps[State, Adjoint]:
        """Agree on slots, costs and the plan.

        Costs that are not known are measured, or shown by the first steps of the sweep that
        follows; the ranks then agree on them, and the plan, in that sweep.
        """
        ranks, store, layout = self._ranks, self.store, self._layout
        assert layout is not None
        if self._durable is not None:
            ordered = OrderedLayout.like(Layout.of(state))
            self._durable.attach(ordered, self._n_steps, state)
            if self.costs is None and self._given is None:
                self.costs = self._durable.costs
        buffers = 0 if store is None else store.buffer_bytes(layout)
        slots = min(ranks.gather(lambda: self._budget.slots_for(layout.nbytes, buffers)))
        # Where one rank's states are new, the costs of all are.
        if not all(ranks.gather(lambda: self.costs is not None)):
            self.costs = None
            begun = self._durable is not None and self._durable.begun
            if (given := self._given) is not None:
                self.slowest(lambda: given)
            elif not sweeps or begun:
                self._measure(state, layout)
        arguments: Arguments[State, Adjoint] = Arguments.of(
            self._chain,
            n_steps=self._n_steps,
            memory=Budget(slots=slots),
            tiers=store,
            planner=self._planner,
            costs=self.costs,
            checked=self._checked,
            durable=self._durable,
            states=self._states,
            agreement=self,
            probed=self._probed,
        )
        made = Sweeps(arguments, self._progress)
        if self._n_steps is not None and self.costs is not None:
            self.planned(partial(made.prepare, state))
        return made

    def _measure(self, state: State, layout: Layout) -> None:
        """Measure costs: steps in step with the others, this rank's tier by itself."""
        most, store = self._n_steps or 10_000, self._probed
        share = _PROBE_S if store is None else 2 / 3 * _PROBE_S
        costs = measure(
            self._chain,
            state,
            most,
            seconds=share,
            states=self._states,
            agree=self.most,
            progress=self._progress,
        )

        def mine() -> Costs:
            if store is None:
                return costs
            left_s, sweep_s = _PROBE_S - share, most * costs.forward_step_s
            tier = probe_store(store, layout, seconds=left_s, most=most, sweep_s=sweep_s)
            return with_driver(replace(costs, tiers=(tier,)), layout)

        self.slowest(mine)

    def slowest(self, mine: Callable[[], Costs]) -> Costs:
        """Return the costs that all ranks plan with, after those that each has seen."""
        found = self._ranks.gather(mine if self.store else lambda: mine().without_tiers())
        facts: list[dict[str, object]] = [
            {"the tiers in costs": len(costs.tiers), "tape_step_s in costs": costs.state_is_tape}
            for costs in found
        ]
        self._ranks.same(facts, "give every rank costs of the same kind")
        self.costs = slowest(found, self._ranks.rank)
        return self.costs

    def planned(self, make: Callable[[], UniformPlan]) -> UniformPlan:
        """Return the plan that `make` returns; raise on all ranks unless it is the same.

        Equal costs make equal plans, unless the ranks' arithmetic differs.
        """
        made: list[UniformPlan] = []

        def figures() -> dict[str, object]:
            made.append(plan := make())
            told = (plan.planner, plan.forward_steps, plan.makespan_s, plan.parameters)
            return {"the plan": str(told)}

        remedy = "run the same version of everything on every rank"
        self._ranks.same(self._ranks.gather(figures), remedy)
        self.plan = made[0]
        return made[0]

    def settle(self) -> None:
        """Learn the fate of the last transfers, together with the other ranks."""
        if self.store is not None and self.sweeps is not None:
            self.store.settle()

    def ended(self, plan: UniformPlan | None, seen: Costs) -> None:
        """Note the plan of complete sweeps; plan again if the ranks have seen other costs."""
        self.plan = plan
        if self.store is not None:
            self.store.settle()
        if self._durable is not None:  # its folder is the run's
            return
        costs = self.costs
        assert costs is not None and self.sweeps is not None
        if drifted(costs, self.slowest(lambda: seen)):
            self.sweeps.end(keep=False)
            self.sweeps = None
        else:
            self.costs = costs
