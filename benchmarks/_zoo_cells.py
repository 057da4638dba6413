"""The cells of `benchmarks.zoo`: recurrences of the literature, small, as they are written.

Each is called as `cell(state, x)` and returns the next state and a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BATCH = 32, 16
Make = Callable[[], tuple[nn.Module, Any]]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(BATCH, *shape)


class GRUStack(nn.Module):
    """Three GRU cells, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH) for _ in range(3)])
        self.drop = nn.Dropout(0.1)

    def forward(self, state: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        new = []
        for cell, h in zip(self.cells, state, strict=True):
            new.append(cell(x, h))
            x = self.drop(new[-1])
        return new, x.square().mean()


class NormLSTM(nn.Module):
    """LSTM with layer norm (Ba et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.norm_x, self.norm_h = nn.LayerNorm(4 * WIDTH), nn.LayerNorm(4 * WIDTH)
        self.norm_c = nn.LayerNorm(WIDTH)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = state
        i, f, g, o = (self.norm_x(self.x(x)) + self.norm_h(self.h(h))).chunk(4, -1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.norm_c(c))
        return (h, c), h.square().mean()


class Elman(nn.Module):
    """Elman (1990)."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.x(x) + self.h(h))
        return h, F.cross_entropy(self.head(h), x.argmax(-1))


class SRU(nn.Module):
    """Simple recurrent unit (Lei et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(WIDTH, 3 * WIDTH)
        self.forget, self.reset = (nn.Parameter(torch.randn(WIDTH) / 9) for _ in range(2))

    def forward(self, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        u, f, r = self.x(x).chunk(3, -1)
        f, r = torch.sigmoid(f + self.forget * c), torch.sigmoid(r + self.reset * c)
        c = f * c + (1 - f) * u
        h = r * c + (1 - r) * x
        return c, h.square().mean()


class MinGRU(nn.Module):
    """Minimal GRU (Feng et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.lerp(h, self.h(x), torch.sigmoid(self.z(x)))
        return h, h.square().mean()


class SelectiveScan(nn.Module):
    """One step of Mamba's scan (Gu and Dao 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.delta = nn.Linear(WIDTH, 2 * WIDTH + 32), nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.arange(1.0, 17.0).log().expand(WIDTH, 16).contiguous())
        self.d, self.out = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        u, gate, b, c = self.mixed(x).split([WIDTH, WIDTH, 16, 16], -1)
        delta = F.softplus(self.delta(u)).unsqueeze(-1)
        h = torch.exp(-delta * self.a.exp()) * h + delta * b.unsqueeze(1) * u.unsqueeze(-1)
        y = (h @ c.unsqueeze(-1)).squeeze(-1) + self.d * u
        return h, self.out(y * F.silu(gate)).square().mean()


class MLSTM(nn.Module):
    """Matrix memory of xLSTM (Beck et al. 2024), stabilised."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Tensor], x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        i, f = self.gates(x).chunk(2, -1)
        f = F.logsigmoid(f)
        m = torch.maximum(f + state["m"], i)
        keep, add = torch.exp(f + state["m"] - m), torch.exp(i - m)
        k = k / math.sqrt(WIDTH)
        c = keep.unsqueeze(-1) * state["c"] + add.unsqueeze(-1) * torch.einsum("bi,bj->bij", v, k)
        n = keep * state["n"] + add * k
        below = torch.maximum((n * q).sum(-1, keepdim=True).abs(), torch.exp(-m))
        h = torch.sigmoid(self.o(x)) * (c @ q.unsqueeze(-1)).squeeze(-1) / below
        return {"c": c, "n": n, "m": m}, h.square().mean()


class SLSTM(nn.Module):
    """Scalar memory of xLSTM (Beck et al. 2024), with exponential gates."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> Any:
        h, c, n, m = state
        i, f, z, o = (self.x(x) + self.h(h)).chunk(4, -1)
        f = F.logsigmoid(f)
        new = torch.maximum(f + m, i)
        keep, add = torch.exp(f + m - new), torch.exp(i - new)
        c, n = keep * c + add * torch.tanh(z), keep * n + add
        h = torch.sigmoid(o) * c / n.clamp_min(1e-6)
        return (h, c, n, new), h.square().mean()


class NeuralODE(nn.Module):
    """One Runge-Kutta step of a neural differential equation (Chen et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = 0.05
        k1 = self.f(y)
        k2 = self.f(y + h / 2 * k1)
        k3 = self.f(y + h / 2 * k2)
        k4 = self.f(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y, (y - x).square().mean()


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()).square()


class LIF(nn.Module):
    """Two layers of leaky integrate-and-fire neurons with a surrogate gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.decay = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, state: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:
        new = []
        for layer, v in zip(self.layers, state, strict=True):
            v = torch.sigmoid(self.decay) * v + layer(x)
            x = _Spike.apply(v - 1)
            new.append(v - x.detach())
        return new, (x.mean(-1) - 0.1).square().mean()


class ConvLSTM(nn.Module):
    """Shi et al. (2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(1 + 8, 4 * 8, 3, padding=1)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = state
        image = x.view(BATCH, 1, 4, WIDTH // 4)
        i, f, g, o = self.gates(torch.cat([image, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), (h.mean(1, keepdim=True) - image).square().mean()


class LinearAttention(nn.Module):
    """Katharopoulos et al. (2020), step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        s, z = state
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        s, z = s + k.unsqueeze(-1) * v.unsqueeze(1), z + k
        y = torch.einsum("bi,bij->bj", q, s) / (q * z).sum(-1, keepdim=True)
        return (s, z), (y - x).square().mean()


class Hyper(nn.Module):
    """A small RNN that scales the weights of another (Ha et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.GRUCell(2 * WIDTH, 8)
        self.scale_x, self.scale_h = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.x, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, small = state
        small = self.small(torch.cat([x, h], -1), small)
        h = torch.tanh(self.scale_x(small) * self.x(x) + self.scale_h(small) * self.h(h))
        return (h, small), h.square().mean()


class Generated(nn.Module):
    """A cell whose weights another network makes, called by `functional_call`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.RNNCell(WIDTH, WIDTH)
        self.maker = nn.Linear(4, WIDTH * WIDTH)
        self.code = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = {"weight_hh": self.maker(self.code).view(WIDTH, WIDTH) / 8}
        h = torch.func.functional_call(self.inner, made, (x, h))
        return h, h.square().mean()


class Memory(nn.Module):
    """A controller that reads and writes a memory by content (Graves et al. 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.control = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.keys, self.write = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, state: dict[str, Any], x: Tensor) -> Any:
        memory, (h, c), read = state["memory"], state["control"], state["read"]
        h, c = self.control(torch.cat([x, read], -1), (h, c))
        writing, reading = (
            torch.softmax(F.cosine_similarity(memory, key.unsqueeze(1), -1) * 4, -1)
            for key in self.keys(h).chunk(2, -1)
        )
        erase, add = self.write(h).chunk(2, -1)
        memory = memory * (1 - writing.unsqueeze(-1) * torch.sigmoid(erase).unsqueeze(1))
        memory = memory + writing.unsqueeze(-1) * add.unsqueeze(1)
        read = torch.bmm(reading.unsqueeze(1), memory).squeeze(1)
        return {"memory": memory, "control": (h, c), "read": read}, (read - x).square().mean()


class Window(nn.Module):
    """Attention over the last eight inputs, kept in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, ring: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.attend(x.unsqueeze(1), ring, ring, need_weights=False)
        ring = torch.cat([ring[:, 1:], torch.tanh(x.unsqueeze(1) + y)], 1)
        return ring, y.square().mean()


class Zoneout(nn.Module):
    """An LSTM whose units keep their state at random (Krueger et al. 2016), with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.LSTMCell(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = self.cell(self.norm(x), state)
        keep = torch.rand_like(h) < 0.1
        h, c = torch.where(keep, state[0], h), torch.where(keep, state[1], c)
        return (h, c), h.square().mean()


def _start(cell: type[nn.Module], *shapes: tuple[int, ...]) -> Make:
    def make() -> tuple[nn.Module, Any]:
        zeros = [_zeros(*shape) for shape in shapes]
        return cell(), zeros[0] if len(zeros) == 1 else tuple(zeros)

    return make


_ROW, _MATRIX = (WIDTH,), (WIDTH, WIDTH)
CELLS: dict[str, Make] = {
    "Elman": _start(Elman, _ROW),
    "GRU stack": lambda: (GRUStack(), [_zeros(WIDTH) for _ in range(3)]),
    "LSTM with layer norm": _start(NormLSTM, _ROW, _ROW),
    "LSTM with zoneout": _start(Zoneout, _ROW, _ROW),
    "SRU": _start(SRU, _ROW),
    "minGRU": _start(MinGRU, _ROW),
    "selective scan": _start(SelectiveScan, (WIDTH, 16)),
    "mLSTM": lambda: (MLSTM(), {"c": _zeros(*_MATRIX), "n": _zeros(WIDTH), "m": _zeros(1)}),
    "sLSTM": _start(SLSTM, _ROW, _ROW, _ROW, _ROW),
    "neural ODE, RK4": _start(NeuralODE, _ROW),
    "LIF neurons": lambda: (LIF(), [_zeros(WIDTH) for _ in range(2)]),
    "ConvLSTM": _start(ConvLSTM, (8, 4, WIDTH // 4), (8, 4, WIDTH // 4)),
    "linear attention": _start(LinearAttention, _MATRIX, _ROW),
    "hypernetwork": _start(Hyper, _ROW, (8,)),
    "generated weights": _start(Generated, _ROW),
    "memory": lambda: (
        Memory(),
        {
            "memory": torch.rand(BATCH, 8, WIDTH) / 9,
            "control": (_zeros(WIDTH), _zeros(WIDTH)),
            "read": _zeros(WIDTH),
        },
    ),
    "attention in a window": _start(Window, (8, WIDTH)),
}
