"""One call of a chain by its plan, made again where the input shows that it does not hold."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from ...errors import BudgetError
from ...execute.late import Stages
from ...planners.chain.heterogeneous import ChainPlan
from ...schedule.rules import Rules
from ..chains.runner import Run
from ..environment.hidden_draws import refuse_hidden_draws
from ..environment.scope import Found
from ..environment.states import leaves_of
from ..measurement.exploring import tensors_of
from ..measurement.sizes import ApartError, LargerError, Sizes, UnforeseenError
from ..tiers.stowage import Berth
from .choosing import device_of
from .fitting import for_larger
from .kinds import facts_of
from .limited import Limited, LimitedModule, Planned, is_plain, run_plain, sends

_log = logging.getLogger(__name__)
_MOST_PLANS = 4  # for each stage and input, if they are larger each time


def _berth(sequential: LimitedModule, plan: ChainPlan) -> Berth | None:
    """Return the tier that a plan sends to, None if it sends nothing."""
    tiered = sequential._multistage.tiered
    if tiered is None or not sends(plan):
        return None
    return tiered.berth(device_of(sequential), plan.memory_bytes)


def run(
    sequential: LimitedModule, planned: Planned, state: object, found: Found, *, trains: bool = True
) -> object:
    """Run by a plan; some of the runs that train are metered."""
    way = Sizes.way(leaves_of(state), found.number)
    chain = sequential._multistage
    collective = facts_of(sequential, found).collective
    metered = None
    if trains and not (planned.is_roomy or collective):
        metered = chain.watch.next(planned.seen, device_of(sequential))
    if metered is None and planned.runs_plainly(way):
        return run_plain(sequential, state)
    if metered is not None:
        metered.given(tensors_of(state), found.tensors)
    for _ in range(2 * (1 + _MOST_PLANS * len(planned.profile.groups))):
        profile = planned.profile
        if not is_plain(planned.plan):
            refuse_hidden_draws([sequential], "the chain")
        joins = planned.running.joins and not collective
        stages, traits, actions = planned.running.of(
            planned.stages, profile.groups, profile.traits, planned.plan.actions, joins=joins
        )
        try:
            berth = _berth(sequential, planned.plan)
            # Ranks that run stages together cannot leave their plan one by one.
            late = None if berth is None or collective else _course(planned.plan)
            result = Run(
                stages,
                traits,
                actions,
                berth,
                watchful=chain.watchful or collective,
                course=late,
                left=partial(_note_left, chain, planned.plan, late),
                metered=metered,
                # The check itself compares results.
                check=chain.check if trains and planned.checked.is_exact else "off",
            ).forward(state)
            planned.sizes.counted(way, 0)
            return result
        except UnforeseenError:
            chain.watchful = True
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


def _course(plan: ChainPlan) -> Stages | None:
    """Return what is asked where the tier is late; None for a plan without a limit."""
    if plan.tier is None or plan.memory_bytes is None:
        return None
    rules = partial(Rules.in_bytes, plan.costs, None, plan.memory_bytes)
    return Stages(plan, rules, lambda actions: actions, inside=True)


def _note_left(chain: Limited, plan: ChainPlan, course: Stages | None) -> None:
    """Log that a run went on without its tier; the next one is planned for the tier as it is."""
    assert course is not None
    chain.plan = replace(plan, given_up=course.given_up)
    _log.info("tier %.3g times slower than planned: the run goes on without it", course.slower)
    if chain.tiered is not None:
        chain.tiered.was_late(course.slower)
