"""Ctrl-C, put off while something must not be left half done.

Python raises KeyboardInterrupt between any two instructions of the main
thread.  A store that was interrupted between noting a write and queueing it
would be waited for in vain; between making a folder and noting it, leave the
folder.  Such pieces are short; the exception is raised right after them.
"""

from __future__ import annotations

# What `signal` wraps, which makes an enumeration of each number: at 20 times the cost.
import _signal as signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class Shield:
    """Puts Ctrl-C off while it is `up`; a second one is raised at once.

    Works in the main thread, the only one that Ctrl-C is raised in, and with
    whatever handler is installed; elsewhere it does nothing.  May be nested.

    Parameters
    ----------
    up : bool
        Whether it is up from the beginning; else `up` is set by its user, and
        `let_go` called after.

    Examples
    --------
    >>> with Shield(up=True):
    ...     pass  # Ctrl-C in here is raised at the end of the block
    """

    __slots__ = ("_installed", "_previous", "pending", "up")

    def __init__(self, up: bool = False) -> None:
        self.up = up
        self.pending = False
        self._previous: object = None
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):  # not ignored, nor left to the system
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
                if self.pending and not self.up:
                    self.__exit__(None, None, None)
                    return self.__enter__()  # the handler of before went on
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            if signal.getsignal(signal.SIGINT) == self._handle:  # not replaced by another
                assert callable(self._previous)
                signal.signal(signal.SIGINT, self._previous)
            self._installed = False
        self.up = False
        self.let_go()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Raised while the handler is being set or reset it would stay forever.
        if (self.up and not self.pending) or self._changes(frame):
            self.pending = True
            return
        self.pending = False
        assert callable(self._previous)
        self._previous(number, frame)

    def _changes(self, frame: FrameType | None) -> bool:
        """Whether `__enter__` or `__exit__` was interrupted, in a frame or in what that called."""
        if frame is not None and frame.f_code is _CLOSING and frame.f_locals.get("self") is self:
            return True  # before it could say so; what it calls may be interrupted twice
        while frame is not None:
            if frame.f_code in _CHANGING and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False

    def let_go(self) -> None:
        """Raise what was put off."""
        if self.pending:
            self.pending = False
            assert callable(self._previous)
            self._previous(signal.SIGINT, None)


def whole(opening: Callable[[], object], close: Callable[[], object]) -> None:
    """Open something, or nothing where Ctrl-C comes meanwhile.

    Parameters
    ----------
    opening : callable
        Leaves nothing open when it raises.
    close : callable
        Closes what it opened.
    """
    is_open = False
    try:
        with Shield(up=True):
            opening()
            is_open = True
    except BaseException:
        if is_open:
            close()
        raise


class Opened(Shield):
    """Something that is open in a block and closed after it, wherever Ctrl-C comes.

    Parameters
    ----------
    opening : callable
        Leaves nothing open when it raises.
    close : callable

    Examples
    --------
    >>> with Opened(lambda: print("open"), lambda: print("closed")):
    ...     print("used")
    open
    used
    closed
    """

    __slots__ = ("_close", "_is_open", "_opening")

    def __init__(self, opening: Callable[[], object], close: Callable[[], object]) -> None:
        super().__init__(up=True)
        self._opening, self._close = opening, close
        self._is_open = False

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._begin()
            self._is_open = True
            self.up = False
            self.let_go()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.up = True
        try:
            if self._is_open:
                self._end()
        finally:
            super().__exit__(*error)

    def _begin(self) -> None:
        self._opening()

    def _end(self) -> None:
        self._close()


_CLOSING = Opened.__exit__.__code__
_CHANGING = (Shield.__enter__.__code__, Shield.__exit__.__code__)
