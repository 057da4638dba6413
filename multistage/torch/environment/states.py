"""States between stages, kept without their graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import StateError
from ..tensors.checksums import digest
from .copies import cloned
from .places import LEAVES
from .scope import Found, Scope

_State = TypeVar("_State")
_LEAF = pytree.tree_flatten(None)[1]  # of a state that is one tensor


def leaves_of(state: object) -> list[object]:
    """Return the leaves of a state."""
    return [state] if isinstance(state, Tensor) else pytree.tree_leaves(state)


def tensors_in(state: object) -> list[Tensor]:
    """Return the tensors of a state."""
    return [leaf for leaf in leaves_of(state) if isinstance(leaf, Tensor)]


def with_tensors(state: _State, make: Callable[[list[Tensor]], Sequence[Tensor]]) -> _State:
    """Return a state with others in place of its tensors: `make` is given each once."""
    given = list({id(t): t for t in tensors_in(state)}.values())
    known = {id(t): new for t, new in zip(given, make(given), strict=True)}
    replaced: _State = pytree.tree_map(lambda x: known.get(id(x), x), state)
    return replaced


def wants_of(leaves: Sequence[object]) -> tuple[bool, ...]:
    """Return which leaves require a gradient."""
    return tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


@dataclass(slots=True)
class KeptState:
    """A state without its graph, held by reference: a write to it is detected.

    A leaf that comes twice comes twice again: some functions compute another
    way when they get one tensor as two arguments.
    """

    leaves: list[object]
    spec: pytree.TreeSpec
    versions: list[int]
    objects: Found | None  # leaves that are neither tensors nor plain values
    inner: list[int]  # versions of tensors in those
    # Checksums of the leaves; empty where nothing but a stage can have written to them.
    sums: Sequence[int | None] = ()

    @classmethod
    def of(cls, state: object) -> KeptState:
        """Return a state with its tensors detached, aliases kept."""
        if isinstance(state, Tensor):
            alone = state.detach()
            return cls([alone], _LEAF, [alone._version], None, [])
        leaves, spec = pytree.tree_flatten(state)
        once: dict[int, Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in once:
                once[id(leaf)] = leaf.detach()
        return cls._holding([once.get(id(x), x) for x in leaves], spec)

    @classmethod
    def _holding(cls, leaves: list[object], spec: pytree.TreeSpec) -> KeptState:
        versions = [x._version if isinstance(x, Tensor) else 0 for x in leaves]
        others = [x for x in leaves if not isinstance(x, LEAVES)]
        objects = Scope(others).look() if others else None
        inner = [] if objects is None else list(objects.tensors)
        if any(t.grad_fn is not None for t in inner):
            kinds = ", ".join(sorted({type(x).__name__ for x in others}))
            raise StateError(
                f"a state between two stages has tensors inside of a {kinds}, which take part in "
                "the gradient and are in no count; register the class as a pytree node "
                "(torch.utils._pytree.register_pytree_node), or pass a tuple or dict"
            )
        return cls(leaves, spec, versions, objects, [t._version for t in inner])

    def summed(self) -> KeptState:
        """Return the state, which notices other bits from here on: NumPy leaves no version."""
        self.sums = self._digests()
        return self

    def _digests(self) -> list[int | None]:
        return [digest(leaf) if isinstance(leaf, Tensor) else None for leaf in self.leaves]

    def _changes(self, objects: Found) -> list[str]:
        """Return the names of what changed in objects of the state."""
        tensors = zip(objects.tensors, self.inner, strict=True)
        written = [objects.name_of(t) for t, version in tensors if t._version != version]
        return [*objects.differences(), *written]

    def cloned(self) -> KeptState:
        """Return a copy whose tensors have storages of their own, aliases kept."""
        copies = iter(cloned(tensors_in(self.leaves)))
        leaves = [next(copies) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._holding(leaves, self.spec)

    def verify(self) -> None:
        """Raise RuntimeError if a tensor was written to since it was kept."""
        for leaf, version in zip(self.leaves, self.versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise RuntimeError(
                    "a state that a stage is to be run again from, the chain's input or between "
                    "two stages, has been modified by an inplace operation"
                )

    def held(self) -> list[tuple[Tensor, int]]:
        """Return its tensors, each once, and the versions that they had."""
        pairs = zip(self.leaves, self.versions, strict=True)
        return list({id(x): (x, v) for x, v in pairs if isinstance(x, Tensor)}.values())

    def tensors(self) -> list[Tensor]:
        """Return its tensors, each once."""
        return [tensor for tensor, _ in self.held()]

    def emptied(self) -> KeptState:
        """Return the state without its tensors, which are elsewhere; see `filled`."""
        places = {id(tensor): number for number, tensor in enumerate(self.tensors())}
        leaves = [_Away(places[id(x)]) if isinstance(x, Tensor) else x for x in self.leaves]
        return KeptState(leaves, self.spec, self.versions, self.objects, self.inner)

    def filled(self, tensors: Sequence[Tensor | None], now: Sequence[int]) -> KeptState:
        """Return an emptied state with its tensors and their versions, in the order of `held`."""
        leaves = [tensors[x] if isinstance(x, _Away) else x for x in self.leaves]
        versions = [
            now[x] if isinstance(x, _Away) else before
            for x, before in zip(self.leaves, self.versions, strict=True)
        ]
        return KeptState(leaves, self.spec, versions, self.objects, self.inner)

    def fresh(self, wants: tuple[bool, ...], to_be_changed: bool) -> object:
        """Return the state for a stage to run on, of leaves unless the stage writes to them.

        `wants` says which tensors require gradients: those that did at first.

        Raises
        ------
        RuntimeError
            If a tensor was written to since it was kept.
        StateError
            If another object was, or a tensor without a new version.
        """
        self.verify()
        if self.sums and self.sums != self._digests():
            raise StateError(
                "a state that a stage is to be run again from, the chain's input or between two "
                "stages, holds other numbers than in the forward pass, though no version says so: "
                "NumPy or .data wrote to it; call backward before, or give the chain a copy"
            )
        if self.objects is not None and (found := self._changes(self.objects)):
            raise StateError(
                f"an object in a state between two stages was changed after it was made "
                f"({', '.join(found[:4])}); a stage that is run again from it would see the "
                "change: return a new object, or keep such objects out of the state"
            )
        given = self.leaves
        if self.spec is _LEAF and not to_be_changed and isinstance(given[0], Tensor):
            return given[0].detach().requires_grad_(wants[0])
        if to_be_changed:
            copies = iter(cloned(tensors_in(self.leaves)))
            given = [next(copies) if isinstance(leaf, Tensor) else leaf for leaf in given]
        once: dict[int, Tensor] = {}
        for leaf, wanted in zip(given, wants, strict=True):
            if isinstance(leaf, Tensor) and id(leaf) not in once:
                new = leaf.detach().requires_grad_(wanted)
                once[id(leaf)] = _writable(new) if to_be_changed and wanted else new
        return pytree.tree_unflatten([once.get(id(leaf), leaf) for leaf in given], self.spec)


class _Away(int):
    """Stands for a tensor that is elsewhere, by its number."""


def refuse_shared(tensors: Sequence[Tensor]) -> None:
    """Refuse to copy views of one another that require gradients: they would be apart."""
    once = list({id(t): t for t in tensors}.values())
    storages = Counter(t.untyped_storage()._cdata for t in once if t.layout is torch.strided)
    for tensor in once:
        if tensor.requires_grad and storages[tensor.untyped_storage()._cdata] > 1:
            raise StateError(
                "the first stage writes to an input that requires a gradient and shares memory "
                f"with another input (shape {tuple(tensor.shape)}); give the chain a clone of one"
            )


def _writable(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf that may be written to."""
    copy = leaf.clone()
    if copy.stride() != leaf.stride():
        raise StateError(
            "the first stage writes to an input that requires a gradient and is a view with gaps "
            f"(shape {tuple(leaf.shape)}, strides {leaf.stride()}); give the chain x.contiguous()"
        )
    return copy
