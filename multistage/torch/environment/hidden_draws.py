"""Random numbers that come from a generator which cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ...errors import StateError


def refuse_hidden_draws(modules: Iterable[object], name: str) -> None:
    """Refuse modules whose random numbers come from a generator that cannot be read.

    Raises
    ------
    StateError
        For dropout between the layers of cuDNN's recurrent networks, which has
        a state of its own that cannot be read or put back.
    """
    cudnn = torch.backends.cudnn
    if not (cudnn.enabled and cudnn.is_available()):
        return
    inner = (m for module in modules if isinstance(module, nn.Module) for m in module.modules())
    for module in inner:
        draws = (
            isinstance(module, nn.RNNBase)
            and module.training
            and module.dropout > 0
            and module.num_layers > 1
        )
        if draws and any(p.device.type == "cuda" for p in module.parameters()):
            raise StateError(
                f"{name} cannot be run again as it was: cuDNN draws the dropout between the layers "
                f"of {type(module).__name__} from a state of its own; give it dropout=0 and "
                "nn.Dropout between modules, or set torch.backends.cudnn.enabled = False"
            )
