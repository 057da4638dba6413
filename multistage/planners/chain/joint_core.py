"""What the joint planner asks of the C core: judge a plan, improve it, find one, lay it out.

A plan is one byte for each stage, the loss included, its *fate*; see `native/joint.h`.
Laid out it is operations and things that travel, from which its actions are made.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ... import native
from ...actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)
from ...model.tier import Tier
from ...support.arrays import Bytes, Integers
from .memory import actions_of, left_to_reverse
from .sizes import Sizes, in_core
from .table import Table

KEEPS_TAPE, STARTS, TAPE_AWAY, STATE_AWAY, APART = 1, 2, 4, 8, 16
RESERVE_AT = 5
MAY_STATE, MAY_TAPE = 1, 2
ADVANCE, TAPE, TAPE_LAST, REVERSE = 0, 1, 2, 3
NEVER = 2**31 - 1
UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class Program:
    """How the dynamic program rounds and what it charges; see `native/joint_program.c`.

    Attributes
    ----------
    read_price : float
        Of a second of reading.
    staging : float
        Of the largest recent tape, that a write in flight holds besides.
    fineness : float
        Steps of time that a mean tape takes to write; 0: as the limit has it.
    speed : float
        The tier's times are multiplied by it.
    reserve : int
        Slots kept free beside a segment.
    steps : int
        Of the backlog.
    stride : int
        Memories of the table in a slot of the program.
    """

    read_price: float
    staging: float
    fineness: float
    speed: float
    reserve: int
    steps: int
    stride: int


@dataclass(frozen=True, slots=True)
class Thing:
    """A state or tape of a plan that may go to the tier."""

    tape: bool
    step: int
    made: int  # the operation that makes it
    evicted: int  # the operations before which it leaves and comes back, or NEVER
    got: int
    first: int  # the operations of the reverse sweep that need it
    last: int


@dataclass(frozen=True, slots=True)
class Node:
    """A stage that keeps its tape, or a segment and the slots it is reversed with."""

    start: int
    stop: int
    slots: int
    apart: bool  # whether state `start` is kept apart from a tape
    tape: bool


@dataclass(frozen=True, slots=True)
class Laid:
    """A plan as operations and things; the first `moved` things travel."""

    operations: list[tuple[int, int]]  # kind, stage
    things: list[Thing]
    nodes: list[Node]
    moved: int
    turn: int  # the first operation of the reverse sweep
    peak_bytes: int  # the chain's input not counted
    seconds: float
    waited_s: float


def require_core() -> None:
    """Raise ArgumentError where chains cannot be planned with a tier: without the C core."""
    native.require("a tier for stages or steps that differ", "plan without a tier")


class Core:
    """Plans of one chain within one limit and with one tier, in the C core.

    Parameters
    ----------
    true : Sizes
        In bytes.
    table : Table
        Solved by the core, in slots of `unit_bytes`.
    limit : int
        Bytes, the chain's input not counted.
    """

    def __init__(
        self, true: Sizes, table: Table, unit_bytes: float, limit: int, rates: Tier
    ) -> None:
        require_core()
        self.n, self.table = len(true), table
        slots, none, values = table.solved()
        capacity = rates.capacity_bytes
        self._may = may_travel(true, rates)
        self._work = np.zeros(native.library().ms_joint_work_len(self.n), np.int64)
        self._program = np.empty(0, np.int64)
        self._in_bytes = in_core(true)
        self._joint = native.Joint(
            ctypes.pointer(slots),
            ctypes.pointer(self._in_bytes),
            none.ctypes.data,
            values.ctypes.data,
            table.slots,
            unit_bytes,
            true.forward_s.ctypes.data,
            true.reverse_s.ctypes.data,
            true.spared_s.ctypes.data,
            limit,
            rates.write_bytes_per_s,
            rates.read_bytes_per_s,
            rates.write_s,
            rates.read_s,
            rates.write_overhead_s,
            rates.read_overhead_s,
            UNBOUNDED if capacity is None else capacity,
            int(rates.shared),
            self._may.ctypes.data,
            self._work.ctypes.data,
        )
        self._joint.owner = true, table, slots

    def judge(self, fates: Bytes) -> float:
        """Return the makespan of a plan, infinite if it does not fit."""
        return self._judge(fates)[0]

    def _judge(self, fates: Bytes) -> tuple[float, Integers, float]:
        told, waited = np.zeros(6, np.int64), np.zeros(1)
        seconds = native.library().ms_joint_judge(
            ctypes.byref(self._joint), fates.ctypes.data, told.ctypes.data, waited.ctypes.data
        )
        return float(seconds), told, float(waited[0])

    def improve(self, fates: Bytes, seconds: float, moves: int, seed: int) -> tuple[Bytes, float]:
        """Return the best plan that so many random moves find, and its makespan."""
        better = fates.copy()
        found = native.library().ms_joint_improve(
            ctypes.byref(self._joint), better.ctypes.data, seconds, moves, seed
        )
        return better, float(found)

    def cross(self, first: Bytes, rest: Bytes, below: float) -> list[tuple[float, Bytes]]:
        """Return the plans faster than `below` that begin as one plan and continue as another.

        With their makespans; one plan for each stage, but the first, where the two differ.
        """
        made, seconds = np.empty((self.n, self.n), np.uint8), np.empty(self.n)
        count = native.library().ms_joint_cross(
            ctypes.byref(self._joint),
            first.ctypes.data,
            rest.ctypes.data,
            below,
            made.ctypes.data,
            seconds.ctypes.data,
        )
        return list(zip(seconds[:count].tolist(), made[:count], strict=True))

    def program(
        self, program: Program, shares: tuple[float, ...], among: Bytes | None = None
    ) -> list[Bytes]:
        """Return the plans that the dynamic program finds best for shares of the limit.

        Of those in which only the things `among` travel, bits as of `may_travel`, if given.
        """
        may = self._may.copy()
        self._may &= may if among is None else among
        call = native.JointProgram(
            program.read_price,
            program.staging,
            program.fineness,
            program.speed,
            program.reserve,
            program.steps,
            program.stride,
            native.library().ms_chain_isa(),
        )
        joint = ctypes.byref(self._joint)
        room = native.library().ms_joint_program_len(joint, ctypes.byref(call))
        if len(self._program) < room:
            self._program = np.empty(room, np.int64)
        count = len(shares)
        plans, found = np.zeros((count, self.n), np.uint8), np.zeros(count, np.uint8)
        wanted = np.array(shares)
        native.library().ms_joint_program(
            joint,
            ctypes.byref(call),
            self._program.ctypes.data,
            wanted.ctypes.data,
            count,
            plans.ctypes.data,
            found.ctypes.data,
        )
        self._may[:] = may
        return [plan for plan, made in zip(plans, found, strict=True) if made]

    def lay_out(self, fates: Bytes) -> Laid:
        """Return a plan that fits as operations and things."""
        seconds, told, waited_s = self._judge(fates)
        moved, ops, items, nodes, turn, peak = (int(value) for value in told)
        operations = np.empty((ops, 3), np.int64)
        things = np.empty((max(1, items), 7), np.int64)
        cut = np.empty((nodes, 5), np.int64)
        native.library().ms_joint_layout(
            ctypes.byref(self._joint),
            operations.ctypes.data,
            things.ctypes.data,
            cut.ctypes.data,
        )
        return Laid(
            operations=[(kind, stage) for kind, stage, _ in operations.tolist()],
            things=[Thing(bool(tape), *rest) for tape, *rest in things[:items].tolist()],
            nodes=[
                Node(start, stop, slots, bool(apart), bool(tape))
                for start, stop, slots, apart, tape in cut.tolist()
            ],
            moved=moved,
            turn=turn,
            peak_bytes=peak,
            seconds=seconds,
            waited_s=waited_s,
        )


def may_travel(true: Sizes, rates: Tier) -> Bytes:
    """Return for each stage whether its input and its tape may go to the tier, as bits."""
    most = UNBOUNDED if rates.capacity_bytes is None else rates.capacity_bytes
    n = len(true)
    may = np.where(true.state[:n] <= most, MAY_STATE, 0)
    if rates.tapes:
        may |= np.where(true.tape <= most, MAY_TAPE, 0)
    may[0] &= MAY_TAPE  # state 0 is the caller's
    may[n - 1] &= MAY_STATE  # the loss is reversed at once
    return may.astype(np.uint8)


def actions_of_laid(laid: Laid, table: Table, *, inside: bool) -> list[Action]:
    """Return the actions of a plan, transfers included.

    What is never evicted is never written.  Tokens count the writes, all of them in the
    forward sweep, and then the reads.

    Parameters
    ----------
    inside : bool
        Whether a state is loaded from the tape that includes it, not saved beside it.
    """
    before, after = _work(laid, table, inside)
    awaited, last_of = _reads(laid)
    moved = laid.things[: laid.moved]
    made, evicted, got = (_by(moved, name) for name in ("made", "evicted", "got"))
    actions: list[Action] = []
    tokens, token_of = 0, {}
    loss = laid.nodes[-1].stop
    for q, (kind, stage) in enumerate(laid.operations):
        actions += (Evict(thing.step, tape=thing.tape) for thing in evicted.get(q, ()))
        if q == laid.turn:
            actions.append(EndForward())
        for thing in reversed(got.get(q, [])):
            actions.append(Get(thing.step, tape=thing.tape))
            token_of[thing] = tokens
            tokens += 1
        actions += (Await(token_of[thing]) for thing in awaited.get(q, ()))
        actions += before.get(q, ())
        if kind == ADVANCE:
            actions.append(Advance(stage, stage + 1))
        elif stage < loss:
            actions.append(Reverse(stage) if kind == REVERSE else Tape(stage))
        kept = after.get(q, [])
        for thing in made.get(q, ()):
            if not thing.tape and Save(thing.step) in kept:
                kept.remove(Save(thing.step))
                actions.append(Save(thing.step))
            actions.append(Put(thing.step, tape=thing.tape))
            tokens += 1
        actions += kept
        actions += (Drop(thing.step, tape=thing.tape) for thing in last_of.get(q, ()))
    return list(left_to_reverse(_joined(actions)))


def _by(things: list[Thing], name: str) -> dict[int, list[Thing]]:
    found: dict[int, list[Thing]] = {}
    for thing in things:
        found.setdefault(getattr(thing, name), []).append(thing)
    found.pop(NEVER, None)
    return found


def _reads(laid: Laid) -> tuple[dict[int, list[Thing]], dict[int, list[Thing]]]:
    """Return by operation what is awaited before it and what is dropped after it."""
    moved = laid.things[: laid.moved]
    awaited: dict[int, list[Thing]] = {}
    for thing in reversed(moved):
        awaited.setdefault(max(laid.turn, thing.first), []).append(thing)
    return awaited, _by(moved, "last")


def _work(
    laid: Laid, table: Table, inside: bool
) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Return what is saved, loaded and freed before and after each operation."""
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    nodes, last = laid.nodes, laid.nodes[-1]
    segments = {
        node: list(_segment(table, node, node is last))
        for node in nodes
        if node is last or not node.tape
    }
    again = {node for node, work in segments.items() if Load(node.start) in itertools.chain(*work)}
    saved = {node for node in nodes if node.apart or (node.start and node in again and not inside)}
    q = 0
    for node in nodes:
        if node in saved:
            after.setdefault(q - 1, []).append(Save(node.start))
        q += node.stop - node.start + 1
    q -= last.stop - last.start + 1
    for node in reversed(nodes):
        for kept in segments.get(node, [[]]):
            if kept:
                before.setdefault(q, []).extend(kept)
            q += 1
        if node in saved:
            after.setdefault(q - 1, []).append(Free(node.start))
    assert q == len(laid.operations)
    return before, after


def _segment(table: Table, node: Node, last: bool) -> Iterator[list[Action]]:
    """Yield for each operation of a segment what is done before it; its input stays."""
    trace = table.trace(node.slots, node.start, node.stop)
    assert trace is not None
    before: list[Action] = [] if last else [Load(node.start)]
    taped: set[int] = set()
    for action in actions_of(trace, inside=(node.start,), ended=not last):
        match action:
            case Advance(start, stop):
                count = stop - start
            case Tape(step):
                taped.add(step)
                count = 1
            case Reverse() | EndForward():  # without a tape both operations are here
                count = 1 if isinstance(action, Reverse) and action.step in taped else 2
            case _:
                before.append(action)
                continue
        yield before
        before = []
        yield from ([] for _ in range(1, count))


def _joined(actions: list[Action]) -> Iterator[Action]:
    """Yield the actions, runs of stages as one."""
    run: Advance | None = None
    for action in actions:
        if isinstance(action, Advance):
            run = Advance(action.start if run is None else run.start, action.stop)
            continue
        if run is not None:
            yield run
            run = None
        yield action
    if run is not None:
        yield run
