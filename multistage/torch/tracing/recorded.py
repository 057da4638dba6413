"""What a recording of a model's `forward` consists of."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from .calling import Given, Structure
from .watching import Attributes

# What the value of a tensor follows from, as flags.
FIXED, INPUT, MODEL, RANDOM = 0, 1, 2, 4


class UnrecordableError(BaseException):
    """A module does what a graph cannot hold; no `except Exception` of a model catches it."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"{path or 'the model'}: {cause}")
        self.path, self.cause = path, cause


@dataclass(slots=True)
class Value:
    """What is known of the value of a node."""

    source: int = FIXED
    wants: bool = False  # a gradient
    nbytes: int = 0
    storage: StorageWeakRef | None = None
    is_new: bool = False  # whether nothing before it lies in that storage
    in_parts: bool = False  # not a tensor, but a tuple or the like
    modes: Modes | None = None
    is_mode: bool = False  # a context that was entered, and is entered again in each stage
    is_effect: bool = False  # of a call that changes something that is no tensor
    closed: bool = False  # whether no cut may follow


@dataclass(frozen=True, slots=True)
class Modes:
    """Modes that calls of torch ran in, other than those around the model."""

    graded: bool
    autocasts: tuple[tuple[int, dict[str, object]], ...]  # number and arguments of each


@dataclass(slots=True)
class Reading:
    """A value that `forward` read of a tensor, and a graph of the input that reads it."""

    graph: fx.Graph
    value: object


@dataclass(slots=True)
class Recorded:
    """A graph whose attributes are the model's, and what it depends on.

    Attributes
    ----------
    graph : fx.Graph
        Its placeholders are the leaves of the arguments, in order.
    values : dict
        What is known of each node.
    made : set
        Storages that `forward` made; not the input's, nor the model's.
    written : dict
        The last node that writes to a storage.
    extras : dict
        Attributes that are not the model's.
    given : Given
        Flattens what the model is called with.
    result : Structure
        Of what it returns.
    readings : list of Reading
        Values that follow from the input; in graphs of their own.
    attributes : Attributes
        That `forward` read.
    opened : list of str
        Paths of the modules whose calls were recorded, not called whole.
    closed : dict
        Paths of modules called whole because of a cause.
    """

    graph: fx.Graph
    values: dict[fx.Node, Value]
    made: set[object]
    written: dict[object, fx.Node]
    extras: dict[str, object]
    given: Given
    result: Structure
    readings: list[Reading]
    attributes: Attributes
    opened: list[str]
    closed: dict[str, str]


@dataclass(slots=True)
class Observed:
    """A graph captured by TorchDynamo, and what a run of it showed.

    Attributes
    ----------
    graph : fx.Graph
    inputs : list of fx.Node
        The placeholders that are no parameters and buffers.
    values : dict
        What is known of each node.
    made : set
        Storages that the graph makes.
    written : dict
        The last node that writes to a storage.
    modes : dict
        What is entered after a node: whether gradients are on, and calls of autocast.
    returned : dict
        Places of arguments that the captured graph returned, by their places in its result;
        the graph that was observed no longer does.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    values: dict[fx.Node, Value]
    made: set[object]
    written: dict[object, fx.Node]
    modes: dict[fx.Node, tuple[bool, tuple[fx.Node, ...]]] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
