"""Plans of a chain for each kind of input: profiled, chosen, metered, checked, remembered.

What iterations really hold.  A plan is made of what each stage was measured to hold by itself.
What belongs to no stage shows when they run together: tensors in attributes, which last until
the next iteration replaces them, closures of hooks on gradients, casts of weights that autocast
keeps.  So iterations by a new plan are metered before it is used, and some of those that train.
What is held beside the stages is reserved within the limit: it lies there all the time, as the
input does.

Inputs of other lengths.  Inputs whose shapes lie on a line with those of two measured kinds, as
sequences of several lengths do, cost what lies on the line through theirs.  Bytes grow no slower
than linearly, so that between two measured lengths they are estimated too high rather than too
low.  The estimate is verified as the chain runs: what stages save and return is compared with
it, and the first iteration is metered.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import combinations
from typing import TypeAlias, TypeVar

import torch

from ...errors import ArgumentError, BudgetError, CheckpointWarning, MultistageError, StoreError
from ...model.stages import Stage, StageCosts
from ...planners import Plan
from ...planners.chain.heterogeneous import smallest_memory
from ...support.units import format_bytes
from ..chains.holdings import CannotTravel
from ..environment.randomness import cuda_or_cpu
from ..environment.scope import Found
from ..environment.states import tensors_in
from ..environment.turns import TURN
from ..measurement.checking import Both, Checked, NotAlone, check_chain, room_for_tapes
from ..measurement.measure import Profile, measure_stages
from ..measurement.traits import Traits
from ..measurement.watching import Seen
from ..tensors.meter import Meter
from ..tiers.tiered import Tiered
from .choosing import PAYS, chosen, held_by_caller, limit_of
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
    stages_of,
    use,
    whole,
)
from .running import fitted, run, with_sizes

_log = logging.getLogger(__name__)
_MOST_PLANS = 12  # for one input
# Not looked at: states of generators, 5 KB each, which sweeps compare, and copies of counters.
_SMALL_BYTES = 1 << 16
_BESIDE = (
    "tensors in attributes, closures of hooks on gradients, weights as autocast keeps them, or "
    "what else no single stage was measured to hold"
)
_TWICE = (
    "the tapes of a graph that is kept for a second backward pass (retain_graph=True), which lie "
    "beside what is run again"
)
_KINDS = 256  # of input whose plans are remembered: those used last
_NEAR = 2  # times a measured length, or a part of it: what is estimated is not further away
_Value = TypeVar("_Value", int, float)
Measured: TypeAlias = tuple[Kind, Planned]


def prepared(sequential: LimitedModule, state: object) -> Plan:
    """Return the plan for a state, made as a training step would."""
    with torch.enable_grad():
        return planned_for(sequential, state, whole(sequential), together=True).plan


def planned_for(
    sequential: LimitedModule, state: object, found: Found, *, together: bool = False
) -> Planned:
    """Return what is known of inputs like this one; profile and plan if nothing is."""
    chain = sequential._multistage
    if torch.cuda.is_available():
        chain.device = cuda_or_cpu([*tensors_in(state), *sequential.parameters()])
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
    found = _estimate(kind, measured)
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
    if tiered is None or is_collective(sequential) or (plan.keeps_all and not plan.writes):
        return planned
    if not (tiered.drifted() if plan.writes else tiered.forget()):
        return planned
    began, limit = tiered.clock(), limit_of(chain)
    try:
        _, found = chosen(sequential, [planned.profile], limit, together=False)
    except StoreError as error:
        if plan.writes:
            raise
        tiered.looked(tiered.clock() - began)
        what = f"the tier is not used, and could not be measured again: {error}"
        warnings.warn(what, CheckpointWarning, stacklevel=2)
        return planned
    took_s = tiered.clock() - began
    if plan.writes:
        tiered.planned(took_s)
        found = _worth_changing(plan, found, tiered)
    else:
        tiered.looked(took_s)
    anew = replace(planned, plan=found)
    return replaced(chain, planned, anew)


def _worth_changing(plan: Plan, found: Plan, tiered: Tiered) -> Plan:
    """Return a new plan, or the old one as the rates seen make it, if that is hardly slower."""
    old = Plan.judged(plan.planner, plan.stage_costs, plan.memory_bytes, plan.actions, tiered.rates)
    old = replace(old, candidates=found.candidates)
    return old if PAYS * old.makespan_s <= found.makespan_s and found.writes else found


# ------------------------------------------------------------------ what is held


def within_limit(sequential: LimitedModule, planned: Planned, state: object) -> Planned:
    """Return a plan by which iterations stay within the limit, metered.

    Raises
    ------
    BudgetError
        If there is none.
    """
    if is_collective(sequential):
        return planned
    meter = Meter(sequential._multistage.device)
    for number in range(_MOST_PLANS):
        # What is on its way to a tier depends on the tier's speed.
        if planned.is_roomy or planned.plan.writes:
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
    what: str = _BESIDE,
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
    beside = f"{max(0, reserved)} bytes are held beside the stages: {what}"
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
    what = _TWICE if planned.seen.twice else _BESIDE
    if not (seen and _exceeds(planned, seen)):
        return planned
    if not chain.watch.told:
        chain.watch.told = True
        warnings.warn(
            f"an iteration held {seen} bytes ({format_bytes(seen)}) or more within a limit of "
            f"{planned.plan.memory_bytes}; the next is planned with room for what was held beside "
            f"the stages: {what}; later corrections are logged only",
            CheckpointWarning,
            stacklevel=2,
        )
    with TURN.taken(), torch.enable_grad():
        anew = _reserving(sequential, planned, state, seen, planned.plan.peak_bytes, what)
        anew = within_limit(sequential, anew, state)
    return replaced(chain, planned, anew)


# --------------------------------------------------------------- other lengths


def _estimate(kind: Kind, known: Sequence[Measured]) -> tuple[Measured, Measured, Profile] | None:
    """Return two measured kinds of input and the costs on the line through theirs, if there are.

    Parameters
    ----------
    kind : Kind
    known : sequence of (Kind, Planned)
        Measured, of the chain's present stages.
    """
    pairs: list[tuple[bool, float, int, float, Measured, Measured]] = []
    for one, other in combinations([k for k in known if k[0].family == kind.family], 2):
        share = _share(one[0].lengths, other[0].lengths, kind.lengths)
        if share is not None and _are_alike(one[1].measured, other[1].measured):
            away = abs(share - 0.5) * math.dist(one[0].lengths, other[0].lengths)
            pairs.append((abs(share - 0.5) > 0.5, away, len(pairs), share, one, other))
    if not pairs:
        return None
    *_, share, one, other = min(pairs)
    return one, other, _on_line(one[1].measured, other[1].measured, share)


def _share(one: Sequence[int], other: Sequence[int], new: Sequence[int]) -> float | None:
    """Return where some lengths lie on the way from one to another: 0 and 1 are these.

    None if they do not, if they lie further outside than the two lie apart, or if none of
    the two is near.
    """
    shares = {(c - a) / (b - a) for a, b, c in zip(one, other, new, strict=True) if a != b}
    fixed = all(a == c for a, b, c in zip(one, other, new, strict=True) if a == b)
    if len(shares) != 1 or not fixed:
        return None
    share = shares.pop()
    nearest = one if share < 0.5 else other
    near = all(a <= _NEAR * b and b <= _NEAR * a for a, b in zip(nearest, new, strict=True))
    return share if -1 <= share <= 2 and near else None


def _are_alike(one: Profile, other: Profile) -> bool:
    """Whether stages do the same, whatever it costs."""
    return one.groups == other.groups and all(
        _but_measured(a) == _but_measured(b) for a, b in zip(one.traits, other.traits, strict=True)
    )


def _but_measured(traits: Traits) -> Traits:
    return replace(traits, sizes=None, scope=None, ways=())


def _on_line(one: Profile, other: Profile, share: float) -> Profile:
    value = partial(_value, share=share)
    stages = tuple(
        _stage(a, b, share) for a, b in zip(one.costs.stages, other.costs.stages, strict=True)
    )
    costs = StageCosts(
        stages,
        value(one.costs.input_bytes, other.costs.input_bytes),
        value(one.costs.input_gradient_bytes, other.costs.input_gradient_bytes),
    )
    traits = tuple(
        replace(a, sizes=a.sizes and b.sizes and a.sizes.both(b.sizes, value))
        for a, b in zip(one.traits, other.traits, strict=True)
    )
    return replace(one, costs=costs, traits=traits)


def _stage(one: Stage, other: Stage, share: float) -> Stage:
    numbers = [f.name for f in fields(Stage) if f.name not in ("name", "ways", "way")]
    values = {n: _value(getattr(one, n), getattr(other, n), share) for n in numbers}
    values["tape_bytes"] = max(values["tape_bytes"], values["output_bytes"])
    values["spared_s"] = min(values["spared_s"], values["forward_s"])
    return replace(one, **values, ways=())  # which are known of the measured kinds alone


def _value(one: _Value, other: _Value, share: float) -> _Value:
    """Return a value on the line through two; of bytes a whole number, rounded up."""
    value = max(0.0, one + (other - one) * share)
    return math.ceil(round(value, 6)) if isinstance(one, int) else value
