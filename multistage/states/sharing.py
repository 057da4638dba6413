"""Memory that two objects share: found in trees of arrays, and in objects that are no trees.

An in-place chain overwrites the arrays of its live state.  A tape or an adjoint
that refers to one of them would change with it, so what is shared is copied.
An object that no tree is made of (an instance, a closure, a memoryview) cannot
be copied without knowing what it means: one that shares memory with the state
is refused, as is one that nothing can be seen of.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import gc
import operator
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from sys import getrefcount
from typing import Any, TypeVar, cast

import numpy as np
import optree

from ..errors import StateError
from .layout import Array, rebuilt
from .naming import is_foreign, named_by
from .strides import duplicate, owner

T = TypeVar("T")

# Values that refer to no memory that anybody writes to.
ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range}
)
_SEEN_MOST = 10_000  # objects looked at in one tape
_WORK = 100_000  # of the search whether two arrays with strides share an element
_WORD = object.__basicsize__ // 2
# How many tapes are held when one is weighed: each time twice as many, so that
# tapes which grow are noticed early and weighing takes next to no time.
WEIGHED = frozenset(1 << k for k in range(1, 40))
KEPT = (
    "{} kept a reference to the state it was given, in an attribute, a global, a container or an "
    "object, and that state is overwritten; keep copies, as in state.copy(), or know the arrays "
    "of state 0 before forward()"
)


class Memory:
    """The memory of some arrays.

    Parameters
    ----------
    arrays : sequence of arrays
        NumPy scalars among them are passed over.
    """

    def __init__(self, arrays: Sequence[object]) -> None:
        self._arrays = [array for array in arrays if isinstance(array, np.ndarray)]
        self._owners = {id(owner(array)) for array in self._arrays}
        self._borrowed = [array for array in self._arrays if not array.flags.owndata]

    def meets(self, array: Array) -> bool:
        """Whether an array may share memory with one of these."""
        own = array.flags.owndata and id(array) not in self._owners
        shares = (np.may_share_memory(array, a) for a in (self._borrowed if own else self._arrays))
        return any(shares) or (not array.size and id(owner(array)) in self._owners)

    def visibly_apart(self, tree: T) -> T:
        """Return a tree with the arrays copied that share this memory, in dataclasses too.

        Other objects are left: to look into them takes long.
        """
        kind = type(tree)
        if kind in ATOMS or not self._arrays:
            return tree
        if kind is np.ndarray:
            return cast(T, self._array(tree))
        leaves: Any = tree
        if kind is dict:
            leaves = cast(Any, tree).values()
        elif kind is not tuple and kind is not list:
            leaves = (None, tree)
        for leaf in leaves:
            if type(leaf) is np.ndarray:
                if self.meets(leaf):
                    break
            elif type(leaf) not in ATOMS:
                break
        else:
            return tree
        found = optree.tree_leaves(cast(Any, tree), none_is_leaf=True)
        apart = list(map(self._visible, found))
        if all(map(operator.is_, apart, found)):
            return tree
        spec = optree.tree_structure(cast(Any, tree), none_is_leaf=True)
        return rebuilt(tree, spec, apart)

    def apart(self, tree: T, said: str) -> T:
        """Return a tree with what shares this memory copied, or refused if it is no array.

        Raises
        ------
        StateError
            If an object in it that is no array shares this memory.
        """
        leaves, spec = optree.tree_flatten(cast(Any, tree), none_is_leaf=True)
        return rebuilt(tree, spec, [self.leaf(leaf, said, strict=False) for leaf in leaves])

    def _visible(self, leaf: object) -> object:
        if is_record(leaf):
            return self.leaf(leaf, "the adjoint", strict=False)
        return self._array(leaf)

    def _array(self, leaf: object) -> object:
        if isinstance(leaf, np.ndarray) and self.meets(leaf):
            return duplicate(leaf)
        return leaf

    def leaf(self, leaf: object, said: str, *, strict: bool = True) -> object:
        """Return a leaf of a tree, copied if it shares this memory.

        Parameters
        ----------
        said : str
            What the tree is, for the message.
        strict : bool
            Whether an object is refused that may share this memory unseen.

        Raises
        ------
        StateError
            If an object that is no array shares this memory.
        """
        if type(leaf) in ATOMS:
            return leaf
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            return self._array(leaf)
        if isinstance(leaf, np.generic):
            return leaf.copy()
        found = self._shared_by(leaf, strict)
        if not found:
            return leaf
        if is_record(leaf):
            made = self._fields(leaf, said, strict)
            if not strict or not (found := self._shared_by(made, strict)):
                return made
        raise StateError(
            f"{said} holds a {_name(type(leaf))} that {found}, and the state is overwritten; give "
            "arrays, or tuples, lists, dicts or dataclasses of arrays, or an object that refers "
            "to copies"
        )

    def _fields(self, leaf: Any, said: str, strict: bool) -> Any:
        """Return a copy of a dataclass instance, its attributes apart."""
        made = copy.copy(leaf)
        names = {field.name for field in dataclasses.fields(leaf)} | set(
            getattr(leaf, "__dict__", ())
        )
        for name in names:
            if hasattr(leaf, name):
                tree = getattr(leaf, name)
                leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
                inner = f"{said}, in {_name(type(leaf))}.{name},"
                value = rebuilt(
                    tree, spec, [self.leaf(each, inner, strict=strict) for each in leaves]
                )
                object.__setattr__(made, name, value)
        return made

    def _shared_by(self, leaf: object, strict: bool) -> str:
        """Return how an object shares this memory, "" if it does not."""
        try:
            for array in arrays_in(leaf, named=strict):
                if self.meets(array):
                    return "shares memory with the state"
        except Unseen as unseen:
            return f"may refer to the state unseen, through a {unseen}" if strict else ""
        return ""


def is_record(leaf: object) -> bool:
    """Whether a leaf is an instance of a dataclass."""
    return hasattr(type(leaf), "__dataclass_fields__")


class Unseen(Exception):
    """An object that nothing can be seen of; its type's name."""


def arrays_in(root: object, *, named: bool = False) -> Iterator[Array]:
    """Yield the arrays that an object refers to, through whatever Python can look into.

    Functions are looked into through their closures and defaults.  Raises `Unseen` at
    an object of an extension that may hold memory, and after very many objects.

    Parameters
    ----------
    named : bool
        Whether to look, in the end, at the globals that functions and methods name.
        There objects that nothing can be seen of are passed over.
    """
    seen: dict[int, Any] = {}
    left: list[Any] = [root]
    globals_: list[Any] = []  # what they name
    strict = True
    while left or globals_:
        if not left:
            left, globals_, strict = globals_, [], False
        value = left.pop()
        kind = type(value)
        if kind in ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        if len(seen) > _SEEN_MOST:
            if not strict:
                return
            raise Unseen(f"{_name(type(root))} of more than {_SEEN_MOST} objects")
        if isinstance(value, np.ndarray):
            yield value
            left.extend(value.flat if value.dtype.hasobject else ())
            left.extend(getattr(value, "__dict__", {}).values())
            continue
        if named:
            globals_ += named_by(value)
        if isinstance(value, (type, types.ModuleType, types.CodeType, np.dtype, np.generic)):
            continue
        if isinstance(value, types.FunctionType):
            if strict or not is_foreign(value.__globals__.get("__name__")):
                left += [value.__closure__, value.__defaults__]
                left += [value.__kwdefaults__, value.__dict__]
            continue
        if kind is weakref.ref or kind is contextvars.ContextVar:
            left.append(value() if kind is weakref.ref else value.get(None))
            continue
        lent = _lent(value)
        if lent is not None:
            yield lent
        elif _is_opaque(kind):
            if strict:
                raise Unseen(_name(kind))
            continue
        if isinstance(value, dict) and "__builtins__" in value and "__name__" in value:
            continue  # the globals of a module
        left.extend(gc.get_referents(value))


def _lent(value: Any) -> Array | None:
    """Return the memory that an object lends as an array, None if it lends none."""
    try:
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError, NotImplementedError):
        pass
    # A tensor with a graph holds more than its own memory.
    if hasattr(type(value), "__array__") and getattr(value, "grad_fn", None) is None:
        try:
            return np.asarray(value)
        except Exception:  # whatever a stranger's conversion raises
            return None
    return None


def _is_opaque(kind: type) -> bool:
    """Whether instances may hold what the garbage collector is not shown.

    Python's own types show all they hold.  Those of an extension need room of
    their own for anything else: instances are then larger than the attributes
    of their Python classes make them.
    """
    room = 0
    base: type | None = kind
    while base is not None and base.__module__.partition(".")[0] not in sys.stdlib_module_names:
        room += sum(type(each) is types.MemberDescriptorType for each in vars(base).values())
        base = base.__base__
    assert base is not None  # object is the last
    room += (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if kind.__module__.startswith("numpy.random"):
        return False
    return kind.__basicsize__ > base.__basicsize__ + room * _WORD


def _name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


class Frozen:
    """Arrays that are read-only while something holds them.

    NumPy makes no view of a read-only array writeable: one that is given back
    while the owner of its memory is held becomes so together with the owner.
    """

    def __init__(self) -> None:
        # id -> [array, holders, views of it that were given back before it ...]
        self.entries: dict[int, list[Any]] = {}
        # Of a sweep that is dropped, not ended: the caller gets the arrays back as they were.
        weakref.finalize(self, _thaw, self.entries).atexit = False

    def holds(self, array: Array) -> bool:
        """Whether an array, or the one that it is a view of, is among them."""
        return id(array) in self.entries or id(owner(array)) in self.entries

    def hold(self, array: Array) -> None:
        """Mark an array read-only.  One that was so before stays so forever."""
        entry = self.entries.get(id(array))
        if entry is not None:
            entry[1] += 1
        elif array.flags.writeable:
            array.flags.writeable = False
            self.entries[id(array)] = [array, 1]

    def free(self, array: object) -> None:
        """Give an array back; writeable again when nothing holds it any more."""
        entry = self.entries.get(id(array))
        if entry is not None:
            entry[1] -= 1
            if not entry[1]:
                del self.entries[id(array)]
                thaw(self.entries, entry)

    def free_all(self) -> None:
        """Give back all of them."""
        _thaw(self.entries)


def thaw(entries: dict[int, list[object]], entry: list[object]) -> None:
    """Make the array of an entry that was taken out writeable, and views of it that wait for it."""
    views: list[Any] = [entry[0], *entry[2:]]
    held = entries.get(id(owner(views[0])))
    if held is not None:
        held += views
        return
    for each in views:
        with contextlib.suppress(ValueError):  # another run holds the owner
            each.flags.writeable = True


def _thaw(entries: dict[int, list[object]]) -> None:
    while entries:
        _, entry = entries.popitem()
        thaw(entries, entry)


def parts_of(tree: object) -> list[object]:
    """Return the containers and the arrays of a tree.

    NumPy scalars and empty tuples, which nothing overwrites, are left out.
    """
    if type(tree) is np.ndarray:
        return [tree]
    parts: list[object] = []

    def enter(part: object) -> bool:
        if not isinstance(part, np.generic) and (type(part) is not tuple or part):
            parts.append(part)
        return False  # look into it

    optree.tree_leaves(cast(Any, tree), is_leaf=enter, none_is_leaf=True)
    return parts


def counts(parts: Sequence[object]) -> list[int]:
    """Return how many references there are to each part, a view of an array being one.

    NumPy makes a view of a view refer to the array behind that: both count.
    """
    return [
        getrefcount(part)
        if not isinstance(part, np.ndarray) or part.base is None
        else getrefcount(part) + getrefcount(owner(part))
        for part in parts
    ]


def is_known(tree: object, before: Sequence[object]) -> bool:
    """Whether more than a tree refers to a container that came into it.

    Parameters
    ----------
    before : sequence
        What `parts_of` returned for the tree then.
    """
    old = set(map(id, before))
    new = [part for part in parts_of(tree) if id(part) not in old]
    new = [part for part in new if not isinstance(part, np.ndarray | tuple)]
    # One from this list, one from where it is in the tree.
    return any(
        references(new, k) > 2 * sum(part is new[k] for part in new) for k in range(len(new))
    )


def stays(grew: Callable[[], bool]) -> bool:
    """Whether more refers to something than did before, also a moment later.

    What a call leaves in cycles refers to its arguments until garbage is collected.  A profiler
    in another thread, such as that of Dask's workers, holds the frames of calls while it
    looks at them, and with them their arguments, though the calls have returned.
    """
    if not grew() or any(gc.collect(age) >= 0 and not grew() for age in range(3)):
        return False
    for wait_s in _WAITS_S:
        time.sleep(wait_s)
        if not grew():
            return False
    return True


def references(values: Sequence[object], k: int) -> int:
    """Return how many references there are to a value, but for those of this call."""
    return sys.getrefcount(values[k]) - _CALLS


def _calibrated() -> int:
    values = [np.empty(0)]
    return sys.getrefcount(values[0]) - 1


_CALLS = _calibrated()
_WAITS_S = (1e-3, 1e-2, 0.1)  # before an error, for what looks at frames to let them go


def lone_owners(views: Sequence[Array]) -> set[int]:
    """Return the ids of the arrays, owning their memory, that only these views refer to."""
    count: dict[int, int] = {}
    owners: list[Any] = []
    for view in views:
        if id(view.base) not in count:
            owners.append(view.base)
        count[id(view.base)] = count.get(id(view.base), 0) + 1
    return {
        id(owners[k])
        for k in range(len(owners))
        if isinstance(owners[k], np.ndarray)
        and owners[k].flags.owndata
        and references(owners, k) == 1 + count[id(owners[k])]  # the list, and the views
    }


def overlap(arrays: Sequence[Array]) -> bool:
    """Whether any two of these arrays share memory."""
    for k, array in enumerate(arrays):
        for other in arrays[k + 1 :]:
            if not np.may_share_memory(array, other):  # their bounds: quick
                continue
            try:
                if np.shares_memory(array, other, max_work=_WORK):  # type: ignore[arg-type]
                    return True
            except np.exceptions.TooHardError:
                return True
    return False


def own_bytes(tape: object, beside: object) -> int:
    """Return the bytes that a tape holds and the one `beside` it does not.

    What two tapes share, such as a table both refer to, is held anyway.  A
    view counts as the whole array behind it, which it keeps alive.  Of an
    object that cannot be looked into nothing counts.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.zeros(100)
    >>> own_bytes((table, np.zeros(3)), (table, np.zeros(2)))
    24
    """
    others = _held(beside)
    return sum(nbytes for address, nbytes in _held(tape).items() if address not in others)


def _held(tape: object) -> dict[int, int]:
    """Return the bytes of all arrays behind a tape, by where they lie."""
    found: dict[int, int] = {}
    try:
        for array in arrays_in(tape):
            whole = owner(array)
            address = whole.__array_interface__["data"][0]
            found[address] = max(whole.nbytes, found.get(address, 0))
    except Unseen:
        pass  # what was seen before counts
    return found


def apart_from(adjoint: T, given: object) -> T:
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
