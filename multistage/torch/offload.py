"""`offload`: what autograd saves, moved to slow tiers and fetched back in reverse.

The counterpart of recomputation: nothing runs twice, but everything travels.
Tensors are cut into pages of equal size, so that any `Store` serves, and its
bounds on memory hold.  Writes are in flight while the forward pass continues;
the backward pass asks for tensors in about the reverse order, and those before
the one asked for are fetched ahead.

What comes back is what kernels saw: the same bytes with the same strides, alignment
and conjugate and negative bits, in memory shared as before (`geometry.py`).

A tensor moves once nothing but the graph holds its memory.  Nothing can write to it
any more by then, neither an operator that fills in a tensor after saving it nor one of the
writes that no version counter sees (`.data`, `.numpy()`, another module's kernel); and a
tensor that is held elsewhere would not give up its memory by moving.

What stays where it is: parameters and their views, small tensors, memory that PyTorch
does not own, whatever is held elsewhere or the tiers have no room for, and tensors that
are more than their bytes: subclasses, sparse, nested, MKL-DNN and quantised ones, wrappers
of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..backends.urls import Tiers, tier_names
from ..errors import ArgumentError
from ..support.units import parse_bytes
from .tensors.streams import the_device
from .tiers.by_name import open_tiers
from .tiers.shelf import OffloadStats as OffloadStats
from .tiers.shelf import Shelf


@contextmanager
def offload(
    tiers: Tiers,
    *,
    min_bytes: int | str = "1 MiB",
    ahead: int = 4,
    stays: Sequence[Tensor] = (),
    device: torch.device | str | None = None,
) -> Iterator[OffloadStats]:
    """Move what autograd saves in this context to slow tiers, until the backward asks for it.

    Plain PyTorch code as it stands; the numbers are the same bits.  What is held elsewhere
    (a variable, a module's buffer, a list of outputs) until the context ends is not moved.

    Parameters
    ----------
    tiers : str or Store, or a sequence of them
        As for `multistage.torch.unroll`.
    min_bytes : int or str
        Smaller tensors stay.
    ahead : int
        Tensors to fetch ahead of the one asked for.
    stays : sequence of Tensor
        Not moved, nor views of them, such as inputs that are held anyway.
    device : torch.device or str, optional
        Of the tensors to move; default: CUDA where there is such a device.

    Yields
    ------
    OffloadStats
        Counts, up to date after the context.

    Raises
    ------
    ArgumentError
        For no tier, or negative numbers.
    RuntimeError
        In the backward, if a saved tensor was written to meanwhile, as plain
        autograd has it.

    Notes
    -----
    Backwards may run on several threads.

    Examples
    --------
    >>> import torch, multistage.torch as mst
    >>> layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(4)))
    >>> x = torch.ones(512, 1024, requires_grad=True)
    >>> with mst.offload("memory:") as stats:
    ...     loss = layers(x).sum()
    >>> loss.backward()
    >>> stats.moved
    4
    """
    names = tier_names(tiers)
    if not names:
        raise ArgumentError("offload needs a tier, as in offload('pinned:8GiB')")
    if ahead < 0:
        raise ArgumentError(f"ahead={ahead} must not be negative")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = the_device(torch.device(device))
    least = parse_bytes(min_bytes, "min_bytes")
    store = open_tiers(names, place)
    assert store is not None
    shelf = Shelf(store, place, least, ahead, stays)
    try:
        with torch.autograd.graph.saved_tensors_hooks(shelf.pack, shelf.unpack):
            yield shelf.stats
    finally:
        shelf.settle()
