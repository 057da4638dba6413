"""One model or cell of `benchmarks.zoo`: checked, metered and timed in this process."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import multistage.torch as mst
from benchmarks import _zoo_cells, _zoo_models
from benchmarks._zoo_bound import largest_operator
from benchmarks.zoo import least_of
from multistage.errors import BudgetError
from multistage.torch.tensors.meter import Meter

STEPS = 100  # of a sequence


@dataclass(frozen=True, slots=True)
class Way:
    """A way of training a module.

    Attributes
    ----------
    module : nn.Module
    call : callable
        Runs forward; what it returns holds the outputs.
    given : list of Tensor
        Inputs.
    beside : int
        Bytes that limits count and the meter does not: inputs of models, less gradients of
        parameters on their way, which autograd adds up where a parameter is used again.
    limit : callable
        The limit in bytes it runs under, once it has run.
    """

    module: nn.Module
    call: Callable[[], Any]
    given: list[Tensor]
    beside: int
    limit: Callable[[], int] = lambda: 0

    def step(self) -> list[Tensor]:
        """Run forward and backward; return the outputs."""
        outs = [t for t in pytree.tree_leaves(self.call()) if _wants(t)]
        loss: Tensor = Loss.apply(*outs)  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        return [o.detach() for o in outs]

    def seconds(self) -> float:
        """Run a step; return its seconds of one processor."""
        began = time.process_time()
        self.step()
        return time.process_time() - began

    def peak_bytes(self) -> int:
        """Run a step; return the peak that limits count."""
        parameters = list(self.module.parameters())
        if all(p.grad is None for p in parameters):
            self.step()  # gradients of parameters are there from now on
        with CompiledMeter(torch.device("cpu")) as meter:
            meter.ignore([*self.given, *parameters, *self.module.buffers(), *_known.values()])
            meter.ignore(t.grad for t in [*parameters, *self.given] if t.grad is not None)
            self.step()
        return meter.peak_bytes + self.beside


class Loss(torch.autograd.Function):
    """A loss: it makes gradients of outputs, and nothing holds them once they are used."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        """Return a number; which one does not matter."""
        ctx.adjoints = [_adjoint(out) for out in outs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """Return the gradients of the outputs."""
        return tuple([adjoint.clone() for adjoint in ctx.adjoints])


class CompiledMeter(Meter):
    """A meter under which a captured graph runs, in place of the model itself."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: nothing of ours comes from Inductor, whose memory no mode sees."""
        return True


_known: dict[Any, Tensor] = {}


def _adjoint(out: Tensor) -> Tensor:
    """Return the gradient that an output gets: the same for every way."""
    key = tuple(out.shape), out.dtype
    if key not in _known:
        generator = torch.Generator().manual_seed(7)
        _known[key] = torch.randn(out.shape, dtype=out.dtype, generator=generator) / out.numel()
    return _known[key]


def _wants(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def trained(way: Way) -> dict[str, Any]:
    """Train two steps from one seed; return everything that must be the same."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    parameters = dict(way.module.named_parameters())
    inputs = {f"input {number}": t for number, t in enumerate(way.given)}
    found: dict[str, Any] = {}
    for step in range(2):
        for tensor in [*parameters.values(), *way.given]:
            tensor.grad = None
        for number, out in enumerate(way.step()):
            found[f"output {number} of step {step}"] = out.clone()
        for name, tensor in [*inputs.items(), *parameters.items()]:
            grad = tensor.grad
            found[f"gradient of {name} in step {step}"] = None if grad is None else grad.clone()
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-2)
    found |= {f"buffer {name}": buffer.clone() for name, buffer in way.module.named_buffers()}
    found["torch's generator"] = torch.get_rng_state()
    found["Python's generator"] = random.getstate()
    found["NumPy's generator"] = pickle.dumps(np.random.get_state())
    return found


def differing(known: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the first thing that differs and how much; "" if nothing."""
    if known.keys() != found.keys():
        return f"{sorted(known.keys() ^ found.keys())[0]} is there on one side alone"
    for key, a in known.items():
        b = found[key]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return key
        elif a.shape != b.shape or a.dtype != b.dtype:
            return f"{key}: {list(a.shape)} {a.dtype}, not {list(b.shape)} {b.dtype}"
        elif not torch.equal(a.nan_to_num(nan=7.5), b.nan_to_num(nan=7.5)):
            return f"{key}: {(a.double() - b.double()).abs().max() / a.double().abs().max():.1e}"
    return ""


# ------------------------------------------------------------------------ ways


class ModelWays:
    """How a model is trained: plainly, captured, within a limit, by other means."""

    def __init__(self, name: str) -> None:
        self.module, self.x = _zoo_models.build(name)
        if isinstance(self.x, Tensor):
            self.x.requires_grad_()
        self.given = [t for t in pytree.tree_leaves(self.x) if isinstance(t, Tensor)]
        self._beside = sum(t.nbytes for t in self.given) - self._used_again()

    def _used_again(self) -> int:
        """Return the bytes of parameters that one forward uses more than once."""
        uses: Counter[nn.Parameter] = Counter()
        module = copy.deepcopy(self.module)
        for each in module.modules():
            each.register_forward_pre_hook(lambda m, _: uses.update(m.parameters(recurse=False)))
        self._called(module)
        return sum(parameter.nbytes for parameter, n in uses.items() if n > 1)

    def _called(self, call: Any) -> Any:
        return call(self.x) if isinstance(self.x, Tensor) else call(**self.x)

    def _way(self, module: nn.Module, call: Any = None, **more: Any) -> Way:
        call = module if call is None else call  # some have a length that they do not tell
        return Way(module, lambda: self._called(call), self.given, self._beside, **more)

    def plain(self) -> Way:
        """Return plain training of a copy."""
        return self._way(copy.deepcopy(self.module))

    def captured(self) -> Way:
        """Return training of a copy that TorchDynamo captured and that runs as it is."""
        module = copy.deepcopy(self.module)
        return self._way(
            module, torch.compile(module, backend="eager", fullgraph=True, dynamic=False)
        )

    def ours(self, memory: int | float) -> tuple[Way, float]:
        """Return training of a copy within a limit, and the seconds of its first forward."""
        module = copy.deepcopy(self.module)
        began = time.process_time()
        compiled = mst.compile(module, memory=memory)
        self._called(compiled)
        took_s = time.process_time() - began
        module.load_state_dict(self.module.state_dict())
        return self._way(module, compiled, limit=lambda: compiled.plan.memory_bytes), took_s

    def largest_operator(self) -> tuple[int, str]:
        """Return the bytes that no cut of the model into operators undercuts, and which decides."""
        held = sum(t.nbytes for t in [*self.given, *self.plain().step()])
        return largest_operator(copy.deepcopy(self.module), self._called, held)

    def others(self) -> dict[str, Callable[[], Way]]:
        """Return other means."""
        return {"checkpoint": self._checkpointed, "checkpoint_sequential": self._sequential}

    def _checkpointed(self) -> Way:
        module: Any = copy.deepcopy(self.module)
        try:
            if hasattr(module, "gradient_checkpointing_enable"):
                module.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                module.set_grad_checkpointing(True)
        except (AssertionError, AttributeError, ValueError, NotImplementedError):
            raise NotImplementedError("the library has none for it") from None
        return self._way(module)

    def _sequential(self) -> Way:
        module, inside = copy.deepcopy(self.module), set[nn.Module]()
        for each in module.modules():
            if type(each) is nn.Sequential and len(each) > 1 and each not in inside:
                inside.update(each.modules())
                each.forward = _in_segments(each)  # type: ignore[method-assign]
        if not inside:
            raise NotImplementedError("the model has no nn.Sequential")
        return self._way(module)


def _in_segments(module: nn.Sequential) -> Callable[..., Any]:
    children = list(module)
    segments = math.ceil(math.sqrt(len(children)))
    return lambda x: checkpoint_sequential(children, segments, x, use_reentrant=False)


class CellWays:
    """How a cell is trained over a sequence."""

    def __init__(self, name: str) -> None:
        self.module, start = _zoo_cells.CELLS[name]()
        self.state = pytree.tree_map(lambda t: t.requires_grad_(), start)
        self.x = torch.randn(STEPS, _zoo_cells.BATCH, _zoo_cells.WIDTH)
        self.given = [*pytree.tree_leaves(self.state), self.x]
        self._beside = -sum(p.nbytes for p in self.module.parameters())

    def _steps(self, module: Any, state: Any, start: int, stop: int) -> Any:
        total: Any = None
        for t in range(start, stop):
            state, loss = module(state, self.x[t])
            total = loss if total is None else total + loss
        return state, total

    def plain(self) -> Way:
        """Return plain training of a copy."""
        module = copy.deepcopy(self.module)
        call = lambda: self._steps(module, self.state, 0, STEPS)[1]  # noqa: E731
        return Way(module, call, self.given, self._beside)

    captured = plain

    def ours(self, memory: int | float) -> tuple[Way, float]:
        """Return training of a copy within a limit, and the seconds of its first step."""
        module = copy.deepcopy(self.module)
        limits: list[int] = []

        def call() -> Any:
            out = mst.unroll(module, self.state, self.x, memory=memory)
            assert out.plan is not None
            limits.append(out.plan.memory_bytes)
            return out.loss

        way = Way(module, call, self.given, self._beside, lambda: limits[-1])
        took_s = way.seconds()  # so that what comes once is not part of a step
        module.load_state_dict(self.module.state_dict())
        return way, took_s

    def others(self) -> dict[str, Callable[[], Way]]:
        """Return other means."""
        return {"checkpoint": self._checkpointed}

    def _checkpointed(self) -> Way:
        module, size = copy.deepcopy(self.module), math.ceil(math.sqrt(STEPS))

        def call() -> Any:
            total: Any = None
            state = self.state
            for start in range(0, STEPS, size):
                stop = min(start + size, STEPS)
                state, loss = checkpoint(
                    self._steps, module, state, start, stop, use_reentrant=False
                )
                total = loss if total is None else total + loss
            return total

        return Way(module, call, self.given, self._beside)


# --------------------------------------------------------------------- one record


def run(name: str, seed: int, repeats: int, limits: Sequence[float]) -> dict[str, Any]:
    """Return what became of a model or cell.

    Without `repeats` nothing is timed, and the first limit that works is the last one tried.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    record: dict[str, Any] = {"name": name, "points": [], "others": {}}
    kind, _, short = name.partition(" ")
    try:
        ways = CellWays(short) if kind == "cell" else ModelWays(name)
    except ImportError as error:
        return {**record, "reason": _said(error)}
    plain = ways.plain()
    known = trained(plain)
    if different := differing(known, trained(ways.plain())):
        return {**record, "reason": f"plain training itself is not deterministic: {different}"}
    found = trained(ways.captured())  # what a user of torch.compile trains with
    record["asks"], known = differing(known, found), found
    plain_bytes = record["plain_bytes"] = plain.peak_bytes()
    if repeats:
        record["plain_s"] = statistics.median(plain.seconds() for _ in range(3))
    for limit in limits:
        point: dict[str, Any] = {"limit": limit}
        record["points"].append(point)
        try:
            ours, took_s = ways.ours(limit)
            point["differs"] = differing(known, trained(ours))
            point["over_limit"] = ours.peak_bytes() / ours.limit()
            if not repeats:
                break
            # Of which one step was run.
            record.setdefault("prepare_s", max(0.0, took_s - record["plain_s"]))
            point["over_plain"], point["seconds"] = in_turns(plain, ours, repeats)
        except Exception as error:  # whatever a model raises is what the table tells
            point |= _failed(error, plain_bytes)
    if isinstance(ways, ModelWays) and any("least" in p for p in record["points"]):
        nbytes, record["operator"] = ways.largest_operator()
        record["operator_over_plain"] = nbytes / plain_bytes
    record["reason"] = next((p["reason"] for p in record["points"] if "reason" in p), "")
    for kind, other in ways.others().items() if repeats else ():
        record["others"][kind] = _beside(ways, other, plain, plain_bytes, repeats)
    return record


def in_turns(one: Way, other: Way, repeats: int) -> tuple[float, list[tuple[float, float]]]:
    """Return the ratio of the least seconds of two ways that ran in turns, and all seconds.

    What else a machine does can only add seconds.
    """
    pairs = [(one.seconds(), other.seconds()) for _ in range(repeats)]
    return min(b for _, b in pairs) / min(a for a, _ in pairs), pairs


def _beside(
    ways: ModelWays | CellWays,
    make: Callable[[], Way],
    plain: Way,
    plain_bytes: int,
    repeats: int,
) -> dict[str, Any]:
    """Return how other means do, and how we do at their peak."""
    try:
        other = make()
        peak = other.peak_bytes()
        over_plain, _ = in_turns(plain, other, repeats)
    except Exception as error:
        return {"reason": _said(error)}
    found: dict[str, Any] = {"peak_over_plain": peak / plain_bytes, "over_plain": over_plain}
    try:
        ours, _ = ways.ours(peak)
        ours.step()
        found["over_it"], found["seconds"] = in_turns(other, ours, repeats)
    except Exception as error:
        failed = _failed(error, peak)
        least = f": at least {failed['least']:.2f} of it" if "least" in failed else ""
        found["refused"] = f"refused{least}" if least else failed["reason"]
    return found


def _failed(error: Exception, whole_bytes: int) -> dict[str, Any]:
    """Return why, and of a limit that was refused the smallest, over some bytes."""
    least = least_of(str(error)) if isinstance(error, BudgetError) else None
    return {"reason": _said(error), **({"least": least / whole_bytes} if least else {})}


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    name = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
    return f"{name}{text}"[:300]


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[-1]))))
