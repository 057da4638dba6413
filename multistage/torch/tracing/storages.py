"""Where a model keeps tensors, which storages calls wrote to, and copies of its input."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .recorded import (
    FIXED,
)


@dataclass(slots=True)
class Mutations:
    """Storages that calls wrote to, with what their values follow from since."""

    sources: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def note(self, tensor: Tensor, source: int) -> None:
        """Note that a tensor's storage was written to with values of this source."""
        reference = storage_of(tensor)
        if reference is not None:
            known = self.sources.get(reference.cdata, (reference, FIXED))
            self.sources[reference.cdata] = known[0], known[1] | source

    def source(self, reference: StorageWeakRef | None) -> int | None:
        """Return the source of a storage that was written to, None for others."""
        known = self.sources.get(reference.cdata) if reference is not None else None
        return None if known is None else known[1]


def paths_of_tensors(model: nn.Module) -> tuple[dict[int, str], list[Tensor]]:
    """Return where the model keeps tensors, by their identity; and these tensors."""
    found: dict[int, str] = {}
    tensors = []
    for path, module in model.named_modules():
        for space in (vars(module), module._buffers, module._parameters):
            for name, value in space.items():
                if isinstance(value, Tensor):
                    found.setdefault(id(value), f"{path}.{name}" if path else name)
                    tensors.append(value)
    return found, tensors


def registered_in(module: nn.Module) -> tuple[Tensor | None, ...]:
    """Return the parameters and buffers of a module itself, but for scripted ones."""
    if isinstance(module, torch.jit.ScriptModule):  # makes new objects of them
        return ()
    return *module._parameters.values(), *module._buffers.values()


def vars_of(value: object) -> list[object]:
    """Return what an object holds."""
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def items(result: object) -> list[tuple[int | str, object]]:
    """Return what a result holds: key or name, and value."""
    if isinstance(result, dict):
        return list(result.items())
    if isinstance(result, (tuple, list)):
        return list(enumerate(result))
    return (
        [(name, value) for name, value in vars(result).items()]
        if hasattr(result, "__dict__")
        else []
    )


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage, None if it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # sparse, functorch's wrappers
        return None


def behind(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(current.all_input_nodes)
    return found


def copies_of(leaves: list[object]) -> list[object]:
    """Return copies of the input's tensors: what aliases stays so, what is no leaf is none."""
    made: dict[int, Tensor] = {}

    def copy(leaf: Tensor) -> Tensor:
        fresh = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return fresh if leaf.is_leaf else fresh.clone()

    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in made:
            made[id(leaf)] = copy(leaf)
    return [made[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
