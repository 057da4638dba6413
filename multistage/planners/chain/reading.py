"""Plans of chains, read back from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from ...errors import ArgumentError
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.values import seconds as a_time
from ...support.values import shown, whole
from ..written import actions_from_lists
from .plan import ChainPlan, ChainPlanner

_KNOWN = ("no_tier_s", "offload_s")
_READ = ("planner", "memory_bytes", "tier", "costs", "actions", *_KNOWN)


def read_chain(data: Mapping[str, object]) -> ChainPlan:
    """Return the plan that `ChainPlan.to_dict` described, its schedule judged again.

    Raises
    ------
    ArgumentError
        Naming what is missing or wrong.
    ScheduleError
        Naming the first action that is illegal or exceeds `memory_bytes`.
    """
    ChainPlan.require(data, _READ)
    planners: tuple[ChainPlanner, ...] = get_args(ChainPlanner)
    planner = next((known for known in planners if known == data["planner"]), None)
    if planner is None:
        raise ArgumentError(
            f"planner {shown(data['planner'])} is not known; it is one of {planners}"
        )
    costs = StageCosts.from_dict(data["costs"])
    tier = None if data["tier"] is None else Tier.from_dict(data["tier"])
    limit = data["memory_bytes"]
    limit = None if limit is None else whole(limit, "memory_bytes")
    actions = actions_from_lists(data["actions"])
    seconds = {name: _seconds(data[name], name) for name in _KNOWN}
    return ChainPlan.judged(planner, costs, limit, actions, tier, **seconds)


def _seconds(value: object, name: str) -> float | None:
    return None if value is None else a_time(value, name)
