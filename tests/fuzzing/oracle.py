"""What a run must return: every state and tape kept, in deep copies."""

from __future__ import annotations

from typing import Any

from .cases import Case
from .contents import fingerprint
from .operators import Operators, copied
from .trees import deep, leaves


class NotRunnable(Exception):
    """The operators fail by themselves: the case says nothing."""


def store_all(case: Case) -> tuple[bytes, bytes]:
    """Return digests of the last state and of the gradient."""
    operators = Operators(case)
    start = state = operators.start()
    tapes = []
    try:
        for i in range(case.n):
            if not case.tape:
                tapes.append(deep(state))
                if case.in_place:
                    operators.run_in_place(state, i, i + 1)
                else:
                    state = operators.step(state, i)
            elif case.in_place:
                tapes.append(copied(operators, operators.tape_in_place(state, i)))
            else:
                state, tape = operators.tape_step(state, i)
                tapes.append(copied(operators, tape))
        last = fingerprint(leaves(state))
        adjoint: Any = deep(operators.begin(state, start))
        for i in reversed(range(case.n)):
            adjoint = operators.adjoint(tapes[i], adjoint, i)
    except Exception as error:
        raise NotRunnable(repr(error)) from error
    return last, fingerprint(leaves(adjoint))
