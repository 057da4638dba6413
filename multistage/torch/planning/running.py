"""A plan for stages as measured, and a call by it, made again where an input is larger."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from ...errors import ArgumentError, BudgetError
from ...execute.late import Stages
from ...model.stages import StageCosts
from ...planners import Plan
from ..chains.runner import Run
from ..environment.randomness import refuse_hidden_draws
from ..environment.scope import Found
from ..environment.states import leaves_of, tensors_in
from ..environment.turns import TURN
from ..measurement.checking import Checked
from ..measurement.measure import SECONDS, Profile, measure_stages
from ..measurement.traits import ApartError, LargerError, Sizes
from ..tiers.lane import ChainTier
from .choosing import chosen, limit_of, of_rank_0
from .limited import (
    Limited,
    LimitedModule,
    Planned,
    facts_of,
    is_plain,
    names_of,
    replaced,
    run_plain,
    stages_of,
)

_log = logging.getLogger(__name__)
_BYTES = (
    "output_bytes",
    "tape_bytes",
    "gradient_bytes",
    "forward_overhead_bytes",
    "tape_overhead_bytes",
    "backward_overhead_bytes",
)


def measured(
    sequential: LimitedModule,
    state: object,
    *,
    seconds: float = SECONDS,
    costs: StageCosts | None = None,
) -> list[Profile]:
    """Profile the stages of a chain; see `measure` and `GraphStages.counted`."""
    stages, names = stages_of(sequential), names_of(sequential)
    return counted(sequential, measure_stages(stages, names, state, seconds=seconds, costs=costs))


def counted(sequential: LimitedModule, profile: Profile) -> list[Profile]:
    """Return a profile by all ways to count what passes several cuts."""
    chain = sequential._multistage
    given = chain.graph is None or chain.costs is not None
    return [profile] if given or chain.graph is None else chain.graph.counted(profile)


def fitted(sequential: LimitedModule, state: object, found: Profile, together: bool) -> Planned:
    """Return the best plan for stages as measured, unchecked."""
    profiles = counted(sequential, found)
    if together:
        profiles = [replace(each, costs=of_rank_0(each.costs)) for each in profiles]
    profile, plan = chosen(sequential, profiles, limit_of(sequential._multistage), together)
    _refuse_unhooked(profile, plan)
    if plan.memory_bytes is not None and sequential._multistage.device.type == "cpu":
        _tell_of_resident_memory()
    # Where there is room for twice as much, values of tensors are not thought to decide.
    roomy = plan.memory_bytes is None or plan.memory_bytes >= 2 * plan.plain_bytes
    varies = not roomy and any(t.sizes.varies for t in profile.traits if t.sizes is not None)
    return Planned(
        stages_of(sequential), profile, found, plan, Checked("off"), Sizes(varies=varies)
    )


@cache
def _tell_of_resident_memory() -> None:
    """Say once in a process what the limit of a chain does not count: memory that glibc keeps."""
    # Not changed here: each allocation of the whole process would be slower.
    if "CS_GNU_LIBC_VERSION" in os.confstr_names and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        _log.info(
            "the memory limit counts tensors; glibc may keep several times as much resident after "
            "they are freed, unless the process is started with MALLOC_MMAP_THRESHOLD_=65536, "
            "which is slower"
        )


def with_sizes(profile: Profile, sizes: Sequence[Sizes | None]) -> Profile:
    """Return a profile with these sizes of its stages."""
    traits = [replace(t, sizes=each) for t, each in zip(profile.traits, sizes, strict=True)]
    return replace(profile, traits=tuple(traits))


def _refuse_unhooked(profile: Profile, plan: Plan) -> None:
    """Refuse plans that run stages again whose tape only torch itself can make."""
    for i in sorted({*range(len(profile.traits))} - {*plan.kept}):
        if profile.traits[i].unhooked:
            raise ArgumentError(
                f"stage {profile.traits[i].name} computes gradients by torch.func, or with nested "
                "tensors, which do not work under saved-tensor hooks, so that it cannot be run "
                f"again within {plan.memory_bytes} bytes; use torch.autograd.grad(..., "
                "create_graph=True) or padded tensors, or raise the limit to "
                f"{plan.plain_bytes}, where every tape is kept"
            )


def for_larger(
    sequential: LimitedModule, planned: Planned, state: object, larger: LargerError
) -> Planned:
    """Return a plan for an input with which a stage saves or returns more than planned for.

    Raises
    ------
    BudgetError
        If there is none; it names the stage.
    """
    chain = sequential._multistage
    name = planned.profile.traits[larger.stage].name
    cause = f"stage {name} {larger.what}, which is of another input of the same kind"
    if chain.costs is not None or not chain.replan or planned.profile.traits[0].changes_input:
        raise BudgetError(
            f"{cause}; numbers in the state, attributes and values of tensors decide its size: "
            "give prepare(), or profile, the input that needs most, or let the chain plan again "
            "(replan=True, no costs=, and a first stage that does not write to its input)"
        )
    with TURN.taken(), torch.enable_grad():
        found = measure_stages(planned.stages, names_of(sequential), state)
        found = _at_least(found, planned.measured, larger)
        try:
            anew = fitted(sequential, state, found, together=False)
        except BudgetError as error:
            raise BudgetError(f"{cause}: {error}") from error
    anew = replace(anew, checked=planned.checked)
    _log.info("%s: planned again", cause)
    return replaced(chain, planned, anew)


def _at_least(now: Profile, before: Profile, larger: LargerError) -> Profile:
    """Return a profile with the larger bytes of two, those of one stage larger than before."""
    if len(now.traits) != len(before.traits):
        return now
    stages, sizes = list(now.costs.stages), [t.sizes or Sizes() for t in now.traits]
    for i, (a, b) in enumerate(zip(stages, before.costs.stages, strict=True)):
        stages[i] = replace(a, **{n: max(getattr(a, n), getattr(b, n)) for n in _BYTES}, ways=())
        sizes[i] = sizes[i].both(before.traits[i].sizes or Sizes(), max)
    at, returns = larger.stage, larger.does == "returns"
    known = (sizes[at].output_bytes if returns else sizes[at].saved_bytes) or 0
    if known < larger.seen:
        # By chance it was small when it was measured: its largest size is not known.
        more = max(larger.seen - larger.planned, larger.planned // 4)
        returned = more if returns else 0
        stages[at] = replace(
            stages[at],
            output_bytes=stages[at].output_bytes + returned,
            tape_bytes=stages[at].tape_bytes + more,
        )
        grown, most = replace(sizes[at], varies=True), known + more
        sizes[at] = (
            replace(grown, output_bytes=most) if returns else replace(grown, saved_bytes=most)
        )
    costs = replace(
        now.costs,
        stages=tuple(stages),
        input_bytes=max(now.costs.input_bytes, before.costs.input_bytes),
    )
    return with_sizes(replace(now, costs=costs), sizes)


_MOST_PLANS = 4  # for each stage and input, if they are larger each time


def _tier(sequential: LimitedModule, plan: Plan) -> ChainTier | None:
    """Return the tier that a plan sends to, None if it sends nothing."""
    tiered = sequential._multistage.tiered
    if tiered is None or not plan.writes:
        return None
    return tiered.tier(sequential._multistage.device, plan.memory_bytes)


def _beside_stuck(sequential: LimitedModule, planned: Planned, state: object) -> Planned:
    """Return a plan for one run that has room for what cancelled writes of another hold.

    They may be cancelled only between two pages, and a store may have stopped forever.

    Raises
    ------
    BudgetError
        If there is no such plan.
    """
    tiered, plan = sequential._multistage.tiered, planned.plan
    stuck = 0 if tiered is None else tiered.stuck_bytes
    if not stuck or plan.memory_bytes is None or plan.peak_bytes + stuck <= plan.memory_bytes:
        return planned
    costs = planned.measured.costs
    found = replace(planned.measured, costs=replace(costs, input_bytes=costs.input_bytes + stuck))
    try:
        return fitted(sequential, state, found, together=False)
    except BudgetError as error:
        raise BudgetError(
            f"{error}; {stuck} bytes are held by writes that were cancelled and have not ended"
        ) from error


def run(
    sequential: LimitedModule, planned: Planned, state: object, found: Found, *, trains: bool = True
) -> object:
    """Run by a plan; some of the runs that train are metered."""
    way = Sizes.way(leaves_of(state), found.number)
    chain = sequential._multistage
    collective = facts_of(sequential, found).collective
    metered = None
    if trains and not (planned.is_roomy or collective):
        metered = chain.watch.next(planned.seen, chain.device)
    if metered is None and planned.runs_plainly(way):
        return run_plain(sequential, state)
    if metered is not None:
        metered.given(tensors_in(state), found.tensors)
    if not collective:
        planned = _beside_stuck(sequential, planned, state)
    for _ in range(2 * (1 + _MOST_PLANS * len(planned.profile.groups))):
        profile = planned.profile
        if not is_plain(planned.plan):
            refuse_hidden_draws([sequential], "the chain")
        joins = planned.running.joins and not collective
        costs, acts = planned.plan.stage_costs, planned.plan.actions
        stages, traits, actions = planned.running.of(
            planned.stages, profile.groups, profile.traits, costs, acts, joins=joins
        )
        try:
            tier = _tier(sequential, planned.plan)
            # Ranks that run stages together cannot leave their plan one by one.
            late = None if tier is None or collective else _course(planned.plan)
            result = Run(
                stages,
                traits,
                actions,
                tier,
                course=late,
                left=partial(_note_left, chain, planned.plan, late),
                metered=metered,
                # The check itself compares results.
                check=chain.check if trains and planned.checked.is_exact else "off",
            ).forward(state)
            planned.sizes.counted(way, 0)
            return result
        except ApartError:
            planned.running.joins = False
        except LargerError as error:
            larger = error.with_traceback(None)  # which holds the tensors of the run
            if joins:  # which of them it is shows when they run one by one
                planned.running.joins = False
            else:
                planned, metered = for_larger(sequential, planned, state, larger), None
    raise BudgetError(
        f"stage {planned.profile.traits[larger.stage].name} {larger.what}, though plans were made "
        f"for more {_MOST_PLANS} times a stage; sizes must not change from one run to the next on "
        "the same input"
    )


def _course(plan: Plan) -> Stages | None:
    """Return what is asked where the tier is late; None for a plan without a limit."""
    if plan.tier is None or plan.memory_bytes is None:
        return None
    return Stages(plan, inside=True)


def _note_left(chain: Limited, plan: Plan, course: Stages | None) -> None:
    """Log that a run went on without its tier; the next one is planned for the tier as it is."""
    assert course is not None
    chain.plan = replace(plan, given_up=course.given_up)
    _log.info("tier %.3g times slower than planned: the run goes on without it", course.slower)
    if chain.tiered is not None:
        chain.tiered.was_late(course.slower)
