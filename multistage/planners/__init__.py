"""Planners: from costs, a budget and a number of steps to a schedule and its price.

Every planner is a pure function `(costs, slots, n_steps) -> UniformPlan`; `PLANNERS`
holds them by name and `plan` ranks them.
"""

from __future__ import annotations

from . import pages as _pages
from .base import Plan as Plan
from .base import enter
from .chain.plan import ChainPlan, read_chain
from .ranking import PLANNERS as PLANNERS
from .ranking import RANKED as RANKED
from .ranking import plan as plan
from .ranking import read_uniform
from .streaming.online import online_schedule as online_schedule
from .uniform import Planner as Planner
from .uniform import UniformPlan as UniformPlan

# Reading and drawing a plan takes planners, which import the plans: a plan finds them here.
enter({UniformPlan: read_uniform, ChainPlan: read_chain}, _pages)
