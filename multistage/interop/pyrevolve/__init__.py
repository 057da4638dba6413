"""pyrevolve's interface, run by multistage.

Change `from pyrevolve import ...` to `from multistage.interop.pyrevolve import
...`, or call `install()` once before importing a library that imports
pyrevolve itself, such as Devito.  Programs run unchanged; new are the keyword
arguments `memory`, `tiers`, `planner`, `costs` and `progress`, sweeps that can
be repeated, and `report()`.

Examples
--------
>>> import numpy as np
>>> u, total = np.array([2.0]), np.array([1.0])
>>> class Forward(Operator):
...     def apply(self, t_start, t_end):
...         for _ in range(t_start, t_end):
...             held[:] = u
...             u[:] = u * u
>>> class Backward(Operator):
...     def apply(self, t_start, t_end):
...         total[:] = 2 * held * total
>>> class Fields(Checkpoint):
...     dtype, size = np.float64, 1
...     def get_data(self, timestep):
...         return [u]
...     get_data_location = get_data
>>> held = np.zeros(1)
>>> revolver = Revolver(Fields(), Forward(), Backward(), 2, 5)
>>> revolver.apply_forward()
>>> revolver.apply_reverse()
>>> float(total[0]) == 32 * 2.0**31
True
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...backends.urls import Tiers
from ...errors import ArgumentError
from ...model.budget import Budget
from ...model.costs import Costs
from ...model.stages import StageCosts
from ...planners import Plan, Planner
from ..ranks import Communicator
from . import compression, revolvers, storage
from .compression import init_compression as init_compression
from .operators import Checkpoint as Checkpoint
from .operators import Operator as Operator
from .operators import Profiler as Profiler
from .revolvers import BaseRevolver as BaseRevolver
from .revolvers import DiskRevolver as DiskRevolver
from .revolvers import MemoryRevolver as MemoryRevolver
from .revolvers import MultiLevelRevolver as MultiLevelRevolver
from .revolvers import Options
from .revolvers import Revolver as Revolver
from .revolvers import SingleLevelRevolver as SingleLevelRevolver
from .revolvers import adjust as adjust
from .storage import BytesStorage as BytesStorage
from .storage import DiskStorage as DiskStorage
from .storage import NumpyStorage as NumpyStorage
from .storage import Storage as Storage

__version__ = "2.2.8"  # of the pyrevolve whose interface this is

_MODULES: dict[str, ModuleType] = {
    "pyrevolve": sys.modules[__name__],
    "pyrevolve.compression": compression,
    "pyrevolve.storage": storage,
}


def install(
    *,
    memory: Budget | int | str | None = None,
    tiers: Tiers | None = None,
    planner: str | Plan | Planner | None = None,
    costs: Costs | StageCosts | None = None,
    progress: bool | None = None,
    comm: Communicator | None = None,
) -> None:
    """Let every later `import pyrevolve` in this process find this package.

    To be called before anything imports pyrevolve; called again it changes
    the options only.

    Parameters
    ----------
    memory, tiers, planner, costs, progress
        For all revolvers made with `n_checkpoints=None` and no option of their
        own, as libraries make them; see `SingleLevelRevolver`.
    comm : mpi4py.MPI.Comm, optional
        For all revolvers that are given none, see `BaseRevolver`.

    Raises
    ------
    ArgumentError
        If pyrevolve, or Devito, which imports it, was imported already: what
        they took from it would stay pyrevolve's.  Nothing is changed then.

    Notes
    -----
    At the top of a program that uses Devito::

        from multistage.interop.pyrevolve import install
        install(memory="2 GiB", tiers="file:///scratch")
        from devito import *
    """
    present = sys.modules.get("pyrevolve")
    if present is not _MODULES["pyrevolve"]:
        for name in ("pyrevolve", "devito"):
            if name in sys.modules:
                raise ArgumentError(
                    f"{name} was imported before install(); call install() first, "
                    "at the top of the program"
                )
    revolvers.defaults = Options(memory, tiers, planner, costs, progress, comm)
    sys.modules.update(_MODULES)


def uninstall() -> None:
    """Undo `install()`: for imports still to come, and the options at once."""
    revolvers.defaults = Options()
    for name, module in _MODULES.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
