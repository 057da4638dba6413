"""Stores named by a URL-like string."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from ..costs import parse_bytes
from ..errors import ArgumentError
from .base import Store
from .cascade import CascadeStore
from .compressed import CompressedStore
from .files import FileStore
from .memory import MemoryStore
from .numa import NumaStore
from .remote import RemoteStore
from .streamed import StreamedStore

_KNOWN = (
    "file:///folder?engine=auto&capacity=10GiB&buffers=8MiB, memory:?capacity=1GiB, "
    "numa:1?capacity=1GiB, s3://bucket/prefix?endpoint=URL&connections=8, fsspec:URL, "
    "or two of them, the upper with a capacity, as in 'file:///folder?capacity=10GiB > s3://bucket'"
)
# The object stores that are called by their own names; all else through `fsspec:`.
_REMOTE = ("s3", "s3a", "gs", "gcs", "az", "abfs")


def open_store(tier: str | Store) -> Store:
    """Return the store a string names; a store is returned as it is.

    Parameters
    ----------
    tier : str or Store
        `file:///scratch` or `file:relative/folder`, with options `engine`
        (auto, native, direct, aiofiles), `capacity` and `buffers` (sizes) and
        `queue`; `memory:` or `memory:1GiB`, with the same sizes; `numa:1`, the
        memory of that node, with the same options; `s3://bucket/prefix` (also
        gs, gcs, az, abfs) or `fsspec:` and any URL of fsspec's, with
        `connections` and, for s3, `endpoint` besides.  Each takes
        `compress=blosc`, `compress=auto`, or `compress=zfp` with its bound
        `tolerance=1e-6`, which makes the adjoint inexact.  Or `UPPER > LOWER`, a
        cascade of two or more of these.  A `>` in a path is written %3E, a `#` %23.

    Raises
    ------
    ArgumentError
        For an unknown scheme or option.

    Examples
    --------
    >>> open_store("memory:64MiB").capacity_bytes
    67108864
    >>> open_store("memory:64MiB > file:///scratch?capacity=10GiB").name
    'memory>file'
    """
    if not isinstance(tier, str):
        return tier
    if ">" in tier:
        return _cascade(tier)
    return _store(tier)


def _cascade(tier: str) -> CascadeStore:
    names = [name.strip() for name in tier.split(">")]
    if not all(names):
        raise ArgumentError(f"tier {tier!r} must name a tier on both sides of '>'")
    levels = [_store(name) for name in names]
    found = levels.pop()
    while levels:
        found = CascadeStore(levels.pop(), found)
    assert isinstance(found, CascadeStore)
    return found


def _store(tier: str) -> StreamedStore:
    try:
        parts = urlsplit(tier)
    except ValueError as error:
        raise ArgumentError(f"tier {tier!r} is no URL: {error}") from error
    if parts.fragment:
        raise ArgumentError(f"tier {tier!r}: write '#' in a path as %23")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise ArgumentError(f"tier {tier!r} gives {name!r} twice; keep one")
        options[name] = value
    capacity = options.pop("capacity", None)
    capacity_bytes = None if capacity is None else parse_bytes(capacity)
    remote = parts.scheme in _REMOTE or parts.scheme == "fsspec"
    buffer_bytes = parse_bytes(options.pop("buffers", "64MiB" if remote else "8MiB"))
    queue = options.pop("queue", "2")
    if not queue.isdecimal():
        raise ArgumentError(f"tier {tier!r}: queue={queue!r} must be a whole number")
    store: StreamedStore
    if parts.scheme == "file":
        if parts.netloc or not parts.path:
            raise ArgumentError(f"tier {tier!r} must name a folder, as in file:///scratch")
        engine = options.pop("engine", "auto")
        store = FileStore(
            unquote(parts.path),
            engine,  # type: ignore[arg-type]
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=int(queue),
        )
    elif parts.scheme == "memory":
        if parts.netloc:
            raise ArgumentError(f"tier {tier!r} must be written as in memory:{parts.netloc}")
        if parts.path.strip("/"):
            if capacity is not None:
                raise ArgumentError(f"tier {tier!r} gives its capacity twice; keep one")
            capacity_bytes = parse_bytes(parts.path.strip("/"))
        store = MemoryStore(capacity_bytes, buffer_bytes=buffer_bytes, queue_depth=int(queue))
    elif parts.scheme == "numa":
        if not parts.path.isdecimal():
            raise ArgumentError(f"tier {tier!r} must name a node, as in numa:1")
        store = NumaStore(
            int(parts.path), capacity_bytes, buffer_bytes=buffer_bytes, queue_depth=int(queue)
        )
    elif remote:
        connections = options.pop("connections", None)
        if connections is not None and not connections.isdecimal():
            raise ArgumentError(
                f"tier {tier!r}: connections={connections!r} must be a whole number"
            )
        url = f"{parts.scheme}://{unquote(parts.netloc + parts.path)}"
        if parts.scheme == "fsspec":
            url = unquote(parts.path)
        endpoint = options.pop("endpoint", None) if url.startswith("s3") else None
        store = RemoteStore(
            url,
            options=None if endpoint is None else {"endpoint_url": endpoint},
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=int(queue),
            connections=None if connections is None else int(connections),
        )
    else:
        raise ArgumentError(f"tier {tier!r} is not known; write {_KNOWN}")
    compress, tolerance = options.pop("compress", None), options.pop("tolerance", None)
    if options:
        raise ArgumentError(f"tier {tier!r} has unknown option {next(iter(options))!r}; {_KNOWN}")
    if compress is None:
        if tolerance is not None:
            raise ArgumentError(f"tier {tier!r}: tolerance goes with compress=zfp")
        return store
    try:
        bound = None if tolerance is None else float(tolerance)
    except ValueError:
        raise ArgumentError(f"tier {tier!r}: tolerance={tolerance!r} must be a number") from None
    return CompressedStore(store, compress, tolerance=bound)  # type: ignore[arg-type]
