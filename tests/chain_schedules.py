"""Small schedules of chains with a tier, and chains for them."""

from __future__ import annotations

import random

from multistage.actions import (
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
from multistage.model.stages import Stage, StageCosts
from multistage.planners import Plan


def small_chain(seed: int, length: int, largest: int = 9) -> StageCosts:
    """Return a chain of small numbers, so that sums stay exact."""
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output = draw.randint(1, largest)
        stages.append(
            Stage(
                f"s{k}",
                forward_s=float(draw.randint(1, 4)),
                backward_s=float(draw.randint(1, 6)),
                output_bytes=output,
                tape_bytes=output + draw.randint(0, largest),
                gradient_bytes=draw.randint(0, largest),
                forward_overhead_bytes=draw.randint(0, 3),
                tape_overhead_bytes=draw.randint(0, 3),
                backward_overhead_bytes=draw.randint(0, 3),
            )
        )
    return StageCosts(tuple(stages), draw.randint(0, largest), draw.randint(0, 3))


def offload_all(n: int) -> list[Action]:
    """Send every tape but the last to the tier, each evicted once the next is made."""
    actions: list[Action] = []
    for i in range(n):
        actions.append(Tape(i))
        if i < n - 1:
            actions.append(Put(i, tape=True))
        if i:
            actions.append(Evict(i - 1, tape=True))
    actions.append(EndForward())
    token = n - 1
    for i in range(n - 1, -1, -1):
        if i:
            actions += [Get(i - 1, tape=True), Await(token)]
            token += 1
        actions.append(Reverse(i))
        if i < n - 1:
            actions.append(Drop(i, tape=True))
    return actions


# Five stages: state 1 to the tier, stages 1 and 2 run again, tape 3 to the
# tier with state 3 beside it.
MIXED: list[Action] = [
    Advance(0, 1),
    Save(1),
    Put(1),
    Advance(1, 3),
    Evict(1),
    Save(3),
    Tape(3),
    Put(3, tape=True),
    Tape(4),
    Evict(3, tape=True),
    Get(3, tape=True),
    EndForward(),
    Await(2),
    Reverse(4),
    Reverse(3),
    Drop(3, tape=True),
    Free(3),
    Get(1),
    Await(3),
    Load(1),
    Tape(1),
    Free(1),
    Tape(2),
    Reverse(2),
    Reverse(1),
    Load(0),
    Tape(0),
    Reverse(0),
    Drop(1),
]


def no_tier_s(plan: Plan) -> float | None:
    """Return the makespan of the plan without the tier, None where none fits."""
    found = plan.candidate("no tier")
    return found and found.makespan_s


def offload_s(plan: Plan) -> float | None:
    """Return the makespan with every tape sent to the tier, None where that does not fit."""
    found = plan.candidate("every tape to the tier")
    return found and found.makespan_s
