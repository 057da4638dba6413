"""A folder of our own in a place that others may share, gone when we are.

Whom the files are safe from: every other user but root.  Who may rename
entries of a folder can put another in the place of ours, so a place is used
only where that takes its owner or root, and its owner is this user or root:
others may not write to it, or it has the sticky bit as /tmp and /dev/shm have.
What is opened in it is opened relative to the folder once looked at, and never
through a symbolic link, so that nothing said about a path can change between
the look and the use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import re
import secrets
import stat
import struct
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..support.interrupts import Shield
from .lifetimes import Ending

PREFIX = ".multistage-"
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{16}")
_LOCK = "lock"
_OURS = re.compile(r"[0-9]{1,20}|extents")  # beside the lock
_ACL = "system.posix_acl_access"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class PrivateFolder:
    """A folder of our own, locked for as long as we live.

    A lock, not a process number, shows whether the owner is alive: numbers are
    used again, and mean nothing to another container on the same disk.  The
    race: a folder exists for an instant before its lock is taken, and a
    neighbour that cleans up just then could take it for a leftover.  So a
    folder is a leftover only if its lock file holds our marker, which is
    written under the lock, and the process that takes a lock checks that the folder it
    belongs to is still there.

    The marker names the folder: one of another name, such as a copy, is not
    ours, nor is one that merely has a name like ours.  Of a leftover only
    files that we name so go, and the folder only if it is empty then.

    Parameters
    ----------
    parent : Path
        Where to make it.

    Attributes
    ----------
    path : Path
        For people to read.
    fd : int
        The folder itself, for code that opens files in it.

    Raises
    ------
    StoreError
        If the place cannot be used, or is not safe from others.
    """

    def __init__(self, parent: Path) -> None:
        with Shield(up=True):  # one that is made is also noted to be removed
            self._begin(parent)

    def _begin(self, parent: Path) -> None:
        try:
            place = os.open(parent, _FOLDER)
        except FileNotFoundError:
            raise _refused(parent, "it does not exist; create it") from None
        except NotADirectoryError:
            raise _refused(parent, "it is no folder; name one") from None
        except OSError as error:
            raise _refused(parent, f"{error}; choose another") from error
        try:
            reason = _unsafe(place, parent)
            if reason is not None:
                raise _refused(parent, reason)
            if not os.access(parent, os.W_OK | os.X_OK):
                raise _refused(
                    parent, "it cannot be written; choose another or change its permissions"
                )
            _clear_leftovers(place)
            try:
                name, self.fd, lock = _make(place)
            except OSError as error:
                raise _refused(parent, f"{error}; choose another") from error
        except BaseException:
            os.close(place)
            raise
        self.path = parent / name
        self._removal = Ending(self, partial(_remove, name, [place, self.fd, lock], os.getpid()))

    def remove(self) -> None:
        """Remove it.  May be called twice; interrupted, it can be called again and does the rest.

        It is removed as well when it is dropped, and when the interpreter ends.
        """
        self._removal()


def _refused(parent: Path, reason: str) -> StoreError:
    return StoreError(f"folder {str(parent)!r} cannot hold checkpoints: {reason}")


def _unsafe(place: int, parent: Path) -> str | None:
    """Return why others could exchange what lies in a folder, None if they cannot."""
    found = os.fstat(place)
    remedy = f"make one of your own, as with 'mkdir -m 700 {parent / 'own'}', and name that"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it is owned by user {found.st_uid}, not by you or root; {remedy}"
    if found.st_mode & stat.S_ISVTX:
        return None
    mode = f"mode {stat.S_IMODE(found.st_mode):o}, no sticky bit"
    if found.st_mode & stat.S_IWOTH:
        return f"others may write to it ({mode}); {remedy}"
    if not found.st_mode & stat.S_IWGRP:
        return None
    if not _is_alone(found.st_gid):
        return f"group {found.st_gid} may write to it ({mode}); {remedy}"
    # With an access control list the group's bits are the most that it grants anybody.
    if others := _named_writers(place):
        return f"its access control list lets {others} write to it; {remedy}"
    return None


def _is_alone(gid: int) -> bool:
    """Whether a group is this user's private one, which umask 002 lets write to everything.

    A group's member list leaves out the users whose primary group it is.  Where
    a directory service does not enumerate its users, its convention that a
    private group has its user's name is all there is.
    """
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    mine = {user.pw_uid, 0}
    return (
        group.gr_name == user.pw_name
        and gid == user.pw_gid
        and set(group.gr_mem) <= {user.pw_name}
        and not any(each.pw_gid == gid and each.pw_uid not in mine for each in pwd.getpwall())
    )


def _named_writers(place: int) -> str:
    """Return the users and groups, not ours alone, that a POSIX ACL lets write; "" if none.

    The attribute is a version, then entries of tag, permissions and number.
    """
    try:
        acl = os.getxattr(place, _ACL)
    except (AttributeError, OSError):  # none, or none on this system
        return ""
    user_tag, group_tag, write = 0x02, 0x08, 0o2
    found = []
    for tag, permissions, number in struct.iter_unpack("<HHI", acl[4:]):
        if not permissions & write:
            continue
        if tag == user_tag and number not in (os.geteuid(), 0):
            found.append(f"user {number}")
        elif tag == group_tag and not _is_alone(number):
            found.append(f"group {number}")
    return ", ".join(found)


def _make(place: int) -> tuple[str, int, int]:
    """Make a folder and lock it; return its name, the folder and the lock.  Raises OSError."""
    while True:
        name = PREFIX + secrets.token_hex(8)
        os.mkdir(name, 0o700, dir_fd=place)
        with contextlib.ExitStack() as undo:
            undo.callback(_discard, name, place)
            folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=place)
            undo.callback(os.close, folder)
            undo.callback(_empty, folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(_LOCK, flags, 0o600, dir_fd=folder)
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            left = _marker(name)
            while left:  # a write may be short
                done = os.write(lock, left)
                if not done:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
                left = left[done:]
            if _is_there(name, place, folder):
                undo.pop_all()
                return name, folder, lock


def _is_there(name: str, place: int, folder: int) -> bool:
    try:
        found = os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(folder))


def _remove(name: str, descriptors: list[int], owner: int) -> None:
    """Remove a folder; `descriptors` are those of its place, itself and its lock, while open.

    Interrupted, it can be called again.  Each descriptor leaves the list before it is closed:
    its number may be another file's after that.
    """
    if os.getpid() != owner:
        # A forked child inherits the duty to clean up at exit, but the folder
        # is still its parent's.
        return
    if len(descriptors) == 3:
        # First of all: to list a folder takes a descriptor, and there may be no
        # other.  A neighbour may help to clear up from here on.
        os.close(descriptors.pop())
    if len(descriptors) == 2:
        _empty(descriptors[-1])
        os.close(descriptors.pop())
    if descriptors:
        _discard(name, descriptors[-1])
        os.close(descriptors.pop())


def _marker(name: str) -> bytes:
    """Return what the lock file of a private folder holds."""
    return f"multistage private folder {name}\n".encode()


def _empty(folder: int) -> None:
    """Remove our files, the lock last: with it goes the mark of a leftover."""
    with contextlib.suppress(OSError):
        os.fchmod(folder, 0o700)  # the permissions may have been removed: the folder is ours
        names = [name for name in os.listdir(folder) if _OURS.fullmatch(name)]
        for name in (*names, _LOCK):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _discard(name: str, place: int) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=place)


def _clear_leftovers(place: int) -> None:
    """Remove what killed processes of this user left in a folder."""
    try:
        names = [name for name in os.listdir(place) if _NAME.fullmatch(name)]
    except OSError:
        return  # it may be written but not read: nothing to be seen, nothing to clear
    for name in names:
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=place)
            opened.callback(os.close, folder)
            if os.fstat(folder).st_uid != os.geteuid():
                continue
            # Not blocking: another user may have put a pipe there.
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(_LOCK, flags, dir_fd=folder)
            opened.callback(os.close, lock)
            marker = _marker(name)
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                continue
            if os.pread(lock, len(marker) + 1, 0) != marker:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(name, place, folder):
                _empty(folder)
                _discard(name, place)
