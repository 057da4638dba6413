"""The actions of a plan of the joint planner."""

from __future__ import annotations

from collections.abc import Iterator

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
from .joint_core import NEVER, REVERSE, Laid, Node, Thing
from .table import Table
from .traces import Trace


def actions_of_laid(laid: Laid, table: Table) -> list[Action]:
    """Return the actions of a plan, transfers included.

    What is never evicted is never written.  Tokens count the writes, all of them in the
    forward sweep, and then the reads.
    """
    before, after = _work(laid, table)
    awaited, last_of = _reads(laid)
    moved = laid.things[: laid.moved]
    made, evicted, got = (_by(moved, name) for name in ("made", "evicted", "got"))
    actions: list[Action] = []
    tokens, token_of = 0, {}
    for q, (kind, stage) in enumerate(laid.operations):
        if q == laid.turn:
            actions.append(EndForward())
        actions += (Evict(thing.step, tape=thing.tape) for thing in evicted.get(q, ()))
        for thing in reversed(got.get(q, [])):
            actions.append(Get(thing.step, tape=thing.tape))
            token_of[thing] = tokens
            tokens += 1
        actions += (Await(token_of[thing]) for thing in awaited.get(q, ()))
        actions += before.get(q, ())
        if kind == REVERSE:
            actions.append(Reverse(stage))
        else:
            actions.append(Advance(stage, stage + 1) if kind == 0 else Tape(stage))
        kept = after.get(q, [])
        for thing in made.get(q, ()):
            if not thing.tape and Save(thing.step) in kept:
                kept.remove(Save(thing.step))
                actions.append(Save(thing.step))
            actions.append(Put(thing.step, tape=thing.tape))
            tokens += 1
        actions += kept
        actions += (Drop(thing.step, tape=thing.tape) for thing in last_of.get(q, ()))
    return list(_joined(actions))


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


def _work(laid: Laid, table: Table) -> tuple[dict[int, list[Action]], dict[int, list[Action]]]:
    """Return what is saved, loaded and freed before and after each operation."""
    before: dict[int, list[Action]] = {}
    after: dict[int, list[Action]] = {}
    q, nodes = 0, laid.nodes
    for node in nodes:
        if node.apart:
            after.setdefault(q - 1, []).append(Save(node.start))
        q += node.stop - node.start + 1
    q -= nodes[-1].stop - nodes[-1].start + 1
    for node in reversed(nodes):
        last = node is nodes[-1]
        if node.tape and not last:
            q += 1
        else:
            if not last:
                before.setdefault(q, []).append(Load(node.start))
            trace = table.trace(node.slots, node.start, node.stop)
            assert trace is not None
            for kept in _segment(trace, node):
                if kept:
                    before.setdefault(q, []).extend(kept)
                q += 1
        if node.apart:
            after.setdefault(q - 1, []).append(Free(node.start))
    assert q == len(laid.operations)
    return before, after


def _segment(trace: Trace, node: Node) -> Iterator[list[Action]]:
    """Yield for each operation of a segment what is done before it; its input stays."""
    waiting: list[tuple[str, int]] = []
    saved: set[int] = set()
    first: list[Action] = []
    for s, t, k in trace:
        if k != s and s != t:
            if s not in saved and s != node.start:
                saved.add(s)
                first.append(Save(s))
            for _ in range(s, k):
                yield first
                first = []
            waiting.append(("load", s))
            continue
        if s in saved:
            saved.remove(s)
            first.append(Free(s))
        yield first
        first = []
        if s != t:
            waiting.append(("reverse", s))
            continue
        yield []
        while waiting:
            what, i = waiting.pop()
            if what == "load":
                first = [Load(i)]
                break
            yield []


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
