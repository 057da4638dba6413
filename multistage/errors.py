"""Every error and warning multistage raises, in one tree.

A message states the rule that was broken, the values seen and the remedy.
"""


class MultistageError(Exception):
    """Base of every error raised by multistage."""


class ArgumentError(MultistageError, ValueError):
    """An argument breaks a rule; raised before any step runs."""


class BudgetError(ArgumentError):
    """The memory budget is too small for any schedule."""


class StateError(MultistageError, ValueError):
    """A state is no pytree of plain arrays, or changed its layout between steps."""


class ScheduleError(MultistageError):
    """A schedule broke the rules of `multistage.check`.

    Attributes
    ----------
    index : int or None
        0-based position of the offending action, or the number of actions
        when the schedule ended too early; None where nobody counted.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message if index is None else f"action {index}: {message}")
        self.index = index


class ScheduleUsedError(ScheduleError, StopIteration):
    """A schedule that serves one adjoint calculation was asked for another.

    It ends a loop over the schedule as any iterator ends.
    """


class StoreError(MultistageError):
    """A slow tier cannot be used at all (a folder that cannot be written, say)."""


class ShotError(MultistageError):
    """One of many shots failed; the cause is attached.

    Attributes
    ----------
    shot : int
        Its position among the shots, from 0.
    """

    def __init__(self, shot: int, reason: str) -> None:
        super().__init__(shot, reason)  # both: a worker's error travels as its arguments
        self.shot = shot

    def __str__(self) -> str:
        return f"shot {self.shot} failed: {self.args[1]}"


class CheckpointWarning(UserWarning):
    """A checkpoint was refused or lost; the run goes on and recomputes it."""


class SlowWarning(UserWarning):
    """The C core is not there, and slower Python works in its place; results are the same."""
