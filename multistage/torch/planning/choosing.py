"""Choose the plan of a chain: the fastest within its limit, with or without a slow tier."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ...actions import Action, Await, Drop, EndForward, Evict, Get, Put, Reverse, Tape
from ...backends.memory import MemoryStore
from ...errors import BudgetError
from ...model.budget import memory_bytes
from ...model.stages import Stage, StageCosts
from ...model.tier import Tier
from ...planners import Plan
from ...planners.base import BUFFERS, store_all_schedule
from ...planners.chain.at_once import OFFLOADING, beside
from ...planners.chain.heterogeneous import plan_chain
from ...support.units import format_bytes
from ..chains.runner import Run, Traits
from ..environment.scope import Scope
from ..measurement.measure import Profile
from ..tiers.lane import ChainTier
from ..tiers.tiered import Tiered
from .limited import Limited, is_plain

# A plan with a tier must be faster than one without by this factor: clocks are not exact,
# and what is chosen for less is noise.
PAYS = 0.98

Choice: TypeAlias = tuple[Profile, Plan]


def chosen(chain: Limited, profiles: Sequence[Profile], together: bool = False) -> Choice:
    """Return the fastest plan within the limit of a chain, with the profile it is for.

    Parameters
    ----------
    chain : Limited
    profiles : sequence of Profile
        All ways to count what passes several cuts.
    together : bool
        Whether ranks must choose alike.

    Raises
    ------
    BudgetError
        If there is none.
    """
    # Stages that fail under saved-tensor hooks have tapes of torch's own.
    unhooked = any(trait.unhooked for trait in profiles[0].traits)
    tiered = None if unhooked else chain.tiered
    limit = in_bytes(chain, profiles[0])  # a fraction is of what the first counts

    def without(costs: StageCosts) -> Plan:
        plan = plan_chain(costs, limit, chain.planner, segments=chain.segments)
        # A plain one runs without the executor.
        return replace(plan, makespan_s=plan.plain_s) if is_plain(plan) else plan

    try:
        profile, plan = plain = _best(profiles, without)
    except BudgetError as alone:
        if tiered is None:
            raise
        try:
            return _best_with_tier(chain.device, tiered, profiles, limit, together)
        except BudgetError as error:  # the smaller of the two limits is the one that works
            raise min(alone, error, key=least_of) from None
    if tiered is None or plan.keeps_all:
        return plain
    offloading = None
    try:
        best = _best_with_tier(chain.device, tiered, [profile], limit, together)
    except BudgetError:
        pass
    else:
        if best[1].writes and best[1].makespan_s <= PAYS * plan.makespan_s:
            return best
        offloading = best[1].candidate(OFFLOADING)
    tiered.leave()
    assert tiered.rates is not None
    # Printed, it says what the tier was measured to be, and its lower bound.
    return profile, beside(plan, tiered.rates, plan, offloading)


def _best_with_tier(
    device: torch.device,
    tiered: Tiered,
    profiles: Sequence[Profile],
    limit: int | None,
    together: bool,
) -> Choice:
    """Return the fastest plan with a tier.  Raises BudgetError."""
    within, buffers = limit, 0
    try:
        rates = tiered.measured(device, limit)
        if together:
            tiered.rates = rates = of_rank_0(rates)
        if limit is not None:
            buffers = tiered.buffer_bytes(device, limit)
            within = limit - buffers
            if within <= 0:
                raise BudgetError(
                    f"memory={limit} bytes < {buffers + 1} bytes, as the buffers of the tier take "
                    f"{buffers}; raise the limit, or give the tier fewer, as in "
                    "'file:///folder?buffers=1MiB'"
                )
        try:
            found = _best(profiles, lambda costs: _streaming(costs, within, rates, tiered.slowdown))
            return found[0], found[1].within(limit, {BUFFERS: buffers})
        except BudgetError as error:
            if not buffers or error.least_bytes is None:
                raise
            least = error.least_bytes + buffers
            raise BudgetError.below(
                f"memory={limit} bytes < {least} bytes ({format_bytes(least)}), of which the "
                f"buffers of the tier take {buffers}; raise the limit",
                least,
            ) from None
    except BaseException:
        tiered.leave()  # opened to be measured: no thread and no file is left
        raise


def _best(profiles: Sequence[Profile], planned: Callable[[StageCosts], Plan]) -> Choice:
    """Return the fastest plan, with the profile it is for.

    Raises
    ------
    BudgetError
        Of the smallest limit that works, if there is none.
    """
    found: list[tuple[float, int, Plan]] = []
    refused: list[BudgetError] = []
    for number, profile in enumerate(profiles):
        try:
            plan = planned(held_by_caller(profile.costs))
        except BudgetError as error:
            refused.append(error.with_traceback(None))  # which holds the frames of the call
        else:
            found.append((plan.makespan_s, number, plan))
            if is_plain(plan):
                break
    if not found:
        raise min(refused, key=least_of)
    _, number, plan = min(found, key=lambda each: each[:2])
    return profiles[number], plan


def least_of(error: BudgetError) -> int:
    """Return the smallest limit that a refusal knows of."""
    return error.least_bytes if error.least_bytes is not None else sys.maxsize


def _streaming(costs: StageCosts, memory: int | None, rates: Tier, slowdown: float) -> Plan:
    """Return the fastest plan with a tier, what transfers take from computing included."""
    plan = plan_chain(_slower(costs, 1.0), memory, "optimal", tiers=rates)
    factor = 1 + slowdown * _busy(plan)
    return plan if factor == 1 else plan_chain(_slower(costs, factor), memory, tiers=rates)


def _slower(costs: StageCosts, factor: float) -> StageCosts:
    """Return costs whose times are longer by a factor, and by catching tapes with hooks."""
    caught_s = hooks_s()

    def slower(stage: Stage) -> Stage:
        more_s = (factor - 1) * (stage.forward_s + stage.backward_s)
        return replace(
            stage,
            forward_s=stage.forward_s * factor + caught_s,
            backward_s=stage.backward_s * factor,
            spared_s=stage.spared_s * factor,
            overhead_s=stage.overhead_s + more_s + caught_s,
            saves_input=True,  # the tape before holds it, so that it may travel with it
        )

    return replace(costs, stages=tuple([slower(each) for each in costs.stages]))


def _busy(plan: Plan) -> float:
    """Return the share of its time in which a plan has something on the way."""
    assert plan.tier is not None
    stages, seconds = plan.stage_costs.stages, 0.0
    for action in plan.actions:
        if isinstance(action, Put | Get):
            nbytes = stages[action.step].tape_bytes if action.tape else 0
            if not action.tape and action.step:
                nbytes = stages[action.step - 1].output_bytes
            way_s = plan.tier.writing_s if isinstance(action, Put) else plan.tier.reading_s
            seconds += way_s(nbytes)
    return min(1.0, seconds / plan.makespan_s) if plan.makespan_s else 0.0


def in_bytes(chain: Limited, profile: Profile) -> int | None:
    """Return the limit of a chain in bytes; a fraction is of what plain training takes.

    By the profile that counts all once that passes several cuts.
    """

    def plain_bytes() -> int:
        costs = held_by_caller(profile.costs)
        parted = chain.graph.parted if chain.graph is not None else frozenset()
        stages = tuple(  # without outputs that only cuts keep
            stage.without(stage.output_bytes) if group[-1] in parted else stage
            for group, stage in zip(profile.groups, costs.stages, strict=True)
        )
        return plan_chain(replace(costs, stages=stages), None, "store-all").plain_bytes

    return memory_bytes(chain.limit, plain_bytes)


def held_by_caller(costs: StageCosts) -> StageCosts:
    """Return the costs with the chain's output counted with its input.

    The caller of the chain holds the output, for the loss, all through the
    backward pass.
    """
    last = costs.stages[-1]
    held = last.without(last.output_bytes)
    return replace(
        costs,
        stages=(*costs.stages[:-1], held),
        input_bytes=costs.input_bytes + last.output_bytes,
    )


_Known = TypeVar("_Known", StageCosts, Tier)


def of_rank_0(known: _Known) -> _Known:
    """Return what rank 0 knows, so that all ranks run the same plan."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return known
    box = [known]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


# ------------------------------------------------ what a tier costs the computing thread

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
