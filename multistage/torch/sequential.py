"""`Sequential`: an `nn.Sequential` that trains within a memory limit."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..backends.urls import Tiers, open_store, tier_names
from ..errors import ArgumentError, BudgetError, CheckpointWarning, StoreError
from ..execute.detour import Deadlines
from ..model.stages import StageCosts
from ..planners.chain.heterogeneous import ChainPlan, ChainPlanner
from .adopting import adopt, yielding
from .chain import Stages
from .chains.runner import Run
from .chains.stages import UnforeseenError
from .choosing import chosen, device_of, is_collective, is_plain, limit_of, of_rank_0, sends
from .environment.randomness import device_types, refuse_hidden_draws
from .environment.scope import Found, Scope
from .environment.settings import Settings
from .environment.states import leaves_of
from .environment.turns import TURN
from .measurement.checking import Check, Checked, check_chain, checked_choice, room_for_tapes
from .measurement.exploring import tensors_of
from .measurement.joining import ApartError, Running
from .measurement.measure import SECONDS, Profile, measure
from .measurement.sizes import LargerError, Sizes
from .tiers.stowage import Berth, CannotTravel
from .tiers.tiered import Tiered
from .tracing.calling import arguments, sample_of
from .tracing.parts import Part

Call = Callable[[Any], Any]
_log = logging.getLogger(__name__)
_MOST_PLANS = 4  # for each stage and input, if they are larger each time
_BYTES = (
    "output_bytes",
    "tape_bytes",
    "gradient_bytes",
    "forward_overhead_bytes",
    "tape_overhead_bytes",
    "backward_overhead_bytes",
)
# Kinds of input whose plans are remembered, and traces of each.
_KINDS = 64
_VARIANTS = 8


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is known of inputs of one kind."""

    stages: list[Call]
    traced: Stages | None  # that the stages are of
    profile: Profile
    measured: Profile  # which `profile` counts one way
    plan: ChainPlan
    checked: Checked
    sizes: Sizes = field(default_factory=Sizes)  # of the whole, where it runs as it is
    running: Running = field(default_factory=Running)

    def holds(self, stages: Sequence[Call], state: Any, way: object) -> bool:
        """Whether it is of the chain's present stages, and serves an input."""
        if self.traced is None:  # who assigns to a child puts another in its place
            same = len(stages) == len(self.stages)
            return same and all(a is b for a, b in zip(stages, self.stages, strict=True))
        return self.runs_plainly(way) or self.traced.differences(state) is None

    def runs_plainly(self, way: object) -> bool:
        """Whether all tapes are kept, and the sizes of a way to run are known to fit."""
        if not is_plain(self.plan):
            return False
        unlimited = self.plan.memory_bytes is None or self.profile.traits[0].sizes is None
        return unlimited or self.sizes.knows(way)


@dataclass(slots=True)
class _Chain:
    """What a `Sequential` is besides an `nn.Module`."""

    calls: list[str | Call]
    traced: Stages | None
    memory: int | str | float | None
    planner: ChainPlanner
    segments: int | None
    replan: bool
    costs: StageCosts | None
    check: Check
    tiered: Tiered | None = None
    plan: ChainPlan | None = None
    checked: Checked | None = None
    functions: Scope | None = None  # of stages that are no modules
    whole: Scope | None = None  # of all stages
    facts: tuple[int, _Facts] | None = None  # of what the scope held last, by its number
    watchful: bool = False  # whether a stage drew random numbers unforeseen
    # By kind of input; the latest first.
    known: OrderedDict[object, list[_Planned]] = field(default_factory=OrderedDict)

    def refers_to(self) -> list[Call]:
        """Return the stages that are no modules; see `Scope`."""
        return [c for c in self.calls if not isinstance(c, (str, nn.Module))]

    def __getstate__(self) -> dict[str, Any]:
        # Profiles point at modules and at devices: a copy profiles anew.
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        empty: dict[str, Any] = {
            "known": OrderedDict(),
            "plan": None,
            "checked": None,
            "functions": None,
            "whole": None,
            "facts": None,
        }
        return {**state, **empty}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Sequential(nn.Module):
    """A chain of stages that trains within a memory limit, exactly as plain training does.

    Measures the stages on the first input of a kind, chooses which tapes and
    states to keep and what to run again, and then behaves as the plain chain:
    same outputs, same gradients, same buffers, same random numbers, bit for
    bit on deterministic operators.

    Parameters
    ----------
    model : nn.Sequential, or sequence of modules and functions
        The stages; each takes what the one before returned, a pytree of
        tensors and other values.  Modules are registered as in `nn.Sequential`
        (or, for the result of `to_chain`, under the model's own names), so the
        state dict is that of the plain model.
    sample_input : pytree, optional
        What the chain will be called with: profiled and planned at once,
        rather than at the first call.
    memory : int, str, float or None
        Limit for activations and their gradients on the device, from the
        chain's input to its output, both included: bytes, a string such as
        `"4 GiB"`, a fraction (a float up to 1) of what plain training takes,
        or None for what is free.  Parameters and their gradients are not part
        of it.
    planner : {"optimal", "revolve", "periodic", "store-all"}
        See `multistage.plan_chain`.
    segments : int, optional
        For `periodic`.
    costs : StageCosts, optional
        UniformPlan for these, as saved by `profile`, in place of measured ones.
    replan : bool
        Whether inputs of another kind (shapes, dtypes, modes) are profiled
        when they come; else they are an error.
    check : {"error", "warn", "off"}
        Whether the model and the chain are run once each, when inputs of a kind
        are first planned for, and compared bit for bit; if they differ, raise
        StateError, or issue a DifferenceWarning.  See `checked`.
    tiers : str, Path or Store, or a sequence of them, optional
        A slow tier for tapes and states that do not fit, as for `unroll`: such as
        `"file:///scratch"`, `"pinned:8GiB"`, or a cascade of these.  They travel there
        in the background while stages compute, and come back ahead of their use; what
        does not pay is computed again.  Its buffers are part of the limit, where that
        is of host memory.  With planner "optimal".

    Attributes
    ----------
    plan : ChainPlan or None
        The plan used last; None before the first.
    checked : Checked or None
        What the check for that plan found, and the seconds it took.

    Raises
    ------
    BudgetError
        If the limit is too small; the message names the smallest that works.
    StoreError
        If the tier cannot be used.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)]
    >>> x = torch.randn(32, 64)
    >>> model = mst.Sequential(torch.nn.Sequential(*layers), x, memory=0.7)
    >>> model(x).sum().backward()
    >>> model.plan.peak_bytes <= model.plan.memory_bytes
    True

    Notes
    -----
    A stage that is run again finds what it found at first: parameters, buffers,
    attributes, modes, variables of closures, random generators and settings
    such as autocast, as objects and with the same values, whatever has changed
    since.  Nothing shows that it ran again: neither its counters nor lists that
    its forward hooks append to.  A tensor that was written to since is an error
    (`multistage.torch.environment.captured` tells the rules).  Double backward through
    recomputed stages is an error; a second backward (`retain_graph=True`) is
    right, and slower.

    A tier is opened when a plan first uses it, and stays open, with one thread and its
    files, until `close`, until the chain is gone, or until something is raised; only
    `close` waits for one that has stopped answering, the others no longer than 5 seconds.
    What is lost there is computed again, with a CheckpointWarning.  A slow or a full tier
    costs time alone: where a write is late, tapes are given up and made again, as many as
    `plan.given_up` says, and the next iteration is planned for the tier as it is.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[Call],
        sample_input: Any = None,
        memory: int | str | float | None = None,
        *,
        planner: ChainPlanner = "optimal",
        segments: int | None = None,
        costs: StageCosts | None = None,
        replan: bool = True,
        check: Check = "error",
        tiers: Tiers | None = None,
    ) -> None:
        super().__init__()
        check = checked_choice(check)
        tiered = _tiered(tiers, planner)
        calls = self._register(model)
        if not calls:
            raise ArgumentError("a chain needs at least one stage")
        traced = model if isinstance(model, Stages) else None
        # All that is ours under one name, so that a model may use every other.
        self._multistage = _Chain(
            calls, traced, memory, planner, segments, replan, costs, check, tiered
        )
        if sample_input is not None:
            _prepared(self, sample_input)

    def _register(self, model: nn.Sequential | Sequence[Call]) -> list[str | Call]:
        """Register what has parameters; return the names of children, and plain callables."""
        if isinstance(model, Stages):
            adopt(self, model.model)
            return list(model.bare)
        calls: list[str | Call] = []
        if isinstance(model, nn.Sequential):
            if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
                raise ArgumentError(
                    f"{type(model).__name__} has a forward of its own, which a chain of its "
                    "children would not call; give what to_chain(model, sample_input) finds"
                )
            adopt(self, model)
            self.training = model.training
            # Not named_children, which leaves out what comes twice.
            named: list[tuple[str, Any]] = list(model._modules.items())
        elif isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
            raise ArgumentError(
                f"{type(model).__name__} is not a chain of stages; give an nn.Sequential, a list "
                "of stages, or what to_chain(model, sample_input) finds"
            )
        else:
            named = [(str(number), stage) for number, stage in enumerate(model)]
        for name, stage in named:
            if not callable(stage):
                raise ArgumentError(f"stage {name} is {type(stage).__name__}; stages are callable")
            if isinstance(stage, nn.Module):
                self._modules[name] = stage  # not add_module, which refuses names of ours
                calls.append(name)
            else:
                calls.append(stage)
        return calls

    # ------------------------------------------------------------- the stages

    @yielding
    def stages(self) -> list[Call]:
        """Return the stages as given, or as traced last."""
        return stages_of(self)

    @yielding
    def stage_names(self) -> list[str]:
        """Return a name for each stage."""
        return names_of(self)

    def __len__(self) -> int:
        return len(stages_of(self))

    def __iter__(self) -> Iterator[Call]:
        return iter(stages_of(self))

    def __getitem__(self, index: int) -> Call:
        return stages_of(self)[index]

    # ---------------------------------------------------------------- settings

    def _plan_(self) -> ChainPlan | None:
        """The plan used last; None before the first."""
        return self._multistage.plan

    def _checked_(self) -> Checked | None:
        """What the check for the plan used last found."""
        return self._multistage.checked

    def _memory_(self) -> int | str | float | None:
        """The limit that was given."""
        return self._multistage.memory

    def _planner_(self) -> ChainPlanner:
        """The planner that was given."""
        return self._multistage.planner

    def _segments_(self) -> int | None:
        """The number of segments that was given."""
        return self._multistage.segments

    def _replan_(self) -> bool:
        """Whether inputs of another kind are profiled when they come."""
        return self._multistage.replan

    plan = yielding(property(_plan_))
    checked = yielding(property(_checked_))
    memory = yielding(property(_memory_))
    planner = yielding(property(_planner_))
    segments = yielding(property(_segments_))
    replan = yielding(property(_replan_))

    # --------------------------------------------------------------- planning

    @yielding
    def prepare(self, *sample_input: Any, **named: Any) -> ChainPlan:
        """Profile and plan for inputs like this one; return the plan.

        Takes what the chain is called with.  Where `torch.distributed` is at
        work every rank must call it, and all take the plan of rank 0.  Chains of
        sharded parameters (FSDP2) do so at their first call too.
        """
        return _prepared(self, _state_of(self, sample_input, named))

    @yielding
    def close(self) -> None:
        """Close the tier: stop its thread, remove its files.  It is opened again if need be."""
        if self._multistage.tiered is not None:
            self._multistage.tiered.close()

    # ---------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns.

        A chain of stages takes one state; a chain that `to_chain` found takes the
        model's own arguments, by position or by keyword, or the sample that
        stands for them.
        """
        state = _state_of(self, args, kwargs)
        wanting = torch.is_grad_enabled() and (
            any(t.requires_grad for t in tensors_of(state))
            or any(p.requires_grad for p in self.parameters())
            or any(t.requires_grad for t in _of_functions(self).tensors)
        )
        if not wanting:
            return _plain(self, state)
        found = _whole(self)
        planned = _planned(self, state, found, together=_facts(self, found).collective)
        return _run(self, _replanned(self, planned, state), state, found)

    # ------------------------------------------------------------- as the model

    def _model(self) -> nn.Module | None:
        """Return the model that was traced, None for other chains."""
        chain = self.__dict__.get("_multistage")
        return chain.traced.model if chain is not None and chain.traced is not None else None

    @property
    def training(self) -> bool:
        model = self._model()
        return bool(self.__dict__["training"] if model is None else model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        model = self._model()
        if model is None:
            self.__dict__["training"] = mode
        else:
            model.training = mode

    def train(self, mode: bool = True) -> Sequential:
        model = self._model()
        if model is None:
            return super().train(mode)
        model.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self._model()
            if model is None or name.startswith("__"):
                raise
            return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self._model()
        if model is not None and name in vars(model) and name not in vars(self):
            setattr(model, name, value)  # such as a temperature that is annealed
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Sequential:
        model = self._model()
        if model is None:
            super()._apply(fn, recurse)
            return self
        model._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        model = self._model()
        if model is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        else:
            model._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        model = self._model()
        if model is None:
            super()._load_from_state_dict(*args)
        else:
            model._load_from_state_dict(*args)

    def extra_repr(self) -> str:
        chain = self._multistage
        return f"memory={chain.memory!r}, planner={chain.planner!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequential:
        from copy import deepcopy

        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.__dict__, memo))
        return copy


# Not methods: their names belong to models.


def stages_of(sequential: Sequential) -> list[Call]:
    """Return the stages of a chain."""
    chain, modules = sequential._multistage, sequential._modules
    return [modules[c] if isinstance(c, str) else c for c in chain.calls]  # type: ignore[misc]


def names_of(sequential: Sequential) -> list[str]:
    """Return a name for each stage of a chain."""
    chain, modules = sequential._multistage, sequential._modules
    return [
        f"{c} {type(modules[c]).__name__}"
        if isinstance(c, str)
        else c.name
        if isinstance(c, Part)
        else getattr(c, "__name__", type(c).__name__)
        for c in chain.calls
    ]


def _state_of(sequential: Sequential, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the chain's input from the arguments of a call."""
    traced = sequential._multistage.traced
    if traced is not None:
        return sample_of(args, kwargs, traced.model)
    if len(args) != 1 or kwargs:
        raise ArgumentError(
            f"a chain of stages takes one state, not {len(args)} arguments and "
            f"{len(kwargs)} keyword arguments; give a tuple or dict that its first stage takes"
        )
    return args[0]


def _tiered(tiers: Tiers | None, planner: ChainPlanner) -> Tiered | None:
    names = tier_names(tiers)
    if not names:
        return None
    if planner != "optimal":
        raise ArgumentError(f"tiers go with planner 'optimal', not with {planner!r}")
    for name in names:
        if isinstance(name, str) and name.partition(":")[0] == "pinned":
            continue
        open_store(name)  # says so now if there is no such tier
    return Tiered(names)


def _prepared(sequential: Sequential, state: Any) -> ChainPlan:
    with torch.enable_grad():
        return _planned(sequential, state, _whole(sequential), together=True).plan


def _planned(
    sequential: Sequential, state: Any, found: Found, *, together: bool = False
) -> _Planned:
    """Return what is known of inputs like this one; profile and plan if nothing is."""
    chain = sequential._multistage
    kind, way = _kind(sequential, state, found), Sizes.way(leaves_of(state), found.number)
    variants = chain.known.get(kind, [])
    stages = stages_of(sequential)
    planned = next((v for v in variants if v.holds(stages, state, way)), None)
    if planned is None:
        if chain.known and not chain.replan:
            raise ArgumentError(
                "the input is of another kind (shapes, dtypes, devices, modes) than the one "
                "planned for; call prepare() with a sample of it, or use replan=True"
            )
        with TURN.taken():  # generators and buffers are put back at the end
            planned = _made(sequential, state, variants, together)
        _remember(chain, kind, [planned, *variants[: _VARIANTS - 1]])
    chain.known.move_to_end(kind)
    _use(chain, planned)
    return planned


def _remember(chain: _Chain, kind: object, variants: list[_Planned]) -> None:
    chain.known[kind] = variants
    if len(chain.known) > _KINDS:
        chain.known.popitem(last=False)


def _use(chain: _Chain, planned: _Planned) -> None:
    chain.plan, chain.checked = planned.plan, planned.checked
    if planned.traced is not None:
        chain.traced, chain.calls = planned.traced, list(planned.traced.bare)


def _made(sequential: Sequential, state: Any, variants: list[_Planned], together: bool) -> _Planned:
    """Trace if the stages do not hold for an input, profile, and plan."""
    chain = sequential._multistage
    if chain.traced is not None and chain.traced.differences(state) is not None:
        chain.traced = chain.traced.again(state)
        chain.calls = list(chain.traced.bare)
    stages, names = stages_of(sequential), names_of(sequential)
    for other in variants:  # where a constant differs, costs do not
        if other.traced is not None and other.traced.same_stages(chain.traced):
            found = measure(stages, names, state, costs=other.measured.costs)
            sizes = [t.sizes and t.sizes.fresh() for t in other.measured.traits]
            found = _with_sizes(found, sizes)
            profile = replace(found, costs=other.profile.costs)
            return _Planned(stages, chain.traced, profile, found, other.plan, other.checked)
    found = measure(stages, names, state, costs=chain.costs)
    if is_collective(sequential):  # one rank alone cannot plan anew
        found = _with_sizes(found, [None for _ in found.traits])
    unchecked = _fitted(sequential, state, found, together)
    try:
        return replace(unchecked, checked=_compared(sequential, unchecked, state))
    except CannotTravel as error:
        chain.tiered = None
        warnings.warn(f"the tier is not used: {error}", CheckpointWarning, stacklevel=2)
    unchecked = _fitted(sequential, state, found, together)
    return replace(unchecked, checked=_compared(sequential, unchecked, state))


def _with_sizes(profile: Profile, sizes: Sequence[Sizes | None]) -> Profile:
    traits = [replace(t, sizes=each) for t, each in zip(profile.traits, sizes, strict=True)]
    return replace(profile, traits=tuple(traits))


def _fitted(sequential: Sequential, state: Any, found: Profile, together: bool) -> _Planned:
    """Return the best plan for stages as measured, unchecked."""
    traced = sequential._multistage.traced
    profiles = _counted(sequential, found)
    if together:
        profiles = [replace(each, costs=of_rank_0(each.costs)) for each in profiles]
    profile, plan = chosen(sequential, profiles, limit_of(sequential, state), together)
    _refuse_unhooked(profile, plan)
    # Where there is room for twice as much, values of tensors are not thought to decide.
    roomy = plan.memory_bytes is None or plan.memory_bytes >= 2 * plan.plain_bytes
    varies = not roomy and any(t.sizes.varies for t in profile.traits if t.sizes is not None)
    return _Planned(
        stages_of(sequential), traced, profile, found, plan, Checked("off"), Sizes(varies=varies)
    )


def _replanned(sequential: Sequential, planned: _Planned, state: Any) -> _Planned:
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
    tiered.looked(tiered.clock() - began)
    anew = replace(planned, plan=found)
    for variants in chain.known.values():
        variants[:] = [anew if v is planned else v for v in variants]
    _use(chain, anew)
    return anew


def _for_larger(
    sequential: Sequential, planned: _Planned, state: Any, larger: LargerError
) -> _Planned:
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
            "give prepare(), or profile, the input that needs most, or let the chain plan anew "
            "(replan=True, no costs=, and a first stage that does not write to its input)"
        )
    with TURN.taken(), torch.enable_grad():
        found = measure(planned.stages, names_of(sequential), state)
        found = _at_least(found, planned.measured, larger)
        try:
            anew = _fitted(sequential, state, found, together=False)
        except BudgetError as error:
            raise BudgetError(f"{cause}: {error}") from error
    anew = replace(anew, checked=planned.checked)
    _log.info("%s: planned anew", cause)
    for variants in chain.known.values():
        variants[:] = [anew if v is planned else v for v in variants]
    _use(chain, anew)
    return anew


def _at_least(now: Profile, before: Profile, larger: LargerError) -> Profile:
    """Return a profile with the larger bytes of two, those of one stage larger than before."""
    if len(now.traits) != len(before.traits):
        return now
    stages, sizes = list(now.costs.stages), [t.sizes or Sizes() for t in now.traits]
    for i, (a, b) in enumerate(zip(stages, before.costs.stages, strict=True)):
        stages[i] = replace(a, **{n: max(getattr(a, n), getattr(b, n)) for n in _BYTES})
        sizes[i] = sizes[i].at_least(before.traits[i].sizes or Sizes())
    at = larger.stage
    if sizes[at].no_more_than(before.traits[at].sizes or Sizes()):
        # By chance it was small when it was measured: how large it gets nobody knows.
        more = max(larger.seen - larger.planned, larger.planned // 4)
        returned = more if larger.does == "returns" else 0
        stages[at] = replace(
            stages[at],
            output_bytes=stages[at].output_bytes + returned,
            tape_bytes=stages[at].tape_bytes + more,
        )
        sizes[at] = sizes[at].more_by(more - returned, returned)
    costs = replace(
        now.costs,
        stages=tuple(stages),
        input_bytes=max(now.costs.input_bytes, before.costs.input_bytes),
    )
    return _with_sizes(replace(now, costs=costs), sizes)


def _refuse_unhooked(profile: Profile, plan: ChainPlan) -> None:
    """Refuse plans that run stages again whose tape only torch itself can make."""
    for i in sorted({*range(len(profile.traits))} - {*plan.kept}):
        if profile.traits[i].unhooked:
            raise ArgumentError(
                f"stage {profile.traits[i].name} computes gradients by torch.func, which does not "
                "work under saved-tensor hooks, so that it cannot be run again within "
                f"{plan.memory_bytes} bytes; use torch.autograd.grad(..., create_graph=True), or "
                f"raise the limit to {plan.plain_bytes}, where every tape is kept"
            )


def _compared(sequential: Sequential, planned: _Planned, state: Any) -> Checked:
    """Run the model and the chain once each, and compare."""
    chain = sequential._multistage
    model = sequential._model()
    if chain.check == "off":
        return Checked("off")
    if is_collective(sequential):
        return Checked("not checked; ranks run these stages together")
    stages = planned.stages
    return check_chain(
        lambda given: _plain(sequential, given),
        lambda given: _run(sequential, planned, given, _whole(sequential)),
        state,
        name=type(sequential if model is None else model).__name__,
        stages=stages if model is None else [model, *stages],
        room_bytes=room_for_tapes(planned.profile, stages, planned.plan.memory_bytes),
        writes=planned.profile.traits[0].changes_input,
        check=chain.check,
    )


def measured(
    sequential: Sequential, state: Any, *, seconds: float = SECONDS, costs: StageCosts | None = None
) -> list[Profile]:
    """Profile the stages of a chain; see `measure` and `Stages.counted`."""
    stages, names = stages_of(sequential), names_of(sequential)
    return _counted(sequential, measure(stages, names, state, seconds=seconds, costs=costs))


def _counted(sequential: Sequential, profile: Profile) -> list[Profile]:
    """Return a profile by all ways to count what passes several cuts."""
    chain = sequential._multistage
    given = chain.traced is None or chain.costs is not None
    return [profile] if given or chain.traced is None else chain.traced.counted(profile)


def _berth(sequential: Sequential, plan: ChainPlan) -> Berth | None:
    """Return the tier that a plan sends to, None if it sends nothing."""
    tiered = sequential._multistage.tiered
    if tiered is None or not sends(plan):
        return None
    return tiered.berth(device_of(sequential), plan.memory_bytes)


def _run(sequential: Sequential, planned: _Planned, state: Any, found: Found) -> Any:
    """Run by a plan."""
    way = Sizes.way(leaves_of(state), found.number)
    if planned.runs_plainly(way):
        return _plain(sequential, state)
    chain = sequential._multistage
    for _ in range(2 * (1 + _MOST_PLANS * len(planned.profile.groups))):
        profile = planned.profile
        if not is_plain(planned.plan):
            refuse_hidden_draws([sequential], "the chain")
        collective = _facts(sequential, found).collective
        joins = planned.running.joins and not collective
        stages, traits, actions = planned.running.of(
            planned.stages, profile, planned.plan.actions, joins=joins
        )
        watchful = chain.watchful or collective
        try:
            berth = _berth(sequential, planned.plan)
            # Ranks that run stages together cannot leave their plan one by one.
            late = None if berth is None or collective else Deadlines(planned.plan)
            run = Run(stages, traits, actions, berth, watchful=watchful, deadlines=late)
            result = run.forward(state)
        except UnforeseenError:
            chain.watchful = True
            continue
        except ApartError:
            planned.running.joins = False
            continue
        except LargerError as error:
            if joins:  # which of them it is shows when they run one by one
                planned.running.joins = False
                continue
            larger = error.with_traceback(None)  # which holds the tensors of the run
        else:
            planned.sizes.counted(way, 0)
            if late is not None and late.detour is not None:
                _note_detour(chain, planned.plan, late)
            return result
        planned = _for_larger(sequential, planned, state, larger)
    raise BudgetError(
        f"stage {planned.profile.traits[larger.stage].name} {larger.what}, though plans were made "
        f"for more {_MOST_PLANS} times a stage; sizes must not change from one run to the next on "
        "the same input"
    )


def _note_detour(chain: _Chain, plan: ChainPlan, late: Deadlines) -> None:
    """Tell that a run left its plan; the next one is planned for the tier as it is."""
    chain.plan = replace(plan, given_up=late.given_up)
    _log.info("tier %.3g times slower than planned: %d tapes given up", late.slower, late.given_up)
    if chain.tiered is not None:
        chain.tiered.was_late(late.slower)


def _plain(sequential: Sequential, state: Any) -> Any:
    """Run without a plan; what was traced runs as it is, whatever the shapes and modes."""
    traced = sequential._multistage.traced
    if traced is not None:
        positional, named = arguments(state)
        return traced.model.forward(*positional, **named)
    for stage in stages_of(sequential):
        state = stage(state)
    return state


def _whole(sequential: Sequential) -> Found:
    """Return what all stages refer to."""
    chain = sequential._multistage
    if chain.whole is None:
        model = sequential._model()
        chain.whole = Scope([sequential] if model is None else [sequential, model])
    return chain.whole.look()


def _of_functions(sequential: Sequential) -> Found:
    """Return what stages that are no modules refer to."""
    chain = sequential._multistage
    if chain.functions is None:
        chain.functions = Scope(chain.refers_to())
    return chain.functions.look()


def _kind(model: Sequential, state: Any, found: Found) -> object:
    """Return what a plan depends on: shapes, dtypes, devices, wishes and modes.

    Those of parameters too: numbers of words have one dtype, whatever the model's.
    """
    leaves, spec = pytree.tree_flatten(state)
    of_leaves = tuple(
        (tuple(x.shape), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else type(x)
        for x in leaves
    )
    settings = Settings.capture(device_types(tensors_of(state)))
    facts = _facts(model, found)
    wishes = tuple([p.requires_grad for p in facts.wanting])
    # Of tensors that are no parameters shapes may change at every call.
    of_parameters = tuple([(p.shape, p.dtype, p.device) for p in facts.parameters])
    return str(spec), of_leaves, settings, facts.modes, hash(wishes), hash(of_parameters)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the kind of an input takes from the stages, while they hold the same objects."""

    modes: int
    wanting: Sequence[Tensor]
    parameters: Sequence[Tensor]
    collective: bool


def _facts(model: Sequential, found: Found) -> _Facts:
    chain = model._multistage
    if chain.facts is not None and chain.facts[0] == found.number:
        return chain.facts[1]
    functions = _of_functions(model)
    modes = hash(tuple(m.training for m in (*model.modules(), *functions.modules)))
    wanting = [*model.parameters(), *functions.tensors]
    parameters = [p for p in wanting if isinstance(p, nn.Parameter) and not is_lazy(p)]
    facts = _Facts(modes, wanting, parameters, is_collective(model))
    # Neither modes of scripted modules nor results of runs are remembered.
    if not found.scripted and len(parameters) == len(wanting):
        chain.facts = found.number, facts
    return facts
