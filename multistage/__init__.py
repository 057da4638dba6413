"""multistage: reverse long computations beyond memory.

Reading order: `Reversal` and `reverse` run a computation and its adjoint;
`Costs`, `Tier` and `Budget` say what they cost and may take; `plan` chooses a
schedule, `simulate` runs it in virtual time, `check` proves it legal;
`StageCosts` and `plan_chain` do the same for chains of unequal stages; both make a
`Plan`, which prints, draws, saves and loads itself;
`actions` holds the vocabulary of schedules and `errors` what may go wrong.
"""

from . import actions as actions
from . import backends as backends
from . import errors as errors
from .backends import open_store as open_store
from .blocks import Blocks as Blocks
from .budget import Budget as Budget
from .chain import Chain as Chain
from .chain import FunctionChain as FunctionChain
from .chain import InPlaceChain as InPlaceChain
from .costs import Costs as Costs
from .plan import PLANNERS as PLANNERS
from .plan import Plan as Plan
from .plan import UniformPlan as UniformPlan
from .plan import plan as plan
from .plan.heterogeneous import ChainPlan as ChainPlan
from .plan.heterogeneous import memory_curve as memory_curve
from .plan.heterogeneous import plan_chain as plan_chain
from .plan.heterogeneous import smallest_memory as smallest_memory
from .probe import measure as measure
from .report import Report as Report
from .reversal import Result as Result
from .reversal import Reversal as Reversal
from .reversal import reverse as reverse
from .rules import check as check
from .simulate import Jitter as Jitter
from .simulate import simulate as simulate
from .stages import Stage as Stage
from .stages import StageCosts as StageCosts
from .tier import Tier as Tier

__version__ = "0.1.0"
