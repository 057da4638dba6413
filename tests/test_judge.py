"""The legality machine against a judge of its own: lists of what is in memory, looked at again.

Schedules of all planners are spoilt in every small way (an action left out, done twice,
exchanged with another); both must agree on each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from multistage import PLANNERS, Costs, Tier
from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
    drive,
)
from multistage.errors import BudgetError, ScheduleError
from multistage.schedule.rules import check

N = 9


class Breach(Exception):
    """What an illegal schedule does."""


def need(condition: object) -> None:
    if not condition:
        raise Breach


def judge(actions: list[Action], slots: float, tape: float, state_is_tape: bool) -> None:
    """Raise Breach unless the schedule is legal; nothing is counted along the way."""
    memory: list[tuple[str, int]] = []  # ("slot" or "staged" or "tape", step)
    landing: list[int] = []  # steps whose slot is being read into
    queue: dict[int, tuple[str, int]] = {}  # token -> ("slot" or "staged" or "read", step)
    tier: list[int] = []
    live: int | None = 0
    todo: int | None = None  # adjoint steps left
    tokens = 0

    def fits(more: float = 0.0) -> bool:
        tapes = sum(kind == "tape" for kind, _ in memory)
        others = len(memory) - tapes
        return others + max(0, tapes - 1) * tape + more <= slots + 1e-9

    for action in actions:
        last = N if todo is None else todo
        match action:
            case Advance(start, stop):
                need(live == start < stop <= last)
                live = stop
            case Tape(step):
                need(live == step < last and ("tape", step) not in memory)
                memory.append(("tape", step))
                live = step + 1
            case Reverse(step):
                need(todo is not None and step == todo - 1)
                if ("tape", step) in memory:
                    memory.remove(("tape", step))
                else:
                    need(live == step)
                    held = any(kind == "tape" for kind, _ in memory)
                    need(state_is_tape or not held or fits(tape))
                    live = None
                todo = step
            case Save(step):
                need(live == step and ("slot", step) not in memory)
                memory.append(("slot", step))
            case Load(step):
                need(step not in landing and (step == 0 or ("slot", step) in memory))
                live = step
            case Free(step):
                need(("slot", step) in memory and step not in landing)
                need(("slot", step) not in queue.values())
                memory.remove(("slot", step))
            case Put(step):
                need(step not in tier and step not in landing)
                kind = "slot" if ("slot", step) in memory else "staged"
                need(kind == "slot" or live == step)
                if kind == "staged":
                    memory.append(("staged", step))
                queue[tokens] = (kind, step)
                tier.append(step)
                tokens += 1
            case Get(step):
                need(step in tier and ("slot", step) not in memory)
                memory.append(("slot", step))
                landing.append(step)
                queue[tokens] = ("read", step)
                tokens += 1
            case Await(token):
                need(token in queue)
                kind, step = queue.pop(token)
                if kind == "read":
                    landing.remove(step)
                elif kind == "staged":
                    memory.remove(("staged", step))
            case Drop(step):
                need(step in tier and all(step != other for _, other in queue.values()))
                tier.remove(step)
            case EndForward():
                need(todo is None and live == N)
                todo = N
        need(fits())
    need(todo == 0 and not memory and not queue and not tier)


def is_legal(actions: list[Action], slots: float, tape: float, state_is_tape: bool) -> bool:
    try:
        judge(actions, slots, tape, state_is_tape)
    except Breach:
        return False
    return True


def recorded(schedule: Any) -> list[Action]:
    """Return the actions of a schedule, every third offer taken, as a static one."""
    actions: list[Action] = []
    tokens = offers = 0
    for action, send in drive(schedule):
        if isinstance(action, Offer):
            offers += 1
            if offers % 3:
                continue
            action = Put(action.step)
        actions.append(action)
        if isinstance(action, Put | Get):
            send(tokens)
            tokens += 1
        elif isinstance(action, Await):
            send(True)
    return actions


def spoilt(actions: list[Action], source: random.Random) -> Iterator[list[Action]]:
    for k in range(len(actions)):
        yield actions[:k] + actions[k + 1 :]
        yield [*actions[:k], actions[k], *actions[k:]]
        yield [*actions[:k], *actions[k : k + 2][::-1], *actions[k + 2 :]]
        other = list(actions)
        j = source.randrange(len(actions))
        other[k], other[j] = other[j], other[k]
        yield other
        moved = list(actions)
        moved.insert(source.randrange(len(actions)), moved.pop(k))
        yield moved


@pytest.mark.long(but="*-2.5")
@pytest.mark.parametrize("tape", [None, 0.5, 2.5])
@pytest.mark.parametrize("name", PLANNERS)
def test_both_judges_agree_on_every_spoilt_schedule(name: str, tape: float | None) -> None:
    if name == "pyrevolve":
        pytest.importorskip("pyrevolve")
    tiers = (Tier("t", 1.0, 1.0),)
    size, step_s = (0, None) if tape is None else (int(10 * tape), 1.0)
    costs = Costs(1.0, 2.0, step_s, 10, size, tiers)
    source = random.Random(f"{name} {tape}")
    weight, own = tape or 1.0, tape is None
    verdicts = {True: 0, False: 0}
    for slots in (3, 25):
        try:
            actions = recorded(PLANNERS[name](costs, slots, N).schedule())
        except BudgetError:
            continue
        assert is_legal(actions, slots, weight, own)
        # With a slot less, and where the state is (no longer) its own tape, too.
        for room, bare in ((slots, own), (slots - 1, own), (slots, not own)):
            for schedule in (actions, *spoilt(actions, source)):
                expected = is_legal(schedule, room, weight, bare)
                try:
                    check(schedule, N, room, tape_slots=weight, state_is_tape=bare)
                    found = True
                except ScheduleError:
                    found = False
                assert found == expected, (schedule, room, bare)
                verdicts[expected] += 1
    assert not any(verdicts.values()) or verdicts[False] > verdicts[True] > 0
