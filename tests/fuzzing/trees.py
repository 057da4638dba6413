"""States as nested containers of arrays: made, read and changed without the package's help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Place = tuple[Any, Any]  # a container and the key of an array in it


def built(tree: str, leaves: list[Any]) -> Any:
    """Return a tree of a named kind that holds these leaves, in their order."""
    match tree:
        case "array":
            return leaves[0]
        case "tuple":
            return tuple(leaves)
        case "list":
            return list(leaves)
        case "dict":
            return {f"k{k}": leaf for k, leaf in enumerate(leaves)}
        case "nested":
            return {"a": leaves[0], "b": tuple(leaves[1:])}
        case _:
            return ({"x": [leaves[0]]}, {"y": {"z": list(leaves[1:])}})


def places(tree: Any, above: Any = None, key: Any = None) -> Iterator[Place]:
    """Yield where the leaves are, in the order of `built`; keys of dicts are sorted."""
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from places(tree[name], tree, name)
    elif isinstance(tree, list | tuple):
        for k, part in enumerate(tree):
            yield from places(part, tree, k)
    else:
        yield above, key


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in that order."""
    if isinstance(tree, dict | list | tuple):
        return [container[key] for container, key in places(tree)]
    return [tree]


def key_orders(tree: Any) -> list[Any]:
    """Return the keys of all dicts of a tree, in the order they have."""
    if isinstance(tree, dict):
        return [[*tree], *(key_orders(tree[name]) for name in sorted(tree))]
    return [key_orders(part) for part in tree] if isinstance(tree, list | tuple) else []


def turn_keys(tree: Any, i: int) -> None:
    """Give the dicts of a tree that have several keys another order of them."""
    if isinstance(tree, dict):
        for name in list(tree)[: i % max(1, len(tree))]:
            tree[name] = tree.pop(name)
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, dict | list | tuple):
            turn_keys(part, i)


def put(place: Place, value: Any) -> bool:
    """Put a leaf into its container; False if that cannot be changed."""
    container, key = place
    if not isinstance(container, list | dict):
        return False
    container[key] = value
    return True


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a new tree of the results of a function."""
    if isinstance(tree, dict):
        return {name: mapped(function, part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(function, part) for part in tree)
    return function(tree)


def deep(tree: Any) -> Any:
    """Return a deep copy: no memory is shared with the tree, nor within the copy."""
    return mapped(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tree)
