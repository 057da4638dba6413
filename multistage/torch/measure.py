"""Measure the stages of a chain on a sample: seconds, bytes, and what else they do.

Parameter estimation of Beaumont et al. 2019 (RR-9302), section 5.1: each stage
runs forward and backward by itself, one after the other, on what the stage
before made of the sample.  Parameters, their gradients, buffers and the random
state are left as they were; forward hooks of the stages do run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from ..stages import Stage, StageCosts
from .exploring import Call, buffers_of, explore, fresh_copy, parameters_of, tensors_of, untouched
from .meter import Meter
from .runner import Traits

_MOST_ROUNDS = 50  # of timing a stage
_SHARDED_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Profile:
    """What `measure` found.

    Attributes
    ----------
    costs : StageCosts
        Of the groups.
    groups : tuple of tuple of int
        Stages that are run as one, because one writes to its input.
    traits : tuple of Traits
        Of the groups.
    """

    costs: StageCosts
    groups: tuple[tuple[int, ...], ...]
    traits: tuple[Traits, ...]


def grouped(stages: Sequence[Call], groups: Sequence[Sequence[int]]) -> list[Call]:
    """Return one callable per group of stages."""
    return [
        stages[group[0]] if len(group) == 1 else _Joined([stages[i] for i in group])
        for group in groups
    ]


class _Joined(nn.Module):
    """Stages run as one; registers them, for their modes, buffers and parameters."""

    def __init__(self, stages: Sequence[Call]) -> None:
        super().__init__()
        self._calls = list(stages)
        for number, stage in enumerate(stages):
            if isinstance(stage, nn.Module):
                self.add_module(str(number), stage)
        self.training = any(m.training for m in self.children())

    def forward(self, state: Any) -> Any:
        for stage in self._calls:
            state = stage(state)
        return state


def measure(
    stages: Sequence[Call],
    names: Sequence[str],
    sample: Any,
    *,
    seconds: float = 2.0,
    costs: StageCosts | None = None,
) -> Profile:
    """Profile stages on a sample.

    Parameters
    ----------
    stages : sequence of callables
        Each takes what the one before returned: a pytree of tensors and other
        values.
    names : sequence of str
    sample : pytree
        What the first stage takes; tensors that require gradients are
        differentiated.
    seconds : float
        About how long to time; every stage is timed at least three times.
    costs : StageCosts, optional
        Known already: then only what the stages do is looked at.

    Raises
    ------
    StateError
        If a stage changes state that cannot be put back; it is named.
    ArgumentError
        If `costs` are of another number of stages, or if sharded parameters have hooks
        on their gradients.
    """
    tensors = tensors_of(sample)
    device = _device([*tensors, *parameters_of(stages)])
    with untouched(stages, sample):
        groups, traits = explore(stages, names, sample)
        if costs is None:
            costs = _measure_groups(grouped(stages, groups), traits, sample, device, seconds)
        elif len(costs.stages) != len(groups):
            raise ArgumentError(
                f"costs of {len(costs.stages)} stages were given for a chain of {len(groups)} "
                f"({', '.join(trait.name for trait in traits)})"
            )
    return Profile(costs, groups, traits)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")


def _measure_groups(
    calls: Sequence[Call],
    traits: Sequence[Traits],
    sample: Any,
    device: torch.device,
    seconds: float,
) -> StageCosts:
    state = fresh_copy(sample)
    input_bytes = _bytes(tensors_of(sample)) + _bytes_to_run_again(traits, device)
    input_gradient = _bytes(t for t in tensors_of(sample) if t.requires_grad)
    stages = []
    share = seconds / len(calls)
    parameters = parameters_of(calls)
    with _gradients_put_back(parameters) if sharded(parameters) else contextlib.nullcontext():
        for call, trait in zip(calls, traits, strict=True):
            stage, state = _measure_stage(call, trait, state, device, share, parameters)
            stages.append(stage)
    return StageCosts(tuple(stages), input_bytes, input_gradient)


def _bytes_to_run_again(traits: Sequence[Traits], device: torch.device) -> int:
    """Return the bytes of what `replay` keeps of all stages: buffers and random states."""
    buffers = [
        sum(buffer.nbytes for m, k in trait.buffers if (buffer := m._buffers[k]) is not None)
        for trait in traits
    ]
    kept = sum(buffers) + max(buffers)  # exchanged for copies while a stage runs again
    if device.type == "cpu":  # where generators of devices keep theirs too
        kept += sum(trait.draws for trait in traits) * torch.get_rng_state().nbytes
    return kept


def _measure_stage(
    call: Call,
    trait: Traits,
    state: Any,
    device: torch.device,
    seconds: float,
    parameters: list[Tensor],
) -> tuple[Stage, Any]:
    given = tensors_of(state)
    own = {t.untyped_storage()._cdata for t in parameters}

    def fresh() -> Any:
        """Return the input: leaves, or copies of them for a stage that writes to it."""
        leaves = pytree.tree_map(
            lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x,
            state,
        )
        return leaves if not trait.changes_input else pytree.tree_map(_clone, leaves)

    def foreign(meter: Meter, inputs: Any) -> None:
        meter.ignore(parameters)
        meter.ignore(tensors_of(inputs))
        meter.ignore(given)
        meter.ignore(b for _, _, b in buffers_of(call))

    collective = sharded(parameters)
    stand_ins, run = ([], call) if collective else _with_stand_ins(call)
    # First, so that what libraries allocate once, their workspaces, is not counted.
    forward_s, spared_s, backward_s = _time(
        call, run, stand_ins, fresh, device, seconds, collective
    )

    inputs = fresh()
    with torch.no_grad(), Meter(device) as meter:
        foreign(meter, inputs)
        output = call(inputs)
        made = meter.live_bytes()
        advance_bytes = max(0, meter.peak_bytes - made)
        # A state that shares storage with the one before keeps it alive.
        output_bytes = _bytes(
            t for t in tensors_of(output) if t.untyped_storage()._cdata not in own
        )
        shared = max(0, output_bytes - made)
    del output, inputs

    inputs = fresh()
    wanted = [t for t in tensors_of(inputs) if t.requires_grad]
    with torch.enable_grad(), Meter(device) as meter:
        foreign(meter, inputs)
        meter.ignore(stand_ins)
        output = run(inputs)
        made = meter.live_bytes()
        taping_bytes = max(0, meter.peak_bytes - made)
        tape_bytes = max(made + shared, output_bytes)
        result = [t for t in tensors_of(output) if t.requires_grad]
        next_state = pytree.tree_map(_detached, output)
        gradients = [torch.ones_like(t, memory_format=torch.preserve_format) for t in result]
        gradient_bytes = _bytes(result)
        before = meter.live_bytes()
        meter.reset_peak()
        if result:
            del output
            hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in stand_ins]
            leaves = None if collective else [*wanted, *stand_ins] or None
            torch.autograd.backward(result, gradients, inputs=leaves)
            for hook in hooks:
                hook.remove()
        given_gradient = _bytes(t.grad for t in wanted if t.grad is not None)
        reverse_bytes = max(0, meter.peak_bytes - before - given_gradient)
    del wanted, result, gradients, inputs

    stage = Stage(
        name=trait.name,
        forward_s=forward_s,
        backward_s=backward_s,
        output_bytes=output_bytes,
        tape_bytes=tape_bytes,
        gradient_bytes=gradient_bytes,
        forward_overhead_bytes=advance_bytes,
        tape_overhead_bytes=taping_bytes,
        backward_overhead_bytes=reverse_bytes,
        spared_s=min(spared_s, forward_s),
    )
    return stage, next_state


def _with_stand_ins(call: Call) -> tuple[list[Tensor], Call]:
    """Return parameters that stand in for a stage's, and the stage run with them.

    Gradients then go to the stand-ins: no hook of the user fires, no `.grad`
    is touched.
    """
    if not isinstance(call, nn.Module):
        return [], call
    wanting = {n: p for n, p in call.named_parameters() if p.requires_grad}
    stand_ins = {name: p.detach().requires_grad_() for name, p in wanting.items()}

    def run(state: Any) -> Any:
        return torch.func.functional_call(call, stand_ins, (state,))

    return list(stand_ins.values()), run


def sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether parameters are sharded (FSDP2), and so known to hooks: nothing stands in for them."""
    # Not isinstance: importing DTensor takes half a second.
    return any(hasattr(p, "full_tensor") for p in parameters)


@contextlib.contextmanager
def _gradients_put_back(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Run without gradients on some parameters; put theirs back at the end.

    Raises
    ------
    ArgumentError
        If hooks would see the gradients of the profile.
    """
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
        raise ArgumentError(
            "sharded parameters have hooks on their gradients, which profiling would fire; "
            "profile the chain before they are set, or give it costs=..."
        )
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _time(
    call: Call,
    run: Call,
    stand_ins: list[Tensor],
    fresh: Callable[[], Any],
    device: torch.device,
    seconds: float,
    collective: bool,
) -> tuple[float, float, float]:
    """Return seconds forward, those of them after the last tensor it saves, and backward."""
    forwards: list[float] = []
    spared: list[float] = []
    backwards: list[float] = []
    began = time.perf_counter()
    # Runs of sharded stages are collective: every rank must do as many.
    rounds = _SHARDED_ROUNDS if collective else _MOST_ROUNDS
    while len(forwards) < rounds and (
        collective or len(forwards) < 3 or time.perf_counter() - began < seconds
    ):
        inputs = fresh()
        with torch.no_grad():
            forwards.append(seconds_of(partial(call, inputs), device))
        inputs = fresh()
        clock = _Clock(device)
        last: list[Any] = []

        def pack(tensor: Tensor) -> Tensor:
            last[:] = [clock.now()]  # noqa: B023
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _same):
            output = run(inputs)
        spared.append(clock.between(last[0], clock.now()) if last else 0.0)
        result = [t for t in tensors_of(output) if t.requires_grad]
        if not result:
            backwards.append(0.0)
            continue
        gradients = [torch.ones_like(t) for t in result]
        wanted = [t for t in tensors_of(inputs) if t.requires_grad]
        leaves = None if collective else [*wanted, *stand_ins] or None
        backward = partial(torch.autograd.backward, result, gradients, inputs=leaves)
        backwards.append(seconds_of(backward, device))
        for parameter in stand_ins:
            parameter.grad = None
    return min(forwards[1:]), min(spared[1:]), min(backwards[1:])


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Clock:
    """Moments of a computation, on its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """Return this moment."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Return the seconds between two moments."""
        if self._device.type != "cuda":
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds some work takes, on its device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _bytes(tensors: Any) -> int:
    """Return the bytes of the storages behind some tensors, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _detached(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
