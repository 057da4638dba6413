"""The records of a durable folder: a state or an adjoint as bytes, and the files they lie in."""

from __future__ import annotations

import contextlib
import errno
import json
import struct
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import optree
import xxhash

from ..errors import StateError
from ..states.layout import SCALAR, Array, Keys, Layout, Packing, Reordered, dicts_in, put_in_order
from ..states.strides import Geometry, is_sound
from .folder import Folder
from .headers import TABLE_LIMIT, UNEQUAL, BadFile, Header, Kind, encode

_CHUNK = 4 << 20
_ROWS = 1 << 14  # of an array with padding, digested at a time
# x86's extended precision: ten bytes of a value, in twelve or sixteen.
_EXTENDED_BYTES = 10
_ENTRY = struct.Struct("<qQ")
_OWN_ENTRY = struct.Struct("<qQQQ")  # of unequal records: their bytes and the place of their form
_GIVEN_BYTES = 16
_MOST_STEPS = 1 << 48


@dataclass(slots=True, eq=False)
class Records:
    """The records of one file: some states, the last state, or an adjoint.

    Attributes
    ----------
    name : str
        Of the file.
    record_bytes : int
        Of each record; 0 where steps differ.
    steps, checksums : array
        Of each record, in the order of the file.
    given : bytes
        Of an adjoint: digest of the one that the sweep began with.
    forms, ends : list of str, and array
        Where steps differ, of each record: its layout as text, and where in the payload it ends.
    offset : int
        Where the payload begins.
    """

    name: str
    record_bytes: int
    steps: array[int] = field(default_factory=lambda: array("q"))
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    given: bytes = b""
    forms: list[str] = field(default_factory=list)
    ends: array[int] = field(default_factory=lambda: array("Q"))
    offset: int = 0

    @classmethod
    def of(
        cls, name: str, header: Header, record_bytes: int | None = None, *, unequal: bool = False
    ) -> Records:
        """Return what a header says of the records below it.

        Parameters
        ----------
        record_bytes : int or None
            That each must have; None if that is unknown.
        unequal : bool
            Whether the run's steps differ; each record then says itself what it has.

        Raises
        ------
        BadFile
            If the payload is no such records.
        """
        if header.kind not in (Kind.STATES, Kind.ADJOINT):
            raise BadFile("it holds no records")
        if unequal != (header.version == UNEQUAL):
            raise BadFile("it is of a run of another kind of steps")
        given_bytes = _GIVEN_BYTES if header.kind is Kind.ADJOINT else 0
        read = cls._unequal if unequal else cls._equal
        found = read(name, header, given_bytes, record_bytes)
        if min(found.steps) < 0 or max(found.steps) >= _MOST_STEPS:
            raise BadFile("its steps are out of range")
        found.offset = header.offset
        return found

    @classmethod
    def _equal(
        cls, name: str, header: Header, given_bytes: int, record_bytes: int | None
    ) -> Records:
        cut = len(header.table) - given_bytes
        count, rest = divmod(cut, _ENTRY.size)
        if rest or count < 1 or not header.payload_bytes:
            raise BadFile("it holds no records")
        if record_bytes is None:
            record_bytes = header.payload_bytes // count
        if header.payload_bytes != count * record_bytes:
            raise BadFile(f"its {count} records are not of {record_bytes} bytes")
        found = cls(name, record_bytes, given=header.table[cut:])
        for step, checksum in _ENTRY.iter_unpack(header.table[:cut]):
            found.steps.append(step)
            found.checksums.append(checksum)
        return found

    @classmethod
    def _unequal(cls, name: str, header: Header, given_bytes: int, _: int | None) -> Records:
        table, found = header.table, cls(name, 0)
        count = int.from_bytes(table[:8], "little")
        cut = 8 + count * _OWN_ENTRY.size
        if not 1 <= count <= len(table) // _OWN_ENTRY.size or cut + given_bytes > len(table):
            raise BadFile("it holds no records")
        found.given = table[cut : cut + given_bytes]
        end = 0
        try:
            forms = json.loads(table[cut + given_bytes :])
            for step, checksum, nbytes, form in _OWN_ENTRY.iter_unpack(table[8:cut]):
                end += nbytes
                if type(forms[form]) is not str or end > header.payload_bytes:
                    raise ValueError("a record is none")
                found.steps.append(step)
                found.checksums.append(checksum)
                found.ends.append(end)
                found.forms.append(forms[form])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise BadFile(f"the layouts of its records cannot be read: {error}") from None
        if end != header.payload_bytes:
            raise BadFile(f"its records have {end} bytes, not {header.payload_bytes}")
        return found

    @classmethod
    def found(
        cls,
        folder: Folder,
        name: str,
        run: bytes,
        record_bytes: int | None,
        *,
        unequal: bool = False,
    ) -> Records:
        """Return what a run left in a file; its records are not read.  Raises OSError, BadFile."""
        header = folder.header(name)
        if header.run != run:
            raise BadFile("it belongs to another run")
        if (header.kind is Kind.ADJOINT) != name.startswith("adjoint"):
            raise BadFile("its name is that of another kind")
        return cls.of(name, header, record_bytes, unequal=unequal)

    def add(self, step: int, nbytes: int, form: str = "") -> None:
        """Note one more record, of a run whose steps differ by its form."""
        if not self.record_bytes:
            self.ends.append(self.nbytes + nbytes)
            self.forms.append(form)
        self.steps.append(step)

    @property
    def least(self) -> int:
        """The least of the steps."""
        return min(self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        if self.record_bytes:
            return len(self.steps) * self.record_bytes
        return self.ends[-1] if self.ends else 0

    def span(self, place: int) -> tuple[int, int]:
        """Return where in the payload a record begins and ends."""
        if self.record_bytes:
            return place * self.record_bytes, (place + 1) * self.record_bytes
        return self.ends[place - 1] if place else 0, self.ends[place]

    def header(self, run: bytes) -> bytes:
        """Return what begins the file."""
        kind = Kind.ADJOINT if self.given else Kind.STATES
        if self.record_bytes:
            entries = map(_ENTRY.pack, self.steps, self.checksums)
            return encode(kind, run, b"".join(entries) + self.given, self.nbytes)
        forms = {form: k for k, form in enumerate(dict.fromkeys(self.forms))}
        sizes = (end - begin for begin, end in map(self.span, range(len(self.steps))))
        own = map(_OWN_ENTRY.pack, self.steps, self.checksums, sizes, map(forms.get, self.forms))
        count = len(self.steps).to_bytes(8, "little")
        table = b"".join((count, *own, self.given, json.dumps(list(forms)).encode()))
        return encode(kind, run, table, self.nbytes, UNEQUAL)

    def write(self, folder: Folder, content: Sequence[Array], *, settled: bool = True) -> None:
        """Write the file; see `Folder.publish`.

        Parameters
        ----------
        content : sequence of arrays of bytes
            One record in pieces, or all of them in one piece.
        """
        records = [content]
        if len(self.steps) > 1:
            spans = map(self.span, range(len(self.steps)))
            records = [[content[0][begin:end]] for begin, end in spans]
        self.checksums = array("Q", map(checksum_of, records))
        header = self.header(folder.run)
        self.offset = len(header)
        folder.publish(self.name, [header, *content], settled=settled)

    def read(self, folder: Folder, place: int, record: Array) -> None:
        """Fill `record` with one of the records.  Raises OSError, BadFile."""
        self._read(folder, self.span(place)[0], record)
        if checksum_of([record]) != self.checksums[place]:
            raise OSError(errno.EIO, "the checksum does not match: the bytes were changed")

    def is_intact(self, folder: Folder) -> bool:
        """Whether the first record passes its checksum; read piece by piece."""
        nbytes = self.span(0)[1]
        seen, piece = xxhash.xxh3_64(), np.empty(min(_CHUNK, nbytes), np.uint8)
        try:
            for at in range(0, nbytes, _CHUNK):
                part = piece[: nbytes - at]
                self._read(folder, at, part)
                seen.update(part.data)
        except (OSError, BadFile):
            return False
        return int(seen.intdigest()) == self.checksums[0]

    def _read(self, folder: Folder, at: int, content: Array) -> None:
        folder.read(self.name, self.offset + self.nbytes, self.offset + at, content)

    def layout(self, place: int, first: OrderedLayout) -> OrderedLayout:
        """Return the layout of a record, of a run whose first state has `first`.  Raises BadFile.

        Where steps differ, of an adjoint: whose first adjoint has it.
        """
        begin, end = self.span(place)
        found = _formed(self.forms[place], first, end - begin) if self.forms else first
        if found.record_bytes != end - begin:
            raise BadFile("it is not of this layout")
        return found


class OrderedLayout(Layout):
    """A layout whose packed form carries the strides of arrays as one more array.

    Stores know arrays in C order only; how to restore an array's own strides is
    kept by the executor, which a killed process takes along.  Here it is part
    of the record, under the same checksum: for each leaf how many bytes it is
    off its alignment (-1 for a NumPy scalar), then its strides in bytes, all
    as 64-bit integers.

    Examples
    --------
    >>> layout = OrderedLayout.of(np.zeros((2, 3), order="F"))
    >>> packed, _ = layout.pack([np.zeros((2, 3), order="F")])
    >>> packed[-1].view("<i8").tolist(), layout.record_bytes
    ([0, 8, 16], 88)
    """

    _form = ""

    @classmethod
    def like(cls, layout: Layout) -> OrderedLayout:
        """Return the same layout, ordered."""
        return cls(layout.spec, layout.leaves, layout.nbytes, layout.keys)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: arrays, then their strides and the order of keys."""
        numbers = sum(1 + len(leaf.shape) for leaf in self.leaves) + sum(map(len, self.keys))
        return self.nbytes + 8 * numbers

    def form(self, first: OrderedLayout) -> str:
        """Return this as JSON: shapes, dtypes, and the tree unless it is that of `first`.

        Raises
        ------
        StateError
            If that does not say all of it.
        """
        if not self._form:
            tree = None
            if self.spec != first.spec:
                tree = _told(self.spec.unflatten(range(len(self.leaves))))
            made, same, told = "", False, np.lib.format.dtype_to_descr
            with contextlib.suppress(BadFile, ValueError):  # fields in another order than in memory
                made = json.dumps([tree, [(leaf.shape, told(leaf.dtype)) for leaf in self.leaves]])
                same = _formed(made, first, self.record_bytes).same_as(self)
            if not same or len(made) > TABLE_LIMIT // 2:
                raise StateError(_NO_TEXT.format(self.spec))
            self._form = made
        return self._form

    def pack(self, arrays: Sequence[Array]) -> tuple[list[Array], Packing | None]:
        """Return the leaves, and beside them their strides as bytes."""
        flat, packing = super().pack(arrays)
        return [*flat, self.order(packing)], None

    def order(self, packing: Packing | None) -> Array:
        """Return the strides as bytes."""
        numbers: list[int] = []
        for k, where in enumerate(packing or [None] * len(self.leaves)):
            strides, shift = (
                (self._plain[k], 0 if where is None else -1)
                if where is None or where == SCALAR
                else where
            )
            numbers += [shift, *strides]
        numbers += self._places(packing.keys if type(packing) is Reordered else self.keys)
        return np.array(numbers, "<i8").view(np.uint8)

    def unpack(self, arrays: Sequence[Array], packing: Packing | None) -> list[Array]:
        """Return the leaves with the strides that are stored beside them."""
        packing = self.packing(arrays[-1])
        assert packing is not None  # judged when the record was read
        return super().unpack(arrays[:-1], packing)

    def packing(self, order: Array) -> Packing | None:
        """Return what `unpack` needs, or None if the bytes hold no such thing."""
        numbers = order.view("<i8").tolist()
        packing: list[Geometry | Literal["scalar"] | None] = []
        at = 0
        for leaf, plain in zip(self.leaves, self._plain, strict=True):
            end = at + 1 + len(leaf.shape)
            where = Geometry(tuple(numbers[at + 1 : end]), numbers[at])
            at = end
            if where == (plain, 0):
                packing.append(None)
            elif where.shift == -1 and not leaf.shape:
                packing.append(SCALAR)
            elif is_sound(where, leaf.shape, leaf.dtype):
                packing.append(where)
            else:
                return None
        return self._reordered(packing, numbers[at:])

    def _places(self, keys: Keys) -> list[int]:
        """Return the places of keys among those of their dict, as these are sorted."""
        places: list[int] = []
        for each, order in zip(dicts_in(self.example()), keys, strict=True):
            places += map(_sorted_keys(each).index, order)
            put_in_order(each, order)
        return places

    def _reordered(self, packing: Packing, places: list[int]) -> Packing | None:
        """Return a packing with the keys in an order, or None if that is none."""
        tree, keys, left = self.example(), list[tuple[Hashable, ...]](), iter(places)
        for each in dicts_in(tree):
            known = _sorted_keys(each)
            order = [next(left, -1) for _ in known]
            if sorted(order) != list(range(len(known))):
                return None
            keys.append(tuple(known[place] for place in order))
            put_in_order(each, keys[-1])
        if tuple(keys) == self.keys:
            return packing
        return Reordered(packing, tuple(keys))

    def split(self, record: Array) -> list[Array] | None:
        """Return the packed arrays of a record as views; None if it is none."""
        order = record[self.nbytes :]
        if len(record) != self.record_bytes or self.packing(order) is None:
            return None
        return [*self.views(record), order]

    def parts(self, packed: Sequence[Array]) -> list[Array]:
        """Return the bytes of a record, piece by piece, without copying them together."""
        pieces: list[Array] = []
        at = 0
        for leaf, array_ in zip(self.leaves, packed[:-1], strict=True):
            if leaf.offset > at:
                pieces.append(np.zeros(leaf.offset - at, np.uint8))
            pieces.append(array_.reshape(-1).view(np.uint8))
            at = leaf.offset + leaf.nbytes
        if self.nbytes > at:
            pieces.append(np.zeros(self.nbytes - at, np.uint8))
        return [*pieces, packed[-1]]

    def fill(self, record: Array, packed: Sequence[Array]) -> None:
        """Copy packed arrays into a record."""
        for view, array_ in zip(self.views(record), packed[:-1], strict=True):
            view[...] = array_
        record[self.nbytes :] = packed[-1]

    def describe(self) -> tuple[str, tuple[tuple[str, str, str], ...]]:
        """Return tree and leaves as text."""
        leaves = tuple((leaf.path, str(leaf.shape), str(leaf.dtype)) for leaf in self.leaves)
        return str(self.spec), leaves

    def digest(self, packed: Sequence[Array]) -> bytes:
        """Return what identifies this value, its layout and its strides.

        Values count bit by bit, so that signs of zeros and payloads of NaNs
        do; bytes that no value uses do not.
        """
        seen = xxhash.xxh3_128(repr(self.describe()).encode())
        for array_ in packed[:-1]:
            for piece in value_bytes(array_):
                seen.update(piece.data)
        seen.update(repr(self._strides(packed[-1])).encode())
        if self.keys:
            seen.update(packed[-1][-8 * sum(map(len, self.keys)) :].data)
        return seen.digest()

    def _strides(self, order: Array) -> list[list[int]]:
        """Return the strides of each array, without those of axes of one element.

        The stride of such an axis is arbitrary.
        """
        packing = self.packing(order)
        assert packing is not None
        return [
            [
                step
                for n, step in zip(
                    leaf.shape, where.strides if isinstance(where, Geometry) else plain, strict=True
                )
                if n != 1
            ]
            for leaf, plain, where in zip(self.leaves, self._plain, packing, strict=True)
        ]


@lru_cache(maxsize=256)
def _formed(form: str, first: OrderedLayout, record_bytes: int) -> OrderedLayout:
    """Return the layout that `form` gave; no element of it takes much more than a record.

    Raises BadFile if the text is none.
    """
    try:
        tree, kinds = json.loads(form)
        dtypes = [np.lib.format.descr_to_dtype(_tupled(descr)) for _, descr in kinds]
        # An array of no elements may be of large ones.
        if max((dtype.itemsize for dtype in dtypes), default=0) > max(record_bytes, _CHUNK):
            raise ValueError("an element is larger than its record")
        leaves = [
            np.broadcast_to(np.zeros((), dtype), shape)
            for dtype, (shape, _) in zip(dtypes, kinds, strict=True)
        ]
        state = first.spec.unflatten(leaves) if tree is None else _grown(tree, leaves)
        return OrderedLayout.of(state)
    except (ValueError, TypeError, LookupError, RecursionError, SyntaxError, StateError) as error:
        raise BadFile(f"the layout of a record cannot be read: {error}") from None


_NO_TEXT = (
    "a durable run whose steps differ writes down the tree of each state: {} is not made of "
    "dicts with keys of str and int, lists and tuples alone; use these, or the tree of the first, "
    "and dtypes that numpy.save keeps"
)


def _told(tree: object) -> object:
    """Return a tree of ints for JSON.  Raises StateError."""
    kind, node = type(tree), cast(Any, tree)
    if kind is int:
        return tree
    if kind is dict and all(type(key) in (str, int) for key in node):
        return ["dict", [[key, _told(each)] for key, each in node.items()]]
    if kind in (list, tuple):
        return [kind.__name__, [_told(each) for each in node]]
    raise StateError(_NO_TEXT.format(kind.__name__))


def _grown(told: Any, leaves: Sequence[Array]) -> object:
    """Return the tree that `_told` told of, with these leaves."""
    if type(told) is int:
        return leaves[told]
    kind, parts = told
    if kind == "dict":
        return {key: _grown(each, leaves) for key, each in parts}
    return {"list": list, "tuple": tuple}[kind](_grown(each, leaves) for each in parts)


def _tupled(descr: Any) -> Any:
    """Return the description of a dtype with tuples where JSON has lists."""
    if not isinstance(descr, list):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _tupled(each), *map(tuple, shape))
        for name, each, *shape in descr
    ]


def _sorted_keys(tree: dict[Hashable, object]) -> list[Hashable]:
    return list(optree.tree_flatten_one_level(cast(Any, tree), none_is_leaf=True)[2])


def value_bytes(array: Array) -> Iterator[Array]:
    """Yield the bytes of an array's values, in C order, padding left out."""
    used = used_bytes(array.dtype)
    flat = array.reshape(-1)
    if used.all():
        yield flat.view(np.uint8)
        return
    rows = flat.view(np.uint8).reshape(-1, array.dtype.itemsize)
    for at in range(0, len(rows), _ROWS):
        yield np.ascontiguousarray(rows[at : at + _ROWS, used])


def used_bytes(dtype: np.dtype[np.generic]) -> Array:
    """Return which bytes of an item hold its value; the others are padding, of any content.

    Examples
    --------
    >>> used_bytes(np.dtype([("a", "i1"), ("b", "i2")], align=True)).tolist()
    [True, False, True, True]
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.tile(used_bytes(base), int(np.prod(shape)))
    used = np.zeros(dtype.itemsize, bool)
    if dtype.fields is not None:
        for field, offset, *_ in dtype.fields.values():
            used[offset : offset + field.itemsize] |= used_bytes(field)
    elif dtype.type in (np.longdouble, np.clongdouble) and np.finfo(np.longdouble).nmant == 63:
        parts = used.reshape(1 if dtype.type is np.longdouble else 2, -1)
        if dtype.isnative:
            parts[:, :_EXTENDED_BYTES] = True
        else:
            parts[:, -_EXTENDED_BYTES:] = True
    else:
        used[:] = True
    return used


def checksum_of(pieces: Sequence[Array]) -> int:
    """Return the xxh3 of the bytes of some pieces, one after the other."""
    seen = xxhash.xxh3_64()
    for piece in pieces:
        seen.update(piece.data)
    return int(seen.intdigest())
