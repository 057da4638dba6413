"""What a run saves for its gradient: seen, held or replaced by numbers, and told apart."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..tensors.checksums import Digests
from .traits import Count, Remade

# Of a tensor that a stage saves: shape, dtype, strides, which parameter or buffer it is
# (None: none of them), and how many nodes the stage's graph had by then.
Kind: TypeAlias = tuple[torch.Size, torch.dtype, tuple[int, ...], int | None, int]


class Complete(BaseException):
    """All that is needed of a run was saved: the rest of it need not run.

    No Exception, which a model may catch for reasons of its own.
    """


class Saved:
    """Sees what is saved for gradients in its context, and decides what graphs hold of it.

    Graphs hold the tensors, as without it; or numbers, by which they ask for them.

    Parameters
    ----------
    see : callable, optional
        Called with each tensor, in order; returns True for one that graphs hold all the same.
    give : callable, optional
        Returns a tensor by its number.
    inside : callable, optional
        In place of `give` while the context lasts, like `see` referred to no longer; by default
        the tensors are held until its end.
    through : bool
        Whether hooks around the context are called, as they would be without it.
    stage : str, optional
        Its name, for messages.

    Attributes
    ----------
    count : int
        Tensors that were saved.
    is_asked : bool
        Whether one of them was asked for in the context.
    """

    __slots__ = ("_boxes", "_give", "_inside", "_level", "_outer", "_runs", "_see", "_stage",
                 "_through", "count", "is_asked")  # fmt: skip

    def __init__(
        self,
        see: Callable[[Tensor], object] | None = None,
        give: Callable[[int], Tensor] | None = None,
        inside: Callable[[int], Tensor] | None = None,
        *,
        through: bool = False,
        stage: str | None = None,
    ) -> None:
        self._see, self._give, self._inside, self._through = see, give, inside, through
        self._stage = stage
        self._outer: tuple[Callable[[Tensor], object], Callable[[object], Tensor]] | None = None
        self._boxes: list[weakref.ref[_Box]] = []
        self._runs = self.is_asked = False
        self.count = 0

    def __enter__(self) -> Saved:
        if self._through:
            self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._runs, self._level = True, _level()
        torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # in a captured graph nothing ends the transforms of torch.func
            while _level() > self._level:
                torch._C._functorch.pop_dynamic_layer_stack()
            torch._C._autograd._saved_tensors_hooks_enable()
        torch._C._autograd._pop_saved_tensors_default_hooks()
        # Graphs refer to this for as long as they live.
        self._runs, self._see, self._inside = False, None, None
        if self._give is not None:
            for reference in self._boxes:
                if (box := reference()) is not None:
                    box.held = None

    def held(self) -> list[Tensor]:
        """Return the tensors that graphs hold now."""
        boxes = [box for reference in self._boxes if (box := reference()) is not None]
        return [box.held for box in boxes if isinstance(box.held, Tensor)]

    def _pack(self, tensor: Tensor) -> object:
        number = self.count
        self.count = number + 1
        own = self._see is not None and self._see(tensor) is True
        if self._inside is not None:
            return _Box(number, itself(tensor), tensor._version) if own else number
        held = itself(tensor) if self._outer is None else self._outer[0](tensor)
        box = _Box(number, held, tensor._version)
        self._boxes.append(weakref.ref(box))
        return box

    def _unpack(self, kept: object) -> Tensor:
        if self._runs:
            self.is_asked = True
        if isinstance(kept, int):
            give = self._inside or self._give
            assert give is not None
            return give(kept)
        assert isinstance(kept, _Box)
        if self._outer is not None:
            return self._outer[1](kept.held)
        if kept.held is None:
            assert self._give is not None
            return self._give(kept.number)
        assert isinstance(kept.held, Tensor)
        if kept.held._version != kept.version:
            raise written_to(self._stage)
        return kept.held


def _level() -> int:
    """Return how many transforms of torch.func are at work in this thread."""
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else top.level()


class _Box:
    """What a graph holds in place of a tensor."""

    __slots__ = ("__weakref__", "held", "number", "version")

    def __init__(self, number: int, held: object, version: int) -> None:
        self.number, self.held, self.version = number, held, version


def never(number: int) -> Tensor:
    """Return nothing: the graph of such a run is not differentiated."""
    raise AssertionError(f"tensor {number} was asked for of a run that nothing differentiates")


def itself(tensor: Tensor) -> Tensor:
    """Return a saved tensor for a graph's hooks to hold.

    Not an output, which its own node would keep: a cycle that nothing collects.  A leaf is
    none, and may be given other memory, as by `parameter.data = ...`, which autograd sees.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def written_to(stage: str | None = None) -> RuntimeError:
    """Return the error of autograd's own check, which hooks bypass."""
    whose = "" if stage is None else f" that stage {stage}"
    its = "the" if stage is None else "its"
    return RuntimeError(
        f"a tensor{whose} saved for {its} gradient has been modified by an inplace operation; "
        "plain training fails here too"
    )


@dataclass(slots=True)
class Caught:
    """What one run of a stage saved.

    Attributes
    ----------
    stage : str or None
        Its name, for messages.
    places : dict
        Numbers of parameters and buffers, by address.
    begun : int
        Nodes made before the run.
    digests : Digests or None
        Takes the checksums; None if nothing is compared.
    count : Count or None
        Counts the bytes.
    holds : bool
        Whether the tensors are held, in `tape`, with their versions.
    enough : int or None
        After how many the run ends.
    kinds, sums : list
        Of all of them; checksums are empty if nothing is compared.
    without : Remade or None
        What of the tensors is not held, nor counted as held: it is made again.
    first : bool
        Whether only checksums of what is not held are taken.
    counts_alone : bool
        Whether their kinds are not looked at, as they are the same in each run.
    leaves_own : bool
        Whether parameters and buffers are left to the graph.
    own : int
        How many of the tensors were left to the graph.
    parts : list of int
        Of stages run as one: how much was saved by the end of each but the last.
    """

    stage: str | None = None
    places: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    digests: Digests | None = None
    count: Count | None = None
    holds: bool = True
    enough: int | None = None
    without: Remade | None = None
    first: bool = False
    counts_alone: bool = False
    leaves_own: bool = False
    own: int = 0
    tape: list[Tensor | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    sums: list[int | None] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def see(self, tensor: Tensor) -> bool:
        """Take a tensor; return whether it is left to the graph.

        Raises Complete once there are enough.
        """
        kinds = self.kinds
        if len(kinds) == self.enough:  # the stage has suppressed what should have ended it
            raise Complete
        if self.count is not None:
            self.count.add(tensor)
        place = None
        if self.counts_alone:
            kinds.append(_ANY)
            if self.leaves_own and type(tensor) in _PLAIN_TENSORS and tensor.layout is _STRIDED:
                place = self.places.get(tensor.data_ptr())
        elif tensor.layout is _STRIDED and not tensor.is_nested:
            if type(tensor) in _PLAIN_TENSORS:
                place = self.places.get(tensor.data_ptr())
            nodes = _sequence_nr() - self.begun
            kinds.append((tensor.shape, tensor.dtype, tensor.stride(), place, nodes))
        else:
            kinds.append((torch.Size(), tensor.dtype, (), None, _sequence_nr() - self.begun))
        own = self.leaves_own and place is not None
        out = own or (self.without is not None and self.without.leaves_out(len(kinds) - 1, tensor))
        if self.digests is not None:
            # Parameters have checksums of their own; and kernels do not fill their workspaces
            # (oneDNN's LSTM).
            skipped = place is not None or (tensor.dtype is torch.uint8 and tensor.dim() == 1)
            skipped = skipped or (self.first and not out)
            self.sums.append(None if skipped else self.digests.of(tensor))
        if self.holds:
            self.tape.append(None if out else itself(tensor))
            self.versions.append(tensor._version)
        self.own += own
        if len(kinds) == self.enough:
            raise Complete
        return own

    def part(self, number: int, state: object) -> None:
        """Note that one of several stages is through."""
        self.parts.append(len(self.tape))


_sequence_nr: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


def nodes_made() -> int:
    """Return how many nodes of graphs this thread has made."""
    return _sequence_nr()


_STRIDED = torch.strided
_ANY: Kind = torch.Size(), torch.uint8, (), None, 0
_PLAIN_TENSORS = {Tensor, nn.Parameter}


def difference(first: Sequence[Kind], again: Sequence[Kind]) -> str:
    """Say where two lists of saved tensors differ."""
    if len(first) != len(again):
        return f"{len(again)} in place of {len(first)}"
    for number, (a, b) in enumerate(zip(first, again, strict=True)):
        if a[:3] != b[:3]:
            kinds = [f"{tuple(k[0])} {k[1]} with strides {k[2]}" for k in (a, b)]
            return f"number {number} is {kinds[1]} in place of {kinds[0]}"
        if a[3] != b[3]:
            return f"number {number} is a parameter or buffer in one run and not in the other"
    return "the same"
