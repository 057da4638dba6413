"""Progress bars: the one place that decides whether they are shown, and draws them.

`progress` is True (always), False (never) or None: on a terminal and in a
notebook, not in logs, nor in threads beside the
main one.  What None means can be set by the environment:
`MULTISTAGE_PROGRESS=0` or `1`.  Bars go to standard error, appear after half a
second and vanish at their end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Chain = TypeVar("Chain")

VARIABLE = "MULTISTAGE_PROGRESS"
_DELAY_S = 0.5  # what is over sooner needs no bar
_EVERY_S = 0.1
_PIECE_S = 0.2  # a bar that stands still for longer looks stuck


def is_shown(progress: bool | None) -> bool:
    """Return whether bars are shown.

    Examples
    --------
    >>> is_shown(True), is_shown(False)
    (True, False)
    """
    if progress is not None:
        return progress
    setting = os.environ.get(VARIABLE, "").strip().lower()
    if setting:
        return setting not in ("0", "no", "off", "false", "never")
    if threading.current_thread() is not threading.main_thread():
        return False  # several at work would write over one another
    if in_notebook():
        return True
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stream, or closed
        return False


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def _bar(what: str, total: int | None, unit: str) -> Any:
    """Return a bar of tqdm's, of the notebook where in one."""
    # Imported where a bar is drawn: tqdm.auto brings asyncio along.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets: it falls back to text
        from tqdm.auto import tqdm

        # Looks at the clock at each update; a monitor would be a thread more.
        quiet = type("Bar", (tqdm,), {"monitor_interval": 0})
        return quiet(
            total=total,
            desc=what,
            unit=unit,
            unit_scale=total is None or total >= 10_000,
            mininterval=_EVERY_S,
            miniters=1,
            delay=_DELAY_S,
            leave=False,
            **_size(),
        )


def _size() -> dict[str, Any]:
    """Return the size of bars: the terminal's as it changes, or a fixed one."""
    try:
        if os.get_terminal_size(sys.stderr.fileno()).columns > 0:
            return {"dynamic_ncols": True}
    except (AttributeError, ValueError, OSError):
        pass
    return {"ncols": 79, "nrows": 24}


@contextlib.contextmanager
def counting(
    what: str, total: int | None, progress: bool | None, unit: str = ""
) -> Iterator[Callable[[str], None]]:
    """Give a function that counts one on, with a word on what comes next; it does nothing unseen.

    Examples
    --------
    >>> with counting("planning", 2, progress=False) as tick:
    ...     tick("revolve")
    """
    if not is_shown(progress):
        yield _ignore
        return
    bar = _bar(what, total, unit)

    def tick(note: str = "") -> None:
        if note:
            bar.set_postfix_str(note, refresh=False)
        bar.update()

    try:
        yield tick
    finally:
        bar.close()


def _ignore(_note: str = "") -> None:
    return


class Bars:
    """Two bars, one after the other: over the forward and over the reverse sweep.

    Parameters
    ----------
    wanted : bool or None
        As `is_shown` takes it.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.shown = is_shown(wanted)
        self._bar: Any = None
        self._n_steps: int | None = None
        self._reversing = False

    def start(self, n_steps: int | None) -> None:
        """Begin the forward bar."""
        if self.shown:
            self.close()
            self._n_steps, self._reversing = n_steps, False
            self._bar = _bar("forward", n_steps, " steps")

    def turn(self, forward_steps: int) -> None:
        """End the forward bar, begin the reverse one."""
        if self.shown:
            self.update(forward_steps, 0)
            self.back(self._n_steps or forward_steps)

    def back(self, n_steps: int) -> None:
        """Begin the reverse bar."""
        if self.shown:
            self.close()
            self._reversing = True
            self._bar = _bar("reverse", n_steps, " steps")

    def update(self, forward_steps: int, reverse_steps: int) -> None:
        """Show how far the sweep is; called now and then."""
        if self._bar is not None:
            self._bar.update((reverse_steps if self._reversing else forward_steps) - self._bar.n)

    def watch(self, chain: Chain, step_s: float) -> Chain:
        """Return the chain, its long runs in pieces, between which the forward bar moves.

        A schedule may ask for many steps in one action, hours perhaps.
        """
        watched: Any = chain
        if self.shown:  # it has all that the chain has
            watched = _Watched(chain, max(1, int(_PIECE_S / step_s)), self)
        same: Chain = watched
        return same

    def advanced(self, steps: int) -> None:
        """Count steps of the forward sweep before `update` receives them."""
        if self._bar is not None and not self._reversing:
            self._bar.update(steps)

    def close(self) -> None:
        """End the bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


class _Watched:
    """A chain, all but `advance` its own."""

    def __init__(self, chain: Any, piece: int, bars: Bars) -> None:
        self._chain, self._piece, self._bars = chain, piece, bars

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chain, name)

    def advance(self, state: Any, start: int, stop: int) -> Any:
        advance, piece = self._chain.advance, self._piece
        while stop - start > piece:
            state = advance(state, start, start + piece)
            start += piece
            self._bars.advanced(piece)
        return advance(state, start, stop)
