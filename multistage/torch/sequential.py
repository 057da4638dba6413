"""`Sequential`: an `nn.Sequential` that trains within a memory limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from ..limits import default_budget_bytes
from ..plan.heterogeneous import ChainPlan, Strategy, plan_chain
from ..stages import StageCosts
from .chain import Part, Stages
from .checking import Check, Checked, check_chain, checked_choice, room_for_tapes
from .exploring import tensors_of
from .measure import Profile, grouped, measure, sharded
from .randomness import device_types, refuse_hidden_draws
from .runner import Run
from .settings import Settings
from .tracing import arguments

Call = Callable[[Any], Any]
# Of the memory that is free on a CUDA device, where no limit is given.
_DEVICE_SHARE = 0.9
# Kinds of input whose plans are remembered.
_KINDS = 64


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is known of inputs of one kind."""

    profile: Profile
    plan: ChainPlan
    checked: Checked


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
    strategy : {"optimal", "revolve", "periodic", "store-all"}
        See `multistage.plan_chain`.
    segments : int, optional
        For `periodic`.
    costs : StageCosts, optional
        Plan for these, as saved by `profile`, in place of measured ones.
    replan : bool
        Whether inputs of another kind (shapes, dtypes, modes) are profiled
        when they come; else they are an error.
    check : {"error", "warn", "off"}
        Whether the model and the chain are run once each, when inputs of a kind
        are first planned for, and compared bit for bit; if they differ, raise
        StateError, or issue a DifferenceWarning.  See `checked`.

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
    (`multistage.torch.environment` tells the rules).  Double backward through
    recomputed stages is an error; a second backward (`retain_graph=True`) is
    right, and slower.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[Call],
        sample_input: Any = None,
        memory: int | str | float | None = None,
        *,
        strategy: Strategy = "optimal",
        segments: int | None = None,
        costs: StageCosts | None = None,
        replan: bool = True,
        check: Check = "error",
    ) -> None:
        super().__init__()
        self._check = checked_choice(check)
        self._calls = self._register(model)
        if not self._calls:
            raise ArgumentError("a chain needs at least one stage")
        self.memory = memory
        self.strategy: Strategy = strategy
        self.segments = segments
        self.replan = replan
        self.plan: ChainPlan | None = None
        self.checked: Checked | None = None
        self._given_costs = costs
        self._known: OrderedDict[object, _Planned] = OrderedDict()
        if sample_input is not None:
            self.prepare(sample_input)

    def _register(self, model: nn.Sequential | Sequence[Call]) -> list[str | Call]:
        """Register what has parameters; return the names of children, and plain callables."""
        if isinstance(model, Stages):
            # Its stages are parts of one model, which keeps its names.
            for name, child in model.model._modules.items():
                self.add_module(name, child)
            for name, parameter in model.model._parameters.items():
                self.register_parameter(name, parameter)
            for name, buffer in model.model._buffers.items():
                kept = name not in model.model._non_persistent_buffers_set
                self.register_buffer(name, buffer, persistent=kept)
            self.training = model.model.training
            return list(model)
        calls: list[str | Call] = []
        if isinstance(model, nn.Sequential):
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
                self.add_module(name, stage)
                calls.append(name)
            else:
                calls.append(stage)
        return calls

    # ------------------------------------------------------------- the stages

    def stages(self) -> list[Call]:
        """Return the stages as given."""
        return [self._modules[c] if isinstance(c, str) else c for c in self._calls]  # type: ignore[misc]

    def stage_names(self) -> list[str]:
        """Return a name for each stage."""
        return [
            f"{c} {type(self._modules[c]).__name__}"
            if isinstance(c, str)
            else c.name
            if isinstance(c, Part)
            else getattr(c, "__name__", type(c).__name__)
            for c in self._calls
        ]

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.stages())

    def __getitem__(self, index: int) -> Call:
        return self.stages()[index]

    # --------------------------------------------------------------- planning

    def prepare(self, sample_input: Any) -> ChainPlan:
        """Profile and plan for inputs like this one; return the plan.

        Where `torch.distributed` is at work every rank must call it, and all
        take the plan of rank 0.  Chains of sharded parameters (FSDP2) do so at
        their first call too.
        """
        with torch.enable_grad():
            return self._planned(_kind(self, sample_input), sample_input, together=True).plan

    def _planned(self, kind: object, state: Any, *, together: bool = False) -> _Planned:
        known = self._known.get(kind)
        if known is None:
            if self._known and not self.replan:
                raise ArgumentError(
                    "the input is of another kind (shapes, dtypes, devices, modes) than the one "
                    "planned for; call prepare() with a sample of it, or use replan=True"
                )
            profile = measure(self.stages(), self.stage_names(), state, costs=self._given_costs)
            if together:
                profile = _of_rank_0(profile)
            plan = plan_chain(
                held_by_caller(profile.costs),
                self._limit(state),
                self.strategy,
                segments=self.segments,
            )
            checked = self._compared(profile, plan, state)
            known = self._known[kind] = _Planned(profile, plan, checked)
            if len(self._known) > _KINDS:
                self._known.popitem(last=False)
        self._known.move_to_end(kind)
        self.plan, self.checked = known.plan, known.checked
        return known

    def _compared(self, profile: Profile, plan: ChainPlan, state: Any) -> Checked:
        """Run the model and the chain once each, and compare."""
        stages = self.stages()
        first = stages[0]
        model = first.model if isinstance(first, Part) else None
        if self._check == "off":
            return Checked("off")
        if plan.keeps_all and model is None:
            return Checked("equal; nothing is run again")
        if _collective(self):
            return Checked("not checked; ranks run these stages together")
        return check_chain(
            self._model,
            lambda given: self._run(profile, plan, given),
            state,
            name=type(self if model is None else model).__name__,
            stages=stages if model is None else [model, *stages],
            room_bytes=room_for_tapes(profile, stages, plan.memory_bytes),
            writes=profile.traits[0].changes_input,
            check=self._check,
        )

    def _limit(self, state: Any) -> int | str | float | None:
        if self.memory is not None or self.strategy == "store-all":
            return self.memory
        tensors = [*tensors_of(state), *self.parameters()]
        for tensor in tensors:
            if tensor.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(tensor.device)
                idle = torch.cuda.memory_reserved(tensor.device)
                idle -= torch.cuda.memory_allocated(tensor.device)
                return int(_DEVICE_SHARE * (free + idle))
        return default_budget_bytes()

    # ---------------------------------------------------------------- running

    def forward(self, state: Any) -> Any:
        wanting = torch.is_grad_enabled() and (
            any(t.requires_grad for t in tensors_of(state))
            or any(p.requires_grad for p in self.parameters())
        )
        if not wanting:
            return self._model(state)
        known = self._planned(_kind(self, state), state, together=_collective(self))
        return self._run(known.profile, known.plan, state)

    def _model(self, state: Any) -> Any:
        """Run what the chain was made of, plainly."""
        stages = self.stages()
        first = stages[0]
        if isinstance(first, Part):  # its model serves every shape and mode
            positional, named = arguments(state)
            return first.model(*positional, **named)
        return _plain(stages, state)

    def _run(self, profile: Profile, plan: ChainPlan, state: Any) -> Any:
        """Run the chain by a plan."""
        stages = self.stages()
        if plan.keeps_all:
            return _plain(stages, state)
        refuse_hidden_draws([self], "the chain")
        return Run(grouped(stages, profile.groups), profile.traits, plan.actions).forward(state)

    # -------------------------------------------------------- as other modules

    def train(self, mode: bool = True) -> Sequential:
        super().train(mode)
        for call in self._calls:
            if isinstance(call, Part):  # whose model, no child of this, is not told
                call.model.training = mode
        return self

    def extra_repr(self) -> str:
        return f"memory={self.memory!r}, strategy={self.strategy!r}"

    def __getstate__(self) -> dict[str, Any]:
        # Profiles point at modules and at devices: a copy profiles anew.
        return {**self.__dict__, "_known": OrderedDict(), "plan": None, "checked": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequential:
        from copy import deepcopy

        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.__getstate__(), memo))
        return copy


def held_by_caller(costs: StageCosts) -> StageCosts:
    """Return the costs with the chain's output counted with its input.

    Whoever called the chain holds the output, for the loss, all through the
    backward pass.
    """
    last = costs.stages[-1]
    held = replace(
        last,
        output_bytes=0,
        tape_bytes=last.tape_bytes - last.output_bytes,
        gradient_bytes=last.gradient_bytes,
    )
    return replace(
        costs,
        stages=(*costs.stages[:-1], held),
        input_bytes=costs.input_bytes + last.output_bytes,
    )


def _plain(stages: Sequence[Call], state: Any) -> Any:
    for stage in stages:
        state = stage(state)
    return state


def _kind(model: nn.Module, state: Any) -> object:
    """Return what a plan depends on: shapes, dtypes, devices, wishes and modes."""
    leaves, spec = pytree.tree_flatten(state)
    of_leaves = tuple(
        (tuple(x.shape), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor)
        else type(x)
        for x in leaves
    )
    settings = Settings.capture(device_types(tensors_of(state)))
    modes = hash(tuple((m.training) for m in model.modules()))
    wishes = hash(tuple(p.requires_grad for p in model.parameters()))
    return str(spec), of_leaves, settings, modes, wishes


def _collective(model: nn.Module) -> bool:
    """Whether ranks run stages together (FSDP2, SyncBatchNorm) and must follow one plan."""
    return sharded(model.parameters()) or any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    )


def _of_rank_0(profile: Profile) -> Profile:
    """Return the profile with rank 0's costs, so that all ranks run the same plan."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return profile
    box = [profile.costs]
    distributed.broadcast_object_list(box, src=0)
    return replace(profile, costs=box[0])
