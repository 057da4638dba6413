"""Where the graph of a model is cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from torch import fx

from .observing import Observed

# Of what a model makes for its gradient: what is large between two cuts, and its parts.
_LARGE, _PART = 0.24, 1 / 32
_FEW = 8  # calls, not worth to be cut
_HUGE = 1 / 20  # a tensor that alone may decide the least limit


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


def _places(observed: Observed) -> Iterator[Cut]:
    """Yield every place between calls; but the last, which only the output comes after."""
    skipped = ("get_attr", "output", "placeholder")
    nodes = [*observed.inputs, *(n for n in observed.graph.nodes if n.op not in skipped)]
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
        if last_use[node] > number and not observed.values[node].is_mode:
            live[node] = None
            ending.setdefault(last_use[node], []).append(node)
        if node.op != "placeholder" and number + 1 < end:
            yield Cut(node, tuple(live))


def _wanting(observed: Observed, cut: Cut) -> list[fx.Node]:
    return [node for node in cut.passing if observed.values[node].wants]


def _possible(observed: Observed, cut: Cut) -> bool:
    """Whether a cut is allowed, and what passes it is tensors and numbers."""
    return not observed.values[cut.node].closed and not any(
        observed.values[node].is_opaque for node in cut.passing
    )


def cuts(observed: Observed) -> list[Cut]:
    """Return where a graph is cut, in order.

    Wherever a single tensor passes that takes part in the gradient, but for a sum
    that only a cut would keep and one operation turns into what is kept; and inside
    of what is large between two such places (U-Nets, dense blocks, biases that
    all layers share), where the fewest bytes pass.
    """
    places = list(_places(observed))
    made = list(accumulate(_made_bytes(observed, place.node) for place in places))
    total = made[-1] if made else 0
    order = {place.node: number for number, place in enumerate(places)}
    chosen: list[int] = []
    start, begun = 0, 0
    last: int | None = None  # a cut where one tensor passes
    for number, place in enumerate(places):
        single = (
            _wanting(observed, place) == [place.node]
            and _possible(observed, place)
            and not _written_beyond(observed, place, number, order)
        )
        if single or number == len(places) - 1:
            within = [_PART * total, made[number] - begun]
            if within[1] > _LARGE * total and number - start >= _FEW:
                inner = [
                    n
                    for n in range(start, number)
                    if _possible(observed, places[n])
                    and not _written_beyond(observed, places[n], n, order)
                ]
                chosen += _evenly(observed, places, made, inner, begun, *within)
            if single:
                if last is not None and _kept_for_nothing(observed, places, made, last, number):
                    chosen.remove(last)
                chosen.append(number)
                last = number
            start, begun = number + 1, made[number]
    return [places[number] for number in chosen]


def _kept_for_nothing(
    observed: Observed, places: Sequence[Cut], made: Sequence[int], number: int, following: int
) -> bool:
    """Whether no operation saves what passes a cut, and little is made up to the next."""
    known = observed.values[places[number].node]
    return not known.is_saved and made[following] - made[number] <= known.nbytes


def is_huge(observed: Observed, node: fx.Node) -> bool:
    """Whether a value is a large part of all that a model makes for its gradient."""
    total = sum(_made_bytes(observed, each) for each in observed.values)
    return observed.values[node].nbytes >= _HUGE * total


def _written_beyond(observed: Observed, cut: Cut, number: int, order: dict[fx.Node, int]) -> bool:
    """Whether what passes a cut is written to after it: its stages would be joined again."""
    writers = [observed.written.get(key) for key in _storages(observed, cut.passing)]
    return any(w is not None and order.get(w, len(order)) > number for w in writers)


def _evenly(
    observed: Observed,
    places: list[Cut],
    made: list[int],
    candidates: list[int],
    begun: int,
    part: float,
    whole: float,
) -> list[int]:
    """Return candidates about as far apart as said, each where the fewest bytes pass near it."""
    pieces = ceil(whole / part)
    step = whole / pieces
    found: list[int] = []
    for piece in range(1, pieces):
        at = begun + piece * step
        near = [
            n for n in candidates if abs(made[n] - at) <= step / 2 and _wanting(observed, places[n])
        ]
        if near:
            best = min(near, key=lambda n: (passing_bytes(observed, places[n]), abs(made[n] - at)))
            if not found or best > found[-1]:
                found.append(best)
    return found


def _made_bytes(observed: Observed, node: fx.Node) -> int:
    """Return the bytes of the new storages that a node's result lies in, for its gradient."""
    known = observed.values[node]
    return known.nbytes if known.wants and known.is_new else 0


def _storages(observed: Observed, nodes: Iterable[fx.Node]) -> dict[object, int]:
    """Return the bytes of the storages that some values lie in, but those of parameters."""
    values = [(node, observed.values[node]) for node in nodes]
    return {
        v.storage.cdata: v.nbytes
        for node, v in values
        if v.storage is not None and (v.storage.cdata in observed.made or node.op == "placeholder")
    }


def passing_bytes(observed: Observed, cut: Cut) -> int:
    """Return the bytes of what passes a cut."""
    return sum(_storages(observed, cut.passing).values())


@dataclass(frozen=True, slots=True)
class Staying:
    """What passes several cuts, such as the skip connections of a U-Net: counted once.

    It is there from the stage that makes it to the last that uses it, whichever
    stages run again meanwhile, and never twice: a stage that makes it runs again
    only after all that use it are done with their gradients.

    Attributes
    ----------
    nbytes : int
        Of all of it.
    at : tuple of int
        Bytes of it in the state at each cut.
    """

    nbytes: int
    at: tuple[int, ...]


def ways_to_count(observed: Observed, cuts: Sequence[Cut]) -> list[Staying]:
    """Return ways to count what passes several cuts.  No plan by any of them exceeds its limit.

    Either all of it is counted once, all the time, as it is in plain training; or
    what passes few cuts is counted in each state it is part of, which is less
    where few states are kept.
    """
    most = len(cuts) + 1
    found = [_staying(observed, cuts, least) for least in (2, max(4, most // 4), most)]
    return list(dict.fromkeys(found))


def _staying(observed: Observed, cuts: Sequence[Cut], least: int) -> Staying:
    """Count once what passes at least so many cuts."""
    at = [_storages(observed, cut.passing) for cut in cuts]
    times = Counter(key for storages in at for key in storages)
    kept = {
        k: n
        for storages in at
        for k, n in storages.items()
        if times[k] >= least or k not in observed.made  # which is the caller's, all the time
    }
    return Staying(
        sum(n for k, n in kept.items() if k in observed.made),
        tuple(sum(kept.get(k, 0) for k in storages) for storages in at),
    )
