"""Which tensors before and after a chunk are one and the same.

A state is cut from its graph between chunks.  Where plain autograd has one
tensor, in two leaves of the state or in a state and outputs of the steps before
it, the contributions to its gradient must be added in the order plain autograd
adds them: those of the outputs first, then those of the steps after.  What is
one tensor is noted for every chunk, since a cell may do otherwise at each step:
return `h, h` and later zeros, or the state it got where a sequence has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ...errors import StateError

Outputs: TypeAlias = Sequence[tuple[int, Sequence[Tensor]]]  # of steps: t, leaves of y


@dataclass(frozen=True, slots=True)
class Held:
    """A leaf of the state after a chunk that was an output too.

    Attributes
    ----------
    leaf : int
    outputs : tuple of (int, int)
        Of this chunk: the leaf of y, and how many steps before the chunk's end.
    start : int
        The leaf of the state before the chunk that it is, or -1.
    """

    leaf: int
    outputs: tuple[tuple[int, int], ...]
    start: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """What is one tensor after a chunk.

    Attributes
    ----------
    pattern : tuple of int
        For each leaf of the state, and of y of the last step, the first that is
        the same tensor.
    known : tuple of int
        For each leaf of the state the parameter that it is, or -1.
    held : tuple of Held
    """

    pattern: tuple[int, ...]
    known: tuple[int, ...]
    held: tuple[Held, ...] = ()


class Boundaries:
    """The boundaries of all chunks, noted by the first run; that of state 0 stands at -1.

    Parameters
    ----------
    differentiable : sequence of bool
        Which leaves of y matter.
    parameters : sequence of Tensor
        A leaf of the state may be one of them: it has one gradient, to which its
        uses as either are added step by step.
    ends : sequence of Tensor
        Those that an output may be as well: of all steps, its gradients come
        before those of the parameter's uses, and so enter the last chunk.
    """

    def __init__(
        self, differentiable: Sequence[bool], parameters: Sequence[Tensor], ends: Sequence[Tensor]
    ) -> None:
        self._differentiable = differentiable
        self._known = {id(p): n for n, p in enumerate(parameters)}
        self._parameters = {id(p): p for p in ends}
        self._given: list[tuple[int, int, Tensor]] = []  # outputs that are parameters
        self._list: list[Boundary] = []
        self._once: dict[Boundary, Boundary] = {}  # most are equal

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Note state 0."""
        self._list = [Boundary(pattern_of(leaves), self._known_of(leaves))]
        self._given = []

    def __getitem__(self, k: int) -> Boundary:
        return self._list[k + 1]

    def note(
        self,
        k: int,
        given: Sequence[Tensor],
        leaves: Sequence[Tensor],
        outputs: Outputs,
        steps: tuple[int, int],
    ) -> bool:
        """Note what is one tensor after chunk k; return whether it is as it was noted before.

        Parameters
        ----------
        k : int
        given, leaves : sequences of Tensor
            The states before and after it.
        outputs : sequence of (t, leaves of y)
            Empty for a fused cell, whose outputs are of several steps.
        steps : (int, int)
        """
        pattern = pattern_of([*leaves, *(outputs[-1][1] if outputs else ())])
        ends = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves)))}
        new = k + 1 == len(self._list)
        found: dict[int, list[tuple[int, int]]] = {}
        for t, ys in outputs:
            for j, y in enumerate(ys):
                if id(y) in self._parameters:
                    if new:
                        self._given.append((j, t, y))
                elif id(y) in ends and self._differentiable[j]:
                    found.setdefault(ends[id(y)], []).append((j, steps[1] - t))
        held = []
        before = {each.leaf for each in self[k - 1].held}
        starts = {id(given[i]): i for i in before}
        if found or before:
            for i, leaf in enumerate(leaves):
                start = starts.get(id(leaf), -1)
                if pattern[i] == i and (i in found or start >= 0):
                    held.append(Held(i, tuple(found.get(i, ())), start))
        boundary = Boundary(pattern, self._known_of(leaves), tuple(held))
        if not new:
            return self[k] == boundary
        self._list.append(self._once.setdefault(boundary, boundary))
        return True

    def refuse_losses(
        self, name: str, leaves: Sequence[Tensor], ys: Outputs, summed: Sequence[bool]
    ) -> None:
        """Raise StateError if a loss of the last step is a leaf of the state after it too.

        A plain loop adds up losses as it goes: the gradient of one comes after those from the
        next step, and not before them, as that of another output.
        """
        ends = {id(leaf): i for i, leaf in enumerate(leaves)}
        for j, y in enumerate(ys[-1][1] if ys else ()):
            if summed[j] and self._differentiable[j] and id(y) in ends:
                raise StateError(
                    f"{name} returned a loss, leaf {j} of y, at step {ys[-1][0]} that is leaf "
                    f"{ends[id(y)]} of the state too: the gradients of the two would be added in "
                    "another order than by a plain loop, which may round otherwise; return a copy "
                    "as the loss (loss.clone()), or give memory to keep all graphs (planner='keep')"
                )

    def _known_of(self, leaves: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple([self._known.get(id(leaf), -1) for leaf in leaves])

    def outputs_of(
        self,
        k: int,
        given: Sequence[Tensor],
        ys: Outputs,
        stop_of: Callable[[int], int],
        last: bool,
    ) -> list[tuple[int, int, Tensor]]:
        """Return the outputs whose gradients enter chunk k: leaf of y, step, tensor.

        Those that are the state before it are among them, and those that are the
        state after it are not: they enter the chunk above.  In the order in which
        plain autograd serves reductions that were made one after the other.
        `stop_of(k)` is the step after chunk k.
        """
        above = () if last else self[k].held
        passed = {each.start for each in above}
        taken = {output for each in above for output in each.outputs}
        found = [
            (j, t, given[each.leaf])
            for each in self[k - 1].held
            if each.leaf not in passed
            for j, t in self._of(k - 1, each, stop_of)
        ]
        end = stop_of(k)
        found += [
            (j, t, y)
            for t, leaves in ys
            for j, y in enumerate(leaves)
            if (j, end - t) not in taken and id(y) not in self._parameters
        ]
        if last:
            found += self._given
        found.sort(key=lambda entry: (-entry[0], entry[1]))
        return found

    def _of(self, k: int, held: Held, stop_of: Callable[[int], int]) -> Iterator[tuple[int, int]]:
        """Yield the outputs, of chunk k and those before it, that a leaf after it is."""
        while True:
            yield from ((j, stop_of(k) - back) for j, back in held.outputs)
            k -= 1
            below = [each for each in self[k].held if each.leaf == held.start]
            if not below:
                return
            held = below[0]


def pattern_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the number of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(tensors))
