"""What is done about lost states, and about states unlike the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import StateError
from ..model.chain import Chain
from ..states.in_place import InPlace
from ..states.slots import Kept, StateLayout
from ..support.step_sets import StepSet
from .metered import LargerThanPlanned
from .sweep import Sweep

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")
ArrayT = TypeVar("ArrayT")
PackingT = TypeVar("PackingT")

# Steps run again at most, to find the one whose state was the first of another layout.
_RUN_AGAIN = 4096


def nearest(
    sweep: Sweep,
    step: int,
    stored: Sequence[StepSet],
    fetched: Callable[[int, int], list[object] | None],
) -> tuple[int, Kept]:
    """Return the nearest state up to `step` that can be had, and its index.

    States that are being read are left alone: their schedule waits for them itself.

    Parameters
    ----------
    sweep : Sweep
    step : int
        A state that no slot holds.
    stored : sequence of StepSet
        What each tier has.
    fetched : callable
        `fetched(step, tier)`: the arrays of a stored state, None if it is lost.
    """
    best, kept = 0, sweep.origin
    for start, other in sweep.held.items():
        if other is not None and best < start < step:
            best, kept = start, other
    landing = {start for start, other in sweep.held.items() if other is None}
    for tier, steps in enumerate(stored):
        for start in steps.descending(step):
            if start <= best:
                break
            if start in landing:
                continue
            arrays = fetched(start, tier)
            if arrays is not None:
                best, kept = start, sweep.slots.adopt(arrays, start)
                break
    return best, kept


def without_frames(error: BaseException | None) -> None:
    """Forget the frames of an error that is dealt with, and of those behind it.

    They refer to states, and an error in a cycle with a frame stays until it is collected.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def sizes_differ(error: BaseException) -> bool:
    """Whether a sweep ended since its states are of other sizes than was planned for."""
    return (isinstance(error, StateError) and error.varies) or isinstance(error, LargerThanPlanned)


def given_back(error: BaseException, sweep: Sweep | None) -> BaseException:
    """Put state 0 back where the caller of an in-place chain has it: the caller may start again.

    If it cannot be restored, the returned error says so, and that the caller may not.
    """
    if sweep is None or not isinstance(sweep.slots, InPlace):
        return error
    with contextlib.suppress(Exception):  # the first error matters more
        if sweep.slots.given_back(sweep.live, sweep.origin):
            return error
    return StateError(
        f"{str(error).split(';')[0]}; state 0 cannot be put back to measure such steps: in "
        "place, give a dict or list of arrays that are not kept from being overwritten"
    )


def first_to_differ(
    error: BaseException,
    sweep: Sweep | None,
    chain: Chain[State, Adjoint],
    layout: StateLayout[State, ArrayT, PackingT] | None,
) -> BaseException:
    """Return the error that names the step whose state was the first of another layout.

    A functional chain's states are looked at where they are kept, perhaps many steps after
    the one that returned the first such state; a few steps are run again to find it.
    """
    if not isinstance(error, StateError) or error.state is None or sweep is None or layout is None:
        return error
    if chain.in_place:
        return error  # looked at after every advance, and overwritten since
    held = [step for step, kept in sweep.held.items() if kept is not None and step < error.state]
    start = max(held, default=0)
    kept = sweep.held[start] if held else sweep.origin
    if kept is None or error.state - start > _RUN_AGAIN:
        return error
    step, found = start, str(error)
    if error.state - start > 1:
        found = ""
        try:
            live, sweep.live = sweep.slots.load(kept, sweep.live), None
            for step in range(start, error.state):
                live = chain.advance(live, step, step + 1)
                layout.arrays(live, step + 1)
        except StateError as differs:
            # The error itself would be in a cycle with this frame, and keep its states alive.
            # The first that differs may be such as a survey takes.
            if differs.state == step + 1 and differs.varies == error.varies:
                found = str(differs)
        except Exception:
            pass  # what was wrong is known, if not where
    if not found:
        return error
    told = StateError(f"step {step} returned a state unlike the first: {found}")
    told.state, told.varies = error.state, error.varies
    return told
