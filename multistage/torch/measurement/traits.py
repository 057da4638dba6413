"""What a stage does besides computing its output, and the bytes that it may save and return.

A plan holds for the sizes that were profiled.  What decides them need not be a
shape: a number in the state, an attribute that `forward` branches on, a coin, the
values of a mask.  So the bytes that a stage returns are compared on every run,
and those that it saves on every run in which a hook sees them anyway, or in which
anything but tensors' values is other than in a run that was counted before.  A run
that exceeds them ends before there is more.

Bytes are counted as a hook sees them, a tensor that is saved twice counting twice:
they serve to be compared with one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ..environment.places import LEAVES
from ..environment.scope import Scope
from ..tensors.geometry import Geometry
from ..tensors.meter import storages_of

_MOST_KNOWN = 16  # ways to run of which the sizes are known


class OnceMore(BaseException):
    """A forward sweep that is undone has to be run once more, another way.

    Raised in the middle of a stage, before it takes more memory.  No Exception, which a
    stage may catch for reasons of its own.
    """


class ApartError(OnceMore):
    """Stages that were run as one have to be run one by one."""


class LargerError(OnceMore):
    """A stage saves or returns more than is planned for.

    Parameters
    ----------
    stage : int
    does : {"saves", "returns"}
    planned, seen : int
        Bytes.
    """

    def __init__(self, stage: int, does: str, planned: int, seen: int) -> None:
        super().__init__(stage, does, planned, seen)
        self.stage, self.does, self.planned, self.seen = stage, does, planned, seen
        self.what = f"{does} {seen} bytes or more, and the plan is for {planned}"


def bytes_of(leaves: Sequence[object]) -> int:
    """Return the bytes of the tensors among some values."""
    return sum([nbytes_of(x) for x in leaves if isinstance(x, Tensor)])


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return at which element of its storage a tensor begins, and the bytes of the storage."""
    return int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, or of its parts if it is sparse."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(storage.nbytes() for storage in storages_of(tensor).values())


@dataclass(slots=True)
class Sizes:
    """The bytes of one stage that its plan is for, and the ways to run that were counted.

    Attributes
    ----------
    output_bytes, saved_bytes : int or None
        The limit; None until the first run.
    varies : bool
        Whether sizes depend on the values of tensors, so that every run is counted.
    """

    output_bytes: int | None = None
    saved_bytes: int | None = None
    varies: bool = False
    _known: set[object] = field(default_factory=set)

    def fresh(self) -> Sizes:
        """Return the same bytes, with no run counted yet."""
        return Sizes(self.output_bytes, self.saved_bytes, self.varies)

    def both(self, other: Sizes, value: Callable[[int, int], int]) -> Sizes:
        """Return a value of the bytes of two, such as the larger, with no run counted yet."""
        of_each = ((self.output_bytes, other.output_bytes), (self.saved_bytes, other.saved_bytes))
        output, saved = (None if a is None or b is None else value(a, b) for a, b in of_each)
        return Sizes(output, saved, self.varies or other.varies)

    @staticmethod
    def way(leaves: Sequence[object], environment: int) -> object:
        """Return what decides sizes in a run, beside shapes: None if it cannot be remembered.

        Parameters
        ----------
        leaves : sequence
            Of the stage's input.
        environment : int
            A number of what the stage refers to; see `Found`.
        """
        values = tuple([x for x in leaves if not isinstance(x, Tensor)])
        if values and not all(isinstance(x, LEAVES) for x in values):
            return None
        return environment, values

    def knows(self, way: object) -> bool:
        """Whether a run of this way was counted, and another saves as much."""
        return not self.varies and way in self._known

    def counted(self, way: object, saved_bytes: int) -> None:
        """Note the bytes that a whole run saved."""
        if self.saved_bytes is None:
            self.saved_bytes = saved_bytes
        if way is None or self.varies:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(way)

    def returned(self, number: int, leaves: Sequence[object]) -> None:
        """Compare the bytes that a stage returned.

        Raises
        ------
        LargerError
            If they are more than planned for.
        """
        nbytes = bytes_of(leaves)
        if self.output_bytes is None:
            self.output_bytes = nbytes
        elif nbytes > self.output_bytes:
            raise LargerError(number, "returns", self.output_bytes, nbytes)


class Count:
    """Counts what one run of a stage saves.

    Parameters
    ----------
    number : int
        Of the stage.
    sizes : Sizes
    """

    __slots__ = ("_before", "_number", "_sizes", "nbytes")

    def __init__(self, number: int, sizes: Sizes) -> None:
        self._number, self._sizes = number, sizes
        self.nbytes = self._before = 0

    def begin(self, sizes: Sizes) -> None:
        """Count what follows for the next of several stages that run as one."""
        self._sizes, self._before = sizes, self.nbytes

    def end(self) -> None:
        """Note what one of several stages saved, if that is not known yet."""
        if self._sizes.saved_bytes is None:
            self._sizes.saved_bytes = self.nbytes - self._before

    def add(self, tensor: Tensor) -> None:
        """Count a tensor.

        Raises
        ------
        LargerError
            If the stage has saved more than planned for.
        """
        self.nbytes += nbytes_of(tensor)
        most, seen = self._sizes.saved_bytes, self.nbytes - self._before
        if most is not None and seen > most:
            raise LargerError(self._number, "saves", most, seen)


@dataclass(frozen=True, slots=True, eq=False)
class Remade:
    """Tensors of a stage's tape that are not kept, but made again from the others.

    Attributes
    ----------
    kinds : list
        Shapes, dtypes and strides of all tensors that the stage saves, with which this holds.
    spans : dict
        By the number of each that lies in memory of the stage's own: where in it, and its size.
    views : dict
        By the number of each that is not kept: in which of the made tensors it lies, and where.
    nbytes : int
        Of what is not kept.
    sources : tuple of int
        Numbers of the tensors that they are made from.
    reads : tuple of int
        Places among the names of the stage of parameters, buffers and constants that are read.
    stage : OfGraph
    function : callable
        Takes what is read, the stage's state and its tape; returns what is made.
    """

    kinds: Sequence[tuple[torch.Size, torch.dtype, tuple[int, ...]]]
    spans: Mapping[int, tuple[int, int]]
    views: Mapping[int, tuple[int, Geometry]]
    nbytes: int
    sources: tuple[int, ...]
    reads: tuple[int, ...]
    stage: OfGraph
    function: Callable[..., Sequence[Tensor]]

    @property
    def names(self) -> list[str]:
        """Names of what is read of the stage's own."""
        return [self.stage.names[place] for place in self.reads]

    def leaves_out(self, number: int, tensor: Tensor) -> bool:
        """Whether a tensor that the stage saves as its `number`-th is not kept."""
        return number in self.views and self._is_known(number, tensor)

    def fits(self, tape: Sequence[Tensor | None]) -> bool:
        """Whether a tape lacks them, and what they are made from is of those kinds."""
        if len(tape) != len(self.kinds) or any(tape[n] is not None for n in self.views):
            return False
        sources = [(number, tape[number]) for number in self.sources]
        return all(tensor is not None and self._is_known(n, tensor) for n, tensor in sources)

    def _is_known(self, number: int, tensor: Tensor) -> bool:
        span = self.spans.get(number)
        alike = self.kinds[number] == (tensor.shape, tensor.dtype, tensor.stride())
        return alike and (span is None or span == span_of(tensor))

    def make(
        self,
        state: object,
        tape: Sequence[Tensor | None],
        own: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[int, Tensor]:
        """Return the tensors that are not kept, by their numbers.

        `own` are parameters and buffers to read in place of those that the stage has.
        """
        read = [own[n] if n in own else getattr(self.stage, n) for n in self.names]
        made = self.function(read, state, tape)
        return {
            number: torch.as_strided(made[place], at.size, at.stride, at.offset)
            for number, (place, at) in self.views.items()
        }


class OfGraph(nn.Module):
    """A stage of a captured graph, as nothing that a user makes is one.

    Attributes
    ----------
    is_bound : bool
        True: to the parameters of each call, since modules may share it.
    is_pure : bool
        Nothing of the user's own runs in it; see `Traits`.
    signature : object
        Equal to another's that does the same, with another chance at most.
    names : tuple of str
        Of its parameters, buffers and constants, in the order of the graph.
    unread : frozenset of str
        Names of buffers that it writes to and whose values nothing in it depends on, as batch
        norm's in training.
    """

    is_bound = True
    is_pure: bool
    signature: object
    names: tuple[str, ...]
    unread: frozenset[str]

    def own(self) -> dict[str, object]:
        """Return its parameters, buffers and constants, by name."""
        return {name: getattr(self, name) for name in self.names}


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
    may_draw : bool
        Whether it may draw where it did not when it was profiled, as operations of torch may
        whose numbers of draws depend on values, and as anything else may.
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
    is_pure : bool
        Whether it consists of operations of torch alone, so that the same state, parameters,
        buffers and generators make it save the same numbers, and none need be compared.
    fills : bool
        Whether it saves memory that a kernel fills afterwards, without a new version, as random
        leaky ReLU does with its slopes: the bits that it saves are not known when it saves them.
    scope : Scope, optional
        What it refers to; searched for if not given.
    sizes : Sizes, optional
        What it may save and return; not looked at if not given.
    ways : tuple of Remade
        Other ways to keep its tape.
    remade : Remade, optional
        The way that a plan has chosen, if not the whole tape.
    """

    name: str
    buffers: tuple[tuple[nn.Module, str], ...] = ()
    draws: frozenset[str] = frozenset()
    may_draw: bool = True
    graded: bool = False
    changes_input: bool = False
    differentiates: bool = False
    unhooked: bool = False
    is_pure: bool = False
    fills: bool = False
    scope: Scope | None = None
    sizes: Sizes | None = None
    ways: tuple[Remade, ...] = ()
    remade: Remade | None = None

    @property
    def is_blind(self) -> bool:
        """Whether the values of the buffers that it changes decide nothing."""
        return all(isinstance(m, OfGraph) and key in m.unread for m, key in self.buffers)

    @property
    def is_simple(self) -> bool:
        """Whether it may be one of several stages that run as one, its tape kept as others are."""
        odd = self.graded or self.differentiates or self.unhooked or self.fills
        return not (odd or self.changes_input)

    @classmethod
    def together(
        cls, name: str, traits: Sequence[Traits], scope: Scope, sizes: Sizes | None = None
    ) -> Traits:
        """Return what stages do that run as one."""
        return cls(
            name=name,
            buffers=tuple({(id(m), k): (m, k) for t in traits for m, k in t.buffers}.values()),
            draws=frozenset().union(*[t.draws for t in traits]),
            may_draw=any(t.may_draw for t in traits),
            graded=any(t.graded for t in traits),
            changes_input=traits[0].changes_input,
            differentiates=any(t.differentiates for t in traits),
            unhooked=any(t.unhooked for t in traits),
            is_pure=all(t.is_pure for t in traits),
            fills=any(t.fills for t in traits),
            scope=scope,
            sizes=sizes,
        )
