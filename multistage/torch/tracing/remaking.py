"""What of a stage's tape need not be kept, as it is cheap to make again.

Of the tensors that a stage saves for its gradient, some are results of operations that take
next to no time beside the stage: norms, activations, sums.  They are made again from the
stage's input and the tensors that are kept, by operations that write to nothing and draw no
random numbers.  Which ones they are is decided by their measured seconds.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils import _pytree as pytree

from ..environment.randomness import Generators
from ..environment.states import tensors_in
from ..measurement.clocks import seconds_of
from ..measurement.saved import Saved, itself
from ..measurement.traits import OfGraph, Remade, span_of
from ..tensors.checksums import same_bits
from ..tensors.geometry import Geometry, is_plain
from ..tensors.meter import Operations
from .observing import _PLAIN, storage_of

# Bytes that are not kept for a second of making them again, as multiples of what running the
# whole stage again gives: each is a way to keep the stage's tape.
_WORTH = (1.0, 6.0)
_ROUNDS = 3


class Remaking(fx.Interpreter):
    """One run of a stage, node by node, and what of its tape it shows to be cheap.

    Parameters
    ----------
    stage : OfGraph
    graph : fx.Graph
        Of the stage.
    fresh : callable
        Returns the state to run it on.
    device : torch.device
    draws : bool
        Whether it may draw random numbers.
    """

    def __init__(
        self,
        stage: OfGraph,
        graph: fx.Graph,
        fresh: Callable[[], object],
        device: torch.device,
        *,
        draws: bool,
    ) -> None:
        super().__init__(stage, garbage_collect_values=False, graph=graph)
        self._stage, self._nodes, self._device = stage, list(graph.nodes), device
        others = [] if device.type == "cpu" else [device]
        self._generators = Generators(others) if draws else None
        self._own = [n for n in self._nodes if n.op == "get_attr"]
        self._impure: set[fx.Node] = set()
        self._writers: dict[int, list[fx.Node]] = {}  # by storage
        self._seconds: dict[fx.Node, float] = {}
        self._saved: list[Tensor] = []
        self._versions: list[int] = []
        for _ in range(_ROUNDS - 1):
            with torch.no_grad():
                self.run(None, fresh())
        self._writers.clear()  # of storages that are gone
        self._state = fresh()
        with torch.enable_grad(), Saved(self._see):
            self.run(None, self._state)
        given = [n for n in self._nodes if n.op in ("placeholder", "get_attr")]
        self._given = {_storage(t) for n in given for t in tensors_in(self.env[n])}
        for storage in self._given & self._writers.keys():
            self._impure |= {n for n in self._writers[storage] if not is_batch_norm(n)}
        # The first node whose value is a tensor in each storage that the stage makes.
        self._makers: dict[int, fx.Node] = {}
        for n in self._nodes:
            value = self.env[n]
            if isinstance(value, Tensor) and is_plain(value) and _storage(value) not in self._given:
                self._makers.setdefault(_storage(value), n)
        self._varied: set[fx.Node] = set()  # whose places in memory may be others in another run
        for n in self._nodes:
            if n.op in ("call_function", "call_method") and self._varies(n):
                self._varied.add(n)

    def _varies(self, n: fx.Node) -> bool:
        """Whether where its value lies depends on numbers, or on tensors that it is no view of."""
        storages = {_storage(t) for t in tensors_in(self.env[n])}
        inputs = {i: {_storage(t) for t in tensors_in(self.env[i])} for i in n.all_input_nodes}
        roots = [i for i, own in inputs.items() if own & storages]
        alone = not roots or len(roots) == len(inputs)
        return not (alone and all(inputs.values()) and self._varied.isdisjoint(roots))

    def _see(self, tensor: Tensor) -> None:
        self._saved.append(itself(tensor))
        self._versions.append(tensor._version)

    def run_node(self, n: fx.Node) -> object:
        """Run a node; note what it takes, and whether it may be run again."""
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        given = tensors_in([self.env[node] for node in n.all_input_nodes])
        before = [t._version for t in given]
        random = None if self._generators is None else self._generators.capture()
        found: list[Any] = []
        looks = self._generators is not None and n not in self._seconds
        with Operations() if looks else contextlib.nullcontext() as done:
            run = lambda: found.append(super(Remaking, self).run_node(n))  # noqa: E731
            took_s = seconds_of(run, self._device)
        self._seconds[n] = min(took_s, self._seconds.get(n, took_s))
        for tensor, version in zip(given, before, strict=True):
            if tensor._version != version:
                self._writers.setdefault(_storage(tensor), []).append(n)
        plain = all(
            is_plain(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN)
            for leaf in pytree.tree_leaves(found[0])
        )
        drew = self._generators is not None and random != self._generators.capture()
        drew = drew or (done is not None and done.may_draw)
        if drew or not plain or isinstance(n.target, HigherOrderOperator):
            self._impure.add(n)
        return found[0]

    def ways(self, tape_bytes: int, forward_s: float) -> list[Remade]:
        """Return what ways to keep the tape there are beside the whole of it.

        Parameters
        ----------
        tape_bytes, forward_s
            Of the stage.
        """
        found: dict[frozenset[int], Remade] = {}
        for worth in _WORTH:
            made = self._remade(worth * tape_bytes / max(forward_s, 1e-9))
            if made is not None:
                found.setdefault(frozenset(made.views), made)
        return [made for made in found.values() if self._is_right(made)]

    def _remade(self, least: float) -> Remade | None:
        """Return what is made again of storages that free so many bytes for each second."""
        saved: dict[int, list[int]] = {}  # numbers of tensors, by storage
        for number, tensor in enumerate(self._saved):
            if is_plain(tensor):
                saved.setdefault(_storage(tensor), []).append(number)
        kept = {  # from which a storage is read
            storage: numbers[0] for storage, numbers in saved.items() if storage in self._makers
        }
        output = next(n for n in self._nodes if n.op == "output")
        last = {_storage(t) for t in tensors_in(self.env[output]) if is_plain(t)}
        again: set[fx.Node] = set()
        views: dict[int, tuple[fx.Node, Geometry]] = {}
        for storage, maker in self._makers.items():
            numbers = saved.get(storage, ())
            final = all(self._saved[n]._version == self._versions[n] for n in numbers)
            if not numbers or storage in last or not final:
                continue
            others = {key: number for key, number in kept.items() if key != storage}
            # With the others made again: they may have been read from this storage.
            needed = self._needed([*(made for made, _ in views.values()), maker], others)
            types = {self._saved[number].dtype for number in numbers}
            if needed is None or types != {self.env[maker].dtype}:
                continue
            seconds = sum(self._seconds[n] for n in needed - again)
            nbytes = self.env[maker].untyped_storage().nbytes()
            if nbytes < least * seconds:
                continue
            kept, again = others, needed
            for number in numbers:
                views[number] = maker, Geometry.of(self._saved[number])
        return self._built(again, views, kept) if views else None

    def _needed(self, waiting: list[fx.Node], kept: dict[int, int]) -> set[fx.Node] | None:
        """Return the nodes to run for the values of some; None if one cannot be made again."""
        needed: set[fx.Node] = set()
        while waiting:
            n = waiting.pop()
            if n in needed or self._source(n, kept):
                continue
            storages = {_storage(t) for t in tensors_in(self.env[n])} & self._writers.keys()
            if n in self._impure or not storages <= self._makers.keys():
                return None
            if n.op in ("placeholder", "get_attr"):
                continue
            needed.add(n)
            waiting += _inputs(n)
            for storage in storages:  # written to, in the order in which it was
                waiting += [self._makers[storage], *self._writers[storage]]
        return needed

    def _source(self, n: fx.Node, kept: dict[int, int]) -> int | None:
        """Return the number of a saved tensor, plus 1, that the value of a node is a view of."""
        value = self.env[n]
        if not isinstance(value, Tensor) or not is_plain(value):
            return None
        number = kept.get(_storage(value))
        alike = number is not None and self._saved[number].dtype == value.dtype
        alike = alike and _storage(value) not in self._writers and n not in self._varied
        return number + 1 if number is not None and alike else None

    def _built(
        self,
        again: set[fx.Node],
        views: dict[int, tuple[fx.Node, Geometry]],
        kept: dict[int, int],
    ) -> Remade:
        graph = fx.Graph()
        own, state, tape = (graph.placeholder(name) for name in ("own", "state", "tape"))
        copies: dict[fx.Node, fx.Node] = {}
        reads: list[int] = []
        sources: dict[int, None] = {}

        def copy(n: fx.Node) -> fx.Node:
            if n not in copies:
                if n.op == "placeholder":
                    copies[n] = state
                elif n.op == "get_attr":
                    copies[n] = graph.call_function(operator.getitem, (own, len(reads)))
                    reads.append(self._own.index(n))
                else:
                    number = self._source(n, kept)
                    assert number is not None
                    sources[number - 1] = None
                    source = graph.call_function(operator.getitem, (tape, number - 1))
                    at = Geometry.of(self.env[n])
                    given = (source, tuple(at.size), at.stride, at.offset)
                    copies[n] = graph.call_function(torch.as_strided, given)
            return copies[n]

        for n in self._nodes:
            if n in again:
                inputs: dict[fx.Node, fx.Node | None] = {i: copy(i) for i in _inputs(n)}
                copies[n] = graph.node_copy(n, inputs.get)
        makers = list(dict.fromkeys(maker for maker, _ in views.values()))
        graph.output([copies[maker] for maker in makers])
        code = graph.python_code("self")
        space = dict(code.globals)
        exec(code.src, space)  # what torch.fx itself does to run a graph
        return Remade(
            kinds=[(t.shape, t.dtype, t.stride()) for t in self._saved],
            spans={n: span_of(t) for n, t in enumerate(self._saved) if _storage(t) in self._makers},
            views={n: (makers.index(maker), at) for n, (maker, at) in views.items()},
            nbytes=sum(self.env[maker].untyped_storage().nbytes() for maker in makers),
            sources=tuple(sources),
            reads=tuple(reads),
            stage=self._stage,
            function=partial(space["forward"], None),
        )

    def _is_right(self, made: Remade) -> bool:
        """Whether what is made again has the bits of what was saved."""
        kept: list[Tensor | None] = [
            None if number in made.views else tensor for number, tensor in enumerate(self._saved)
        ]
        with torch.no_grad():
            again = made.make(self._state, kept)
        return all(same_bits(tensor, self._saved[n]) for n, tensor in again.items())


def is_batch_norm(n: fx.Node) -> bool:
    """Whether a node normalises by the batch; it writes to running statistics, if it has any."""
    return n.target is functional.batch_norm and len(n.args) > 5 and n.args[5] is True


def _inputs(n: fx.Node) -> list[fx.Node]:
    """Return what a node takes where it runs again, which is not for its running statistics."""
    statistics = n.args[1:3] if is_batch_norm(n) else ()
    return [each for each in n.all_input_nodes if each not in statistics]


def _storage(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else int(storage.cdata)
