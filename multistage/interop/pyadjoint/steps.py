"""The timesteps of a tape as the steps of a chain: their blocks are run, their variables cleared.

State t holds the variables that step t or a later one reads and that the `history` steps before t
made.  What a step made and another reads much later, and what no step made, such as
controls and coefficients, is *resident*: it stays in memory.

A value that was cleared would be read as pyadjoint reads it, from the object that it belongs to,
which holds a later one by then: no block is run before its inputs were looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

from pyadjoint import Block, Tape
from pyadjoint.block_variable import BlockVariable

from ...errors import StateError
from .states import State, codec_of, copied, require_kept


class Steps:
    """The chain that a sweep runs; also what its first sweep, which the user runs, leaves.

    Parameters
    ----------
    tape : pyadjoint.Tape
    history : int

    Attributes
    ----------
    tangent, markings : bool
        Whether tangents are computed beside values; what blocks are told for adjoints.
    directions : dict
        The tangents that were given, of controls.
    functional : BlockVariable or None
        What stays in memory besides.
    """

    in_place, state_is_tape, one_tape = False, True, False

    def __init__(self, tape: Tape, history: int) -> None:
        self._tape, self._history = tape, history
        self.tangent = self.markings = False
        self.directions: dict[BlockVariable, object] = {}
        self.functional: BlockVariable | None = None
        self._frozen: dict[int, tuple[BlockVariable, ...]] = {}
        self._simple: dict[int, bool] = {}
        self._resident: set[BlockVariable] = set()
        self._after: State | None = None

    # ------------------------------------------------------------ as a chain

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps; return the state after them."""
        self._restore(state)
        for step in range(start, stop):
            self._rerun(step)
            self.make_concrete(step)
            self.clear(step)
        return self.captured(stop)

    def tape(self, state: State, step: int) -> tuple[State, State]:
        """Run a step; a state is its own tape."""
        return self.advance(state, step, step + 1), state

    def reverse(self, tape: object, adjoint: object, step: int) -> object:
        """Compute the adjoint of a step from its state; the variables hold it."""
        assert isinstance(tape, State)
        self._restore(tape)
        if not self._is_simple(step):
            self._rerun(step)
        elif self._after is not None:
            self._restore(self._after)  # a block may be linearised about what it returned
        for block in reversed(self._blocks(step)):
            _require_inputs(block, step)
            block.evaluate_adj(markings=self.markings)
            if self.tangent:
                block.evaluate_hessian(markings=self.markings)
        for block in self._blocks(step):
            block.reset_adjoint_state()
            for made in block.get_outputs():
                if not made.is_control:
                    made.reset_variables(("adjoint", "hessian"))
        self._forget(self._here(step))
        self._after = tape
        return adjoint

    def begin_reverse(self) -> None:
        """Forget the state after the last step that was reversed."""
        self._after = None

    # ------------------------------------------------- what a step starts from

    def variables(self, t: int) -> tuple[BlockVariable, ...]:
        """Return the variables of state t; asked for once the `history` steps from t were taped.

        What is read later than that is resident when the step that reads it is looked at.
        """
        if t not in self._frozen:
            reads, oldest = self._reads(t), max(0, t - self._history)
            self._frozen[t] = tuple(v for v in reads if v.creation_timestep >= oldest)
            self._resident |= set(reads) - set(self._frozen[t])
        return self._frozen[t]

    def resident_bytes(self) -> int:
        """Return the bytes of what steps made and stays in memory."""
        found = {}
        for variable in self._resident:
            codec = codec_of(variable.checkpoint)
            if variable.creation_timestep >= 0 and codec is not None:
                found[id(variable.checkpoint)] = codec.to_array(variable.checkpoint).nbytes
        return sum(found.values())

    def captured(self, t: int) -> State:
        """Return state t from the variables.  Raises StateError."""
        values = {v: v.checkpoint for v in self.variables(t)}
        for value in values.values():
            if value is None:
                raise StateError(f"state {t} holds a variable that no block has computed")
            require_kept(t, value)
        tangents = {v: v.tlm_value for v in values} if self.tangent else {}
        for value in tangents.values():
            require_kept(t, value)
        return State(t, values, tangents)

    def make_concrete(self, step: int) -> None:
        """Resolve the values of a step that refer to those of others, which the next overwrites."""
        for made in self._outputs(step):
            value = made.checkpoint
            if value is not None and codec_of(value) is None and not isinstance(value, float):
                output: Any = made.saved_output
                made.checkpoint = output._ad_create_checkpoint()

    def clear(self, step: int) -> None:
        """Forget what neither the state after a step nor any later step needs."""
        self._forget(self._here(step) - set(self.variables(step + 1)))

    def _forget(self, variables: Collection[BlockVariable]) -> None:
        for variable in variables:
            if variable not in self._resident and not isinstance(variable.output, float):
                variable.checkpoint = None
                if not self.tangent or variable in self._ends:
                    continue
                if not variable.is_control:  # else perhaps just given
                    variable.reset_variables(("tlm",))

    @cached_property
    def _ends(self) -> frozenset[BlockVariable]:
        """What nothing reads after the last step: perhaps an array whose tangent is asked for."""
        last = len(self._tape.timesteps) - 1
        read = {v for block in self._blocks(last) for v in block.get_dependencies()}
        return frozenset(self._outputs(last)) - read

    def _restore(self, state: State) -> None:
        for variable, value in state.values.items():
            if variable.checkpoint is None:  # of a control too, cleared before it was one
                variable._checkpoint = value
            variable.checkpoint = value
        for variable, value in state.tangents.items():
            variable.tlm_value = value

    # ----------------------------------------------------------------- blocks

    def _rerun(self, step: int) -> None:
        for block in self._blocks(step):
            for made in block.get_outputs():
                made.tlm_value = copied(self.directions.get(made))  # blocks add to it
                made.checkpoint = None  # a block may write into what is there
            _require_inputs(block, step)
            _recompute(block)
            if self.tangent:
                block.evaluate_tlm()  # whatever controls a Hessian has marked by now

    def _is_simple(self, step: int) -> bool:
        """Whether all that the adjoint of a step reads is in the states before and after it."""
        if step not in self._simple:
            here = set(self._outputs(step))
            arrays = {v for v in here if not isinstance(v.output, float)}
            self._simple[step] = arrays <= set(self.variables(step + 1))
        return self._simple[step]

    def _blocks(self, step: int) -> Sequence[Block]:
        blocks: Sequence[Block] = self._tape.timesteps[step]
        return blocks

    def _reads(self, t: int) -> Iterable[BlockVariable]:
        steps = self._tape.timesteps
        return steps[t].checkpointable_state if t < len(steps) else ()

    def _outputs(self, step: int) -> list[BlockVariable]:
        return [made for block in self._blocks(step) for made in block.get_outputs()]

    def _here(self, step: int) -> set[BlockVariable]:
        """Return the variables that a step makes, or starts from, but the functional."""
        self.variables(step)  # so that residents are known
        found = {*self._outputs(step), *self._reads(step)}
        if self.functional is not None:
            found.discard(self.functional)
        return found


def _recompute(block: Block) -> None:
    """Compute the outputs of a block that lack a value, also those beside a control."""
    controls = {made: made.checkpoint for made in block.get_outputs() if made.is_control}
    if all(made.checkpoint is not None for made in block.get_outputs()):
        return
    for made in controls:
        made.is_control = False
    try:
        block.recompute()
    finally:
        for made, value in controls.items():
            if value is not None:
                made._checkpoint = value
            made.is_control = True


def _require_inputs(block: Block, step: int) -> None:
    """Raise StateError if a block would read a value that is not there."""
    for read in block.get_dependencies():
        if read.checkpoint is None and read.creation_timestep >= 0:
            raise StateError(
                f"{type(block).__name__} of step {step} reads a variable of step "
                f"{read.creation_timestep} whose value is not there, perhaps because a block does "
                "not recompute its output; tape this without multistage"
            )
