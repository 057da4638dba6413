"""What autograd's graph of a step shows: the leaves below it, and its bytes."""

from __future__ import annotations

import collections
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ...errors import ArgumentError

# A node and the number of one of its results; the leaves by their identities.
Edge: TypeAlias = tuple[Node | None, int]
Used: TypeAlias = set[int | Edge]


@functools.cache
def _accumulate() -> type[Any]:
    """Return the type of the nodes at which a graph ends, in a leaf."""
    with torch.enable_grad():
        node = torch.ones(1, requires_grad=True).view(1).grad_fn
    assert node is not None
    return type(node.next_functions[0][0])


def graph_begins() -> int:
    """Return the sequence number of autograd's nodes made from now on, by this thread."""
    with torch.enable_grad():
        marker = torch.ones(1, requires_grad=True).clone().grad_fn
    assert marker is not None
    return marker._sequence_nr()


@dataclass(slots=True)
class Walked:
    """What `leaves_below` saw of a graph.

    Attributes
    ----------
    used : set
        For `uses`, which tells the parameters that the graph leads to.
    found : list of (int, Node)
        Those of the graph, without its leaves, and their sequence numbers.  A node that Python
        defines has none any more where its graph is gone.
    """

    used: Used = field(default_factory=set)
    found: list[tuple[int, Node]] = field(default_factory=list)

    def sort(self) -> list[tuple[int, Node]]:
        """Return the nodes, sorted so that a list of them lets a graph go without recursion.

        A node that was looked at from Python keeps its Python object for as long as it lives,
        and is freed together with that object: within the destructor of the node that uses
        it, so that a long graph overflows the stack.  While a list holds the nodes none is
        freed within another; a list releases its last item first, and the last node here is
        the one that was made last, which no other node uses.
        """
        self.found.sort(key=operator.itemgetter(0))
        return self.found

    def release(self) -> None:
        """Let the graph go; nothing else may refer to its roots."""
        nodes = self.sort()
        while nodes:
            nodes.pop()


def leaves_below(
    roots: Sequence[Tensor],
    inputs: set[int],
    known: Sequence[Tensor],
    begun: int,
    name: str,
    walked: Walked | None = None,
) -> Iterator[Tensor]:
    """Yield the leaves of a graph that are neither inputs nor known.

    Parameters
    ----------
    roots : sequence of Tensor
        Of the graph.
    inputs : set of int
        Identities of tensors that belong to it.
    known : sequence of Tensor
        Parameters; where they are no leaves, the graph ends at them.
    begun : int
        Sequence number of autograd nodes from which on they are the cell's.
    walked : Walked, optional
        Gets what was seen on the way.

    Raises
    ------
    ArgumentError
        If the cell uses a tensor that was computed before, with a graph.
    """
    leaf_node = _accumulate()
    # One output of a node each: others, as the rest of an `unbind`, are not known by it.
    ends = {(p.grad_fn, p.output_nr) for p in known}
    passed = inputs | {id(p) for p in known}
    walked = Walked() if walked is None else walked
    used = walked.used
    for root in roots:
        if root.grad_fn is None and root.requires_grad:
            used.add(id(root))
            if id(root) not in passed:
                passed.add(id(root))
                yield root
    stack: list[tuple[Any, int]] = [(t.grad_fn, t.output_nr) for t in roots]
    seen: set[Any] = {None}
    while stack:
        edge = stack.pop()
        node = edge[0]
        if edge in ends and node is not None:
            used.add(edge)
            continue
        if node in seen:
            continue
        seen.add(node)
        if type(node) is leaf_node:
            variable = node.variable
            used.add(id(variable))
            if id(variable) not in passed:
                passed.add(id(variable))
                yield variable
            continue
        number = node._sequence_nr()
        walked.found.append((number, node))
        if number < begun:
            raise ArgumentError(
                f"{name} uses a tensor that was computed outside of it ({_said(node)}) and takes "
                "part in the gradient; give it in parameters=[...], or return it in the state if "
                "an earlier step computed it"
            )
        stack += node.next_functions


def _said(node: Node) -> str:
    """Return what a node made, and where that is held as far as Python's collector knows."""
    made = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.grad_fn is node]
    shapes = [tuple(t.shape) for t in made[:1]] or [tuple(node._input_metadata[0].shape)]
    places = [place for holder in gc.get_referrers(*made) if (place := _place_in(holder, made))]
    return ", ".join([f"shape {shapes[0]}", *places[:1], f"made by {node.name()}"])


def _place_in(holder: object, made: list[Any]) -> str:
    """Return which entry of a container is among some tensors, "" if that is no place to name."""
    if holder is made or isinstance(holder, types.FrameType):
        return ""
    entries: Iterable[tuple[object, object]] = ()
    if isinstance(holder, dict):
        entries = holder.items()
    elif isinstance(holder, list | tuple | collections.deque):
        entries = enumerate(holder)
    for key, value in entries:
        if any(value is tensor for tensor in made):
            return f"entry {key!r} of a {type(holder).__name__} of {len(holder)}"  # type: ignore[arg-type]
    return "" if entries else f"held by a {type(holder).__name__}"


def statistics_in(nodes: Iterable[tuple[int, Node]]) -> list[Tensor]:
    """Return the statistics that batch norm's kernels have written to: no version says so."""
    found = []
    for _, node in nodes:
        if "BatchNorm" in type(node).__name__ and getattr(node, "_saved_training", True):
            saved: Tensor | None = getattr(node, "_saved_running_mean", None)
            found += [] if saved is None else [saved]
    return found


def uses(used: Used, parameter: Tensor) -> bool:
    """Whether a graph that `leaves_below` walked leads to a parameter."""
    return id(parameter) in used or (parameter.grad_fn, parameter.output_nr) in used


def held_elsewhere(leaves: list[Tensor], *, collect: bool = False) -> list[Tensor]:
    """Return those of some leaves that outlive their graph, which nothing else may hold any more.

    A cell may make leaves of its own, as `h.detach().requires_grad_()` for
    `torch.autograd.grad`: they are gone with the graph.  The list is emptied.
    With `collect`, cycles are broken up first.
    """
    references = [weakref.ref(leaf) for leaf in leaves]
    leaves.clear()
    found = [leaf for reference in references if (leaf := reference()) is not None]
    if found and collect:
        found.clear()
        gc.collect()
        found += [leaf for reference in references if (leaf := reference()) is not None]
    return found


def graph_weight(
    roots: Sequence[Tensor], begun: int, without: Iterable[Node | None] = ()
) -> tuple[int, int]:
    """Return how many nodes a graph has from a sequence number on, and the bytes they return.

    Its leaves do not count, nor do the nodes `without`, nor what lies below them.
    """
    leaf_node, nodes, nbytes = _accumulate(), 0, 0
    for node in nodes_below(roots, lambda node: node._sequence_nr() < begun, without):
        if type(node) is leaf_node or node._sequence_nr() < begun:
            continue
        nodes += 1
        for result in node._input_metadata:
            if not result.is_nested_tensor:
                nbytes += prod(result.shape) * result.dtype.itemsize
    return nodes, nbytes


def nodes_below(
    roots: Iterable[Tensor],
    ends: Callable[[Node], bool] = lambda node: False,
    without: Iterable[Node | None] = (),
) -> Iterator[Node]:
    """Yield the nodes of a graph, each once; nothing below those at which it is said to end."""
    stack: list[Node | None] = [t.grad_fn for t in roots]
    seen: set[Node | None] = {None, *without}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            stack += [below for below, _ in node.next_functions]
