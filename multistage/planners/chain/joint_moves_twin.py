"""The random moves of `native/joint_search.c`, number for number."""

from __future__ import annotations

from ...support.arrays import Bytes
from .joint_core import APART, KEEPS_TAPE, RESERVE_AT, STARTS, STATE_AWAY, TAPE_AWAY

_WORD = (1 << 64) - 1


class Draw:
    """Random whole numbers, as `drawn` of joint_search.c makes them."""

    def __init__(self, state: int) -> None:
        self.state = state

    def below(self, most: int) -> int:
        """Return the next number, below `most`."""
        state = self.state
        state ^= (state << 13) & _WORD
        state ^= state >> 7
        state ^= (state << 17) & _WORD
        self.state = state
        return (state >> 20) % most


def _set(fates: Bytes, i: int, mask: int, flags: int) -> None:
    fates[i] = (int(fates[i]) & ~mask & 255) | flags


def move(fates: Bytes, n: int, draw: Draw) -> bool:
    """Change a plan a little; False if the move has no place here."""
    i, kind = draw.below(n), draw.below(11)
    j = min(n - 1, i + draw.below(n if n - 1 < 8 else 9))
    each = 3 << RESERVE_AT
    match kind:
        case 0 | 1 | 2:
            fates[i] ^= (TAPE_AWAY, STATE_AWAY, STARTS)[kind]
        case 3:
            fates[i] = (int(fates[i]) ^ KEEPS_TAPE) | STARTS
            if i + 1 < n:
                fates[i + 1] |= STARTS
        case 4 | 5:
            away = (TAPE_AWAY if draw.below(2) else 0) if kind == 5 else 0
            for z in range(i, j + 1):
                if kind == 4:
                    _set(fates, z, KEEPS_TAPE | STARTS, STARTS if z == i else 0)
                else:
                    _set(fates, z, TAPE_AWAY, KEEPS_TAPE | STARTS | away)
            if j + 1 < n:
                fates[j + 1] |= STARTS
        case 6:
            _set(fates, i, each, draw.below(4) << RESERVE_AT)
        case 7:
            reserve = draw.below(4) << RESERVE_AT
            for z in range(n):
                _set(fates, z, each, reserve)
        case 8:
            both = TAPE_AWAY | STATE_AWAY
            away = both if draw.below(2) else 0
            for z in range(i, j + 1):
                _set(fates, z, both, away)
        case 9:
            far = 1 + draw.below(2)
            o = i + far if draw.below(2) else i - far
            if i < 1 or o < 1 or o >= n or not (int(fates[i]) | int(fates[o])) & STARTS:
                return False
            both = STARTS | STATE_AWAY
            mine, other = int(fates[i]) & both, int(fates[o]) & both
            _set(fates, i, both, other)
            _set(fates, o, both, mine)
        case _:
            fates[i] = (int(fates[i]) ^ APART) | STARTS
    return True
