"""What a chain within a memory limit is besides a module, and what is known of its inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from ...model.stages import StageCosts
from ...planners import Plan
from ...planners.chain.heterogeneous import ChainPlanner
from ..environment.scope import Found, Scope
from ..measurement.checking import Check, Checked
from ..measurement.exploring import Call
from ..measurement.joining import Running
from ..measurement.measure import Profile
from ..measurement.traits import Sizes
from ..measurement.watching import Seen, Watch
from ..tensors.meter import free_bytes
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
    collective: bool  # ranks run stages together (FSDP2, SyncBatchNorm) and follow one plan


@dataclass(slots=True)
class Limited:
    """What a `LimitedModule` is besides an `nn.Module`."""

    calls: Sequence[str | Call]
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

    @property
    def limit(self) -> int | str | float | None:
        """The memory limit: the one given, else that of the device."""
        if self.memory is not None or self.planner == "store-all":
            return self.memory
        return free_bytes(self.device)

    def refers_to(self) -> list[Call]:
        """Return the stages that are no modules; see `Scope`."""
        return [c for c in self.calls if not isinstance(c, (str, nn.Module))]

    def of_functions(self) -> Found:
        """Return what stages that are no modules refer to."""
        if self.functions is None:
            self.functions = Scope(self.refers_to())
        return self.functions.look()

    def use(self, planned: Planned) -> None:
        """Make a plan and its check those of the chain."""
        self.plan, self.checked = planned.plan, planned.checked

    def replaced(self, planned: Planned, anew: Planned) -> Planned:
        """Put another plan in the place of one that is known; return it, in use."""
        for kind, each in self.known.items():
            if each is planned:
                self.known[kind] = anew
        self.use(anew)
        return anew

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        # Profiles point at modules and at devices: a copy profiles again.
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        empty = dict.fromkeys(("plan", "checked", "functions", "whole", "facts"))
        return None, {**state, **empty, "known": OrderedDict(), "watch": Watch()}


class LimitedModule(nn.Module):
    """A chain that trains within a limit, as planning and running see it.

    All that is not `nn.Module`'s is under one name, so that a model may use every other.
    """

    _multistage: Limited


def stages_of(module: LimitedModule) -> list[Call]:
    """Return the stages of a chain."""
    chain, modules = module._multistage, module._modules
    return [modules[c] if isinstance(c, str) else c for c in chain.calls]  # type: ignore[misc]


def names_of(module: LimitedModule) -> list[str]:
    """Return a name for each stage of a chain."""
    chain, modules = module._multistage, module._modules
    if chain.graph is not None:
        return [stage.name for stage in chain.graph]
    return [
        f"{c} {type(modules[c]).__name__}"
        if isinstance(c, str)
        else getattr(c, "__name__", type(c).__name__)
        for c in chain.calls
    ]


def run_plain(module: LimitedModule, state: object) -> object:
    """Run without a plan; a captured graph runs whole."""
    graph = module._multistage.graph
    if graph is not None:
        return graph.plainly(state)
    for stage in stages_of(module):
        state = stage(state)
    return state
