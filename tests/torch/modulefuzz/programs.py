"""Programs: a model mixed from ingredients, trained a few steps plainly and by a front end.

A case follows from its seed, and is rendered as the source of a program that stands alone;
what is run is that program.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from . import ingredients

FRONTS = ("sequential", "compile", "unroll", "offload")
TAME = (
    "Dense",
    "Residual",
    "Conv",
    "BatchNorm",
    "GroupNorm",
    "Dropout",
    "Positions",
    "Attention",
    "Grouped",
    "Recurrent",
)
LATE = ("LateNoise", "LateDraw", "LateBuffer")
# What TorchDynamo does not capture, or captures with draws other than the module's own.
UNCAPTURED = ("Recurrent", "NumpyNoise", "Lazy")
BLOCKS = {
    name: value
    for name, value in vars(ingredients).items()
    if isinstance(value, type)
    and issubclass(value, nn.Module)
    and value.__module__ == ingredients.__name__
    and value is not ingredients.Linear
}
WILD = tuple(name for name in BLOCKS if name not in TAME and name not in LATE)

# What happens in the training loop: a line of it, and where it stands.
BEFORE = {
    "eval": "both(model, run, lambda m: m.eval())",
    "train": "both(model, run, lambda m: m.train())",
    "freeze": "next(iter(model.parameters())).requires_grad_(step % 2 == 0)",
    "assign": "assign(model)",
    "load": "model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})",
    "anneal": "anneal(model)",
    "seed": "torch.manual_seed(3)",
    "validate": "with torch.no_grad(): run(x)",
    "double": "model.double(); x = x.detach().double().requires_grad_(x.requires_grad)",
    "lengths": "x = torch.randn(3, 4 + step, D, generator=data).requires_grad_(x.requires_grad)",
    "gaps": "x = x.detach().repeat(1, 1, 2)[..., ::2].requires_grad_(x.requires_grad)",
    "expanded": "x = x.detach()[:, :1].expand(-1, 4, -1).requires_grad_(x.requires_grad)",
    "smaller": "x = x.detach()[:2].clone().requires_grad_(x.requires_grad)",
}
BETWEEN = {
    "eval": "both(model, run, lambda m: m.eval())",
    "train": "both(model, run, lambda m: m.train())",
    "freeze": "model.requires_grad_(False)",
    "thaw": "model.requires_grad_(True)",
    "assign": "assign(model)",
    "write": "with torch.no_grad(): [p.mul_(1.01) for p in model.parameters()]",
    "data": "for p in model.parameters(): p.data = p.data * 1.01",
    "fused": "fused_step(model)",
    "numpy": "[p.detach().numpy().__imul__(1.01) for p in model.parameters()]",
    "refill": "x.detach().numpy()[...] *= 1.01",
    "buffers": "with torch.no_grad(): [b.mul_(2) for b in model.buffers()]",
    "anneal": "anneal(model)",
    "draw": "torch.rand(3); random.random(); np.random.rand()",
    "input": "with torch.no_grad(): x.mul_(1.01)",
    "again": "loss_of(y).backward(retain_graph=True)",
    "second": "loss_of(run(x)).backward()",
    "validate": "with torch.no_grad(): run(x)",
}
UNSEEN = ("data", "fused", "numpy", "refill")  # writes that leave no version
FLOWS = {"tensor": "", "pair": "pair", "twice": "twice", "dict": "dict"}
CALLS = {
    "plain": "run(x)",
    "autocast": "in_autocast(run, x)",
    "functional": (
        "torch.func.functional_call(run, {n: p * 1.0 for n, p in run.named_parameters()}, (x,))"
    ),
    "float64": "with_default(run, x)",
}
STATES = ("one", "pair", "twice", "dict")
RETURNS = ("state", "same", "output", "loss", "both", "dict")
INPUTS = ("tensor", "list", "function", "tuples", "own", "constant")


@dataclass(frozen=True)
class Case:
    """One program; the defaults are the simplest."""

    seed: int
    front: str
    blocks: tuple[str, ...]
    memory: float = 0.6
    check: str = "off"
    steps: int = 1
    wants: bool = False
    tied: bool = False
    frozen: bool = False
    root: bool = False
    optional: bool = False
    closures: bool = False
    flow: str = "tensor"
    returns: str = "state"
    call: str = "plain"
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    tier: str = "memory:"
    min_bytes: int = 0
    states: str = "one"
    inputs: str = "tensor"
    outputs: str = "stack"
    chunk: int | None = None
    length: int = 9


def draw(seed: int, only: str | None = None) -> Case:
    """Return the case of a number."""
    chance = random.Random(seed)
    front = chance.choice(FRONTS) if only is None else only
    unroll = front == "unroll"
    count = chance.randint(1, 3) if unroll else chance.randint(4, 8)
    blocks = [chance.choice(TAME) for _ in range(count)]
    for _ in range(chance.choice((0, 1, 1, 2))):
        blocks[chance.randrange(count)] = chance.choice(WILD)
    if unroll and chance.random() < 0.25:
        blocks[chance.randrange(count)] = chance.choice(LATE)

    if front == "compile":
        blocks = ["Dense" if name in UNCAPTURED else name for name in blocks]

    def rarely(share: float = 0.2) -> bool:
        return chance.random() < share

    def some(events: dict[str, str]) -> tuple[str, ...]:
        return (chance.choice(list(events)),) if rarely(0.3) else ()

    # Unchecked, whoever keeps state where nobody can look is left alone with it.
    hidden = not {"Hidden", "ClassCounter"}.isdisjoint(blocks)
    return Case(
        seed=seed,
        front=front,
        blocks=tuple(blocks),
        # Graphs are not tried again within more, and their inputs are a part of the limit.
        memory=0.95 if front == "compile" else chance.choice((0.3, 0.5, 0.6, 0.7, 0.85)),
        check="error" if hidden else chance.choice(("off", "error")),
        steps=chance.choice((1, 2, 2, 3)),
        wants=rarely(0.4),
        tied=rarely(),
        frozen=rarely(),
        root=rarely(0.3),
        optional=rarely(),
        closures=rarely(),
        flow="tensor" if rarely(0.7) else chance.choice(tuple(FLOWS)),
        returns=chance.choice(RETURNS),
        # Under autocast unroll adds gradients in another precision, as its page says.
        call="plain" if rarely(0.8) or unroll else chance.choice(tuple(CALLS)),
        before=some(BEFORE),
        between=some(BETWEEN),
        tier=chance.choice(("memory:", "pinned:", "memory:?capacity=2KiB")),
        min_bytes=chance.choice((0, 0, 200)),
        states=chance.choice(STATES),
        inputs=chance.choice(INPUTS),
        outputs=chance.choice(("stack", "sum", "last")),
        chunk=chance.choice((None, 1, 2, 3)),
        length=chance.choice((5, 9, 14)),
    )


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less."""
    for k in range(len(case.blocks)):
        if len(case.blocks) > (1 if case.front in ("unroll", "offload") else 2):
            yield replace(case, blocks=case.blocks[:k] + case.blocks[k + 1 :])
    for k, name in enumerate(case.blocks):
        if name != "Dense":
            yield replace(case, blocks=(*case.blocks[:k], "Dense", *case.blocks[k + 1 :]))
    for field in fields(case):
        if field.name in ("seed", "front", "blocks", "memory"):
            continue
        if getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})


# ----------------------------------------------------------------------------- as text

_HEAD = '''"""Case {seed}: {front}.  Prints what differs from plain training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from multistage.errors import BudgetError

D = 8
'''

_LOSS = '''
def loss_of(y: Any) -> Tensor:
    """Weigh all numbers differently."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(y) if isinstance(t, Tensor)]
    total = torch.zeros(())
    for k, t in enumerate(t for t in leaves if t.requires_grad):
        weights = torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)
        total = total + (k + 1) * (t.square() * weights).sum()
    return total
'''

_HELP = {
    "both(": """
def both(model: nn.Module, run: Any, do: Any) -> None:
    for each in (model, run):
        if isinstance(each, nn.Module):
            do(each)
""",
    "anneal(": """
def anneal(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "temperature"):
            module.temperature *= 0.9
        if hasattr(module, "options"):
            module.options["bias"], module.table[:], type(module).total = 2.0, 5.0, 2.0
""",
    "assign(": '''
def assign(model: nn.Module) -> None:
    """Give a model other parameter objects."""
    model.load_state_dict({k: 0.9 * v for k, v in model.state_dict().items()}, assign=True)
''',
    "fused_step(": """
def fused_step(model: nn.Module) -> None:
    given = [p for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(given or [nn.Parameter(torch.ones(1))], lr=0.1, fused=True).step()
""",
    "in_autocast(": """
def in_autocast(run: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return run(x)
""",
    "with_default(": """
def with_default(run: Any, x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return run(x)
    finally:
        torch.set_default_dtype(torch.float32)
""",
}

_STAGES = {
    "pair": '''
class Paired(nn.Module):
    """Passes a tensor and an integer tensor on."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, state: Any) -> Any:
        x, n = state if isinstance(state, tuple) else (state, torch.tensor(1))
        return self.inner(x), n + 1
''',
    "twice": '''
class Twice(nn.Module):
    """Passes the same tensor twice."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, state: Any) -> Any:
        a, b = state if isinstance(state, tuple) else (state, state)
        y = self.inner(a) + 0.5 * b
        return y, y
''',
    "dict": '''
class InDict(nn.Module):
    """Passes a dict, with a view of the tensor and a number."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, state: Any) -> Any:
        if not isinstance(state, dict):
            state = {"x": state, "part": state[..., :2], "number": 1}
        y = self.inner(state["x"]) + state["part"].mean()
        return {"x": y, "part": y[..., :2], "number": state["number"] + 1}
''',
}
_WRAPPED = {"pair": "Paired", "twice": "Twice", "dict": "InDict"}

_RESULT = {
    "state": "x",
    "same": "(x, x)",
    "output": "(x, x * 2)",
    "loss": '{"loss": x.square().mean(), "x": x}',
    "both": "[x, x[0]]",
    "dict": '{"x": x, "again": x, "none": None}',
}


@functools.cache
def _source(name: str) -> str:
    return inspect.getsource(getattr(ingredients, name))


def text(case: Case) -> str:
    """Return the program of a case."""
    body = _unrolled(case) if case.front == "unroll" else _trained(case)
    helpers = [source for name, source in _HELP.items() if name in body]
    used = dict.fromkeys(case.blocks)
    functions = {"Custom": "Square", "EnablesGrad": "RunsAgain", "ReadsTwice": "Reciprocal"}
    sources = [function for block, function in functions.items() if block in used]
    classes = [_source(name) for name in ["Linear", *sources, *used]]
    parts = [
        _HEAD.format(seed=case.seed, front=case.front),
        *("\n" + source for source in classes),
        _LOSS,
        *helpers,
        body,
        _tail(case),
    ]
    return "\n".join(parts)


def _tied(case: Case, blocks: str) -> list[str]:
    lines = []
    if case.tied:
        have = [
            k for k, b in enumerate(case.blocks) if b in ("Dense", "NoGrad", "InPlace", "Frozen")
        ]
        if len(have) > 1:
            a, b = have[0], have[-1]
            name = {k: "a" if case.blocks[k] == "Frozen" else "linear" for k in (a, b)}
            lines.append(f"{blocks}[{b}].{name[b]}.weight = {blocks}[{a}].{name[a]}.weight  # tied")
    if case.frozen:
        lines.append(f"{blocks}[0].requires_grad_(False)")
    return lines


def _indented(lines: list[str], depth: int) -> str:
    return "".join("    " * depth + line + "\n" for line in lines)


def _trained(case: Case) -> str:
    made = ", ".join(f"{name}()" for name in case.blocks)
    if case.front == "sequential":
        build = _chain_of_stages(case, made)
    else:
        build = _model(case, made)
    if case.front == "offload":
        wrap = f"""
def wrap(model: Any, x: Tensor) -> Any:
    def run(given: Tensor) -> Any:
        with mst.offload({case.tier!r}, min_bytes={case.min_bytes}):
            return model(given)

    return run
"""
    elif case.front == "compile":
        wrap = f"""
def wrap(model: Any, x: Tensor) -> Any:
    return mst.compile(model, memory={case.memory}, check={case.check!r})
"""
    else:
        wrap = f"""
def wrap(model: Any, x: Tensor) -> Any:
    for memory in ({case.memory}, 0.75, 0.9):
        try:
            return mst.Sequential(stages_of(model), x, memory=memory, check={case.check!r})
        except BudgetError:
            continue
    return mst.Sequential(stages_of(model), x, check={case.check!r})
"""
    call = CALLS[case.call]
    if case.front == "offload":
        call = call.replace(
            "functional_call(run, {n: p * 1.0 for n, p in run.",
            "functional_call(model, {n: p * 1.0 for n, p in model.",
        )
    before = [f"if step > 0:\n            {BEFORE[e]}" for e in case.before]
    # Whether a write to `.data` reaches what is offloaded is left open.
    known = [e for e in case.between if e not in UNSEEN or case.front != "offload"]
    between = [BETWEEN[e] for e in known]
    train = f"""
def train(wrap: Any) -> dict[str, Any]:
    start()
    model = build()
    run: Any = model
    data = torch.Generator().manual_seed(1)
    seen: dict[str, Any] = {{}}
    for step in range({case.steps}):
        x = torch.randn(3, 4, D, generator=data).requires_grad_({case.wants})
        if wrap is not None and step == 0:
            run = wrap(model, x)
{_indented(before, 2)}        y = {call}
{_indented(between, 2)}        loss_of(y).backward()
        seen[f"output {{step}}"] = y
        seen[f"gradient of x {{step}}"] = x.grad
        note(seen, step, model)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None and p.requires_grad and not p.grad.is_sparse:
                    p -= 0.01 * p.grad
    return seen
"""
    return build + wrap + train


def _chain_of_stages(case: Case, made: str) -> str:
    wrapped = _WRAPPED.get(case.flow)
    lines = [f"blocks = [{made}]", *_tied(case, "blocks")]
    if wrapped:
        lines.append(f"blocks = [{wrapped}(block) for block in blocks]")
    lines.append("return nn.Sequential(*blocks)")
    build = f"\ndef build() -> nn.Module:\n{_indented(lines, 1)}"
    if case.closures:
        stages = """
def stages_of(model: Any) -> Any:
    return [lambda x, block=block: block(x) for block in list(model)]
"""
    else:
        stages = "\ndef stages_of(model: Any) -> Any:\n    return model\n"
    return _STAGES.get(case.flow, "") + build + stages


def _model(case: Case, made: str) -> str:
    init = [f"self.blocks = nn.ModuleList([{made}])", *_tied(case, "self.blocks")]
    forward = []
    arguments = "x: Any"
    if case.root:
        init += [
            "self.shift = nn.Parameter(torch.ones(D))",
            'self.register_buffer("count", torch.zeros(()))',
        ]
        forward += ["self.count += 1", "x = x * self.shift + 0.01 * self.count"]
    if case.optional:
        arguments = (
            'x: Any, mask: Any = None, flag: bool = False, scale: float = 1.0, mode: str = "a"'
        )
        forward += ["if mask is not None:", "    x = x * mask", "x = -x if flag else x * scale"]
    forward += ["for block in self.blocks:", "    x = block(x)", f"return {_RESULT[case.returns]}"]
    return f"""
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
{_indented(init, 2)}
    def forward(self, {arguments}) -> Any:
{_indented(forward, 2)}

def build() -> nn.Module:
    return Model()
"""


_TAKE = {
    "one": ["h = state"],
    "pair": ["h, c = state"],
    "twice": ["h, other = state", "h = 0.5 * h + 0.5 * other"],
    "dict": ['h, n = state["h"], state["n"]'],
}
_GIVE = {
    "one": "h",
    "pair": "(h, torch.tanh(c + h))",
    "twice": "(h, h)",
    "dict": '{"h": h, "n": n + 1}',
}
_START = {
    "one": "torch.zeros(3, 4, D)",
    "pair": "(torch.zeros(3, 4, D), torch.zeros(3, 4, D))",
    "twice": "(torch.zeros(3, 4, D), torch.zeros(3, 4, D))",
    "dict": '{"h": torch.zeros(3, 4, D), "n": torch.zeros((), dtype=torch.int64)}',
}
_Y = {
    "state": "",
    "same": "h",
    "output": "h * 2",
    "loss": "h.square().mean()",
    "both": "(h, h.square().mean())",
    "dict": '{"loss": h.square().mean(), "y": h, "z": h[0]}',
}
_GIVEN = {
    "tensor": "xs",
    "list": "list(xs.unbind(0))",
    "function": "lambda t: xs[t]",
    "tuples": "[(x, 2 * x) for x in xs.unbind(0)]",
    "own": "Sequence(xs)",
    "constant": "[xs[0] for _ in range(len(xs))]",
}
_SEQUENCE = """
class Sequence:
    def __init__(self, xs: Tensor) -> None:
        self.xs = xs

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, t: int) -> Tensor:
        return self.xs[t]
"""


def _unrolled(case: Case) -> str:
    made = ", ".join(f"{name}()" for name in case.blocks)
    init = [
        "self.into = nn.Linear(D, D)",
        f"self.blocks = nn.ModuleList([{made}])",
        *_tied(case, "self.blocks"),
    ]
    forward = list(_TAKE[case.states])
    if case.inputs == "tuples":
        forward.append("x = x[0] + x[1]")
    forward += [
        "h = torch.tanh(h + self.into(x)) * 1.3",
        "for block in self.blocks:",
        "    h = block(h)",
    ]
    y = _Y[case.returns]
    result = f"{_GIVE[case.states]}, {y}" if y else _GIVE[case.states]
    forward.append(f"return {result}")
    cell = "lambda state, x: model(state, x)" if case.closures else "model"
    before = [
        f"if step > 0:\n            {BEFORE[e]}"
        for e in case.before
        if e not in ("smaller", "lengths", "gaps", "expanded", "double", "validate")
    ]
    skipped = ("second", "validate", "again", "fused", "numpy", "refill")
    between = [BETWEEN[e] for e in case.between if e not in skipped]
    between = [line.replace("x.mul_", "xs.mul_") for line in between]
    head = _SEQUENCE if case.inputs == "own" else ""
    context = {"autocast": 'with torch.autocast("cpu", torch.bfloat16):'}.get(case.call, "if True:")
    return f"""{head}
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
{_indented(init, 2)}
    def forward(self, state: Any, x: Any) -> Any:
{_indented(forward, 2)}

def build() -> nn.Module:
    return Model()


def plainly(cell: Any, state: Any, given: Any, steps: int) -> Any:
    ys = []
    for t in range(steps):
        result = cell(state, given(t) if callable(given) else given[t])
        state, y = result if {bool(y)} else (result, None)
        ys.append(torch.utils._pytree.tree_flatten(y))
    if not {bool(y)}:
        return state, None
    reduced = []
    for k in range(len(ys[0][0])):
        each = [leaves[k] for leaves, _ in ys]
        if each[0].dim() == 0 or {case.outputs!r} == "sum":
            reduced.append(sum(each[1:], each[0]))
        else:
            reduced.append(each[-1] if {case.outputs!r} == "last" else torch.stack(each))
    return state, torch.utils._pytree.tree_unflatten(reduced, ys[0][1])


def wrap(cell: Any, state: Any, given: Any, steps: int) -> Any:
    for memory in ({case.memory / 2}, 0.6, 0.9):
        try:
            out = mst.unroll(
                cell, state, given, n_steps=steps, memory=memory, chunk={case.chunk},
                outputs={case.outputs!r}, planner="recompute",
            )
            break
        except BudgetError:
            continue
    else:
        out = mst.unroll(cell, state, given, n_steps=steps, outputs={case.outputs!r})
    if not {bool(y)}:
        return out.state, None
    return out.state, out.loss if out.outputs is None else out.outputs


def train(wrap: Any) -> dict[str, Any]:
    start()
    model = build()
    run: Any = model
    cell = {cell}
    data = torch.Generator().manual_seed(1)
    seen: dict[str, Any] = {{}}
    for step in range({case.steps}):
        xs = torch.randn({case.length}, 3, 4, D, generator=data).requires_grad_({case.wants})
        state: Any = {_START[case.states]}
        given: Any = {_GIVEN[case.inputs]}
{_indented(before, 2)}        {context}
            last, y = (plainly if wrap is None else wrap)(cell, state, given, len(xs))
{_indented(between, 2)}        loss_of((last, y)).backward()
        seen[f"output {{step}}"] = (last, y)
        seen[f"gradient of x {{step}}"] = xs.grad
        note(seen, step, model)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None and p.requires_grad and not p.grad.is_sparse:
                    p -= 0.01 * p.grad
    return seen
"""


def _tail(case: Case) -> str:
    resets = {
        "ClassCounter": "ClassCounter.calls = 0",
        "Everywhere": 'globals().pop("_calls", None); Everywhere.total = 1.0',
    }
    reset = "".join(f"\n    {line}" for name, line in resets.items() if name in case.blocks)
    return f'''
def start() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7){reset}


def note(seen: dict[str, Any], step: int, model: nn.Module) -> None:
    """Remember all that a step leaves behind."""
    for name, p in model.named_parameters():
        grad = None if p.grad is None else p.grad.to_dense().clone()
        seen[f"gradient of {{name}} {{step}}"] = grad
    for name, b in model.named_buffers():
        seen[f"buffer {{name}} {{step}}"] = b.clone()
    for name, m in model.named_modules():
        seen[f"attribute {{name}}.calls {{step}}"] = getattr(m, "calls", None)
    seen[f"torch's generator {{step}}"] = torch.get_rng_state()
    seen[f"Python's generator {{step}}"] = hash(random.getstate())
    seen[f"NumPy's generator {{step}}"] = hash(np.random.get_state()[1].tobytes())


def differing(plain: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    def bits(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach()
            return value.shape, value.dtype, torch.nan_to_num(value.double()).tolist()
        return value

    names = []
    for name in {{**plain, **ours}}:
        a, b = (torch.utils._pytree.tree_leaves(seen.get(name)) for seen in (plain, ours))
        if [bits(t) for t in a] != [bits(t) for t in b]:
            names.append(name)
    return names


if __name__ == "__main__":
    plain, ours = train(None), train(wrap)
    print("these differ:", differing(plain, ours))
'''


def describe(case: Case) -> str:
    """Return a case in one line, without what is at its default."""
    given: dict[str, Any] = {
        field.name: getattr(case, field.name)
        for field in fields(case)
        if getattr(case, field.name) != field.default
    }
    return "Case(" + ", ".join(f"{k}={v!r}" for k, v in given.items()) + ")"
