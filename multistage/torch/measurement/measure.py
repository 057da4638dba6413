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
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from ...errors import ArgumentError
from ...model.stages import Stage, StageCosts, Way
from ..environment.captured import Environment, Snapshot
from ..environment.places import Held, Place, replacing
from ..environment.randomness import Generators
from ..environment.scope import Scope
from ..environment.settings import casting_anew, leave_hooks_alone
from ..environment.states import KeptState, leaves_of, tensors_in, wants_of
from ..tensors.meter import Meter, bytes_held, storages_among, storages_of
from ..tensors.sums import differentiate
from .clocks import (
    Moment,
    Times,
    digest_s,
    empty_caches,
    engine_s,
    hook_s,
    moment,
    seconds_between,
    seconds_of,
)
from .exploring import Call, HooksOnTensors, explore, fresh_copy, has_node, hooks_silent
from .joining import grouped
from .saved import Caught, Saved, never
from .traits import Count, OfGraph, Remade, Sizes, Traits, bytes_of

_LEAST_ROUNDS = 2  # of timing a stage: the first pays for what is made once
_MOST_ROUNDS = 50
_SHARDED_ROUNDS = 4
_CHECKPOINTS = ("CheckpointFunctionBackward",)  # reentrant ones of torch


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a stage."""

    stage: Stage
    times: Times
    overhead_s: float
    sizes: Sizes
    ways: tuple[Remade, ...]
    hidden_bytes: int

    def of(self, call: Call, name: str) -> Measured:
        """Return the same of another stage, which does the same."""
        return replace(
            self,
            stage=replace(self.stage, name=name),
            sizes=self.sizes.fresh(),
            ways=tuple([replace(way, stage=call) for way in self.ways]),  # type: ignore[arg-type]
        )


class StageRun:
    """Runs of one stage, each on a copy of the same state.

    Parameters
    ----------
    call, trait, scope
        Of the stage.
    state : pytree
        What it takes.
    device : torch.device
    stand_ins : list of Tensor or None
        In place of its parameters; None for sharded ones.
    stays : bool
        Whether something holds its output while it is differentiated: the caller, or what the
        next stage may be run again from.
    """

    def __init__(
        self,
        call: Call,
        trait: Traits,
        scope: Scope,
        state: object,
        device: torch.device,
        stand_ins: list[Tensor] | None,
        stays: bool,
    ) -> None:
        self._call, self._trait, self._state, self._stays = call, trait, state, stays
        self._device, self._stand_ins = device, stand_ins
        self._given = tensors_in(state)
        self._found = scope.look()  # what it refers to, as it is before it runs
        self._own = self._found.tensors  # whose storages the stand-ins share
        self._by_all = stand_ins is None
        self._scope = scope
        self._saved = self._saved_bytes = 0  # tensors that it saves
        self.sizes = Sizes()
        self.hidden_bytes = 0  # that it leaves behind, though nothing that it saves is kept
        self._around_s = 0.0  # beside its own, where it runs under hooks and is run again

    def _fresh(self) -> object:
        """Return the state: leaves, or copies of them for a stage that writes to it.

        What an earlier run took from a list or dict is there again.
        """
        if self._stand_ins is not None:
            self._found.put_back()
        leaves = pytree.tree_map_only(Tensor, _detached, self._state)
        if not self._trait.changes_input:
            return leaves
        return pytree.tree_map_only(Tensor, Tensor.clone, leaves)

    def measured(self, times: dict[object, Times], seconds: float) -> Measured:
        """Return all that is measured.

        Parameters
        ----------
        times : dict
            Of stages by the operations that they perform.
        seconds : float
            About how long to time.
        """
        if self._device.type == "cuda":
            # First, so that what libraries allocate once, their workspaces, is not counted.
            found = Times()
            self.time(found, seconds)
            stage, _ = self.count()
        else:
            stage, operations = self.count()
            found = times.setdefault(operations, Times())
            self.time(found, seconds)
        overhead_s = self.overhead_s()
        stage, ways = self.ways(stage, found)
        return Measured(stage, found, overhead_s, self.sizes, ways, self.hidden_bytes)

    def passed(self) -> object:
        """Return the state after the stage."""
        trait = self._trait
        saved = Saved(None, never, None if trait.differentiates else never)
        with torch.enable_grad(), contextlib.nullcontext() if trait.unhooked else saved:
            return pytree.tree_map_only(Tensor, _detached, self._call(self._fresh()))

    def count(self) -> tuple[Stage, object]:
        """Return the bytes of the stage, and the operations it performs."""
        output_bytes, advance_bytes, shared = self._count_untaped()
        inputs = self._fresh()
        wanted = [t for t in tensors_in(inputs) if t.requires_grad]
        counted, unhooked = Count(0, self.sizes), self._trait.unhooked
        saved = Saved(counted.add)
        with torch.enable_grad(), self._meter(inputs, notes=True) as meter:
            with contextlib.nullcontext() if unhooked else saved:
                output = self._call(inputs)
            made = meter.live_bytes()
            taping_bytes = max(0, meter.peak_bytes - made)
            tape_bytes = max(made + shared, output_bytes)
            kept = [*tensors_in(output), *saved.held()]
            is_hiding = not unhooked and meter.bytes_but(kept) > 0
            apart = storages_among(self._given).keys().isdisjoint(storages_among(kept))
            saves_input = not apart or is_hiding or unhooked or not self._trait.is_pure
            del kept
            self.sizes.varies = meter.sizes_vary
            if self._trait.differentiates or self._trait.graded:  # it keeps all it saves
                advance_bytes = max(advance_bytes, tape_bytes + taping_bytes - output_bytes)
            result = list({id(t): t for t in tensors_in(output) if t.requires_grad}.values())
            _refuse_sparse(self._trait.name, result)
            self._by_all = self._by_all or has_node(result, _CHECKPOINTS)
            gradients = _ones_like(result)
            gradient_bytes = bytes_of(gradients)  # of a view that repeats numbers, all
            ends = [get_gradient_edge(t) for t in result]
            held = (output, result) if self._stays else None
            before = meter.live_bytes()
            del output, result
            left = meter.live_bytes()
            meter.reset_peak()
            if ends:
                stand_ins = self._stand_ins or ()
                hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in stand_ins]
                self._differentiation(ends, gradients, wanted)()
                for hook in hooks:
                    hook.remove()
            given_gradient = bytes_held(t.grad for t in wanted if t.grad is not None)
            reverse_bytes = max(0, meter.peak_bytes - left - given_gradient)
            operations = meter.operations()
        self._saved, self._saved_bytes = saved.count, counted.nbytes
        self.sizes.saved_bytes = None if unhooked else counted.nbytes
        del wanted, ends, gradients, inputs, held
        self.hidden_bytes = self._hidden_bytes() if is_hiding else 0

        stage = Stage(
            name=self._trait.name,
            forward_s=0.0,
            backward_s=0.0,
            output_bytes=output_bytes,
            tape_bytes=max(tape_bytes - self.hidden_bytes, output_bytes),
            gradient_bytes=gradient_bytes,
            forward_overhead_bytes=advance_bytes,
            tape_overhead_bytes=taping_bytes + self.hidden_bytes,
            backward_overhead_bytes=reverse_bytes,
            spared_bytes=min(before - left, output_bytes),
            saves_input=saves_input or self._trait.changes_input,
        )
        return stage, operations

    def _count_untaped(self) -> tuple[int, int, int]:
        """Run without a tape.

        Returns
        -------
        output_bytes : int
        advance_bytes : int
            At the peak, beside what the run leaves.
        shared : int
            Of the output, in storages that were there before.
        """
        inputs = self._fresh()
        with torch.no_grad(), self._meter(inputs) as meter:
            output = self._call(inputs)
            self.sizes.output_bytes = bytes_of(pytree.tree_leaves(output))
            made = meter.live_bytes()
            advance_bytes = max(0, meter.peak_bytes - made)
            # A state that shares storage with the one before keeps it alive.
            owned = {*storages_among(self._own)}
            output_bytes = bytes_held(
                t for t in tensors_in(output) if not owned & storages_of(t).keys()
            )
        return output_bytes, advance_bytes, max(0, output_bytes - made)

    def _hidden_bytes(self) -> int:
        """Return the bytes that a run leaves behind though hooks keep nothing that it saves.

        Such as tensors that an autograd Function keeps as attributes, or the stage does.
        """
        inputs = self._fresh()
        saved = Saved(None, never, None if self._trait.differentiates else never)
        with torch.enable_grad(), self._meter(inputs) as meter, saved:
            output = self._call(inputs)
        nodes = [t.grad_fn for t in tensors_in(output)]
        del output, inputs
        hidden_bytes = max(0, meter.live_bytes())
        del nodes
        return hidden_bytes

    def _meter(self, inputs: object, *, notes: bool = False) -> Meter:
        """Return a meter that does not count what was there before."""
        meter = Meter(self._device, notes=notes)
        meter.ignore(self._own)
        meter.ignore(tensors_in(inputs))
        meter.ignore(self._given)
        return meter

    def ways(self, stage: Stage, found: Times) -> tuple[Stage, tuple[Remade, ...]]:
        """Return the stage with other ways to keep its tape, and what these make again."""
        trait, known = self._trait, getattr(self._call, "_multistage_ways", None)
        # Nothing is to be had of a stage that saves its input and its output alone.
        if known is None or not trait.is_simple or stage.tape_bytes <= stage.output_bytes:
            return stage, ()
        given = stage.tape_bytes, found.forward_s
        remade = known(self._fresh, self._device, *given, draws=trait.may_draw)
        ways = []
        for each in remade:
            made_bytes, again_s = self._remaking(each)
            freed = min(each.nbytes, stage.tape_bytes - stage.output_bytes)
            way = Way(
                tape_bytes=stage.tape_bytes - freed,
                tape_overhead_bytes=stage.tape_overhead_bytes + freed,
                backward_overhead_bytes=freed + max(stage.backward_overhead_bytes, made_bytes),
                again_s=again_s,
            )
            ways.append(way)
        return replace(stage, ways=tuple(ways)), tuple(remade)

    def _remaking(self, remade: Remade) -> tuple[int, float]:
        """Return bytes at the peak, beside what is made, and seconds of making it again."""
        tape: list[Tensor] = []
        inputs = self._fresh()
        with torch.enable_grad(), Saved(tape.append):
            self._call(inputs)
        with torch.no_grad():
            with self._meter(inputs) as meter:
                meter.ignore(tape)
                made = remade.make(inputs, tape)
                made_bytes = max(0, meter.peak_bytes - meter.live_bytes())
            del made
            make, seconds = partial(remade.make, inputs, tape), math.inf
            for _ in range(_LEAST_ROUNDS):
                empty_caches(self._device)
                seconds = min(seconds, seconds_of(make, self._device))
        return made_bytes, seconds + self._around_s + 2 * self._summed_s(remade.nbytes)

    def overhead_s(self) -> float:
        """Return the seconds that running it again takes beside its own, at first and again.

        To capture its environment and put it back, to read the generators, to hand each
        tensor that it saves to a hook and back, and to take its checksum.
        """
        trait = self._trait
        generators = Generators(of_torch=trait.is_pure) if trait.may_draw else None

        found: list[tuple[Environment, KeptState]] = []

        def first() -> None:
            around = Environment(self._scope, trait.name, trait.buffers, by_value=True)
            with Saved(Caught(trait.name, around.places()).see, never, never):
                around.verify()
            if generators is not None:
                generators.capture()
            found.append((around, KeptState.of(self._state)))

        def again() -> None:
            around, state = found.pop()
            with around.again(), Saved(Caught(trait.name, around.places()).see, never, never):
                state.fresh(wants_of(leaves_of(self._state)), False)
            if generators is not None:
                generators.capture()

        cpu = torch.device("cpu")
        both_s = math.inf
        for _ in range(_LEAST_ROUNDS):
            took_s = 0.0
            for part in (first, again):
                empty_caches(self._device)
                took_s += seconds_of(part, cpu)
            both_s = min(both_s, took_s)
        self._around_s = both_s + self._saved * hook_s()
        return self._around_s + self._saved * hook_s() + 2 * self._summed_s(self._saved_bytes)

    def _summed_s(self, nbytes: int) -> float:
        """Return the seconds of checksums of what it saves."""
        is_summed = self._device.type == "cpu" and not self._trait.is_pure
        return nbytes * digest_s() if is_summed else 0.0

    def time(self, found: Times, seconds: float) -> None:
        """Add rounds to the times of the stage: two in all, and more that fit into the seconds."""
        began = time.perf_counter()
        # Runs of sharded stages are collective: every rank must do as many.
        collective = self._stand_ins is None
        least = _SHARDED_ROUNDS if collective else _LEAST_ROUNDS - found.rounds
        done = 0
        while done < least or (
            not collective
            and not found.is_steady
            and done < _MOST_ROUNDS
            and time.perf_counter() - began + found.round_s <= seconds
        ):
            found.add(*self._round())
            done += 1

    def _round(self) -> tuple[float, float, float]:
        """Return seconds forward, those of them after the last tensor it saves, and backward."""
        inputs = self._fresh()
        with torch.no_grad():
            forward_s = seconds_of(partial(self._call, inputs), self._device)
        inputs = self._fresh()
        last: list[Moment] = []

        def see(tensor: Tensor) -> None:
            last[:] = [moment(self._device)]

        saved = contextlib.nullcontext() if self._trait.unhooked else Saved(see)
        with torch.enable_grad(), saved:
            output = self._call(inputs)
        spared_s = seconds_between(last[0], moment(self._device)) if last else 0.0
        result = [t for t in tensors_in(output) if t.requires_grad]
        if not result:
            return forward_s, spared_s, 0.0
        wanted = [t for t in tensors_in(inputs) if t.requires_grad]
        differentiate = self._differentiation(result, _ones_like(result), wanted)
        backward_s = seconds_of(differentiate, self._device)
        for parameter in self._stand_ins or ():
            parameter.grad = None
        return forward_s, spared_s, backward_s

    def _differentiation(
        self,
        result: Sequence[Tensor | GradientEdge],
        gradients: Sequence[Tensor],
        wanted: Sequence[Tensor],
    ) -> Callable[[], object]:
        """Return what differentiates by the input and the stand-ins, and by nothing else.

        Where there are no stand-ins, or checkpoints that cannot be given what
        to differentiate by, it is by all that the stage used.
        """
        leaves = None if self._by_all else (*wanted, *(self._stand_ins or ()))
        return partial(differentiate, result, gradients, leaves, accumulate=True)


def _ones_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(t, memory_format=torch.preserve_format) for t in tensors]


def _refuse_sparse(name: str, result: Sequence[Tensor]) -> None:
    for tensor in result:
        if "sparse" in str(tensor.layout):
            raise ArgumentError(
                f"stage {name} returns a tensor of layout {tensor.layout} that requires a "
                "gradient, which cannot be measured: return it dense (to_dense()), or let one "
                "stage make and use it"
            )


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


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
    devices = (t.device for t in [*tensors_in(sample), *parameters])
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    # FSDP2 gathers parameters for the backward pass in hooks on tensors; what is compiled would be
    # compiled once more, for the mode.
    hooks = HooksOnTensors()
    ours = not (sharded(parameters) or compiled_among(scope.modules))
    with Snapshot(scope, tensors_in(sample)), hooks_silent(scope.modules), casting_anew():
        with hooks if ours else contextlib.nullcontext():
            groups, traits = explore(stages, names, sample)
        if costs is None:
            # Stages that write to their input were not run with a graph.
            met = hooks.met or traits[0].changes_input or len(groups) < len(stages)
            with hooks if ours and met else contextlib.nullcontext():
                costs, known = _measure_groups(
                    grouped(stages, groups), traits, sample, device, seconds, parameters
                )
            traits = tuple(known)
        elif len(costs.stages) != len(groups):
            raise ArgumentError(
                f"costs of {len(costs.stages)} stages were given for a chain of {len(groups)} "
                f"({', '.join(trait.name for trait in traits)})"
            )
        else:
            costs = costs.whole
            traits = tuple([replace(trait, sizes=Sizes()) for trait in traits])
    return Profile(costs, groups, traits)


def _measure_groups(
    calls: Sequence[Call],
    traits: Sequence[Traits],
    sample: object,
    device: torch.device,
    seconds: float,
    parameters: Sequence[Tensor],
) -> tuple[StageCosts, list[Traits]]:
    state = fresh_copy(sample)
    input_bytes = bytes_held(tensors_in(sample)) + _bytes_to_run_again(traits, device)
    wanting = {id(t): t for t in tensors_in(sample) if t.requires_grad}
    input_gradient = bytes_of(tuple(wanting.values()))
    collective = sharded(parameters)
    times: dict[object, Times] = {}
    alike: dict[object, Measured] = {}
    found: list[Measured] = []
    with _gradients_put_back(parameters) if collective else contextlib.nullcontext():
        for number, (call, trait) in enumerate(zip(calls, traits, strict=True)):
            scope = trait.scope or Scope([call])
            # Nothing can stand in for sharded parameters.
            with contextlib.nullcontext() if collective else standing_in(scope) as stand_ins:
                kind = _kind_of(call, trait, state)
                stays = number + 1 == len(calls) or not traits[number + 1].is_pure
                run = StageRun(call, trait, scope, state, device, stand_ins, stays)
                known = None if kind is None else alike.get((kind, stays))
                if known is None:
                    known = run.measured(times, seconds / len(calls))
                    if not known.sizes.varies:
                        alike[kind, stays] = known
                else:
                    run.time(known.times, seconds / len(calls))
                    known = known.of(call, trait.name)
                state = run.passed()
            found.append(known)
    input_bytes += sum([each.hidden_bytes for each in found])  # from first run to backward
    stages = [_with_times(each.stage, each.times, each.overhead_s) for each in found]
    found_traits = [
        replace(trait, sizes=each.sizes, ways=each.ways)
        for trait, each in zip(traits, found, strict=True)
    ]
    return StageCosts(tuple(stages), input_bytes, input_gradient), found_traits


def _kind_of(call: Call, trait: Traits, state: object) -> object | None:
    """Return what decides what a stage costs; None if that is not known."""
    if not isinstance(call, OfGraph) or not trait.is_pure:
        return None
    own: dict[str, object] = call.own()
    leaves, spec = pytree.tree_flatten(state)
    storages: dict[int, int] = {}

    def kind(value: object) -> object:
        if not isinstance(value, Tensor):
            return repr(value)
        if value.layout is not torch.strided or value.is_nested:
            return id(value)
        storage = value.untyped_storage()
        place = storages.setdefault(storage._cdata, len(storages))
        at = place, storage.nbytes(), value.storage_offset(), value.stride(), value.shape
        bits = value.is_conj(), value.is_neg()
        return *at, *bits, value.dtype, value.device, value.requires_grad

    places = list(own)
    buffers = tuple([places.index(key) for _, key in trait.buffers])
    draws = trait.draws, trait.may_draw
    does = *draws, trait.graded, trait.differentiates, trait.unhooked, trait.fills
    of_values = tuple([kind(value) for value in (*leaves, *own.values())])
    return call.signature, str(spec), of_values, buffers, does, trait.changes_input


def _with_times(stage: Stage, found: Times, overhead_s: float) -> Stage:
    """Return a stage with its times.

    A run more takes the overhead, and no overhead is taken where the tape is kept: it is part of
    each run forward, and the backward pass is shorter by one.
    """
    backward_s = max(0.0, found.backward_s - engine_s())
    shorter_s = min(overhead_s, backward_s)
    return replace(
        stage,
        forward_s=found.forward_s + overhead_s,
        backward_s=backward_s - shorter_s,
        spared_s=min(found.spared_s, found.forward_s),
        overhead_s=overhead_s - shorter_s,
    )


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


def compiled_among(modules: Iterable[nn.Module]) -> bool:
    """Whether `torch.compile` made one of some modules."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in modules
    )


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


@contextlib.contextmanager
def standing_in(scope: Scope) -> Iterator[list[Tensor]]:
    """Put stand-ins in the place of all that requires gradients; yield them.

    They share the parameters' memory.
    """
    stand_ins = {
        id(p): nn.Parameter(p.detach()) if type(p) is nn.Parameter else p.detach().requires_grad_()
        for p in scope.parameters()
        if p.requires_grad and p.is_leaf
    }
    put: list[tuple[Place, Held]] = []
    try:
        for place in scope.look().places:
            if any(id(value) in stand_ins for value in place.values()):
                put.append((place, place.read()))
                other = replacing(place.read(), lambda value: stand_ins.get(id(value), value))
                place.put_back(other)
        yield list(stand_ins.values())
    finally:
        for place, held in reversed(put):
            place.put_back(held)
