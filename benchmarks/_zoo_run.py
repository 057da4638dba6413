"""One model or cell of `benchmarks.zoo`: checked, metered and timed in this process."""

from __future__ import annotations

import copy
import math
import pickle
import random
import statistics
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
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from benchmarks import _zoo_cells, _zoo_models
from benchmarks.zoo import LIMITS, least_of
from multistage.errors import BudgetError
from multistage.torch.tensors.meter import Meter

STEPS = 100  # of a sequence


@dataclass(frozen=True, slots=True)
class Way:
    """A way of training a module.

    Attributes
    ----------
    module : nn.Module
    outputs : callable
        Runs forward; returns the outputs that require gradients.
    given : list of Tensor
        Inputs.
    is_model : bool
        Whether limits count the inputs (models); of cells they do not.
    sums_bytes : int
        Of gradients of parameters on their way, which limits do not count and the meter
        does: autograd adds up those of a parameter that is used more than once.
    limit : callable
        The limit in bytes it runs under, once it has run.
    """

    module: nn.Module
    outputs: Callable[[], list[Tensor]]
    given: list[Tensor]
    is_model: bool
    sums_bytes: int
    limit: Callable[[], int] = lambda: 0

    def step(self) -> list[Tensor]:
        """Run forward and backward; return the outputs."""
        outs = self.outputs()
        torch.autograd.backward(outs, [_weights(o).clone() for o in outs])
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
        with _Meter(torch.device("cpu")) as meter:
            meter.ignore([*self.given, *parameters, *self.module.buffers(), *_known.values()])
            meter.ignore(t.grad for t in [*parameters, *self.given] if t.grad is not None)
            self.step()
        inputs = sum(t.nbytes for t in self.given) if self.is_model else 0
        return meter.peak_bytes + inputs - self.sums_bytes


class _Meter(Meter):
    """A meter under which a captured graph runs, in place of the model itself."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: nothing of ours comes from Inductor, whose memory no mode sees."""
        return True


_known: dict[Any, Tensor] = {}


def _weights(out: Tensor) -> Tensor:
    """Return the gradient that an output gets: the same for every way."""
    key = tuple(out.shape), out.dtype
    if key not in _known:
        generator = torch.Generator().manual_seed(7)
        _known[key] = torch.randn(out.shape, dtype=out.dtype, generator=generator) / out.numel()
    return _known[key]


def trained(way: Way) -> dict[str, Any]:
    """Train two steps from one seed; return everything that must be the same."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    found: dict[str, Any] = {}
    for step in range(2):
        for tensor in [*way.module.parameters(), *way.given]:
            tensor.grad = None
        for number, out in enumerate(way.step()):
            found[f"output {number} of step {step}"] = out.clone()
        for number, tensor in enumerate(way.given):
            found[f"gradient of input {number} in step {step}"] = _cloned(tensor.grad)
        for name, parameter in way.module.named_parameters():
            found[f"gradient of {name} in step {step}"] = _cloned(parameter.grad)
        with torch.no_grad():
            for parameter in way.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-2)
    for name, buffer in way.module.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    found["torch's generator"] = torch.get_rng_state()
    found["Python's generator"] = random.getstate()
    found["NumPy's generator"] = pickle.dumps(np.random.get_state())
    return found


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def differs(known: dict[str, Any], found: dict[str, Any]) -> str:
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
        elif not torch.equal(a, b) and not _equal_with_nan(a, b):
            return f"{key}: {(a.double() - b.double()).abs().max() / a.double().abs().max():.1e}"
    return ""


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


# ------------------------------------------------------------------------ ways


def _wanting(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]


def _used_again(way: Way) -> int:
    """Return the bytes of parameters that one forward uses more than once."""
    uses: Counter[nn.Parameter] = Counter()

    def count(module: nn.Module, *_: Any) -> None:
        uses.update(module.parameters(recurse=False))

    for module in way.module.modules():
        module.register_forward_pre_hook(count)
    way.outputs()
    return sum(parameter.nbytes for parameter, n in uses.items() if n > 1)


class ModelWays:
    """How a model is trained.

    Attributes
    ----------
    began : float
        When a copy of it was there to be prepared last, in seconds of the process.
    """

    def __init__(self, name: str) -> None:
        self.module, self.x = _zoo_models.build(name)
        if isinstance(self.x, Tensor):
            self.x.requires_grad_()
        self.given = [t for t in pytree.tree_leaves(self.x) if isinstance(t, Tensor)]
        self._sums = 0
        self._sums = _used_again(self.plain())
        self.began = 0.0

    def _called(self, call: Any) -> list[Tensor]:
        if isinstance(self.x, Tensor):
            return _wanting(call(self.x))
        return _wanting(call(**self.x))

    def plain(self) -> Way:
        """Return plain training of a copy."""
        module = copy.deepcopy(self.module)
        return Way(module, lambda: self._called(module), self.given, True, self._sums)

    def reference(self) -> Way:
        """Return training of a copy that TorchDynamo captured and that runs as it is."""
        module = copy.deepcopy(self.module)
        call = torch.compile(module, backend="eager", fullgraph=True, dynamic=False)
        return Way(module, lambda: self._called(call), self.given, True, self._sums)

    def ours(self, memory: int | float) -> Way:
        """Return training of a copy within a limit."""
        torch.compiler.reset()
        module = copy.deepcopy(self.module)
        self.began = time.process_time()
        compiled = mst.compile(module, memory=memory)
        self._called(compiled)
        module.load_state_dict(self.module.state_dict())

        def limit() -> int:
            assert compiled.plan is not None and compiled.plan.memory_bytes is not None
            return compiled.plan.memory_bytes

        return Way(module, lambda: self._called(compiled), self.given, True, self._sums, limit)

    def checkpointed(self) -> Way:
        """Return training by the library's own checkpointing of blocks."""
        module: Any = copy.deepcopy(self.module)
        if not _has_checkpointing(module):
            raise NotImplementedError("the library has no checkpointing for it")
        return Way(module, lambda: self._called(module), self.given, True, self._sums)


def _has_checkpointing(module: Any) -> bool:
    try:
        if hasattr(module, "gradient_checkpointing_enable"):
            module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            module.set_grad_checkpointing(True)
    except (AssertionError, AttributeError, ValueError, NotImplementedError):
        return False
    return True


class CellWays:
    """How a cell is trained over a sequence.

    Attributes
    ----------
    began : float
        When a copy of it was there to be prepared last, in seconds of the process.
    """

    def __init__(self, name: str) -> None:
        self.module, start = _zoo_cells.CELLS[name]()
        self.state = pytree.tree_map(lambda t: t.requires_grad_(), start)
        self.x = torch.randn(STEPS, _zoo_cells.BATCH, _zoo_cells.WIDTH)
        self.given = [*pytree.tree_leaves(self.state), self.x]
        self._sums, self.began = sum(p.nbytes for p in self.module.parameters()), 0.0

    def _steps(self, module: Any, state: Any, start: int, stop: int) -> Any:
        total: Any = None
        for t in range(start, stop):
            state, loss = module(state, self.x[t])
            total = loss if total is None else total + loss
        return state, total

    def plain(self) -> Way:
        """Return plain training of a copy."""
        module = copy.deepcopy(self.module)

        def outputs() -> list[Tensor]:
            return [self._steps(module, self.state, 0, STEPS)[1]]

        return Way(module, outputs, self.given, False, self._sums)

    def ours(self, memory: int | float) -> Way:
        """Return training of a copy within a limit."""
        module = copy.deepcopy(self.module)
        self.began = time.process_time()
        limits: list[int] = []

        def outputs() -> list[Tensor]:
            out = mst.unroll(module, self.state, self.x, memory=memory)
            assert out.loss is not None and out.plan is not None
            limits.append(out.plan.memory_bytes)
            return [out.loss]

        outputs()[0].backward()  # so that what comes once is not part of a step
        module.load_state_dict(self.module.state_dict())
        return Way(module, outputs, self.given, False, self._sums, lambda: limits[-1])

    def checkpointed(self) -> Way:
        """Return training by checkpointed chunks of the square root of the steps."""
        module, size = copy.deepcopy(self.module), math.ceil(math.sqrt(STEPS))

        def outputs() -> list[Tensor]:
            total: Any = None
            state = self.state
            for start in range(0, STEPS, size):
                stop = min(start + size, STEPS)
                state, loss = checkpoint(
                    self._steps, module, state, start, stop, use_reentrant=False
                )
                total = loss if total is None else total + loss
            return [total]

        return Way(module, outputs, self.given, False, self._sums)


# --------------------------------------------------------------------- one record


def run(name: str, seed: int, repeats: int) -> dict[str, Any]:
    """Return what became of a model or cell."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    record: dict[str, Any] = {"name": name, "points": []}
    kind, _, short = name.partition(" ")
    try:
        ways: Any = CellWays(short) if kind == "cell" else ModelWays(name)
    except ImportError as error:
        return {**record, "reason": _said(error)}
    plain = ways.plain()
    known = trained(plain)
    if different := differs(known, trained(ways.plain())):
        return {**record, "reason": f"plain training itself is not deterministic: {different}"}
    if kind != "cell":  # what a user of torch.compile trains with
        found = trained(ways.reference())
        record["asks"] = differs(known, found)
        known = found
    plain_bytes = record["plain_bytes"] = plain.peak_bytes()
    record["plain_s"] = statistics.median(plain.seconds() for _ in range(3))
    for limit in LIMITS:
        point: dict[str, Any] = {"limit": limit}
        record["points"].append(point)
        try:
            ours = ways.ours(limit)
            if "prepare_s" not in record:
                record["prepare_s"] = time.process_time() - ways.began
                # Of which one step was run.
                record["prepare_s"] = max(0.0, record["prepare_s"] - record["plain_s"])
            point["differs"] = differs(known, trained(ours))
            point["over_limit"] = ours.peak_bytes() / ours.limit()
            pairs = [(plain.seconds(), ours.seconds()) for _ in range(repeats)]
            point["over_plain"] = least_over_least(pairs)
            point["seconds"] = [list(pair) for pair in pairs]
        except BudgetError as error:
            point["reason"] = _said(error)
            if (least := least_of(str(error))) is not None:
                point["least"] = least / plain_bytes
        except Exception as error:  # whatever a model raises is what the table tells
            point["reason"] = _said(error)
    record["reason"] = next((p["reason"] for p in record["points"] if "reason" in p), "")
    record["checkpoint"] = _beside_checkpoint(ways, plain, plain_bytes, repeats)
    return record


def least_over_least(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the ratio of the least seconds of two ways that ran in turns.

    What else a machine does can only add seconds.

    Examples
    --------
    >>> least_over_least([(1.0, 3.0), (2.0, 1.5), (1.25, 2.0)])
    1.5
    """
    return min(b for _, b in pairs) / min(a for a, _ in pairs)


def _beside_checkpoint(ways: Any, plain: Way, plain_bytes: int, repeats: int) -> dict[str, Any]:
    """Return how torch's checkpointing does, and how we do at its peak."""
    found: dict[str, Any] = {}
    try:
        torchs = ways.checkpointed()
        peak = torchs.peak_bytes()
        pairs = [(plain.seconds(), torchs.seconds()) for _ in range(repeats)]
    except Exception as error:
        return {"reason": _said(error)}
    found["peak_over_plain"] = peak / plain_bytes
    found["over_plain"] = least_over_least(pairs)
    try:
        ours = ways.ours(peak)
        ours.step()
        pairs = [(torchs.seconds(), ours.seconds()) for _ in range(repeats)]
    except BudgetError as error:
        least = least_of(str(error))
        found["refused"] = "refused" + (f": at least {least / peak:.2f} of it" if least else "")
        return found
    except Exception as error:
        found["refused"] = _said(error)
        return found
    found["over_checkpoint"] = least_over_least(pairs)
    found["seconds"] = [list(pair) for pair in pairs]
    return found


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
