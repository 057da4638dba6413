"""Stores named by a URL-like string."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from ..costs import parse_bytes
from ..errors import ArgumentError
from .base import Store
from .files import FileStore
from .memory import MemoryStore
from .numa import NumaStore

_KNOWN = (
    "file:///folder?engine=auto&capacity=10GiB&buffers=8MiB, memory:?capacity=1GiB or "
    "numa:1?capacity=1GiB"
)


def open_store(tier: str | Store) -> Store:
    """Return the store a string names; a store is returned as it is.

    Parameters
    ----------
    tier : str or Store
        `file:///scratch` or `file:relative/folder`, with options `engine`
        (auto, native, direct, aiofiles), `capacity` and `buffers` (sizes) and
        `queue`; `memory:` or `memory:1GiB`, with the same sizes; `numa:1`, the
        memory of that node, with the same options.

    Raises
    ------
    ArgumentError
        For an unknown scheme or option.

    Examples
    --------
    >>> open_store("memory:64MiB").capacity_bytes
    67108864
    """
    if not isinstance(tier, str):
        return tier
    parts = urlsplit(tier)
    if parts.fragment:
        raise ArgumentError(f"tier {tier!r}: write '#' in a path as %23")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise ArgumentError(f"tier {tier!r} gives {name!r} twice; keep one")
        options[name] = value
    capacity = options.pop("capacity", None)
    capacity_bytes = None if capacity is None else parse_bytes(capacity)
    buffer_bytes = parse_bytes(options.pop("buffers", "8MiB"))
    queue = options.pop("queue", "2")
    if not queue.isdecimal():
        raise ArgumentError(f"tier {tier!r}: queue={queue!r} must be a whole number")
    store: Store
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
    else:
        raise ArgumentError(f"tier {tier!r} is not known; write {_KNOWN}")
    if options:
        raise ArgumentError(f"tier {tier!r} has unknown option {next(iter(options))!r}; {_KNOWN}")
    return store
