"""How large a tape is: what the arrays take that it refers to, and no other tape does."""

from __future__ import annotations

from .sharing import Unseen, arrays_in, owner

# How many tapes are held when one is weighed: each time twice as many, so that
# tapes which grow are noticed early and weighing takes next to no time.
WEIGHED = frozenset(1 << k for k in range(1, 40))


def own_bytes(tape: object, beside: object) -> int:
    """Return the bytes that a tape holds and the one `beside` it does not.

    What two tapes share, such as a table both refer to, is held anyway.  A
    view counts as the whole array behind it, which it keeps alive.  Of an
    object that cannot be looked into nothing counts.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.zeros(100)
    >>> own_bytes((table, np.zeros(3)), (table, np.zeros(2)))
    24
    """
    others = _held(beside)
    return sum(nbytes for address, nbytes in _held(tape).items() if address not in others)


def _held(tape: object) -> dict[int, int]:
    """Return the bytes of all arrays behind a tape, by where they lie."""
    found: dict[int, int] = {}
    try:
        for array in arrays_in(tape):
            whole = owner(array)
            address = whole.__array_interface__["data"][0]
            found[address] = max(whole.nbytes, found.get(address, 0))
    except Unseen:
        pass  # what was seen before counts
    return found
