"""Files are believed only as far as they can be verified, whoever wrote them."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import struct
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import multistage
from multistage.durable.folder import Folder
from multistage.durable.headers import (
    PRELUDE,
    TABLE_LIMIT,
    UNEQUAL,
    VERSION,
    BadFile,
    Kind,
    RunFacts,
    encode,
    parse_run,
    read_header,
    run_table,
)
from multistage.durable.journal import Journal
from multistage.durable.records import OrderedLayout, Records, _formed, checksum_of, used_bytes
from multistage.durable.status import inspect
from multistage.durable.store import DurableStore
from multistage.errors import StateError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.states.layout import Array

LAYOUT = OrderedLayout.of({"a": np.zeros((2, 3)), "b": np.zeros(5, np.int8)})
SIZE = LAYOUT.record_bytes
RUN = b"r" * 16
COSTS = Costs(1e-3, 2e-3, state_bytes=LAYOUT.nbytes, tiers=(Tier("durable", 1e-3, 1e-3),))
FACTS = RunFacts(10, *LAYOUT.describe(), SIZE, "00", "label", "0.1.0")


def record(key: int) -> Array:
    """Return a record as a run writes it."""
    made = np.full(SIZE, key, np.uint8)
    made[LAYOUT.nbytes :] = LAYOUT.order(None)
    return made


def records(steps: tuple[int, ...], key: int | None = None, given: bytes = b"") -> bytes:
    """Return a file of the records of some steps, or of one of `key` for each."""
    made = [record(step % 256 if key is None else key) for step in steps]
    sums = array("Q", [checksum_of([each]) for each in made])
    file = Records("", SIZE, array("q", steps), sums, given)
    return file.header(RUN) + b"".join(map(bytes, made))


def states(steps: tuple[int, ...] = (3, 4)) -> bytes:
    return records(steps)


def adjoint(step: int = 4) -> bytes:
    return records((step,), 7, b"g" * 16)


def run() -> bytes:
    return encode(Kind.RUN, RUN, run_table(FACTS, COSTS), 0)


def unlike_run() -> bytes:
    return encode(Kind.RUN, RUN, run_table(FACTS, None), 0, UNEQUAL)


OTHER = OrderedLayout.of([{"a": np.zeros((1, 7), "f2")}, (np.zeros(3),)])


def unlike(name: str = "", steps: tuple[int, ...] = (3, 4, 5)) -> bytes:
    """Return a file of records of several layouts, as a run of unequal steps writes it."""
    file, data = Records(name, 0, given=b"g" * 16 if "adjoint" in name else b""), b""
    for step in steps:
        layout = (LAYOUT, OTHER)[step % 2]
        made = np.full(layout.record_bytes, step, np.uint8)
        made[layout.nbytes :] = layout.order(None)
        file.add(step, layout.record_bytes, layout.form(LAYOUT))
        file.checksums.append(checksum_of([made]))
        data += bytes(made)
    return file.header(RUN) + data


def read(data: bytes) -> Any:
    """Parse a file by its kind, as it would be read; return what it says."""
    header = read_header(lambda count, at: data[at : at + count], len(data))
    match header.kind:
        case Kind.RUN:
            return parse_run(header)
        case Kind.STATES | Kind.ADJOINT:
            found = Records.of("", header, SIZE, unequal=header.version == UNEQUAL)
            return list(found.steps), list(found.checksums), found.given
        case Kind.LOCK:
            return (header.table,)


def test_written_records_are_read_back() -> None:
    assert read(run()) == (FACTS, COSTS)
    assert read(states()) == ([3, 4], [checksum_of([record(k)]) for k in (3, 4)], b"")
    assert read(adjoint()) == ([4], [checksum_of([record(7)])], b"g" * 16)


def test_files_of_equal_steps_keep_their_format() -> None:
    """Folders that earlier versions have left are resumed."""
    made = [bytes(record(step)) for step in (3, 4)]
    table = b"".join(
        struct.pack("<qQ", step, xxhash.xxh3_64_intdigest(each))
        for step, each in zip((3, 4), made, strict=True)
    )
    head = struct.pack("<8sII16sQQQ", b"MSDURABL", 3, 2, RUN, len(table), 2 * SIZE, 0)
    summed = xxhash.xxh3_64_intdigest(head + table).to_bytes(8, "little")
    assert states() == head + summed + table + b"".join(made)


def test_records_of_unequal_steps_say_what_they_are() -> None:
    data = unlike()
    header = read_header(lambda count, at: data[at : at + count], len(data))
    found = Records.of("", header, unequal=True)
    layouts = [found.layout(place, LAYOUT) for place in range(3)]
    for layout, known in zip(layouts, (OTHER, LAYOUT, OTHER), strict=True):
        assert layout.same_as(known)
    assert layouts[0] is layouts[2]
    with pytest.raises(BadFile, match="another kind of steps"):
        Records.of("", header, SIZE)
    with pytest.raises(BadFile, match="cannot be read"):
        Records("", 0, forms=["[0, 1]"], ends=array("Q", [80])).layout(0, LAYOUT)


@pytest.mark.parametrize("make", [run, states, adjoint, unlike])
def test_every_bit_of_a_header_counts(make: Callable[[], bytes]) -> None:
    data = make()
    table_bytes = int.from_bytes(data[32:40], "little")
    for at in range(PRELUDE.size + table_bytes):
        for bit in (0, 7):
            harmed = bytearray(data)
            harmed[at] ^= 1 << bit
            with pytest.raises(BadFile):
                read(bytes(harmed))
    for length in range(len(data)):
        with pytest.raises(BadFile):
            read(data[:length])


def forged(
    kind: int, table: bytes, payload: bytes, sizes: tuple[int, int] | None, version: int
) -> bytes:
    """Return a file with good checksums and whatever else one likes."""
    data = encode(kind, RUN, table, len(payload), version) + payload  # type: ignore[arg-type]
    if sizes is None:
        return data
    head = data[:32] + b"".join(n.to_bytes(8, "little") for n in sizes) + data[48:56]
    return head + xxhash.xxh3_64_intdigest(head + table).to_bytes(8, "little") + data[64:]


SIZES = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, SIZE, TABLE_LIMIT, 2**31, 2**63])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
NAMES = [*RunFacts.__slots__, "costs"]
COSTLY = st.builds(
    lambda **fields: json.dumps({**json.loads(COSTS.to_json()), **fields}),
    forward_step_s=JSON,
    tiers=JSON | st.lists(st.fixed_dictionaries({"name": JSON})),
)
DESCRIPTIONS = st.builds(
    lambda fields: {**json.loads(run_table(FACTS, COSTS)), **fields},
    st.dictionaries(st.sampled_from(NAMES), JSON | COSTLY, max_size=3),
)
TABLES = (
    st.binary(max_size=80)
    | JSON.map(lambda made: json.dumps(made).encode())
    | DESCRIPTIONS.map(lambda made: json.dumps(made).encode())
    | st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1))).map(
        lambda made: b"".join(
            a.to_bytes(8, "little", signed=True) + b.to_bytes(8, "little") for a, b in made
        )
    )
)
FORMS = st.sampled_from([LAYOUT.form(LAYOUT), OTHER.form(LAYOUT)]) | JSON.map(json.dumps)
STEPS = st.sampled_from([0, 3, 9, 2**62])
OWN = st.tuples(
    STEPS, st.just(0), st.sampled_from([0, SIZE, OTHER.record_bytes]), st.integers(0, 2)
)
TABLES |= st.builds(
    lambda entries, forms: (
        len(entries).to_bytes(8, "little")
        + b"".join(struct.pack("<qQQQ", *each) for each in entries)
        + json.dumps(forms).encode()
    ),
    st.lists(OWN, min_size=1),
    st.lists(FORMS) | JSON,
)
FORGED = st.builds(
    forged,
    st.integers(0, 5),
    TABLES,
    st.binary(max_size=3 * SIZE),
    st.none() | st.tuples(SIZES, SIZES),
    st.sampled_from([VERSION, UNEQUAL]),
)


@given(FORGED | st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_whatever_a_file_holds_it_is_read_or_refused(data: bytes) -> None:
    try:
        found = read(data)
    except BadFile:
        return
    if isinstance(found[0], RunFacts):
        facts, costs = found
        assert facts.n_steps is None or type(facts.n_steps) is int
        assert isinstance(facts.label, str)
        is_same = replace(facts, package=FACTS.package) == FACTS
        assert facts.difference(FACTS) is None if is_same else facts.difference(FACTS)
        assert costs is None or len(costs.tiers) == 1


NAMED = st.sampled_from(["run", "last", "states-0", "states-1", "adjoint-5", "tmp-run", "lock"])


GOOD = [run(), states(), adjoint(), unlike_run(), unlike(), unlike("adjoint-5", (5,))]


@given(st.dictionaries(NAMED, FORGED | st.sampled_from(GOOD)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_a_folder_holds_it_is_shown_and_adopted_or_refused(
    files: dict[str, bytes], unequal: bool
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "run")
        path.mkdir(0o700)
        for name, data in files.items():
            path.joinpath(name).write_bytes(data)
        assert str(inspect(path))
        folder = Folder(path)
        with contextlib.suppress(OSError, BadFile):
            found = Journal.of(folder)
            assert all(0 <= each.least <= 10 for each in found.adjoints)
        store = DurableStore(lambda: folder)
        if unequal:
            store.layout_at = lambda step: store.adopted[step]
        folder.run = RUN
        steps = store.adopt(LAYOUT, folder, 10)
        assert all(0 <= step < 10 for step in steps)
        store.open(LAYOUT)
        try:
            for step in steps:
                try:
                    arrays = store.get(step)
                except Exception as error:
                    assert type(error).__name__ == "CheckpointLost"
                else:
                    layout = store.adopted[step] if unequal else LAYOUT
                    assert [a.nbytes for a in arrays[:-1]] == [e.nbytes for e in layout.leaves]
                    layout.unpack(arrays, None)
        finally:
            store.close()
            folder.close()


def test_a_long_table_is_not_read() -> None:
    prelude = run()[:32] + (TABLE_LIMIT + 1).to_bytes(8, "little") + bytes(24)
    asked: list[int] = []
    with pytest.raises(BadFile, match="longer than"):
        read_header(lambda count, at: asked.append(count) or prelude, 10**12)  # type: ignore[func-returns-value]
    assert asked == [PRELUDE.size]


def test_a_deep_description_is_refused() -> None:
    table = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(BadFile, match="cannot be read"):
        read(encode(Kind.RUN, RUN, table, 0))


def test_the_texts_of_a_file_do_not_flood_a_message() -> None:
    long = 10_000 * "\x1b[2J"
    for other in (
        replace(FACTS, label=long),
        replace(FACTS, structure=long),
        replace(FACTS, leaves=((long, long, long),)),
    ):
        told = other.difference(FACTS)
        assert told is not None
        assert told.isprintable()
        assert len(told) < 500


# ------------------------------------------------------------------ digests


def digest(*arrays: Any) -> bytes:
    layout: Any = OrderedLayout.of(arrays)
    return bytes(layout.digest(layout.pack(layout.arrays(arrays))[0]))


def with_padding(array: Any, fill: int) -> Any:
    """Return an equal array whose padding bytes are `fill`."""
    made = array.copy()
    rows = made.reshape(-1).view(np.uint8).reshape(-1, made.dtype.itemsize)
    rows[:, ~used_bytes(made.dtype)] = fill
    return made


ALIGNED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (3,))], align=True)
NESTED = np.dtype([("x", ALIGNED, (2,)), ("y", np.longdouble), ("z", "?")], align=True)
GAPPY = np.dtype({"names": ["a", "b"], "formats": ["i2", "i4"], "offsets": [3, 9], "itemsize": 20})
UNION = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [2, 4], "itemsize": 9})
PADDED = [
    np.dtype(np.longdouble),
    np.dtype(np.clongdouble),
    np.dtype(np.longdouble).newbyteorder(),
    ALIGNED,
    NESTED,
    GAPPY,
    UNION,
]


@pytest.mark.parametrize("dtype", PADDED, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 2), (40_000,)])
def test_padding_is_not_digested(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    used = used_bytes(dtype)
    assert digest(with_padding(array, 0)) == digest(with_padding(array, 255))
    if array.size:
        for at in np.flatnonzero(used):
            other = array.copy()
            other.reshape(-1).view(np.uint8)[at - dtype.itemsize] ^= 1
            assert digest(other) != digest(array)


def test_bytes_of_a_long_double_that_hold_its_value() -> None:
    """Those that change when values do, in the format of this machine."""
    dtype = np.dtype(np.longdouble)
    values = np.array([0, 1, -1, 1 / np.longdouble(3), np.pi, np.inf, np.nan], dtype)
    seen = with_padding(values, 0).view(np.uint8).reshape(len(values), -1)
    assert np.array_equal(seen.any(0), used_bytes(dtype))


VALUES = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]).reshape(2, 4)


def reordered(array: Any, *order: int) -> Any:
    """Return an equal array whose axes lie in memory in this order."""
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


def test_equal_states_have_equal_digests() -> None:
    wide = np.empty((2, 8))
    wide[:, ::2] = VALUES
    for other in (VALUES.copy(), np.array(VALUES, "<f8")):
        assert digest(other) == digest(VALUES)
    assert digest(wide.copy()[:, ::2]) == digest(wide[:, ::2])
    single = VALUES.reshape(2, 1, 4)
    wider = np.empty((2, 1, 8))[:, :, ::2]
    wider[...] = single
    strided = np.lib.stride_tricks.as_strided(wider, single.shape, (64, 8, 16))
    assert np.array_equal(strided, single)
    for other in (reordered(single, 1, 0, 2), reordered(single, 0, 2, 1)):
        assert digest(other) == digest(single)
    assert digest(strided) == digest(wider)


def test_different_states_have_different_digests() -> None:
    quiet, other_nan, zero = np.array([np.nan]), np.array([np.nan]), np.array([0.0])
    other_nan.view(np.uint64)[0] ^= np.uint64(1)
    assert digest(quiet) != digest(other_nan)
    assert digest(zero) != digest(-zero)
    assert digest(VALUES) != digest(VALUES.astype(">f8"))  # another dtype computes otherwise
    wide = np.empty((2, 8))[:, ::2]
    wide[...] = VALUES
    for other in (reordered(VALUES, 1, 0), VALUES[::-1].copy()[::-1], wide):
        assert digest(VALUES) != digest(other)  # and so may other strides
    assert digest(VALUES) != digest(VALUES.reshape(4, 2))
    assert digest(VALUES, zero) != digest(zero, VALUES)


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_step_s": 1e-300},
        {"forward_step_s": 1e300},
        {"reverse_step_s": 1e300},
        {"tiers": []},
        {"tiers": [{"name": "x", "write_s": 1e300, "read_s": 1.0}]},
        {"tiers": [{"name": 3, "write_s": 1.0, "read_s": 1.0}]},
        {"state_bytes": 1.5},
    ],
)
def test_costs_that_were_not_measured_are_measured_again(changes: dict[str, Any]) -> None:
    costs = json.dumps({**json.loads(COSTS.to_json()), **changes})
    data = json.loads(run_table(FACTS, COSTS)) | {"costs": costs}
    assert read(encode(Kind.RUN, RUN, json.dumps(data).encode(), 0)) == (FACTS, None)


NUMBERS = st.sampled_from([-1, 0, 1, 7, 8, 24, 100, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_strides_that_no_array_would_have_are_refused(shift: int, row: int, item: int) -> None:
    made = record(0)
    made[LAYOUT.nbytes : LAYOUT.nbytes + 24] = np.array([shift, row, item], "<i8").view(np.uint8)
    reach = abs(row) + 2 * abs(item) + 8
    assert (LAYOUT.split(made) is not None) == (0 <= shift < 8 and reach <= 4 * 48)


def test_nothing_is_pickled() -> None:
    """No module imports what runs code found in data."""
    banned = {"pickle", "cPickle", "_pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
    root = Path(multistage.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                whole = ast.unparse(node.func)
                names = {"pickle"} if whole in ("torch.load", "np.load", "numpy.load") else set()
            else:
                continue
            assert not names & banned, f"{path.relative_to(root)}: {names & banned}"


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    try:
        folder.publish("states-0", [states()])
        size = len(states())
        folder.read("states-0", size, size - SIZE, np.empty(SIZE, np.uint8))
        with pytest.raises(OSError, match="ends before"):
            folder.read("states-0", size, size - SIZE + 1, np.empty(SIZE, np.uint8))
        os.truncate(tmp_path / "states-0", size - 1)
        with pytest.raises(BadFile, match="it was changed"):
            folder.read("states-0", size, 0, np.empty(4, np.uint8))
    finally:
        folder.close()


def test_forms_of_unusual_dtypes() -> None:
    """Those of arrays without elements may be large; what cannot be told is refused by name."""
    first = OrderedLayout.of(np.zeros(3))
    empty = OrderedLayout.of(np.zeros(0, "S1000"))
    assert _formed(empty.form(first), first, empty.record_bytes).same_as(empty)
    turned = np.zeros(2, [("a", "f8"), ("b", "f4")])[["b", "a"]]
    with pytest.raises(StateError, match=r"dtypes that numpy\.save keeps"):
        OrderedLayout.of(turned).form(first)
    with pytest.raises(BadFile, match="cannot be read"):
        _formed('[null, [[[3], "i4,(3"]]]', first, 1000)
