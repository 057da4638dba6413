"""The stores of a run, from the first sweep to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

from ..backends.base import Store
from ..backends.lifetimes import Birth, end, forked
from ..durable.run import DurableRun
from ..states.layout import Layout
from ..support.interrupts import Shield


class OpenStores:
    """Opens the stores of a run and closes them, also of one that is dropped without `close`.

    Parameters
    ----------
    durable : DurableRun, optional
        Its folder is closed with the stores.
    """

    def __init__(self, durable: DurableRun | None = None) -> None:
        self._durable = durable
        self._opened: list[Store] = []
        self._birth = Birth.here()  # of what was opened
        self._dropped: weakref.finalize[..., OpenStores] | None = None

    def open(self, stores: Iterable[Store], layout: Layout) -> None:
        """Open stores for states of a layout, unless stores are open already.

        Raises
        ------
        StoreError
            If a store cannot be opened; `close` then closes those before it.
        """
        if self._opened:
            return
        self.begin()
        if self._dropped is not None:
            self._dropped.detach()
        # It must not refer to the executor: a step is often a method of the
        # object that has this run, which would then live forever.
        close = partial(_close, self._opened, self._durable)
        self._dropped = weakref.finalize(self, end, close, self._birth)
        self._dropped.atexit = False  # media have finalizers of their own
        with Shield(up=True):
            for store in stores:
                store.open(layout)
                self._opened.append(store)  # after an error these are closed again

    def begin(self) -> None:
        """Note that what is opened from now on is this process's."""
        self._birth = Birth.here()

    def close_stores(self) -> None:
        """Close the stores; a durable folder stays open."""
        _close(self._opened, None)

    def let_go(self) -> None:
        """Close the stores; a durable folder stays open, even when the run is dropped."""
        self.close_stores()
        if self._dropped is not None:
            self._dropped.detach()

    def close(self, *, keep: bool) -> None:
        """Close the stores and the durable folder, which is removed if the run is complete.

        Parameters
        ----------
        keep : bool
            Keep the folder, even of a complete run.
        """
        complete = self._durable is not None and self._durable.complete
        _close(self._opened, self._durable, remove=complete and not keep)

    def require_own(self) -> None:
        """Raise StoreError in a forked child, if the stores were opened by its parent."""
        attached = self._durable is not None and self._durable.attached
        if (self._opened or attached) and self._birth.foreign:
            raise forked("a Reversal with a tier")


def _close(opened: list[Store], durable: DurableRun | None, *, remove: bool = False) -> None:
    with Shield(up=True):
        try:
            with ExitStack() as every:  # though one of them fails
                for _ in opened:
                    every.callback(_close_last, opened)
        finally:
            if durable is not None:
                durable.close(remove=remove)


def _close_last(opened: list[Store]) -> None:
    try:
        opened[-1].close()
    except Exception:
        opened.pop()  # trying again would not help; after Ctrl-C it does
        raise
    opened.pop()
