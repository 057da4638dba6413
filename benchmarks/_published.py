"""The planners as their papers have them: `interval` of ours may take longer intervals."""

from __future__ import annotations

from multistage import PLANNERS
from multistage.planners.streaming.interval import paper_interval

PUBLISHED = {**PLANNERS, "interval": paper_interval}
