"""Planners: from costs, a budget and a number of steps to a schedule and its price.

Every planner is a pure function `(costs, slots, n_steps) -> Plan`; `PLANNERS` holds them by
name and `plan` ranks them.
"""

from __future__ import annotations

from . import pages as _pages
from .base import Plan as Plan
from .base import Planner as Planner
from .base import enter
from .ranking import PLANNERS as PLANNERS
from .ranking import RANKED as RANKED
from .ranking import plan as plan
from .streaming.online import online_schedule as online_schedule

# Reading and drawing a plan takes planners, which import the plans: a plan finds them here.
enter(_pages)
