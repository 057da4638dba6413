"""Values of tensors that `forward` reads into Python, and graphs that read them again."""

from __future__ import annotations

from torch import fx
from torch.fx.node import Argument, Target

from .called import same_value, shapes_of
from .frames import Frames
from .nodes import Nodes
from .recorded import FIXED, INPUT, RANDOM, Reading, Value
from .storages import behind
from .vocabulary import said, tensors_in


class Readings:
    """The values that a recorded `forward` has read.

    Parameters
    ----------
    nodes : Nodes
    frames : Frames

    Attributes
    ----------
    found : list of Reading
        Those that follow from the input.
    """

    def __init__(self, nodes: Nodes, frames: Frames) -> None:
        self._nodes, self._frames = nodes, frames
        self.found: list[Reading] = []

    def read(
        self,
        kind: str,
        target: Target,
        nodes: tuple[Argument, ...],
        named: dict[str, Argument],
        source: int,
        result: object,
        func: object,
    ) -> None:
        """Take note of a value that Python gets."""
        if source == FIXED:
            return
        plain = isinstance(result, (bool, int, float, str)) or (
            isinstance(result, list) and len(result) < 1000
        )
        refused, graph = self._frames.refused, self._nodes.graph
        if not plain:
            raise refused(f"calls {said(func)}, for a value of type {type(result).__name__}")
        if source == RANDOM:
            raise refused(f"decides by a random number ({said(func)})")
        if source != INPUT:
            if self._frames.path or not isinstance(result, bool):
                raise refused(
                    f"reads a value of a tensor ({said(func)}) that depends on parameters, buffers "
                    "or random numbers"
                )
            # Such as a look for NaNs, which is nearly always the same: compared in every run.
            read = graph.create_node(kind, target, nodes, named)
            self._nodes.values[read] = Value(source)
            same = graph.call_function(same_value, (read, result, said(func)))
            self._nodes.values[same] = Value(source)
            return
        read = graph.create_node(kind, target, nodes, named)
        self.found.append(self._reading(read, result, func))

    def read_shapes(self, node: fx.Node, result: object, source: int, func: object) -> None:
        """Take note of shapes that follow from values."""
        if source != INPUT:
            raise self._frames.refused(f"calls {said(func)}, whose shape follows from values,")
        shapes = [tuple(t.shape) for t in tensors_in(result)]
        read = self._nodes.graph.call_function(shapes_of, (node,))
        self.found.append(self._reading(read, shapes, func))

    def _reading(self, node: fx.Node, value: object, func: object) -> Reading:
        """Return a reading by a graph of its own, taken out of the model's."""
        wanted = behind(node)
        values, mutations = self._nodes.values, self._nodes.mutations
        for inner in wanted:
            known = values.get(inner)
            if known is not None and known.modes is not None and known.modes.autocasts:
                raise self._frames.refused(
                    f"reads a value of a tensor ({said(func)}) under autocast"
                )
            if known is not None and mutations.source(known.storage) is not None:
                raise self._frames.refused(
                    f"reads a value of a tensor ({said(func)}) that was written to in place"
                )
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for inner in self._nodes.graph.nodes:
            if inner.op == "placeholder" or inner in wanted:
                copies[inner] = graph.node_copy(inner, lambda n: copies[n])
        graph.output(copies[node])
        self._nodes.graph.erase_node(node)
        return Reading(graph, value)
