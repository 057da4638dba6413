"""Where the graph of a model is cut into stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from .recorded import Recorded


@dataclass(frozen=True, slots=True)
class Cut:
    """A place between two calls.

    Attributes
    ----------
    node : fx.Node
        The last before it.
    passing : tuple of fx.Node
        What is made up to it and used beyond: the state between the stages.
    """

    node: fx.Node
    passing: tuple[fx.Node, ...]


def _places(recorded: Recorded) -> Iterator[Cut]:
    """Yield every place between calls; but the last, which only the output comes after."""
    nodes = [node for node in recorded.graph.nodes if node.op not in ("get_attr", "output")]
    place = {node: number for number, node in enumerate(nodes)}
    end = len(nodes)
    last_use = {
        node: max((place.get(user, end) for user in node.users), default=-1) for node in nodes
    }
    live: dict[fx.Node, None] = {}
    ending: dict[int, list[fx.Node]] = {}
    for number, node in enumerate(nodes):
        for dead in ending.pop(number, ()):
            del live[dead]
        if last_use[node] > number:
            live[node] = None
            ending.setdefault(last_use[node], []).append(node)
        if node.op != "placeholder" and number + 1 < end:
            yield Cut(node, tuple(live))


def _wanting(recorded: Recorded, cut: Cut) -> list[fx.Node]:
    return [node for node in cut.passing if recorded.values[node].wants]


def _possible(recorded: Recorded, cut: Cut) -> bool:
    """Whether a cut falls outside of modes, and not between a call and parts of its result."""
    return recorded.values[cut.node].modes is None and not any(
        recorded.values[node].in_parts for node in cut.passing
    )


def cuts(recorded: Recorded) -> list[Cut]:
    """Return the places that a single tensor passes which takes part in the gradient."""
    return [
        cut
        for cut in _places(recorded)
        if _wanting(recorded, cut) == [cut.node] and _possible(recorded, cut)
    ]


def why_uncut(recorded: Recorded) -> str:
    """Return why a graph has no cuts."""
    crossing = [(cut, wanting) for cut in _places(recorded) if (wanting := _wanting(recorded, cut))]
    closed = "".join(f"; {path} is called whole: it {why}" for path, why in recorded.closed.items())
    if not crossing:
        some = any(value.wants for value in recorded.values.values())
        why = "it has a single operation" if some else "nothing in it wants a gradient"
        return why + closed
    cut, fewest = min(crossing, key=lambda entry: len(entry[1]))
    names = ", ".join(node.name for node in fewest[:6])
    return (
        f"at least {len(fewest)} tensors pass at every point of its graph "
        f"(after {cut.node.name!r}: {names}), and a cut needs a point that one tensor passes"
        + closed
    )
