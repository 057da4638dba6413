"""`offload` with every kind of tensor that autograd saves: the gradient has the same bits.

Kinds that the pretended device does not know; `test_offload.py` runs there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import fuzz_offload
import operators
import pytest
import torch
from torch import Tensor

import multistage.torch as mst


def gradients(f: Any, x: Tensor, context: Any) -> list[Tensor]:
    """Differentiate f at x; the outputs take weights, so that each element matters."""
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(6)
    with context:
        out = f(leaf)
    torch.manual_seed(7)
    weights = torch.randn_like(out.detach())
    return [out.detach(), *torch.autograd.grad(out, leaf, weights)]


def both_ways(f: Any, x: Tensor, tier: str = "memory:") -> mst.OffloadStats:
    """Check that f has the same gradient with what it saves in a tier."""
    plain = gradients(f, x, nullcontext())
    seen = []

    @contextmanager
    def watched() -> Iterator[None]:
        with mst.offload(tier, min_bytes=0) as stats:
            seen.append(stats)
            yield

    found = gradients(f, x, watched())
    for a, b in zip(plain, found, strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    return seen[0]


class Weighted(torch.autograd.Function):
    """Saves a tensor of whatever layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return x * weights.to_dense()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _, weights = ctx.saved_tensors
        return gradient * weights.to_dense(), None


@pytest.mark.parametrize(
    "sparse",
    [
        lambda y: y.to_sparse(),
        lambda y: y.to_sparse_csr(),
        lambda y: y.to_sparse_csc(),
        lambda y: y.to_sparse_bsr((2, 2)),
        lambda y: y.to_sparse_bsc((2, 2)),
        lambda y: y.to_mkldnn(),
        lambda y: torch.quantize_per_tensor(y, 0.1, 3, torch.quint8).dequantize(),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc", "mkldnn", "quantised"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_layouts_that_stay(sparse: Any) -> None:
    weights = sparse(torch.randn(12, 12) * (torch.rand(12, 12) > 0.6))
    stats = both_ways(lambda x: Weighted.apply(x.exp(), weights).sin(), torch.randn(12, 12))
    assert stats.moved


def a_nested_tensor(x: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([x[:3].exp(), x[3:].exp()])
    return torch.nested.to_padded_tensor(parts * parts, 0.0)


def jagged(x: Tensor) -> Tensor:
    parts = torch.nested.as_nested_tensor([x[:3].exp(), x[3:].exp()], layout=torch.jagged)
    return (parts.sin() * parts).values()


def zeros_without_memory(x: Tensor) -> Tensor:
    return x.exp() * torch._efficientzerotensor(x.shape) + x.sin()


def with_tangents(x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.exp(), x.cos())
        found = torch.autograd.forward_ad.unpack_dual((dual * dual.sin()).tanh())
        assert found.tangent is not None
        return found.primal * found.tangent


def in_mkldnn(x: Tensor) -> Tensor:
    return (x.exp().to_mkldnn().relu()).to_dense() * x


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "f", [a_nested_tensor, jagged, zeros_without_memory, with_tangents, in_mkldnn]
)
def test_tensors_with_more_than_their_bytes_stay(f: Any) -> None:
    both_ways(f, torch.randn(8, 16))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_no_element_and_a_single_one(shape: tuple[int, ...]) -> None:
    stats = both_ways(lambda x: x.exp().sin() * x.exp().expand(2, *x.shape), torch.randn(shape))
    assert bool(stats.moved) == (0 not in shape)


def test_strides_alignment_and_memory_come_back() -> None:
    """As kernels see them: gaps, repetitions, overlaps, offsets, and memory that views share."""
    seen: list[list[tuple[Any, ...]]] = [[], []]

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, where: list[Any], *tensors: Tensor) -> Tensor:
            ctx.where = where
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            found = ctx.saved_tensors
            for t in found:
                together = [
                    k
                    for k, other in enumerate(found)
                    if other.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
                ]
                ctx.where.append((t.stride(), t.data_ptr() % 64, t.is_conj(), t.tolist(), together))
            return None, gradient.expand(found[0].shape), *[None] * (len(found) - 1)

    for where, offloaded in zip(seen, (False, True), strict=True):
        torch.manual_seed(3)
        x = torch.randn(8, 24, dtype=torch.complex64, requires_grad=True)
        context = mst.offload("memory:", min_bytes=0) if offloaded else nullcontext()
        with context:
            y = x * 2
            q, k, v = y.chunk(3, -1)
            kinds = [q, k, v, q.conj(), v.t(), y[1:2].expand(4, 24), y.view(-1).unfold(0, 5, 2)]
            z = x.real + 1  # another storage
            kinds += [z[3:], z[:, 3], z.t()[1:, ::2], z[:, :1].expand(8, 9)]
            loss = Look.apply(where, *kinds)
        loss.real.backward()
    plain, found = seen
    assert [entry[:4] for entry in plain] == [entry[:4] for entry in found]
    assert found[0][4][:5] == [0, 1, 2, 3, 4]  # queries, keys, values lie together again


def test_equal_versions_of_different_counters() -> None:
    """`.data` has a version counter of its own: version 0 of it is not version 0 of the other."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            early = y.detach().exp() + 1
        other = y.data
        first = early.data
        z = x * first  # saves the values before
        early.add_(1)
        return z * x + x * early.data * other

    both_ways(lambda x: f(x), torch.randn(40))

    x = torch.randn(40, requires_grad=True)
    y = torch.randn(40)
    with mst.offload("memory:", min_bytes=0):
        before = (x * y).sum()
        known = y.data
        y.add_(1)
        after = (x * known).sum()
    (gradient,) = torch.autograd.grad(after, x)
    assert torch.equal(gradient, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_programs() -> None:
    """Random ones; `fuzz_offload.py` continues for hours."""
    counts, wrong = fuzz_offload.run(math.inf, 0, 150)
    assert not wrong
    assert counts["same"] > 70


@pytest.mark.long
def test_operators() -> None:
    """Samples of a share of PyTorch's operators; `operators.py` takes them all."""
    counts, wrong = operators.run(math.inf, 0, "memory:", some=1, share=0.1)
    assert not wrong
    assert counts["same"] > 70
