"""Measure the stages of a chain on a sample: seconds, bytes, and what else they do.

Parameter estimation of Beaumont et al. 2019 (RR-9302), section 5.1: each stage
runs forward and backward by itself, one after the other, on what the stage
before made of the sample.  Parameters, their gradients, buffers and the random
state are left as they were, and no hook on gradients fires; forward hooks of
the stages do run, as they may be part of what a stage computes.

Seconds.  A stage runs forward six times at least (twice to look at what it
does, twice to count bytes, twice to be timed) and backward twice.  Stages that
perform the same operations on the same shapes share what is measured, so that
one disturbed run does not make a stage look slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...model.stages import Stage, StageCosts
from ..environment.scope import Scope
from ..environment.settings import casting_anew, leave_hooks_alone
from .exploring import Call, explore, fresh_copy, tensors_of, untouched
from .joining import grouped
from .sizes import Sizes, bytes_of
from .stage_runs import StageRun, Times, bytes_held, engine_s
from .stand_ins import hooks_silent, standing_in
from .traits import Traits

SECONDS = 0.25  # to time a chain's stages repeatedly


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


def measure_stages(
    stages: Sequence[Call],
    names: Sequence[str],
    sample: object,
    *,
    seconds: float = SECONDS,
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
        About how long to time; every stage is timed at least twice.
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
    leave_hooks_alone()
    scope = Scope(stages)
    parameters = scope.parameters()
    device = _device([*tensors_of(sample), *parameters])
    # FSDP2 gathers parameters for the backward pass in hooks on tensors.
    ours = not sharded(parameters)
    with untouched(scope, sample), hooks_silent(scope.modules, on_tensors=ours), casting_anew():
        groups, traits = explore(stages, names, sample)
        if costs is None:
            costs, sizes = _measure_groups(
                grouped(stages, groups), traits, sample, device, seconds, parameters
            )
            traits = tuple([replace(t, sizes=each) for t, each in zip(traits, sizes, strict=True)])
        elif len(costs.stages) != len(groups):
            raise ArgumentError(
                f"costs of {len(costs.stages)} stages were given for a chain of {len(groups)} "
                f"({', '.join(trait.name for trait in traits)})"
            )
        else:
            traits = tuple([replace(trait, sizes=Sizes()) for trait in traits])
    return Profile(costs, groups, traits)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    return torch.device("cpu")


def _measure_groups(
    calls: Sequence[Call],
    traits: Sequence[Traits],
    sample: object,
    device: torch.device,
    seconds: float,
    parameters: Sequence[Tensor],
) -> tuple[StageCosts, list[Sizes]]:
    state = fresh_copy(sample)
    input_bytes = bytes_held(tensors_of(sample)) + _bytes_to_run_again(traits, device)
    wanting = {id(t): t for t in tensors_of(sample) if t.requires_grad}
    input_gradient = bytes_of(tuple(wanting.values()))
    collective = sharded(parameters)
    times: dict[object, Times] = {}
    counted: list[tuple[Stage, Times, float]] = []
    sizes: list[Sizes] = []
    with _gradients_put_back(parameters) if collective else contextlib.nullcontext():
        for call, trait in zip(calls, traits, strict=True):
            scope = trait.scope or Scope.of(call)
            # Nothing can stand in for sharded parameters.
            with contextlib.nullcontext() if collective else standing_in(scope) as stand_ins:
                run = StageRun(call, trait, scope, state, device, stand_ins)
                if device.type == "cuda":
                    # First, so that what libraries allocate once, their workspaces, is not counted.
                    found = Times()
                    run.time(found, seconds / len(calls))
                    stage, state, _ = run.count()
                else:
                    stage, state, operations = run.count()
                    found = times.setdefault(operations, Times())
                    run.time(found, seconds / len(calls))
                overhead_s = run.overhead_s()
            counted.append((stage, found, overhead_s))
            sizes.append(run.sizes)
            input_bytes += run.hidden_bytes  # from its first run to its backward
    stages = [
        replace(
            stage,
            forward_s=found.forward_s + overhead_s,
            backward_s=max(0.0, found.backward_s - engine_s()),
            spared_s=min(found.spared_s, found.forward_s),
            overhead_s=overhead_s,
        )
        for stage, found, overhead_s in counted
    ]
    return StageCosts(tuple(stages), input_bytes, input_gradient), sizes


def _bytes_to_run_again(traits: Sequence[Traits], device: torch.device) -> int:
    """Return the bytes of what `replay` keeps of all stages: buffers and random states."""
    buffers = [
        sum(buffer.nbytes for m, k in trait.buffers if (buffer := m._buffers[k]) is not None)
        for trait in traits
    ]
    kept = sum(buffers) + max(buffers)  # exchanged for copies while a stage runs again
    if device.type == "cpu":  # where generators of devices keep theirs too
        kept += sum(bool(trait.draws) for trait in traits) * torch.get_rng_state().nbytes
    return kept


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
