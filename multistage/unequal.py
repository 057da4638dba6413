"""What a `Reversal` does where its steps differ in cost and its states in size.

With costs given the plan is made before the first step.  Without, the first sweep
surveys: it keeps states as they come, within the budget, and is reversed by what its
forward sweep has shown; the next one is planned.  A state or tape that takes more
than a plan counts on ends the sweep: given costs are wrong then, measured ones are
measured again.

A budget pays for what is kept, here as for uniform steps.  Planners of chains count
all memory, so they are given the budget on top of the least in which the chain can be
reversed at all: state 0, and the largest step with its states, tape and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Generic, TypeVar

from .actions import Action, EndForward, Get, Put, Reverse, Schedule, Tape
from .chain import Chain
from .costs import Budget, Costs
from .errors import ArgumentError, BudgetError
from .execute import Counts
from .given import one_tape
from .metered import LargerThanPlanned, Metered, Seen, of_chain
from .plan.base import Plan
from .plan.chain_memory import use_of
from .plan.heterogeneous import ChainPlan, plan_chain
from .plan.pieces import Strategy, chain_plan, performed, survey
from .stages import StageCosts
from .varied import VariedStates

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

# A plan is made again when times that differ from its own are such a part of all.
_DRIFT = 0.3


def agreeing(costs: StageCosts, chain: Chain[Any, Any], n_steps: int) -> StageCosts:
    """Return given costs of unequal steps as those of a chain.

    Raises
    ------
    ArgumentError
        If they are for another number of steps, or disagree on what a tape is.
    """
    if len(costs.stages) != n_steps:
        raise ArgumentError(
            f"costs have {len(costs.stages)} stages, but there are n_steps={n_steps}; "
            "give one Stage for each step"
        )
    if chain.state_is_tape:
        for i, stage in enumerate(costs.stages):
            if stage.tape_bytes != stage.output_bytes:
                raise ArgumentError(
                    f"costs say that the tape of step {i} has tape_bytes={stage.tape_bytes} and "
                    f"its output output_bytes={stage.output_bytes}, but this chain's state is its "
                    "own tape; give tape_bytes equal to output_bytes, or a chain that tapes"
                )
    return of_chain(costs, chain)


def largest_state(costs: StageCosts) -> int:
    """Return the bytes of the largest state that may be kept: any but the last."""
    return max(1, costs.input_bytes, *(stage.output_bytes for stage in costs.stages[:-1]))


class Unequal(Generic[State, Adjoint]):
    """Costs, plan and measuring of a reversal whose steps differ.

    Parameters
    ----------
    chain : Chain
    n_steps : int or None
    budget : Budget
    costs : StageCosts or None
        As given; None to measure them.

    Attributes
    ----------
    plan : ChainPlan or None
        Of the next sweep; None if it is to be surveyed.
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint],
        n_steps: int | None,
        budget: Budget,
        costs: StageCosts | None,
    ) -> None:
        self.states = VariedStates(chain.in_place)
        self.metered = Metered(chain, self.states)
        self.plan: ChainPlan | None = None
        self._chain, self._n_steps, self._budget = chain, n_steps, budget
        self._given = costs is not None
        self.costs = costs
        if costs is not None:
            assert n_steps is not None
            self.costs = agreeing(costs, chain, n_steps)
            self._room(self.costs)
        self._surveyed: list[Action] = []  # what the last survey did
        self._strategy: Strategy = "revolve" if one_tape(chain) else "optimal"

    def _room(self, costs: StageCosts) -> int:
        """Return the bytes for kept states and tapes.  Raises BudgetError."""
        largest = largest_state(costs)
        slots = self._budget.slots_for(largest)
        return slots * largest if self._budget.bytes is None else self._budget.bytes

    def prepare(self, state: State) -> None:
        """Weigh state 0; plan the next sweep if its costs are known.

        Raises
        ------
        StateError
            If the state is no pytree of plain arrays.
        BudgetError
            If it is larger than the costs say, or the budget does not hold one state.
        """
        self.states.layout(state)
        self.metered.seen, self.metered.costs = Seen(), self.costs
        try:
            self.metered.begin(state)
        except LargerThanPlanned:
            if self._given:
                raise
            self.forget()  # another state 0 than before
            self.metered.begin(state)
        if self.plan is None and self.costs is not None:
            self.plan = chain_plan(self.costs, self._room(self.costs), self._strategy)

    def forget(self) -> None:
        """Let go of a plan that does not hold; the next sweep is surveyed."""
        self.plan = self.costs = self.metered.costs = None

    def schedule(self, is_last: Callable[[int], bool] | None) -> Schedule:
        """Return the schedule of the next sweep, for the executor.

        Parameters
        ----------
        is_last : callable, optional
            For a number of steps that is not known; see `survey`.
        """
        if self.plan is not None and is_last is None:
            return _schedule(self.plan)
        if is_last is None:
            is_last = self._is_last
        seen, chain = self.metered.seen, self._chain
        schedule = survey(
            self._room_now,
            is_last,
            lambda i: seen.state_bytes[i],
            lambda start, stop: seen.costs(stop, chain, start),
            self._strategy,
        )
        self._surveyed.clear()
        return _recorded(schedule, self._surveyed)

    def _is_last(self, i: int) -> bool:
        return i == self._n_steps

    def _room_now(self, i: int) -> int:
        """Return the room as far as states are known: up to state i, which must fit."""
        sizes = self.metered.seen.state_bytes[: i + 1]
        if self._budget.slots is not None:
            return self._budget.slots * max(1, *sizes)
        assert self._budget.bytes is not None
        if sizes[i] > self._budget.bytes:
            raise BudgetError(
                f"budget of {self._budget.bytes} bytes < {sizes[i]} bytes of state {i}; "
                "raise the budget"
            )
        return self._budget.bytes

    @property
    def refuses_larger(self) -> bool:
        """Whether sizes beyond the costs are an error, not a reason to measure again."""
        return self._given or self.costs is None

    @property
    def mean_step_s(self) -> float:
        """Seconds of a forward step, on average; a guess if they are not known."""
        if self.costs is None:
            return 1e-3
        total_s = sum(stage.forward_s for stage in self.costs.stages)
        return max(1e-6, total_s / len(self.costs.stages))

    def described(self) -> Plan | None:
        """Return the plan of the next sweep as one of uniform steps, None if it surveys."""
        return None if self.plan is None else described(self.plan)

    def ended(self, n_steps: int, counts: Counts) -> Callable[[], Plan]:
        """Learn from a sweep that has ended; return what describes it.

        Once that is asked, `counts` have the peak that sizes as seen come to.
        """
        plan, actions = self.plan, tuple(self._surveyed)
        seen = self._learn(n_steps)

        def made() -> Plan:
            drawn = plan or surveyed(seen, actions)
            found = described(drawn)
            peak_bytes = use_of(drawn.actions, seen).peak_bytes
            counts.peak_slots = peak_bytes / found.costs.state_bytes
            return found

        return cache(made)

    def _learn(self, n_steps: int) -> StageCosts:
        """Return what the sweep that has ended has shown; plan the next one by it."""
        seen = self.metered.seen.costs(n_steps, self._chain)
        if not self._given and self._n_steps is not None and self._differs(seen):
            self.costs, self.plan = seen, None
        return seen

    def _differs(self, seen: StageCosts) -> bool:
        if self.costs is None:
            return True
        pairs = list(zip(self.costs.stages, seen.stages, strict=True))
        total_s = sum(new.forward_s for _, new in pairs)
        off_s = sum(abs(new.forward_s - old.forward_s) for old, new in pairs)
        sizes = any(new.output_bytes != old.output_bytes for old, new in pairs)
        return sizes or off_s > _DRIFT * total_s


def described(chain: ChainPlan) -> Plan:
    """Return a plan of unequal steps as a `Plan`, its costs the means over the steps."""
    costs, n = chain.costs, len(chain.costs.stages)
    sizes = [costs.input_bytes, *(stage.output_bytes for stage in costs.stages)]
    state_bytes = max(1, round(sum(sizes) / len(sizes)))
    means = Costs(
        forward_step_s=max(1e-12, sum(stage.forward_s for stage in costs.stages) / n),
        reverse_step_s=sum(stage.backward_s for stage in costs.stages) / n,
        state_bytes=state_bytes,
    )
    plan = Plan(
        planner=f"unequal, {chain.strategy}",
        n_steps=n,
        slots=max(1, (chain.memory_bytes or chain.peak_bytes) // state_bytes),
        costs=means,
        make=lambda: _schedule(chain),
        makespan_s=chain.makespan_s,
        lower_bound_s=chain.plain_s,
        forward_steps=chain.forward_steps,
        peak_slots=chain.peak_bytes / state_bytes,
        writes=sum(isinstance(action, Put) for action in chain.actions),
        reads=sum(isinstance(action, Get) for action in chain.actions),
        note=f"{chain.summary()}; step times and sizes shown are means over the steps",
    )
    return replace(plan, seal=plan._vouched())


def surveyed(seen: StageCosts, actions: Iterable[Action]) -> ChainPlan:
    """Return what a survey did as a plan of a chain and its loss."""
    n, taped = len(seen.stages), set()
    found: list[Action] = []
    for action in actions:
        match action:
            case Tape(step):
                taped.add(step)
            case Reverse(step) if step in taped:
                taped.remove(step)
            case Reverse(step):
                found.append(Tape(step))
            case EndForward():
                found += [Tape(n), action]
                action = Reverse(n)
        found.append(action)
    use = use_of(found, seen)
    return replace(
        plan_chain(seen, None, "store-all"),
        strategy="survey",
        actions=tuple(found),
        makespan_s=use.makespan_s,
        peak_bytes=use.peak_bytes,
        forward_steps=use.forward_steps,
    )


def _recorded(schedule: Schedule, into: list[Action]) -> Schedule:
    for action in schedule:
        into.append(action)
        yield action


def _schedule(chain: ChainPlan) -> Schedule:
    yield from performed(chain.actions, len(chain.costs.stages))
