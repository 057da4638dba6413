"""The check of a chain: the model and the chain, once each, compared bit for bit.

Planning trusts what was seen when its stages were profiled.  The
check looks at the whole once: from the same state of the generators the model runs plainly
and the chain runs by its plan, forward and backward; outputs, gradients, buffers,
attributes and the generators' states must then be the same.

It takes one run forward and backward of each, and stays within the plan's limit: the
model's own tapes are held in windows (`plainly`), gradients are fingerprinted as they
come and dropped, and all is put back.  No `.grad` is touched; hooks on gradients do not
fire but for those that forward itself sets on its tensors; forward hooks do.

What it cannot see: what happens only later (a counter that reaches a threshold, a flag that
is set in epoch 3), on other values of the input, in another mode or kind of input than the
one checked; hooks on gradients; and parameters that no output's gradient reaches.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import ArgumentError, DifferenceWarning, StateError
from ..environment.captured import Snapshot, left_behind
from ..environment.copies import cloned
from ..environment.randomness import device_types
from ..environment.scope import Scope
from ..environment.settings import Settings, casting_anew, deterministic
from ..environment.states import tensors_in, with_tensors
from ..tensors.checksums import fingerprint
from ..tensors.graphs import nodes_below
from ..tensors.meter import Meter, Seeing, bytes_held
from ..tensors.sums import Sums, differentiate
from .exploring import Call, hooks_silent, this_pass, without_hooks
from .measure import Profile
from .plainly import TooDear, Windowed, forgetting

Check: TypeAlias = Literal["error", "warn", "off"]
CHECKS = ("error", "warn", "off")

# Room that there is always: as much as a checksum takes.
_LEAST = 1 << 16
Seen: TypeAlias = dict[str, object]
# Runs forward of the model within the limit.  A backward takes about as long as two, and a
# run again stops halfway on average: 1 + 7 / 2 + 2 are 2.2 plain iterations.
_MOST_RUNS = 8
# Models that are run forward so quickly may be run more often.
_SECONDS = 1.0
# In which all that attributes hold has been replaced.
_MOST_ITERATIONS = 4
# Random numbers, then repeated: a prime, so that rows of a tensor are not alike.
_MOST_DRAWN = 1_048_573
_ABSENT = object()
# Of two runs of operators that are not deterministic, relative: sums in another order.  Those of
# a processor hardly ever are; a hidden counter behind a norm may be felt no more than 1e-3.
_ROUNDING, _ROUNDING_ON_CPU = 1e-3, 1e-5


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found.

    Attributes
    ----------
    outcome : str
        "equal", or why less than everything is known to be equal.
    seconds : float
        It took.
    """

    outcome: str
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether repeated runs are to be bit-identical: no difference was found."""
        return not self.outcome.startswith(("agrees", "differs"))

    def __str__(self) -> str:
        return f"{self.outcome} ({self.seconds:.2g} s)" if self.seconds else self.outcome


def checked_choice(check: object) -> Check:
    """Return a choice of check.  Raises ArgumentError for another value."""
    if check not in CHECKS:
        raise ArgumentError(f"check={check!r} is not known; choose one of {CHECKS}")
    return check  # type: ignore[return-value]


def complain(check: Check, message: str) -> None:
    """Raise StateError, or warn."""
    if check == "error":
        raise StateError(message)
    warnings.warn(message, DifferenceWarning, stacklevel=2)


def check_chain(
    reference: Call,
    chain: Call,
    sample: object,
    *,
    name: str,
    stages: Sequence[Call],
    room_bytes: float,
    writes: bool,
    check: Check,
    targets: Sequence[Tensor] | None = None,
    rounded: str | None = None,
    ran: Seen | None = None,
) -> Checked:
    """Compare a chain with the model it comes from, on a sample.

    Parameters
    ----------
    reference, chain : callables
        The model, and the chain by its plan; take the sample.
    sample : pytree
    name : str
        Of the model, for messages.
    stages : sequence of callables
        What the two consist of.
    room_bytes : float
        For what the plain run saves; see `room_for_tapes`.
    writes : bool
        Whether the sample is written to.
    check : {"error", "warn"}
    targets : sequence of Tensor, optional
        Whose gradients are compared, beside the sample's; default: all leaves.  These may
        have graphs of their own, which are kept.
    rounded : str, optional
        The outcome where the two agree to rounding; by default they must be equal.
    ran : dict, optional
        What a run of the chain from the same start left behind, so that it need not run again.

    Raises
    ------
    StateError
        If the two differ; the message names the first module where they do.
    """
    began = time.perf_counter()
    both = Both(stages, sample, writes, room_bytes, targets)
    try:
        outcome = _compared(both, reference, chain, name, check, rounded, ran)
    except TooDear:
        outcome = "not checked; forward differentiates what the limit does not hold"
    finally:
        both.snapshot.restore()
    return Checked(outcome, time.perf_counter() - began)


def _compared(
    both: Both,
    reference: Call,
    chain: Call,
    name: str,
    check: Check,
    rounded: str | None,
    ran: Seen | None,
) -> str:
    plainly = both.plainly(reference)
    try:
        plain = both.seen(plainly, fingerprint)
        outcome = "equal"
    except TooDear:
        both.snapshot.restore()
        plain = both.seen(reference, None)
        outcome = "equal; gradients not compared, the limit holds too little of plain training"
    except NotAlone as error:
        both.snapshot.restore()
        plain = both.seen(reference, None)
        outcome = f"equal; gradients not compared, {error}"
    except RuntimeError as error:  # of autograd: as training itself would end
        return f"not checked; plain training of {name} fails: {str(error).partition(chr(10))[0]}"
    look = fingerprint if outcome == "equal" else None
    if look and plain == ran:
        return outcome
    ours = both.seen(chain, look)
    if plain == ours:
        return outcome
    # Before anyone is blamed: does the model do the same twice?
    twice = plainly if look else reference
    again = both.seen(twice, look)
    varying = differences(plain, again)
    if varying:
        if both.operators_vary(twice, look):
            sizes = None if look is None else projected
            runs = [both.seen(call, sizes) for call in (twice, twice, chain)]
            if all(agree(runs[0], run) for run in runs[1:]):
                return "agrees to rounding; the model's operators are not deterministic"
        message = (
            f"{name} returns other numbers each time it is run, though buffers, attributes and "
            f"the generators of torch, Python and NumPy were put back ({listed(varying)} differ); "
            "what is run again would differ too: keep such state in a buffer or draw from those "
            "generators, or continue with check='warn'"
        )
    else:
        sizes = None if rounded is None or look is None else projected
        if sizes and agree(*[both.seen(call, sizes) for call in (plainly, chain)]):
            return rounded or ""
        found = differences(plain, ours)
        where = both.first_module(reference, chain, found)
        message = (
            f"the chain does not do what {name} does: {listed(found)} "
            f"{'differs' if len(found) == 1 else 'differ'}{where}; what depends on more than its "
            "input, buffers and random generators must be kept outside of the model (or in its "
            "buffers), or continue with check='warn'"
        )
    complain(check, message)
    return f"differs: {message}"


def room_for_tapes(profile: Profile, stages: Sequence[Call], limit_bytes: int | None) -> float:
    """Return how much a plain run may save within a limit, beside what it works on."""
    if limit_bytes is None:
        return float("inf")
    costs = profile.costs
    forward = backward = in_flight = 0
    given, given_gradient = costs.input_bytes, costs.input_gradient_bytes
    for group, stage in zip(profile.groups, costs.stages, strict=True):
        over = max(stage.forward_overhead_bytes, stage.tape_overhead_bytes)
        forward = max(forward, given + stage.output_bytes + over)
        gradients = stage.gradient_bytes + given_gradient
        backward = max(backward, gradients + stage.backward_overhead_bytes)
        # While the model runs again no gradient of a parameter is being computed.
        modules = Scope([stages[i] for i in group]).modules
        largest = max((p.nbytes for m in modules for p in m.parameters(False)), default=0)
        over = max(0, stage.backward_overhead_bytes - largest)
        in_flight = max(in_flight, gradients + over)
        given, given_gradient = stage.output_bytes, stage.gradient_bytes
    left = limit_bytes - costs.input_bytes - given - max(forward + in_flight, backward)
    return max(left, _LEAST)


# ------------------------------------------------------------------ both ways


class NotAlone(Exception):
    """The gradients cannot be had without those that `.grad` is of."""


class Both:
    """Runs what is compared, from the same start."""

    def __init__(
        self,
        calls: Sequence[Call],
        sample: object,
        writes: bool,
        room_bytes: float,
        targets: Sequence[Tensor] | None = None,
    ) -> None:
        self._targets, self._room = targets, room_bytes
        leaves = pytree.tree_leaves(sample)
        self._calls_and_objects = [*calls, *(x for x in leaves if not isinstance(x, Tensor))]
        self._scope = Scope(self._calls_and_objects)
        self.modules = self._scope.look().named
        self.sample, self._writes = sample, writes
        self.names: dict[int, str] = {}
        for path, module in self.modules.items():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self.names.setdefault(id(parameter), f"{path}.{key}" if path else str(key))
        self._parameters = [
            p for m in self.modules.values() for p in m._parameters.values() if p is not None
        ]
        involved = [*tensors_in(sample), *self._parameters]
        self._devices = device_types(involved)
        self.snapshot = Snapshot(self._scope, tensors_in(sample))

    def inputs(self) -> object:
        """Return the sample as leaves, which are one or share memory where the sample's do."""

        def made(given: list[Tensor]) -> list[Tensor]:
            fresh = cloned(given) if self._writes else [t.detach() for t in given]
            return [f.requires_grad_(t.requires_grad) for f, t in zip(fresh, given, strict=True)]

        return with_tensors(self.sample, made)

    def _forgetting(self) -> AbstractContextManager[object]:
        return forgetting(self._room, [*self._parameters, *tensors_in(self.sample)])

    def plainly(self, reference: Call) -> Call:
        """Return the reference, run in windows."""

        def run(inputs: object) -> object:
            held = [*self._parameters, *tensors_in(inputs)]
            settings = Settings.capture(self._devices)  # some runs have others
            windowed = Windowed(
                lambda: reference(_writable(inputs) if self._writes else inputs),
                lambda: self._again(settings),
                self._room,
                held,
            )
            began = time.perf_counter()
            output = windowed.forward()
            seconds = max(1e-6, time.perf_counter() - began)
            windowed.most_runs = max(_MOST_RUNS, int(_SECONDS / seconds))
            if windowed.expected_runs > windowed.most_runs:
                raise TooDear
            return output

        return run

    @contextlib.contextmanager
    def _again(self, settings: Settings) -> Iterator[None]:
        with Snapshot(self._scope, tensors_in(self.sample)):
            self.snapshot.restore()
            with settings.context():
                yield

    def seen(self, call: Call, look: Callable[[Tensor], object] | None) -> Seen:
        """Run forward, and backward to `look` at gradients; return all that is left behind."""
        found: Seen = {}
        with hooks_silent(self.modules.values()), torch.enable_grad():
            inputs = self.inputs()
            # Without a look at gradients nothing that is saved for them is needed.
            with self._forgetting() if look is None else contextlib.nullcontext():
                output = call(_writable(inputs) if self._writes else inputs)
            leaves, spec = pytree.tree_flatten(output)
            if look is not None:
                found |= self._gradients(inputs, leaves, look)
            found |= self._outputs(leaves, spec, look)
        found |= left_behind(self._scope, tensors_in(self.sample))
        self.snapshot.restore()
        return found

    def _outputs(
        self, leaves: Sequence[object], spec: object, look: Callable[[Tensor], object] | None
    ) -> Seen:
        found: Seen = {"the structure of the output": str(spec)}
        for number, leaf in enumerate(leaves):
            value = look(leaf) if look and isinstance(leaf, Tensor) else fingerprint(leaf)
            # Of sequences, leaves of the state may require gradients for other steps' sake.
            judged = self._targets is None
            wants = leaf.requires_grad if judged and isinstance(leaf, Tensor) else None
            found[f"output {number}"] = value, wants
        return found

    def operators_vary(self, call: Call, look: Callable[[Tensor], object] | None) -> bool:
        """Whether operators may be why two runs differ, rather than state that is hidden.

        Those of a processor are made deterministic for that, or say that they cannot be.  Of
        devices libraries are in use that do neither.
        """
        if any(kind != "cpu" for kind in self._devices):
            return True
        with deterministic(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            one, other = (self.seen(call, look) for _ in range(2))
        return one == other or any("deterministic" in str(each.message) for each in told)

    def metered(self, chain: Call, meter: Meter) -> tuple[int, Seen]:
        """Return the most bytes alive at once in iterations by a chain, one after the other.

        And what the first of them left behind, as `seen` returns it; nothing on devices.

        Another is run as long as one finds more alive: attributes of modules may hold on to
        tensors until the next replaces them.

        Parameters
        ----------
        chain : callable
            Takes the sample.
        meter : Meter
            Given again, it knows what is left of earlier iterations.
        """
        given = tensors_in(self.sample)
        known = [*self._parameters, *given, *self._scope.look().tensors]
        meter.ignore([*known, *(t.grad for t in known if t.is_leaf and t.grad is not None)])
        casts_any = any(map(torch.is_autocast_enabled, self._devices))
        caches = casts_any and torch.is_autocast_cache_enabled()
        most, silent = 0, hooks_silent(self.modules.values())
        found: Seen = {}
        # On devices, whose allocators count, checksums would be counted too.
        looks = all(kind == "cpu" for kind in self._devices)
        try:
            # What autocast keeps is the caller's, and let go when he leaves its context.
            with silent, torch.enable_grad(), casting_anew(), meter:
                for _ in range(_MOST_ITERATIONS):
                    meter.reset_peak()
                    inputs, casts = self.inputs(), _Casts(self._parameters if caches else ())
                    with casts:
                        leaves, spec = pytree.tree_flatten(chain(inputs))
                    forward_bytes = meter.peak_bytes + sum(casts.nbytes.values())
                    meter.reset_peak()
                    seen = self._gradients(inputs, leaves, _unmetered if looks else _unseen)
                    if looks:
                        with _disable_current_modes():
                            found = seen | self._outputs(leaves, spec, fingerprint)
                            # A scope remembers, and so holds, the tensors of this iteration.
                            found |= left_behind(Scope(self._calls_and_objects), given)
                        looks = False
                    del inputs, leaves
                    before, most = most, max(most, forward_bytes, meter.peak_bytes)
                    if most == before or not meter.live_bytes():
                        break
        finally:
            self.snapshot.restore()
        return most + bytes_held(given), found

    def _gradients(
        self, inputs: object, outputs: Sequence[object], look: Callable[[Tensor], object]
    ) -> Seen:
        numbered = {  # by their places, whether or not others want gradients
            k: t for k, t in enumerate(outputs) if isinstance(t, Tensor) and t.requires_grad
        }
        roots = [*numbered.values()]
        given = [t for t in tensors_in(inputs) if t.requires_grad]
        names = {id(t): f"the gradient of input {k}" for k, t in enumerate(given)}
        targets: list[Tensor] = []
        found: Seen = {}
        ends = {p.grad_fn: p for p in self._parameters if p.grad_fn is not None}
        below = _leaves_of(roots, ends) if self._targets is None else [*given, *self._targets]
        for leaf in below:
            other = names.get(id(leaf)) or f"the gradient of {self.names.get(id(leaf))}"
            if id(leaf) not in names and id(leaf) not in self.names:
                other = f"the gradient of a tensor of shape {tuple(leaf.shape)} ({len(targets)})"
            names[id(leaf)] = other
            targets.append(leaf)
        if not targets or not roots:
            return found
        # A forward that runs again in between may differentiate by the same tensors.
        passes: set[int] = set()
        # Handed over, as a loss hands them over: held here, they would count all the way.
        entry = Sums(roots).roots([_drawn(t, k) for k, t in numbered.items()])
        with without_hooks(targets, entry) as begun, contextlib.ExitStack() as ours:
            for root in roots:
                ours.callback(root.register_hook(lambda _: passes.add(this_pass())).remove)
            for target in targets:
                take = _taker(found, names[id(target)], look, passes)
                ours.callback(target.register_hook(take).remove)
            keep = self._targets is not None or bool(ends)
            end, start = [root for root, _ in begun], [gradient for _, gradient in begun]
            differentiate(end, start, targets, keep=keep)
        return found

    # --------------------------------------------------------------- the first module

    def first_module(self, reference: Call, chain: Call, found: Sequence[str]) -> str:
        """Return where the two begin to differ, as the end of a sentence."""
        if not any(name.startswith(("output", "the structure")) for name in found):
            return ""
        try:
            calls = [self._calls(reference), self._calls(chain)]
        except Exception:  # where to look is not worth another error
            return ""
        common = {path for path, _ in calls[0]} & {path for path, _ in calls[1]}
        plain, ours = ([each for each in run if each[0] in common] for run in calls)
        agreed = ""
        for (path, bits), (other, others) in zip(plain, ours, strict=False):
            if path != other or bits != others:
                after = f" (the last that agrees is {agreed!r})" if agreed else ""
                kind = type(self.modules[path]).__name__
                return f"; first at the output of module {path!r}, {kind}{after}"
            agreed = path
        return f"; all modules up to {agreed!r} agree" if agreed else ""

    def _calls(self, call: Call) -> list[tuple[str, object]]:
        """Return the modules called, with fingerprints of their outputs."""
        noted: list[tuple[str, object]] = []

        def note(path: str) -> Callable[[object, object, object], None]:
            return lambda _m, _given, output: noted.append(
                (path, tuple(fingerprint(t) for t in tensors_in(output)))
            )

        handles = [m.register_forward_hook(note(path)) for path, m in self.modules.items()]
        try:
            with torch.enable_grad(), self._forgetting():
                call(self.inputs())
        finally:
            for handle in handles:
                handle.remove()
            self.snapshot.restore()
        return noted


class _Casts(Seeing):
    """Counts the weights that autocast would keep as it has cast them.

    Attributes
    ----------
    nbytes : dict of int
        Bytes of the casts, by the identity of the weight.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._weights = {id(w) for w in weights if w.requires_grad and w.is_leaf}
        self.nbytes: dict[int, int] = {}

    def see(self, func: OpOverload[..., object], args: Sequence[object], result: object) -> None:
        """Count a cast."""
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._weights:
            assert isinstance(result, Tensor)
            self.nbytes[id(args[0])] = result.nbytes


def _unmetered(tensor: Tensor) -> object:
    with _disable_current_modes():
        return fingerprint(tensor)


def _unseen(gradient: Tensor) -> object:
    return None


def _taker(
    found: Seen, name: str, look: Callable[[Tensor], object], passes: Set[int]
) -> Callable[[Tensor | None], Tensor | None]:
    def take(gradient: Tensor | None) -> Tensor | None:
        if gradient is None or this_pass() not in passes:  # None: a Function returned none
            return None
        found[name] = look(gradient)
        # What is kept until the end is one number in place of the gradient.
        if gradient.layout is not torch.strided:  # of which no view can be expanded
            return torch.zeros_like(gradient)
        with _disable_current_modes():
            return gradient.new_zeros(()).expand(gradient.shape)

    return take


def _drawn(output: Tensor, number: int) -> Tensor:
    """Return random numbers in the form of an output: equal ones vanish in a softmax or a norm."""
    made, generator = torch.empty_like(output), torch.Generator().manual_seed(number)
    with _disable_current_modes():  # on the host, and no part of what an iteration holds
        drawn = torch.randn(min(_MOST_DRAWN, made.numel()), dtype=made.dtype, generator=generator)
    for part in made.as_strided((made.numel(),), (1,)).split(_MOST_DRAWN):
        part.copy_(drawn[: len(part)])
    return made


def _writable(inputs: object) -> object:
    """Return copies for a run to write to; gradients reach the inputs."""

    def made(given: list[Tensor]) -> list[Tensor]:
        pairs = zip(given, cloned(given), strict=True)
        return [t.clone() if t.requires_grad else copy for t, copy in pairs]

    return with_tensors(inputs, made)


def _leaves_of(roots: Sequence[Tensor], ends: Mapping[Node, Tensor]) -> list[Tensor]:
    """Return the leaves of a graph, in order of the walk; `ends` belong to tensors that are ends.

    A parameter that was computed (`functional_call`) has a graph of its own, for later.
    """
    found = {id(t): t for t in roots if t.grad_fn is None}
    for node in nodes_below(roots, ends.__contains__):
        if node in ends:
            found[id(ends[node])] = ends[node]
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise NotAlone("reentrant checkpoint computes them only together with .grad")
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
    return list(found.values())


# ------------------------------------------------------------------ comparing


def differences(ones: Mapping[str, object], others: Mapping[str, object]) -> list[str]:
    """Return the names of what differs; gradients last, from the output backwards."""
    names = [n for n in {**ones, **others} if ones.get(n, _ABSENT) != others.get(n, _ABSENT)]
    gradients = [n for n in names if n.startswith("the gradient")]
    outputs = [n for n in names if n.startswith(("output", "the structure"))]
    rest = [n for n in names if n not in gradients and n not in outputs]
    return [*outputs, *rest, *gradients]


def listed(names: Sequence[str]) -> str:
    """Return at most three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def projected(tensor: Tensor) -> object:
    """Return a sum with fixed random weights, and what its size would be: for rounding."""
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return fingerprint(tensor)
    values = tensor.abs().double() if tensor.is_complex() else tensor.double()
    weights = _drawn(values, 0)
    share = _ROUNDING_ON_CPU if tensor.device.type == "cpu" else _ROUNDING
    if tensor.is_floating_point():
        share = max(share, torch.finfo(tensor.dtype).eps)
    return _Rounded(float((values * weights).sum()), float(values.norm()), share)


@dataclass(frozen=True, slots=True)
class _Rounded:
    projection: float
    norm: float
    share: float  # of the norm, by which two runs may differ

    def close(self, other: object) -> bool:
        if not isinstance(other, _Rounded):
            return False
        scale = max(self.norm, other.norm, 1e-30)
        return abs(self.projection - other.projection) <= self.share * scale


def agree(ones: Seen, others: Seen) -> bool:
    """Return whether two runs have the same values, up to rounding where that is compared."""
    if ones.keys() != others.keys():
        return False
    for name, one in ones.items():
        other = others[name]
        if one == other:
            continue
        inner, outer = (v[0] if isinstance(v, tuple) and v else v for v in (one, other))
        if not (isinstance(inner, _Rounded) and inner.close(outer)):
            return False
    return True
