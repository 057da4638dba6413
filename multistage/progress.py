"""Progress bars over the forward and the reverse sweep."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Bars:
    """Two bars, one after the other; silent where nobody watches.

    Parameters
    ----------
    wanted : bool
        Even then, bars appear only where standard error is a terminal.
    """

    def __init__(self, wanted: bool) -> None:
        self.shown = wanted and sys.stderr.isatty()
        self._bar: tqdm[Any] | None = None
        self._n_steps: int | None = None
        self._reversing = False

    def start(self, n_steps: int | None) -> None:
        """Begin the forward bar."""
        if self.shown:
            self.close()
            self._n_steps, self._reversing = n_steps, False
            self._bar = _bar("forward", n_steps)

    def turn(self, forward_steps: int) -> None:
        """End the forward bar, begin the reverse one."""
        if self.shown:
            self.update(forward_steps, 0)
            self.close()
            self._reversing = True
            self._bar = _bar("reverse", self._n_steps or forward_steps)

    def update(self, forward_steps: int, reverse_steps: int) -> None:
        """Show how far the sweep is; called now and then."""
        if self._bar is not None:
            self._bar.update((reverse_steps if self._reversing else forward_steps) - self._bar.n)

    def close(self) -> None:
        """End the bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


def _bar(what: str, total: int | None) -> tqdm[Any]:
    bar: tqdm[Any] = tqdm(total=total, desc=what, unit=" steps", unit_scale=True, mininterval=0.1)
    return bar
