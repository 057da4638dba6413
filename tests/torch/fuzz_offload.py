"""Random graphs of operators with what they save in tiers, beside plain autograd.

    python tests/torch/fuzz_offload.py --seconds 600 --seed 0

A program makes a pool of tensors and applies operators, views, writes, and
differentiates some of the results, more than once.  It runs plainly and inside
`offload` with the same random numbers: gradients have the same bits and strides,
or plain autograd refuses the program.  What differs is printed with its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from operators import same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.complex64, torch.bfloat16)
SHAPES = ((6, 8), (4, 3, 5), (7,), (), (2, 0, 3), (40, 30), (1, 9))
TIERS = ("memory:", "file:{}", "pinned:", "memory:?capacity=2MiB", "pinned:8MiB > memory:")
Pool = list[Tensor]


class Plain(Tensor):
    """A subclass that does nothing."""


class Holds(torch.autograd.Function):
    """Saves many tensors, and uses how they lie in memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0] * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total: Any = 0.0
        for k, t in enumerate(ctx.saved_tensors):
            t = t.detach()
            lies = sum(s * (j + 1) for j, s in enumerate(t.stride())) if not t.is_sparse else 0
            dense = t.to_dense() if t.layout is not torch.strided else t
            total = total + (k + 1) * torch.tanh(dense.abs().double()).sum() + lies + t.is_conj()
        return gradient * total.to(gradient.dtype), *[None] * (len(ctx.saved_tensors) - 1)


def _tame(x: Tensor) -> Tensor:
    """Keep numbers within reason."""
    return x / (1 + x.detach().abs())


UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: _tame(x).exp(),
    torch.sin,
    torch.tanh,
    lambda x: _tame(x).square(),
    torch.sigmoid,
    lambda x: x.cumsum(-1) if x.dim() else x,
    lambda x: x.prod(-1) if x.dim() else x * x,
    lambda x: x * x.conj(),
    lambda x: (x.abs() + 1).log(),
    lambda x: nn.functional.relu(x),
    lambda x: nn.functional.rrelu(x, 0.1, 0.9, True),
    lambda x: nn.functional.dropout(x, 0.3),
    lambda x: x.softmax(-1) if x.dim() else x.sigmoid(),
    lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: x @ x.mT if x.dim() > 1 else x * x,
    lambda x: torch.outer(x, x.conj()) if x.dim() == 1 else x.sum(),
    lambda x: x.std(-1) if x.dim() else x,
    lambda x: x.sort(-1).values if x.dim() else x,
    lambda x: x[x.abs() > 0.5],
    lambda x: torch.fft.fft(x, dim=-1).real,
    lambda x: x.flip(-1) * x if x.dim() else x,
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, 0, 255),
    lambda x: (x.to_sparse() * 3).to_dense(),
    lambda x: torch.sparse.mm(_tame(x).detach().to_sparse(), x.mT),
    lambda x: torch.sparse.mm(x.detach().to_sparse_csr(), x.mT.exp()),
    lambda x: (x.as_subclass(Plain) * x.as_subclass(Plain)).as_subclass(Tensor),
    lambda x: checkpoint(lambda y: (y.sin() * y).tanh(), x, use_reentrant=False),
    lambda x: checkpoint(lambda y: (y.sin() * y).tanh(), x, use_reentrant=True),
    lambda x: torch.vmap(lambda row: row * row.sum())(x),
    lambda x: x.to(torch.complex128 if x.is_complex() else torch.float64),
    lambda x: torch.complex(x, x.sin()) if not x.is_complex() else x.abs(),
)
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.conj,
    lambda x: x.imag if x.is_complex() else x,
    lambda x: x.conj().imag if x.is_complex() else torch._neg_view(x),
    lambda x: torch.view_as_real(x) if x.is_complex() else x,
    lambda x: x.mT if x.dim() > 1 else x,
    lambda x: x[..., ::2] if x.dim() else x,
    lambda x: x[..., 1:] if x.dim() else x,
    lambda x: x[:0] if x.dim() else x,
    lambda x: x.select(-1, 0) if x.dim() else x,
    lambda x: x.expand(3, *x.shape),
    lambda x: x[..., :1].expand(x.shape) if x.dim() else x,
    lambda x: x.flatten(),
    lambda x: x.chunk(3, -1)[-1] if x.dim() else x,
    lambda x: x.unfold(-1, 2, 1) if x.dim() and x.shape[-1] > 1 else x,
    lambda x: x.diagonal() if x.dim() > 1 else x,
    lambda x: x.as_strided(x.shape, x.stride(), x.storage_offset()),
    lambda x: x.detach(),
    lambda x: x.data,
    lambda x: x.unsqueeze(0),
    lambda x: x.clone(),
    lambda x: x.contiguous(),
)
WRITES: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.mul_(0.5),
    lambda x: x.add_(1),
    lambda x: x.sin_(),
    lambda x: x.relu_(),
    lambda x: x.zero_(),
    lambda x: x[..., :2].mul_(3),
    lambda x: x.tanh_(),
    lambda x: x.copy_(x.flip(-1)),
    lambda x: x.data.mul_(0.5),  # plain autograd does not see it, and reads the new values
    lambda x: x.detach().numpy().fill(0.25),
)


def _step(chance: random.Random, pool: Pool) -> None:
    """Apply something to some of the pool, if it takes it."""
    x = chance.choice(pool[-8:])
    kind = chance.random()
    new: Any = None
    if kind < 0.35:
        new = chance.choice(UNARY)(x)
    elif kind < 0.65:
        new = chance.choice(VIEWS)(x)
    elif kind < 0.85:
        y = chance.choice(pool)
        choice = chance.randrange(4)
        if choice == 0:
            new = x * y
        elif choice == 1:
            new = torch.where(x.detach().abs() > 0.3, x, y)
        elif choice == 2:
            new = x / (1 + y.abs())
        else:
            new = x @ y.mT if x.dim() > 1 and y.dim() > 1 else x - y * x
    elif kind < 0.93:
        new = Holds.apply(x, *chance.sample(pool, min(3, len(pool))), *_odd(chance, x))
    elif kind < 0.97:
        # Mostly a copy is written to: plain autograd refuses what is saved and then written to.
        new = x if chance.random() < 0.2 else x.clone()
        chance.choice(WRITES)(new)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            new = x @ x.mT if x.dim() > 1 else x * x
    if isinstance(new, Tensor) and new.numel() < 20_000:
        pool.append(new)


def _odd(chance: random.Random, x: Tensor) -> list[Tensor]:
    """Tensors that are more than their bytes, to be saved beside others."""
    x = x.detach()
    if chance.random() < 0.5:
        return []
    kind = chance.randrange(5)
    if kind == 0:
        return [x.to_sparse()]
    if kind == 1 and x.dim() == 2:
        return [x.to_sparse_csr()]
    if kind == 2:
        return [torch._efficientzerotensor(x.shape)]
    if kind == 3 and x.dtype is torch.float32:
        return [torch.quantize_per_tensor(x, 0.1, 3, torch.quint8).as_subclass(Plain)]
    return [x.as_subclass(Plain)]


def _program(seed: int, context: Any) -> tuple[list[Tensor | None], list[str]]:
    """Run a program; return the gradients of all its backwards, and how steps ended."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [
        torch.randn(chance.choice(SHAPES), dtype=chance.choice(DTYPES)).requires_grad_()
        for _ in range(chance.randrange(1, 4))
    ]
    pool: Pool = [leaf * 2 if chance.random() < 0.7 else leaf for leaf in leaves]
    inside = chance.random() < 0.2
    found: list[Tensor | None] = []
    ends: list[str] = []

    def back() -> None:
        outs = [t for t in pool if t.requires_grad and t.grad_fn is not None]
        passes = chance.randrange(1, 4)
        threaded = chance.random() < 0.2
        for number in range(passes):
            some = chance.sample(outs, min(len(outs), chance.randrange(1, 5)))
            weights = [torch.randn_like(t.detach()) for t in some]
            again = chance.random() < 0.1

            def one(some: Any = some, weights: Any = weights, again: bool = again) -> None:
                gradients = torch.autograd.grad(
                    some, leaves, weights, retain_graph=True, create_graph=again, allow_unused=True
                )
                if again:
                    twice = [g for g in gradients if g is not None and g.requires_grad]
                    ones = [torch.ones_like(g) for g in twice]
                    more = torch.autograd.grad(
                        twice, leaves, ones, retain_graph=True, allow_unused=True
                    )
                    found.extend(None if g is None else g.detach().clone() for g in more)
                found.extend(None if g is None else g.detach().clone() for g in gradients)

            if threaded:
                _in_thread(one)
            else:
                one()
            if number == 0 and chance.random() < 0.3:
                del pool[: len(pool) // 2]
                outs = [t for t in pool if t.requires_grad and t.grad_fn is not None] or outs

    with context:
        for _ in range(chance.randrange(3, 25)):
            try:
                _step(chance, pool)
                ends.append("")
            except Exception as error:  # whatever an operator does not take; the same both ways
                ends.append(type(error).__name__)
            if len(pool) > 3 and chance.random() < 0.5:  # what is held does not move
                del pool[chance.randrange(len(pool) - 1)]
        if inside:
            back()
    if not inside:
        back()
    return found, ends


def _in_thread(f: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            f()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def one(seed: int, folder: str) -> str:
    """Run a program both ways; return what became of it.

    Raises
    ------
    AssertionError
        If the gradients differ.
    """
    chance = random.Random(-seed - 1)
    tier = chance.choice(TIERS).format(folder)
    least, ahead = chance.choice((0, 0, 0, 100, 1000)), chance.choice((0, 1, 4))
    try:
        plain, known = _program(seed, contextlib.nullcontext())
        again, _ = _program(seed, contextlib.nullcontext())
    except (RuntimeError, NotImplementedError):
        return "refused by plain autograd"
    if len(plain) != len(again) or not all(map(same, plain, again)):
        return "not deterministic"
    found, ends = _program(seed, mst.offload(tier, min_bytes=least, ahead=ahead))
    assert ends == known, f"tier {tier}: {set(ends) - set(known)}"
    assert len(plain) == len(found)
    for number, (a, b) in enumerate(zip(plain, found, strict=True)):
        assert same(a, b), f"gradient {number}, tier {tier}"
    return "same"


def run(
    seconds: float, seed: int, programs: int | None = None, *, first: bool = False
) -> tuple[Counter[str], list[str]]:
    """Run programs from a seed on; return counts, and what was wrong (the first, if asked)."""
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        number = 0
        while time.perf_counter() - began < seconds and number != programs:
            try:
                counts[one(seed + number, folder)] += 1
            except Exception as error:
                counts["WRONG"] += 1
                wrong.append(f"seed {seed + number}: {error!r}"[:300])
                if first:
                    break
            number += 1
            if number % 100 == 0:
                gc.collect()
                left = [t.name for t in threading.enumerate() if t.name.startswith("multistage")]
                if left:
                    wrong.append(f"threads left before seed {seed + number}: {left}")
                    break
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int)
    parser.add_argument("--first", action="store_true", help="end with the first that is wrong")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    counts, wrong = run(given.seconds, given.seed, given.programs, first=given.first)
    print(dict(counts), f"{time.perf_counter() - began:.1f} s", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
