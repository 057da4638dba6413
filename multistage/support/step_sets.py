"""Compact sets and maps of steps: a few bytes per stored checkpoint, not hundreds.

A sequence of millions of steps has as many stored checkpoints, whose
bookkeeping stays in fast memory.  A Python set or dict takes 100 to 250 bytes
for each, as much as a small state.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

_PAGE_BITS = 10
_PAGE = 1 << _PAGE_BITS
_NEAR = 8


class StepSet:
    """A set of steps as bits, in pages of 1024 steps.

    A step takes 1/8 byte times the distance to its neighbours, at most what
    an entry of a set takes.

    Examples
    --------
    >>> steps = StepSet()
    >>> steps.add(5); steps.add(7000); 5 in steps, 6 in steps, len(steps)
    (True, False, 2)
    >>> list(steps), list(steps.descending(6000))
    ([5, 7000], [5])
    """

    __slots__ = ("_length", "_pages")

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, step: int) -> bool:
        return bool(self._pages.get(step >> _PAGE_BITS, 0) >> (step & _PAGE - 1) & 1)

    def add(self, step: int) -> None:
        """Put a step in; again changes nothing."""
        page, bit = step >> _PAGE_BITS, 1 << (step & _PAGE - 1)
        bits = self._pages.get(page, 0)
        if not bits & bit:
            self._pages[page] = bits | bit
            self._length += 1

    def discard(self, step: int) -> None:
        """Take a step out if it is in."""
        page, bit = step >> _PAGE_BITS, 1 << (step & _PAGE - 1)
        bits = self._pages.get(page, 0)
        if bits & bit:
            if bits == bit:
                del self._pages[page]
            else:
                self._pages[page] = bits ^ bit
            self._length -= 1

    def __iter__(self) -> Iterator[int]:
        return reversed(list(self.descending()))

    def descending(self, last: int | None = None) -> Iterator[int]:
        """Yield the steps up to `last` (all, if None), the largest first."""
        for page in sorted(self._pages, reverse=True):
            bits = self._pages.get(page, 0)  # steps may go while we look
            if last is not None and page >= last >> _PAGE_BITS:
                if page > last >> _PAGE_BITS:
                    continue
                bits &= (2 << (last & _PAGE - 1)) - 1
            while bits:
                top = bits.bit_length() - 1
                yield page << _PAGE_BITS | top
                bits ^= 1 << top


class StepMap:
    """A map from steps to numbers of 63 bits; 16 bytes an entry if steps come in order.

    Entries are kept sorted in two arrays.  What comes out of order goes to a
    dict; that costs memory, nothing else.

    Examples
    --------
    >>> numbers = StepMap()
    >>> numbers[3] = 40; numbers[9] = 50; numbers[4] = 60
    >>> numbers.get(3), numbers.get(4), numbers.get(5), len(numbers)
    (40, 60, None, 3)
    >>> numbers.pop(9), numbers.pop(9), len(numbers)
    (50, None, 2)
    """

    __slots__ = ("_length", "_others", "_steps", "_values")

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("q")  # -1 where the entry is gone
        self._others: dict[int, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length + len(self._others)

    def _place(self, step: int) -> int:
        """Return where `step` stands in the arrays, -1 if nowhere."""
        steps = self._steps
        if not steps or step > steps[-1]:
            return -1
        # Forward and reverse sweeps ask for what is near the end.
        near = len(steps) - _NEAR
        at = bisect_left(steps, step, near if near > 0 and steps[near] <= step else 0)
        return at if steps[at] == step else -1

    def get(self, step: int) -> int | None:
        """Return the number of `step`, None if it has none."""
        at = self._place(step)
        if at >= 0 and self._values[at] >= 0:
            return self._values[at]
        return self._others.get(step) if self._others else None

    def __setitem__(self, step: int, value: int) -> None:
        steps, values = self._steps, self._values
        if not steps or step > steps[-1]:
            self._others.pop(step, None)
            steps.append(step)
            values.append(value)
            self._length += 1
            return
        at = self._place(step)
        if at < 0:
            self._others[step] = value
            return
        self._length += values[at] < 0
        values[at] = value

    def pop(self, step: int) -> int | None:
        """Take `step` out; return its number, None if it had none."""
        at = self._place(step)
        if at < 0 or self._values[at] < 0:
            return self._others.pop(step, None)
        steps, values = self._steps, self._values
        value = values[at]
        values[at] = -1
        self._length -= 1
        while values and values[-1] < 0:
            values.pop()
            steps.pop()
        return value

    def clear(self) -> None:
        """Take everything out."""
        self.__init__()  # type: ignore[misc]
