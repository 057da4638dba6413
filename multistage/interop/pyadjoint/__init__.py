"""pyadjoint's tape on multistage's schedules and tiers, second derivatives included.

`enable(tape, memory=..., tiers=...)` replaces the tape's checkpoint manager.  The user's
loop goes on as written: each end of a timestep pushes a state to the sweep.  Later sweeps, at
new controls or for derivatives, run the blocks of the tape.

====================================  ====================================
what                                  what becomes of it
====================================  ====================================
a state refused, lost or corrupted    computed again, as everywhere
a timestep of other arrays            StateError
a type whose arrays are not known     StateError: `register` it
other than `n_steps` timesteps        ArgumentError
blocks added after the first sweep    ArgumentError
`tape.copy`, `tape.optimize`          ArgumentError
an error on one of several ranks      the end of all, as `MPIReversal` says
====================================  ====================================
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from pyadjoint.block_variable import BlockVariable
from pyadjoint.overloaded_type import OverloadedType
from pyadjoint.tape import Tape, TapePackageData, stop_annotating

from ...backends.urls import Tiers
from ...errors import ArgumentError, BudgetError
from ...measurement.chain import with_tiers
from ...measurement.driver import action_seconds
from ...model.budget import Budget
from ...model.costs import Costs
from ...planners import Plan, Planner
from ...report import Report
from ...reversing.arguments import Arguments
from ...reversing.sweeps import Sweeps
from ...support.units import format_bytes
from ..mpi import MPIReversal
from ..ranks import Communicator, Ranks, shared_ranks, world_size
from .states import Kind, State, TapeLayout, TapeStates, copied, register
from .steps import Steps

__all__ = ["TapeReversal", "enable", "register"]

T = TypeVar("T")

_PROBE_S = 0.3
_UNKNOWN_STEPS = 10_000
_TANGENT = 2.5  # times what a step without tangents takes


def enable(
    tape: Tape,
    *,
    memory: Budget | int | str,
    tiers: Tiers | None = None,
    n_steps: int | None = None,
    planner: str | Plan | Planner = "auto",
    history: int = 1,
    costs: Costs | None = None,
    progress: bool | None = None,
    comm: Communicator | None = None,
) -> TapeReversal:
    """Let a tape keep its states within a memory limit, and on slow tiers.

    Parameters
    ----------
    tape : pyadjoint.Tape
        Without blocks yet.  Its loop runs in `tape.timestepper(...)` or calls
        `tape.end_timestep()` between two steps.
    memory : Budget, int or str
        For states: bytes, `"2 GiB"` or `"20 slots"`.  Controls, coefficients and numbers
        are not counted, nor are the state and the adjoint in progress.
    tiers : str, Path, Store or a sequence of them, optional
        As for `Reversal`.
    n_steps : int, optional
        The number of timesteps; if not given, the first sweep follows an online schedule.
    planner, progress
        As for `Reversal`.
    history : int
        A step reads what the last `history` steps made: 1, or 2 for BDF2 whose states are not
        copied.  What is older stays in memory; so do the values of as many steps while they are
        taped.
    costs : Costs, optional
        Seconds and bytes of a timestep and its tiers; by default they are measured.
    comm : mpi4py.MPI.Comm, optional
        The ranks whose timesteps exchange data, such as `mesh.comm`: each has a tape, tapes the
        same steps, of its part of the arrays, and calls the same.  `MPI.COMM_SELF` for a
        rank that works alone in a program of several.

    Returns
    -------
    TapeReversal

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        For arguments that break their rule, a tape with blocks or another manager.

    Examples
    --------
    >>> import pyadjoint as pa
    >>> from multistage.interop.pyadjoint import enable
    >>> tape = pa.Tape()
    >>> _ = pa.set_working_tape(tape), pa.continue_annotation()
    >>> run = enable(tape, memory="3 slots", n_steps=10)
    >>> x = m = pa.AdjFloat(0.5)
    >>> for i in tape.timestepper(iter(range(10))):
    ...     x = 0.9 * x + 0.1 * x * x
    >>> pa.pause_annotation()
    >>> functional = pa.ReducedFunctional(x, pa.Control(m))
    >>> round(float(functional.derivative()), 9), run.plan.n_steps
    (0.800988462, 10)
    >>> run.close()
    """
    _require(
        not tape.get_blocks(), "enable() before anything is taped: the tape has blocks already"
    )
    _require(
        tape._checkpoint_manager is None,
        "the tape has a checkpoint manager; call enable() in place of enable_checkpointing()",
    )
    _require(type(tape) is Tape, f"enable() takes a pyadjoint.Tape, not {type(tape).__name__}")
    _require(
        isinstance(history, int) and history >= 1,
        f"history={history!r} must be a whole number >= 1",
    )
    ranks = _ranks(comm)
    found = TapeReversal(tape, n_steps, memory, tiers, planner, history, costs, progress, ranks)
    tape._checkpoint_manager = tape._package_data["multistage"] = found
    tape.__class__ = TieredTape
    return found


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ArgumentError(message)


def _ranks(comm: Communicator | None) -> Ranks | None:
    """Return the ranks that tape the same steps; None for one.  Raises ArgumentError."""
    if comm is not None:
        return shared_ranks(comm)
    _require(
        world_size() == 1,
        f"MPI started {world_size()} ranks, each of which would follow a schedule of its own; give "
        "comm=, the communicator of the ranks whose timesteps exchange data (MPI.COMM_SELF if none "
        "do)",
    )
    return None


class TapeReversal(TapePackageData):  # type: ignore[misc]
    """What `enable` puts in the place of pyadjoint's checkpoint manager.

    Attributes
    ----------
    plan : Plan or None
        Of the last sweeps.
    costs : Costs or None
        As given, measured or corrected, of sweeps without tangents.
    """

    def __init__(
        self,
        tape: Tape,
        n_steps: int | None,
        memory: Budget | int | str,
        tiers: Tiers | None,
        planner: str | Plan | Planner,
        history: int,
        costs: Costs | None,
        progress: bool | None,
        ranks: Ranks | None,
    ) -> None:
        self._tape, self._history, self._progress = tape, history, progress
        self._words: dict[str, Any] = {"memory": memory, "tiers": tiers, "planner": planner}
        self._ranks = ranks
        self._n = n_steps
        self._steps = Steps(tape, history)
        self._costs: dict[bool, Costs | None] = {False: costs, True: None}
        # In the first sweep:
        self._recording, self._broken = True, False
        self._pushed = 0  # the state that was pushed last
        self._waiting: list[State] = []  # those pushed before it has begun
        self._times_s: list[float] = []
        self._last_s = time.perf_counter()
        # Later:
        self._kinds: list[Kind] = []  # of the arrays of states without tangents
        self._tangents: tuple[frozenset[Kind], list[Kind]] | None = None  # of directions, with them
        self._layout: TapeLayout | None = None
        self._run: Sweeps[State, object] | MPIReversal[State, object] | None = None
        self._is_tangent = self._is_online = False  # of the run
        self._ready = False  # to be reversed
        self._blocks = 0
        self._seeds: dict[BlockVariable, object] = {}
        self._held: frozenset[BlockVariable] = frozenset()  # controls that steps make
        self._require_alike(costs)
        tape.latest_checkpoint = 0  # a variable is saved at its first use in each step
        tape.get_blocks().append_step()

    @property
    def plan(self) -> Plan | None:
        """The plan of the last sweeps."""
        return None if self._run is None else self._run.plan

    @property
    def costs(self) -> Costs | None:
        """Costs of sweeps without tangents."""
        return self._costs[False]

    def report(self) -> Report:
        """Return predicted and measured values of the last sweeps, forward and back.

        Raises
        ------
        ArgumentError
            If there were none.
        """
        if self._run is None:
            raise ArgumentError("report() needs a derivative before it")
        return self._run.report()

    def close(self) -> None:
        """Stop threads and remove files; a later derivative starts them again."""
        self._ready = False
        if self._run is not None:
            self._run.let_go()

    # ------------------------------------------- called by pyadjoint, as its manager

    def end_timestep(self, timestep: int) -> None:
        """Push the state that the step before this one has left."""
        with self._aborting():
            _require(
                self._recording and not self._broken,
                "the tape's sweep is over, or an error has ended it: tape new timesteps on a new "
                "tape",
            )
            _require(
                self._n is None or timestep + 1 < self._n,
                f"the tape has n_steps={self._n} timesteps, and another one begins; give enable() "
                "their number, or leave it out",
            )
        now = time.perf_counter()
        self._times_s.append(now - self._last_s)
        with self._breaking():
            self._pass(timestep)
        self._tape.get_blocks().append_step()
        self._tape.latest_checkpoint = timestep + 1
        self._last_s = time.perf_counter()

    def recompute(self, functional: OverloadedType | None = None) -> None:
        """Run forward from the controls as they are."""
        self._end_taping()
        self._steps.functional = None if functional is None else functional.block_variable
        blocks = self._tape.get_blocks()
        self._held = frozenset(v for block in blocks for v in block.get_outputs() if v.is_control)
        self._forward(tangent=False)

    def evaluate_adj(self, last_block: int, markings: bool) -> None:
        """Compute adjoints from those that variables have; run forward before if necessary."""
        _require(not last_block, "last_block= is for tapes without multistage")
        self._end_taping()
        self._seeds = {
            made: copied(made.adj_value)
            for block in self._tape.get_blocks()
            for made in block.get_outputs()
            if made.adj_value is not None
        }
        with self._marked(self._held):
            if not self._ready or self._is_tangent:
                self._forward(tangent=False)
            self._reverse(markings)

    def evaluate_tlm(self, markings: bool) -> None:
        """Run forward with the tangents of the variables that have one."""
        self._end_taping()
        blocks = self._tape.get_blocks()
        every = {v for block in blocks for v in (*block.get_dependencies(), *block.get_outputs())}
        found = {v: v.tlm_value for v in every if v.tlm_value is not None}
        self._steps.directions = found
        with self._marked({*found, *self._held}):
            self._forward(tangent=True)

    def evaluate_hessian(self, markings: bool) -> None:
        """Compute second derivatives, adjoints once more beside them."""
        self._end_taping()
        _require(
            bool(self._seeds) and bool(self._steps.directions),
            "a Hessian needs a derivative() and its tangents before it",
        )
        with self._marked({*self._steps.directions, *self._held}):
            if not (self._ready and self._is_tangent):
                self._forward(tangent=True)
            self._tape.reset_variables(("adjoint",))
            for variable, seed in self._seeds.items():
                variable.adj_value = copied(seed)
            self._reverse(markings)

    # --------------------------------------------------- called by pyadjoint, as data

    def clear(self) -> None:
        """Give everything back: the tape is cleared, and may be enabled again."""
        self.close()
        self._broken = True
        self._tape.__class__, self._tape.latest_checkpoint = Tape, float("inf")

    def reset(self) -> None:
        """Do nothing: the blocks are about to run again."""

    def checkpoint(self) -> frozenset[BlockVariable]:
        """Return which controls are not computed; what is restored later is computed again."""
        return self._held

    def restore_from_checkpoint(self, state: frozenset[BlockVariable]) -> None:
        """Run forward again before the next derivative."""
        self._ready, self._held = False, state

    def copy(self) -> TapeReversal:
        """Refuse: two tapes would share the states."""
        raise ArgumentError("a tape whose states are on tiers cannot be copied; tape it again")

    def continue_checkpointing(self) -> None:
        """Do nothing."""

    def pause_checkpointing(self) -> None:
        """Do nothing."""

    # ---------------------------------------------------------------- the first sweep

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """After an error in the first sweep the tape is of no use, nor are those of other ranks."""
        with self._aborting():
            try:
                with stop_annotating():
                    yield
            except BaseException:
                self._broken = True
                self.close()
                raise

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """End all ranks after an error of one, for which the others would wait."""
        try:
            yield
        except BaseException as error:
            if self._ranks is not None and error is not self._ranks.shared:
                self.close()
                self._ranks.abort(error)
            raise

    def _agreed(self, work: Callable[[], T]) -> T:
        """Do this rank's part of something; raise on all ranks what one of them raised."""
        return work() if self._ranks is None else self._ranks.agreed(work)

    def _require_alike(self, costs: Costs | None) -> None:
        """Raise for arguments that break a rule, or by which ranks would push other states."""

        def facts() -> dict[str, object]:
            self._arguments(costs)
            return {"n_steps": self._n, "history": self._history}

        if self._ranks is None:
            facts()
        else:
            self._ranks.same(self._ranks.gather(facts), "give every rank the same")

    def _pass(self, step: int, *, last: bool = False) -> None:
        """Push the states that are complete when a timestep has been taped."""
        steps = self._steps
        steps.make_concrete(step)
        for t in range(self._pushed + 1, step + 1 if last else step + 2 - self._history):
            state = steps.captured(t)
            steps.clear(t - 1)
            self._pushed = t
            if self._run is not None:
                self._run.push(state)
                continue
            self._waiting.append(state)
            if t > self._history:  # the first states may have fewer arrays
                self._begin()

    def _begin(self) -> None:
        """Plan by the first timesteps, push their states."""
        kinds = Counter[Kind]()
        for state in self._waiting:
            kinds |= Counter(state.kinds())
        self._kinds = list(kinds.elements())
        self._layout = TapeLayout.for_kinds(self._kinds)
        run = self._run = self._made(tangent=False)
        self._is_online = self._n is None
        until = (lambda state, i: i == self._n) if self._is_online else None
        run.begin(State(0, {}, {}), until)
        for state in self._waiting:
            run.push(state)
        self._waiting.clear()

    def _end_taping(self) -> None:
        """End the first sweep, if it is not over yet; else see that the tape is as it was."""
        steps, blocks = len(self._tape.timesteps), len(self._tape.get_blocks())
        ranks = self._ranks
        if ranks is None:
            self._require_whole(steps, blocks)
        else:
            every = ranks.gather(lambda: self._require_whole(steps, blocks))
            ranks.same(every, "tape the same timesteps on every rank")
        if not self._recording:
            return
        self._n, self._blocks = steps, blocks
        self._recording = False
        with self._breaking():
            self._pass(steps - 1, last=True)
            if self._run is None:
                self._begin()
            assert self._run is not None
            self._run.push(State(steps, {}, {}))
            self._agreed(self._require_room)
        self._ready = True

    def _require_whole(self, steps: int, blocks: int) -> dict[str, object]:
        """Raise ArgumentError unless all of the tape was taped; return what ranks have alike."""
        _require(not self._broken, "an error has ended the tape's first sweep, or it was cleared")
        _require(
            self._recording or blocks == self._blocks,
            f"the tape had {self._blocks} blocks when its first derivative or evaluation "
            f"began, and has {blocks}: tape all of it before, or on another tape",
        )
        _require(
            not self._recording or self._n in (None, steps),
            f"{steps} timesteps were taped, not n_steps={self._n}; give their number to enable(), "
            "or leave it out",
        )
        return {"the number of timesteps": steps}

    def _require_room(self) -> None:
        """Raise BudgetError if more stays in memory than the limit has room for states."""
        assert self._layout is not None
        resident, size = self._steps.resident_bytes(), self._layout.nbytes
        room = Budget.parse(self._words["memory"]).slots_for(size) * size
        if resident > room:
            raise BudgetError(
                f"{format_bytes(resident)} of what timesteps have made is read more than "
                f"history={self._history} steps later and stays in memory, which is more than the "
                f"{format_bytes(room)} for states; raise history or memory"
            )

    # ------------------------------------------------------------------- other sweeps

    def _arguments(self, costs: Costs | None) -> Arguments[State, object]:
        states = None if self._layout is None else TapeStates(self._layout)
        return Arguments.of(self._steps, None, self._n, states=states, costs=costs, **self._words)

    def _made(self, *, tangent: bool) -> Sweeps[State, object] | MPIReversal[State, object]:
        """Return what runs sweeps, with tangents or without."""
        costs, known = self._costs[tangent], self._costs[False]
        if costs is None:
            assert self._layout is not None
            size = self._layout.nbytes
            costs = self._agreed(self._measured) if known is None else _with_tangents(known, size)
            self._costs[tangent] = costs
        if self._ranks is None:
            return Sweeps(self._arguments(costs), self._progress)
        assert self._layout is not None
        return MPIReversal(
            self._steps,
            n_steps=self._n,
            comm=self._ranks,
            costs=costs,
            progress=self._progress,
            states=TapeStates(self._layout),
            **self._words,
        )

    def _measured(self) -> Costs:
        """Return the costs of a timestep as the first ones show them, those of tiers measured."""
        given, layout, n = self._arguments(None), self._layout, self._n or _UNKNOWN_STEPS
        assert layout is not None
        step_s = max(1e-9, min(self._times_s[1:] or self._times_s or [1e-3]))
        costs = Costs(step_s, 2 * step_s, state_bytes=layout.nbytes, action_s=action_seconds())
        seconds = _PROBE_S / max(1, len(given.probed))
        at_once = 1 if self._ranks is None else self._ranks.size
        return with_tiers(costs, given.probed, layout, seconds, n, at_once=at_once)

    def _forward(self, *, tangent: bool) -> None:
        self._ready = False
        run = self._run
        assert run is not None and self._layout is not None
        self._steps.tangent = tangent
        is_new = tangent and self._learn_tangents()
        if self._is_online or is_new or tangent != self._is_tangent:
            run.let_go()
            self._is_tangent, self._is_online = tangent, False
            kinds = self._tangents[1] if tangent and self._tangents else self._kinds
            self._layout = TapeLayout.for_kinds(kinds)
            run = self._run = self._made(tangent=tangent)
        with stop_annotating():
            run.forward(State(0, {}, {}))
        self._ready = True

    def _learn_tangents(self) -> bool:
        """Run the first steps if directions are others; return whether states have other arrays.

        Tangents may be of other dtypes than values are, as their blocks make them.
        """
        steps = self._steps
        given = frozenset(State(0, {}, steps.directions).kinds())
        seen, old = (None, None) if self._tangents is None else self._tangents
        if self._any(seen != given):
            kinds, state = Counter(self._kinds * 2), State(0, {}, {})
            with self._aborting(), stop_annotating():
                for t in range(min(self._history + 1, len(self._tape.timesteps))):
                    state = steps.advance(state, t, t + 1)
                    kinds |= Counter(state.kinds())
            found = sorted(kinds.elements(), key=str)
            self._tangents = given, found
            if self._any(found != old):
                self._costs[True] = None
                return True
        return False

    def _any(self, here: bool) -> bool:
        """Whether something holds on any rank."""
        return here if self._ranks is None else any(self._ranks.gather(lambda: here))

    def _reverse(self, markings: bool) -> None:
        run = self._run
        assert run is not None
        self._ready = False
        self._steps.markings = markings
        self._steps.begin_reverse()
        with stop_annotating():
            run.reverse(None)
        self._steps.begin_reverse()
        if isinstance(run.costs, Costs):
            self._costs[self._is_tangent] = run.costs

    @contextmanager
    def _marked(self, controls: Iterable[BlockVariable]) -> Iterator[None]:
        """Mark controls as such: those of tangents, and those that have been given values.

        pyadjoint marks those of a derivative; but it computes no values for derivatives.
        """
        plain = [variable for variable in controls if not variable.is_control]
        for variable in plain:
            variable.is_control = True
        try:
            yield
        finally:
            for variable in plain:
                variable.is_control = False


def _with_tangents(costs: Costs, nbytes: int) -> Costs:
    """Return the costs of steps with tangents, until one was seen: of states of so many bytes."""
    larger = nbytes / costs.state_bytes if costs.state_bytes else 2.0
    tiers = tuple(
        replace(
            tier.slower(larger),
            capacity_states=tier.capacity_states and int(tier.capacity_states / larger),
        )
        for tier in costs.tiers
    )
    return replace(
        costs,
        forward_step_s=_TANGENT * costs.forward_step_s,
        reverse_step_s=_TANGENT * costs.reverse_step_s,
        state_bytes=nbytes,
        tape_bytes=0,
        tiers=tiers,
    )


class TieredTape(Tape):  # type: ignore[misc]
    """A tape whose sweeps with tangents are run by its manager, too."""

    __slots__ = ()

    def evaluate_tlm(self, markings: bool = False) -> None:
        """Run forward with tangents."""
        self._through("evaluate_tlm")(markings)

    def evaluate_hessian(self, markings: bool = False) -> None:
        """Compute second derivatives."""
        self._through("evaluate_hessian")(markings)

    def optimize(self, controls: object = None, functionals: object = None) -> None:
        """Refuse: the states are those of all blocks."""
        raise ArgumentError("a tape whose states are on tiers cannot be optimized afterwards")

    optimize_for_controls = optimize_for_functionals = optimize

    def _through(self, name: str) -> Callable[[bool], None]:
        manager = self._checkpoint_manager
        found = getattr(super() if manager is None else manager, name)
        call: Callable[[bool], None] = found
        return call
