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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ...errors import StateError
from ...states.in_place import Copies
from ...states.layout import Array, Layout
from ...states.slots import Kept
from .compression import CompressedObject

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

State = TypeVar("State")

Compression = tuple[Callable[[Array], CompressedObject], Callable[[CompressedObject], Array]]


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
    """Sums milliseconds and counts.

    Attributes
    ----------
    timings : dict
        Section -> action -> milliseconds.
    counts : dict
        Section -> action -> times.

    """

    def __init__(self) -> None:
        self.timings: dict[str, dict[str, float]] = {}
        self.counts: dict[str, dict[str, int]] = {}

    def increment(self, section: str, action: str, elapsed: float, times: int = 1) -> None:
        """Add `times` calls that took `elapsed` milliseconds together."""
        timings = self.timings.setdefault(section, {})
        timings[action] = timings.get(action, 0.0) + elapsed
        counts = self.counts.setdefault(section, {})
        counts[action] = counts.get(action, 0) + times

    def summary(self) -> str:
        """Return a text of all sums, in milliseconds, and counts."""
        lines = ["****************"]
        for section, timings in self.timings.items():
            lines.append(f"In section {section}:")
            lines += [
                f"\tAction {action}: {elapsed:f} ({self.counts[section][action]})"
                for action, elapsed in timings.items()
            ]
        return "\n".join([*lines, "****************"])

    def get_dict(self) -> dict[str, str | int]:
        """Return everything flat: `SECTION_ACTION_timing` and `SECTION_ACTION_counts`."""
        flat: dict[str, str | int] = {
            f"{section}_{action}_timing": f"{elapsed:.2f}"
            for section, timings in self.timings.items()
            for action, elapsed in timings.items()
        }
        for section, counts in self.counts.items():
            flat.update({f"{section}_{action}_counts": n for action, n in counts.items()})
        return flat


class Meter:
    """Seconds and calls of one kind, gathered where a profiler would be too slow."""

    __slots__ = ("calls", "seconds")

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def flush(self, profiler: Profiler, section: str, action: str) -> None:
        """Hand over what was gathered, and start again."""
        if self.calls:
            profiler.increment(section, action, self.seconds * 1e3, self.calls)
            self.seconds, self.calls = 0.0, 0


class OperatorChain:
    """The pair of operators as a chain; its state is the checkpoint object, its arrays beside it.

    Attributes
    ----------
    advanced, taped, reversed : Meter
        What the operators took since these were flushed.
    """

    in_place = True
    state_is_tape = False
    one_tape = True

    def __init__(self, forward: Operator, backward: Operator) -> None:
        self._forward = forward.apply
        self._backward = backward.apply
        self.advanced, self.taped, self.reversed = Meter(), Meter(), Meter()

    def advance(self, state: State, start: int, stop: int) -> State:
        began = perf_counter()
        self._forward(t_start=start, t_end=stop)
        meter = self.advanced
        meter.seconds += perf_counter() - began
        meter.calls += 1
        return state

    def tape(self, state: State, step: int) -> tuple[State, object]:
        began = perf_counter()
        self._forward(t_start=step, t_end=step + 1)
        meter = self.taped
        meter.seconds += perf_counter() - began
        meter.calls += 1
        return state, None

    def reverse(self, tape: object, adjoint: None, step: int) -> None:
        began = perf_counter()
        self._backward(t_start=step, t_end=step + 1)
        meter = self.reversed
        meter.seconds += perf_counter() - began
        meter.calls += 1


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
    restored : bool
        Whether any state is ever restored; if not, none is looked at.

    Attributes
    ----------
    period : int
        The arrays of two steps so far apart are known to be the same; 0 if
        nothing is known of them.
    rotating : dict
        Step modulo period -> arrays, in this sweep.
    saved, loaded : Meter
        What copies took since these were flushed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        compression: Compression | None = None,
        *,
        restored: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.saved, self.loaded = Meter(), Meter()
        self._compression = compression
        self._restored = restored
        self._first: list[Array] | None = None
        self.period = 0
        self.rotating: dict[int, list[Array]] = {}

    def forget(self) -> None:
        """Look at the arrays again: another sweep begins."""
        self._first = None
        self.period = _period(self.checkpoint)
        self.rotating.clear()

    def layout(self, state: object) -> Layout:
        if self._first is None:
            values = self.checkpoint.get_data(0) if self._restored else ()
            self._first = self._checked(values, "get_data(0)")
        return _Arrays.of(self._first)

    def slots(self, layout: Layout) -> Copies:
        if self._compression is None:
            return _Snapshots(layout, self)
        return _Compressed(layout, self, self._compression)

    def source(self, step: int) -> list[Array]:
        """Return the arrays to copy state `step` from."""
        if step == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        return self._checked(self.checkpoint.get_data(step), f"get_data({step})")

    def target(self, step: int) -> list[Array]:
        """Return the arrays to copy state `step` into."""
        said = f"get_data_location({step})"
        arrays = self._checked(self.checkpoint.get_data_location(step), said)
        for k, array in enumerate(arrays):
            if not array.flags.writeable:
                raise StateError(f"array {k} of {said} is read-only; a state is copied into it")
        return arrays

    def _checked(self, values: Iterable[object], said: str) -> list[Array]:
        # Each array is copied as it is: pyrevolve would round it to the checkpoint's dtype.
        arrays: list[Array] = []
        for k, value in enumerate(values):
            if not isinstance(value, np.ndarray):
                raise StateError(
                    f"array {k} of {said} is {type(value).__name__}; it must be a numpy.ndarray"
                )
            arrays.append(value.view(np.ndarray))
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


class _Snapshots(Copies):
    """Fast slots that copy from and into the operators' arrays."""

    def __init__(self, layout: Layout, states: OperatorStates) -> None:
        super().__init__(layout)
        self._states = states

    def keep(self, state: object, where: int | str) -> Kept:
        began = perf_counter()
        kept = super().keep(state, where)
        meter = self._states.saved
        meter.seconds += perf_counter() - began
        meter.calls += 1
        return kept

    def load(self, kept: Kept, live: State) -> State:
        began = perf_counter()
        assert isinstance(kept.state, int)
        self._copy_back(self._places(kept.state), kept)
        meter = self._states.loaded
        meter.seconds += perf_counter() - began
        meter.calls += 1
        return live

    def _live(self, state: object, where: int | str) -> list[Array]:
        assert isinstance(where, int)
        states = self._states
        if states.period and where % states.period in states.rotating:
            return states.rotating[where % states.period]
        return self._like_first(where, states.source(where), "get_data")

    def _places(self, where: int) -> list[Array]:
        """Return the arrays to copy a state back into."""
        states = self._states
        if states.period and where % states.period in states.rotating:
            return states.rotating[where % states.period]
        return self._like_first(where, states.target(where), "get_data_location")

    def _like_first(self, step: int, arrays: list[Array], said: str) -> list[Array]:
        leaves = self._layout.leaves
        kinds = [(array.shape, array.dtype) for array in arrays]
        if kinds != [(leaf.shape, leaf.dtype) for leaf in leaves]:
            wanted = ", ".join(f"{leaf.shape} {leaf.dtype}" for leaf in leaves)
            found = ", ".join(f"{shape} {dtype}" for shape, dtype in kinds)
            raise StateError(
                f"{said}({step}) returned arrays {found}, get_data(0) {wanted}; "
                "every state must have the arrays of the first"
            )
        if self._states.period:
            self._states.rotating[step % self._states.period] = arrays
        return arrays


class _Compressed(_Snapshots):
    """Fast slots that hold compressed arrays."""

    def __init__(self, layout: Layout, states: OperatorStates, compression: Compression) -> None:
        super().__init__(layout, states)
        self._compress, self._decompress = compression

    def _copied(self, arrays: list[Array]) -> list[Any]:
        return [self._compress(array) for array in arrays]

    def _copy_back(self, targets: list[Array], kept: Kept) -> None:
        arrays: Sequence[Any] = kept.arrays
        for target, compressed in zip(targets, arrays, strict=True):
            np.copyto(target, np.asarray(self._decompress(compressed)).reshape(target.shape))

    def _recycle(self, kept: Kept) -> None:
        """Nothing: what a state was compressed to is not reused."""
