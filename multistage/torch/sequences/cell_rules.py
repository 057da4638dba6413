"""What a cell must do alike at every step and in every run, and the errors where it does not.

Steps are the first of a chunk and the one behind its last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from torch import Tensor

from ...errors import ArgumentError, StateError
from ..measurement.checking import Check, complain
from .facts import Facts


def require_known_wants(
    name: str,
    facts: Facts,
    wants: Sequence[bool],
    leaves: Sequence[Tensor],
    ys: Sequence[tuple[int, Sequence[Tensor]]],
    stop: int,
) -> None:
    """Raise StateError if a result takes part in the gradient that was not known to.

    Parameters
    ----------
    name, facts
        Of the cell.
    wants : sequence of bool
        Which leaves of the state before step `stop` take part.
    leaves : sequence of Tensor
        Of that state.
    ys : sequence of (t, leaves of y)
        Of the steps before it.
    stop : int
    """
    for i, (leaf, known) in enumerate(zip(leaves, wants, strict=True)):
        if leaf.requires_grad and not known:
            raise StateError(
                f"leaf {i} of the state of {name} takes part in the gradient after step "
                f"{stop - 1}, and did not after the first; let that leaf of "
                "state 0 require a gradient"
            )
    for t, of_step in ys:
        for j, leaf in enumerate(of_step):
            if leaf.requires_grad and not facts.differentiable[j]:
                raise StateError(
                    f"leaf {j} of y of {name} takes part in the gradient at step {t}, and did "
                    "not at the first; let it have a graph there too, as by adding 0 * h.sum()"
                )


def refuse_other_tensors(name: str, stop: int) -> NoReturn:
    """Raise StateError: other tensors than at first are one and the same before step `stop`."""
    raise StateError(
        f"{name} returned other tensors twice after step {stop - 1} "
        "when it was run again than at first; it must do the same every time"
    )


def refuse_written(name: str, steps: tuple[int, int]) -> NoReturn:
    """Raise StateError: an output was written to after it was returned."""
    first, last = steps
    raise StateError(
        f"{name} writes to an output of steps {first} to {last - 1} after it was "
        "returned; it must return tensors that it leaves alone: a copy"
    )


@contextlib.contextmanager
def refusing_writes(name: str, steps: tuple[int, int]) -> Iterator[None]:
    """Raise StateError where a cell writes to its state, a leaf where a chunk begins."""
    try:
        yield
    except RuntimeError as error:
        if "a leaf Variable that requires grad is being used in an in-place" not in str(error):
            raise
        raise StateError(
            f"{name} writes to the state it is given, or to a parameter, by an inplace operation "
            f"at steps {steps[0]} to {steps[1] - 1}; it must return new tensors"
        ) from error


def refuse_other_numbers(
    check: Check, name: str, steps: tuple[int, int], late: Sequence[str]
) -> None:
    """Raise StateError, or warn, as `check` has it: steps gave other numbers in a second run.

    `late` are names of buffers that they changed, and the first step did not.
    """
    first, last = steps
    if late:
        complain(
            check,
            f"{name} returned other numbers at steps {first} to {last - 1} when they were run "
            f"again than at first: results depend on {', '.join(late[:4])}, which changes at later "
            "steps and not in the first, so that it is no part of the state; change it from the "
            "first step on, or return it in the state",
        )
        return
    complain(
        check,
        f"{name} returned other numbers at steps {first} to {last - 1} when they "
        "were run again than at first: it must depend on its state, inputs, parameters and "
        "buffers alone; return what it remembers in the state, and choose deterministic "
        "operators (torch.use_deterministic_algorithms); other threads must not draw from the "
        "generators that it draws from, but from ones of their own",
    )


def refuse_unknown(name: str, leaves: Sequence[Tensor], steps: tuple[int, int]) -> None:
    """Raise ArgumentError if there are leaves of a graph that are no parameters known of."""
    first, last = steps
    for leaf in leaves:
        raise ArgumentError(
            f"{name} uses a tensor of shape {tuple(leaf.shape)} that wants a "
            f"gradient at steps {first} to {last - 1}, but did not at the first; give it in "
            "parameters=[...]"
        )
