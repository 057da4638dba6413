"""Stores named by a URL-like string."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import OPTIONS, ArgumentError, redacted
from ..support.units import parse_bytes
from ..support.values import several
from .base import Store
from .cascade import CascadeStore
from .compressed import CompressedStore
from .files import FileStore, available_engines
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

_MEMBERS = sorted({*Store.__annotations__, *(n for n in vars(Store) if not n.startswith("_"))})

TierName: TypeAlias = str | os.PathLike[str] | Store
Tiers: TypeAlias = TierName | Sequence[TierName]


def tier_names(tiers: Tiers | None) -> tuple[TierName, ...]:
    """Return the tiers that were given as one or several, none or a sequence.

    Raises
    ------
    ArgumentError
        If they are neither.

    Examples
    --------
    >>> tier_names("memory:"), tier_names(["memory:", "file:."]), tier_names(None)
    (('memory:',), ('memory:', 'file:.'), ())
    """
    if tiers is None:
        return ()
    if isinstance(tiers, str | os.PathLike):
        return (tiers,)
    if isinstance(tiers, Iterable) and not isinstance(tiers, bytes) and several(tiers):
        return tuple(tiers)
    return (cast(TierName, tiers),)  # `open_store` says so if it is none


def open_store(tier: TierName) -> Store:
    """Return the store a string names; a store is returned as it is.

    Parameters
    ----------
    tier : str, Path or Store
        A path is a folder, as `file:` and its name are; or
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
    if isinstance(tier, os.PathLike):
        return FileStore(os.fsdecode(tier))
    if not isinstance(tier, str):
        if not (hasattr(tier, "put") and hasattr(tier, "open")):  # a NumPy array has a put
            raise ArgumentError(f"tier={tier!r} must be a string, a path or a store")
        if missing := [name for name in _MEMBERS if not hasattr(tier, name)]:
            raise ArgumentError(
                f"tier={tier!r} lacks {', '.join(missing)}, which every store has; derive its "
                "class from multistage.backends.BaseStore, which answers for simple stores"
            )
        return tier
    if ">" in tier:
        return _cascade(tier)
    return _store(tier)


def engines_of(tier: TierName) -> list[TierName]:
    """Return a tier, or a folder once for each engine if none is named.

    Examples
    --------
    >>> engines_of("memory:"), engines_of("file:/scratch?engine=direct")
    (['memory:'], ['file:/scratch?engine=direct'])
    """
    engines = available_engines()
    if isinstance(tier, os.PathLike):
        return [FileStore(os.fsdecode(tier), engine) for engine in engines]
    if isinstance(tier, str) and ">" not in tier and isinstance(open_store(tier), FileStore):
        options = [option for option in tier.partition("?")[2].split("&") if option]
        if not any(option.startswith("engine=") for option in options):
            base = tier.partition("?")[0]
            return [f"{base}?{'&'.join([*options, f'engine={each}'])}" for each in engines]
    return [tier]


def told(tier: str) -> str:
    """Return a tier as messages name it, without the values of options that may be secret.

    Examples
    --------
    >>> told("s3://bucket?secret=4711&capacity=1GiB")
    "'s3://bucket?secret=***&capacity=1GiB'"
    """
    place, mark, text = tier.partition("?")
    options = [each.partition("=") for each in text.split("&")] if mark else []
    kept = []
    for name, equals, value in options:
        secret = name not in OPTIONS or not equals
        kept.append(f"{name}={'***' if secret else value}" if equals else "***")
    return repr(redacted(place + mark + "&".join(kept)))


def _cascade(tier: str) -> CascadeStore:
    names = [name.strip() for name in tier.split(">")]
    if not all(names):
        raise ArgumentError(f"tier {told(tier)} must name a tier on both sides of '>'")
    levels = [_store(name) for name in names]
    found = levels.pop()
    while levels:
        found = CascadeStore(levels.pop(), found)
    assert isinstance(found, CascadeStore)
    return found


def _store(tier: str) -> StreamedStore:
    shown = told(tier)
    try:
        parts = urlsplit(tier)
    except ValueError:  # whose message may hold a password
        raise ArgumentError(f"tier {shown} is not a valid URL") from None
    if parts.fragment:
        raise ArgumentError(f"tier {shown}: write '#' in a path as %23")
    if not all("=" in option for option in parts.query.split("&") if option):
        raise ArgumentError(f"tier {shown}: write options as name=value")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise ArgumentError(f"tier {shown} gives {name!r} twice; keep one")
        options[name] = value
    capacity = options.pop("capacity", None)
    capacity_bytes = None if capacity is None else parse_bytes(capacity, "capacity")
    remote = parts.scheme in _REMOTE or parts.scheme == "fsspec"
    buffer_bytes = parse_bytes(options.pop("buffers", "64MiB" if remote else "8MiB"), "buffers")
    queue = options.pop("queue", "2")
    if not queue.isdecimal():
        raise ArgumentError(f"tier {shown}: queue={queue!r} must be a whole number")
    store: StreamedStore
    if parts.scheme == "file":
        if parts.netloc or not parts.path:
            raise ArgumentError(f"tier {shown} must name a folder, as in file:///scratch")
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
            raise ArgumentError(f"tier {shown} must be written as in memory:{parts.netloc}")
        if parts.path.strip("/"):
            if capacity is not None:
                raise ArgumentError(f"tier {shown} gives its capacity twice; keep one")
            capacity_bytes = parse_bytes(parts.path.strip("/"), "capacity")
        store = MemoryStore(capacity_bytes, buffer_bytes=buffer_bytes, queue_depth=int(queue))
    elif parts.scheme == "numa":
        if not parts.path.isdecimal():
            raise ArgumentError(f"tier {shown} must name a node, as in numa:1")
        store = NumaStore(
            int(parts.path), capacity_bytes, buffer_bytes=buffer_bytes, queue_depth=int(queue)
        )
    elif remote:
        connections = options.pop("connections", None)
        if connections is not None and not connections.isdecimal():
            raise ArgumentError(f"tier {shown}: connections={connections!r} must be a whole number")
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
    elif parts.scheme == "pinned":
        raise ArgumentError(
            f"tier {shown} is for PyTorch alone: unroll() and offload() of multistage.torch take "
            "it; here write 'memory:' or 'file:///folder'"
        )
    elif not parts.scheme and tier.startswith(("/", ".", "~")) and "@" not in tier:
        raise ArgumentError(f"tier {shown} has no scheme; for a folder write 'file:{tier}'")
    else:
        raise ArgumentError(f"tier {shown} is not known; write {_KNOWN}")
    compress, tolerance = options.pop("compress", None), options.pop("tolerance", None)
    if options:
        name = next(iter(options))
        raise ArgumentError(f"tier {shown} has unknown option {name!r}; {_KNOWN}")
    if compress is None:
        if tolerance is not None:
            raise ArgumentError(f"tier {shown}: tolerance goes with compress=zfp")
        return store
    try:
        bound = None if tolerance is None else float(tolerance)
    except ValueError:
        raise ArgumentError(f"tier {shown}: tolerance={tolerance!r} must be a number") from None
    return CompressedStore(store, compress, tolerance=bound)  # type: ignore[arg-type]
