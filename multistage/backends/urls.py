"""Stores named by a URL-like string, which `TierUrl` takes apart."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypedDict, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import OPTIONS, ArgumentError, redacted
from ..support.units import parse_bytes
from ..support.values import several
from .base import Store
from .cascade import CascadeStore
from .compressed import CompressedStore
from .files import FileStore, available_engines
from .memory import MemoryStore, NumaStore
from .remote import RemoteStore
from .streamed import StreamedStore
from .striped import StripedStore


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


class TierUrl:
    """A tier's name as its scheme, its place and its options, each of which is taken once.

    Parameters
    ----------
    tier : str

    Attributes
    ----------
    shown : str
        For messages.
    scheme, host, path : str
        As in `scheme://host/path`.

    Raises
    ------
    ArgumentError
        If it is no URL, or its options are not written as they should be.

    Examples
    --------
    >>> url = TierUrl("file:///scratch?capacity=10GiB&queue=4")
    >>> url.path, url.size("capacity"), url.number("queue"), url.option("engine")
    ('/scratch', 10737418240, 4, None)
    """

    def __init__(self, tier: str) -> None:
        self.shown = told(tier)
        try:
            parts = urlsplit(tier)
        except ValueError:  # whose message may hold a password
            raise ArgumentError(f"tier {self.shown} is not a valid URL") from None
        if parts.fragment:
            raise ArgumentError(f"tier {self.shown}: write '#' in a path as %23")
        if not all("=" in option for option in parts.query.split("&") if option):
            raise ArgumentError(f"tier {self.shown}: write options as name=value")
        self.scheme, self.host, self.path = parts.scheme, parts.netloc, parts.path
        self._options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name in self._options:
                raise ArgumentError(f"tier {self.shown} gives {name!r} twice; keep one")
            self._options[name] = value

    def option(self, name: str) -> str | None:
        """Take an option; None if it is not given."""
        return self._options.pop(name, None)

    def size(self, name: str) -> int | None:
        """Take an option that is a number of bytes.  Raises ArgumentError."""
        value = self.option(name)
        return None if value is None else parse_bytes(value, name)

    def number(self, name: str) -> int | None:
        """Take an option that is a whole number.  Raises ArgumentError."""
        value = self.option(name)
        if value is not None and not value.isdecimal():
            raise ArgumentError(f"tier {self.shown}: {name}={value!r} must be a whole number")
        return None if value is None else int(value)

    def left(self) -> str | None:
        """Return the name of an option that was not taken, None if all were."""
        return next(iter(self._options), None)


_KNOWN = (
    "file:///folder?engine=auto&capacity=10GiB&buffers=8MiB, memory:?capacity=1GiB, "
    "numa:1?capacity=1GiB, s3://bucket/prefix?endpoint=URL&connections=8, fsspec:URL, "
    "two of them, the upper with a capacity, as in 'file:///folder?capacity=10GiB > s3://bucket', "
    "or two that work as one, as in 'file:///nvme0 + file:///nvme1'"
)
# The object stores that are called by their own names; all else through `fsspec:`.
_REMOTE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "fsspec")
_BUFFERS, _REMOTE_BUFFERS = 8 << 20, 64 << 20  # bytes, where a tier does not say

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


def open_store(tier: TierName, most_buffer_bytes: int = _REMOTE_BUFFERS) -> Store:
    """Return the store a string names; a store is returned as it is.

    Parameters
    ----------
    tier : str, Path or Store
        A path is a folder, as `file:` and its name are; or
        `file:///scratch`, `file:relative/folder` or `file:~/folder`, with options `engine`
        (auto, native, direct, aiofiles), `capacity` and `buffers` (sizes), `queue`,
        `threads` (each way) and `cpus` (where they run, as in `cpus=14-15`); `memory:` or
        `memory:1GiB`, with the same options but `engine`; `numa:1`, the
        memory of that node, with the same options; `s3://bucket/prefix` (also
        gs, gcs, az, abfs) or `fsspec:` and any URL of fsspec's, with
        `connections` and, for s3, `endpoint` besides.  Each takes `share=8`, how many divide a
        bandwidth that this program measures alone, and
        `compress=blosc`, `compress=auto`, or `compress=zfp` with its bound
        `tolerance=1e-6`, which makes the adjoint inexact.  Or `ONE + OTHER`, with spaces: two
        or more that states are striped over.  Or `UPPER > LOWER`, a cascade of two or more of all
        these.  A `>` in a path is written %3E, a `+` between spaces %2B, a `#` %23.
    most_buffer_bytes : int
        The most that `buffers` is where the tier does not say.

    Raises
    ------
    ArgumentError
        For an unknown scheme or option.

    Examples
    --------
    >>> open_store("memory:64MiB").capacity_bytes
    67108864
    >>> store = open_store("file:///scratch?cpus=14-15&threads=1")
    >>> store.threads, sorted(store.cpus)
    (1, [14, 15])
    >>> open_store("memory:64MiB > file:///scratch?capacity=10GiB").name
    'memory>file'
    >>> open_store("file:///nvme0 + file:///nvme1").name
    'file+file'
    """
    if isinstance(tier, os.PathLike):
        return FileStore(os.fsdecode(tier), buffer_bytes=min(_BUFFERS, most_buffer_bytes))
    if not isinstance(tier, str):
        if not (hasattr(tier, "put") and hasattr(tier, "open")):  # a NumPy array has a put
            raise ArgumentError(f"tier={tier!r} must be a string, a path or a store")
        if missing := [name for name in _MEMBERS if not hasattr(tier, name)]:
            raise ArgumentError(
                f"tier={tier!r} lacks {', '.join(missing)}, which every store has; derive its "
                "class from multistage.backends.BaseStore, which answers for simple stores"
            )
        return tier
    return _cascade(tier, most_buffer_bytes)


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
    if isinstance(tier, str) and isinstance(open_store(tier), FileStore):
        options = [option for option in tier.partition("?")[2].split("&") if option]
        if not any(option.startswith("engine=") for option in options):
            base = tier.partition("?")[0]
            return [f"{base}?{'&'.join([*options, f'engine={each}'])}" for each in engines]
    return [tier]


def _cascade(tier: str, most: int) -> Store:
    *upper, lower = [_striped(name, most) for name in _sides(tier, ">", r">")]
    found: Store = lower
    for level in reversed(upper):
        found = CascadeStore(level, found)
    return found


def _striped(tier: str, most: int) -> Store:
    names = _sides(tier, "+", r"\s\+(?=\s|$)|^\+(?=\s)")
    if len(names) == 1:
        return _store(tier, most)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ArgumentError(f"tier {told(tier)} names {told(twice)} twice; name two devices")
    return StripedStore(*(_store(name, most) for name in names))


def _sides(tier: str, sign: str, pattern: str) -> list[str]:
    """Return the tiers on the sides of a sign."""
    names = [name.strip() for name in re.split(pattern, tier)]
    if len(names) > 1 and not all(names):
        raise ArgumentError(f"tier {told(tier)} must name a tier on both sides of '{sign}'")
    return names


def _store(tier: str, most: int) -> StreamedStore:
    url = TierUrl(tier)
    capacity, buffers, queue = url.size("capacity"), url.size("buffers"), url.number("queue")
    threads = url.number("threads")
    if buffers is None:
        buffers = min(_REMOTE_BUFFERS if url.scheme in _REMOTE else _BUFFERS, most)
    options: _Options = {
        "capacity_bytes": capacity,
        "buffer_bytes": buffers,
        "queue_depth": 2 if queue is None else queue,
        "threads": 2 if threads is None else threads,
        "cpus": url.option("cpus"),
    }
    if url.scheme == "pinned":
        raise ArgumentError(
            f"tier {url.shown} is for PyTorch alone: unroll() and offload() of multistage.torch "
            "take it; here write 'memory:' or 'file:///folder'"
        )
    if not url.scheme and tier.startswith(("/", ".", "~")) and "@" not in tier:
        raise ArgumentError(f"tier {url.shown} has no scheme; for a folder write 'file:{tier}'")
    if url.scheme not in _MAKERS:
        raise ArgumentError(f"tier {url.shown} is not known; write {_KNOWN}")
    store = _MAKERS[url.scheme](url, options)
    share = url.number("share")
    if share is not None:
        if not share:
            raise ArgumentError(f"tier {url.shown}: share=0 must be at least 1, who uses it")
        store.share = share
    compress, tolerance = url.option("compress"), url.option("tolerance")
    if name := url.left():
        raise ArgumentError(f"tier {url.shown} has unknown option {name!r}; {_KNOWN}")
    if compress is None:
        if tolerance is not None:
            raise ArgumentError(f"tier {url.shown}: tolerance goes with compress=zfp")
        return store
    try:
        bound = None if tolerance is None else float(tolerance)
    except ValueError:
        raise ArgumentError(f"tier {url.shown}: tolerance={tolerance!r} must be a number") from None
    return CompressedStore(store, compress, tolerance=bound)  # type: ignore[arg-type]


class _Options(TypedDict):
    """What every tier takes."""

    capacity_bytes: int | None
    buffer_bytes: int
    queue_depth: int
    threads: int
    cpus: str | None


def _file(url: TierUrl, options: _Options) -> FileStore:
    if url.host or not url.path:
        raise ArgumentError(f"tier {url.shown} must name a folder, as in file:///scratch")
    engine = url.option("engine")
    return FileStore(
        unquote(url.path),
        "auto" if engine is None else engine,  # type: ignore[arg-type]
        **options,
    )


def _memory(url: TierUrl, options: _Options) -> MemoryStore:
    if url.host:
        raise ArgumentError(f"tier {url.shown} must be written as in memory:{url.host}")
    if size := url.path.strip("/"):
        if options["capacity_bytes"] is not None:
            raise ArgumentError(f"tier {url.shown} gives its capacity twice; keep one")
        options["capacity_bytes"] = parse_bytes(size, "capacity")
    return MemoryStore(**options)


def _numa(url: TierUrl, options: _Options) -> NumaStore:
    if not url.path.isdecimal():
        raise ArgumentError(f"tier {url.shown} must name a node, as in numa:1")
    return NumaStore(int(url.path), **options)


def _remote(url: TierUrl, options: _Options) -> RemoteStore:
    connections = url.number("connections")
    place = f"{url.scheme}://{unquote(url.host + url.path)}"
    if url.scheme == "fsspec":
        place = unquote(url.path)
    endpoint = url.option("endpoint") if place.startswith("s3") else None
    return RemoteStore(
        place,
        options=None if endpoint is None else {"endpoint_url": endpoint},
        **options,
        connections=connections,
    )


_MAKERS: dict[str, Callable[[TierUrl, _Options], StreamedStore]] = {
    "file": _file,
    "memory": _memory,
    "numa": _numa,
    **dict.fromkeys(_REMOTE, _remote),
}
