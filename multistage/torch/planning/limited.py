"""What a chain within a memory limit is besides a module; kinds of input, and plans for each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ...model.stages import StageCosts
from ...planners import Plan
from ...planners.chain.heterogeneous import ChainPlanner
from ..environment.randomness import device_types
from ..environment.scope import Found, Scope
from ..environment.settings import Settings
from ..environment.states import tensors_in
from ..measurement.checking import Check, Checked
from ..measurement.exploring import Call as Call
from ..measurement.joining import Running
from ..measurement.measure import Profile, sharded
from ..measurement.traits import Sizes
from ..measurement.watching import Seen, Watch
from ..tiers.tiered import Tiered
from ..tracing.captured import GraphStages

_ROOMY = 4  # times what plain training was measured to take


def is_plain(plan: Plan) -> bool:
    """Whether a plan is plain training: nothing is run again, and nothing travels."""
    return plan.keeps_all and not plan.writes


@dataclass(frozen=True, slots=True)
class Kind:
    """What a plan depends on besides the stages.

    Attributes
    ----------
    family : hashable
        All but the lengths.
    lengths : tuple of int
        The shapes, one after the other.
    """

    family: object
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """What is known of inputs of one kind."""

    stages: list[Call]
    profile: Profile
    measured: Profile  # which `profile` counts one way
    plan: Plan
    checked: Checked
    sizes: Sizes = field(default_factory=Sizes)  # of the whole, where it runs as it is
    running: Running = field(default_factory=Running)
    seen: Seen = field(default_factory=Seen)
    reserved_bytes: int = 0  # held beside what the stages were measured to hold
    is_estimate: bool = False  # from costs of inputs of other lengths

    def holds(self, stages: Sequence[Call]) -> bool:
        """Whether it is of the chain's present stages: a child may be replaced."""
        same = len(stages) == len(self.stages)
        return same and all(a is b for a, b in zip(stages, self.stages, strict=True))

    @property
    def is_roomy(self) -> bool:
        """Whether the limit is so far away that nothing need be metered."""
        most = self.plan.memory_bytes
        return most is None or (is_plain(self.plan) and most >= _ROOMY * self.plan.plain_bytes)

    def runs_plainly(self, way: object) -> bool:
        """Whether all tapes are kept, and the sizes of a way to run are known to fit."""
        if not is_plain(self.plan):
            return False
        unlimited = self.plan.memory_bytes is None or self.profile.traits[0].sizes is None
        return unlimited or self.sizes.knows(way)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the kind of an input takes from the stages, while they hold the same objects."""

    modes: int
    wanting: Sequence[Tensor]
    parameters: Sequence[Tensor]
    collective: bool


@dataclass(slots=True)
class Limited:
    """What a `LimitedModule` is besides an `nn.Module`."""

    calls: list[str | Call]
    memory: int | str | float | None
    planner: ChainPlanner
    segments: int | None
    replan: bool
    costs: StageCosts | None
    check: Check
    tiered: Tiered | None = None
    graph: GraphStages | None = None  # of a model that TorchDynamo captured
    plan: Plan | None = None
    checked: Checked | None = None
    functions: Scope | None = None  # of stages that are no modules
    whole: Scope | None = None  # of all stages
    facts: tuple[int, Facts] | None = None  # of what the scope held last, by its number
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of the last call
    watch: Watch = field(default_factory=Watch)
    # By kind of input; the latest first.
    known: OrderedDict[Kind, Planned] = field(default_factory=OrderedDict)

    def refers_to(self) -> list[Call]:
        """Return the stages that are no modules; see `Scope`."""
        return [c for c in self.calls if not isinstance(c, (str, nn.Module))]

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        # Profiles point at modules and at devices: a copy profiles again.
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        empty: dict[str, object] = {
            "known": OrderedDict(),
            "plan": None,
            "checked": None,
            "functions": None,
            "whole": None,
            "facts": None,
            "watch": Watch(),
        }
        return None, {**state, **empty}  # as of a class with slots


class LimitedModule(nn.Module):
    """A chain that trains within a limit, as planning and running see it.

    All that is not `nn.Module`'s is under one name, so that a model may use every other.
    """

    _multistage: Limited


def stages_of(sequential: LimitedModule) -> list[Call]:
    """Return the stages of a chain."""
    chain, modules = sequential._multistage, sequential._modules
    return [modules[c] if isinstance(c, str) else c for c in chain.calls]  # type: ignore[misc]


def names_of(sequential: LimitedModule) -> list[str]:
    """Return a name for each stage of a chain."""
    chain, modules = sequential._multistage, sequential._modules
    if chain.graph is not None:
        return [stage.name for stage in chain.graph]
    return [
        f"{c} {type(modules[c]).__name__}"
        if isinstance(c, str)
        else getattr(c, "__name__", type(c).__name__)
        for c in chain.calls
    ]


def use(chain: Limited, planned: Planned) -> None:
    """Make a plan and its check those of the chain."""
    chain.plan, chain.checked = planned.plan, planned.checked


def replaced(chain: Limited, planned: Planned, anew: Planned) -> Planned:
    """Put another plan in the place of one that is known; return it, in use."""
    for kind, each in chain.known.items():
        if each is planned:
            chain.known[kind] = anew
    use(chain, anew)
    return anew


def run_plain(sequential: LimitedModule, state: object) -> object:
    """Run without a plan; a captured graph runs whole."""
    graph = sequential._multistage.graph
    if graph is not None:
        return graph.plainly(state)
    for stage in stages_of(sequential):
        state = stage(state)
    return state


def whole(sequential: LimitedModule) -> Found:
    """Return what all stages refer to."""
    chain = sequential._multistage
    if chain.whole is None:
        chain.whole = Scope([sequential])
    return chain.whole.look()


def of_functions(sequential: LimitedModule) -> Found:
    """Return what stages that are no modules refer to."""
    chain = sequential._multistage
    if chain.functions is None:
        chain.functions = Scope(chain.refers_to())
    return chain.functions.look()


def kind_of_call(model: LimitedModule, state: object, found: Found) -> Kind:
    """Return what a plan depends on: shapes, strides, dtypes, devices, wishes and modes.

    Those of parameters too: numbers of words have one dtype, whatever the model's.
    """
    leaves, spec = pytree.tree_flatten(state)
    of_leaves = tuple(
        (x.ndim, _gaps(x), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else type(x)
        for x in leaves
    )
    settings = Settings.capture(device_types(tensors_in(state)))
    facts = facts_of(model, found)
    wishes = tuple([p.requires_grad for p in facts.wanting])
    # Of tensors that are no parameters shapes may change at every call.
    of_parameters = tuple([(p.shape, p.dtype, p.device) for p in facts.parameters])
    family = str(spec), of_leaves, settings, facts.modes, hash(wishes), hash(of_parameters)
    return Kind(family, tuple([n for x in leaves if isinstance(x, torch.Tensor) for n in x.shape]))


def _gaps(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that is not contiguous: stages may copy it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return None
    return tensor.stride()


def facts_of(model: LimitedModule, found: Found) -> Facts:
    """Return what is known of the model, renewed after a change of mode or number."""
    chain = model._multistage
    if chain.facts is not None and chain.facts[0] == found.number:
        return chain.facts[1]
    functions = of_functions(model)
    modes = hash(tuple(m.training for m in (*model.modules(), *functions.modules)))
    wanting = [*model.parameters(), *functions.tensors]
    parameters = [p for p in wanting if isinstance(p, nn.Parameter) and not is_lazy(p)]
    facts = Facts(modes, wanting, parameters, is_collective(model))
    # Neither modes of scripted modules nor results of runs are remembered.
    if not found.scripted and len(parameters) == len(wanting):
        chain.facts = found.number, facts
    return facts


def is_collective(model: nn.Module) -> bool:
    """Whether ranks run stages together (FSDP2, SyncBatchNorm) and must follow one plan."""
    return sharded(model.parameters()) or any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    )
