"""Files of a durable folder that are open: to be read, or to be written.

One that is written shows only once it is complete.  It is written without a name and then
linked; where the file system cannot do that, under a name that holds the number of the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from functools import partial

from ..states.layout import Array
from ..support.interrupts import Opened

CHUNK = 4 << 20
# Flags that platforms may lack.  Without NONBLOCK a FIFO in place of a file would hang us.
SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_RDWR | SAFE
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

    Parameters
    ----------
    folder_fd : int
    name : str
        It shall have.
    temporary : str
        The name it has before, if it needs one; a leftover of that name is removed.
    unlink : callable
        `unlink(name)` removes a file of this run; False if there is none, or another.
    nameless : bool
        Whether to try without a name.

    Attributes
    ----------
    nameless : bool
        Whether files without a name work here, as far as this one has shown.

    Raises
    ------
    OSError
        From the block's beginning.
    """

    __slots__ = ("_folder_fd", "_has_name", "_name", "_temporary", "_unlink", "nameless")

    def __init__(
        self,
        folder_fd: int,
        name: str,
        temporary: str,
        unlink: Callable[[str], bool],
        *,
        nameless: bool,
    ) -> None:
        super().__init__(partial(os.open, ".", _NEW | _NAMELESS, 0o600, dir_fd=folder_fd))
        self._folder_fd, self._name = folder_fd, name
        self._temporary, self._unlink = temporary, unlink
        self.nameless, self._has_name = nameless, False

    def _begin(self) -> None:
        if self.nameless:
            try:
                super()._begin()
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self.nameless = False
            else:
                return
        self._unlink(self._temporary)
        flags = _NEW | os.O_CREAT | os.O_EXCL
        self.fd = os.open(self._temporary, flags, 0o600, dir_fd=self._folder_fd)
        self._has_name = True

    def _end(self) -> None:
        super()._end()
        if self._has_name:
            with contextlib.suppress(OSError):
                self._unlink(self._temporary)

    def write(self, piece: bytes | Array) -> None:
        """Append bytes.  Raises OSError."""
        view = memoryview(piece)  # type: ignore[arg-type]
        while view:
            done = os.write(self.fd, view[:CHUNK])
            if done <= 0:
                raise OSError(errno.EIO, "the file took no more bytes")
            view = view[done:]

    def synchronize(self) -> None:
        """Return when the bytes are on the disk.  Raises OSError."""
        synchronize(self.fd)

    def appear(self, replace: Callable[[str], bool] | None) -> bool:
        """Give the written file its name; False if another file keeps it.

        Parameters
        ----------
        replace : callable or None
            Whether a file of that name may be replaced; None: none is.

        Raises
        ------
        OSError
        """
        source: tuple[str, int | None] = (f"/proc/self/fd/{self.fd}", None)
        if self._has_name:
            source = self._temporary, self._folder_fd
        for _ in range(2):
            try:
                os.link(source[0], self._name, src_dir_fd=source[1], dst_dir_fd=self._folder_fd)
            except FileExistsError:
                if replace is None or not self._unlink(self._name):
                    return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._rename(replace)
            else:
                return True
        return False

    def _rename(self, replace: Callable[[str], bool] | None) -> bool:
        """Do what `appear` does where files cannot be linked."""
        if not self._has_name:  # no /proc, say: copy it into a file that has a name
            return self._copied(replace)
        try:
            os.stat(self._name, dir_fd=self._folder_fd, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if replace is None or not replace(self._name):
                return False
        os.rename(
            self._temporary, self._name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd
        )
        return True

    def _copied(self, replace: Callable[[str], bool] | None) -> bool:
        self.nameless = False
        with NewFile(
            self._folder_fd, self._name, self._temporary, self._unlink, nameless=False
        ) as copy:
            for at in range(0, self.nbytes, CHUNK):
                copy.write(os.pread(self.fd, CHUNK, at))
            copy.synchronize()
            return copy.appear(replace)


def synchronize(fd: int) -> None:
    """Return when the bytes of a file are on the disk.  Raises OSError."""
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)
