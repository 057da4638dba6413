"""The exact order of actions of every planner, for two small cases each.

A line that changes here is a plan that changes: the diff shows in which action.  The
notation is that of `replays`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from replays import driven, replay, short

from multistage.actions import Put
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners import PLANNERS
from multistage.planners.chain.heterogeneous import plan_chain
from multistage.planners.single.revolve import revolve_schedule
from multistage.planners.streaming.online import durable_plan, resumed_schedule
from multistage.planners.streaming.overlap import on_tier, overlap

PLAIN = Costs(1.0, 2.0)
TAPED = Costs(1.0, 2.0, 1.5)
QUICK = Costs(1.0, 2.0, tiers=(Tier(write_s=1.0, read_s=1.0),))
EVEN = Costs(1.0, 2.0, tiers=(Tier(write_s=2.0, read_s=2.0),))
BUSY = Costs(1.0, 2.0, tiers=(Tier(write_s=0.5, read_s=0.5, capacity_states=1),))
TWO = Costs(
    1.0,
    2.0,
    tiers=(
        Tier(write_s=0.5, read_s=0.5, capacity_states=1, name="host"),
        Tier(write_s=1.0, read_s=1.0, name="disk"),
    ),
)


def rows(table: str) -> list[Any]:
    """Return the parameters of each plan in a table, and its actions."""
    found = re.findall(r"^(\S.*)\n((?: .*\n)+)", table, re.MULTILINE)
    return [
        pytest.param(head.split(), " ".join(actions.split()), id=head) for head, actions in found
    ]


# Planner, costs, slots, steps; actions: the forward sweep, and what comes after it.
UNIFORM = """
store-all PLAIN 5 4
    T0 T1 T2 T3 |
    R3 R2 R1 R0
store-all TAPED 4 4
    T0 T1 T2 T3 |
    R3 R2 R1 R0
revolve PLAIN 2 5
    S0 0>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 F2 R2 L0 0>1 R1 L0 F0 R0
revolve TAPED 3 5
    S0 0>1 S1 1>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 F2 R2 L1 F1 R1 L0 F0 R0
pyrevolve PLAIN 2 5
    S0 0>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 R2 F2 L0 0>1 R1 L0 R0 F0
pyrevolve TAPED 3 5
    S0 0>1 S1 1>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 R2 F2 L1 R1 F1 L0 R0 F0
periodic PLAIN 4 6
    S0 0>2 S2 2>4 T4 T5 |
    R5 R4 L2 F2 T2 R3 R2 L0 F0 T0 R1 R0
periodic TAPED 5 9
    S0 0>5 T5 T6 T7 T8 |
    R8 R7 R6 R5 L0 F0 T0 T1 T2 T3 R4 R3 R2 R1 R0
recursive PLAIN 3 7
    S0 0>4 T4 T5 T6 |
    R6 R5 R4 L0 F0 T0 T1 T2 R3 R2 R1 R0
recursive TAPED 3 9
    S0 0>5 S5 5>7 T7 T8 |
    R8 R7 L5 F5 T5 R6 R5 L0 F0 S0 0>3 T3 R4 R3 L0 F0 T0 T1 R2 R1 R0
streaming QUICK 3 6
    S0 O0 0>1 S1 O1 1>2 S2 O2 a0 2>3 F0 S3 O3 a1 3>4 F1 S4 O4 a2 4>5 T5 |
    R5 L4 R4 a3 a4 F4 D4 L3 G1 R3 F3 D3 L2 G0 R2 F2 D2 a5 L1 R1 F1 D1 a6 L0 R0 F0 D0
streaming EVEN 3 7
    O0 0>2 O2 2>3 S3 3>4 a0 S4 4>5 a1 S5 5>6 T6 |
    R6 L5 F5 R5 L4 F4 R4 L3 G2 R3 F3 a2 L2 G0 R2 F2 D2 a3 L0 0>1 R1 L0 R0 F0 D0
interval QUICK 3 5
    P0 0>1 P1 1>2 a0 P2 2>3 a1 P3 3>4 a2 P4 T4 |
    R4 a3 a4 D4 G3 a5 D3 L3 G2 R3 F3 a6 D2 L2 G1 R2 F2 a7 D1 L1 G0 R1 F1 a8 D0 L0 R0 F0
interval EVEN 2 12
    P0 0>2 P2 2>4 a0 P4 4>6 a1 P6 6>8 a2 P8 8>10 a3 P10 10>11 T11 |
    R11 a4 a5 G10 a6 D10 L10 G8 R10 F10 a7 D8 L8 G6 8>9 R9 L8 R8 F8 a8 D6 L6 G4 6>7 R7 L6 R6 F6 a9
    D4 L4 G2 4>5 R5 L4 R4 F4 a10 D2 L2 G0 2>3 R3 L2 R2 F2 a11 D0 L0 0>1 R1 L0 R0 F0
online PLAIN 2 5
    S0 0>1 S1 1>2 F1 S2 2>3 F2 S3 3>4 F3 S4 4>5 |
    L4 R4 F4 L0 0>1 S1 1>3 R3 L1 1>2 R2 L1 F1 R1 L0 R0 F0
online EVEN 3 6
    S0 O0 0>1 S1 1>2 S2 O2 2>3 F1 S3 3>4 F3 S4 O4 a0 4>5 F0 S5 5>6 |
    L5 R5 F5 L4 G0 R4 L2 2>3 R3 L2 R2 a1 a2 F4 D4 F2 D2 a3 L0 0>1 R1 L0 R0 F0 D0
h-revolve BUSY 1 5
    P0 a0 0>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 F2 R2 G0 a1 L0 D0 0>1 R1 L0 R0 F0
h-revolve TWO 1 6
    P0 a0 0>3 S3 3>5 T5 |
    R5 L3 3>4 R4 L3 F3 R3 G0 a1 L0 F0 0>1 S1 1>2 R2 L1 F1 R1 G0 a2 L0 D0 F0 R0
disk-revolve QUICK 1 5
    P0 a0 0>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 F2 R2 G0 a1 L0 D0 0>1 R1 L0 R0 F0
disk-revolve BUSY 1 6
    P0 a0 0>3 S3 3>5 T5 |
    R5 L3 3>4 R4 L3 F3 R3 G0 a1 L0 F0 0>1 S1 1>2 R2 L1 F1 R1 G0 a2 L0 D0 F0 R0
periodic-disk QUICK 1 6
    P0 a0 0>2 S2 2>5 T5 |
    R5 L2 2>4 R4 L2 2>3 R3 L2 F2 R2 G0 a1 D0 L0 0>1 R1 L0 R0 F0
periodic-disk QUICK 2 9
    P0 a0 0>3 S3 3>6 S6 6>8 T8 |
    R8 L6 6>7 R7 L6 F6 R6 L3 3>4 S4 4>5 R5 L4 F4 R4 L3 F3 R3 G0 a1 D0 L0 0>1 S1 1>2 R2 L1 F1 R1 L0
    R0 F0
stumm-walther QUICK 1 5
    P0 a0 0>2 S2 2>4 T4 |
    R4 L2 2>3 R3 L2 F2 R2 G0 a1 L0 F0 0>1 R1 G0 a2 L0 F0 D0 R0
stumm-walther BUSY 1 6
    P0 a0 0>3 S3 3>5 T5 |
    R5 L3 3>4 R4 L3 F3 R3 G0 a1 L0 F0 0>1 S1 1>2 R2 L1 F1 R1 G0 a2 L0 F0 D0 R0
mixed TAPED 1 4
    S0 0>3 T3 |
    R3 L0 0>2 R2 L0 F0 T0 R1 R0
mixed TAPED 2 6
    S0 0>3 S3 3>5 T5 |
    R5 L3 F3 T3 R4 R3 L0 F0 T0 T1 R2 R1 R0
"""


@pytest.mark.parametrize(("given", "expected"), rows(UNIFORM))
def test_uniform_plans(given: list[str], expected: str) -> None:
    name, costs, slots, n_steps = given
    assert short(replay(PLANNERS[name](globals()[costs], int(slots), int(n_steps)))) == expected


def test_every_planner_has_two() -> None:
    assert dict.fromkeys(PLANNERS, 2) == Counter(row.values[0][0] for row in rows(UNIFORM))


def test_plans_of_durable_runs() -> None:
    """State 0 is written though slots would do; a resumed run reads what it finds."""
    made = durable_plan(PLAIN, 3, 4)
    assert short(replay(made)) == (
        "S0 O0 0>1 S1 O1 1>2 S2 O2 a0 2>3 T3 | R3 L2 R2 a1 a2 F2 D2 L1 R1 F1 D1 L0 R0 F0 D0"
    )
    again = resumed_schedule(EVEN, 3, 6, [0, 3], 5)
    assert short(driven(again)) == (
        "| G3 a0 L3 G0 3>4 R4 L3 R3 F3 D3 a1 L0 0>1 S1 1>2 R2 L1 F1 R1 L0 R0 F0 D0"
    )


def test_transfers_moved_beside_steps() -> None:
    schedule = overlap(on_tier(revolve_schedule(2, 5)), 2)
    assert short(driven(schedule)) == (
        "S0 P0 0>2 S2 P2 2>4 T4 | R4 L2 2>3 R3 L2 a1 F2 D2 R2 L0 0>1 R1 L0 a0 F0 D0 R0"
    )


# ---------------------------------------------------------------- chains of unequal stages

EQUAL = StageCosts.uniform(4, Stage("layer", 1.0, 2.0, 10, 30), 10)
VARIED = StageCosts(
    (
        Stage("wide", 1.0, 2.0, 40, 60),
        Stage("narrow", 3.0, 4.0, 5, 50),
        Stage("deep", 2.0, 3.0, 20, 80),
        Stage("last", 1.0, 1.0, 10, 20),
    ),
    10,
)
FAST = Tier.of_rates(100.0, 100.0)
SLOW = Tier.of_rates(12.0, 24.0)
STATES = Tier.of_rates(20.0, 20.0, tapes=False)

# Planner, costs, bytes, tier; actions.
CHAINS = """
optimal EQUAL 100 -
    0>2 T2 T3 |
    R3 R2 L0 T0 R1 R0
optimal VARIED 145 -
    0>2 T2 T3 |
    R3 R2 L0 0>1 R1 L0 R0
revolve EQUAL 90 -
    0>1 S1 1>2 S2 2>3 S3 3>4 |
    L3 F3 R3 L2 F2 R2 L1 F1 R1 L0 R0
revolve VARIED 200 -
    0>1 S1 1>2 S2 2>3 S3 3>4 |
    L3 F3 R3 L2 F2 R2 L1 F1 R1 L0 R0
periodic EQUAL 100 -
    0>2 T2 T3 |
    R3 R2 L0 T0 R1 R0
periodic VARIED 200 -
    0>2 T2 T3 |
    R3 R2 L0 T0 R1 R0
store-all EQUAL - -
    T0 T1 T2 T3 |
    R3 R2 R1 R0
store-all VARIED - -
    T0 T1 T2 T3 |
    R3 R2 R1 R0
optimal EQUAL 100 FAST
    T0 P0t S1 P1 T1 P1t S2 E0t T2 E1 E1t T3 |
    R3 G1t R2 F2 G1 G0t a3 a4 R1 F1 D1 D1t a5 R0 D0t
optimal EQUAL 90 STATES
    0>2 S2 P2 T2 T3 |
    E2 R3 G2 a1 R2 F2 D2 L0 T0 R1 R0
optimal VARIED 150 FAST
    0>1 S1 P1 T1 P1t S2 E1 T2 E1t T3 |
    R3 R2 F2 G1t G1 a2 a3 R1 F1 D1 D1t L0 R0
optimal VARIED 187 SLOW
    T0 P0t 1>2 S2 T2 T3 |
    E0t R3 G0t R2 F2 a1 L1 R1 R0 D0t
"""


@pytest.mark.parametrize(("given", "expected"), rows(CHAINS))
def test_plans_of_chains(given: list[str], expected: str) -> None:
    planner, costs, memory, tier = given
    limit = None if memory == "-" else int(memory)
    plan = plan_chain(globals()[costs], limit, planner, tiers=globals().get(tier))
    assert short(plan.actions) == expected
    assert (tier != "-") == any(isinstance(action, Put) for action in plan.actions)
