"""PyTorch: chains and sequences that train within a memory limit.

`compile` trains any model that TorchDynamo captures whole.  `Sequential` trains a
chain of stages, `profile` measures one.  `unroll` runs a cell
over a sequence of any length; `offload` moves what autograd saves to slow tiers.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "multistage.torch needs PyTorch; pip install 'multistage-checkpointing[torch]'",
        name="torch",
    ) from _error

from .compiling import Compiled as Compiled
from .compiling import compile as compile
from .offload import offload as offload
from .sequential import Sequential as Sequential
from .sequential import profile as profile
from .unroll import Unrolled as Unrolled
from .unroll import unroll as unroll
