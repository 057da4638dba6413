"""Modules to be mixed: each maps (batch, time, width) to the same, in a way of its own.

Their sources are copied into the programs, so each stands alone but for `import`s.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst

D = 8  # width


class Linear(nn.Module):
    """What many of them begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)


class Dense(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.inner = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x.mT)).mT


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class GroupNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) * 1.5


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1], device=x.device))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Grouped(nn.Module):
    """Two query heads share one key and value head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 2, D // 2).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 1, 2, D // 2).permute(3, 0, 2, 1, 4)
        k, v = k.expand(b, 2, t, D // 2), v.expand(b, 2, t, D // 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).reshape(b, t, D)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Counter(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x * (1 + 0.01 * self.count)


class Replaced(nn.Module):
    """Keeps a moving average in a buffer that is another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x - self.mean


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return x - self.mean


class CarriesGraph(nn.Module):
    """A buffer that takes part in the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))
        self.register_buffer("last", torch.zeros(D), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = 0.5 * self.last.detach() + self.scale
        return x * self.last


class Attribute(nn.Module):
    """Counts its calls in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Annealed(nn.Module):
    """Reads an attribute that the training loop may set."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.temperature


class Helper(nn.Module):
    """Counts in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return x * (1 + 0.01 * self.state["calls"])


class Hidden(nn.Module):
    """Counts where nobody can look."""

    def __init__(self) -> None:
        super().__init__()
        calls = iter(range(1000))
        self.next = lambda: next(calls)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.01 * self.next())


class ClassCounter(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * (1 + 0.01 * type(self).calls)


class Noise(nn.Module):
    """Of a shape that does not depend on the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(D) if self.training else x


class NoiseLike(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class PythonNoise(nn.Module):
    """Normal numbers, of which the second of a pair is left over."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * random.gauss(0, 1))


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.from_numpy(np.random.randn(D).astype(np.float32)) * np.random.randn()


class OwnNoise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(D, generator=self.generator)


class LayerDrop(Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + self.linear(x)


class TorchDrop(Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            return x
        return x + self.linear(x)


class Branch(nn.Module):
    """Does one of two things by the value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() if x.sum() > 0 else self.b(x)


class Overwrites(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) if not (x.is_leaf and x.requires_grad) else x * 0.5


class InPlace(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[..., 0] = 1.0
        return F.relu(y.add_(0.1), inplace=True)


class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Checkpointed(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.linear(y).sin(), x, use_reentrant=False)


class Reentrant(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.linear(y).sin(), x, use_reentrant=True)


class Penalised(Linear):
    """Differentiates inside forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(given).square().sum(), given)
        return x + 0.1 * slope


class Swallows(Linear):
    """Goes on whatever its code raises."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.linear(x).exp().clamp(max=2)
        except Exception:
            return x


class NoGrad(Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.linear(x))
        return x * gate


class HalfPrecise(Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        return x + y.float()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 1.9 * x * gradient + 0 * ctx.saved_tensors[0]


class Custom(nn.Module):
    """A Function whose gradient is not that of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x).clamp(max=2)


class Optional(Linear):
    """Takes more arguments than it is given."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, mode: str = "a"
    ) -> Tensor:
        y = self.linear(x) * scale
        if mask is not None:
            y = y * mask
        return y.tanh() if mode == "a" else y


class View(nn.Module):
    """Returns its input, seen otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT.mT[:, :, :]


class Expanded(nn.Module):
    """Returns a tensor whose strides overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).expand(x.shape)


class HookedOutput(Linear):
    """A forward hook changes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda _m, _given, y: y * 0.9)
        self.linear.register_forward_pre_hook(lambda _m, given: (given[0] + 0.1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class HookedGradient(Linear):
    """A hook changes the gradient of what it returns; another that of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda g: g * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-0.5, 0.5))
        return y


class BackwardHook(Linear):
    """Counts its backward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("backwards", torch.zeros(()))
        self.linear.register_full_backward_hook(self.note)

    def note(self, _module: Any, _given: Any, _wanted: Any) -> None:
        self.backwards += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class PostAccumulate(Linear):
    """Counts how often its gradient is accumulated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("backwards", torch.zeros(()))
        self.linear.weight.register_post_accumulate_grad_hook(self.note)

    def note(self, _parameter: Any) -> None:
        self.backwards += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Cached(nn.Module):
    """Keeps what it made for a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape != x.shape[1:]:
            self.table = torch.linspace(0, 1, x[0].numel()).view(x.shape[1:])
        return x + self.table


class Renormalised(Linear):
    """Writes to its own parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.3, 0.3)
        return self.linear(x)


class MaxNorm(nn.Module):
    """An embedding that writes to its weight when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, D, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class Shared(nn.Module):
    """Two modules that use one buffer and one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(D), nn.BatchNorm1d(D)
        self.b.running_mean = self.a.running_mean
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.mT))).mT


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, D, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


class RootParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(D))
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(D)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x * part
        return x + self.shift


class Stateless(Linear):
    """Calls a module with other parameters than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(D, D))

    def forward(self, x: Tensor) -> Tensor:
        other = {"weight": self.linear.weight + self.delta, "bias": self.linear.bias}
        return torch.func.functional_call(self.linear, other, (x,))


class LateNoise(nn.Module):
    """Draws random numbers from its seventh call on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 0.1 * torch.randn(D) if self.calls > 6 else x


class LateDraw(nn.Module):
    """Draws random numbers where its input is large."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(()) if x.detach().abs().max() > 1.2 else x


class LateBuffer(nn.Module):
    """Writes to a buffer where its input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().abs().max() > 1.2:
            self.scale *= 0.9
        return x * self.scale


class Forked(nn.Module):
    """Draws random numbers and puts the generator's state back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng([]):
            return x + 0.1 * torch.randn(D)


class PutsBack(nn.Module):
    """The same of Python's and NumPy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        states = random.getstate(), np.random.get_state()
        y = x * (1 + random.random()) * (1 + float(np.random.rand()))
        random.setstate(states[0])
        np.random.set_state(states[1])
        return y / 3


class Seeded(nn.Module):
    """Seeds the generator."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return x * 1.1


class RunsAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            given = ctx.saved_tensors[0].detach().requires_grad_()
            y = given.sin()
        return torch.autograd.grad(y, given, gradient)


class EnablesGrad(nn.Module):
    """A Function that differentiates in its backward what it runs again there."""

    def forward(self, x: Tensor) -> Tensor:
        return RunsAgain.apply(x)


class Bias(nn.Module):
    """Attention with a bias for distances that all heads share, as Bloom has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).chunk(3, -1)
        places = torch.arange(x.shape[1], dtype=x.dtype)
        bias = places[None, None].expand(x.shape[0], x.shape[1], -1)
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=0.25)
        return x + self.out(scores.softmax(-1) @ v)


class OldSpectralNorm(nn.Module):
    """Hooks write weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OldWeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Force(nn.Module):
    """Uses the gradient of an energy, as interatomic potentials do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.mix = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(z).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, z, create_graph=True)
        return self.mix(x + force).tanh()


class Unrolls(nn.Module):
    """Runs a recurrence, of which other chunks are looked at each time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(0, 1)
        memory = "100 KiB" if x.requires_grad else None
        y = mst.unroll(self.cell, torch.zeros_like(y), [y] * 6, memory=memory, chunk=2).state
        return y.view(x.shape)


class Junk(nn.Module):
    """Another kernel where no gradient is required, with workspaces it does not fill."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D)

    def forward(self, x: Tensor) -> Tensor:
        junk = [torch.full((size,), float(len(x))) for size in (1000, 5000, 20_000)]
        del junk
        return self.lstm(x)[0]


class Leaky(nn.Module):
    """Its slopes are drawn after they are saved."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x, training=True)


class LeafInside(nn.Module):
    """Makes a leaf, as HuBERT's and Wav2Vec2's feature encoders do."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach()[:, None]
        y.requires_grad = True
        return x + y[:, 0]


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp().reciprocal()
        ctx.save_for_backward(x, y, x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first, second = ctx.saved_tensors, ctx.saved_tensors
        return -gradient * first[1] + 0 * second[0] * second[2]


class ReadsTwice(nn.Module):
    """A Function that reads what it saved twice."""

    def forward(self, x: Tensor) -> Tensor:
        return Reciprocal.apply(x)


class OwnGenerators(nn.Module):
    """Draws from generators of its own, of NumPy's and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = np.random.default_rng(2), np.random.RandomState(3)
        self.three = random.Random(4)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * (self.one.random() + self.two.randn() + self.three.random()))


class Unregistered(Linear):
    """Keeps a module in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.BatchNorm1d(D)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden[0](self.linear(x).mT).mT
        return torch.tanh(y) * (1 + 0.01 * self.hidden[0].num_batches_tracked)


class Everywhere(nn.Module):
    """Reads and changes values of its own, of its class and of the process."""

    total = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.options, self.table, self.seen = {"bias": 0.5}, np.ones(2), []

    def forward(self, x: Tensor) -> Tensor:
        global _calls
        _calls = globals().get("_calls", 0) + 1
        self.seen.append(x.detach())
        self.options["bias"] += 0.1
        self.table[0] *= 1.1
        Everywhere.total += 0.1
        return torch.tanh(x * self.table[0] * self.total + self.options["bias"]) * (
            1 + 0.1 * _calls
        )
