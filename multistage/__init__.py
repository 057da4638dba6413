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
from . import testing as testing
from .backends import open_store as open_store
from .hessian import HessianVector as HessianVector
from .hessian import hessian_vector as hessian_vector
from .measurement.chain import measure as measure
from .model.blocks import Blocks as Blocks
from .model.budget import Budget as Budget
from .model.chain import Chain as Chain
from .model.chain import FunctionChain as FunctionChain
from .model.chain import InPlaceChain as InPlaceChain
from .model.costs import Costs as Costs
from .model.stages import Stage as Stage
from .model.stages import StageCosts as StageCosts
from .model.tier import Tier as Tier
from .planners import PLANNERS as PLANNERS
from .planners import Plan as Plan
from .planners import plan as plan
from .planners.chain.heterogeneous import memory_curve as memory_curve
from .planners.chain.heterogeneous import plan_chain as plan_chain
from .planners.chain.heterogeneous import smallest_memory as smallest_memory
from .report import Report as Report
from .reversal import Result as Result
from .reversal import Reversal as Reversal
from .reversal import reverse as reverse
from .schedule.rules import check as check
from .schedule.simulation import Jitter as Jitter
from .schedule.simulation import simulate as simulate
from .version import __version__ as __version__
