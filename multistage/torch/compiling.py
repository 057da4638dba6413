"""`compile`: a model that TorchDynamo captures whole, trained within a memory limit.

TorchDynamo captures what a call of the model does as a graph, and guards what the graph depends
on: where a guard fails, another graph is captured.  A graph is cut into stages (`tracing`), which
are pure functions, and a chain of stages is planned and run as `Sequential` runs one.
"""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..backends.urls import Tiers
from ..errors import ArgumentError, BudgetError, CheckpointWarning
from ..model.budget import Budget
from ..planners import Plan
from ..planners.chain.heterogeneous import ChainPlanner
from ..support.units import format_bytes
from .adopting import InFront, YieldingProperty, yielding
from .environment.captured import Snapshot
from .environment.scope import Scope
from .environment.states import tensors_in
from .environment.turns import TURN, unseen
from .measurement.checking import Check, Checked, checked_choice
from .measurement.exploring import fresh_copy
from .measurement.saved import Saved
from .planning.calls import ChainCall
from .planning.choosing import least_of
from .planning.limited import Limited, LimitedModule
from .sequential import refuse_wrapped, tiered_by
from .tiers.tiered import Tiered
from .tracing.captured import GraphStages
from .tracing.functions import saving_as_functions_do
from .tracing.observing import storage_of

_FILE = "<multistage>"  # no file of ours, which Dynamo is told to leave alone
_numbers = itertools.count()  # of functions for Dynamo, which counts graphs by their code


def compile(
    model: Callable[..., object],
    *,
    memory: int | str | float | None = None,
    tiers: Tiers | None = None,
    planner: ChainPlanner = "optimal",
    segments: int | None = None,
    check: Check = "error",
    dynamic: bool = False,
    allow_breaks: bool = False,
) -> Compiled:
    """Return a model that trains within a memory limit, bit-identical to the captured model.

    The first call is captured by TorchDynamo, measured, planned and checked; so is each call
    for which a guard of the captured graphs fails (other shapes, modes, attributes, globals),
    as `torch.compile` recompiles.  Outputs, gradients, buffers and random numbers are those
    of `torch.compile(model, backend="eager")`, and of the model itself unless it asks
    whether it is compiled.

    Parameters
    ----------
    model : nn.Module or callable
        It must be captured whole.  Its parameters and buffers stay its own.
    memory, tiers, planner, segments, check
        As for `Sequential`.  The limit is that of one call: from its inputs to its outputs,
        both included, parameters and their gradients not.
    dynamic : bool
        Whether one graph is to serve other shapes too.  It is planned for each of them.
    allow_breaks : bool
        Whether code between graphs may run as it is.  `memory` is a fraction then: each graph
        runs within that of its own plain training.  What autograd holds for the code between
        them is beyond the limit; `outside_bytes` is measured at the first call, and at the next
        one after each further capture, and a warning tells it.

    Raises
    ------
    ArgumentError
        For models that cannot be served; when called, if the model cannot be captured
        whole, or has been captured more often than `torch._dynamo.config.recompile_limit`
        allows: what runs outside of a graph would be beyond the limit.
    BudgetError
        When called, if the limit is too small; the message names the smallest that works.
    Exception
        When called, whatever the model itself raises.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> class Residual(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = torch.nn.Linear(32, 32)
    ...     def forward(self, x):
    ...         return x + torch.tanh(self.linear(x))
    >>> model = mst.compile(torch.nn.Sequential(*[Residual() for _ in range(8)]), memory=0.7)
    >>> model(torch.randn(64, 32)).sum().backward()
    >>> model.plan.peak_bytes <= model.plan.memory_bytes
    True
    """
    _refuse(model)
    if allow_breaks and not (memory and Budget.parse(memory, of="stages").fraction):
        raise ArgumentError(
            f"allow_breaks=True needs memory as a fraction of plain training, not {memory!r}: how "
            "many graphs there are to share bytes shows only when the model runs"
        )
    given = Settings.of(memory, tiers, planner, segments, check)
    return Compiled(model, given, dynamic, allow_breaks)


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Return a captured graph that runs within a memory limit: `torch.compile`'s backend.

    It is registered as "multistage"::

        torch.compile(model, backend="multistage", fullgraph=True, options={"memory": "4 GiB"})

    Parameters
    ----------
    graph, example_inputs
        Given by TorchDynamo.
    options : mapping, optional
        `memory`, `tiers`, `planner`, `segments` and `check` of `compile`.  Each graph opens
        tiers of its own, and closes them when it is collected.

    Raises
    ------
    ArgumentError
        For other options, and without `fullgraph=True`: what runs between two graphs would be
        beyond the limit, unseen.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    given: dict[str, Any] = dict(options or {})
    unknown = given.keys() - {"memory", "tiers", "planner", "segments", "check"}
    if unknown:
        raise ArgumentError(
            f"the backend 'multistage' does not know the options {sorted(unknown)}; it takes "
            "memory, tiers, planner, segments and check"
        )
    if not InstructionTranslator.current_tx().one_graph:
        raise ArgumentError(
            "the backend 'multistage' needs torch.compile(..., fullgraph=True): what runs between "
            "two graphs would be beyond the memory limit"
        )
    return _Graph(graph, Settings.of(**given), Used())


@dataclass(frozen=True, slots=True)
class Settings:
    """What the chains of all graphs of a model have in common."""

    memory: int | str | float | None
    planner: ChainPlanner
    segments: int | None
    check: Check
    tiered: Tiered | None = None

    @classmethod
    def of(
        cls,
        memory: int | str | float | None = None,
        tiers: Tiers | None = None,
        planner: ChainPlanner = "optimal",
        segments: int | None = None,
        check: Check = "error",
    ) -> Settings:
        """Return what arguments of `compile` say."""
        planner = "optimal" if planner == "auto" else planner
        return cls(memory, planner, segments, checked_choice(check), tiered_by(tiers, planner))


@dataclass(slots=True)
class Used:
    """What has run of a model.

    Attributes
    ----------
    chains : list of Chain
        The latest last.
    graphs : int
        That were captured.
    calls : int
        Of any graph.
    inside : bool
        Whether one runs now.
    """

    chains: list[Chain] = field(default_factory=list)
    graphs: int = 0
    calls: int = 0
    inside: bool = False

    def use(self, chain: Chain) -> None:
        """Take note of the chain that runs."""
        self.chains = [*(c for c in self.chains if c is not chain), chain]


class Compiled(InFront):
    """A model that trains within a memory limit: what `compile` returns.

    Its parameters, buffers, children, attributes, mode and state dict are the model's.

    Attributes
    ----------
    plan : Plan or None
        The plan used last; None before the first.
    plans : list of Plan
        Those of all captured graphs, each the one it used last; the latest last.
    checked : Checked or None
        The result of the check for the plan used last.
    outside_bytes : int or None
        That autograd holds for code between graphs, where `allow_breaks` permits any.
    """

    def __new__(cls, model: Callable[..., object], *_: object) -> Self:
        """Return one of a class of its own, whose `forward` has the model's signature.

        By that trainers choose what they pass.
        """

        @wraps(cls.forward)
        def forward(self: Compiled, *args: object, **kwargs: object) -> object:
            return cls.forward(self, *args, **kwargs)

        with suppress(TypeError, ValueError):  # not every callable has one
            of_model = signature(model.forward if isinstance(model, nn.Module) else model)
            first = Parameter("_self", Parameter.POSITIONAL_ONLY)
            given = [first, *of_model.parameters.values()]
            vars(forward)["__signature__"] = of_model.replace(parameters=given)
        return super().__new__(type(cls.__name__, (cls,), {"forward": forward}))

    def __init__(
        self, model: Callable[..., object], settings: Settings, dynamic: bool, breaks: bool
    ) -> None:
        super().__init__(model if isinstance(model, nn.Module) else nn.Module())
        vars(self)["_multistage_model"] = model  # not a child
        vars(self)["_multistage_given"] = settings, dynamic, breaks
        vars(self)["_multistage_used"] = used = Used()
        vars(self)["_multistage_call"] = torch.compile(
            _function_of(model),
            backend=lambda graph, _: _Graph(graph, settings, used),
            fullgraph=not breaks,
            dynamic=dynamic,
        )
        vars(self)["_multistage_outside"] = _Outside(used) if breaks else None

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return what the model returns."""
        from torch._dynamo import exc

        call: Callable[..., object] = vars(self)["_multistage_call"]
        name = _name_of(vars(self)["_multistage_model"])
        used: Used = vars(self)["_multistage_used"]
        outside: _Outside | None = vars(self)["_multistage_outside"]
        if _is_below_modes():
            # TorchDynamo would skip this call, and each after it.
            raise ArgumentError(_without_graph(name))
        before, uncaptured, result = used.calls, None, None
        seen = nullcontext() if outside is None else outside.seen(name)
        try:
            with TURN.taken(), _strictly(), seen:  # TorchDynamo counts frames for all threads
                result = call(*args, **kwargs)
        except exc.FailOnRecompileLimitHit as error:
            raise ArgumentError(
                f"{name} was captured for {torch._dynamo.config.recompile_limit} kinds of calls, "
                "and this is another, which torch.compile would run without a graph: pad inputs "
                "to fewer shapes, give compile(dynamic=True), or raise "
                "torch._dynamo.config.recompile_limit"
            ) from error
        except (exc.Unsupported, exc.UserError, exc.TorchRuntimeError) as error:
            uncaptured = error
        except RuntimeError as error:
            if "no compiled frames" not in str(error):
                raise
            raise ArgumentError(_without_graph(name)) from error
        if uncaptured is not None:
            if _may_fail(uncaptured):
                _fail_as_plain(vars(self)["_multistage_model"], args, kwargs)
            raise ArgumentError(_why_uncaptured(name, uncaptured)) from uncaptured
        if used.calls == before:  # before torch 2.12, which says so itself
            raise ArgumentError(_without_graph(name))
        return result

    @YieldingProperty
    def plan(self) -> Plan | None:
        """Return the plan used last; None before the first."""
        chains = vars(self)["_multistage_used"].chains
        return chains[-1]._multistage.plan if chains else None

    @YieldingProperty
    def plans(self) -> list[Plan]:
        """Return the plans of all captured graphs, the latest last."""
        used: Used = vars(self)["_multistage_used"]
        found = [chain._multistage.plan for chain in used.chains]
        return [plan for plan in found if plan is not None]

    @YieldingProperty
    def checked(self) -> Checked | None:
        """Return what the check for the plan used last found."""
        chains = vars(self)["_multistage_used"].chains
        return chains[-1]._multistage.checked if chains else None

    @YieldingProperty
    def outside_bytes(self) -> int | None:
        """Return the bytes that autograd was seen to hold for code between graphs."""
        outside: _Outside | None = vars(self)["_multistage_outside"]
        return None if outside is None else outside.nbytes

    @yielding
    def close(self) -> None:
        """Close the tier: stop its thread, remove its files.  It is opened again if need be."""
        settings, *_ = vars(self)["_multistage_given"]
        if settings.tiered is not None:
            settings.tiered.close()

    def extra_repr(self) -> str:
        """Return the limit and the planner."""
        settings, *_ = vars(self)["_multistage_given"]
        return f"memory={settings.memory!r}, planner={settings.planner!r}"

    def __deepcopy__(self, memo: dict[int, object]) -> Compiled:
        settings, *others = vars(self)["_multistage_given"]
        settings = replace(settings, tiered=deepcopy(settings.tiered, memo))
        return Compiled(deepcopy(vars(self)["_multistage_model"], memo), settings, *others)

    def __reduce__(self) -> tuple[object, ...]:
        return Compiled, (vars(self)["_multistage_model"], *vars(self)["_multistage_given"])


class Chain(LimitedModule):
    """The stages of one captured graph, and the plans for its calls.

    Its children are the stages, whose parameters and buffers are arguments of the graph.
    """

    def __init__(self, stages: GraphStages, settings: Settings) -> None:
        super().__init__()
        for number, stage in enumerate(stages):
            self._modules[str(number)] = stage
        calls, s = list(self._modules), settings
        self._multistage = Limited(
            calls, s.memory, s.planner, s.segments, True, None, s.check, s.tiered, stages
        )
        self.stages = stages

    def knows(self, arguments: Sequence[object]) -> bool:
        """Whether it has a plan for such arguments."""
        with TURN.taken():
            return ChainCall(self, self.stages.bind(arguments)).kind in self._multistage.known

    def run(self, arguments: Sequence[object]) -> object:
        """Run the graph by the plan for its arguments."""
        stages = self.stages
        with TURN.taken():  # TorchDynamo gives modules that are alike one graph
            state = stages.bind(arguments)
            refuse_wrapped(state)
            output: Any = ChainCall(self, state).result()
        if stages.leaves_graded is not None:  # for what follows a break
            torch._C._set_grad_enabled(stages.leaves_graded)
        return stages.result(arguments, output)


class _Graph:
    """A captured graph as TorchDynamo calls it."""

    def __init__(self, graph: fx.GraphModule, settings: Settings, used: Used) -> None:
        saving_as_functions_do(graph)
        self._graph, self._settings, self._used = graph, settings, used
        used.graphs += 1
        self._static = [
            "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
            for node in graph.graph.nodes
            if node.op == "placeholder"
        ]
        self._chains: dict[tuple[bool, ...], Chain] = {}
        self._finer: dict[tuple[bool, ...], Chain] = {}  # where one of those refuses an input

    def __call__(self, *arguments: object) -> object:
        """Run it, within the limit if a gradient is wanted."""
        self._used.calls += 1
        before, self._used.inside = self._used.inside, True
        try:
            return self._run(arguments)
        finally:
            self._used.inside = before

    def _run(self, arguments: tuple[object, ...]) -> object:
        wants = any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        if not (wants and torch.is_grad_enabled()):
            return self._graph.forward(*arguments)
        own = tuple(
            [
                isinstance(x, nn.Parameter)
                or (static and isinstance(x, Tensor) and not x.requires_grad)
                for x, static in zip(arguments, self._static, strict=True)
            ]
        )
        if own not in self._chains:
            self._chains[own] = self._cut(arguments, own)
        chain, finer = self._chains[own], self._finer.get(own)
        if finer is not None and finer.knows(arguments):  # since the other refused them
            chain = finer
        self._used.use(chain)
        try:
            return chain.run(arguments)
        except BudgetError as error:
            if chain.stages.is_finest or error.least_bytes is None:  # it names one before it runs
                raise
            refused = error.with_traceback(None)  # which holds the tensors of the call
        finer = finer or self._cut(arguments, own, finely=True)
        try:
            result = finer.run(arguments)
        except BudgetError as error:
            raise min(refused, error, key=least_of) from None
        self._finer[own] = finer
        self._used.use(finer)
        return result

    def _cut(
        self, arguments: tuple[object, ...], own: tuple[bool, ...], *, finely: bool = False
    ) -> Chain:
        with unseen():
            stages = GraphStages(self._graph, arguments, own, finely=finely)
        return Chain(stages, self._settings)


class _Outside:
    """Counts what autograd holds for code that runs outside of graphs.

    Attributes
    ----------
    nbytes : int or None
        The most that was seen; None before the first call.
    """

    def __init__(self, used: Used) -> None:
        self._used, self._counted = used, -1  # graphs, when it counted last
        self.nbytes: int | None = None

    @contextmanager
    def seen(self, name: str) -> Iterator[None]:
        """Count in a call of a model, where graphs were captured since the last count."""
        used = self._used
        if self._counted == used.graphs or not torch.is_grad_enabled():
            yield
            return
        graphs, before = used.graphs, used.calls
        found: dict[int, int] = {}
        storages: list[StorageWeakRef] = []  # so that no address is used again

        def see(tensor: Tensor) -> None:
            storage = None if used.inside else storage_of(tensor)
            if storage is not None and not (tensor.is_leaf and tensor.requires_grad):
                storages.append(storage)
                found[storage.cdata] = tensor.untyped_storage().nbytes()

        try:
            with Saved(see, through=True):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # which torch.func does not support
                raise
            raise ArgumentError(
                f"{name} computes gradients by torch.func, beside which what autograd holds for "
                "code between graphs cannot be counted; use torch.autograd.grad, or remove the "
                "breaks and allow_breaks=True"
            ) from error
        self._counted = graphs
        nbytes, graphs = sum(found.values()), used.calls - before
        self.nbytes = max(self.nbytes or 0, nbytes)
        if nbytes or graphs > 1:
            warnings.warn(
                f"{name} ran in {graphs} graphs; autograd holds {nbytes} bytes "
                f"({format_bytes(nbytes)}) for the code between them, beyond the memory limit",
                CheckpointWarning,
                stacklevel=4,
            )


def _function_of(model: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls a model, of code of its own."""
    if isinstance(model, nn.Module):

        def call(*args: object, **kwargs: object) -> object:
            return model.forward(*args, **kwargs)  # hooks of the model are called around it
    else:

        def call(*args: object, **kwargs: object) -> object:
            return model(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{next(_numbers)}", co_filename=_FILE)
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)


@contextmanager
def _strictly() -> Iterator[None]:
    """Let TorchDynamo guard hooks of modules, and capture whole what DistributedDataParallel runs.

    By default it does not see hooks that modules without any are given after a capture, and runs
    code that it has captured too often without a graph, where breaks are allowed.
    """
    config: Any = torch._dynamo.config
    ours = {
        "skip_nnmodule_hook_guards": False,
        "optimize_ddp": False,
        "fail_on_recompile_limit_hit": True,
    }
    before = {key: getattr(config, key) for key in ours}
    for key, value in ours.items():
        setattr(config, key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            setattr(config, key, value)


def _refuse(model: object) -> None:
    """Refuse what cannot be captured whole."""
    name = _name_of(model)
    if not callable(model):
        raise ArgumentError(f"{name} is no model: compile takes a module or a function")
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    if isinstance(model, parallel):
        raise ArgumentError(
            f"compile the model inside of {name}: {name}(multistage.torch.compile(model, ...))"
            if isinstance(model, parallel[1])
            else "DataParallel runs copies of the model in threads; use DistributedDataParallel"
        )
    if isinstance(model, (LimitedModule, Compiled)):
        raise ArgumentError(f"{name} has a memory limit already; give compile the model itself")
    if isinstance(model, (torch.jit.ScriptModule, torch._dynamo.OptimizedModule)):
        raise ArgumentError(f"{name} was compiled already; give compile the model itself")
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    if any(isinstance(module, Compiled) for module in modules):
        raise ArgumentError(f"{name} has a compiled model inside; give compile either alone")
    if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
        raise ArgumentError(
            f"{name} has SyncBatchNorm, by which ranks run stages together; use Sequential"
        )
    fsdp: Any = getattr(torch.distributed, "fsdp", None)  # if imported, which is slow
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules[1:]):
        raise ArgumentError(
            f"{name} has modules that fully_shard gathers parameters for, by which ranks run "
            "stages together: use Sequential, or fully_shard what compile returns alone"
        )


def _name_of(model: object) -> str:
    return str(getattr(model, "__name__", type(model).__name__))


def _is_below_modes() -> bool:
    """Whether TorchDynamo would skip a call, for dispatch modes around it in this thread.

    torch's own function for it tells of those of other threads, too.  Early versions skip a
    call for any mode.
    """
    stack = _get_current_dispatch_mode_stack()
    return not all(getattr(mode, "ignore_compile_internals", bool)() for mode in stack)


def _without_graph(name: str) -> str:
    return (
        f"{name} ran without a graph, beyond the memory limit: it calls no operation of torch, or "
        "TorchDynamo is turned off (TORCHDYNAMO_DISABLE, torch._dynamo.config.disable, a torch "
        "dispatch mode around the call, such as FlopCounterMode)"
    )


def _may_fail(error: Exception) -> bool:
    """Whether a model was not captured because its own code raises an exception."""
    said = str(error)
    return "when running in eager" in said or "assertion failed" in said


def _fail_as_plain(
    model: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Raise what a model raises without a capture; else leave all as it is."""
    given = fresh_copy((args, kwargs))
    with Snapshot(Scope([model]), tensors_in(given)), torch.no_grad():
        model(*given[0], **given[1])


def _why_uncaptured(name: str, error: Exception) -> str:
    """Return why a model was not captured whole, and the line."""
    frames = [f for f in getattr(error, "real_stack", None) or () if f.filename != _FILE]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    lines = [line.strip() for line in str(getattr(error, "msg", error)).splitlines()]
    explained = [x.removeprefix("Explanation:").strip() for x in lines if "Explanation:" in x]
    cause = next(filter(None, explained), lines[0])
    if cause.endswith(":"):  # a list follows
        cause = next((x.removeprefix("- ") for x in lines if x.startswith("- ")), cause)
    # Of TorchDynamo's hints, those that name a setting, such as which functions only log.
    hints = [x for x in lines if x.startswith("Hint:") and "torch._dynamo.config." in x]
    own = "".join(f"; TorchDynamo's hint: {x.removeprefix('Hint:').strip(' .')}" for x in hints)
    return (
        f"{name} cannot be captured whole{where}: {cause.rstrip('.')}; what runs outside of a "
        "graph would be beyond the memory limit: write this line with operations of torch, move "
        "it out of the model, give compile(allow_breaks=True), which counts what it holds, or give "
        f"multistage.torch.Sequential a list of stages, which need not be captured{own}"
    )
