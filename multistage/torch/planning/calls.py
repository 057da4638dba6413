"""One call of a chain: planned for by the kind of its input, and run by that plan.

Plans are profiled, chosen, metered, checked and remembered for each kind of input.  A call whose
input is larger than its plan is for is planned, and run, again.

What iterations really hold.  A plan is made of what each stage was measured to hold by itself.
What belongs to no stage shows when they run together: tensors in attributes, which last until
the next iteration replaces them, closures of hooks on gradients, casts of weights that autocast
keeps.  So iterations by a new plan are metered before it is used, and some of those that train.
What is held beside the stages is reserved within the limit: it lies there all the time, as the
input does.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, BudgetError, CheckpointWarning, MultistageError, StoreError
from ...execute.late import Stages
from ...model.budget import Budget
from ...planners import Plan
from ...planners.chain.heterogeneous import smallest_memory
from ...support.units import format_bytes
from ..chains.holdings import CannotTravel
from ..chains.runner import Run
from ..environment.randomness import cuda_or_cpu, device_types, refuse_hidden_draws
from ..environment.scope import Found, Scope
from ..environment.settings import Settings
from ..environment.states import leaves_of, tensors_in
from ..environment.turns import looking
from ..measurement.checking import Both, Checked, NotAlone, check_chain, room_for_tapes
from ..measurement.checking import Seen as Ran
from ..measurement.exploring import Call
from ..measurement.measure import Profile, measure_stages, sharded
from ..measurement.traits import ApartError, LargerError, Sizes
from ..measurement.watching import Seen
from ..tensors.meter import Meter
from ..tiers.lane import ChainTier
from ..tiers.tiered import Tiered
from .choosing import PAYS, chosen, held_by_caller, in_bytes, of_rank_0
from .limited import (
    Facts,
    Kind,
    Limited,
    LimitedModule,
    Planned,
    is_plain,
    names_of,
    run_plain,
    stages_of,
)
from .profiles import at_least, estimate, with_more, with_sizes

_log = logging.getLogger(__name__)
_MOST_PLANS = 12  # for one input, until iterations stay within the limit
_MOST_LARGER = 4  # plans for each stage and input, if they are larger each time
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


class ChainCall:
    """A chain, what it is called with, and what its stages refer to at that moment.

    Parameters
    ----------
    module : LimitedModule
    state : pytree
        The chain's input.
    chain : Limited, optional
        In the place of the module's.
    """

    def __init__(self, module: LimitedModule, state: object, chain: Limited | None = None) -> None:
        self._module, self._state = module, state
        self._chain = module._multistage if chain is None else chain

    @cached_property
    def _found(self) -> Found:
        if self._chain.whole is None:
            self._chain.whole = Scope([self._module])
        return self._chain.whole.look()

    @cached_property
    def _facts(self) -> Facts:
        """What is known of the model, renewed after a change of mode or number."""
        chain, model, found = self._chain, self._module, self._found
        if chain.facts is not None and chain.facts[0] == found.number:
            return chain.facts[1]
        functions = chain.of_functions()
        modules = [*model.modules()]
        modes = hash(tuple(m.training for m in (*modules, *functions.modules)))
        wanting = [*model.parameters(), *functions.tensors]
        parameters = [p for p in wanting if isinstance(p, nn.Parameter) and not is_lazy(p)]
        collective = sharded(model.parameters()) or any(
            isinstance(module, nn.SyncBatchNorm) for module in modules
        )
        facts = Facts(modes, wanting, parameters, collective)
        # Neither modes of scripted modules nor results of runs are remembered.
        if not found.scripted and len(parameters) == len(wanting):
            chain.facts = found.number, facts
        return facts

    @cached_property
    def kind(self) -> Kind:
        """What a plan depends on: shapes, strides, dtypes, devices, wishes and modes.

        Those of parameters too: numbers of words have one dtype, whatever the model's.
        """
        leaves, spec = pytree.tree_flatten(self._state)
        of_leaves = tuple(
            (x.ndim, _gaps(x), x.dtype, x.device, x.requires_grad)
            if isinstance(x, Tensor)
            else type(x)
            for x in leaves
        )
        settings = Settings.capture(device_types(tensors_in(self._state)))
        facts = self._facts
        wishes = tuple([p.requires_grad for p in facts.wanting])
        # Of tensors that are no parameters shapes may change at every call.
        of_parameters = tuple([(p.shape, p.dtype, p.device) for p in facts.parameters])
        family = str(spec), of_leaves, settings, facts.modes, hash(wishes), hash(of_parameters)
        return Kind(family, tuple([n for x in leaves if isinstance(x, Tensor) for n in x.shape]))

    # ----------------------------------------------------------------- plans

    def prepared(self) -> Plan:
        """Return the plan, made as a training step would, by all ranks together."""
        with torch.enable_grad():
            return self._planned(together=True).plan

    def result(self) -> object:
        """Run the chain within its limit; profile and plan if nothing is known of such inputs."""
        planned = self._planned(together=self._facts.collective)
        return self._run(self._for_rates(planned))

    def _planned(self, *, together: bool) -> Planned:
        """Return what is known of inputs like this one; profile and plan if nothing is."""
        chain, module = self._chain, self._module
        if torch.cuda.is_available():
            chain.device = cuda_or_cpu([*tensors_in(self._state), *module.parameters()])
        kind = self.kind
        planned = chain.known.get(kind)
        if planned is None or not planned.holds(stages_of(module)):
            if chain.known and not chain.replan:
                raise ArgumentError(
                    "the input is of another kind (shapes, dtypes, devices, modes) than the one "
                    "planned for; call prepare() with a sample of it, or use replan=True"
                )
            with looking():  # generators and buffers are put back at the end
                planned = None if together else self._estimated(kind)
                planned = planned or self._made(together)
            chain.known[kind] = planned
            if len(chain.known) > _KINDS:
                chain.known.popitem(last=False)
        chain.known.move_to_end(kind)
        chain.use(planned)
        return self._corrected(planned)

    def _estimated(self, kind: Kind) -> Planned | None:
        """Return a plan by the costs of inputs of other lengths, None if they tell nothing."""
        chain, stages = self._chain, stages_of(self._module)
        if chain.costs is not None:
            return None
        measured = [
            (key, planned)
            for key, planned in chain.known.items()
            if not planned.is_estimate
            and planned.holds(stages)
            and not planned.profile.traits[0].changes_input
        ]
        found = estimate(kind, measured)
        if found is None:
            return None
        *ends, profile = found
        try:
            planned = self._fitted(profile)
        except BudgetError:  # by an estimate that may be too high
            return None
        for key, _ in ends:  # in use
            chain.known.move_to_end(key)
        return replace(
            planned,
            checked=Checked("not checked; between, or near, lengths that were"),
            reserved_bytes=max(end.reserved_bytes for _, end in ends),
            seen=Seen(runs=1),  # so that the first run is metered
            is_estimate=True,
        )

    def _made(self, together: bool) -> Planned:
        found = self._measured(stages_of(self._module))
        if self._facts.collective:  # one rank alone cannot plan again
            found = with_sizes(found, [None for _ in found.traits])
        try:
            return self._tried(found, together)
        except CannotTravel as error:
            self._chain.tiered = None
            warnings.warn(f"the tier is not used: {error}", CheckpointWarning, stacklevel=2)
        return self._tried(found, together)

    def _measured(self, stages: list[Call]) -> Profile:
        return measure_stages(stages, names_of(self._module), self._state, costs=self._chain.costs)

    def _tried(self, found: Profile, together: bool) -> Planned:
        """Return a plan by which the chain was run: within its limit, with the model's results."""
        try:
            planned, ran = self._within_limit(self._fitted(found, together))
        except BudgetError as error:
            raise self._naming_enough(error, found) from None
        return replace(planned, checked=self._compared(planned, ran))

    def _naming_enough(self, error: BudgetError, found: Profile) -> BudgetError:
        """Return a refusal that names a limit within which iterations were seen to stay."""
        chain, named = self._chain, error.least_bytes
        if named is None:
            return error
        least = named
        for _ in range(_MOST_PLANS):
            other = ChainCall(self._module, self._state, replace(chain, memory=least))
            try:
                other._within_limit(other._fitted(found))
                break
            except BudgetError as beyond:
                if beyond.least_bytes is None or beyond.least_bytes <= least:
                    break
                least = beyond.least_bytes
        if chain.tiered is not None:
            chain.tiered.leave()
        if least == named:
            return error
        return BudgetError.below(
            f"memory={in_bytes(chain, self._counted(found)[0])} bytes < {least} bytes "
            f"({format_bytes(least)}), the smallest limit that planner {chain.planner!r} works "
            f"within: stages alone take {named}, iterations were seen to hold more; raise the "
            "limit",
            least,
        )

    def _counted(self, found: Profile) -> list[Profile]:
        """Return a profile by all ways to count what passes several cuts; first, once."""
        graph = self._chain.graph
        return [found] if graph is None or self._chain.costs is not None else graph.counted(found)

    def _fitted(self, found: Profile, together: bool = False) -> Planned:
        """Return the best plan for stages as measured, unchecked."""
        chain, profiles = self._chain, self._counted(found)
        if together:
            profiles = [replace(each, costs=of_rank_0(each.costs)) for each in profiles]
        profile, plan = chosen(chain, profiles, together)
        _refuse_unhooked(profile, plan)
        if plan.memory_bytes is not None and chain.device.type == "cpu":
            _tell_of_resident_memory()
        # Where there is room for twice as much, values of tensors are not thought to decide.
        roomy = plan.memory_bytes is None or plan.memory_bytes >= 2 * plan.plain_bytes
        varies = not roomy and any(t.sizes.varies for t in profile.traits if t.sizes is not None)
        stages = stages_of(self._module)
        return Planned(stages, profile, found, plan, Checked("off"), Sizes(varies=varies))

    def _try(self, planned: Planned, state: object) -> object:
        """Run by a plan that is tried, on a state like this one."""
        return ChainCall(self._module, state, self._chain)._run(planned, trains=False)

    def _compared(self, planned: Planned, ran: Ran | None) -> Checked:
        """Run the model and the chain once each, and compare; a chain that ran is not run again."""
        chain, stages = self._chain, planned.stages
        if chain.check == "off":
            return Checked("off")
        if self._facts.collective:
            return Checked("not checked; ranks run these stages together")
        if any(trait.unhooked for trait in planned.profile.traits):
            return Checked("not checked; torch.func and nested tensors do not work under its hooks")
        return check_chain(
            partial(run_plain, self._module),
            partial(self._try, planned),
            self._state,
            name="the captured graph" if chain.graph is not None else type(self._module).__name__,
            stages=stages,
            room_bytes=room_for_tapes(planned.profile, stages, planned.plan.memory_bytes),
            writes=planned.profile.traits[0].changes_input,
            check=chain.check,
            ran=ran,
        )

    def _for_rates(self, planned: Planned) -> Planned:
        """Return a plan for the rates that the tier was seen to have, if they are others now."""
        tiered, plan = self._chain.tiered, planned.plan
        if tiered is None or self._facts.collective or is_plain(plan):
            return planned
        if not (tiered.drifted() if plan.writes else tiered.forget()):
            return planned
        began = tiered.clock()
        try:
            _, found = chosen(self._chain, [planned.profile])
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
        return self._chain.replaced(planned, replace(planned, plan=found))

    # --------------------------------------------------------- what is held

    def _within_limit(self, planned: Planned) -> tuple[Planned, Ran | None]:
        """Return a plan by which iterations stay within the limit, and what the metered one did.

        Raises
        ------
        BudgetError
            If there is none.
        """
        if self._facts.collective:
            return planned, None
        meter, ran = Meter(self._chain.device, by_storages=True), None
        for number in range(_MOST_PLANS):
            # What is on its way to a tier depends on the tier's speed.
            if planned.is_roomy or planned.plan.writes:
                break
            held_bytes, ran = self._metered(planned, meter)
            if held_bytes is None or not _exceeds(planned, held_bytes):
                break
            # What is held beside the stages need not be there at their peak: not more than it
            # takes.
            limit = planned.plan.memory_bytes or 0
            beyond_bytes = planned.plan.peak_bytes if number else limit
            planned, ran = self._reserving(planned, held_bytes, beyond_bytes), None
        return planned, ran

    def _metered(self, planned: Planned, meter: Meter) -> tuple[int | None, Ran | None]:
        """Return the most bytes that iterations hold at once, and what the first one did.

        None if they cannot be run here.
        """
        writes = planned.profile.traits[0].changes_input
        both = Both(planned.stages, self._state, writes, 0.0)
        try:
            return both.metered(partial(self._try, planned), meter)
        except CannotTravel:
            raise
        except (RuntimeError, MultistageError, NotAlone) as error:
            # The check or the training says so, if it is not of this run alone.
            _log.info("iterations by a new plan were not metered: %s", error)
            return None, None

    def _reserving(
        self, planned: Planned, held_bytes: int, beyond_bytes: int, what: str = _BESIDE
    ) -> Planned:
        """Return a plan that keeps room for what was held beyond some bytes."""
        chain, limit = self._chain, planned.plan.memory_bytes
        assert limit is not None
        more = held_bytes - beyond_bytes
        if chain.tiered is None:  # the plan that takes least may hold less than is thought
            given = chain.memory
            share = 0.0 if given is None else Budget.parse(given, of="stages").fraction or 0.0
            room = limit - smallest_memory(held_by_caller(planned.profile.costs))
            more = min(more, int(room / (1 - share)) if share < 1 else more)
        reserved = planned.reserved_bytes + more
        beside = f"{max(0, reserved)} bytes are held beside the stages: {what}"
        if more <= 0:
            raise BudgetError.below(
                f"memory={limit} bytes < {held_bytes} bytes ({format_bytes(held_bytes)}), which "
                f"iterations were seen to hold by the plan that takes least; {beside}; raise the "
                "limit",
                held_bytes,
            )
        try:
            anew = self._fitted(with_more(planned.measured, more))
        except BudgetError as error:
            told = BudgetError(f"{error}; {beside}")
            told.least_bytes = error.least_bytes
            raise told from None
        _log.info("%d bytes are reserved for what is held beside the stages", reserved)
        return replace(anew, reserved_bytes=reserved, checked=planned.checked)

    def _corrected(self, planned: Planned) -> Planned:
        """Return another plan where iterations by this one were seen to exceed the limit."""
        seen, chain = planned.seen.most_bytes, self._chain
        if not (seen and _exceeds(planned, seen)):
            return planned
        what = _TWICE if planned.seen.twice else _BESIDE
        if not chain.watch.told:
            chain.watch.told = True
            warnings.warn(
                f"an iteration held {seen} bytes ({format_bytes(seen)}) or more within a limit of "
                f"{planned.plan.memory_bytes}; the next is planned with room for what was held "
                f"beside the stages: {what}; later corrections are logged only",
                CheckpointWarning,
                stacklevel=2,
            )
        try:
            with looking(), torch.enable_grad():
                anew = self._reserving(planned, seen, planned.plan.peak_bytes, what)
                anew, _ = self._within_limit(anew)
        except BudgetError as error:
            if not planned.seen.twice:
                raise
            # The next graph need not be kept, and the limit was enough for the first call.
            _log.info("the plan stays, since there is none with that room: %s", error)
            planned.seen.most_bytes, planned.seen.twice = 0, False
            return planned
        return chain.replaced(planned, anew)

    def _for_larger(self, planned: Planned, larger: LargerError) -> Planned:
        """Return a plan for an input with which a stage saves or returns more than planned for.

        Raises
        ------
        BudgetError
            If there is none; it names the stage.
        """
        chain, traits = self._chain, planned.profile.traits
        cause = (
            f"stage {traits[larger.stage].name} {larger.what}, which is of another input of the "
            "same kind"
        )
        if chain.costs is not None or not chain.replan or traits[0].changes_input:
            raise BudgetError(
                f"{cause}; numbers in the state, attributes and values of tensors decide its size: "
                "give prepare(), or profile, the input that needs most, or let the chain plan "
                "again (replan=True, no costs=, and a first stage that does not write to its input)"
            )
        with looking(), torch.enable_grad():
            found = at_least(self._measured(planned.stages), planned.measured, larger)
            try:
                anew = self._fitted(found)
            except BudgetError as error:
                raise BudgetError(f"{cause}: {error}") from error
        _log.info("%s: planned again", cause)
        return chain.replaced(planned, replace(anew, checked=planned.checked))

    def _beside_stuck(self, planned: Planned) -> Planned:
        """Return a plan for one run that has room for what cancelled writes of another hold.

        They may be cancelled only between two pages, and a store may have stopped forever.

        Raises
        ------
        BudgetError
            If there is no such plan.
        """
        tiered, plan = self._chain.tiered, planned.plan
        stuck = 0 if tiered is None else tiered.stuck_bytes
        if not stuck or plan.memory_bytes is None or plan.peak_bytes + stuck <= plan.memory_bytes:
            return planned
        try:
            return self._fitted(with_more(planned.measured, stuck))
        except BudgetError as error:
            raise BudgetError(
                f"{error}; {stuck} bytes are held by writes that were cancelled and have not ended"
            ) from error

    # ----------------------------------------------------------------- a run

    def _run(self, planned: Planned, *, trains: bool = True) -> object:
        """Run by a plan; some of the runs that train are metered."""
        chain, state, collective = self._chain, self._state, self._facts.collective
        way = Sizes.way(leaves_of(state), self._found.number)
        metered = None
        if trains and not (planned.is_roomy or collective):
            metered = chain.watch.next(planned.seen, chain.device)
        if metered is None and planned.runs_plainly(way):
            return run_plain(self._module, state)
        if metered is not None:
            metered.given(tensors_in(state), self._found.tensors)
        if not collective:
            planned = self._beside_stuck(planned)
        for _ in range(2 * (1 + _MOST_LARGER * len(planned.profile.groups))):
            plan, profile = planned.plan, planned.profile
            if not is_plain(plan):
                refuse_hidden_draws([self._module], "the chain")
            joins = planned.running.joins and not collective
            stages, traits, actions = planned.running.of(
                planned.stages,
                profile.groups,
                profile.traits,
                plan.stage_costs,
                plan.actions,
                joins=joins,
            )
            try:
                tier = self._tier(plan)
                # Ranks that run stages together cannot leave their plan one by one.
                late = None if tier is None or collective else _course(plan)
                result = Run(
                    stages,
                    traits,
                    actions,
                    tier,
                    course=late,
                    left=partial(_note_left, chain, plan, late),
                    metered=metered,
                    # The check itself compares results.
                    check=chain.check if trains and planned.checked.is_exact else "off",
                    is_known=planned.sizes.knows(way),
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
                    planned, metered = self._for_larger(planned, larger), None
        raise BudgetError(
            f"stage {planned.profile.traits[larger.stage].name} {larger.what}, though plans were "
            f"made for more {_MOST_LARGER} times a stage; sizes must not change from one run to "
            "the next on the same input"
        )

    def _tier(self, plan: Plan) -> ChainTier | None:
        """Return the tier that a plan sends to, None if it sends nothing."""
        tiered = self._chain.tiered
        if tiered is None or not plan.writes:
            return None
        return tiered.tier(self._chain.device, plan.memory_bytes)


def _gaps(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not contiguous: stages may copy it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    return tensor.stride()


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


def _worth_changing(plan: Plan, found: Plan, tiered: Tiered) -> Plan:
    """Return a new plan, or the old one as the rates seen make it, if that is hardly slower."""
    old = Plan.judged(plan.planner, plan.stage_costs, plan.memory_bytes, plan.actions, tiered.rates)
    old = replace(old, candidates=found.candidates, reserved=plan.reserved)
    return old if PAYS * old.makespan_s <= found.makespan_s and found.writes else found


def _exceeds(planned: Planned, held_bytes: int) -> bool:
    limit = planned.plan.memory_bytes
    if limit is None or held_bytes <= limit:
        return False
    # Small is what is not looked at, not what is held beside stages that take less.
    of_stages = planned.plan.peak_bytes - planned.reserved_bytes
    return held_bytes > of_stages + _SMALL_BYTES


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
