"""What the ranks of an `MPIReversal` agree on before a sweep: slots, costs and the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from ..backends.base import Store
from ..backends.urls import open_store
from ..durable.records import OrderedLayout
from ..durable.run import DurableRun
from ..measurement.chain import measure
from ..measurement.driver import with_driver
from ..measurement.seen import drifted
from ..measurement.store import probe_store
from ..model.budget import Budget
from ..model.chain import Chain
from ..model.costs import Costs
from ..model.tier import Tier
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
        self._planner, self._given = planner, costs
        self._checked, self._progress, self._states = checked, progress, states
        self._layout: Layout | None = None
        self.sweeps: Sweeps[State, Adjoint] | None = None
        self.costs: Costs | None = None
        self.plan: UniformPlan | None = None

    def prepared(
        self, state: State, matches: Callable[[], None], call: str
    ) -> Sweeps[State, Adjoint]:
        """Return the sweeps to run, new ones if states or costs are others than before.

        Parameters
        ----------
        matches : callable
            Raises ArgumentError if the call does not go with this rank's arguments.
        call : str
            The method that every rank must have called.
        """
        ranks = self._ranks

        def facts() -> tuple[dict[str, object], bool]:
            matches()
            layout = Layout.of(state) if self._states is None else self._states.layout(state)
            last = self._layout
            if last is None or not layout.same_as(last):
                self._forget()
                self._layout, self.costs = layout, None
            return {"the number of arrays in a state": len(layout.leaves)}, self.sweeps is None

        found = ranks.gather(facts, call)
        ranks.same([one for one, _ in found], "states have the same tree on every rank")
        if any(changed for _, changed in found):
            self._forget()
            self.sweeps = self._planned(state)
        assert self.sweeps is not None
        return self.sweeps

    def _forget(self) -> None:
        """Drop the plan, and all that was made for it; a durable folder stays open."""
        if self.sweeps is not None:
            self.sweeps.let_go()
        self.sweeps = self.plan = None

    def _planned(self, state: State) -> Sweeps[State, Adjoint]:
        """Measure what is not known and agree on slots, costs and the plan."""
        ranks, store, layout = self._ranks, self.store, self._layout
        assert layout is not None
        if self._durable is not None:
            ordered = OrderedLayout.like(Layout.of(state))
            self._durable.attach(ordered, self._n_steps, state)
            if self.costs is None and self._given is None:
                self.costs = self._durable.costs
        buffers = 0 if store is None else store.buffer_bytes(layout)
        slots = min(ranks.gather(lambda: self._budget.slots_for(layout.nbytes, buffers)))
        # Where one rank's states are new, all measure again.
        if not all(ranks.gather(lambda: self.costs is not None)):
            self.costs = self._slowest(self._given or self._measured(state, layout))
        given: Arguments[State, Adjoint] = Arguments.of(
            self._chain,
            n_steps=self._n_steps,
            memory=Budget(slots=slots),
            tiers=store,
            planner=self._planner,
            costs=self.costs,
            checked=self._checked,
            durable=self._durable,
            states=self._states,
            corrects=False,
        )
        sweeps = Sweeps(given, self._progress)
        if self._n_steps is not None:

            def drawn_up() -> dict[str, object]:
                plan = sweeps.prepare(state)
                figures = (plan.planner, plan.forward_steps, plan.makespan_s, plan.parameters)
                return {"the plan": str(figures)}

            # Equal costs make equal plans, unless the ranks' arithmetic differs.
            found = ranks.gather(drawn_up)
            ranks.same(found, "run the same version of everything on every rank")
            self.plan = sweeps.plan
        return sweeps

    def _measured(self, state: State, layout: Layout) -> Costs:
        """Return this rank's costs: steps in step with the others, its tier by itself."""
        ranks, store = self._ranks, self._own_store
        if self._durable is not None:
            store = self._durable.probe
        most = self._n_steps or 10_000
        share = _PROBE_S if store is None else 2 / 3 * _PROBE_S
        costs = measure(
            self._chain,
            state,
            most,
            seconds=share,
            states=self._states,
            agree=ranks.most,
            progress=self._progress,
        )
        if store is None:
            return costs

        def probed() -> Tier:
            sweep_s = most * costs.forward_step_s
            return probe_store(store, layout, seconds=_PROBE_S - share, most=most, sweep_s=sweep_s)

        tier = ranks.gather(probed)[ranks.rank]
        return with_driver(replace(costs, tiers=(tier,)), layout)

    def _slowest(self, mine: Costs) -> Costs:
        if self.store is None:
            mine = mine.without_tiers()
        found = self._ranks.gather(lambda: mine)
        facts: list[dict[str, object]] = [
            {"the tiers in costs": len(costs.tiers), "tape_step_s in costs": costs.state_is_tape}
            for costs in found
        ]
        self._ranks.same(facts, "give every rank costs of the same kind")
        return slowest(found, self._ranks.rank)

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
        assert self.costs is not None and self.sweeps is not None
        seen = self._slowest(seen)
        if drifted(self.costs, seen):
            self.sweeps.end(keep=False)
            self.costs, self.sweeps = seen, None
