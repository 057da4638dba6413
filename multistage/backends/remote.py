"""Object stores as a slow tier: S3 and whatever else fsspec speaks."""

from __future__ import annotations

import errno
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError, CheckpointWarning, StoreError, redacted
from ..states.layout import Array, Layout
from ..support.interrupts import Shield
from .arena import round_up
from .lifetimes import Ending
from .medium import Medium
from .streamed import StreamedStore

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# A request takes tens of milliseconds whatever it moves, and one connection
# brings some 50 to 100 MB/s: so extents are larger than on a disk, and the
# parts of one travel side by side.
_EXTENT_BYTES = 16 << 20
_LEAST_PART_BYTES = 256 << 10
_MOST_PART_BYTES = 4 << 20
_CONNECTIONS = 8

# s3fs tries five times by itself.  With as many tries of botocore's within each
# a server that does not answer would be waited for many minutes.
_S3_PATIENCE = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 0}}

# Where the first name of a path is a bucket: made by its owner, never by us.
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "cos", "r2"})
_S3 = ("s3", "s3a")  # what the extra brings a client for


class RemoteStore(StreamedStore):
    """Checkpoints as objects of a store that fsspec reaches.

    They lie under a prefix of their own inside that of `url`, named by chance,
    and are removed when the store closes, at the latest when the interpreter
    exits.  A killed process leaves them behind: let the bucket expire what
    begins with `.multistage-`.  What is dropped is written over; it is not
    removed one by one.

    Parameters
    ----------
    url : str
        As fsspec takes it: `s3://bucket/prefix`, `memory://prefix`.
    options : mapping, optional
        For the filesystem, for example `{"endpoint_url": "http://localhost:9000"}`.
        Credentials belong into the environment or into fsspec's configuration.
    capacity_bytes : int or None
        Most bytes of objects; None if unbounded.
    buffer_bytes : int
        Buffers for transfers, in bytes; the parts on their way come on top.
    queue_depth : int
        Writes that may be waiting or in flight.
    threads, cpus
        See `FileStore`.
    connections : int or None
        Parts on their way at once; None for 8 where the filesystem is
        asynchronous, as that of S3 is, else 1.

    Raises
    ------
    StoreError
        From `open`: unknown protocol, package not installed, no credentials,
        no bucket, no server.

    Examples
    --------
    >>> RemoteStore("s3://bucket/run", capacity_bytes=1 << 30).name
    's3'
    """

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, object] | None = None,
        capacity_bytes: int | None = None,
        buffer_bytes: int = 64 << 20,
        queue_depth: int = 2,
        threads: int = 2,
        cpus: str | Iterable[int] | None = None,
        connections: int | None = None,
    ) -> None:
        protocol, separator, path = url.partition("://")
        if not separator or not protocol:
            raise ArgumentError(f"url={url!r} must be one of fsspec's, as in s3://bucket/prefix")
        if protocol in _BUCKETS and not path.strip("/"):
            raise ArgumentError(f"url={url!r} must name a bucket, as in {protocol}://bucket/prefix")
        for address in (url, str((options or {}).get("endpoint_url", ""))):
            if _has_credentials(address):
                raise ArgumentError(
                    f"the address of a {protocol} tier must not hold credentials; set them in the "
                    "environment or in fsspec's configuration"
                )
        if connections is not None and connections < 1:
            raise ArgumentError(f"connections={connections} must be at least 1")
        super().__init__(
            protocol,
            self._connect,
            capacity_bytes=capacity_bytes,
            buffer_bytes=buffer_bytes,
            queue_depth=queue_depth,
            threads=threads,
            cpus=cpus,
            extent_bytes=_EXTENT_BYTES,
            chunk_bytes=_EXTENT_BYTES,
        )
        self.url = url
        self.connections = connections
        self._options = dict(options or {})

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers, those of the parts on their way counted."""
        connections = self.connections or _CONNECTIONS
        travelling = min(round_up(layout.nbytes), _EXTENT_BYTES, connections * _MOST_PART_BYTES)
        return super().buffer_bytes(layout) + 2 * travelling

    def check(self) -> None:
        """Raise StoreError if the store cannot be used; nothing is left in it."""
        with Shield(up=True):
            self._connect().close()

    def _connect(self) -> Medium:
        filesystem, root = _filesystem(self.url, self._options)
        connections = self.connections
        if connections is None:
            connections = _CONNECTIONS if getattr(filesystem, "async_impl", False) else 1
        root = f"{root.rstrip('/')}/.multistage-{uuid.uuid4().hex}"
        try:
            _try_out(filesystem, root, self.name)
        except Exception as error:
            raise StoreError(
                f"tier {self.url!r} cannot be used: {_remedy(error)}"
            ) from _without_secrets(error)
        return RemoteObjects(filesystem, root, connections)


class RemoteObjects:
    """Extents as objects, each in as many parts as travel side by side.

    Parameters
    ----------
    filesystem : fsspec filesystem
        Used from several threads at once if `connections` is above 1.
    root : str
        Path under which nothing else lies; removed by `close`.
    connections : int
    """

    def __init__(self, filesystem: AbstractFileSystem, root: str, connections: int = 1) -> None:
        self._filesystem = filesystem
        self._root = root
        self._connections = connections
        # Shared by all who read and write: it bounds the bytes on their way.
        self._pool = (
            ThreadPoolExecutor(connections, thread_name_prefix="multistage-remote")
            if connections > 1
            else None
        )
        self._parts: dict[int, list[tuple[int, int]]] = {}  # slot -> where parts start and stop
        self._remove = Ending(self, partial(_remove, filesystem, root))

    def begin(self, slot: int, nbytes: int) -> None:
        """Do nothing: `write` makes the objects."""

    def free(self, slot: int) -> None:
        """Do nothing: the objects are written over."""

    def write(self, slot: int, offset: int, data: Array) -> None:
        parts = [(offset + at, offset + to) for at, to in self._split(len(data))]
        # The record of an extent whose rewriting fails is never asked for.
        self._parts[slot] = [*(self._parts[slot] if offset else ()), *parts]

        def send(start: int, stop: int) -> None:
            content = data[start - offset : stop - offset].tobytes()
            self._filesystem.pipe_file(self._path(slot, start), content)

        self._each(send, parts)

    def read(self, slot: int, data: Array) -> None:
        parts = [part for part in self._parts.get(slot, ()) if part[0] < len(data)]
        if not parts or parts[-1][1] < len(data):
            raise OSError(errno.EIO, f"extent {slot} was never written to its end")

        def fetch(start: int, stop: int) -> None:
            stop = min(stop, len(data))
            # With its range named, S3 is not asked for the size first.
            content = self._filesystem.cat_file(self._path(slot, start), start=0, end=stop - start)
            if len(content) != stop - start:
                raise OSError(errno.EIO, "the object ends before the checkpoint does")
            data[start:stop] = np.frombuffer(content, np.uint8)

        self._each(fetch, parts)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        left = self._remove()
        if left:
            warnings.warn(
                f"checkpoints may be left under {self._root!r}: {left}; remove them",
                CheckpointWarning,
                stacklevel=3,
            )

    def _path(self, slot: int, start: int) -> str:
        return f"{self._root}/{slot}.{start}"

    def _split(self, nbytes: int) -> list[tuple[int, int]]:
        part = round_up(-(-nbytes // self._connections))
        part = min(max(part, _LEAST_PART_BYTES), _MOST_PART_BYTES)
        return [(at, min(at + part, nbytes)) for at in range(0, nbytes, part)]

    def _each(self, work: Callable[[int, int], None], parts: list[tuple[int, int]]) -> None:
        """Do the work for every part; none is in flight any more on return.

        The buffer is used again then: a part that is still read from it would
        be stored with another checkpoint's bytes.
        """
        pool = self._pool
        if pool is not None and len(parts) > 1:
            try:
                jobs = [pool.submit(_as_oserror, work, *part) for part in parts]
            except RuntimeError:  # there are no more threads
                # The part that none was found for is queued all the same, without a job.
                pool.shutdown(cancel_futures=True)
                self._pool = None
            else:
                # Not by `futures.wait`, which does not see that the other thread has shut it.
                cancelled = [_is_cancelled(job) for job in jobs]
                if not any(cancelled):
                    for job in jobs:
                        job.result()
                    return
        for part in parts:
            _as_oserror(work, *part)


def _is_cancelled(job: Future[None]) -> bool:
    """Wait for a job; return whether it was cancelled before it began."""
    try:
        job.exception()
    except CancelledError:
        return True
    return False


def _as_oserror(work: Callable[[int, int], None], start: int, stop: int) -> None:
    try:
        work(start, stop)
    except OSError:
        raise
    except Exception as error:  # filesystems raise what their client libraries do
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _filesystem(url: str, options: Mapping[str, object]) -> tuple[AbstractFileSystem, str]:
    """Return an fsspec filesystem of our own and the path in it.  Raises StoreError."""
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise StoreError(
            f"tier {url!r} needs fsspec; pip install 'multistage-checkpointing[remote]'"
        ) from error
    protocol = url.partition("://")[0]
    given = {**conf.get(protocol, {}), **options}
    if protocol in _S3 and "config_kwargs" not in given:
        options = {**options, "config_kwargs": _S3_PATIENCE}
    try:
        # Ours alone: what others set on a shared one must not reach us.
        filesystem, root = url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        remedy = "; pip install 'multistage-checkpointing[remote]'" if protocol in _S3 else ""
        raise StoreError(f"tier {url!r} needs a package: {error}{remedy}") from error
    except ValueError as error:
        raise StoreError(
            f"tier {url!r} cannot be used: {error}; name a protocol that fsspec knows"
        ) from _without_secrets(error)
    except Exception as error:
        raise StoreError(f"tier {url!r} cannot be used: {_remedy(error)}") from _without_secrets(
            error
        )
    return filesystem, root


def _try_out(filesystem: AbstractFileSystem, root: str, protocol: str) -> None:
    """Write, read and remove an object: what is wrong shows before any step runs."""
    if protocol not in _BUCKETS:
        filesystem.makedirs(root, exist_ok=True)
    path, content = f"{root}/try", b"multistage"
    filesystem.pipe_file(path, content)
    if filesystem.cat_file(path, start=0, end=len(content)) != content:
        raise OSError(errno.EIO, "an object does not hold what was written to it")
    filesystem.rm_file(path)


def _has_credentials(address: str) -> bool:
    """Whether a URL names a user, with or without a password (which may hold slashes)."""
    user, at, _ = address.partition("://")[2].rpartition("@")
    return bool(at) and (":" in user or "/" not in user)


def _without_secrets(error: Exception) -> Exception | None:
    """Return an error as the cause of another, or None if its message would contain a secret."""
    return error if redacted(str(error)) == str(error) else None


def _remedy(error: Exception) -> str:
    """Return what went wrong and what to do about it."""
    said = f"{type(error).__name__}: {error}"
    name = type(error).__name__
    if "Credential" in name:
        return (
            f"{said}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what fsspec's "
            "configuration names for this protocol"
        )
    if isinstance(error, FileNotFoundError):
        return f"{said}; create the bucket, or name one that exists"
    if isinstance(error, PermissionError):
        return f"{said}; check the credentials and their rights to write, read and delete"
    return f"{said}; check the address and whether the server can be reached"


def _remove(filesystem: AbstractFileSystem, root: str) -> str:
    """Remove all below `root`; return what went wrong, if anything."""
    try:
        filesystem.invalidate_cache()
        if filesystem.exists(root):
            filesystem.rm(root, recursive=True)
    except FileNotFoundError:
        return ""  # nothing was ever written
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
