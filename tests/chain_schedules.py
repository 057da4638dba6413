"""Small schedules of chains with a tier, and chains for them."""

from __future__ import annotations

import random

from replays import actions_of

from multistage.actions import Action, Await, Drop, EndForward, Evict, Get, Put, Reverse, Tape
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
                spared_bytes=draw.choice([0, output]),
                saves_input=draw.random() < 0.5,
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
MIXED = actions_of(
    "0>1 S1 P1 1>3 E1 S3 T3 P3t T4 E3t G3t | a2 R4 R3 D3t F3 G1 a3 L1 T1 F1 T2 R2 R1 L0 T0 R0 D1"
)


def no_tier_s(plan: Plan) -> float | None:
    """Return the makespan of the plan without the tier, None where none fits."""
    found = plan.candidate("no tier")
    return found and found.makespan_s


def offload_s(plan: Plan) -> float | None:
    """Return the makespan with every tape sent to the tier, None where that does not fit."""
    found = plan.candidate("every tape to the tier")
    return found and found.makespan_s
