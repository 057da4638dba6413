"""pyrevolve's schedulers, to be run by hand: what to do next, one action at a time.

The revolvers of this package run plans of their own and take no scheduler.
"""

from .base import Action as Action
from .base import Architecture as Architecture
from .base import Scheduler as Scheduler
from .crevolve import CAction as CAction
from .crevolve import CRevolve as CRevolve
from .hrevolve import HAction as HAction
from .hrevolve import HRevolve as HRevolve

Revolve = CRevolve
