"""Plans of a chain for each kind of input: profiled, chosen, checked, remembered."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from ...errors import ArgumentError, BudgetError, CheckpointWarning, StoreError
from ...planners.chain.heterogeneous import ChainPlan
from ..chains.holdings import CannotTravel
from ..environment.scope import Found
from ..environment.turns import TURN
from ..measurement.checking import Checked, check_chain, room_for_tapes
from ..measurement.measure import Profile, measure_stages
from ..measurement.watching import Seen
from ..tiers.tiered import Tiered
from .choosing import PAYS, chosen, limit_of
from .holding import corrected, within_limit
from .lengths import estimated
from .limited import (
    Kind,
    Limited,
    LimitedModule,
    Planned,
    is_collective,
    kind_of_call,
    names_of,
    replaced,
    run_plain,
    sends,
    stages_of,
    use,
    whole,
)
from .running import fitted, run, with_sizes

_KINDS = 256  # of input whose plans are remembered: those used last


def prepared(sequential: LimitedModule, state: object) -> ChainPlan:
    """Return the plan for a state, made as a training step would."""
    with torch.enable_grad():
        return planned_for(sequential, state, whole(sequential), together=True).plan


def planned_for(
    sequential: LimitedModule, state: object, found: Found, *, together: bool = False
) -> Planned:
    """Return what is known of inputs like this one; profile and plan if nothing is."""
    chain = sequential._multistage
    kind = kind_of_call(sequential, state, found)
    planned = chain.known.get(kind)
    if planned is None or not planned.holds(stages_of(sequential)):
        if chain.known and not chain.replan:
            raise ArgumentError(
                "the input is of another kind (shapes, dtypes, devices, modes) than the one "
                "planned for; call prepare() with a sample of it, or use replan=True"
            )
        with TURN.taken():  # generators and buffers are put back at the end
            planned = None if together else _estimated(sequential, state, kind)
            planned = planned or _made(sequential, state, together)
        _remember(chain, kind, planned)
    chain.known.move_to_end(kind)
    use(chain, planned)
    return corrected(sequential, planned, state)


def _estimated(sequential: LimitedModule, state: object, kind: Kind) -> Planned | None:
    """Return a plan by the costs of inputs of other lengths, None if they tell nothing."""
    chain = sequential._multistage
    if chain.costs is not None:
        return None
    stages = stages_of(sequential)
    measured = [
        (key, planned)
        for key, planned in chain.known.items()
        if not planned.is_estimate
        and planned.holds(stages)
        and not planned.profile.traits[0].changes_input
    ]
    found = estimated(kind, measured)
    if found is None:
        return None
    *ends, profile = found
    try:
        planned = fitted(sequential, state, profile, together=False)
    except BudgetError:  # by an estimate that may be too high
        return None
    for key, _ in ends:  # in use
        chain.known.move_to_end(key)
    checked = Checked("not checked; between, or near, lengths that were")
    reserved_bytes = max(end.reserved_bytes for _, end in ends)
    seen = Seen(runs=1)  # so that the first run is metered
    return replace(
        planned, checked=checked, reserved_bytes=reserved_bytes, seen=seen, is_estimate=True
    )


def _remember(chain: Limited, kind: Kind, planned: Planned) -> None:
    chain.known[kind] = planned
    if len(chain.known) > _KINDS:
        chain.known.popitem(last=False)


def _made(sequential: LimitedModule, state: object, together: bool) -> Planned:
    """Profile and plan."""
    chain = sequential._multistage
    stages, names = stages_of(sequential), names_of(sequential)
    found = measure_stages(stages, names, state, costs=chain.costs)
    if is_collective(sequential):  # one rank alone cannot plan again
        found = with_sizes(found, [None for _ in found.traits])
    try:
        return _tried(sequential, state, found, together)
    except CannotTravel as error:
        chain.tiered = None
        warnings.warn(f"the tier is not used: {error}", CheckpointWarning, stacklevel=2)
    return _tried(sequential, state, found, together)


def _tried(sequential: LimitedModule, state: object, found: Profile, together: bool) -> Planned:
    """Return a plan by which the chain was run: within its limit, and with the model's results."""
    planned = within_limit(sequential, fitted(sequential, state, found, together), state)
    return replace(planned, checked=_compared(sequential, planned, state))


def _compared(sequential: LimitedModule, planned: Planned, state: object) -> Checked:
    """Run the model and the chain once each, and compare."""
    chain = sequential._multistage
    if chain.check == "off":
        return Checked("off")
    if is_collective(sequential):
        return Checked("not checked; ranks run these stages together")
    if any(trait.unhooked for trait in planned.profile.traits):
        return Checked("not checked; torch.func and nested tensors do not work under its hooks")
    stages = planned.stages
    return check_chain(
        lambda given: run_plain(sequential, given),
        lambda given: run(sequential, planned, given, whole(sequential), trains=False),
        state,
        name="the captured graph" if chain.graph is not None else type(sequential).__name__,
        stages=stages,
        room_bytes=room_for_tapes(planned.profile, stages, planned.plan.memory_bytes),
        writes=planned.profile.traits[0].changes_input,
        check=chain.check,
    )


def replanned(sequential: LimitedModule, planned: Planned, state: object) -> Planned:
    """Return a plan for the rates that the tier was seen to have, if they are others now."""
    chain = sequential._multistage
    tiered, plan = chain.tiered, planned.plan
    if tiered is None or is_collective(sequential) or (plan.keeps_all and not sends(plan)):
        return planned
    if not (tiered.drifted() if sends(plan) else tiered.forget()):
        return planned
    began, limit = tiered.clock(), limit_of(sequential, state)
    try:
        _, found = chosen(sequential, [planned.profile], limit, together=False)
    except StoreError as error:
        if sends(plan):
            raise
        tiered.looked(tiered.clock() - began)
        what = f"the tier is not used, and could not be measured again: {error}"
        warnings.warn(what, CheckpointWarning, stacklevel=2)
        return planned
    took_s = tiered.clock() - began
    if sends(plan):
        tiered.planned(took_s)
        found = _worth_changing(plan, found, tiered)
    else:
        tiered.looked(took_s)
    anew = replace(planned, plan=found)
    return replaced(chain, planned, anew)


def _worth_changing(plan: ChainPlan, found: ChainPlan, tiered: Tiered) -> ChainPlan:
    """Return a new plan, or the old one as the rates seen make it, if that is hardly slower."""
    old = ChainPlan.judged(
        plan.planner,
        plan.costs,
        plan.memory_bytes,
        plan.actions,
        tiered.rates,
        no_tier_s=found.no_tier_s if sends(found) else found.makespan_s,
        offload_s=found.offload_s,
    )
    return old if PAYS * old.makespan_s <= found.makespan_s and sends(found) else found
