"""The check of a chain: the model and the chain, once each, compared bit for bit.

Planning trusts what was seen when its stages were profiled.  The
check looks at the whole once: from the same state of the generators the model runs plainly
and the chain runs by its plan, forward and backward; outputs, gradients, buffers,
attributes and the generators' states must then be the same.

It takes one run forward and backward of each, and stays within the plan's limit: the
model's own tapes are held in windows (`plainly`), gradients are fingerprinted as they
come and dropped, and all is put back.  No `.grad` is touched; hooks on gradients do not
fire but for those that forward itself sets on its tensors; forward hooks do.

What it cannot see: what happens only later (a counter that reaches a threshold, a flag that
is set in epoch 3), on other values of the input, in another mode or kind of input than the
one checked; hooks on gradients; and parameters that no output's gradient reaches.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from ...errors import ArgumentError, DifferenceWarning, StateError
from ..environment.scope import Scope
from .both_ways import Both, NotAlone
from .comparing import agree, bits, differences, listed, projected
from .exploring import Call
from .measure import Profile
from .plainly import TooDear

Check: TypeAlias = Literal["error", "warn", "off"]
CHECKS = ("error", "warn", "off")

# Room that there is always: as much as a checksum takes.
_LEAST = 1 << 16


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found.

    Attributes
    ----------
    outcome : str
        "equal", or why less than everything is known to be equal.
    seconds : float
        It took.
    """

    outcome: str
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether repeated runs are to be bit-identical: no difference was found."""
        return not self.outcome.startswith(("agrees", "differs"))

    def __str__(self) -> str:
        return f"{self.outcome} ({self.seconds:.2g} s)" if self.seconds else self.outcome


def checked_choice(check: object) -> Check:
    """Return a choice of check.  Raises ArgumentError for another value."""
    if check not in CHECKS:
        raise ArgumentError(f"check={check!r} is not known; choose one of {CHECKS}")
    return check  # type: ignore[return-value]


def complain(check: Check, message: str) -> None:
    """Raise StateError, or warn."""
    if check == "error":
        raise StateError(message)
    warnings.warn(message, DifferenceWarning, stacklevel=2)


def check_chain(
    reference: Call,
    chain: Call,
    sample: object,
    *,
    name: str,
    stages: Sequence[Call],
    room_bytes: float,
    writes: bool,
    check: Check,
    targets: Sequence[Tensor] | None = None,
    rounded: str | None = None,
) -> Checked:
    """Compare a chain with the model it comes from, on a sample.

    Parameters
    ----------
    reference, chain : callables
        The model, and the chain by its plan; take the sample.
    sample : pytree
    name : str
        Of the model, for messages.
    stages : sequence of callables
        What the two consist of.
    room_bytes : float
        For what the plain run saves; see `room_for_tapes`.
    writes : bool
        Whether the sample is written to.
    check : {"error", "warn"}
    targets : sequence of Tensor, optional
        Whose gradients are compared, beside the sample's; default: all leaves.  These may
        have graphs of their own, which are kept.
    rounded : str, optional
        The outcome where the two agree to rounding; by default they must be equal.

    Raises
    ------
    StateError
        If the two differ; the message names the first module where they do.
    """
    began = time.perf_counter()
    both = Both(stages, sample, writes, room_bytes, targets)
    try:
        outcome = _compared(both, reference, chain, name, check, rounded)
    except TooDear:
        outcome = "not checked; forward differentiates what the limit does not hold"
    finally:
        both.snapshot.restore()
    return Checked(outcome, time.perf_counter() - began)


def _compared(
    both: Both, reference: Call, chain: Call, name: str, check: Check, rounded: str | None
) -> str:
    plainly = both.plainly(reference)
    try:
        plain = both.seen(plainly, bits)
        outcome = "equal"
    except TooDear:
        both.snapshot.restore()
        plain = both.seen(reference, None)
        outcome = "equal; gradients not compared, the limit holds too little of plain training"
    except NotAlone as error:
        both.snapshot.restore()
        plain = both.seen(reference, None)
        outcome = f"equal; gradients not compared, {error}"
    except RuntimeError as error:  # of autograd: as training itself would end
        return f"not checked; plain training of {name} fails: {str(error).partition(chr(10))[0]}"
    look = bits if outcome == "equal" else None
    ours = both.seen(chain, look)
    if plain == ours:
        return outcome
    # Before anyone is blamed: does the model do the same twice?
    again = both.seen(plainly if look else reference, look)
    varying = differences(plain, again)
    if varying:
        sizes = None if look is None else projected
        runs = [both.seen(plainly if look else reference, sizes) for _ in range(2)]
        runs.append(both.seen(chain, sizes))
        if all(agree(runs[0], run) for run in runs[1:]):
            return "agrees to rounding; the model's operators are not deterministic"
        message = (
            f"{name} returns other numbers each time it is run, though buffers, attributes and "
            f"the generators of torch, Python and NumPy were put back ({listed(varying)} differ); "
            "what is run again would differ too: keep such state in a buffer or draw from those "
            "generators, or continue with check='warn'"
        )
    else:
        sizes = None if rounded is None or look is None else projected
        if sizes and agree(*[both.seen(call, sizes) for call in (plainly, chain)]):
            return rounded or ""
        found = differences(plain, ours)
        where = both.first_module(reference, chain, found)
        message = (
            f"the chain does not do what {name} does: {listed(found)} "
            f"{'differs' if len(found) == 1 else 'differ'}{where}; what depends on more than its "
            "input, buffers and random generators must be kept outside of the model (or in its "
            "buffers), or continue with check='warn'"
        )
    complain(check, message)
    return f"differs: {message}"


def room_for_tapes(profile: Profile, stages: Sequence[Call], limit_bytes: int | None) -> float:
    """Return how much a plain run may save within a limit, beside what it works on."""
    if limit_bytes is None:
        return float("inf")
    costs = profile.costs
    forward = backward = in_flight = 0
    given, given_gradient = costs.input_bytes, costs.input_gradient_bytes
    for group, stage in zip(profile.groups, costs.stages, strict=True):
        over = max(stage.forward_overhead_bytes, stage.tape_overhead_bytes)
        forward = max(forward, given + stage.output_bytes + over)
        gradients = stage.gradient_bytes + given_gradient
        backward = max(backward, gradients + stage.backward_overhead_bytes)
        # While the model runs again no gradient of a parameter is being computed.
        modules = Scope([stages[i] for i in group]).modules
        largest = max((p.nbytes for m in modules for p in m.parameters(False)), default=0)
        over = max(0, stage.backward_overhead_bytes - largest)
        in_flight = max(in_flight, gradients + over)
        given, given_gradient = stage.output_bytes, stage.gradient_bytes
    left = limit_bytes - costs.input_bytes - given - max(forward + in_flight, backward)
    return max(left, _LEAST)


# --------------------------------------------------------------------- looking


# -------------------------------------------------------------------- comparing
