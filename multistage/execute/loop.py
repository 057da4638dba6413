"""The loop that performs actions, and what each of them does to a sweep.

The frequent actions do as little as they can: a step of the user's may take a microsecond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..actions import (
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from ..errors import ScheduleError
from ..states.slots import Kept, no_adjoint
from .accounts import illegal, only_latest, reach, weigh_beside
from .adjoints import close_adjoint, open_adjoint, skip_adjoint

if TYPE_CHECKING:
    from .sweep import Sweep


def perform(sweep: Sweep, pulls: bool) -> bool:
    """Perform actions up to `EndForward` or, if it `pulls`, the adjoint that is asked for.

    False if they end before that.

    Raises
    ------
    ScheduleError
        If they cannot be performed.
    """
    send, held, release = sweep.schedule.send, sweep.held, sweep.release
    answer: Answer = None
    while True:
        try:
            action: Any = send(answer)  # narrowed by `kind`: isinstance costs more
        except StopIteration:
            return False
        answer, kind = None, type(action)
        # Calls by name, the frequent ones first: through a table they take twice as long.
        if kind is Reverse:
            if not pulls:
                _reverse(sweep, action)
            elif _pulled(sweep, action):
                return True
        elif kind is Advance:
            _advance(sweep, action)
        elif kind is Load:
            kept = held.get(action.step)
            if kept is not None and sweep.lends:
                sweep.live, sweep.at = kept.state, action.step
            else:
                _load(sweep, action, kept)
            kept = None  # an uncounted reference would keep the state alive
        elif kind is Save:
            _save(sweep, action)
        elif kind is Free:
            if action.step in held:
                kept = held.pop(action.step)
                if kept is not None:
                    release(kept)
                    kept = None
                sweep.used -= 1
            else:
                _free_lost(sweep, action)
        elif kind is Tape:
            _tape(sweep, action)
        elif kind is EndForward:
            if not _takes_detour(sweep, action):
                _end_forward(sweep, action)
                return True
            send = sweep.schedule.send
        else:
            answer = _transfer(sweep, action)
            send = sweep.schedule.send


def _advance(sweep: Sweep, action: Advance) -> None:
    start, stop = action.start, action.stop
    if start != sweep.at:
        raise illegal(action, f"the live state is {sweep.at}")
    if sweep.one_tape and sweep.tapes:
        raise only_latest(action, sweep.tapes)
    if stop - start == 1 or sweep.copies:  # what steps overwrite may be given back
        sweep.live = sweep.advance_by(sweep.live, start, stop)
    else:  # not even we refer to the first state while others are made
        sweep.hand.append(sweep.live)
        sweep.live = None
        sweep.live = sweep.advance_by(sweep.hand.pop(), start, stop)
    sweep.at = stop
    if sweep.check is not None:
        sweep.check(sweep.live, stop)
        if not sweep.copies:
            sweep.check = None
    now = sweep.clock()
    sweep.forward_s += now - sweep.last
    sweep.last = now
    sweep.forward_steps += stop - start
    if now > sweep.due:
        sweep.flush()


def _tape(sweep: Sweep, action: Tape) -> None:
    step, tapes = action.step, sweep.tapes
    if step != sweep.at:
        raise illegal(action, f"the live state is {sweep.at}")
    if sweep.one_tape and tapes:
        raise only_latest(action, tapes)
    if tapes:
        if not sweep.state_is_tape:
            sweep.slots.trim()
        sweep.used = used = sweep.used + sweep.tape_slots
        if used > sweep.peak:
            reach(sweep, action, used)
    if sweep.state_is_tape:
        tapes[step] = sweep.keep(sweep.live, step)
        sweep.live = sweep.advance_by(sweep.live, step, step + 1)
    else:
        before = sweep.live
        sweep.live, tape = sweep.tape_by(before, step)
        if len(tapes) + 1 in sweep.weighed:
            weigh_beside(sweep, action, tape, len(tapes))
        tapes[step] = sweep.hold(tape, (before, sweep.live), step)
        before = tape = None  # uncounted references would keep the states alive
    sweep.at = step + 1
    if sweep.copies or not sweep.state_is_tape:  # a tape may hold on to it
        sweep.slots.check(sweep.live, step + 1)
    now = sweep.clock()
    sweep.forward_s += now - sweep.last
    sweep.last = now
    sweep.forward_steps += 1
    if now > sweep.due:
        sweep.flush()


def _save(sweep: Sweep, action: Save) -> None:
    step = action.step
    if step != sweep.at:
        raise illegal(action, f"the live state is {sweep.at}")
    sweep.used = used = sweep.used + 1
    if used > sweep.peak:
        reach(sweep, action, used)
    sweep.held[step] = sweep.keep(sweep.live, step)


def _load(sweep: Sweep, action: Load, kept: Kept | None) -> None:
    if sweep.one_tape and sweep.tapes:
        raise only_latest(action, sweep.tapes)
    if kept is None:
        kept = sweep.elsewhere.find(sweep, action.step)
    sweep.at = action.step
    sweep.live = kept.state if sweep.shared else sweep.slots.load(kept, sweep.live)


def _free_lost(sweep: Sweep, action: Free) -> None:
    if action.step not in sweep.lost:
        raise illegal(action, "no slot holds it")
    # Its slot went with the checkpoint: the schedule did not look.
    sweep.lost.remove(action.step)


def _end_forward(sweep: Sweep, action: EndForward) -> None:
    if not sweep.is_forward:
        raise illegal(action, "the forward sweep is over")
    if sweep.look is not None:
        sweep.look(sweep.live, sweep.at)
    sweep.end, sweep.is_forward = sweep.at, False
    if sweep.ledger is not None:
        sweep.ledger.end_forward()


def _reverse(sweep: Sweep, action: Reverse) -> None:
    """Compute an adjoint."""
    step = action.step
    if step != sweep.end - 1:
        raise illegal(action, f"the next adjoint step is {sweep.end - 1}")
    tape = sweep.tapes.pop(step, None) if sweep.tapes else None
    # The same as `open_adjoint` and `close_adjoint`, for the frequent cases.
    if tape is None and sweep.at == step and sweep.state_is_tape:
        adjoint = sweep.apart(sweep.reverse_by(sweep.live, sweep.adjoint, step), sweep.live)
        sweep.at = -1
    elif tape is not None and sweep.lends:
        given = tape.state
        adjoint = sweep.apart(sweep.reverse_by(given, sweep.adjoint, step), given)
        sweep.release(tape)
        if sweep.tapes:
            sweep.used -= sweep.tape_slots
    else:
        given = open_adjoint(sweep, step, tape)
        del tape
        adjoint = close_adjoint(sweep, given, sweep.reverse_by(given, sweep.adjoint, step))
    if adjoint is None and sweep.wanted:
        raise no_adjoint(step)
    sweep.adjoint = adjoint
    sweep.end = step
    now = sweep.clock()
    sweep.reverse_s += now - sweep.last
    sweep.last = now
    sweep.reverse_steps += 1
    if now > sweep.due:
        sweep.flush()


def _pulled(sweep: Sweep, action: Reverse) -> bool:
    """Return whether it is the adjoint that is asked for; let go of what others need."""
    step = action.step
    if step != sweep.end - 1:
        raise illegal(action, f"the next adjoint step is {sweep.end - 1}")
    if step == sweep.until:
        return True
    skip_adjoint(sweep, step)
    sweep.end = step
    return False


def _takes_detour(sweep: Sweep, action: Evict | EndForward) -> bool:
    """Whether another schedule goes on in place of this action: writes are late."""
    if sweep.detour is None or not sweep.is_forward:
        return False
    schedule = sweep.detour(sweep, action)
    if schedule is None:
        return False
    sweep.schedule = schedule
    return True


def _transfer(sweep: Sweep, action: Offer | Put | Get | Await | Evict | Drop) -> Answer:
    match action:
        case Offer() | Put():
            answer = sweep.elsewhere.write(sweep, action)
        case Get():
            answer = sweep.elsewhere.read(sweep, action)
        case Await():
            answer = sweep.elsewhere.wait(sweep, action)
        case Evict():
            answer = None
            if not _takes_detour(sweep, action):
                answer = sweep.elsewhere.evict(sweep, action)
        case Drop():
            answer = sweep.elsewhere.drop(sweep, action)
        case _:
            raise ScheduleError(f"{action!r} is not an action")
    # What a transfer takes is not the time of a step.
    sweep.last = now = sweep.clock()
    if now > sweep.due:
        sweep.flush()
    return answer
