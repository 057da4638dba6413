"""The front door: run a computation forward, then its adjoint, within a budget.

A `Reversal` prepares (measures and plans), runs and reports.  Its parts are in
`multistage/reversing/`: the arguments, checked; the sweeps; the costs, the plan and the
executor of uniform or of unequal steps; and the reports.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Self, SupportsIndex, TypeVar, overload

from .backends.urls import Tiers
from .errors import ArgumentError
from .model.budget import Budget
from .model.chain import Chain
from .model.costs import Costs
from .model.functionals import times
from .model.stages import StageCosts
from .planners import Plan, Planner
from .report import Report
from .reversing.arguments import Arguments
from .reversing.sweeps import Sweeps
from .states.layout import Array, Layout
from .states.slots import States

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Reversal(Generic[State, Adjoint]):
    """A computation of `n_steps` steps and its adjoint, within a memory budget.

    Parameters
    ----------
    chain : Chain, or callable `step(state, i) -> state`
        The computation.  A plain function runs step i and does not change
        its argument; states are arrays or nested tuples, lists, dicts of arrays.
    adjoint_step : callable, optional
        With a plain function: `adjoint_step(state, adjoint, i) -> adjoint`,
        or `adjoint_step(tape, adjoint, i)` if `tape_step` is given.
    n_steps : int or None
        Number of steps; None if `forward(until=...)` finds the end.
    tape_step : callable, optional
        `tape_step(state, i) -> (state, tape)`.
    memory : Budget, int or str, optional
        Fast memory for checkpoints: bytes, `"512 MiB"` or `"32 slots"`.
        Default: a quarter of the free memory.
    tiers : str, Path, Store or a sequence of them, optional
        Slow tiers, fastest first: `"file:///scratch"`, `"memory:"`,
        `"s3://bucket/run"` or a store; a cascade of two,
        `"file:///scratch?capacity=10GiB > s3://bucket/run"`, is one tier.
        Without a tier, the schedule uses fast memory alone.  All planners but
        the hierarchical ones use the first tier only.
    planner : str, Plan or callable
        A key of `PLANNERS`, or `"auto"` for the fastest prediction; an existing
        plan; or a planner of your own, `(costs, slots, n_steps) -> Plan`.
        `"survey"` is for steps that differ: the first sweep measures each of them.
    costs : Costs or StageCosts, optional
        Assumed costs, such as `costs` of a run before; if not given, the first
        `forward` times its own first steps, measures the tiers and plans the rest.
        Times are corrected by those that each sweep shows; a plan as `planner`
        is followed as it is.
        StageCosts are for steps that differ, one Stage per step; without them,
        the first sweep finds states whose sizes differ and measures them
        for the next sweep.  See `docs/howto/unequal.md`.
    checked : bool
        Check every action of the schedule before it is performed, also if it
        comes from a planner of this package; other schedules are always checked.
        Plans for steps that differ are checked byte by byte; the schedules of sweeps
        that measure such steps are not checked.  Operators are checked, too: see
        `docs/howto/operators.md`.  Steps are then run one by one, and each state is
        read once more.
    functionals : int, optional
        Of how many functionals the adjoints are computed in one reverse sweep:
        `reverse` then takes a list of so many adjoints and returns a list.  Each
        adjoint step is called for one after the other, from the same state or tape,
        which it leaves as it is; it keeps sums, such as gradients of a model, in its
        adjoint.  `costs` are those of one functional's adjoint step; in plans and
        reports an adjoint step is that of all.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook, unless the
        environment variable `MULTISTAGE_PROGRESS` is set.
    states : States, optional
        How states are described and kept, if they are not pytrees of arrays.
    durable : str or Path, optional
        A folder that keeps states and the progress of the reverse sweep, in
        place of a tier: after a kill, the same call resumes the run, also with
        `until`, or of steps that differ with their `costs`.  See `docs/howto/durable.md`.
    durable_every_s : float
        Minimum seconds between two writes of the adjoint to the folder; where steps
        differ, of states in the forward sweep too.
    durable_label : str
        Distinguishes runs that begin with the same state: a run is resumed only
        under its own label.

    Attributes
    ----------
    plan : Plan or None
        The plan of the sweep in progress or, between sweeps, of the last sweep.
        None before `reverse` returns, if the length was unknown or the sweep
        surveyed steps that differ.
    costs : Costs, StageCosts or None
        The costs for planning the next sweep: StageCosts if its steps differ.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        Before any step runs: rule, values, remedy.

    Notes
    -----
    Use a Reversal from one thread.  As a context manager it stops its threads and
    removes its files at the end of the block; otherwise call `close`.  A Reversal
    that is dropped without `close` does the same when the interpreter collects it.

    A store belongs to one run from its first `forward` to `close`; a second run
    in it raises StoreError.  A run with a tier also raises StoreError in a forked
    child; call `close` there, which does not affect the parent's run, and start
    another run.

    Examples
    --------
    >>> import numpy as np
    >>> with Reversal(lambda x, i: x * x, lambda x, a, i: 2 * x * a, 3, memory="2 slots") as run:
    ...     last = run.forward(np.array(2.0))
    ...     gradient = run.reverse(np.array(1.0))
    >>> float(last), float(gradient)
    (256.0, 1024.0)
    """

    def __init__(
        self,
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
        progress: bool | None = None,
        states: States[State, Array, Layout] | None = None,
        durable: str | os.PathLike[str] | None = None,
        durable_every_s: float = 60.0,
        durable_label: str = "",
    ) -> None:
        given: Arguments[State, Adjoint] = Arguments.of(
            chain,
            adjoint_step,
            n_steps,
            tape_step=tape_step,
            memory=memory,
            tiers=tiers,
            planner=planner,
            costs=times(costs, functionals),
            checked=checked,
            functionals=functionals,
            states=states,
            durable=durable,
            durable_every_s=durable_every_s,
            durable_label=durable_label,
        )
        self._sweeps = Sweeps(given, progress)

    @property
    def plan(self) -> Plan | None:
        """The plan of the sweep in progress or the last; None if it is not known yet."""
        return self._sweeps.plan

    @property
    def costs(self) -> Costs | StageCosts | None:
        """The costs for planning the next sweep, given or measured."""
        return self._sweeps.costs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The gradient of a durable run may not have been saved yet.
        self._sweeps.end(keep=kind is not None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse: a copy would share stores, slots and the sweep in progress.

        Raises
        ------
        ArgumentError
            Whether it is copied or pickled.
        """
        raise ArgumentError(
            "a Reversal holds threads, files and a sweep, and cannot be copied or pickled; "
            "make another with the same arguments"
        )

    def close(self) -> None:
        """Forget a sweep in progress, stop threads, remove files.  May be called twice.

        The folder of a durable run is removed if the run is complete.
        """
        self._sweeps.end(keep=False)

    def use(
        self,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None = None,
        *,
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
    ) -> None:
        """Run other operators in the sweeps to come, such as those of the next shot.

        Costs, the plan, memory, files and threads stay: the next sweep measures nothing
        and opens nothing, unless its states have another layout; it plans again only if
        costs have drifted.  A sweep in progress is forgotten.

        Parameters
        ----------
        chain, adjoint_step, tape_step
            As for `Reversal`, and of the same kind as those before: functional or in place,
            with or without tapes.

        Raises
        ------
        ArgumentError
            If they are of another kind, or the run is durable; nothing changes then.
        StoreError
            In a forked child.

        Examples
        --------
        >>> import numpy as np
        >>> from multistage import FunctionChain
        >>> def shot(scale):
        ...     return FunctionChain(lambda x, i: scale * x, lambda x, a, i: scale * a)
        >>> gradients = []
        >>> with Reversal(shot(1), n_steps=4, memory="2 slots") as run:
        ...     for scale in (1, 2, 3):
        ...         run.use(shot(scale))
        ...         last = run.forward(np.array(1.0))
        ...         gradients.append(float(run.reverse(np.array(1.0))))
        >>> gradients
        [1.0, 16.0, 81.0]
        """
        given = self._sweeps.given
        durable = given.durable is not None
        self._sweeps.use(given.operators.others(chain, adjoint_step, tape_step, durable=durable))

    def prepare(self, state: State) -> Plan:
        """Measure, plan and open the tier before the first `forward`; return the plan.

        Without `costs`, some steps are run on copies of `state`, to be measured: `step` is
        called some extra times, `adjoint_step` never, perhaps for an i beyond the end that
        `until` will find.

        Raises
        ------
        ArgumentError
            If steps differ, and their costs are not known yet.
        StateError, BudgetError, StoreError
            As `forward` does.
        """
        return self._sweeps.prepare(state)

    def forward(self, state: State, until: Callable[[State, int], bool] | None = None) -> State:
        """Run the forward sweep from `state`; return the last state.

        Parameters
        ----------
        state : pytree of arrays
            State 0.  A functional chain does not change it, and you must not write to
            it before `reverse` returns; an in-place chain overwrites it.
        until : callable, optional
            For an unknown number of steps: `until(state, i)` says whether
            state i, i = 1, 2, ..., is the last.  A resumed durable run does not
            call it again for the states in its folder.

        Raises
        ------
        StateError
            If a leaf is not a plain array, or a state changes its structure,
            shape or dtype.
        BudgetError
            If the budget is smaller than one state.
        StoreError
            If the tier cannot be used or holds another run, in a forked child,
            or if the durable folder is refused: it is in use, others can write to
            it, or it belongs to another run or format version.
        """
        return self._sweeps.forward(state, until)

    @overload
    def reverse(self, adjoint: Adjoint) -> Adjoint: ...

    @overload
    def reverse(self, adjoint: Sequence[Adjoint]) -> list[Adjoint]: ...

    def reverse(self, adjoint: Adjoint | Sequence[Adjoint]) -> Adjoint | list[Adjoint]:
        """Run the reverse sweep from the adjoint of the last state; return that of state 0.

        With `functionals=k`, run it from a list of k adjoints, which are copied, and return k.

        Raises
        ------
        ArgumentError
            If there is no forward sweep to reverse: each serves one reverse sweep; or for
            another number of adjoints than of functionals.
            In a durable run: if the adjoint is not a pytree of arrays, or differs
            from the one with which the run began; call `reverse` again with that.
        StateError
            In a durable run: if an adjoint step changes the adjoint's layout or, where steps
            differ, an adjoint has a tree that cannot be written down.
        StoreError
            In a forked child.  In a durable run: if the adjoint on the disk became
            unreadable since `forward`.
        """
        given: Any = adjoint
        return self._sweeps.reverse(given)

    def report(self) -> Report:
        """Return predicted and measured values of the last sweeps.

        After Ctrl-C or an error in one of them, the report states how far they
        came (`ended`).

        Raises
        ------
        ArgumentError
            Before the first sweeps have ended, or if the last ones were
            stopped before their first step.
        """
        return self._sweeps.report()


def reverse(
    step: Callable[[State, int], State],
    adjoint_step: Callable[..., Adjoint],
    state: State,
    adjoint: Adjoint | Callable[[State], Adjoint],
    n_steps: int,
    *,
    tape_step: Callable[[State, int], tuple[State, object]] | None = None,
    memory: Budget | int | str | None = None,
    tiers: Tiers | None = None,
    planner: str | Plan | Planner = "auto",
    costs: Costs | StageCosts | None = None,
    functionals: int | None = None,
    progress: bool | None = None,
    durable: str | os.PathLike[str] | None = None,
    durable_every_s: float = 60.0,
    durable_label: str = "",
) -> Result[State, Adjoint]:
    """Run `n_steps` steps from `state` and their adjoint, in one call.

    Parameters
    ----------
    step, adjoint_step, state, n_steps, tape_step, memory, tiers, planner
        As for `Reversal` and its `forward`.
    adjoint : pytree of arrays, or callable
        Adjoint of the last state, or a function of the last state that returns it.
    costs, functionals, progress, durable, durable_every_s, durable_label
        As for `Reversal`; with `functionals`, lists of adjoints are given and returned.

    Returns
    -------
    Result
        `adjoint` of state 0, `last_state`, `report`.

    Raises
    ------
    ArgumentError, BudgetError, StoreError, StateError
        As `Reversal` does.

    Examples
    --------
    >>> import numpy as np
    >>> result = reverse(
    ...     lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a,
    ...     state=np.array(1.0), adjoint=lambda last: 2 * last, n_steps=100, memory="5 slots",
    ... )
    >>> round(float(result.adjoint), 12)
    0.001249042311
    """
    with Reversal(
        step,
        adjoint_step,
        n_steps,
        tape_step=tape_step,
        memory=memory,
        tiers=tiers,
        planner=planner,
        costs=costs,
        functionals=functionals,
        progress=progress,
        durable=durable,
        durable_every_s=durable_every_s,
        durable_label=durable_label,
    ) as run:
        last = run.forward(state)
        start: Any = adjoint(last) if callable(adjoint) else adjoint
        # The reverse sweep runs steps again, perhaps in the very buffer that holds `last`.
        kept = copy.deepcopy(last)
        return Result(run.reverse(start), kept, run.report())


@dataclass(frozen=True, slots=True)
class Result(Generic[State, Adjoint]):
    """What `reverse` returns.

    Attributes
    ----------
    adjoint : pytree of arrays
        Adjoint of state 0.
    last_state : pytree of arrays
        A copy, made before the reverse sweep.
    report : Report

    Examples
    --------
    >>> import numpy as np
    >>> result = reverse(
    ...     lambda x, i: x * x, lambda x, a, i: 2 * x * a, np.array(2.0), np.array(1.0), 3,
    ...     memory="2 slots",
    ... )
    >>> float(result.last_state), float(result.adjoint)
    (256.0, 1024.0)
    """

    adjoint: Adjoint
    last_state: State
    report: Report
