"""A `Reversal` on every rank of an MPI program, all in step.

`MPIReversal` adds to a `Reversal` what several ranks have to agree on: once
before the first step (arguments, slots, costs, the plan), once per sweep (the
costs as they were seen), and, through `AgreedStore`, the fate of transfers.
`interop.ranks` says how that is agreed and why nothing waits forever.

======================================  ======================================
what happens on one rank                what every rank sees
======================================  ======================================
other arguments than on rank 0          ArgumentError, both values named
a tier that cannot be used              StoreError with that rank's message
a budget that is too small              BudgetError with that rank's message
a slower tier or slower steps           the plan of the slowest rank
a tier that slows down, is full         fewer states are stored, on all
a checkpoint lost                       it is lost on all, and run again
a durable folder of another run         StoreError with that rank's message
killed at any moment                    durable: resumed from the least of all
a state larger than its StageCosts say  BudgetError, after the sweep in which it was
another method called                   ArgumentError, both methods named
an operator raises, Ctrl-C              the message, and the end of the program
======================================  ======================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar

from ..backends.urls import Tiers, open_store, tier_names
from ..durable.records import OrderedLayout
from ..durable.run import DurableRun
from ..errors import ArgumentError, BudgetError
from ..measurement.chain import measure, with_tiers
from ..model.budget import Budget
from ..model.chain import Chain
from ..model.costs import Costs
from ..model.functionals import times
from ..model.stages import StageCosts
from ..planners import Plan, Planner
from ..planners.base import BUFFERS
from ..report import Report
from ..reversing.arguments import SURVEY, Arguments, Operators
from ..reversing.sweeps import THEY_DIFFER, Sweeps
from ..reversing.unequal import Unequal, agreeing
from ..reversing.uniform import Uniform
from ..states.layout import Array, Layout, bytes_of
from ..states.slots import States
from ..support.free_memory import default_budget_bytes
from ..support.progress import is_shown
from .ranks import Agreed, AgreedStore, Communicator, Ranks

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


_PROBE_S = 1.0


def _facts_to_agree(
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
    if len(tier_names(words["tiers"])) > 1:
        raise ArgumentError(
            f"{len(tier_names(words['tiers']))} slow tiers on several ranks; ranks agree on one, "
            "such as a cascade 'memory:8GiB > file:///scratch'"
        )
    given = checked_here()
    if isinstance(given.costs, StageCosts):
        assert given.n_steps is not None
        agreeing(given.costs, given.chain, given.n_steps)
    same = ("n_steps", "durable_every_s", "durable_label", "functionals")
    planner = words["planner"]  # what one of the user's own makes is compared later
    return {name: words[name] for name in same} | {
        "planner": planner if isinstance(planner, str) else "one of your own",
        "on_error": on_error,
        "having a tier": bool(tier_names(words["tiers"])),
        "having a durable folder": words["durable"] is not None,
        "the kind of costs": type(given.costs).__name__,
        "having a tape": not given.chain.state_is_tape,
    }


class MPIReversal(Generic[State, Adjoint]):
    """A domain-decomposed computation and its adjoint, each rank within a memory budget.

    Every rank makes one, with its part of the state, and calls the same
    methods in the same order.  The operators may communicate as they like.

    Parameters
    ----------
    chain, adjoint_step, n_steps, tape_step, planner, checked, functionals
        As for `Reversal`, and alike on every rank.
    comm : mpi4py.MPI.Comm or Ranks, optional
        The ranks that share the computation; `MPI.COMM_WORLD` by default.  `Ranks`
        serve several objects like this, one after the other, and stay.
    memory : Budget, int or str, optional
        Fast memory for this rank's checkpoints; the rank with room for the
        fewest states decides.  Default: a quarter of the memory that is free,
        divided by the ranks that share it.
    tiers : str, Path or Store, optional
        This rank's slow tier, one only, best on a disk of its own node; all ranks have
        one, or none has.
    costs : Costs or StageCosts, optional
        Given on all ranks or on none; the slowest count.  StageCosts are for steps that
        differ, as many on every rank, with the sizes of this rank's part: the plan is one
        that fits every rank's memory.  `planner="survey"` measures them in a first sweep.
    durable : str or Path, optional
        A folder in which every rank keeps one of its own, `rank-0007` say, in
        place of a tier: after a kill the same call resumes, on as many ranks,
        from the least that all of them have on disk.  It may be one that all
        ranks share, or one on a disk of each node.
    durable_every_s, durable_label
        As for `Reversal`, and alike on every rank.
    states : States, optional
        As for `Reversal`.
    progress : bool or None
        Show progress bars, on rank 0 only; None: on a terminal.
    on_error : {"abort", "raise"}
        What an exception on one rank leads to, from an operator or from
        anything else inside the `with` block: its traceback on standard error
        and the end of all ranks (`comm.Abort`), since the others may be
        waiting in a communication that will never be answered; or just the
        exception, for programs that see to the other ranks themselves; all
        of them then need another `MPIReversal`.
        Errors that this class raises on every rank never abort.

    Attributes
    ----------
    plan : Plan or None
        The plan of the last sweep, the same on every rank.
    costs : Costs, StageCosts or None
        What the next sweep is planned with: the slowest rank's times, this
        rank's bytes; StageCosts as given.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        On every rank, before any step runs.

    Notes
    -----
    All methods but `report` are collective, `close` included.  MPI is called
    from the calling thread only; `MPI_THREAD_FUNNELED` suffices.

    `until` must answer alike on every rank: take a global norm, not a local one.

    Examples
    --------
    Run by `mpiexec -n 4 python program.py`, with `halo` an exchange of one's own::

        with MPIReversal(step, adjoint_step, n, memory="1 GiB", tiers="file:///scratch") as run:
            last = run.forward(my_part)
            gradient = run.reverse(misfit_gradient(last))
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None = None,
        n_steps: int | None = None,
        *,
        comm: Communicator | Ranks | None = None,
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
        memory: Budget | int | str | None = None,
        tiers: Tiers | None = None,
        planner: str | Plan | Planner = "auto",
        costs: Costs | StageCosts | None = None,
        checked: bool = False,
        functionals: int | None = None,
        progress: bool | None = None,
        on_error: Literal["abort", "raise"] = "abort",
        durable: str | os.PathLike[str] | None = None,
        durable_every_s: float = 60.0,
        durable_label: str = "",
        states: States[State, Array, Layout] | None = None,
    ) -> None:
        self._ranks = ranks = comm if isinstance(comm, Ranks) else Ranks(comm)
        if n_steps is None and isinstance(costs, StageCosts):
            n_steps = len(costs.stages)
        here = partial(
            Arguments.of,
            chain,
            adjoint_step,
            n_steps=n_steps,
            tape_step=tape_step,
            memory=_own_budget(memory, ranks),
            tiers=tiers,
            planner=planner,
            costs=times(costs, functionals),
            durable=durable,
            durable_every_s=durable_every_s,
            durable_label=durable_label,
            checked=checked,
            functionals=functionals,
            states=states,
        )
        self._comm, self._on_error, self._n_steps = comm, on_error, n_steps
        self._begin(here)
        self._durable: DurableRun | None = None
        own = next(map(open_store, tier_names(tiers)), None)
        if durable is not None:
            self._durable = DurableRun(durable, durable_every_s, durable_label, peers=ranks)
            own = self._durable.store
        self._store = None if own is None else AgreedStore(own, ranks)
        self._probed = own if self._durable is None else self._durable.probe
        self._operators = Operators.of(chain, adjoint_step, tape_step, functionals, checked)
        self._given = partial(Arguments.of, self._operators, **here.keywords | {"tape_step": None})
        self._agreed = Agreed(ranks, tiered=own is not None)
        self._progress = ranks.rank == 0 and is_shown(progress)
        self._layout: Layout | None = None
        self._limit: tuple[int | None, int] = None, 0  # bytes, and of them buffers
        self._sweeps: Sweeps[State, Adjoint] | None = None  # None until all ranks have agreed
        self._costs: Costs | None = None  # agreed on before there are sweeps
        self._ready = self._closed = self._left = False  # left: by an exception of its own
        self._report: Report | None = None

    def _begin(self, checked_here: partial[Arguments[State, Adjoint]]) -> None:
        """See that the arguments are right on every rank, and alike."""
        ranks = self._ranks
        facts = partial(_facts_to_agree, checked_here, self._on_error)
        try:
            ranks.same(ranks.gather(facts), "give every rank the same")
        except BaseException as error:
            if error is ranks.shared:
                self._free()
            else:
                self._fail(error)
            raise

    @property
    def plan(self) -> Plan | None:
        """The plan of the last sweep, the same on all ranks; if steps differ in rank 0's bytes."""
        made = None if self._sweeps is None else self._sweeps.plan
        if made is None or made.actions:
            return made
        limit_bytes, buffers = self._limit
        return made.within(limit_bytes, {BUFFERS: buffers})

    @property
    def costs(self) -> Costs | StageCosts | None:
        """What the next sweep is planned with."""
        given: Costs | StageCosts | None = self._given.keywords["costs"]
        if isinstance(given, StageCosts):
            return times(given, self._given.keywords["functionals"], back=True)
        return None if self._sweeps is None else self._sweeps.costs

    @property
    def _surveys(self) -> bool:
        """Whether a first sweep shows what steps that differ cost."""
        return bool(self._given.keywords["planner"] == SURVEY)

    @property
    def _differ(self) -> bool:
        """Whether steps are planned as unequal."""
        return self._surveys or isinstance(self._given.keywords["costs"], StageCosts)

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._ranks.size

    # -------------------------------------------------------------------- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._stop(keep=True)  # the gradient of a durable run may not have been saved yet
        if error is self._ranks.shared:
            self.close()
            return
        self._left = True
        if not isinstance(error, SystemExit) or error.code:
            self._fail(error)

    def close(self) -> None:
        """Forget a sweep in progress, stop threads, remove files.

        The folders of a durable run are removed if the run is complete.
        Collective; may be called twice.

        Raises
        ------
        ArgumentError
            On every rank, if another calls something else; all are stopped then.
        """
        if self._left or self._closed or self._ranks.apart:
            self._stop(keep=True)  # the others may be anywhere
            return
        self._closed = True
        try:
            self._ranks.gather(lambda: None, "close()")
        except BaseException:
            self._stop(keep=True)
            raise
        if self._store is not None and self._sweeps is not None:
            self._store.settle()
        if self._durable is not None and self._durable.attached and self._durable.complete:
            if self._sweeps is not None:
                self._sweeps.let_go()
            self._durable.discard()
        self._stop()
        self._free()

    def _free(self) -> None:
        if self._ranks is not self._comm:
            self._ranks.free()

    def let_go(self) -> None:
        """Forget a sweep in progress, stop threads, remove files: of this rank alone.

        Not collective.  The next `forward` opens the tier again, on every rank.
        """
        self._stop()

    def use(
        self,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None = None,
        *,
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
    ) -> None:
        """Run other operators in the sweeps to come, such as those of the next shot.

        Collective; for the rest see `Reversal.use`.

        Raises
        ------
        ArgumentError
            On every rank, if those of one are of another kind, or the run is durable; nothing
            changes then.
        """
        self._require_in_step()
        durable = self._durable is not None
        others = partial(self._operators.others, chain, adjoint_step, tape_step, durable=durable)
        made = self._ranks.agreed(others, "use()")
        self._ready = False
        self._operators.current = made
        if self._sweeps is not None:
            self._sweeps.use(made)

    def _require_in_step(self) -> None:
        if self._left or self._ranks.apart:
            why = "an exception" if self._left else "calling something else"
            raise ArgumentError(
                f"this rank left the order of the others by {why}, and they may be anywhere; "
                "make another MPIReversal on every rank"
            )

    def _stop(self, *, keep: bool = False) -> None:
        """Close what is this rank's own; the others may be anywhere.

        With `keep` the folder of a durable run stays, complete or not.
        """
        self._ready = False
        if self._sweeps is not None:
            self._sweeps.end(keep=keep)
        if self._durable is not None:  # which may be open without a run
            self._durable.close(remove=self._durable.complete and not keep)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            try:
                self._stop(keep=True)
                if self._sweeps is not None:
                    with suppress(ArgumentError):  # stopped before the first step
                        self._report = self._sweeps.report()  # how far this rank came
            finally:  # though a tier could not be closed: the others must not wait for this rank
                if error is not self._ranks.shared:
                    self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._left = True
        if self._on_error != "raise":
            self._ranks.abort(error)

    # ------------------------------------------------------------------ sweeps

    def forward(self, state: State, until: Callable[[State, int], bool] | None = None) -> State:
        """Run the forward sweep from this rank's part of state 0; return that of the last state.

        Parameters
        ----------
        state, until
            As for `Reversal.forward`; `until` answers alike on every rank.

        Raises
        ------
        ArgumentError, BudgetError, StateError, StoreError
            On every rank, before the first step of a sweep.
        """
        self._require_in_step()
        self._ready = False
        with self._guarded():
            sweeps = self._prepared(state, until is not None, "forward()", sweeps=True)
            last = sweeps.forward(state, until)
            self._require_sizes(sweeps)
        self._ready = True
        return last

    def begin(self, state: State, until: Callable[[State, int], bool] | None = None) -> None:
        """Begin a forward sweep whose steps the caller runs, who pushes each state.

        As `Sweeps.begin`, on every rank; costs are given.
        """
        self._require_in_step()
        self._ready = False
        with self._guarded():
            self._prepared(state, until is not None, "begin()", sweeps=True).begin(state, until)

    def push(self, state: State) -> bool:
        """Go on with a sweep that was begun, from the next state; return whether it is the last.

        Not agreed: every rank has come to the same step.
        """
        self._require_in_step()
        with self._guarded():
            assert self._sweeps is not None
            self._ready = self._sweeps.push(state)
            if self._ready:
                self._require_sizes(self._sweeps)
        return self._ready

    def prepare(self, state: State) -> Plan:
        """Agree, measure, plan and open the tiers before the first `forward`; return the plan.

        Steps are run to be measured as `Reversal.prepare` says, the same on all ranks.

        Raises
        ------
        ArgumentError, BudgetError, StateError, StoreError
            As `forward` does.
        """
        self._require_in_step()
        with self._guarded():
            sweeps = self._prepared(state, self._n_steps is None, "prepare()", sweeps=False)
            if self._surveys and self.costs is None:
                raise self._ranks.everywhere(ArgumentError(THEY_DIFFER))
            return sweeps.prepare(state)

    def reverse(self, adjoint: Adjoint) -> Adjoint:
        """Run the reverse sweep from this rank's part of the adjoint of the last state.

        Returns
        -------
        Adjoint
            This rank's part of the adjoint of state 0.

        Raises
        ------
        ArgumentError
            On every rank, if no forward sweep stands ready on one: each serves
            one reverse sweep.
        """
        self._require_in_step()
        self._ranks.gather(self._require_forward, "reverse()")
        self._ready = False
        with self._guarded():
            assert self._sweeps is not None
            result = self._sweeps.reverse(adjoint)
            self._require_sizes(self._sweeps)
            self._report = self._sweeps.report()
            if self._store is not None:
                self._store.settle()
        return result

    def _require_sizes(self, sweeps: Sweeps[State, Adjoint]) -> None:
        """Raise BudgetError on all ranks if a state or tape of one was larger than its costs say.

        Where steps differ.  One rank alone must not stop: others may be in its steps' exchanges.
        Sizes that were surveyed are surveyed again.
        """
        if isinstance(steps := sweeps.steps, Unequal):
            try:
                self._ranks.gather(steps.require)
            except BudgetError as error:
                steps.anew(error)
                raise

    def _prepared(
        self, state: State, online: bool, call: str, *, sweeps: bool
    ) -> Sweeps[State, Adjoint]:
        """Return the sweeps to run, new ones if states or costs are others than before.

        `call` is what every rank must have called; where a sweep follows, its first steps
        may show what a step takes.
        """
        ranks = self._ranks

        def facts() -> tuple[dict[str, object], bool]:
            if online != (self._n_steps is None):
                raise ArgumentError(
                    "give either n_steps to the MPIReversal or until= to forward(), not "
                    + ("both" if online else "neither")
                )
            states: States[State, Array, Layout] | None = self._given.keywords["states"]
            layout = Layout.of(state) if states is None else states.layout(state)
            last = self._layout
            if last is None or not layout.same_as(last):
                self._forget()
                self._layout, self._costs = layout, None
            arrays: dict[str, object] = {"the number of arrays in a state": len(layout.leaves)}
            steps = None if self._sweeps is None else self._sweeps.steps
            guesses = isinstance(steps, Uniform) and steps.guesses
            return arrays, steps is None or guesses

        found = ranks.gather(facts, call)
        ranks.same([one for one, _ in found], "states have the same tree on every rank")
        if any(changed for _, changed in found):
            self._forget()
            self._sweeps = self._planned(state, sweeps=sweeps)
        assert self._sweeps is not None
        return self._sweeps

    def _forget(self) -> None:
        """Drop the plan, and all that was made for it; a durable folder stays open."""
        if self._sweeps is not None:
            self._sweeps.let_go()
            steps = self._sweeps.steps
            if isinstance(steps, Uniform):
                self._costs = None if steps.guesses else steps.costs
        self._sweeps = None

    def _planned(self, state: State, *, sweeps: bool) -> Sweeps[State, Adjoint]:
        """Agree on slots, costs and the plan.

        Costs that are not known are measured, or shown by the first steps of the sweep that
        follows; the ranks then agree on them, and the plan, in that sweep.
        """
        if self._differ:
            return self._unequal()
        ranks, store, layout = self._ranks, self._store, self._layout
        assert layout is not None
        given: Any = self._given.keywords["costs"]
        budget = Budget.parse(self._given.keywords["memory"])
        if self._durable is not None:
            self._durable.attach(OrderedLayout.like(Layout.of(state)), self._n_steps, state)
            if self._costs is None and given is None:
                self._costs = self._durable.costs
        buffers = 0 if store is None else store.buffer_bytes(layout)
        slots = min(ranks.gather(lambda: budget.slots_for(layout.nbytes, buffers)))
        self._limit = budget.bytes, buffers
        # Where one rank's states are new, the costs of all are.
        if not all(ranks.gather(lambda: self._costs is not None)):
            self._costs = None
            begun = self._durable is not None and self._durable.begun
            if given is not None:
                self._costs = self._agreed.slowest(lambda: given)
            elif not sweeps or begun:
                self._costs = self._measured(state, layout, self._n_steps or 10_000)
        arguments = self._given(
            memory=Budget(slots=slots),
            tiers=store,
            costs=self._costs,
            durable=self._durable,
            agreement=self._agreed,
            probed=self._probed,
        )
        return Sweeps(arguments, self._progress)

    def _unequal(self) -> Sweeps[State, Adjoint]:
        """Return the sweeps of steps that differ, which agree on a plan or survey."""
        costs: StageCosts | None = self._given.keywords["costs"]

        def made() -> Sweeps[State, Adjoint]:
            assert self._layout is not None
            if costs is not None and (nbytes := bytes_of(self._layout)) > costs.input_bytes:
                raise BudgetError(
                    f"state 0 takes {nbytes} bytes, its costs say input_bytes={costs.input_bytes}; "
                    "give the sizes as they are"
                )
            arguments = self._given(
                tiers=self._store,
                agreement=self._agreed,
                durable=self._durable,
                probed=self._probed,
            )
            return Sweeps(arguments, self._progress)

        return self._ranks.agreed(made)

    def _measured(self, state: State, layout: Layout, most: int) -> Costs:
        """Return costs as measured: steps in step with the others, this rank's tier by itself."""
        stores = () if self._probed is None else (self._probed,)
        share = 2 / 3 * _PROBE_S if stores else _PROBE_S
        costs = measure(
            self._given().chain,
            state,
            most,
            seconds=share,
            states=self._given.keywords["states"],
            agree=self._ranks.most,
            progress=self._progress,
        )
        costs = times(costs, self._given.keywords["functionals"])
        self._ranks.most(0.0)  # all ranks measure at once, as they will use their tiers
        tiers = partial(with_tiers, costs, stores, layout, _PROBE_S - share, most)
        return self._agreed.slowest(partial(tiers, at_once=self._ranks.size))

    def _require_forward(self) -> None:
        if not self._ready or self._sweeps is None:
            raise ArgumentError("reverse() needs a forward() before it, one for each reverse()")

    def report(self) -> Report:
        """Return what this rank did in the last sweeps beside what was predicted.

        Raises
        ------
        ArgumentError
            Before the first `reverse` has returned.
        """
        if self._report is None:
            raise ArgumentError("report() needs a complete sweep: forward(), then reverse()")
        return self._report


def _own_budget(memory: Budget | int | str | None, ranks: Ranks) -> Budget | int | str:
    """Return the limit of a rank: its share of the node's free memory if none is given."""
    sharing = ranks.on_node()  # by all, whether they need it or not
    return default_budget_bytes() // sharing if memory is None else memory
