"""What a plan with a slow tier costs the computing thread, measured."""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor, nn

from ...actions import Action, Await, Drop, EndForward, Evict, Get, Put, Reverse, Tape
from ...backends.memory import MemoryStore
from ...planners.base import store_all_schedule
from ..environment.scope import Scope
from ..tiers.lane import ChainTier
from .runner import Run, Traits

_STAGES = 4
_PAGE_BYTES = 4096
_ROUNDS = 5


def _small(layers: nn.Module, x: Tensor) -> Tensor:
    """Compute next to nothing, and save about ten tensors, as many stages do."""
    y: Tensor = x + layers(x) * torch.sigmoid(x)
    return y


@functools.cache
def hooks_s() -> float:
    """Return the seconds of a stage whose tape travels that are neither its own nor profiled.

    To sort the tensors of a tape, to take them apart and to rebuild them: of this thread,
    without the time it waits.  Measured once in a process, in about a quarter of a second,
    on stages that compute next to nothing.
    """
    # Whatever the caller's device is, and his generators stay as they are.
    with torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng([]):
        layers = [
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
            for _ in range(_STAGES)
        ]
        stages = [functools.partial(_small, each) for each in layers]
        x = torch.ones(2, 4, requires_grad=True)
        traits = [Traits(str(k), scope=Scope([each])) for k, each in enumerate(layers)]
        tier = ChainTier(MemoryStore(buffer_bytes=0), torch.device("cpu"), _PAGE_BYTES)
        try:
            seconds = [
                min(_seconds(Run(stages, traits, actions, tier), x) for _ in range(_ROUNDS))
                for actions in (list(store_all_schedule(_STAGES)), _travelling())
            ]
        finally:
            tier.close()
    return max(0.0, seconds[1] - seconds[0]) / _STAGES


def _seconds(run: Run, x: Tensor) -> float:
    began = time.thread_time()
    output = run.forward(x)
    assert isinstance(output, Tensor)
    torch.autograd.grad(output.sum(), x)
    return time.thread_time() - began


def _travelling() -> list[Action]:
    """Return the actions that send every tape away and fetch it when it is needed."""
    actions: list[Action] = []
    for i in range(_STAGES):
        actions += [Tape(i), Put(i, tape=True)]
        if i:
            actions.append(Evict(i - 1, tape=True))
    actions += [Evict(_STAGES - 1, tape=True), EndForward()]
    for token, i in enumerate(range(_STAGES - 1, -1, -1), start=_STAGES):
        actions += [Get(i, tape=True), Await(token)]
        if i + 1 < _STAGES:
            actions += [Reverse(i + 1), Drop(i + 1, tape=True)]
    return [*actions, Reverse(0), Drop(0, tape=True)]
