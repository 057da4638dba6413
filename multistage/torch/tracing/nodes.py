"""The graph that is being recorded: nodes of tensors and values, and what is known of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from .frames import Frames
from .recorded import FIXED, INPUT, MODEL, Modes, UnrecordableError, Value
from .storages import Mutations, items, paths_of_tensors, storage_of, vars_of
from .vocabulary import LITERALS, tensors_in


class Nodes:
    """Nodes of a graph, by the values that they stand for.

    Parameters
    ----------
    model : nn.Module
        Its tensors are attributes in the graph.
    frames : Frames

    Attributes
    ----------
    graph : fx.Graph
    values : dict
        What is known of each node.
    extras : dict
        Attributes that are not the model's.
    written : dict
        The last node that writes to a storage.
    mutations : Mutations
    """

    def __init__(self, model: nn.Module, frames: Frames) -> None:
        self._frames = frames
        self._own, self._alive = paths_of_tensors(model)
        self.graph = fx.Graph()
        self.extras: dict[str, Any] = {}
        self.values: dict[fx.Node, Value] = {}
        self._of_tensors: Any = WeakTensorKeyDictionary()
        self.mutations = Mutations()
        self._writing: list[Tensor] = []  # what the call that is being recorded wrote to
        self.written: dict[object, fx.Node] = {}
        known = [s for t in self._alive if (s := storage_of(t)) is not None]
        self._storages: dict[int, StorageWeakRef] = {s.cdata: s for s in known}

    def give(self, number: int, leaf: object) -> None:
        """Make the node of a leaf of what the model is called with."""
        node = self.graph.placeholder(f"given_{number}")
        if isinstance(leaf, Tensor):
            self.note(node, leaf, INPUT)

    def made(self) -> set[object]:
        """Return the storages that `forward` has made."""
        return {
            v.storage.cdata
            for node, v in self.values.items()
            if v.is_new and v.storage is not None and node.op != "placeholder"
        }

    # ------------------------------------------------------------ of arguments

    def argument(self, value: object) -> Argument:
        """Return what a value is in the graph."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        # Exactly these types: subclasses hold more than their elements.
        match value:
            case list() if type(value) is list:
                return [self.argument(x) for x in value]
            case tuple() if type(value) in (tuple, torch.Size):
                return tuple(self.argument(x) for x in value)
            case dict() if type(value) is dict:
                return {key: self.argument(x) for key, x in value.items()}
            case slice():
                return slice(*(self.argument(x) for x in (value.start, value.stop, value.step)))
            case _ if type(value) in LITERALS:
                return cast(Argument, value)
            case _:
                return self._extra(value)

    def _of_tensor(self, tensor: Tensor) -> fx.Node:
        path = self._own.get(id(tensor))
        if path is not None:
            return self._attribute(path, tensor)
        node = self._of_tensors.get(tensor)
        if node is None:
            raise self._frames.refused("uses a tensor that no call of torch has made")
        if tensor._backward_hooks:
            raise self._frames.refused("sets hooks on gradients")
        return node  # type: ignore[no-any-return]

    def _attribute(self, path: str, tensor: Tensor) -> fx.Node:
        node = self.graph.get_attr(path)
        self.values[node] = Value(MODEL, tensor.requires_grad)
        return node

    def _extra(self, value: object) -> fx.Node:
        """Return a node for a value that code cannot spell."""
        if isinstance(value, (nn.Module, torch.Generator)) or tensors_in(vars_of(value)):
            raise self._frames.refused(
                f"gives a call of torch a value of type {type(value).__name__}"
            )
        name = next((name for name, extra in self.extras.items() if extra is value), None)
        if name is None:
            name = f"_extra_{len(self.extras)}"
            self.extras[name] = value
        node = self.graph.get_attr(name)
        self.values[node] = Value()
        return node

    # -------------------------------------------------------------- of results

    def note(
        self, node: fx.Node, result: object, source: int = FIXED, modes: Modes | None = None
    ) -> None:
        """Remember the node of a value; make nodes for its parts."""
        tensors = tensors_in(result)
        for tensor in self._writing:
            if (storage := storage_of(tensor)) is not None:
                self.written[storage.cdata] = node
        self._writing = []
        self.values[node] = known = Value(
            source,
            any(t.requires_grad for t in tensors),
            sum(
                {
                    s.cdata: t.untyped_storage().nbytes() for t in tensors if (s := storage_of(t))
                }.values()
            ),
            modes=modes,
        )
        if isinstance(result, Tensor):
            known.storage = storage = storage_of(result)
            if storage is not None and storage.cdata not in self._storages:
                known.is_new = True
                self._storages[storage.cdata] = storage  # or its address might be used again
            if id(result) not in self._own:
                self._of_tensors[result] = node
            return
        known.in_parts = bool(tensors)
        for key, part in items(result):
            if tensors_in(part):
                fetch = getattr if isinstance(key, str) and not isinstance(result, dict) else None
                item = self.graph.call_function(fetch or operator.getitem, (node, key))
                self.note(item, part, source, modes)

    def source(self, tensor: Tensor) -> int:
        """Return what the value of a tensor follows from."""
        if id(tensor) in self._own:
            return MODEL
        node = self._of_tensors.get(tensor)
        known = self.values.get(node) if node is not None else None
        if known is None:
            return MODEL
        return known.source | (self.mutations.source(storage_of(tensor)) or FIXED)

    # ------------------------------------------------------------ of the model

    def found_at(self, tensor: Tensor, path: str) -> bool:
        """Note the path by which `forward` reads a tensor; False if it is not the model's."""
        if id(tensor) not in self._own:
            return False
        self._own[id(tensor)] = path
        return True

    def wrote(self, tensors: Sequence[Tensor], source: int) -> None:
        """Note that the call that is being recorded wrote to tensors."""
        for tensor in tensors:
            self.mutations.note(tensor, source)
        self._writing = list(tensors)

    def writes_to(self, parameter: Tensor) -> UnrecordableError:
        """Return the error of a model that writes to a parameter."""
        path = self._own.get(id(parameter), "a parameter")
        return UnrecordableError(
            "", f"writes to parameter {path} in place (keep what forward changes in a buffer)"
        )
