"""Runs of one stage on copies of the same state, which are weighed and timed."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...model.stages import Stage
from ..environment.captured import Environment
from ..environment.randomness import Generators
from ..environment.scope import Scope
from ..tensors.checksums import digest
from ..tensors.meter import Meter, OperationsMeter, storages_of
from .clocks import Moment, moment, seconds_between, seconds_of
from .exploring import Call, has_node, tensors_of
from .saved import Caught, Saved
from .sizes import Count, Sizes, bytes_of
from .traits import Traits

_LEAST_ROUNDS = 2  # of timing a stage: the first pays for what is made once
_MOST_ROUNDS = 50
_SHARDED_ROUNDS = 4
_Meter = TypeVar("_Meter", Meter, OperationsMeter)
_ENGINE_ROUNDS = 20
_DIGEST_BYTES = 1 << 22
_CHECKPOINTS = ("CheckpointFunctionBackward",)  # reentrant ones of torch


@dataclass(slots=True)
class Times:
    """Seconds of stages that perform the same operations: the least of all rounds."""

    forward_s: float = math.inf
    spared_s: float = math.inf
    backward_s: float = math.inf
    rounds: int = 0

    @property
    def round_s(self) -> float:
        """Seconds that a round takes, which runs forward twice."""
        return 2 * self.forward_s + self.backward_s

    def add(self, forward_s: float, spared_s: float, backward_s: float) -> None:
        """Add a round."""
        self.forward_s = min(self.forward_s, forward_s)
        self.spared_s = min(self.spared_s, spared_s)
        self.backward_s = min(self.backward_s, backward_s)
        self.rounds += 1


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
    """

    def __init__(
        self,
        call: Call,
        trait: Traits,
        scope: Scope,
        state: object,
        device: torch.device,
        stand_ins: list[Tensor] | None,
    ) -> None:
        self._call, self._trait, self._state = call, trait, state
        self._device, self._stand_ins = device, stand_ins
        self._given = tensors_of(state)
        self._found = scope.look()  # what it refers to, as it is before it runs
        self._own = self._found.tensors  # whose storages the stand-ins share
        self._by_all = stand_ins is None
        self._scope = scope
        self._saved = self._saved_bytes = 0  # tensors that it saves
        self.sizes = Sizes()
        self.hidden_bytes = 0  # that it leaves behind, though nothing that it saves is kept

    def _fresh(self) -> object:
        """Return the state: leaves, or copies of them for a stage that writes to it.

        What an earlier run took from a list or dict is there again.
        """
        if self._stand_ins is not None:
            self._found.put_back()
        leaves = pytree.tree_map(_detached, self._state)
        return leaves if not self._trait.changes_input else pytree.tree_map(_clone, leaves)

    def count(self) -> tuple[Stage, object, object]:
        """Return the bytes of the stage, the state after it, and the operations it performs."""
        output_bytes, advance_bytes, shared = self._count_untaped()
        inputs = self._fresh()
        wanted = [t for t in tensors_of(inputs) if t.requires_grad]
        counted, unhooked = Count(0, self.sizes), self._trait.unhooked
        saved = Saved(counted.add)
        with torch.enable_grad(), self._meter(OperationsMeter, inputs) as meter:
            with contextlib.nullcontext() if unhooked else saved:
                output = self._call(inputs)
            made = meter.live_bytes()
            taping_bytes = max(0, meter.peak_bytes - made)
            tape_bytes = max(made + shared, output_bytes)
            held = [*tensors_of(output), *saved.held()]
            is_hiding = not unhooked and meter.bytes_but(held) > 0
            del held
            self.sizes.varies = meter.sizes_vary
            if self._trait.differentiates or self._trait.graded:  # it keeps all it saves
                advance_bytes = max(advance_bytes, tape_bytes + taping_bytes - output_bytes)
            result = list({id(t): t for t in tensors_of(output) if t.requires_grad}.values())
            next_state = pytree.tree_map(_detached, output)
            gradients = _ones_like(result)
            gradient_bytes = bytes_of(gradients)  # of a view that repeats numbers, all
            before = meter.live_bytes()
            meter.reset_peak()
            if result:
                del output
                self._by_all = self._by_all or has_node(result, _CHECKPOINTS)
                stand_ins = self._stand_ins or ()
                hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in stand_ins]
                self._differentiation(result, gradients, wanted)()
                for hook in hooks:
                    hook.remove()
            given_gradient = bytes_held(t.grad for t in wanted if t.grad is not None)
            reverse_bytes = max(0, meter.peak_bytes - before - given_gradient)
            operations = meter.operations()
        self._saved, self._saved_bytes = saved.count, counted.nbytes
        self.sizes.saved_bytes = None if unhooked else counted.nbytes
        del wanted, result, gradients, inputs
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
        )
        return stage, next_state, operations

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
        with torch.no_grad(), self._meter(Meter, inputs) as meter:
            output = self._call(inputs)
            self.sizes.output_bytes = bytes_of(pytree.tree_leaves(output))
            made = meter.live_bytes()
            advance_bytes = max(0, meter.peak_bytes - made)
            # A state that shares storage with the one before keeps it alive.
            owned = {key for t in self._own for key in storages_of(t)}
            output_bytes = bytes_held(
                t for t in tensors_of(output) if not owned & storages_of(t).keys()
            )
        return output_bytes, advance_bytes, max(0, output_bytes - made)

    def _hidden_bytes(self) -> int:
        """Return the bytes that a run leaves behind though hooks keep nothing that it saves.

        Such as tensors that an autograd Function keeps as attributes, or the stage does.
        """
        inputs = self._fresh()
        saved = Saved(None, _never, None if self._trait.differentiates else _never)
        with torch.enable_grad(), self._meter(Meter, inputs) as meter, saved:
            output = self._call(inputs)
        nodes = [t.grad_fn for t in tensors_of(output)]
        del output, inputs
        hidden_bytes = max(0, meter.live_bytes())
        del nodes
        return hidden_bytes

    def _meter(self, kind: type[_Meter], inputs: object) -> _Meter:
        """Return a meter that does not count what was there before."""
        meter = kind(self._device)
        meter.ignore(self._own)
        meter.ignore(tensors_of(inputs))
        meter.ignore(self._given)
        return meter

    def overhead_s(self) -> float:
        """Return the seconds of a run under a plan that are not the stage's own.

        To capture its environment and put it back, to read the generators, to hand each
        tensor that it saves to a hook and back, and to take its checksum.
        """
        generators = Generators() if self._trait.draws else None

        def twice() -> None:  # as it first runs, and as it runs again
            trait = self._trait
            around = Environment(self._scope, trait.name, trait.buffers, by_value=True)
            around.verify()
            with around.again():
                pass
            if generators is not None:
                generators.capture()
                generators.capture()

        cpu = torch.device("cpu")
        both_s = min(seconds_of(twice, cpu) for _ in range(2))
        summed_s = self._saved_bytes * _digest_s() if self._device.type == "cpu" else 0.0
        return both_s / 2 + self._saved * _hook_s() + summed_s

    def time(self, found: Times, seconds: float) -> None:
        """Add rounds to the times of the stage: two in all, and more that fit into the seconds."""
        began = time.perf_counter()
        # Runs of sharded stages are collective: every rank must do as many.
        collective = self._stand_ins is None
        least = _SHARDED_ROUNDS if collective else _LEAST_ROUNDS - found.rounds
        done = 0
        while done < least or (
            not collective
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
        result = [t for t in tensors_of(output) if t.requires_grad]
        if not result:
            return forward_s, spared_s, 0.0
        wanted = [t for t in tensors_of(inputs) if t.requires_grad]
        differentiate = self._differentiation(result, _ones_like(result), wanted)
        backward_s = seconds_of(differentiate, self._device)
        for parameter in self._stand_ins or ():
            parameter.grad = None
        return forward_s, spared_s, backward_s

    def _differentiation(
        self, result: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> Callable[[], object]:
        """Return what differentiates by the input and the stand-ins, and by nothing else.

        Where there are no stand-ins, or checkpoints that cannot be given what
        to differentiate by, it is by all that the stage used.
        """
        leaves = () if self._by_all else (*wanted, *(self._stand_ins or ()))
        if not leaves and not self._by_all:
            return lambda: None
        # Not torch.autograd.backward, which imports sympy to look at given gradients.
        return partial(
            torch.autograd.graph._engine_run_backward,
            tuple(result),
            tuple(gradients),
            False,
            False,
            leaves,
            allow_unreachable=True,
            accumulate_grad=True,
        )


@functools.cache
def engine_s() -> float:
    """Return the seconds in which the engine starts: once for a chain, not once a stage."""
    tensor, one = torch.zeros(1, requires_grad=True), torch.ones(1)

    def seconds() -> float:
        with torch.enable_grad():
            made = tensor.view_as(tensor)  # whose adjoint does next to nothing
        run = partial(
            torch.autograd.graph._engine_run_backward,
            *((made,), (one,), False, False, (tensor,), True),
            accumulate_grad=False,
        )
        return seconds_of(run, torch.device("cpu"))

    return min(seconds() for _ in range(_ENGINE_ROUNDS))


@functools.cache
def _digest_s() -> float:
    """Return the seconds that a checksum takes for each byte."""
    tensor = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)
    found = min(seconds_of(partial(digest, tensor), torch.device("cpu")) for _ in range(5))
    return found / _DIGEST_BYTES


@functools.cache
def _hook_s() -> float:
    """Return the seconds to hand a saved tensor to a hook that keeps its kind, and back."""
    tensor, count = torch.zeros(1, requires_grad=True), 64

    def run() -> None:
        with torch.enable_grad():
            made = tensor
            for _ in range(count):
                made = made.exp()
            torch.autograd.graph._engine_run_backward(
                (made,), (torch.ones(1),), False, False, (tensor,), True, accumulate_grad=False
            )

    def given(number: int) -> Tensor:
        return torch.ones(1)

    def hooked() -> None:
        with Saved(Caught(holds=False).see, given, given):
            run()

    cpu = torch.device("cpu")
    plain_s, hooked_s = (min(seconds_of(f, cpu) for _ in range(5)) for f in (run, hooked))
    return max(0.0, hooked_s - plain_s) / count


def _never(number: int) -> Tensor:
    raise AssertionError("nothing differentiates this run")


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each once."""
    return sum({k: s.nbytes() for t in tensors for k, s in storages_of(t).items()}.values())


def _ones_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(t, memory_format=torch.preserve_format) for t in tensors]


def _clone(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _detached(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None
