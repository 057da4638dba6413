"""Adjoints apart from what they were computed from, whose arrays are used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import optree

from .sharing import Memory, is_record

Adjoint = TypeVar("Adjoint")


def apart_from(adjoint: Adjoint, given: object) -> Adjoint:
    """Return what an adjoint step returned, copied where it shares memory with what it was given.

    That is a state or a tape which is done with: operators may make the next one
    in the same arrays.
    """
    if type(given) is type(adjoint) is np.ndarray:
        if adjoint is not given and adjoint.flags.owndata and given.flags.owndata:
            return adjoint  # the commonest case
        return Memory([given]).visibly_apart(adjoint)
    mine, theirs = _owned(adjoint), _owned(given)
    if mine is not None and theirs is not None and not _meet(mine, theirs):
        return adjoint
    tree: Any = given
    return Memory(optree.tree_leaves(tree, none_is_leaf=True)).visibly_apart(adjoint)


def _meet(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether one of some objects is one of the others; of few, in less time than sets take."""
    for one in some:
        for other in others:
            if one is other:
                return True
    return False


def _owned(tree: Any) -> Sequence[Any] | None:
    """Return the leaves of a tree, None if one borrows its memory or refers to arrays."""
    kind = type(tree)
    leaves: Sequence[Any]
    if kind is tuple or kind is list:
        leaves = tree
    elif kind is np.ndarray:
        leaves = (tree,)
    elif kind is dict:
        leaves = tuple(tree.values())
    else:
        leaves = optree.tree_leaves(tree, none_is_leaf=True)
    for leaf in leaves:
        if type(leaf) is not np.ndarray:
            leaves = optree.tree_leaves(tree, none_is_leaf=True)
            break
        if not leaf.flags.owndata:
            return None
    else:
        return leaves
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            if not leaf.flags.owndata:
                return None
        elif is_record(leaf):
            return None
    return leaves
