"""What a stage does besides computing its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..environment.scope import Scope
from .sizes import Sizes


@dataclass(frozen=True, slots=True)
class Traits:
    """What a stage does besides computing its output.

    Attributes
    ----------
    name : str
    buffers : tuple of (module, buffer name)
        Buffers it changes.
    draws : frozenset of str
        Names of the generators that it draws from, or seeds.
    graded : bool
        Whether it must be run with a graph to give the same bits.
    changes_input : bool
        Whether it writes to its input; true of a first stage only, others are
        joined to the stage before.
    differentiates : bool
        Whether it computes gradients inside of its forward.
    unhooked : bool
        Whether it fails under saved-tensor hooks, as `torch.func` does, or when it is run
        again, as nested tensors do, so that its tape must be kept.
    fills : bool
        Whether it saves memory that a kernel fills afterwards, without a new version, as random
        leaky ReLU does with its slopes: the bits that it saves are not known when it saves them.
    scope : Scope, optional
        What it refers to; searched for if not given.
    sizes : Sizes, optional
        What it may save and return; not looked at if not given.
    """

    name: str
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    draws: frozenset[str] = frozenset()
    graded: bool = False
    changes_input: bool = False
    differentiates: bool = False
    unhooked: bool = False
    fills: bool = False
    scope: Scope | None = None
    sizes: Sizes | None = None

    @classmethod
    def together(
        cls, name: str, traits: Sequence[Traits], scope: Scope, sizes: Sizes | None = None
    ) -> Traits:
        """Return what stages do that run as one."""
        return cls(
            name=name,
            buffers=tuple({(id(m), k): (m, k) for t in traits for m, k in t.buffers}.values()),
            draws=frozenset().union(*[t.draws for t in traits]),
            graded=any(t.graded for t in traits),
            changes_input=traits[0].changes_input,
            differentiates=any(t.differentiates for t in traits),
            unhooked=any(t.unhooked for t in traits),
            fills=any(t.fills for t in traits),
            scope=scope,
            sizes=sizes,
        )
