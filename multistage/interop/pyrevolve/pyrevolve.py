"""What pyrevolve's module of its own name holds; the actions are those of its schedulers."""

from .base import BaseRevolver as BaseRevolver
from .compression import init_compression
from .operators import Checkpoint as Checkpoint
from .operators import Operator as Operator
from .profiling import Profiler as Profiler
from .revolvers import DiskRevolver as DiskRevolver
from .revolvers import MemoryRevolver as MemoryRevolver
from .revolvers import MultiLevelRevolver as MultiLevelRevolver
from .revolvers import Revolver as Revolver
from .revolvers import SingleLevelRevolver as SingleLevelRevolver
from .schedulers import Action as Action
from .schedulers import Architecture as Architecture
from .schedulers import CRevolve as CRevolve
from .schedulers import HRevolve as HRevolve
from .storage import BytesStorage as BytesStorage
from .storage import DiskStorage as DiskStorage
from .storage import NumpyStorage as NumpyStorage

init = init_compression
