"""When states and tapes may travel: what each of the actions between tiers does.

Each function performs an action on a machine, or raises `ScheduleError` and changes nothing.
"""

from __future__ import annotations

from ..actions import Answer, Await, Drop, Evict, Get, Offer, Put
from .machine_state import MachineState, Transfer, item_said, told


def may_write(machine: MachineState, action: Offer | Put) -> bool:
    """Raise unless the write is legal; return whether it takes a staging slot."""
    step, tier = action.step, action.tier
    if action.tape:
        _may_send_tape(machine, action)
        return False
    staged = step not in machine.held
    if staged and machine.live != step:
        machine.fail(f"{action} but state {step} is neither live nor held (live {machine.live})")
    if not staged and machine.held[step] is not None:
        machine.fail(f"{action} before Await({machine.held[step]}) of its Get")
    if (step, tier) in machine.stored:
        machine.fail(f"{action} but tier {tier} already has that checkpoint")
    if staged:
        machine.room(1, action)
    return staged


def _may_send_tape(machine: MachineState, action: Offer | Put) -> None:
    step, tier = action.step, action.tier
    if machine.one_tape:
        machine.fail(f"{action} but the chain has only its latest tape, which cannot travel")
    if step not in machine.tapes:
        machine.fail(f"{action} but tape {step} is not held")
    if machine.tapes[step] is not None:
        machine.fail(f"{action} before Await({machine.tapes[step]}) of its Get")
    if machine.memory is not None and step in machine.memory.late:
        machine.fail(
            f"{action} but tape {step} was made in the reverse sweep, where no tape is written"
        )
    if (~step, tier) in machine.stored:
        machine.fail(f"{action} but tier {tier} already has that tape")


def write(machine: MachineState, action: Offer | Put, answer: Answer) -> None:
    """Begin a write, if the tier has taken it."""
    item, tier = action.step, action.tier
    staged = may_write(machine, action)
    if action.tape:
        item = ~item
    limit = machine.tier_slots.get(tier)
    in_tier = machine.tier_used.get(tier, 0)
    more = 1 if item >= 0 and machine.memory is None else machine.room_in_tier(item)
    if limit is not None and in_tier + more > limit and answer is not None:
        machine.fail(f"{action} but tier {tier} is full: {machine.filling(in_tier, limit, more)}")
    if answer is None:
        if isinstance(action, Put):
            machine.fail(f"{action} was not answered by a token")
        return
    _require_next(machine, answer)
    machine.unwritten.discard((item, tier))
    machine.stored[item, tier] = machine.next_token
    machine.tier_used[tier] = in_tier + more
    machine.tier_peak[tier] = max(machine.tier_peak.get(tier, 0), in_tier + more)
    if staged:
        machine.take(1)
        machine.staged += 1
    else:
        machine.pins[item] = machine.pins.get(item, 0) + 1
    machine.tokens[machine.next_token] = Transfer(item, tier, is_write=True, staged=staged)
    machine.next_token += 1


def _require_next(machine: MachineState, answer: Answer) -> None:
    if answer != machine.next_token:
        machine.fail(f"the transfer was answered by token {answer}, not {machine.next_token}")


def read(machine: MachineState, action: Get, _: Answer) -> None:
    """Begin a read, into room that is taken from now on."""
    step, tier = action.step, action.tier
    item, held = (~step, machine.tapes) if action.tape else (step, machine.held)
    if (item, tier) not in machine.stored and (item, tier) not in machine.unwritten:
        machine.fail(f"{told(action)} but tier {tier} has no {item_said(item)}")
    if step in held:
        where = "it is held already" if action.tape else "a fast slot already holds it"
        machine.fail(f"{told(action)} but {where}")
    if not action.tape:
        machine.room(1, action)
        machine.take(1)
        machine.unread.discard(step)
    elif held:
        machine.room(machine.tape_slots, action)
        machine.take(machine.tape_slots)
    held[step] = machine.next_token
    machine.tokens[machine.next_token] = Transfer(item, tier, is_write=False, staged=False)
    machine.next_token += 1


def may_await(machine: MachineState, token: int) -> None:
    """Raise unless there is such a transfer."""
    if token not in machine.tokens:
        machine.fail(f"Await({token}) but no such transfer is in flight")


def await_transfer(machine: MachineState, action: Await, answer: Answer) -> None:
    """End a transfer: what it read is at hand, what it wrote may be given back."""
    may_await(machine, action.token)
    transfer = machine.tokens.pop(action.token)
    item, tier = transfer.item, transfer.tier
    if transfer.is_write:
        if transfer.staged:
            machine.used -= 1
            machine.staged -= 1
        else:
            machine.unpin(item)
        if (item, tier) in machine.stored:
            machine.stored[item, tier] = None
    elif item < 0:
        if answer is False and not machine.recovers:
            machine.end_tape(~item)
        else:
            machine.tapes[~item] = None
    elif answer is False:
        del machine.held[item]
        machine.used -= 1
        if machine.recovers:
            machine.unread.add(item)
    else:
        machine.held[item] = None
    if answer is False:
        machine.lose(item, tier)


def token_of(machine: MachineState, action: Evict) -> int:
    """Return the token of the write that an eviction waits for.

    Raises
    ------
    ScheduleError
        When the eviction is illegal here; the machine is unchanged.
    """
    step, tier = action.step, action.tier
    item = ~step if action.tape else step
    token = machine.stored.get((item, tier))
    transfer = None if token is None else machine.tokens.get(token)
    if transfer is None:
        what = item_said(item)
        machine.fail(f"{told(action)} but no write of {what} to tier {tier} is in flight")
    if transfer.staged:
        machine.fail(f"{told(action)} but its write is not from a fast slot")
    if machine.pins[item] > 1:
        machine.fail(f"{told(action)} but another write from the same copy was not awaited")
    assert token is not None
    return token


def evict(machine: MachineState, action: Evict, answer: Answer) -> None:
    """End a write, and give back the fast copy that it wrote."""
    token = token_of(machine, action)
    step, tier = action.step, action.tier
    item = ~step if action.tape else step
    del machine.tokens[token]
    machine.unpin(item)
    machine.stored[item, tier] = None
    if action.tape:
        machine.end_tape(step)
    else:
        del machine.held[step]
        machine.used -= 1
    if answer is False:
        machine.lose(item, tier)


def drop(machine: MachineState, action: Drop, _: Answer) -> None:
    """Delete a copy from a tier."""
    item, tier = ~action.step if action.tape else action.step, action.tier
    if (item, tier) not in machine.stored and (item, tier) not in machine.unwritten:
        machine.fail(f"{told(action)} but tier {tier} has no {item_said(item)}")
    if any(t.item == item and t.tier == tier for t in machine.tokens.values()):
        machine.fail(f"{told(action)} before its transfer was awaited")
    if (item, tier) in machine.unwritten:
        machine.unwritten.remove((item, tier))
        return
    del machine.stored[item, tier]
    machine.tier_used[tier] -= machine.room_in_tier(item)
