"""A chain whose steps are run one by one, each timed and its state weighed.

What a plan for unequal steps rests on is looked at wherever it could fail: a state
or a tape that takes more than the plan counts on ends the sweep before another
step runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import optree

from ..errors import BudgetError
from ..model.chain import Chain
from ..model.stages import Stage, StageCosts
from ..states.layout import Array
from ..states.sharing import own_bytes
from ..states.strides import owner

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

# How much longer an adjoint step is taken to be than a forward step until it was timed.
_GUESSED_RATIO = 2.0


class LargerThanPlanned(BudgetError):
    """A state or a tape takes more bytes than the plan counts on."""


class Seen:
    """What the steps of a chain were seen to take: least seconds, most bytes.

    Attributes
    ----------
    forward_s, reverse_s : list of float
        By step; infinite where it was not run that way.
    runs : list of int
        By step, how often it was run forward.
    state_bytes : list of int
        By state, -1 where it was not seen.
    tape_bytes : list of int
        By step, besides states.
    """

    def __init__(self) -> None:
        self.forward_s: list[float] = []
        self.reverse_s: list[float] = []
        self.runs: list[int] = []
        self.state_bytes: list[int] = []
        self.tape_bytes: list[int] = []

    def reach(self, step: int) -> None:
        """Make room for what is seen of a step and the state after it."""
        while len(self.forward_s) <= step:
            self.forward_s.append(math.inf)
            self.reverse_s.append(math.inf)
            self.runs.append(0)
            self.tape_bytes.append(0)
        while len(self.state_bytes) <= step + 1:
            self.state_bytes.append(-1)

    def costs(self, n_steps: int, chain: Chain[State, Adjoint], start: int = 0) -> StageCosts:
        """Return the costs of steps start..n_steps-1, which have all been run forward.

        Where no adjoint step was timed, the others' ratio to the forward steps is taken.
        """
        steps = range(start, n_steps)
        timed = [i for i in steps if self.reverse_s[i] < math.inf]
        spent_s = sum(self._run_s(i) for i in timed)
        ratio = sum(self.reverse_s[i] for i in timed) / spent_s if spent_s else _GUESSED_RATIO
        stages = []
        for i in steps:
            output, run_s = max(0, self.state_bytes[i + 1]), self._run_s(i)
            reverse_s = self.reverse_s[i]
            stages.append(
                Stage(
                    name=f"step {i}",
                    forward_s=run_s,
                    backward_s=reverse_s if reverse_s < math.inf else ratio * run_s,
                    output_bytes=output,
                    tape_bytes=output + self.tape_bytes[i],
                    gradient_bytes=0,
                )
            )
        return of_chain(StageCosts(tuple(stages), max(0, self.state_bytes[start])), chain)

    def _run_s(self, i: int) -> float:
        return self.forward_s[i] if self.forward_s[i] < math.inf else 0.0


def of_chain(costs: StageCosts, chain: Chain[State, Adjoint]) -> StageCosts:
    """Return costs with what follows from how a chain keeps its states.

    Where a state is its own tape, an adjoint step from the live state needs no forward
    step.  Where steps overwrite their state, what is kept is a copy beside the live one.
    """
    stages, before = [], costs.input_bytes
    for stage in costs.stages:
        if chain.state_is_tape:
            stage = replace(stage, spared_s=stage.forward_s)
        if chain.in_place:
            # A step that changes sizes makes new arrays while it has the old ones.
            more = before if before != stage.output_bytes else 0
            back = max(0, before - stage.output_bytes)
            stage = replace(
                stage,
                forward_overhead_bytes=max(stage.forward_overhead_bytes, more),
                tape_overhead_bytes=max(stage.tape_overhead_bytes, more),
                backward_overhead_bytes=max(stage.backward_overhead_bytes, back),
            )
        stages.append(stage)
        before = stage.output_bytes
    return replace(costs, stages=tuple(stages))


class Metered(Generic[State, Adjoint]):
    """A chain, run one step at a time.

    Parameters
    ----------
    chain : Chain
    weigh : callable or None
        Returns the bytes of a live state, by its step; None to time steps alone.
    clock : callable

    Attributes
    ----------
    seen : Seen
        Of all sweeps since it was last set.
    costs : StageCosts or None
        What a plan counts on; None to let any size pass.
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint],
        weigh: Callable[[State, int], int] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._chain, self._weighs, self._clock = chain, weigh, clock
        self.in_place = chain.in_place
        self.state_is_tape = chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))
        self.seen = Seen()
        self.costs: StageCosts | None = None
        self._tape: object = None  # the one made last: what the next shares with it counts once

    def begin(self, state: State) -> None:
        """Weigh state 0.  Raises LargerThanPlanned."""
        self._tape = None
        self.seen.reach(0)
        self._weigh(state, 0)

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps start..stop-1; return the state after them."""
        advance, clock, seen = self._chain.advance, self._clock, self.seen
        seen.reach(stop - 1)
        for i in range(start, stop):
            began = clock()
            state = advance(state, i, i + 1)
            seen.forward_s[i] = min(seen.forward_s[i], clock() - began)
            seen.runs[i] += 1
            self._weigh(state, i + 1)
        return state

    def tape(self, state: State, step: int) -> tuple[State, object]:
        """Run one step keeping its tape."""
        seen, clock = self.seen, self._clock
        seen.reach(step)
        began = clock()
        after, tape = self._chain.tape(state, step)
        seen.forward_s[step] = min(seen.forward_s[step], clock() - began)
        seen.runs[step] += 1
        self._weigh(after, step + 1)
        if not self.one_tape and self._weighs is not None:
            if self.in_place:
                nbytes = own_bytes(tape, after) + shared_bytes(tape, after)
            else:
                nbytes = own_bytes(tape, (state, after, self._tape))
                self._tape = tape
            seen.tape_bytes[step] = max(seen.tape_bytes[step], nbytes)
            if self.costs is not None:
                _require_tape(self.costs, step, nbytes)
        return after, tape

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        """Return the adjoint of the state before `step`."""
        seen, clock = self.seen, self._clock
        self._tape = None
        seen.reach(step)
        began = clock()
        result = self._chain.reverse(tape, adjoint, step)
        seen.reverse_s[step] = min(seen.reverse_s[step], clock() - began)
        return result

    def _weigh(self, state: State, index: int) -> None:
        if self._weighs is None:
            return
        nbytes = self.seen.state_bytes[index] = self._weighs(state, index)
        if self.costs is not None:
            require_state(self.costs, index, nbytes)

    def require(self, costs: StageCosts) -> None:
        """Raise LargerThanPlanned if a state or a tape has taken more bytes than costs say.

        For what is not looked at step by step, `costs` of this object being None.
        """
        for index, nbytes in enumerate(self.seen.state_bytes):
            require_state(costs, index, nbytes)
        for step, nbytes in enumerate(self.seen.tape_bytes):
            _require_tape(costs, step, nbytes)


def require_state(costs: StageCosts, index: int, nbytes: int) -> None:
    """Raise LargerThanPlanned if a state takes more bytes than costs say."""
    said = costs.stages[index - 1].output_bytes if index else costs.input_bytes
    if nbytes > said:
        what = f"output_bytes={said} of step {index - 1}" if index else f"input_bytes={said}"
        raise LargerThanPlanned(
            f"state {index} takes {nbytes} bytes, its costs say {what}; {_REMEDY}"
        )


def _require_tape(costs: StageCosts, step: int, nbytes: int) -> None:
    stage = costs.stages[step]
    if nbytes > stage.tape_bytes - stage.output_bytes:
        raise LargerThanPlanned(
            f"the tape of step {step} takes {nbytes} bytes besides the state after it, its costs "
            f"say tape_bytes={stage.tape_bytes} with output_bytes={stage.output_bytes}; {_REMEDY}"
        )


def shared_bytes(tape: object, state: object) -> int:
    """Return the bytes of arrays in a tape that are a state's: they are copied for it."""
    mine = {id(owner(a)) for a in _arrays(state)}
    return sum(a.nbytes for a in _arrays(tape) if id(owner(a)) in mine)


def _arrays(tree: Any) -> list[Array]:
    return [a for a in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(a, np.ndarray)]


_REMEDY = "give the sizes as they are, or no costs to have them measured"
