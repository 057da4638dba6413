"""A folder that outlives its process: ours alone, locked, addressed by descriptor.

Anyone who can write to the folder controls what a resumed run computes, so a
folder of another user, or one that others may write to, is refused.  Files
are opened relative to the folder's descriptor, never through a symbolic link,
and must be plain files of this user.

A name proves nothing: a file is this run's if it begins with our magic and
with the run's number, which the lock holds before any other file is there.
No other file is ever removed, replaced or written to; one that changes
between the check and the removal is recognised by its inode.

A file appears under its name only when all its bytes are on the disk (`NewFile`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..states.layout import Array
from ..support.interrupts import Opened, Shield
from .headers import IDENTITY_BYTES, BadFile, Header, holder_of, lock_of, read_header, run_of

RUN, LAST, LOCK = "run", "last", "lock"
LEFTOVERS = ("tmp-", "probe-")  # of no use to a resumed run
_NAME = r"(?:run|last|lock|(?:states|probe|adjoint)-[0-9]{1,12})"
_FINAL = re.compile(_NAME)
_TEMPORARY = re.compile(f"tmp-([0-9a-f]{{32}})-{_NAME}")
# What systems put into folders by themselves: names of open files that were removed (NFS, FUSE),
# what file managers note.
SYSTEMS = re.compile(
    r"\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+|\.DS_Store|\._.*|\.directory|Thumbs\.db|desktop\.ini",
    re.IGNORECASE,
)
_NO_PLAIN = "it is no plain file of yours"
_PATIENCE_S = 0.5
_CHUNK = 4 << 20
# Flags that platforms may lack.  Without NONBLOCK a FIFO in place of a file would hang us.
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_RDWR | _SAFE
_NAMELESS: int = getattr(os, "O_TMPFILE", 0)  # asked for only where there are such
# What a file system answers that has no files without a name, or cannot link them.
_NO_LINKS = {
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOENT,
    errno.EXDEV,
    errno.EMLINK,
}


# A forked child shares our lock, and might outlive us: it must release it, or
# the run that we leave could not be resumed.
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

    Attributes
    ----------
    run : bytes
        Number of the run that has the folder, known once it is locked.
    made : bool
        Whether it was made here.
    nameless : bool
        Whether files without a name work there, as far as is known.

    Raises
    ------
    StoreError
        If it cannot be used: rule, values, remedy.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self.run = bytes(16)
        self.made = False
        self.nameless = hasattr(os, "O_TMPFILE")
        self._descriptors: list[int] = []  # the folder's, and that of its lock
        # Also of one that is dropped, as where Ctrl-C comes before it has a name.
        self._closing = weakref.finalize(self, _close, self._descriptors)
        self._closing.atexit = False
        while self.fd < 0:
            there = False
            try:
                with Shield(up=True):
                    if create:
                        try:
                            path.mkdir(0o700)
                            self.made = True
                        except FileExistsError:
                            there = True
                    flags = os.O_RDONLY | os.O_DIRECTORY | _SAFE
                    self._descriptors.append(os.open(path, flags))
            except FileNotFoundError as error:
                if not there or path.is_symlink():
                    raise self.refused(_reason(path, error, create)) from error
                # Its last user removed it just now: make it again.
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

    @property
    def fd(self) -> int:
        """Its descriptor, -1 once it is closed."""
        return self._descriptors[0] if self._descriptors else -1

    def close(self) -> None:
        """Give lock and descriptor back.  May be called twice."""
        with Shield(up=True):
            self._closing()

    # -------------------------------------------------------------------- lock

    def lock(self) -> bool:
        """Take the folder for this process; False if its last user has removed it meanwhile.

        Asks again for a moment: who looks at the folder holds the lock for an
        instant, and a process that was killed may not be gone yet.

        Raises
        ------
        StoreError
            If another process has it, or its lock is no file of a durable run.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with Shield(up=True):  # what is locked is also known to be
                    taken = self._locked()
            except BlockingIOError as error:
                if time.monotonic() < until:
                    time.sleep(_PATIENCE_S / 20)
                    continue
                raise self.refused(
                    f"it is in use by {self.holder()}; wait for that run to end, or name another "
                    "folder"
                ) from error
            if taken is not None:
                return taken

    def _locked(self) -> bool | None:
        """Take the folder; None if that is to be tried again at once.

        Raises BlockingIOError if another process has it.
        """
        try:
            fd = self._lock_file()
        except FileExistsError:  # made by another at the same moment
            return None
        except OSError as error:
            if not self._is_there():
                return False
            raise self.refused(f"its lock cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise
            raise self.refused(f"it cannot be locked: {error.strerror}") from error
        # Its last user may have removed the file between our opening and
        # locking it: then no process holds the lock, and we try again.
        if not os.fstat(fd).st_nlink:
            os.close(fd)
            return None
        self._descriptors.append(fd)
        _LOCKED.add(self)
        try:
            found = self.owner(RUN) or run_of(os.pread(fd, IDENTITY_BYTES, 0))
            assert found is not None  # as when it was opened: a lock is never replaced
            self.number(found)
        except OSError as error:
            raise self.refused(f"its lock cannot be written: {error.strerror}") from error
        return True

    def _is_there(self) -> bool:
        """Whether the folder's path still leads to it."""
        try:
            return os.path.samestat(self.path.stat(follow_symlinks=False), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _lock_file(self) -> int:
        """Return a descriptor of the lock, made if there is none.  Raises OSError, StoreError."""
        try:
            with self.open(LOCK, os.O_RDWR) as file:
                if run_of(os.pread(file.fd, IDENTITY_BYTES, 0)) is not None:
                    return file.keep()
        except FileNotFoundError:
            self.run = os.urandom(16)
            with NewFile(self, LOCK) as file:
                # Locked before it appears, so that no other takes it for a leftover.
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(lock_of(self.run))
                file.synchronize()
                # A lock is never replaced: it may be another's since a moment ago.
                if not file.appear(replace=False):
                    raise FileExistsError(errno.EEXIST, "it was made just now") from None
                return file.keep()
        except BadFile as error:
            raise self.refused(f"its file {LOCK!r} cannot be used: {error}") from error
        raise self.refused(
            f"its file {LOCK!r} was not written by a durable run; name another folder"
        )

    def number(self, run: bytes) -> None:
        """Say in the lock which run has the folder, before it writes a file."""
        self.run = run
        lock = self._descriptors[1]
        os.pwrite(lock, lock_of(self.run), 0)
        _synchronize(lock)

    def holder(self) -> str:
        """Return the holder of the lock, as far as its file names it."""
        with contextlib.suppress(OSError, BadFile):
            return holder_of(self.header(LOCK))
        return "another process"

    def in_use(self) -> bool:
        """Whether a process has the folder; asks without taking it."""
        if self.owner(LOCK) is None:
            return False
        try:
            with self.open(LOCK) as file:
                try:
                    fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return True
        except (OSError, BadFile):
            pass
        return False

    # ------------------------------------------------------------------- files

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - of the descriptor, not of a path

    def strangers(self) -> list[str]:
        """Return the names that neither a durable run nor the system itself uses."""
        known = _FINAL, _TEMPORARY, SYSTEMS
        return [n for n in self.names() if not any(each.fullmatch(n) for each in known)]

    def owner(self, name: str) -> bytes | None:
        """Return the number of the run that wrote a file, None if none did or that is unknown."""
        found = self._look(name)
        return None if found is None else found[0]

    def _look(self, name: str) -> tuple[bytes, os.stat_result] | None:
        """Return the number of the run that wrote a file, and which file that is."""
        temporary = _TEMPORARY.fullmatch(name)
        if not temporary and not _FINAL.fullmatch(name):
            return None
        try:
            with self.open(name) as file:
                found = os.fstat(file.fd)
                # One that was not finished may hold nothing yet: its name says whose it is.
                run = (
                    bytes.fromhex(temporary[1])
                    if temporary
                    else run_of(os.pread(file.fd, IDENTITY_BYTES, 0))
                )
        except (OSError, BadFile):
            return None
        return None if run is None else (run, found)

    def known(self) -> bytes | None:
        """Return the number of the run whose folder this is, None if it is no run's."""
        return self.owner(RUN) or self.owner(LOCK)

    def ours(self, run: bytes | None) -> list[str]:
        """Return the names of the files that a run wrote, its lock last."""
        names = [] if run is None else [n for n in self.names() if self.owner(n) == run]
        return sorted(names, key=lambda name: name == LOCK)

    def others(self, run: bytes | None) -> list[str]:
        """Return the names of files that a run might have, but did not write."""
        return [
            name
            for name in self.names()
            if _FINAL.fullmatch(name) and (run is None or self.owner(name) != run)
        ]

    def open(self, name: str, flags: int = os.O_RDONLY) -> OpenFile:
        """Return a file for a block in which it is open.

        Raises
        ------
        OSError
            From the block's beginning, if there is none.
        BadFile
            Likewise, if it is no plain file of this user.
        """
        return OpenFile(partial(self._descriptor, name, flags))

    def _descriptor(self, name: str, flags: int) -> int:
        try:
            fd = os.open(name, flags | _SAFE, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                raise BadFile("it is a symbolic link, which is not followed") from error
            if error.errno in (errno.EISDIR, errno.ENXIO):
                raise BadFile(_NO_PLAIN) from error
            raise
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise BadFile(_NO_PLAIN)
        return fd

    def header(self, name: str) -> Header:
        """Return the header of a file.  Raises OSError, BadFile."""
        with self.open(name) as file:
            return read_header(partial(os.pread, file.fd), file.nbytes)

    def read(self, name: str, file_bytes: int, offset: int, record: Array) -> None:
        """Fill `record` from a file that must still have `file_bytes`.  Raises OSError, BadFile."""
        with self.open(name) as file:
            size = file.nbytes
            if size != file_bytes:
                raise BadFile(f"it has {size} bytes, not {file_bytes}: it was changed")
            view = memoryview(record)  # type: ignore[arg-type]
            while view:
                done = os.preadv(file.fd, [view[:_CHUNK]], offset)
                if done <= 0:
                    raise OSError(errno.EIO, "the file ends before its record does")
                offset += done
                view = view[done:]

    def publish(self, name: str, pieces: Sequence[bytes | Array], *, settled: bool = True) -> None:
        """Write a file and let it appear under `name` when its bytes are on the disk.

        A file of this run that has the name is replaced, another is not.

        With `settled` return when its name is on the disk, too; else that is
        left to the next one that waits for it.  Raises OSError.
        """
        with NewFile(self, name) as file:
            for piece in pieces:
                file.write(piece)
            file.synchronize()
            if not file.appear():
                raise OSError(errno.EEXIST, f"a file {name!r} is there that this run did not write")
        if settled:
            os.fsync(self.fd)

    def unlink(self, name: str) -> bool:
        """Remove a file of this run; False if there is none, or another in its place.

        Raises OSError.
        """
        found = self._look(name)
        if found is None or found[0] != self.run:
            return False
        try:
            now = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if not os.path.samestat(now, found[1]):
                return False
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        return True

    def clear(self, keep: Sequence[str] = ()) -> None:
        """Remove this run's files but those in `keep` and the lock."""
        for name in self.ours(self.run):
            if name != LOCK and name not in keep:
                with contextlib.suppress(OSError):
                    self.unlink(name)

    def remove(self) -> None:
        """Remove our files, and the folder if it is empty then; held locked until it is gone."""
        if self.fd < 0:
            return  # released, after a fork
        with contextlib.suppress(OSError):  # what cannot be removed stays, for the next run
            self.clear()
            self.unlink(LOCK)
            if self._is_there():
                self.path.rmdir()


class OpenFile(Opened):
    """A file that is open in a block, closed after it wherever Ctrl-C comes.

    Parameters
    ----------
    opener : callable
        Returns its descriptor.

    Attributes
    ----------
    fd : int
    """

    __slots__ = ("_opener", "fd")

    def __init__(self, opener: Callable[[], int]) -> None:
        super().__init__(opener, opener)
        self._opener = opener
        self.fd = -1

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return os.fstat(self.fd).st_size

    def keep(self) -> int:
        """Return the descriptor, which is the caller's from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def _begin(self) -> None:
        self.fd = self._opener()

    def _end(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class NewFile(OpenFile):
    """A file on its way into a folder.

    It shows only once it is complete.  It is written without a name and then linked; where
    the file system cannot do that, under a name that holds the number of the run, from which
    a leftover is removed before.

    Parameters
    ----------
    folder : Folder
        Whether files without a name work there is noted in it.
    name : str
        It shall have.

    Raises
    ------
    OSError
        From the block's beginning.
    """

    __slots__ = ("_folder", "_has_name", "_name", "_temporary")

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__(partial(os.open, ".", _NEW | _NAMELESS, 0o600, dir_fd=folder.fd))
        self._folder, self._name = folder, name
        self._temporary = f"tmp-{folder.run.hex()}-{name}"
        self._has_name = False

    def _begin(self) -> None:
        if self._folder.nameless:
            try:
                super()._begin()
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._folder.nameless = False
            else:
                return
        self._folder.unlink(self._temporary)
        flags = _NEW | os.O_CREAT | os.O_EXCL
        self.fd = os.open(self._temporary, flags, 0o600, dir_fd=self._folder.fd)
        self._has_name = True

    def _end(self) -> None:
        super()._end()
        if self._has_name:
            with contextlib.suppress(OSError):
                self._folder.unlink(self._temporary)

    def write(self, piece: bytes | Array) -> None:
        """Append bytes.  Raises OSError."""
        view = memoryview(piece)  # type: ignore[arg-type]
        while view:
            done = os.write(self.fd, view[:_CHUNK])
            if done <= 0:
                raise OSError(errno.EIO, "the file took no more bytes")
            view = view[done:]

    def synchronize(self) -> None:
        """Return when the bytes are on the disk.  Raises OSError."""
        _synchronize(self.fd)

    def appear(self, *, replace: bool = True) -> bool:
        """Give the written file its name; False if another file keeps it.

        Parameters
        ----------
        replace : bool
            Whether a file of this run that has the name is replaced.

        Raises
        ------
        OSError
        """
        source: tuple[str, int | None] = (f"/proc/self/fd/{self.fd}", None)
        if self._has_name:
            source = self._temporary, self._folder.fd
        for _ in range(2):
            try:
                os.link(source[0], self._name, src_dir_fd=source[1], dst_dir_fd=self._folder.fd)
            except FileExistsError:
                if not replace or not self._folder.unlink(self._name):
                    return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._rename(replace)
            else:
                return True
        return False

    def _rename(self, replace: bool) -> bool:
        """Do what `appear` does where files cannot be linked."""
        if not self._has_name:  # no /proc, say: copy it into a file that has a name
            return self._copied(replace)
        folder = self._folder
        try:
            os.stat(self._name, dir_fd=folder.fd, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if not replace or folder.owner(self._name) != folder.run:
                return False
        os.rename(self._temporary, self._name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        return True

    def _copied(self, replace: bool) -> bool:
        self._folder.nameless = False
        with NewFile(self._folder, self._name) as copy:
            for at in range(0, self.nbytes, _CHUNK):
                copy.write(os.pread(self.fd, _CHUNK, at))
            copy.synchronize()
            return copy.appear(replace=replace)


def _synchronize(fd: int) -> None:
    """Return when the bytes of a file are on the disk.  Raises OSError."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def _close(descriptors: list[int]) -> None:
    """Close what is open, each once: the lock before its folder."""
    while descriptors:
        os.close(descriptors.pop())


def _reason(path: Path, error: OSError, create: bool) -> str:
    if path.is_symlink():
        return "it is a symbolic link; name the folder itself"
    if error.errno == errno.ENOTDIR:
        return "it is no folder; name one"
    if error.errno == errno.ENOENT:
        if not create:
            return "it does not exist"
        if not path.parent.exists():
            return f"{path.parent} does not exist; create it"
    return f"{error.strerror}; choose another"
