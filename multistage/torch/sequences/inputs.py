"""What a cell gets at each step, and the gradients of it.

A tensor with time first and the elements of a list or tuple are there before
the sequence: where they require gradients, each chunk gets leaves in their place.
A function, or an object with `__getitem__`, makes a new x_t whenever a step is
run: it is part of the cell, and its graph leads to the parameters it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, StateError
from ..tensors.states import Kind

Place: TypeAlias = int | slice
Taken: TypeAlias = list[tuple[Place, Tensor]]  # what stands for inputs that require gradients
ELEMENT = -1  # the place of a leaf in a sample of a list
MOST_VALUES = 8  # of x_t, beside tensors, that are distinguished
_LONGEST = 64  # characters of such a value


class Indexed(Protocol):
    """A sequence of x_t: a tensor with time first, a list, or what makes them when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, t: int, /) -> object: ...


Given: TypeAlias = Indexed | Callable[[int], object] | None


class Inputs:
    """What the cell gets at each step: from a tensor with time first, a sequence, a function.

    The number of steps is that of a function, or of a shorter run than the sequence.

    Raises
    ------
    ArgumentError
        If the number of steps is not known, below 1 or beyond the sequence.
    """

    def __init__(self, given: Given, steps: int | None) -> None:
        self.given = given
        length = length_of(given)
        if steps is None and length is None:
            raise ArgumentError("inputs as a function need n_steps=, the number of time steps")
        self.steps: int = length if steps is None else steps  # type: ignore[assignment]
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ArgumentError(f"the sequence has {self.steps!r} steps; at least 1 is needed")
        if length is not None and self.steps > length:
            raise ArgumentError(f"n_steps={steps}, but inputs has {length}")
        # Whether each call makes a new x_t.
        self.made = type(given) not in (list, tuple) and not isinstance(given, Tensor | None)
        # Given tensors that require gradients and stand at several steps, or in state 0 too:
        # parameters of the cell.
        self.repeated: list[Tensor] = []
        self._most_bytes: int | None = None  # of x_t that each call makes
        self.has_values = False  # whether some x_t held other than tensors, as a loop's length
        self._allowed: set[int] | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[tuple[Tensor, int]] = []
        self._ever: set[int] = set()  # leaves of an element that require a gradient at some step
        self._places: dict[int, list[tuple[int, int]]] = {}  # of step t: (leaf, wanted tensor)
        self._elements: list[tuple[list[object], pytree.TreeSpec | None]] = []
        if isinstance(given, Tensor):
            self._versions = [] if given.is_inference() else [(given, given._version)]
            self._tensors = [given] if given.requires_grad else []
        elif isinstance(given, list | tuple) and not self.made:
            self._read(given[: self.steps])

    def _read(self, elements: Sequence[object]) -> None:
        """Note the tensors of a list, and which of them require gradients."""
        wanting: dict[int, list[tuple[int, int, Tensor]]] = {}
        for t, element in enumerate(elements):
            flat: tuple[list[object], pytree.TreeSpec | None] = (
                ([element], None) if isinstance(element, Tensor) else pytree.tree_flatten(element)
            )
            self._elements.append(flat)
            for k, leaf in enumerate(flat[0]):
                if not isinstance(leaf, Tensor):
                    self.has_values = True
                elif not leaf.is_inference():
                    self._versions.append((leaf, leaf._version))
                    if leaf.requires_grad:
                        wanting.setdefault(id(leaf), []).append((t, k, leaf))
        for places in wanting.values():
            self._ever.update(k for _, k, _ in places)
            if len(places) > 1:
                # Plain autograd adds their gradients last step first, as those of parameters.
                self.repeated.append(places[0][2])
                continue
            t, k, leaf = places[0]
            self._places.setdefault(t, []).append((k, len(self._tensors)))
            self._tensors.append(leaf)

    def tensors(self) -> list[Tensor]:
        """Return the tensors whose gradients are required, beside those of parameters."""
        return self._tensors

    def held(self) -> list[Tensor]:
        """Return the tensors of the first step that are there before it."""
        if isinstance(self.given, Tensor):
            return [self.given]
        return [t for t in self._elements[0][0] if isinstance(t, Tensor)] if self._elements else []

    def everything(self) -> list[Tensor]:
        """Return all tensors that were given."""
        return [tensor for tensor, _ in self._versions]

    def shared_with(self, leaves: Sequence[Tensor]) -> None:
        """Take note of state 0: a tensor that is in it too gets contributions from either use."""
        within = {id(leaf) for leaf in leaves}
        self.repeated += [t for t in self._tensors if id(t) in within]

    def known_as(self, parameters: Sequence[Tensor]) -> None:
        """Take note of the parameters, which may be among what is given or made."""
        self._allowed = {id(p) for p in parameters}
        if isinstance(self.given, Tensor) and id(self.given) in self._allowed:
            self._tensors = []  # its steps are views, whose gradients the cell's uses join
        for t, places in self._places.items():
            kept = [(k, n) for k, n in places if id(self._tensors[n]) not in self._allowed]
            self._places[t] = kept

    def differs(self) -> bool:
        """Whether elements of a list differ in structure, shapes, dtypes or devices."""
        if not self._elements:
            return False
        first = _form(*self._elements[0])
        return any(_form(*element) != first for element in self._elements)

    def few_values(self) -> int:
        """Return how many sets of values elements of a list hold beside tensors, 0 if many.

        Values such as the length of a loop may decide what a step costs: steps with other
        values are of other kinds, where there are few.
        """
        found = {
            tuple([value_of(x) for x in flat if not isinstance(x, Tensor)])
            for flat, _ in self._elements
        }
        return len(found) if len(found) <= min(MOST_VALUES, self.steps // 2) else 0

    def form(self) -> object:
        """Return structure, shapes, dtypes and devices of what was given; None if it is made."""
        if isinstance(self.given, Tensor):
            return _form([self.given], None)
        return tuple([_form(*element) for element in self._elements])

    def expect(self, kinds: Sequence[Kind]) -> None:
        """Refuse a new x_t that takes more bytes than one with tensors of some kinds."""
        if self.made and kinds:
            self._most_bytes = sum(size.numel() * dtype.itemsize for size, dtype, _ in kinds)

    def changed(self) -> bool:
        """Whether a tensor that was given was written to since."""
        return any(tensor._version != version for tensor, version in self._versions)

    def at(self, t: int, leaves: Taken | None = None) -> object:
        """Return x_t; `leaves` gets what stands for those that require gradients, with places."""
        if self.made:
            return self._anew(t)
        if self.given is None:
            return None
        if isinstance(self.given, Tensor):
            x = self.given[t]
            if leaves is None or not self._tensors:
                return x
            x = x.detach().requires_grad_()
            leaves.append((t, x))
            return x
        return self._element(t, self._places.get(t, ()), leaves)

    def _element(self, t: int, places: Sequence[tuple[int, int]], leaves: Taken | None) -> object:
        """Return element t, with fresh leaves in the places that require gradients."""
        flat, spec = self._elements[t]
        if places and leaves is not None:
            flat = list(flat)
            for k, number in places:
                given = flat[k]
                assert isinstance(given, Tensor)
                flat[k] = leaf = given.detach().requires_grad_()
                leaves.append((number, leaf))
        return flat[0] if spec is None else pytree.tree_unflatten(flat, spec)

    def _anew(self, t: int) -> object:
        assert self.given is not None
        value = self.given(t) if callable(self.given) else self.given[t]
        leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            self.has_values = True
        if self._allowed is None:
            return value
        if self._most_bytes is not None:
            found = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
            if found > self._most_bytes:
                raise StateError(
                    f"x_{t} of inputs takes {found} bytes, and the first {self._most_bytes}, by "
                    "which memory was planned; where inputs differ in shape say unequal=True, or "
                    "give them as a list"
                )
        for leaf in leaves:
            if (
                isinstance(leaf, Tensor)
                and leaf.requires_grad
                and leaf.grad_fn is None
                and id(leaf) not in self._allowed
            ):
                raise ArgumentError(
                    f"x_{t} of inputs ({type(self.given).__name__}) requires a gradient of its "
                    f"own, of shape {tuple(leaf.shape)}; give such inputs as a tensor with time "
                    "first or a list (list(inputs)), or name the tensors in parameters=[...]"
                )
        return value

    def many(self, start: int, stop: int, leaves: Taken | None = None) -> object:
        """Return the inputs of several steps, time first; `leaves` as for `at`."""
        if isinstance(self.given, Tensor):
            x = self.given[start:stop]
            if leaves is None or not self._tensors:
                return x
            x = x.detach().requires_grad_()
            leaves.append((slice(start, stop), x))
            return x
        if self.given is None:
            return None
        return _stacked([self.at(t, leaves) for t in range(start, stop)])

    def sample(self, stop: int, *, fused: bool, leaves: Taken) -> object:
        """Return x_0, or those before `stop`, as leaves wherever any step's require a gradient."""
        stop = min(stop, self.steps)
        if not self._ever:
            return self.many(0, stop, leaves) if fused else self.at(0, leaves)
        elements = []
        for t in range(stop if fused else 1):
            places = [(k, ELEMENT) for k in self._ever if self._may_want(t, k)]
            elements.append(self._element(t, places, leaves))
        return _stacked(elements) if fused else elements[0]

    def _may_want(self, t: int, k: int) -> bool:
        flat = self._elements[t][0]
        leaf = flat[k] if k < len(flat) else None
        return (
            isinstance(leaf, Tensor)
            and (leaf.is_floating_point() or leaf.is_complex())
            and not any(leaf is p for p in self.repeated)
        )


class InputGradients:
    """Room for the gradients of `Inputs.tensors()`, filled chunk by chunk."""

    def __init__(self, inputs: Inputs) -> None:
        self.whole: Tensor | None = None  # of an input with time first
        if isinstance(inputs.given, Tensor) and inputs.tensors():
            # With the strides of plain autograd's, whatever those of the input.
            given = inputs.given
            self.whole = torch.zeros(given.shape, dtype=given.dtype, device=given.device)
        self._found: list[Tensor | None] = [None] * len(inputs.tensors())
        self._alone: Place | None = None  # of `whole`, while no other gradient was put there

    def put(self, place: Place, gradient: Tensor) -> None:
        """Put the gradient of a leaf that `Inputs.at` or `many` noted in its place."""
        if self.whole is None:
            assert isinstance(place, int)
            self._found[place] = gradient
        elif self._found[0] is None:
            self.whole[place] = gradient
            self._found[0], self._alone = self.whole, place
        else:
            # Plain autograd adds up one tensor for each step, zero elsewhere: of several -0.0
            # becomes 0.0.
            if self._alone is not None:
                self.whole[self._alone] += 0
                self._alone = None
            self.whole[place] += gradient

    def values(self) -> list[Tensor | None]:
        """Return the gradients; None of a tensor that none reached, as plain autograd has it."""
        return self._found


def _form(flat: Sequence[object], spec: object) -> object:
    """Return what distinguishes elements, their values left out."""
    return spec, tuple(
        [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in flat]
    )


def value_of(leaf: object) -> str:
    """Return what distinguishes leaves that are not tensors: type, and value if it is short."""
    kind = type(leaf).__name__
    if not isinstance(leaf, bool | int | float | str | bytes | None):
        return kind
    value = repr(leaf)
    return f"{kind} {value}" if len(value) <= _LONGEST else kind


def _stacked(elements: Sequence[Any]) -> object:
    """Return the inputs of several steps as one, time first."""
    if isinstance(elements[0], Tensor):
        return torch.stack(list(elements))
    flat = [pytree.tree_leaves(element) for element in elements]
    spec = pytree.tree_structure(elements[0])
    return pytree.tree_unflatten([torch.stack(each) for each in zip(*flat, strict=True)], spec)


def length_of(given: Given) -> int | None:
    """Return how many steps a sequence has; None for a function."""
    if isinstance(given, nn.utils.rnn.PackedSequence):
        raise ArgumentError(
            "inputs is a PackedSequence, whose batch shrinks from step to step, and every state "
            "must have one shape; unpack it (torch.nn.utils.rnn.pad_packed_sequence), and let the "
            "cell keep the state where a sequence has ended: torch.where(mask_t, new, old)"
        )
    if isinstance(given, Tensor):
        if given.dim() == 0:
            raise ArgumentError("inputs is a single number; time must be its first dimension")
        return given.shape[0]
    if given is None or callable(given):
        return None
    if isinstance(given, dict) or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise ArgumentError(
            f"inputs is {type(given).__name__}; give a tensor with time first, a sequence, or "
            "a function of the step"
        )
    return len(given)
