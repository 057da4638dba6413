"""When steps may run, and states be kept and taken: what each of these actions does.

Each function performs an action on a machine, or raises `ScheduleError` and changes nothing.
"""

from __future__ import annotations

from ..actions import Advance, Answer, EndForward, Free, Load, Reverse, Save, Tape
from .machine_state import MachineState


def save(machine: MachineState, action: Save, _: Answer) -> None:
    """Keep the live state in a fast slot."""
    step = action.step
    if machine.live != step:
        machine.fail(f"Save({step}) but the live state is {machine.live}")
    if step in machine.held:
        machine.fail(f"Save({step}) but a slot already holds it")
    machine.room(1, action)
    machine.take(1)
    machine.held[step] = None
    if machine.unread:
        machine.unread.discard(step)


def load(machine: MachineState, action: Load, _: Answer) -> None:
    """Make a kept state the live one."""
    if machine.one_tape:
        machine.keep_latest(action)
    step = action.step
    if step and step in machine.unread and step not in machine.held:
        machine.room(1, action)
        machine.take(1)
        machine.held[step] = None
        machine.unread.discard(step)
    elif (step or machine.held.get(step) is not None) and (
        machine.memory is None or machine.tapes.get(step - 1, -1) is not None
    ):
        machine.readable(step, "Load")
    machine.live = step


def free(machine: MachineState, action: Free, _: Answer) -> None:
    """Give the slot of a state back."""
    step = action.step
    if step in machine.unread and step not in machine.held:
        machine.unread.discard(step)
        return
    machine.readable(step, "Free")
    if machine.pins.get(step):
        machine.fail(f"Free({step}) but a write from that slot was not awaited")
    del machine.held[step]
    machine.used -= 1


def advance(machine: MachineState, action: Advance, _: Answer) -> None:
    """Run steps from the live state, keeping nothing."""
    if machine.one_tape:
        machine.keep_latest(action)
    start, stop = action.start, action.stop
    limit = machine.n_steps if machine.adjoint is None else machine.adjoint
    if machine.live != start:
        machine.fail(f"Advance({start}, {stop}) but the live state is {machine.live}")
    if stop <= start:
        machine.fail(f"Advance({start}, {stop}) runs no step")
    if limit is not None and stop > limit:
        machine.fail(f"Advance({start}, {stop}) goes past state {limit}")
    machine.live = stop
    machine.forward_steps += stop - start


def tape(machine: MachineState, action: Tape, _: Answer) -> None:
    """Run a step from the live state, keeping its tape."""
    if machine.one_tape:
        machine.keep_latest(action)
    step = action.step
    limit = machine.n_steps if machine.adjoint is None else machine.adjoint
    if machine.live != step:
        machine.fail(f"Tape({step}) but the live state is {machine.live}")
    if step in machine.tapes:
        machine.fail(f"Tape({step}) but that tape is already held")
    if limit is not None and step >= limit:
        machine.fail(f"Tape({step}) goes past state {limit}")
    if machine.tapes:
        machine.room(machine.tape_slots, action)
        machine.take(machine.tape_slots)
    machine.tapes[step] = None
    machine.live = step + 1
    machine.forward_steps += 1


def reverse(machine: MachineState, action: Reverse, _: Answer) -> None:
    """Run an adjoint step from its tape, or from its state, which is used up."""
    step = action.step
    if machine.adjoint is None:
        machine.fail(f"Reverse({step}) before EndForward")
    elif step != machine.adjoint - 1:
        machine.fail(f"Reverse({step}) but the next adjoint step is {machine.adjoint - 1}")
    if step in machine.tapes:
        if machine.tapes[step] is not None:
            machine.fail(f"Reverse({step}) before Await({machine.tapes[step]}) of its tape's Get")
        if machine.pins and ~step in machine.pins:
            machine.fail(f"Reverse({step}) but a write of its tape was not awaited")
        if machine.state_is_tape and machine.in_place and machine.live is not None:
            if machine.live < step:
                machine.borrow(1, f"Reverse({step}), which puts live state {machine.live} aside,")
            else:
                machine.live = None
        del machine.tapes[step]
        if machine.tapes:
            machine.used -= machine.tape_slots
    elif machine.live == step:
        if machine.tapes and not machine.state_is_tape:
            beside = f"Reverse({step}), which makes a tape beside {len(machine.tapes)} held,"
            machine.borrow(machine.tape_slots, beside)
        machine.live = None
    else:
        machine.fail(
            f"Reverse({step}) finds neither its tape nor its state (live is {machine.live})"
        )
    machine.adjoint = step


def end_forward(machine: MachineState, _action: EndForward, _: Answer) -> None:
    """Begin the reverse sweep: the live state is the last."""
    if machine.adjoint is not None:
        machine.fail("a second EndForward")
    last = machine.live if machine.n_steps is None else machine.n_steps
    if machine.live is None or machine.live != last:
        machine.fail(f"EndForward but the live state is {machine.live}, not {machine.n_steps}")
    machine.adjoint = machine.live
