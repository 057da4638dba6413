"""A folder that outlives its process: ours alone, locked, addressed by descriptor.

Whoever can write to the folder decides what a resumed run computes, so a
folder of another user, or one that others may write to, is refused.  Files
are opened relative to the folder's descriptor, never through a symbolic link,
and must be plain files of this user.  A file appears under its name only when
all its bytes are on the disk: it is written under another, synchronized, and
renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from ..errors import StoreError
from ..layout import Array
from .headers import PRELUDE, BadFile, Header, parse_prelude

RUN, LAST, LOCK = "run", "last", "lock"
_TEMPORARY = "tmp-"
LEFTOVERS = (_TEMPORARY, "probe-")  # of no use to a resumed run
_OURS = re.compile(r"run|last|lock|(tmp-)?(run|last|(states|probe|adjoint)-[0-9]{1,12})")
_CHUNK = 4 << 20
_PATIENCE_S = 0.5
# Flags that platforms may lack.  Without NONBLOCK a FIFO in place of a file would hang us.
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


# A forked child shares our lock, and might outlive us: it must let go of it, or
# nobody could resume what we leave.
_LOCKED: weakref.WeakSet[Folder] = weakref.WeakSet()


def _let_go() -> None:
    for folder in _LOCKED:
        folder.close()


os.register_at_fork(after_in_child=_let_go)


class Folder:
    """An open folder.

    Parameters
    ----------
    path : Path
    create : bool
        Make it if it does not exist.

    Raises
    ------
    StoreError
        If it cannot be used: rule, values, remedy.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._lock = -1
        self.fd = -1
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    path.mkdir(0o700)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE)
        except OSError as error:
            raise self.refused(_reason(path, error, create)) from error
        found = os.fstat(self.fd)
        reason = None
        if found.st_uid != os.geteuid():
            reason = f"it belongs to user {found.st_uid}, not to you ({os.geteuid()})"
        elif found.st_mode & 0o022:
            mode = stat.filemode(found.st_mode)
            reason = f"others may write to it ({mode}); chmod go-w, once its files are known good"
        if reason is not None:
            self.close()
            raise self.refused(reason)

    def refused(self, reason: str) -> StoreError:
        """Return the error that says why this folder cannot be used."""
        return StoreError(f"durable folder {str(self.path)!r} is refused: {reason}")

    def close(self) -> None:
        """Give lock and descriptor back.  May be called twice."""
        for fd in (self._lock, self.fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self.fd = -1

    # -------------------------------------------------------------------- lock

    def lock(self) -> None:
        """Take the folder for this process.  Raises StoreError if another has it.

        Asks again for a moment: who looks at the folder holds the lock for an
        instant, and a process that was killed may not be gone yet.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | _SAFE, 0o600, dir_fd=self.fd)
            except OSError as error:
                raise self.refused(f"its lock cannot be opened: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise self.refused(f"it cannot be locked: {error.strerror}") from error
                if time.monotonic() < until:
                    time.sleep(_PATIENCE_S / 20)
                    continue
                raise self.refused(f"it is in use by {self.holder()}") from error
            # Its last user may have removed the file between our opening and
            # locking it: then the lock is nobody's, and we ask again.
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                os.close(fd)
                raise self.refused("its lock is no plain file")
            if found.st_nlink:
                self._lock = fd
                _LOCKED.add(self)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
                return
            os.close(fd)

    def holder(self) -> str:
        """Return who has the lock, as far as its file tells."""
        text = b""
        with contextlib.suppress(OSError, BadFile):
            fd, _ = self.open(LOCK)
            try:
                text = os.pread(fd, 200, 0)
            finally:
                os.close(fd)
        if found := re.fullmatch(rb"([0-9]{1,10}) ([A-Za-z0-9._-]{1,100})\n", text):
            return f"process {found[1].decode()} on {found[2].decode()}"
        return "another process"

    def in_use(self) -> bool:
        """Whether a process has the folder; asks without taking it."""
        try:
            fd, _ = self.open(LOCK)
        except (OSError, BadFile):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    # ------------------------------------------------------------------- files

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - of the descriptor, not of a path

    def strangers(self) -> list[str]:
        """Return the names that are none of ours."""
        return [name for name in self.names() if not _OURS.fullmatch(name)]

    def open(self, name: str) -> tuple[int, int]:
        """Return a descriptor to read a file, and its length.

        Raises
        ------
        OSError
            If there is none.
        BadFile
            If it is no plain file of this user.
        """
        try:
            fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise BadFile("it is a symbolic link, which is not followed") from error
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise BadFile("it is no plain file of yours")
        return fd, found.st_size

    def header(self, name: str) -> tuple[Header, bytes]:
        """Return header and table of a file.  Raises OSError, BadFile."""
        fd, size = self.open(name)
        try:
            header = parse_prelude(os.pread(fd, PRELUDE.size, 0), size)
            return header, os.pread(fd, header.table_bytes, PRELUDE.size)
        finally:
            os.close(fd)

    def read(self, name: str, file_bytes: int, offset: int, record: Array) -> None:
        """Fill `record` from a file that must still have `file_bytes`.  Raises OSError, BadFile."""
        fd, size = self.open(name)
        try:
            if size != file_bytes:
                raise BadFile(f"it has {size} bytes, not {file_bytes}: it was changed")
            view = memoryview(record)  # type: ignore[arg-type]
            while view:
                done = os.preadv(fd, [view[:_CHUNK]], offset)
                if done <= 0:
                    raise OSError(errno.EIO, "the file ends before its record does")
                offset += done
                view = view[done:]
        finally:
            os.close(fd)

    def publish(self, name: str, pieces: Sequence[bytes | Array], *, settled: bool = True) -> None:
        """Write a file and let it appear under `name` when its bytes are on the disk.

        With `settled` return when its name is, too; else that is left to the
        next one that waits for it.  Raises OSError.
        """
        temporary = _TEMPORARY + name
        self.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
        try:
            try:
                for piece in pieces:
                    _write(fd, memoryview(piece))  # type: ignore[arg-type]
                (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise
        if settled:
            os.fsync(self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there.  Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def clear(self, keep: Sequence[str] = ()) -> list[str]:
        """Remove the files of ours but those in `keep` and the lock; return their names."""
        gone = []
        for name in self.names():
            if name != LOCK and name not in keep and _OURS.fullmatch(name):
                with contextlib.suppress(OSError):  # a folder in place of a file, say
                    self.unlink(name)
                    gone.append(name)
        return gone

    def remove(self) -> None:
        """Remove our files, and the folder if it is empty then; held locked until it is gone."""
        if self.fd < 0:
            return  # let go of, after a fork
        self.clear()
        with contextlib.suppress(OSError):
            self.unlink(LOCK)
            self.path.rmdir()


def _write(fd: int, view: memoryview) -> None:
    while view:
        done = os.write(fd, view[:_CHUNK])
        if done <= 0:
            raise OSError(errno.EIO, "the file took no more bytes")
        view = view[done:]


def _reason(path: Path, error: OSError, create: bool) -> str:
    if path.is_symlink():
        return "it is a symbolic link; name the folder itself"
    if error.errno == errno.ENOTDIR:
        return "it is no folder; name one"
    if error.errno == errno.ENOENT:
        return f"{path.parent} does not exist; create it" if create else "it does not exist"
    return f"{error.strerror}; choose another"
