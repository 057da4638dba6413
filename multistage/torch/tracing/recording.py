"""The graph of a model, recorded while its `forward` runs on a sample.

`forward` runs as in training, on real tensors, and every call of torch becomes
a node: code that asks whether it is being compiled or exported does what it
does in training, and the graph calls the very functions that plain training
calls.  Modules of `torch.nn` are called whole, with whatever they hold by then;
so are modules with hooks, and modules that do what a graph cannot hold:

- draw from Python's or NumPy's generators, or set their own attributes;
- read values of tensors that depend on parameters, buffers or random numbers;
- use tensors that no call of torch has made (`torch.func`, other libraries).

What else the graph depends on is a guard, compared before it is used: shapes,
types and modes, attributes that `forward` reads, and values of tensors that
follow from the input alone (`mask.all()`).

Recording leaves the model, its buffers and all generators as they were.  It
takes the memory of a forward pass without gradients: tensors saved for them are
dropped at once.
"""

from __future__ import annotations

from torch import nn

from ...errors import ArgumentError
from .recorded import Recorded, UnrecordableError
from .recorder import Recorder


def record(model: nn.Module, sample: object) -> Recorded:
    """Record the model's `forward` on a sample, in its present mode.

    Raises ArgumentError if the model itself, not a module of it, does what a
    graph cannot hold, or fails.
    """
    if any(nn.parameter.is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            f"{type(model).__name__} has lazy modules, which are made at the first call; call it "
            "once before to_chain"
        )
    closed: dict[str, str] = {}
    kinds: set[type] = set()
    modules = dict(model.named_modules())
    while True:
        try:
            return Recorder(model, closed, kinds).run(sample)
        except UnrecordableError as error:
            path = error.path
            while path and path in closed:  # called whole it still does: the next around it
                path = path.rpartition(".")[0]
                while path and path not in modules:
                    path = path.rpartition(".")[0]
            if not path:
                raise ArgumentError(
                    f"{type(model).__name__} cannot be traced: its forward {error.cause}; write "
                    "that part as a module of its own, or the model as a list of stages"
                ) from error.__cause__
            closed[path] = error.cause
            kind = type(modules[path])
            if sum(type(modules[p]) is kind for p in closed) > 1:  # the others will too
                kinds.add(kind)
