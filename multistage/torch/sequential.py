"""`Sequential`: an `nn.Sequential` that trains within a memory limit; `profile`: its costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..backends.urls import Tiers, open_store, tier_names
from ..errors import ArgumentError
from ..model.stages import StageCosts
from ..planners import Plan
from ..planners.chain.heterogeneous import ChainPlanner
from ..planners.chain.joint_core import require_core
from .adopting import YieldingProperty, adopt, yielding
from .environment.settings import uncompiled
from .environment.states import tensors_in
from .measurement.checking import Check, Checked, checked_choice
from .measurement.exploring import Call
from .measurement.measure import measure_stages
from .planning.calls import ChainCall
from .planning.limited import Limited, LimitedModule, names_of, run_plain, stages_of
from .tiers.tiered import Tiered


class Sequential(LimitedModule):
    """A chain of stages that trains within a memory limit, bit-identical to plain training.

    It measures the stages on the first input of a kind and chooses which tapes and
    states to keep and which stages to run again.  It then behaves as the plain chain:
    outputs, gradients, buffers and random numbers are bit-identical if operators are
    deterministic.

    Parameters
    ----------
    model : nn.Sequential, or sequence of modules and functions
        The stages; each takes the result of the one before, a pytree of
        tensors and other values.  Modules are registered as in `nn.Sequential`,
        so the state dict is that of the plain model.
    sample_input : pytree, optional
        A sample of the chain's input; with it, the chain is profiled and planned at
        once rather than at the first call.
    memory : int, str, float or None
        Limit for activations and their gradients on the device, from the
        chain's input to its output, both included: bytes, a string such as
        `"4 GiB"`, a fraction (a float up to 1) of the memory of plain training,
        or None for the free memory.  Parameters and their gradients are not part
        of it.
    planner : {"optimal", "auto", "revolve", "periodic", "store-all"}
        "auto" is "optimal". See `multistage.plan_chain`.
    segments : int, optional
        For `periodic`.
    costs : StageCosts, optional
        Plan with these costs, as saved by `profile`, instead of measured ones.
    replan : bool
        Whether inputs of another kind (shapes, dtypes, modes) are profiled when
        they first occur; otherwise they raise an error.
    check : {"error", "warn", "off"}
        Whether to run the model and the chain once each, when inputs of a kind are
        first planned for, and to compare them bit for bit; a difference raises
        StateError, or issues a DifferenceWarning.  See `checked`.
    tiers : str, Path or Store, or a sequence of them, optional
        A slow tier for tapes and states that do not fit, as for `unroll`: such as
        `"file:///scratch"`, `"pinned:8GiB"`, or a cascade of these.  Data is written there
        in the background while stages compute, and read back before it is needed;
        where this does not pay, stages run again.  The tier's buffers are part of a
        limit on host memory.  Only with planner "optimal".

    Attributes
    ----------
    plan : Plan or None
        The plan used last; None before the first.
    checked : Checked or None
        The result of the check for that plan, and the seconds it took.

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
    A stage that runs again finds the environment of its first run: parameters, buffers,
    attributes, modes, variables of closures, random generators and settings such as
    autocast, as the same objects with the same values, whatever has changed since.  A
    repeated run leaves no trace in counters, or in lists to which forward hooks append.
    A tensor that was written to since then raises an error
    (`multistage.torch.environment.captured` has the rules).  Double backward through
    recomputed stages raises an error; a second backward (`retain_graph=True`) is
    supported, but slower.

    A tier is opened when a plan first uses it.  It stays open, with one thread and its
    files, until `close`, until the chain is collected, or until an exception is raised.
    Only `close` waits for a tier that has stopped answering; the other cases wait at most
    5 seconds.  Data that a tier loses is recomputed, with a CheckpointWarning.  A slow or
    full tier costs time only: if a write is late, tapes are dropped and recomputed
    (`plan.given_up` counts them), and the next iteration is planned for the observed
    speed of the tier.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[Call],
        sample_input: object = None,
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
        planner = "optimal" if planner == "auto" else planner
        tiered = tiered_by(tiers, planner)
        calls = self._register(model)
        if not calls:
            raise ArgumentError("a chain needs at least one stage")
        # All that is ours under one name, so that a model may use every other.
        self._multistage = Limited(calls, memory, planner, segments, replan, costs, check, tiered)
        if sample_input is not None:
            ChainCall(self, sample_input).prepared()

    def _register(self, model: nn.Sequential | Sequence[Call]) -> list[str | Call]:
        """Register what has parameters; return the names of children, and plain callables."""
        calls: list[str | Call] = []
        if isinstance(model, nn.Sequential):
            if type(model).forward is not nn.Sequential.forward or "forward" in vars(model):
                raise ArgumentError(
                    f"{type(model).__name__} has a forward of its own, which a chain of its "
                    "children would not call; give it to compile"
                )
            adopt(self, model)
            self.training = model.training
            # Not named_children, which leaves out what comes twice.
            named: list[tuple[str, Any]] = list(model._modules.items())
        elif isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
            raise ArgumentError(
                f"{type(model).__name__} is not a chain of stages; give an nn.Sequential, a list "
                "of stages, or give the model to multistage.torch.compile"
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
        """Return the stages."""
        return stages_of(self)

    def __len__(self) -> int:
        return len(stages_of(self))

    def __iter__(self) -> Iterator[Call]:
        return iter(stages_of(self))

    def __getitem__(self, index: int) -> Call:
        return stages_of(self)[index]

    # ---------------------------------------------------------------- settings

    @YieldingProperty
    def plan(self) -> Plan | None:
        """The plan used last; None before the first."""
        return self._multistage.plan

    @YieldingProperty
    def checked(self) -> Checked | None:
        """What the check for the plan used last found."""
        return self._multistage.checked

    @YieldingProperty
    def memory(self) -> int | str | float | None:
        """The limit that was given."""
        return self._multistage.memory

    @YieldingProperty
    def planner(self) -> ChainPlanner:
        """The planner that was given."""
        return self._multistage.planner

    @YieldingProperty
    def segments(self) -> int | None:
        """The number of segments that was given."""
        return self._multistage.segments

    @YieldingProperty
    def replan(self) -> bool:
        """Whether inputs of another kind are profiled when they come."""
        return self._multistage.replan

    # --------------------------------------------------------------- planning

    @yielding
    def prepare(self, *sample_input: object, **named: object) -> Plan:
        """Profile and plan for inputs like this one; return the plan.

        Takes what the chain is called with.  Where `torch.distributed` is at
        work every rank must call it, and all take the plan of rank 0.  Chains of
        sharded parameters (FSDP2) do so at their first call too.
        """
        return ChainCall(self, _state_of(sample_input, named)).prepared()

    @yielding
    def close(self) -> None:
        """Close the tier: stop its thread, remove its files.  It is opened again if need be."""
        if self._multistage.tiered is not None:
            self._multistage.tiered.close()

    # ---------------------------------------------------------------- running

    @uncompiled
    def forward(self, *args: object, **kwargs: object) -> object:
        """Return what the model returns.

        A chain of stages takes one state.
        """
        state = _state_of(args, kwargs)
        wanting = torch.is_grad_enabled() and (
            any(t.requires_grad for t in tensors_in(state))
            or any(p.requires_grad for p in self.parameters())
            or any(t.requires_grad for t in self._multistage.of_functions().tensors)
        )
        if not wanting:
            return run_plain(self, state)
        refuse_wrapped(state)
        return ChainCall(self, state).result()

    def extra_repr(self) -> str:
        """Return the limit and the planner."""
        chain = self._multistage
        return f"memory={chain.memory!r}, planner={chain.planner!r}"

    def __deepcopy__(self, memo: dict[int, object]) -> Sequential:
        from copy import deepcopy

        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        copy.__dict__.update(deepcopy(self.__dict__, memo))
        return copy


def profile(
    model: nn.Sequential | Sequence[Callable[..., object]] | Sequential,
    sample_input: object,
    *,
    seconds: float = 2.0,
) -> StageCosts:
    """Return the costs of each stage on a sample input.

    On the CPU bytes are an exact accounting of the storages that operations
    make and that graphs save; on CUDA they are the caching allocator's.  The
    input counts what it takes to run stages again besides (copies of the buffers
    they change, states of random generators).
    Stages of which one writes to its input are measured as one.

    Parameters
    ----------
    model : nn.Sequential, multistage.torch.Sequential, or sequence of stages
    sample_input : pytree
        What the chain is called with; tensors that require gradients are
        differentiated.
    seconds : float
        About how long to time; every stage is timed at least twice.

    Raises
    ------
    StateError
        If a stage changes state that could not be put back; it is named.

    Examples
    --------
    >>> import torch
    >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    >>> costs = profile(layers, torch.ones(4, 8))
    >>> [(stage.name, stage.output_bytes) for stage in costs.stages]
    [('0 Linear', 128), ('1 Tanh', 128)]
    """
    chain = model if isinstance(model, Sequential) else Sequential(model)
    found = measure_stages(stages_of(chain), names_of(chain), sample_input, seconds=seconds)
    return found.costs


# Not methods: their names belong to models.


def _state_of(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the chain's input from the arguments of a call."""
    if len(args) != 1 or kwargs:
        raise ArgumentError(
            f"a chain of stages takes one state, not {len(args)} arguments and "
            f"{len(kwargs)} keyword arguments; give a tuple or dict that its first stage takes"
        )
    return args[0]


def refuse_wrapped(state: object) -> None:
    """Raise ArgumentError for what stages cannot be measured on, or run again on."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ArgumentError(
            "a chain cannot run its stages again inside of torch.func (vmap, grad, jvp, ...); use "
            "torch.autograd, or nn.Sequential(*chain) where no limit is needed"
        )
    if any(t.is_nested for t in tensors_in(state)):
        raise ArgumentError(
            "the input has nested tensors, whose lengths are part of their shape and differ in "
            "each; give the chain padded tensors, or values and offsets apart"
        )


def tiered_by(tiers: Tiers | None, planner: ChainPlanner) -> Tiered | None:
    """Return the tier of some names, None if there is none.

    Raises
    ------
    ArgumentError
        For another planner than "optimal", which does not know tiers.
    """
    names = tier_names(tiers)
    if not names:
        return None
    if planner != "optimal":
        raise ArgumentError(f"tiers go with planner 'optimal', not with {planner!r}")
    require_core()
    for name in names:
        if isinstance(name, str) and name.partition(":")[0] == "pinned":
            continue
        open_store(name)  # says so now if there is no such tier
    return Tiered(names)
