"""The memory that iterations by a plan really hold, and another plan where that is too much.

A plan is made of what each stage was measured to hold by itself.  What belongs to no stage
shows when they run together: tensors in attributes, which last until the next iteration
replaces them, closures of hooks on gradients, casts of weights that autocast keeps.  So
iterations by a new plan are metered before it is used, and some of those that train.  What
is held beside the stages is reserved within the limit: it lies there all the time, as the
input does.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace

import torch

from ...errors import BudgetError, CheckpointWarning, MultistageError
from ...planners.chain.heterogeneous import smallest_memory
from ...support.units import format_bytes
from ..chains.holdings import CannotTravel
from ..environment.turns import TURN
from ..measurement.both_ways import Both, NotAlone
from ..tensors.meter import Meter
from .choosing import device_of, held_by_caller
from .limited import LimitedModule, Planned, is_collective, replaced, sends, whole
from .running import fitted, run

_log = logging.getLogger(__name__)
_MOST_PLANS = 12  # for one input
# Not looked at: states of generators, 5 KB each, which sweeps compare, and copies of counters.
_SMALL_BYTES = 1 << 16
_BESIDE = (
    "tensors in attributes, closures of hooks on gradients, weights as autocast keeps them, or "
    "what else no single stage was measured to hold"
)


def within_limit(sequential: LimitedModule, planned: Planned, state: object) -> Planned:
    """Return a plan by which iterations stay within the limit, metered.

    Raises
    ------
    BudgetError
        If there is none.
    """
    if is_collective(sequential):
        return planned
    meter = Meter(device_of(sequential))
    for number in range(_MOST_PLANS):
        # What is on its way to a tier depends on the tier's speed.
        if planned.is_roomy or sends(planned.plan):
            break
        held_bytes = _held_bytes(sequential, planned, state, meter)
        if held_bytes is None or not _exceeds(planned, held_bytes):
            break
        # What is held beside the stages need not be there at their peak: not more than it takes.
        limit = planned.plan.memory_bytes or 0
        beyond_bytes = planned.plan.peak_bytes if number else limit
        planned = _reserving(sequential, planned, state, held_bytes, beyond_bytes)
    return planned


def _exceeds(planned: Planned, held_bytes: int) -> bool:
    limit = planned.plan.memory_bytes
    return limit is not None and held_bytes > limit + _SMALL_BYTES


def _held_bytes(
    sequential: LimitedModule, planned: Planned, state: object, meter: Meter
) -> int | None:
    """Return the most bytes that iterations hold at once; None if they cannot be run here."""
    both = Both(planned.stages, state, planned.profile.traits[0].changes_input, 0.0)
    try:
        return both.peak_bytes(
            lambda given: run(sequential, planned, given, whole(sequential), trains=False), meter
        )
    except CannotTravel:
        raise
    except (RuntimeError, MultistageError, NotAlone) as error:
        # The check or the training says so, if it is not of this run alone.
        _log.info("iterations by a new plan were not metered: %s", error)
        return None


def _reserving(
    sequential: LimitedModule,
    planned: Planned,
    state: object,
    held_bytes: int,
    beyond_bytes: int,
) -> Planned:
    """Return a plan that keeps room for what was held beyond some bytes."""
    chain, limit = sequential._multistage, planned.plan.memory_bytes
    assert limit is not None
    more = held_bytes - beyond_bytes
    if chain.tiered is None:  # the plan that takes least may hold less than is thought
        share = chain.memory if isinstance(chain.memory, float) else 0.0
        room = limit - smallest_memory(held_by_caller(planned.profile.costs))
        more = min(more, int(room / (1 - share)) if share < 1 else more)
    reserved = planned.reserved_bytes + more
    beside = f"{max(0, reserved)} bytes are held beside the stages: {_BESIDE}"
    if more <= 0:
        raise BudgetError.below(
            f"memory={limit} bytes < {held_bytes} bytes ({format_bytes(held_bytes)}), which "
            f"iterations were seen to hold by the plan that takes least; {beside}; raise the limit",
            held_bytes,
        )
    costs = planned.measured.costs
    found = replace(planned.measured, costs=replace(costs, input_bytes=costs.input_bytes + more))
    try:
        anew = fitted(sequential, state, found, together=False)
    except BudgetError as error:
        told = BudgetError(f"{error}; {beside}")
        told.least_bytes = error.least_bytes
        raise told from None
    _log.info("%d bytes are reserved for what is held beside the stages", reserved)
    return replace(anew, reserved_bytes=reserved, checked=planned.checked)


def corrected(sequential: LimitedModule, planned: Planned, state: object) -> Planned:
    """Return another plan where iterations by this one were seen to exceed the limit."""
    seen, chain = planned.seen.most_bytes, sequential._multistage
    if not (seen and _exceeds(planned, seen)):
        return planned
    if not chain.watch.told:
        chain.watch.told = True
        warnings.warn(
            f"an iteration held {seen} bytes ({format_bytes(seen)}) or more within a limit of "
            f"{planned.plan.memory_bytes}; the next is planned with room for what was held beside "
            f"the stages: {_BESIDE}; later corrections are logged only",
            CheckpointWarning,
            stacklevel=2,
        )
    with TURN.taken(), torch.enable_grad():
        anew = _reserving(sequential, planned, state, seen, planned.plan.peak_bytes)
        anew = within_limit(sequential, anew, state)
    return replaced(chain, planned, anew)
