"""What the adjoint of a step is computed from, before and after it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..actions import Reverse
from ..states.apart import apart_from
from ..states.slots import Kept
from .accounts import illegal, reach, weigh_beside

if TYPE_CHECKING:
    from .sweep import Sweep


def open_adjoint(sweep: Sweep, step: int, tape: Kept | None) -> object:
    """Return what the adjoint of a step is computed from; `tape` is its own, if held until now.

    Raises
    ------
    ScheduleError
        If there is neither its tape nor its state.
    """
    if tape is None:
        return _without(sweep, step)
    if sweep.used_up is not None:
        let_live_go(sweep, step)
    if sweep.tapes:
        sweep.used -= sweep.tape_slots
    if not sweep.state_is_tape:
        sweep.release(tape)  # before it is used: an adjoint step may overwrite its tape
        return tape.state
    if sweep.copies:
        return _through_live(sweep, step, tape)
    sweep.opened = tape
    return tape.state if sweep.shared else sweep.slots.load(tape, sweep.live)


def _through_live(sweep: Sweep, step: int, tape: Kept) -> object:
    """Put a tape into the live arrays, whose state is put aside if it may be needed."""
    if 0 <= sweep.at < step:
        used = sweep.used + 1 + (sweep.tape_slots if sweep.tapes else 0)  # the tape stands yet
        if used > sweep.peak:
            reach(sweep, Reverse(step), used)
        sweep.aside = sweep.keep(sweep.live, sweep.at)
    else:
        sweep.at = -1
    sweep.live = given = sweep.slots.load(tape, sweep.live)
    sweep.release(tape)
    return given


def _without(sweep: Sweep, step: int) -> object:
    """Return what the adjoint of a step is computed from, where its tape is not held."""
    if ~step in sweep.lost:
        sweep.lost.remove(~step)
        let_live_go(sweep, step)
        return sweep.elsewhere.find_tape(sweep, step)
    if sweep.at != step:
        raise neither(sweep, step)
    sweep.at = -1
    return sweep.live if sweep.state_is_tape else _make_tape(sweep, step)


def _make_tape(sweep: Sweep, step: int) -> object:
    """Make a tape that is used at once."""
    tapes = sweep.tapes
    if not tapes:
        return sweep.tape_by(sweep.live, step)[1]
    sweep.slots.trim()
    made = sweep.tape_by(sweep.live, step)[1]
    if len(tapes) + 1 in sweep.weighed:
        weigh_beside(sweep, Reverse(step), made, len(tapes) - 1)
    if sweep.used + sweep.tape_slots > sweep.peak:  # it stands beside them until it is used
        reach(sweep, Reverse(step), sweep.used + sweep.tape_slots)
    return made


def close_adjoint(sweep: Sweep, given: object, adjoint: object) -> object:
    """Release what an adjoint was computed from; return the adjoint apart from it."""
    if not sweep.state_is_tape:
        if adjoint is not None:  # the next tape may be in the same arrays
            adjoint = apart_from(adjoint, given)
    elif sweep.opened is not None:
        adjoint = sweep.apart(adjoint, given)
        sweep.release(sweep.opened)
        sweep.opened = None
    elif sweep.aside is not None:
        adjoint = sweep.apart(adjoint, sweep.live)
        sweep.live = sweep.slots.load(sweep.aside, sweep.live)
        sweep.release(sweep.aside)
        sweep.aside = None
    if sweep.at < 0 and (sweep.copies or sweep.state_is_tape):
        adjoint = sweep.apart(adjoint, sweep.live)
    return adjoint


def skip_adjoint(sweep: Sweep, step: int) -> None:
    """Release what the adjoint of a step would be computed from, because it is not needed.

    Raises
    ------
    ScheduleError
        If there is neither its tape nor its state.
    """
    tape = sweep.tapes.pop(step, None)
    if tape is not None:
        sweep.release(tape)
        if sweep.tapes:
            sweep.used -= sweep.tape_slots
    elif ~step in sweep.lost:
        sweep.lost.remove(~step)
    elif sweep.at != step:
        raise neither(sweep, step)
    let_live_go(sweep, step - 1)
    if sweep.at == step:
        sweep.at = -1


def let_live_go(sweep: Sweep, step: int) -> None:
    """Release a live state, if slots can, that no step up to this one starts from."""
    if sweep.used_up is not None and not 0 <= sweep.at <= step:
        sweep.live, sweep.at = sweep.used_up(sweep.live), -1


def neither(sweep: Sweep, step: int) -> Exception:
    """Return the error for an adjoint step that has nothing to start from."""
    return illegal(Reverse(step), f"neither its tape nor its state, live is {sweep.at}")
