"""Operators, the arrays they work on and what they took, as pyrevolve's users write them.

The operators own their arrays and overwrite them; which arrays hold the state
of time step t, `get_data(t)` and `get_data_location(t)` tell, since buffers of
several time levels rotate.  A checkpoint is a copy of those arrays.  The
adjoint operator works on the arrays as the forward operator left them after
its step, so that there is one tape, the latest, and it cannot be kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import numpy as np

from ...errors import StateError
from ...states.in_place import Copies
from ...states.layout import Array, Layout
from ...states.slots import Kept
from .compression import Compression

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

State = TypeVar("State")
Result = TypeVar("Result")
P = ParamSpec("P")


class Operator(Protocol):
    """A forward or adjoint operator; `apply` runs it over time steps.

    One need not derive from this class, nor from `Checkpoint`.  The forward operator
    turns the state of step `t_start` into that of step `t_end`.  The adjoint operator
    is called for one step at a time, right after the forward operator ran over that step.
    """

    def apply(self, *, t_start: int, t_end: int) -> object:
        """Run over the time steps `t_start`, ..., `t_end - 1`."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(t_start, t_end)")


class Checkpoint(Protocol):
    """Says which arrays make up the state of a time step."""

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of the arrays, for their count in bytes; each is copied as it is."""
        raise NotImplementedError(f"{type(self).__name__} must define dtype")

    @property
    def size(self) -> int:
        """The numbers in one checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} must define size")

    def get_data(self, timestep: int) -> Sequence[Array]:
        """Return the arrays that hold the state of `timestep`, to be copied from."""
        raise NotImplementedError(f"{type(self).__name__} must define get_data(timestep)")

    def get_data_location(self, timestep: int) -> Sequence[Array]:
        """Return the arrays that must hold the state of `timestep`, to be copied into."""
        raise NotImplementedError(f"{type(self).__name__} must define get_data_location(timestep)")

    @property
    def nbytes(self) -> int:
        """The bytes of one checkpoint."""
        return int(self.size) * int(np.dtype(self.dtype).itemsize)


class Profiler:
    """Sums the milliseconds of a revolver's operators and copies, and counts them.

    Attributes
    ----------
    timings : dict
        Section -> action -> milliseconds.
    counts : dict
        Section -> action -> times.
    section : str
        The sweep in progress: "forward" or "reverse".
    """

    def __init__(self) -> None:
        self.timings: dict[str, dict[str, float]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.section = "forward"

    def timed(
        self, work: Callable[P, Result], action: str, section: str = ""
    ) -> Callable[P, Result]:
        """Return `work`, each call of which is counted as an action, of the sweep in progress."""

        def run(*args: P.args, **named: P.kwargs) -> Result:
            began = perf_counter()
            result = work(*args, **named)
            elapsed = 1e3 * (perf_counter() - began)
            within = section or self.section
            # The forward step right before an adjoint step is part of that.
            of = "reverse" if (within, action) == ("reverse", "lastfw") else action
            timings = self.timings.setdefault(within, {})
            timings[of] = timings.get(of, 0.0) + elapsed
            counts = self.counts.setdefault(within, {})
            counts[of] = counts.get(of, 0) + 1
            return result

        return run


class OperatorChain:
    """The pair of operators as a chain; its state is the checkpoint object, its arrays beside it.

    Parameters
    ----------
    forward, backward : Operator
    profiler : Profiler or None
        Counts what they take.
    """

    in_place = True
    state_is_tape = False
    one_tape = True

    def __init__(self, forward: Operator, backward: Operator, profiler: Profiler | None) -> None:
        self._advance = self._tape = forward.apply
        self._reverse = backward.apply
        if profiler is not None:
            self._advance = profiler.timed(forward.apply, "advance")
            self._tape = profiler.timed(forward.apply, "lastfw")
            self._reverse = profiler.timed(backward.apply, "reverse")

    def advance(self, state: State, start: int, stop: int) -> State:
        self._advance(t_start=start, t_end=stop)
        return state

    def tape(self, state: State, step: int) -> tuple[State, object]:
        self._tape(t_start=step, t_end=step + 1)
        return state, None

    def reverse(self, tape: object, adjoint: None, step: int) -> None:
        self._reverse(t_start=step, t_end=step + 1)


class _Arrays(Layout):
    """The layout of a list of arrays; the live ones are looked at when they are copied."""

    def arrays(self, state: object, where: int | str = "the state") -> list[Array]:
        return super().arrays(state, where) if isinstance(state, list) else []


class OperatorStates:
    """The states of a pair of operators, for an executor.

    Parameters
    ----------
    checkpoint : Checkpoint
    compression : (compress, decompress), optional
        What fast slots hold their arrays by.
    profiler : Profiler, optional
        Counts what copies take.
    restored : bool
        Whether any state is ever restored; if not, none is looked at.
    varied : bool
        Whether the arrays of other steps may have other shapes and dtypes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        compression: Compression | None = None,
        profiler: Profiler | None = None,
        *,
        restored: bool = True,
        varied: bool = False,
    ) -> None:
        self.checkpoint, self.profiler, self.varied = checkpoint, profiler, varied
        self._compression = compression
        self._restored = restored
        self.begin()

    def begin(self) -> None:
        """Look at the arrays again: another sweep begins."""
        self._first: list[Array] | None = None
        # The arrays of two steps so far apart are known to be the same; 0: nothing is known.
        self._period = 0 if self.varied else _period(self.checkpoint)
        self._rotating: dict[int, list[Array]] = {}  # step modulo period -> arrays
        self._kinds: list[tuple[object, object]] = []  # shapes and dtypes of state 0

    def layout(self, state: object) -> Layout:
        if self._first is None:
            values = self.checkpoint.get_data(0) if self._restored else ()
            self._first = _checked(values, "get_data(0)")
            self._kinds = [(array.shape, array.dtype) for array in self._first]
            self._layout = _Arrays.of(self._first)
            self._layout.varied = self.varied
        return self._layout

    def slots(self, layout: Layout) -> Copies:
        if self._compression is None:
            return _Snapshots(layout, self)
        return _Compressed(layout, self, self._compression)

    def weigh(self, state: object, step: int) -> int:
        found = _checked(self.checkpoint.get_data(step), f"get_data({step})")
        return sum(array.nbytes for array in found)

    def arrays(self, step: int, *, into: bool) -> list[Array]:
        """Return the arrays that hold state `step`, or those to copy it into."""
        if self._period and (known := self._rotating.get(step % self._period)) is not None:
            return known
        first = None
        if into:
            said = f"get_data_location({step})"
            arrays = _checked(self.checkpoint.get_data_location(step), said)
            for k, array in enumerate(arrays):
                if not array.flags.writeable:
                    raise StateError(f"array {k} of {said} is read-only; a state is copied into it")
        else:
            said = f"get_data({step})"
            if step == 0:
                first, self._first = self._first, None  # it was looked at just now
            arrays = first or _checked(self.checkpoint.get_data(step), said)
        if not self.varied and [(array.shape, array.dtype) for array in arrays] != self._kinds:
            wanted = ", ".join(f"{shape} {dtype}" for shape, dtype in self._kinds)
            raise StateError(
                f"{said} returned arrays {_kinds(arrays)}, get_data(0) {wanted}; every state must "
                "have the arrays of the first, unless planner='survey' measures each step, or "
                "costs=StageCosts(...) are given"
            )
        if self._period:
            self._rotating[step % self._period] = arrays
        return arrays


def _checked(values: Iterable[object], said: str) -> list[Array]:
    # Each array is copied as it is: pyrevolve would round it to the checkpoint's dtype.
    arrays: list[Array] = []
    for k, value in enumerate(values):
        if not isinstance(value, np.ndarray):
            raise StateError(
                f"array {k} of {said} is {type(value).__name__}; it must be a numpy.ndarray"
            )
        arrays.append(value if type(value) is np.ndarray else value.view(np.ndarray))
    return arrays or [_NOTHING.copy()]  # a state without arrays is legal, and takes nothing


_NOTHING = np.zeros(1, np.uint8)


def _period(checkpoint: object) -> int:
    """Return after how many steps Devito's own checkpoint object returns the same arrays, or 0.

    They are views of a few time levels that rotate, in buffers that the
    operators hold pointers to.  Making them takes Devito longer than a small
    time step.
    """
    known = devito_checkpoint()
    if known is None or not isinstance(checkpoint, known):
        return 0
    for name in ("get_data", "get_data_location"):
        if getattr(type(checkpoint), name) is not getattr(known, name):
            return 0
    # A field with all its time levels returns after all of them: never.
    devitos: Any = checkpoint
    return math.lcm(*(field.time_size for field in devitos.objects))


def devito_checkpoint() -> type | None:
    """Return Devito's class of checkpoint objects, None if Devito was not imported."""
    module = sys.modules.get("devito.checkpointing.checkpoint")
    found: type | None = getattr(module, "DevitoCheckpoint", None)
    return found


def _kinds(arrays: Iterable[Array]) -> str:
    return ", ".join(f"{array.shape} {array.dtype}" for array in arrays)


class _Snapshots(Copies):
    """Fast slots that copy from and into the operators' arrays."""

    def __init__(self, layout: Layout, states: OperatorStates) -> None:
        super().__init__(layout)
        self._arrays, self._varied = states.arrays, states.varied
        self._kept: dict[int, str] = {}  # of varied states, what their arrays are
        if (profiler := states.profiler) is not None:
            self._copied = profiler.timed(self._copied, "copy_save", "storage")  # type: ignore[method-assign]
            self._put_back = profiler.timed(self._put_back, "copy_load", "storage")  # type: ignore[method-assign]

    def load(self, kept: Kept, live: State) -> State:
        assert isinstance(kept.state, int)
        targets = self._arrays(kept.state, into=True)
        if self._varied and (found := _kinds(targets)) != self._kept.get(kept.state):
            raise StateError(
                f"get_data_location({kept.state}) returned arrays {found}, its checkpoint has "
                f"{self._kept.get(kept.state)}; a state must have the same arrays each time"
            )
        self._put_back(targets, kept.arrays)
        return live

    def _live(self, state: object, where: int | str) -> list[Array]:
        assert isinstance(where, int)
        arrays = self._arrays(where, into=False)
        if self._varied:
            self._kept[where] = _kinds(arrays)
        return arrays

    def _recycle(self, kept: Kept) -> None:
        if not self._varied:  # else the room of one state need not hold the next
            super()._recycle(kept)

    def _put_back(self, targets: list[Array], kept: Sequence[Any]) -> None:
        for target, array in zip(targets, kept, strict=True):
            target[...] = array


class _Compressed(_Snapshots):
    """Fast slots that hold compressed arrays."""

    def __init__(self, layout: Layout, states: OperatorStates, compression: Compression) -> None:
        self._compress, self._decompress = compression
        super().__init__(layout, states)

    def _copied(self, arrays: list[Array]) -> list[Any]:
        return [self._compress(array) for array in arrays]

    def _put_back(self, targets: list[Array], kept: Sequence[Any]) -> None:
        for target, compressed in zip(targets, kept, strict=True):
            target[...] = np.asarray(self._decompress(compressed)).reshape(target.shape)

    def _recycle(self, kept: Kept) -> None:
        """Nothing: what a state was compressed to is not reused."""
