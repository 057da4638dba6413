"""PyTorch's own operator samples, differentiated plainly and with what is saved in a tier.

    python tests/torch/operators.py --seconds 3600 --seed 0

Each sample is laid out in one of several ways; gradients must be the same bits
in the same strides.  Prints what differs, and counts.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import multistage.torch as mst


def _spread(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1], -1)[..., 0]


def _shifted(x: Tensor) -> Tensor:
    return torch.cat([x.new_ones(3), x.flatten()])[3:].view(x.shape)


def _conjugated(x: Tensor) -> Tensor:
    return x.conj().resolve_conj().conj() if x.is_complex() else _negated(x)


def _negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def _turned(x: Tensor) -> Tensor:
    return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])


def _part(x: Tensor) -> Tensor:
    """One of three in a row, as queries, keys and values are made."""
    return torch.cat([x, x, x], -1).chunk(3, -1)[1] if x.dim() else x.clone()


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.clone,
    _spread,
    _shifted,
    _conjugated,
    _negated,
    _turned,
    _part,
)


class Differs(AssertionError):
    """A gradient is another one."""


def same(ones: Any, others: Any) -> bool:
    """Whether gradients have the same bits and strides."""
    if ones is None or others is None:
        return ones is others
    if ones.layout is not torch.strided or ones.is_nested:
        ones, others = (t.to_dense() if not t.is_nested else t.values() for t in (ones, others))
    if (ones.shape, ones.dtype, ones.stride()) != (others.shape, others.dtype, others.stride()):
        return False
    a, b = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (ones, others))
    a.copy_(ones)
    b.copy_(others)
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _results(op: Any, sample: Any, layout: Any, seed: int, context: Any) -> list[Any]:
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return layout(leaves[-1]) if value.layout is torch.strided else leaves[-1].clone()

    torch.manual_seed(seed)
    with context:
        given, args, kwargs = pytree.tree_map(leaf, (sample.input, sample.args, sample.kwargs))
        out = sample.output_process_fn_grad(op(given, *args, **kwargs))
    outs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if not outs or not leaves:
        return []
    ones = [torch.randn_like(t.detach()) for t in outs]
    return list(torch.autograd.grad(outs, leaves, ones, allow_unused=True))


def compare(op: Any, sample: Any, layout: Any, seed: int, tier: str) -> str:
    """Differentiate a sample both ways; return what became of it.

    Raises
    ------
    Differs
        If the gradients do.
    """
    try:
        plain = _results(op, sample, layout, seed, contextlib.nullcontext())
        again = _results(op, sample, layout, seed, contextlib.nullcontext())
    except Exception:  # whatever it is that the operator does not take
        return "refused by plain autograd"
    if not plain:
        return "no gradient"
    if not all(map(same, plain, again)):
        return "not deterministic"
    found = _results(op, sample, layout, seed, mst.offload(tier, min_bytes=0))
    if not all(map(same, plain, found)):
        raise Differs(f"{op.full_name} {layout.__name__}: {sample}")
    return "same"


def operators() -> list[Any]:
    """Return PyTorch's operators that have gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if op.supports_autograd]


def samples(op: Any) -> Iterator[Any]:
    """Yield an operator's samples, real ones and complex ones."""
    for dtype in (torch.float64, torch.complex128, torch.float32):
        if op.supports_dtype(dtype, "cpu"):
            with contextlib.suppress(Exception):
                yield from op.sample_inputs("cpu", dtype, requires_grad=True)


def run(
    seconds: float, seed: int, tier: str, some: int | None, share: float = 1.0
) -> tuple[Counter[str], list[str]]:
    """Compare samples of a share of the operators; `some` of each, chosen by the seed."""
    began = time.perf_counter()
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    wrong = []
    found = operators()
    found = chance.sample(found, int(share * len(found)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in found:
            if time.perf_counter() - began > seconds:
                break
            counts["operators"] += 1
            torch.manual_seed(seed)
            every = list(islice(samples(op), None if some is None else 20 * some))
            if some is not None:
                every = chance.sample(every, min(some, len(every)))
            for sample in every:
                for layout in LAYOUTS if some is None else chance.sample(LAYOUTS, 2):
                    try:
                        counts[compare(op, sample, layout, seed, tier)] += 1
                    except Exception as error:
                        counts["WRONG"] += 1
                        wrong.append(f"{op.full_name} {layout.__name__}: {error!r}"[:400])
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", default="memory:")
    parser.add_argument("--some", type=int, help="samples of each operator")
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts, wrong = run(given.seconds, given.seed, given.tier, given.some)
    print(dict(counts), *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
