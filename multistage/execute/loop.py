"""The loop that performs actions, and what each of them does to a sweep.

The frequent actions do as little as they can: a step of the user's may take a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..actions import (
    Action,
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
    Schedule,
    Tape,
)
from ..errors import ScheduleError
from ..states.apart import apart_from
from ..states.slots import Kept, no_adjoint
from .accounts import illegal, only_latest, reach, weigh_beside
from .adjoints import close_adjoint, open_adjoint, skip_adjoint

if TYPE_CHECKING:
    from .sweep import Sweep

# What a sweep may wait for transfers in.
_WAITS = frozenset([Put, Evict, Await])


def perform(sweep: Sweep, pulls: bool) -> bool:
    """Perform actions up to `EndForward` or, if it `pulls`, the adjoint that is asked for.

    False if they end before that.

    Raises
    ------
    ScheduleError
        If they cannot be performed.

    Notes
    -----
    The frequent actions are performed here, and `for`, `type` and callables in local
    variables are used, since each call, `send`, `isinstance` and call of an attribute takes a
    share of the microseconds that an action costs.
    """
    held, tapes, apart, clock = sweep.held, sweep.tapes, sweep.apart, sweep.clock
    load, advance_by, reverse_by = sweep.slots.load, sweep.advance_by, sweep.reverse_by
    by_tape, one_tape = not sweep.state_is_tape, sweep.one_tape
    shared, copies = sweep.shared, sweep.copies
    actions: Iterable[Any] | None = sweep.schedule  # narrowed by `kind`
    while actions is not None:
        for action in actions:
            kind = type(action)
            if kind is Reverse and not pulls:
                step = action.step
                if by_tape or tapes or sweep.at != step or step != sweep.end - 1:
                    adjoint = _reverse(sweep, action)
                else:  # the frequent case of a state that is its own tape
                    adjoint = apart(reverse_by(sweep.live, sweep.adjoint, step), sweep.live)
                    sweep.at = -1
                if adjoint is None and sweep.wanted:
                    raise no_adjoint(step)
                sweep.adjoint, sweep.end = adjoint, step
                sweep.reverse_steps += 1
                now = clock()
                sweep.reverse_s += now - sweep.last
            elif kind is Advance:
                start, stop = action.start, action.stop
                if start != sweep.at or (one_tape and tapes):
                    raise _cannot_start(sweep, action, start)
                one = stop - start == 1 or copies
                sweep.live = advance_by(sweep.live, start, stop) if one else _far(sweep, action)
                sweep.at = stop
                if sweep.check is not None:
                    _check(sweep, stop)
                sweep.forward_steps += stop - start
                now = clock()
                sweep.forward_s += now - sweep.last
            elif kind is Load:
                kept = held.get(action.step)
                if kept is None or one_tape:
                    _load(sweep, action, kept)
                else:
                    sweep.at = action.step
                    sweep.live = kept.state if shared else load(kept, sweep.live)
                kept = None  # an uncounted reference would keep the state alive
                continue
            else:
                if kind is Save:
                    _save(sweep, action)
                elif kind is Free:
                    _free(sweep, action)
                elif kind is Tape:
                    _tape(sweep, action)
                else:
                    actions = _rare(sweep, action)
                    break
                continue
            sweep.last = now
            if now > sweep.due:
                sweep.flush()
        else:
            return False
    return True


def _save(sweep: Sweep, action: Save) -> None:
    step, keep = action.step, sweep.keep
    if step != sweep.at:
        raise _cannot_start(sweep, action, step)
    sweep.used = used = sweep.used + 1
    if used > sweep.peak:
        reach(sweep, action, used)
    sweep.held[step] = keep(sweep.live, step)


def _check(sweep: Sweep, step: int) -> None:
    """Judge the live state: of functional steps the first that a sweep makes."""
    assert sweep.check is not None
    sweep.check(sweep.live, step)
    if not sweep.copies:
        sweep.check = None


def _cannot_start(sweep: Sweep, action: Advance | Save | Tape, step: int) -> ScheduleError:
    """Return the error for an action that starts from another state than the live one."""
    if step != sweep.at:
        return illegal(action, f"the live state is {sweep.at}")
    return only_latest(action, sweep.tapes)


def _far(sweep: Sweep, action: Advance) -> object:
    """Run several steps without a reference to their first state: memory may hold few."""
    hand, advance_by = sweep.hand, sweep.advance_by
    hand.append(sweep.live)
    sweep.live = None
    return advance_by(hand.pop(), action.start, action.stop)


def _tape(sweep: Sweep, action: Tape) -> None:
    step, tapes = action.step, sweep.tapes
    if step != sweep.at or (sweep.one_tape and tapes):
        raise _cannot_start(sweep, action, step)
    if tapes:
        if not sweep.state_is_tape:
            sweep.slots.trim()
        sweep.used = used = sweep.used + sweep.tape_slots
        if used > sweep.peak:
            reach(sweep, action, used)
    if sweep.state_is_tape:
        keep, advance_by = sweep.keep, sweep.advance_by
        tapes[step] = keep(sweep.live, step)
        sweep.live = advance_by(sweep.live, step, step + 1)
        if sweep.copies:
            sweep.slots.check(sweep.live, step + 1)
    else:
        _make_and_hold(sweep, action)
    sweep.at = step + 1
    sweep.forward_steps += 1
    clock = sweep.clock
    now = clock()
    sweep.forward_s += now - sweep.last
    sweep.last = now
    if now > sweep.due:
        sweep.flush()


def _make_and_hold(sweep: Sweep, action: Tape) -> None:
    step, tapes, tape_by, hold = action.step, sweep.tapes, sweep.tape_by, sweep.hold
    before = sweep.live
    sweep.live, tape = tape_by(before, step)
    if len(tapes) + 1 in sweep.weighed:
        weigh_beside(sweep, action, tape, len(tapes))
    tapes[step] = hold(tape, (before, sweep.live), step)
    del before, tape  # uncounted references would keep the states alive
    sweep.slots.check(sweep.live, step + 1)  # a tape may hold on to it


def _load(sweep: Sweep, action: Load, kept: Kept | None) -> None:
    if sweep.one_tape and sweep.tapes:
        raise only_latest(action, sweep.tapes)
    if kept is None:
        kept = sweep.elsewhere.find(sweep, action.step)
    sweep.at = action.step
    sweep.live = kept.state if sweep.shared else sweep.slots.load(kept, sweep.live)


def _free(sweep: Sweep, action: Free) -> None:
    step, held = action.step, sweep.held
    if step in held:
        kept = held.pop(step)
        if kept is not None:  # it is not being read
            release = sweep.release
            release(kept)
        sweep.used -= 1
    elif step in sweep.lost:
        # Its slot went with the checkpoint: the schedule did not look.
        sweep.lost.remove(step)
    else:
        raise illegal(action, "no slot holds it")


def _end_forward(sweep: Sweep, action: EndForward) -> None:
    if not sweep.is_forward:
        raise illegal(action, "the forward sweep is over")
    if sweep.look is not None:
        sweep.look(sweep.live, sweep.at)
    sweep.end, sweep.is_forward = sweep.at, False
    if sweep.ledger is not None:
        sweep.ledger.end_forward()


def _reverse(sweep: Sweep, action: Reverse) -> object:
    """Return the adjoint before a step, computed from a tape that is held, or made now."""
    step, reverse_by = action.step, sweep.reverse_by
    if step != sweep.end - 1:
        raise illegal(action, f"the next adjoint step is {sweep.end - 1}")
    tape = sweep.tapes.pop(step, None)
    # As `open_adjoint` and `close_adjoint` do, the frequent cases first.
    if tape is not None and sweep.lends:
        apart, release = sweep.apart, sweep.release
        given = tape.state
        adjoint = apart(reverse_by(given, sweep.adjoint, step), given)
        release(tape)
        if sweep.tapes:
            sweep.used -= sweep.tape_slots
        return adjoint
    given = open_adjoint(sweep, step, tape)
    del tape
    adjoint = reverse_by(given, sweep.adjoint, step)
    if sweep.state_is_tape or sweep.copies:
        return close_adjoint(sweep, given, adjoint)
    return adjoint if adjoint is None else apart_from(adjoint, given)


def _pulled(sweep: Sweep, action: Reverse) -> bool:
    """Return whether it is the adjoint that is asked for; release what others need."""
    step = action.step
    if step != sweep.end - 1:
        raise illegal(action, f"the next adjoint step is {sweep.end - 1}")
    if step == sweep.until:
        return True
    skip_adjoint(sweep, step)
    sweep.end = step
    return False


def _rare(sweep: Sweep, action: Any) -> Iterable[Action] | None:
    """Perform an action that is not frequent; return those that follow, None to stop there."""
    kind, elsewhere = type(action), sweep.elsewhere
    answer: Answer = None
    if sweep.late is not None and kind in _WAITS and _leaves_tiers(sweep, action):
        return sweep.schedule
    if kind is Offer or kind is Put:
        answer = elsewhere.write(sweep, action)
    elif kind is Evict:
        answer = elsewhere.evict(sweep, action)
    elif kind is Await:
        answer = elsewhere.wait(sweep, action)
    elif kind is Get:
        answer = elsewhere.read(sweep, action)
    elif kind is Drop:
        answer = elsewhere.drop(sweep, action)
    elif kind is Reverse:  # an adjoint that is pulled
        return None if _pulled(sweep, action) else sweep.schedule
    elif kind is EndForward:
        _end_forward(sweep, action)
        return None
    else:
        raise ScheduleError(f"{action!r} is not an action")
    sweep.last = now = sweep.clock()  # the time of a transfer is not that of a step
    if now > sweep.due:
        sweep.flush()
    return _answered(sweep.schedule, answer)


def _answered(schedule: Schedule, answer: Answer) -> Iterable[Action]:
    """Return the actions that a schedule yields after an answer."""
    if answer is None:
        return schedule
    try:
        return chain((schedule.send(answer),), schedule)
    except StopIteration:
        return ()


def _leaves_tiers(sweep: Sweep, action: Put | Evict | Await) -> bool:
    """Whether another schedule goes on in place of this action, whose transfer is late."""
    assert sweep.late is not None
    schedule = sweep.late(sweep, action)
    if schedule is None:
        return False
    sweep.schedule.close()
    sweep.schedule, sweep.late = schedule, None
    return True
